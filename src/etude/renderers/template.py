"""Chat templates of Hugging Face model folders, rendered without importing transformers."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from etude import runfolder
from etude.config import CHAT_TEMPLATES, cache
from etude.errors import UserError
from etude.renderers.base import Message, Tool

TEMPLATES = Path(__file__).parent / "templates"

_OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token", "documents"}


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training masks; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled template with the tokens and the date for its variables. The date is that of loading: a prompt that
    changed at midnight would differ between the members of a group. Raises UserError."""

    def __init__(self, source: str, variables: Mapping[str, Any], name: str) -> None:
        self.source = source
        self.name = name
        self._variables = dict(variables)
        self._kwargs: dict[str, Any] = {}
        now = datetime.now()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = now.strftime
        try:
            parsed = environment.parse(source)
            self._known = jinja2.meta.find_undeclared_variables(parsed) - _OURS
            self._template = environment.from_string(parsed)
        except jinja2.TemplateError as e:
            raise UserError(
                f"The chat template of {name} is not valid ({e}); give another with --chat-template."
            ) from None

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), generate: bool = True) -> str:
        """The conversation as text; with `generate`, ending with the generation prompt. Raises jinja2.TemplateError."""
        inputs: dict[str, Any] = {"messages": list(messages), "tools": list(tools) or None}
        try:
            return self._template.render(**self._variables | self._kwargs, **inputs, add_generation_prompt=generate)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
            raise jinja2.TemplateRuntimeError(f"{type(e).__name__}: {e}") from None

    def with_variables(self, chat_template_kwargs: Mapping[str, Any]) -> Self:
        """The same template with further variables, such as `enable_thinking`. Raises UserError for unknown ones."""
        unknown = sorted(set(chat_template_kwargs) - self._known)
        if unknown:
            known = ", ".join(sorted(self._known)) or "none"
            raise UserError(f"The chat template of {self.name} has no variable {unknown[0]!r}; it has: {known}.")
        other = copy(self)
        other._kwargs = self._kwargs | dict(chat_template_kwargs)
        return other

    @property
    def variables(self) -> frozenset[str]:
        """The names of its variables besides the messages, the tools and the tokens."""
        return frozenset(self._known)

    @property
    def eos_token(self) -> str:
        """The token that ends a text by the tokenizer's configuration, or ""."""
        return str(self._variables.get("eos_token") or "")

    @property
    def digest(self) -> str:
        """The source and the variables as one text, for a digest."""
        return f"{self.source}\n{json.dumps(self._kwargs, sort_keys=True)}"


def load_template(folder: Path) -> ChatTemplate:
    """The chat template of a model folder. Raises UserError if it has none."""
    config = read_json(folder / "tokenizer_config.json")
    source: Any = config.get("chat_template")
    if (path := folder / "chat_template.jinja").is_file():
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("tool_use") or named.get("default")
    if not source:
        raise UserError(
            f"{folder} has no chat template (chat_template.jinja); give one with --chat-template, or use a model that "
            "was tuned to chat."
        )
    variables = {key: _token(value) for key, value in config.items() if key.endswith("_token") and value}
    return ChatTemplate(source, variables, folder.name)


def with_chat_template(folder: Path, template: str) -> Path:
    """A folder in the user's cache with the files of a model folder as links and another chat template: a Jinja file,
    or the name of a bundled one. A missing `folder` is returned unchanged. Raises UserError for a missing template."""
    source, own = template_source(template), "chat_template.jinja"
    if not folder.is_dir():
        return folder
    files = sorted(path for path in folder.absolute().iterdir() if path.is_file() and path.name != own)
    known = "\n".join([str(folder.absolute()), *(path.name for path in files), source])
    made = cache() / "templates" / hashlib.sha256(known.encode()).hexdigest()[:12] / folder.name

    def write(into: Path) -> None:
        for path in files:
            (into / path.name).symlink_to(path)
        (into / own).write_text(source, encoding="utf-8")

    runfolder.make_whole(made, write)
    return made


def template_source(template: str) -> str:
    """The text of a template: a Jinja file, or the name of a bundled one. Raises UserError."""
    path = TEMPLATES / f"{template}.jinja" if template in CHAT_TEMPLATES else Path(template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"{template} is not a chat template that can be read: give a Jinja file, or the name of a bundled one "
            f"({', '.join(CHAT_TEMPLATES)})"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file. Raises UserError for any other content."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not valid JSON ({e}); download the model again.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold a JSON object; download the model again.")
    return data


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> Callable[[], str]:
    raise jinja2.TemplateError(message)
