"""Messages to token ids and back: one interface (`Renderer`), two classes.

`ChatRenderer` serves models with a chat template, in the template's own dialect of tool calls (`dialects`),
`CompactRenderer` the bundled models. `SCHEMAS` are the built-in tools in OpenAI's format. Imports records, errors and
the foundations; no torch.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import UserError
from etude.renderers.arguments import fitted, read_call, typed_argument
from etude.renderers.base import (
    LONGEST_TOKEN,
    TITLE,
    Message,
    ParsedTurn,
    PlainEncoder,
    Renderer,
    Tool,
    ToolError,
    content_text,
    document_text,
    escaped,
    load_tokenizer,
    one_line,
    printable,
    printable_json,
)
from etude.renderers.chat import ChatRenderer
from etude.renderers.compact import CompactRenderer, is_compact
from etude.renderers.dialects import DIALECTS
from etude.renderers.middle import middle_prompt, tokens_before
from etude.renderers.notes import note_place
from etude.renderers.schemas import COMPACT_PARAMETERS, SCHEMAS, named
from etude.renderers.template import ChatTemplate, load_template, read_json, template_source, with_chat_template
from etude.renderers.trial import thought_tags

PUBLIC = ("",)


def renderer_for(
    model_dir: Path,
    dialect: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    tools: bool = True,
) -> Renderer:
    """The renderer of a Hugging Face model folder. With `dialect` None or "auto" the tokenizer and the chat template,
    which gets the variables `chat_template_kwargs`, decide the dialect. Without `tools` a template that cannot call
    tools is accepted, too; its `prompt` refuses them. Raises UserError if files are missing, or if the chat template
    cannot be used turn by turn or has an unknown dialect."""
    names = ("compact", *(known.name for known in DIALECTS))
    if dialect not in (None, "auto", *names):
        raise UserError(f"There is no dialect {dialect!r}; known: auto, {', '.join(names)}.")
    tokenizer = load_tokenizer(model_dir)
    if dialect in (None, "auto"):
        dialect = "compact" if is_compact(tokenizer) else None
    if dialect == "compact":
        if chat_template_kwargs:
            raise UserError("The compact dialect has no chat template: leave chat_template_kwargs out.")
        return CompactRenderer(tokenizer)
    template = load_template(model_dir).with_variables(chat_template_kwargs or {})
    # The tokens at which the model ends a turn, by its generation configuration.
    ids = read_json(model_dir / "generation_config.json").get("eos_token_id")
    eos_ids = [each for each in (ids if isinstance(ids, list) else [ids]) if isinstance(each, int)]
    return ChatRenderer(tokenizer, template, eos_ids, dialect, tools=tools)


def say_dropped(renderer: Renderer | None) -> None:
    """Prints a note if the chat template silently leaves out a part of conversations."""
    if isinstance(renderer, ChatRenderer) and renderer.note:
        print(f"note: {renderer.note}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class DialectVerdict:
    """Whether a model folder can call tools: the name of its dialect and the number of calls that a turn may have
    (None: any number), or a sentence that refuses it, with `dialect` ""."""

    dialect: str
    calls_per_turn: int | None = None
    refusal: str = ""


def dialect_verdict(model_dir: Path, chat_template_kwargs: Mapping[str, Any] | None = None) -> DialectVerdict:
    """The verdict on a model folder's tokenizer and chat template, by the round trip of `renderer_for`. Raises no
    UserError."""
    try:
        renderer = renderer_for(model_dir, None, chat_template_kwargs)
    except UserError as e:
        return DialectVerdict("", 0, str(e))
    return DialectVerdict(renderer.dialect, renderer.calls_per_turn if isinstance(renderer, ChatRenderer) else None)
