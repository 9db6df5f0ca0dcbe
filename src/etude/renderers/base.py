"""The interface of a dialect for the agent loop, a tokenisation of text that never yields a special token, and helpers
that make arbitrary text valid for records, tokenizers and single lines."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from etude.errors import UserError
from etude.records import ToolCall

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]  # OpenAI chat format: role, content, tool_calls, tool_call_id
Tool = Mapping[str, Any]  # OpenAI tool format: {"type": "function", "function": {"name", "description", "parameters"}}
ROLES = ("system", "user", "assistant", "tool")
_DEEPEST = 100  # lists and objects within each other, in arguments: readers in Python end at some hundreds
TITLE = 200  # largest number of characters of a title


class ToolError(Exception):
    """A call that cannot be executed; the message is for the model."""


@dataclass(frozen=True)
class ParsedTurn:
    """A sampled turn as text: its text besides calls, the reasoning before it, and the calls in order, with the model's
    ids of calls ("" or absent in dialects without ids)."""

    text: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""
    ids: tuple[str, ...] = ()

    def openai(self, prefix: str) -> dict[str, Any]:
        """The assistant message of an OpenAI chat completion. Call ids are the model's, or `prefix` and a number. The
        format has no malformed calls, so their name and error are part of the content."""
        ids = self.ids or ("",) * len(self.calls)
        calls = [
            {
                "id": ids[i] or f"{prefix}{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for i, call in enumerate(self.calls)
            if call.arguments is not None
        ]
        broken = [f"[malformed call {c.name}: {c.error}]" for c in self.calls if c.arguments is None]
        content = "\n".join(filter(None, [self.text, *broken]))
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        return message | ({"tool_calls": calls} if calls else {})


class Renderer(Protocol):
    """One dialect of one tokenizer. Stateless between calls; every returned list of ids is a new one."""

    dialect: str  # "compact", or a name of `dialects.DIALECTS`
    digest: str  # blake3 of the tokenizer and template; two processes that exchange ids must agree on it
    stop_ids: tuple[int, ...]  # ids that end a turn

    @property
    def thinks(self) -> bool:
        """Whether thoughts have tags, so that an open one can be closed."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a conversation, ending with the generation prompt. Raises ValueError for an unknown role."""
        ...

    def parse(self, ids: Sequence[int], finish_reason: str = "stop", tools: Sequence[Tool] = ()) -> ParsedTurn:
        """The calls of a sampled turn. Never raises: a malformed call has arguments None and an error. `tools` are
        those of the prompt: in some dialects their schemas decide whether a value is a text or a number."""
        ...

    def bridge(
        self, sampled_ids: Sequence[int], finish_reason: str, results: Sequence[str], request: str = ""
    ) -> list[int]:
        """Ids from the end of a sampled turn to the start of the next one, with the tools' results and then a user's
        `request`, if there is one, in between. Raises UserError if the template has no place for a request."""
        ...

    def end_of_thought(self, ids: Sequence[int]) -> list[int]:
        """Ids that close the thought in which the sampled ids end; none if no thought is open."""
        ...

    def plain(self, text: str) -> list[int]:
        """Ids of text as ordinary tokens only."""
        ...

    def follow(self, sampled_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids from the end of a sampled turn to the start of the next one, with any messages in between. Raises
        ValueError for roles or an order that the dialect refuses."""
        ...

    def turn(self, message: Message) -> list[int]:
        """Ids of an assistant's message as a model samples it: from the end of the generation prompt to the token that
        ends the turn. These are the tokens to train on. Raises ValueError if the dialect cannot write the message
        behind its generation prompt."""
        ...

    def document(self, title: str, text: str) -> list[int]:
        """Ids of a document, which precedes all messages, as ordinary tokens only."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """A view for people: special tokens by name, invalid UTF-8 replaced."""
        ...


LONGEST_TOKEN = 64
"""Bound on the average characters of a token over a whole prompt: a longer prompt is refused without being encoded."""

_CACHED_CHARACTERS = 4000


class PlainEncoder:
    """Encodes any text without yielding one of `forbidden` (special and added tokens)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.forbidden = frozenset(added)
        self._plain = _without_added_tokens(tokenizer)
        # A cache, since prompts and results repeat: members of a group share a prompt, and most results are short.
        # As arrays, since clients choose the texts and lists of numbers take ten times the memory.
        self._short = lru_cache(maxsize=2048)(lambda text: array("i", self._encode(text)))
        self._document = lru_cache(maxsize=512)(self._encode)
        anchor = next((i for i, token in added.items() if token.special), None)
        if anchor is not None and not _agree(tokenizer, self._plain, added[anchor].content):
            # SentencePiece tokenizers put a space before text encoded alone, but not after a special token.
            self._plain = _without_added_tokens(tokenizer, prepend="never")
            if not _agree(tokenizer, self._plain, added[anchor].content):
                raise UserError(
                    "The tokenizer encodes text after a special token differently than alone; use another model."
                )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, ordinary tokens only."""
        text = printable(text)  # JSON escapes and file names may hold half of a surrogate pair
        return list(self._short(text) if len(text) <= _CACHED_CHARACTERS else self._encode(text))

    def document(self, title: str, text: str) -> list[int]:
        """Ids of a document, ordinary tokens only. A cache serves all episodes of a repository."""
        return list(self._document(printable(document_text(title, text))))

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self.forbidden.isdisjoint(ids):
            return ids
        # Some models have the names of special tokens in their vocabulary: cut such a name in two.
        at = next(i for i, token in enumerate(ids) if token in self.forbidden)
        start, end = encoding.offsets[at]
        if end - start < 2:
            raise UserError(f"The tokenizer encodes {text[start:end]!r} as a special token; use another model.")
        return self._encode(text[: start + 1]) + self._encode(text[start + 1 :])


class TextCodec:
    """The common part of the dialects: text becomes ordinary tokens, and ids become text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encoder = PlainEncoder(tokenizer)

    def plain(self, text: str) -> list[int]:
        """See `Renderer.plain`."""
        return self._encoder.encode(text)

    def document(self, title: str, text: str) -> list[int]:
        """See `Renderer.document`."""
        return self._encoder.document(title, text)

    def text(self, ids: Sequence[int]) -> str:
        """See `Renderer.text`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False) if ids else ""


def _without_added_tokens(tokenizer: Tokenizer, prepend: str | None = None) -> Tokenizer:
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = []
    config["post_processor"] = None
    if prepend is not None:
        for part in _parts(config.get("pre_tokenizer")):
            if part.get("type") == "Metaspace":
                part["prepend_scheme"] = prepend
    return type(tokenizer).from_str(json.dumps(config))


def _parts(component: Any) -> Iterable[dict[str, Any]]:
    if isinstance(component, dict):
        yield component
        for key in ("pretokenizers", "normalizers"):
            for part in component.get(key, ()):
                yield from _parts(part)


def _agree(tokenizer: Tokenizer, plain: Tokenizer, special: str) -> bool:
    samples = ("word", " two words", "\n\tdef f(x):\n        return -1\n", "ünïcode ")
    return all(
        tokenizer.encode(special + sample, add_special_tokens=False).ids[1:]
        == plain.encode(sample, add_special_tokens=False).ids
        for sample in samples
    )


def checked(name: str, arguments: dict[str, object]) -> ToolCall:
    """A call with these arguments, or a malformed call if JSON or a record cannot hold them."""
    try:
        if fault := unlike_json(arguments):
            return malformed(name, f"arguments are not JSON: {fault}")
        msgspec.msgpack.encode((name, arguments))
    except (OverflowError, UnicodeEncodeError, RecursionError, TypeError, ValueError) as e:
        whys = {OverflowError: "a number has more than 64 bits", UnicodeEncodeError: "half of a surrogate pair"}
        return malformed(name, f"arguments cannot be recorded: {whys.get(type(e), type(e).__name__)}")
    return ToolCall(name=name, arguments=arguments)


def unlike_json(value: object, depth: int = 0) -> str:
    """The part of a value that JSON or its readers lack, as a reason; "" without."""
    if depth > _DEEPEST:
        return f"they are nested more than {_DEEPEST} deep"
    if isinstance(value, dict | list):
        names, parts = (value, value.values()) if isinstance(value, dict) else ((), value)
        odd = next((f"the name {key!r} is no text" for key in names if not isinstance(key, str)), "")
        return odd or next(filter(None, (unlike_json(part, depth + 1) for part in parts)), "")
    if isinstance(value, float) and not math.isfinite(value):
        return f"{json.dumps(value)} is no number"
    return "" if value is None or isinstance(value, str | int | float) else f"{type(value).__name__} is no type"


def malformed(name: str, error: str) -> ToolCall:
    """A call that cannot be executed. The name may be any text, so it is cut and cleaned."""
    return ToolCall(name=one_line(name, 64), arguments=None, error=error)


def one_line(text: str, limit: int) -> str:
    """`text` as one line of at most `limit` characters."""
    return " ".join(printable(text[: 4 * limit]).split())[:limit]


def printable(text: str) -> str:
    """`text` with invalid UTF-8 bytes replaced, since tokenizers and records accept only valid text."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def printable_json(value: object) -> object:
    """A value from JSON with halves of surrogate pairs made printable in all texts."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): printable_json(item) for key, item in value.items()}
    return [printable_json(item) for item in value] if isinstance(value, list) else value


def escaped(name: str) -> str:
    r"""A file name with its control characters, and with bytes that are no UTF-8, as `\xff`."""
    if name.isprintable():
        return name
    data = "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else ascii(c)[1:-1] for c in name)
    return data.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def document_text(title: str, text: str) -> str:
    """The text of a document for the model. Its header line gives attention tokens to rest on."""
    return f"<document>{one_line(title, TITLE)}\n{text}\n</document>\n"


def content_text(message: Message) -> str:
    """The text of a message; its content may be None."""
    return message.get("content") or ""


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder. Raises UserError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json; give a Hugging Face model folder with a fast tokenizer.")
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise UserError(f"{path} cannot be read as a tokenizer ({e}); download the model again.") from None
