"""Detects the dialect of a chat template by a round trip: the template writes calls, and a dialect must read the same.

`find_form` renders a conversation with structured `tool_calls`, cuts the turn out of it, and reads its tokens with
every dialect. It tries the forms in which templates take messages: calls with a content "" or None, arguments as an
object or as its text, two calls a turn or one.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jinja2

from etude.renderers.base import Message
from etude.renderers.dialects import ParsedCall, ToolDialect, TurnParts
from etude.renderers.marked import MarkedCodec, map_strings, mark_for
from etude.renderers.template import ChatTemplate

TURN = "Dummy turn."
RESULTS = ("Dummy result zero.", "Dummy result one.", "Dummy result two.")
USER: Message = {"role": "user", "content": "Dummy request."}
REQUEST: Message = {"role": "user", "content": "Dummy second request."}

# Arguments for the trial: a text with a line break at both ends, since dialects differ in how many they add, and with
# characters that JSON and Python quote differently; a text that looks like a number; values of every kind.
_ARGUMENTS: dict[str, Any] = {
    "text": "\n\"Dummy\" 'text' \\ é 漢字 🎉\n\n\tif x:\n",
    "digits": "5",
    "number": 7,
    "flag": True,
    "deep": {"list": [1, "two", None, {"x": "y\n"}], "é": {}},
}
_KINDS = {"text": "string", "digits": "string", "number": "integer", "flag": "boolean", "deep": "object"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "dummy",
        "description": "Dummy.",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind, "description": "Dummy."} for key, kind in _KINDS.items()},
            "required": ["text"],
        },
    },
}

_MARK = mark_for()
_THOUGHTS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))


class TemplateRefused(Exception):
    """The template cannot be used; the message says why."""


@dataclass(frozen=True)
class TemplateForm:
    """The form in which a template takes and writes turns. `ends` are the tokens at which a turn may end."""

    dialect: ToolDialect
    ends: frozenset[str]
    several: bool = True  # whether a turn may have several calls
    empty: str | None = ""  # content of a turn with calls only
    text_arguments: bool = False

    def call(self, name: str, arguments: Any, number: int, call_id: str = "") -> dict[str, Any]:
        """A call in the template's form; `arguments` is an object, `call_id` its id from the model or a client."""
        if self.dialect.call_id is not None:
            call_id = self.dialect.call_id(name, number, call_id)
        if self.text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": arguments}
        return {"id": call_id or f"call{number:05d}", "type": "function", "function": function}

    def turn(self, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """An assistant message with calls only."""
        return {"role": "assistant", "content": self.empty, "tool_calls": list(calls)}


def result(call: dict[str, Any], content: str) -> dict[str, Any]:
    """A tool message."""
    return {"role": "tool", "content": content, "name": call["function"]["name"], "tool_call_id": call["id"]}


def thought_tags(template: ChatTemplate) -> tuple[str, str]:
    """The tags around reasoning in a template."""
    return next((tags for tags in _THOUGHTS if tags[1] in template.source), _THOUGHTS[0])


@dataclass(frozen=True)
class Openings:
    """The text before a turn: as a whole, without tags of thoughts at its end, and whether a thought is open at its
    end."""

    whole: str
    text: str
    generation: str  # the generation prompt
    in_thought: bool

    def after(self, text: str) -> str:
        """`text` behind the opening, without tags of an empty thought. Raises TemplateRefused."""
        if not text.startswith(self.text):
            raise TemplateRefused("it changes the text before a turn")
        return text[len(self.text) :]


def openings(template: ChatTemplate, tags: tuple[str, str]) -> Openings:
    """The openings of a template. Raises TemplateRefused, jinja2.TemplateError."""
    closed, opened = (template.render([USER], generate=generate) for generate in (False, True))
    if not opened.startswith(closed):
        raise TemplateRefused("it has no generation prompt")
    text, in_thought = _tags(tags, r"\Z").sub("", opened), opened.rstrip().endswith(tags[0])
    opening = Openings(opened, text, opened[len(closed) :], in_thought)
    turn = opening.after(template.render([USER, {"role": "assistant", "content": TURN}], generate=False))
    if not opening.generation and _tags(tags, "").sub("", turn.partition(TURN)[0]):
        raise TemplateRefused("it has no generation prompt")
    return opening


def without_tags(text: str, tags: tuple[str, str]) -> str:
    """`text` without the tags of thoughts and white space at its beginning."""
    match = _tags(tags, "").match(text)
    return text[match.end() :] if match else text


def _tags(tags: tuple[str, str], end: str) -> re.Pattern[str]:
    return re.compile(rf"(?:\s|{'|'.join(map(re.escape, tags))})+{end}")


def ends_pattern(ends: frozenset[str]) -> re.Pattern[str]:
    """A pattern of the tokens at which a turn may end."""
    return re.compile("|".join(map(re.escape, sorted(ends, key=len, reverse=True))) or r"(?!)")


def cut(text: str, ends: frozenset[str], before: str) -> tuple[str, str, str]:
    """`text` cut at the last token that ends a turn before the text `before`: the text before the token, the token, and
    the text after it. Raises TemplateRefused."""
    matches = [*ends_pattern(ends).finditer(text, 0, max(text.find(before), 0))]
    if not matches:
        raise TemplateRefused("a turn does not end with a special token of its own")
    match = matches[-1]
    return text[: match.start()], match.group(), text[match.end() :]


def read(codec: MarkedCodec, dialect: ToolDialect, ids: Sequence[int]) -> TurnParts:
    """The parts of a turn without thoughts, read from its tokens by the dialect."""
    text, mark = codec.seen(ids)
    return unmarked(dialect.parse(text, [TOOL]), mark)


def unmarked(parts: TurnParts, mark: str) -> TurnParts:
    """The parts of a turn without the mark."""
    if not mark:
        return parts

    def clean(text: str) -> str:
        return text.replace(mark, "")

    calls = [
        ParsedCall(
            type(c.call)(
                name=clean(c.call.name), arguments=map_strings(c.call.arguments, clean), error=clean(c.call.error)
            ),
            clean(c.id),
        )
        for c in parts.calls
    ]
    return TurnParts(clean(parts.text), calls, clean(parts.reasoning))


def find_form(
    template: ChatTemplate,
    codec: MarkedCodec,
    opening: Openings,
    tags: tuple[str, str],
    ends: frozenset[str],
    dialects: Sequence[ToolDialect],
) -> TemplateForm:
    """The first form in which a dialect reads the calls that the template writes. Raises TemplateRefused."""
    why: dict[int, str] = {}  # reasons by the progress of attempts; the farthest is reported
    for several, empty, text_arguments in product((True, False), ("", None), (False, True)):
        written: dict[Any, str] = {}  # by the form of ids, which alone depends on the dialect
        for dialect in dialects:
            known = {end for end in (*ends, *dialect.stops, *dialect.ends) if codec.id_of(end) is not None}
            form = TemplateForm(dialect, frozenset(known), several, empty, text_arguments)
            try:
                if dialect.call_id not in written:
                    written[dialect.call_id] = _write(template, codec, form)
                _read(codec, opening, tags, form, written[dialect.call_id])
                return form
            except jinja2.TemplateError as e:
                why[0] = f"it fails on a tool call: {e}"
            except _NotRead as e:
                why[2] = str(e)
            except TemplateRefused as e:
                why[1] = str(e)
    raise TemplateRefused(why[max(why)])


class _NotRead(TemplateRefused):
    """A dialect does not read the calls that the template writes."""


def _arguments(form: TemplateForm) -> list[dict[str, Any]]:
    return [_ARGUMENTS, {**_ARGUMENTS, "text": TURN}] if form.several else [{**_ARGUMENTS, "more": TURN}]


def _write(template: ChatTemplate, codec: MarkedCodec, form: TemplateForm) -> str:
    """A conversation with calls, the last of which contains `TURN`, and their results. Raises TemplateRefused."""
    marked = [map_strings(each, lambda text: codec.escape(text, _MARK)) for each in _arguments(form)]
    calls = [form.call("dummy", each, number) for number, each in enumerate(marked)]
    results = [result(call, text) for call, text in zip(calls, RESULTS, strict=False)]
    text = template.render([USER, form.turn(calls), *results])
    if text.count(TURN) != 1:
        raise TemplateRefused("it drops or repeats tool calls")
    if any(text.count(each["content"]) != 1 for each in results):
        raise TemplateRefused("it drops or repeats a tool result")
    return text


def _read(codec: MarkedCodec, opening: Openings, tags: tuple[str, str], form: TemplateForm, text: str) -> None:
    """Reads the calls of such a conversation. Raises TemplateRefused."""
    turn = without_tags(opening.after(text), tags)
    before, _, behind = turn.partition(TURN)
    closing, end, _ = cut(behind, form.ends, RESULTS[0])
    if end in opening.generation:
        raise TemplateRefused("a turn does not end with a special token of its own")
    sampled = before + TURN + closing
    parts = read(codec, form.dialect, codec.encode_marked(sampled, _MARK))
    if [(c.call.name, c.call.arguments) for c in parts.calls] != [("dummy", each) for each in _arguments(form)]:
        raise _NotRead(f"its calls are in no dialect that is known here: {sampled.replace(_MARK, '')[:60]!r}")
