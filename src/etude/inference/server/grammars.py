"""Constraints on an answer as grammars of llguidance: JSON, a schema, a pattern, a choice, a forced call.

In a chat the grammar includes the tokens that the dialect puts around a text or a call (harmony's channels, the end of
a thought that the generation prompt began). To get them, the renderer renders a turn with a placeholder. So a
constrained answer has no thoughts.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import llguidance
from tokenizers import Tokenizer

from etude.inference.server.bodies import Body, invalid
from etude.inference.server.tagged_calls import MARK, NAME, Tags, json_rule, rule_of
from etude.protocol import Refusal
from etude.renderers import COMPACT_PARAMETERS, PlainEncoder, Renderer, Tool

_MAX_CHARACTERS = 256 << 10
_WORD, _KEY, _VALUE = "zq0zq", "zq1zq", "zq2zq"  # placeholders
_ANY_TEXT = r"/(?s:.)*/"
_SLASH = re.compile(r"\\.|/", re.DOTALL)  # with an escaped character
_START = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|\bstart\b')  # strings may contain the word


class _PlainTokens:
    """A tokenizer that never encodes text as a special token: the library's own does, and then refuses that token."""

    def __init__(self, tokens: llguidance.LLTokenizer, encoder: PlainEncoder) -> None:
        ids = range(tokens.vocab_size)
        self.eos_token_id, self.bos_token_id = tokens.eos_token, None
        self.tokens = [tokens.decode_bytes([i]) for i in ids]
        # All added tokens count: a renderer distinguishes them from text that spells their names.
        self.special_token_ids = [i for i in ids if i in encoder.forbidden or tokens.is_special_token(i)]
        self._encoder = encoder

    def __call__(self, text: str) -> list[int]:
        return self._encoder.encode(text)


class Grammars:
    """The grammars of one model. `eos` are the ids that may end an answer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size, self._eos = vocab_size, list(eos)
        self._ids: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._tags: dict[str, Tags | None] = {}  # by the renderer's digest

    def matcher(self, lark: str, param: str | None) -> llguidance.LLMatcher:
        """A matcher of one answer to a grammar, which the field `param` requires. Raises Refusal."""
        if len(lark) > _MAX_CHARACTERS:
            raise invalid(f"a grammar has at most {_MAX_CHARACTERS} characters", param)
        matcher = llguidance.LLMatcher(self._vocabulary(), lark, log_level=0)
        if matcher.is_error():
            raise invalid(f"the grammar cannot be followed: {_first_line(matcher.get_error())}", param)
        return matcher

    def _vocabulary(self) -> llguidance.LLTokenizer:
        """The tokens in the library's format; made once."""
        with self._lock:
            if self._ids is None:
                plain = llguidance.LLTokenizer(
                    self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._eos or None
                )
                self._ids = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_PlainTokens(plain, PlainEncoder(self._tokenizer))),
                    n_vocab=self._vocab_size,
                    eos_token=self._eos or None,
                )
        return self._ids

    def of_text(self, renderer: Renderer, rule: str) -> str:
        """The grammar of a chat turn whose text is `rule`. Raises Refusal."""
        before, _ = self._around(renderer, {"role": "assistant", "content": _WORD}, _WORD)
        return f"start: {before} answer\n{rule}"

    def of_call(self, renderer: Renderer, tools: Sequence[Tool], rule: str = "") -> str:
        """The grammar of a chat turn that calls one of these tools. With `rule`, the turn may also be a text of this
        rule. Raises Refusal for a dialect that writes arguments neither as JSON nor between tags."""
        calls, rules = list[str](), list[str]()
        for number, tool in enumerate(tools):
            call, more = self._call(renderer, number, tool)
            calls.append(call)
            rules += more
        if rule:
            before, _ = self._around(renderer, {"role": "assistant", "content": _WORD}, _WORD)
            calls.append(f"{before} answer")
            rules.append(rule)
        return "\n".join([f"start: {' | '.join(calls)}", *rules])

    def _call(self, renderer: Renderer, number: int, tool: Tool) -> tuple[str, list[str]]:
        """An alternative that calls this tool, and its further rules. Raises Refusal."""
        function = tool["function"]
        if renderer.dialect == "compact":
            return self._compact_call(function["name"]), []
        if renderer.digest not in self._tags:
            self._tags[renderer.digest] = Tags.measured(
                lambda arguments: self._written(renderer, _call(NAME, arguments))
            )
        if (tags := self._tags[renderer.digest]) is not None:
            return tags.rules(number, tool)
        before, after = self._around(renderer, _call(function["name"], {_KEY: _VALUE}), *_ARGUMENTS)
        schema = json_rule(function.get("parameters") or {"type": "object"})
        return f"{before} arguments{number} {after}", [f"arguments{number}: {schema}"]

    def _compact_call(self, name: str) -> str:
        if name not in COMPACT_PARAMETERS:
            known = ", ".join(sorted(COMPACT_PARAMETERS))
            raise invalid(f"the compact dialect has no tool {name[:100]!r}; it has: {known}", "tool_choice")
        call, arg = (f"<[{self._tokenizer.token_to_id(token)}]>" for token in ("<|call|>", "<|arg|>"))
        return " ".join([call, json.dumps(name), *(f"{arg} {_ANY_TEXT}" for _ in COMPACT_PARAMETERS[name])])

    def _around(self, renderer: Renderer, message: Mapping[str, Any], *placeholders: str) -> tuple[str, str]:
        """The tokens that the dialect puts before and after a placeholder in a turn, as parts of a rule. Raises
        Refusal."""
        text = self._written(renderer, message)
        for placeholder in placeholders:
            if text.count(placeholder) == 1:
                before, _, after = text.partition(placeholder)
                return rule_of(before), rule_of(after)
        raise _not_written(renderer, "it does not write arguments as JSON or between tags")

    def _written(self, renderer: Renderer, message: Mapping[str, Any]) -> str:
        """The text of a turn without its end, with special tokens as marked ids. Raises Refusal."""
        is_special = self._vocabulary().is_special_token
        runs = groupby(_turn(renderer, message), key=is_special)
        return "".join(
            "".join(f"{MARK}{token}{MARK}" for token in run)
            if special
            else self._tokenizer.decode(list(run), skip_special_tokens=False)
            for special, run in runs
        )


