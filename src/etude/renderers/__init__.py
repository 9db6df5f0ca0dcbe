"""Messages to token ids and back: one interface (`Renderer`), two dialects.

`HermesRenderer` serves models with a chat template and tool calls in JSON, `CompactRenderer` the bundled models.
Imports records, errors and what lies below; no torch. Public: the names in `__all__`, `schemas.SCHEMAS` (the built-in
tools in OpenAI's format), and the helpers for text in `text.py`.
"""

from pathlib import Path

from etude.errors import UserError
from etude.renderers.base import Message, ParsedTurn, Renderer, Tool, load_tokenizer
from etude.renderers.compact import CompactRenderer
from etude.renderers.hermes import HermesRenderer
from etude.renderers.template import load_template, read_json

__all__ = ["Message", "ParsedTurn", "Renderer", "Tool", "renderer_for"]

DIALECTS = ("compact", "hermes")


def renderer_for(model_dir: Path, dialect: str | None = None) -> Renderer:
    """The renderer of a Hugging Face model folder; `dialect` None or "auto" is found from the tokenizer. Raises
    UserError if the folder lacks the files, or its chat template cannot be used turn by turn."""
    if dialect not in (None, "auto", *DIALECTS):
        raise UserError(f"There is no dialect {dialect!r}; known: auto, {', '.join(DIALECTS)}.")
    tokenizer = load_tokenizer(model_dir)
    if dialect in (None, "auto"):
        dialect = "compact" if tokenizer.token_to_id("<|call|>") is not None else "hermes"
    if dialect == "compact":
        return CompactRenderer(tokenizer)
    template = load_template(model_dir)
    # At these the model itself ends a turn, as its generation configuration says.
    ids = read_json(model_dir / "generation_config.json").get("eos_token_id")
    return HermesRenderer(tokenizer, template, ids if isinstance(ids, list) else [] if ids is None else [ids])
