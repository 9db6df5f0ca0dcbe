"""A finding about a model folder, the edits that mend it, and the folder's files as the checks read them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from etude.config import CHAT_TEMPLATES
from etude.errors import UserError
from etude.models import check_safetensors, headers, shards
from etude.renderers import ChatTemplate, load_template, load_tokenizer, read_json, template_source

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_MAP = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"

Severity = Literal["fault", "note"]


@dataclass(frozen=True)
class ConfigEdit:
    """A new value in a JSON file, at a path of keys and indices; None removes it. Without a path it is the whole text
    of the file."""

    file: str
    path: tuple[str | int, ...]
    value: Any

    def __str__(self) -> str:
        if not self.path:
            return f"{self.file}: written anew"
        shown = json.dumps(self.value, ensure_ascii=False)
        where = ".".join(map(str, self.path))
        return f"{self.file}: {where} " + ("removed" if self.value is None else f"= {shown[:80]}")


@dataclass(frozen=True)
class Finding:
    """A fault or a note of a model folder, in one sentence. `edits` mend it. `stops`: etude itself would train or
    publish something wrong, so that no stage begins."""

    name: str
    severity: Severity
    sentence: str
    edits: tuple[ConfigEdit, ...] = ()
    stops: bool = False


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in a safetensors file; `start` and `stop` are its bytes there."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


class ModelFiles:
    """The files of a model folder, each read once. What cannot be read is a finding in `unreadable`, and counts as
    empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unreadable: list[Finding] = []
        self.config = self._json(CONFIG, stops=True)
        self.generation = self._json(GENERATION, stops=True, edits=(ConfigEdit(GENERATION, (), "{}\n"),))
        self.tokenizer_config = self._json(TOKENIZER_CONFIG, stops=True)
        self.special_map = self._json(SPECIAL_MAP, edits=(ConfigEdit(SPECIAL_MAP, (), "{}\n"),))
        self.tokenizer = self._tokenizer()
        self.template = self._template()
        self.doubled: list[str] = []  # tensors of several files
        self.tensors = self._tensors()

    @property
    def text(self) -> Mapping[str, Any]:
        """The configuration of the text model."""
        return as_object(self.config.get("text_config")) or self.config

    def of_config(self, key: str) -> Any:
        """A value of the text model, else of the whole configuration."""
        return self.text.get(key, self.config.get(key))

    def edits_of_config(self, key: str, value: Any) -> tuple[ConfigEdit, ...]:
        """The edits that set a key of config.json, wherever it stands."""
        nested = self.text is not self.config
        paths = [("text_config", key)] if nested and key in self.text else []
        return tuple(
            ConfigEdit(CONFIG, path, value) for path in [*paths, *([(key,)] if key in self.config or not paths else [])]
        )

    def edits_of_template(self, source: str) -> tuple[ConfigEdit, ...]:
        """The edits that give the folder another chat template, where readers of either kind look for it."""
        held = self.tokenizer_config.get("chat_template")
        also = () if held is None else (ConfigEdit(TOKENIZER_CONFIG, ("chat_template",), source),)
        return (ConfigEdit(TEMPLATE, (), source), *also)

    def edits_of_bundled(self) -> tuple[ConfigEdit, ...]:
        """The edits that take the bundled chat template, if the model marks turns as it does."""
        begin, end = "<|im_start|>", "<|im_end|>"
        ids = self.ids(self.of_config("eos_token_id"), self.generation.get("eos_token_id"))
        ends = self.token("eos_token") == end or self.vocabulary.get(end) in ids
        fits = ends and {begin, end} <= {*self.vocabulary}
        return self.edits_of_template(template_source(CHAT_TEMPLATES[0])) if fits else ()

    def token(self, kind: str) -> str | None:
        """The name that the tokenizer's configuration gives to a kind of token, such as "eos_token". Older folders
        name tokens in special_tokens_map.json alone."""
        return content(self.tokenizer_config.get(kind, self.special_map.get(kind)))

    @cached_property
    def added(self) -> Mapping[int, Any]:
        """The tokenizer's added tokens by id."""
        return {} if self.tokenizer is None else self.tokenizer.get_added_tokens_decoder()

    @property
    def decoder(self) -> dict[str, Any]:
        """The added tokens that tokenizer_config.json names, by their ids as texts."""
        held = as_object(self.tokenizer_config.get("added_tokens_decoder"))
        return {number: token for number, token in held.items() if number.isdecimal() and isinstance(token, dict)}

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Ids of all tokens by name."""
        return {} if self.tokenizer is None else self.tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def names(self) -> Mapping[int, str]:
        """Names of all tokens by id."""
        return {number: name for name, number in self.vocabulary.items()}

    @cached_property
    def embedding(self) -> HeaderEntry | None:
        """The tensor of input embeddings."""
        ends = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "embeddings.weight")
        names = sorted((n for n in self.tensors if n.endswith(ends) and "vision" not in n), key=len)
        first = self.tensors[names[0]] if names else None
        return first if first is not None and len(first.shape) == 2 and all(first.shape) else None

    @property
    def rows(self) -> int | None:
        """The number of ids that the model has embeddings for."""
        size = self.of_config("vocab_size")
        return self.embedding.shape[0] if self.embedding is not None else size if is_number(size) else None

    def ids(self, *values: Any) -> list[Any]:
        """Token ids in values of configurations: each a number, a list, or nothing."""
        ids: list[Any] = []
        for value in values:
            ids.extend(as_list(value) or (value,))
        return [each for each in ids if each is not None and each != []]

    def _json(self, name: str, *, stops: bool = False, edits: Sequence[ConfigEdit] = ()) -> dict[str, Any]:
        try:
            return read_json(self.folder / name)
        except UserError as e:
            self.unreadable.append(Finding("files", "fault", str(e), tuple(edits), stops=stops))
            return {}

    def _tokenizer(self) -> Tokenizer | None:
        try:
            return load_tokenizer(self.folder)
        except UserError as e:
            self.unreadable.append(Finding("tokenizer", "fault", str(e)))
            return None

    def _template(self) -> ChatTemplate | None:
        if not self.tokenizer_config.get("chat_template") and not (self.folder / TEMPLATE).is_file():
            return None
        try:
            return load_template(self.folder)
        except (UserError, UnicodeDecodeError, TypeError) as e:
            edits = () if self.unreadable else self.edits_of_bundled()
            self.unreadable.append(Finding("template", "fault", str(e), edits))
            return None

    def _tensors(self) -> dict[str, HeaderEntry]:
        tensors: dict[str, HeaderEntry] = {}
        try:
            for file in shards(self.folder):
                check_safetensors(file)
            begins = {file: _data_begins(file) for file in shards(self.folder)}
            for file, name, about in headers(self.folder):
                start, stop = (offset + begins[file] for offset in about["data_offsets"])
                if name in tensors:
                    self.doubled.append(name)
                tensors[name] = HeaderEntry(file, tuple(about["shape"]), about["dtype"], start, stop)
        except (UserError, OSError) as e:
            self.unreadable.append(Finding("files", "fault", str(e), stops=True))
        return tensors


def _data_begins(file: Path) -> int:
    with file.open("rb") as f:
        return 8 + struct.unpack("<Q", f.read(8))[0]


def content(token: Any) -> str | None:
    """The name of a token in a tokenizer's configuration."""
    named = as_object(token).get("content") if isinstance(token, dict) else token
    return named if isinstance(named, str) else None


def as_object(value: Any) -> dict[str, Any]:
    """An object of a JSON file; {} for any other value."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """A list of a JSON file; [] for any other value."""
    return cast(list[Any], value) if isinstance(value, list) else []


def is_number(value: Any) -> bool:
    """Whether a value of a configuration is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def listed(names: Iterable[Any]) -> str:
    """Up to three names, and how many more there are."""
    shown = [str(name) for name in names]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