def _turn(renderer: Renderer, message: Mapping[str, Any]) -> list[int]:
    """Ids of a turn without its end, from which the renderer reads this message. Raises Refusal."""
    # If the generation prompt begins a thought, the turn must end it.
    thoughtless = dict(message) | {"content": f"<think>\n\n</think>\n\n{message['content']}"}
    why = "a text comes back as a thought"
    for way in (message, thoughtless):
        try:
            ids = renderer.turn(way)
        except ValueError as e:
            why = str(e)
            continue
        parsed = renderer.parse(ids, "stop")
        if (parsed.text, len(parsed.calls)) == (message["content"], len(message.get("tool_calls", ()))):
            while ids and ids[-1] in renderer.stop_ids:
                ids = ids[:-1]
            return ids
    raise _not_written(renderer, why)


def _not_written(renderer: Renderer, why: str) -> Refusal:
    return invalid(f"answers in the dialect {renderer.dialect} cannot be forced: {why}")


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": dict(arguments)}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_ARGUMENTS = (json.dumps({_KEY: _VALUE}), json.dumps({_KEY: _VALUE}, separators=(",", ":")))


def answer_rule(body: Body) -> tuple[str, str] | None:
    """The rule named `answer` for the constraint in a body, and the name of its field; None without one. Raises
    Refusal."""
    rules = [*_formats(body), *_structured(body.structured_outputs or {}, "structured_outputs")]
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{name}")) is not None:
            rules += _structured({name: value}, f"guided_{name}")
    if len(rules) > 1:
        raise invalid("several fields constrain the answer: leave all but one out", rules[1][1])
    return rules[0] if rules else None


def _formats(body: Body) -> list[tuple[str, str]]:
    """The rule of `response_format`, and its field, in a list; empty for plain text. Raises Refusal."""
    form, param = body.response_format or {"type": "text"}, "response_format"
    match form.get("type"):
        case "text":
            return []
        case "json_object":
            return [(f"answer: {json_rule({'type': 'object'})}", param)]
        case "json_schema":
            named = form.get("json_schema")
            schema = named.get("schema") if isinstance(named, Mapping) else None
            if not isinstance(schema, Mapping):
                raise invalid("response_format.json_schema.schema must be a JSON schema", param)
            return [(f"answer: {json_rule(schema)}", param)]
        case kind:
            raise invalid(f"response_format of type {kind!r} is not supported", param)


def _structured(outputs: Mapping[str, Any], param: str) -> list[tuple[str, str]]:
    """The rules of vLLM's structured outputs, each with its field. Raises Refusal."""
    rules = []
    for kind, value in outputs.items():
        if value is None or (kind == "json_object" and value is False):
            continue
        match kind, value:
            case ("json", str() | Mapping()):
                rules.append(f"answer: {json_rule(_schema(value, param))}")
            case ("json_object", True):
                rules.append(f"answer: {json_rule({'type': 'object'})}")
            case ("regex", str()):
                escaped = _SLASH.sub(lambda match: r"\/" if match.group() == "/" else match.group(), value)
                rules.append(f"answer: PATTERN\nPATTERN: /{escaped}/")
            case ("choice", list()) if value and all(isinstance(item, str) for item in value):
                rules.append(f"answer: {' | '.join(map(json.dumps, value))}")
            case ("grammar", str()):
                rules.append(_renamed(value, param))
            case _:
                raise invalid(f"{param}: {kind[:100]!r} is not supported with this value", param)
    return [(rule, param) for rule in rules]


def _schema(value: str | Mapping[str, Any], param: str) -> Mapping[str, Any]:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except ValueError as e:
        raise invalid(f"{param}: the schema is not JSON: {e}", param) from None
    if not isinstance(schema, Mapping):
        raise invalid(f"{param}: a schema is a JSON object", param)
    return schema


def _renamed(grammar: str, param: str) -> str:
    """A grammar of Lark or GBNF with its rule `start` renamed to `answer`. Raises Refusal."""
    try:
        lark = llguidance.grammar_from("grammar", grammar).replace("%llguidance {}\n", "")
    except ValueError as e:
        raise invalid(f"{param}: the grammar cannot be read: {_first_line(str(e))}", param) from None
    renamed = _START.sub(lambda match: "answer" if match.group() == "start" else match.group(), lark)
    if renamed == lark:
        raise invalid(f"{param}: the grammar has no rule named start", param)
    return renamed


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
