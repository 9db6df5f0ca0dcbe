"""Signals derived without the client: from an answer itself, and from the next request of its session.

    of_answer(question, answer)     invalid_call, question, no_edit       on the turn itself
    of_next(before, request)        retry, followup, answered             on the turn of the new request

A conversation is the messages of a request of the three dialects, in their order (`conversation`). A follow-up is
judged by a logistic rule over a short English word list, WORDS below, with weights set by hand. The signal's value is
the rule's probability of dissatisfaction; a message without any of the words has the base rate of about one in six. The
rule reads no other language, and no irony.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etude.live.log.records import SignalKind
from etude.protocol.apis import read, tools_of
from etude.renderers import ToolError, content_text, fitted, read_call

BASE = -1.6
"""Log-odds of dissatisfaction of a message without any of the words."""
WORDS: dict[str, float] = {
    # phrases first: the words of a matched phrase are not counted again
    "not what i": 3.0, "that's not": 2.2, "that is not": 2.2, "doesn't work": 2.8, "does not work": 2.8,
    "didn't work": 2.8, "not working": 2.6, "still not": 2.4, "still fails": 2.6, "still failing": 2.6,
    "same error": 2.6, "i asked": 2.0, "i said": 2.2, "i told you": 2.6, "i didn't ask": 2.8, "why did you": 2.4,
    "you broke": 2.8, "you forgot": 2.2, "you missed": 2.0, "you removed": 1.6, "you deleted": 1.8, "start over": 1.8,
    "try again": 1.8, "go back": 1.6, "put it back": 2.2, "change it back": 2.2, "should have": 1.2, "supposed to": 1.4,
    "no need": -0.2, "no problem": -2.0, "no worries": -1.5, "not bad": -1.5, "well done": -2.5, "works now": -2.6,
    "looks good": -2.5, "that works": -2.5, "it works": -2.2, "thank you": -1.8, "good job": -2.5,
    "nothing wrong": -1.0,
    "no": 1.2, "nope": 2.0, "wrong": 2.4, "incorrect": 2.4, "undo": 2.4, "revert": 2.0, "broken": 1.8, "breaks": 1.6,
    "fails": 1.4, "failing": 1.2, "fail": 1.0, "error": 0.8, "still": 1.0, "again": 0.8, "instead": 0.9, "worse": 2.2,
    "useless": 3.0, "terrible": 3.0, "bad": 1.6, "stop": 1.4, "don't": 0.8, "unnecessary": 1.6, "hallucinated": 2.6,
    "ugh": 2.2, "wtf": 2.8, "seriously": 1.4, "nonsense": 2.6, "unrelated": 1.4, "actually": 0.6, "bug": 0.6,
    "thanks": -1.6, "great": -2.0, "perfect": -3.0, "nice": -2.0, "awesome": -2.6, "excellent": -2.6, "lgtm": -3.0,
    "good": -1.4, "works": -1.4, "cool": -1.6, "yes": -1.0, "now": -0.3, "also": -0.5, "next": -0.9,
}  # fmt: skip
REPEATED, LOUD = 1.6, 1.2
"""Added for a repetition of the user's last message, and for capitals or exclamation marks."""
ASKS_FOR_EDIT = frozenset({
    "add", "change", "convert", "create", "delete", "extend", "fix", "handle", "implement", "improve", "make",
    "migrate", "move", "optimise", "optimize", "port", "refactor", "remove", "rename", "repair", "replace", "rewrite",
    "simplify", "speed", "split", "support", "update", "use", "write",
})  # fmt: skip
"""First words of a request for an edit, after "please", "can you" and their like."""

_POLITE = re.compile(
    r"^(?:please|pls|hi|hello|hey|now|then|and|so|ok|okay|can you|could you|would you|i want you to|"
    r"i need you to|let's|we should|you should|to)[\s,.!:]+",
    re.I,
)
_WORD = re.compile(r"[a-z']+")
_MAX_CHARACTERS = 4000  # characters of a message that are judged
_MAX_WRITTEN = 100_000  # characters of a message in which the user's words are sought
_TAGGED = re.compile(r"^[ \t]*<([A-Za-z][\w:-]{0,60})(?:\s[^<>\n]{0,200})?>[\s\S]*?(?:</\1>|\Z)", re.M)
"""A block in tags at the beginning of a line, e.g. <system-reminder> or <output>, to its end."""
_OBSERVED = re.compile(
    r"(?i)(?:observations?|execution result|tool (?:result|output)|command output|exit code|return ?code|stdout|stderr)"
    r"\b[^\n]{0,200}?(?::|=|\bof\b)|\[[^\]\n]{1,200}\] result:|\[tool[^\]\n]{0,200}\]"
)
"""The beginning of a result of an action in the role "user"."""


@dataclass(frozen=True)
class MessageCall:
    """A tool call: its arguments as the text that was written."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A message: "system", "user", "assistant" or "tool". `malformed`: calls that the dialect's parser could not read;
    clients see them as text."""

    role: str
    text: str = ""
    calls: tuple[MessageCall, ...] = ()
    malformed: int = 0


@dataclass(frozen=True)
class DerivedSignal:
    """A signal without its subject; `text` is the user's message, or None, and `before` the user's message before."""

    kind: SignalKind
    value: float
    text: str | None = None
    before: str = ""


def of_answer(
    request: Sequence[Message], answer: Message, tools: Mapping[str, Mapping[str, Any]]
) -> list[DerivedSignal]:
    """The signals of an answer to `request`; `tools`: name -> JSON schema of its arguments."""
    signals: list[DerivedSignal] = []
    if answer.malformed or any(not is_valid(call, tools) for call in answer.calls):
        signals.append(DerivedSignal(SignalKind.INVALID_CALL, 1.0))
    if answer.calls or answer.malformed or "```" in answer.text:
        return signals
    last = max((place for place, message in enumerate(request) if own_words(message)), default=-1)
    worked = any(message.calls or "```" in message.text for message in request[last + 1 :])
    if answer.text.rstrip(" \n*_)").endswith("?"):
        signals.append(DerivedSignal(SignalKind.QUESTION, 1.0))
    elif last >= 0 and not worked and asks_for_edit(own_words(request[last])):
        signals.append(DerivedSignal(SignalKind.NO_EDIT, 1.0))
    return signals


def of_next(before: Sequence[Message], answer: Message, request: Sequence[Message]) -> list[DerivedSignal]:
    """The signals of the next `request` of a session on the `answer` to `before`. RETRY is 1 for the same messages
    again, and 1/2 for the same messages with another last message. Results of tools alone give no signal."""
    old, new = [_key(message) for message in before], [_key(message) for message in request]
    if new == old:
        return [DerivedSignal(SignalKind.RETRY, 1.0)]
    mine = [words for message in before if (words := own_words(message))]
    if len(new) == len(old) and new[:-1] == old[:-1] and own_words(request[-1]):
        return [DerivedSignal(SignalKind.RETRY, 0.5)]
    if new[: len(old)] != old or len(new) <= len(old) or request[len(old)].role != "assistant":
        return []
    fresh = [words for message in request[len(old) :] if (words := own_words(message))]
    if not fresh:
        return []
    text, last = "\n".join(fresh), mine[-1] if mine else ""
    signals = [DerivedSignal(SignalKind.FOLLOWUP, dissatisfied(text, last), text, last)]
    if any(s.kind is SignalKind.QUESTION for s in of_answer(before, answer, {})):
        signals.append(DerivedSignal(SignalKind.ANSWERED, 1.0))
    return signals


def dissatisfied(text: str, before: str = "") -> float:
    """Probability that a user's message is dissatisfied with the answer; `before` is the user's message before it."""
    body = re.sub(r"```.*?(?:```|$)", " ", text[:_MAX_CHARACTERS], flags=re.S).replace("\u2019", "'")
    words = " ".join(_WORD.findall(body.lower()))
    odds, rest = BASE, f" {words} "
    for phrase, weight in WORDS.items():
        if f" {phrase} " in rest:
            odds += weight
            rest = rest.replace(f" {phrase} ", " ")
    old, new = set(_WORD.findall(before[:_MAX_CHARACTERS].lower())), set(words.split())
    if len(new) >= 3 and len(old & new) / len(old | new) > 0.6:
        odds += REPEATED
    letters = [c for c in body if c.isalpha()]
    if "!!" in body or "?!" in body or (len(letters) > 8 and sum(c.isupper() for c in letters) > len(letters) / 2):
        odds += LOUD if odds > BASE else 0.0
    return 1 / (1 + math.exp(-odds))


def own_words(message: Message) -> str:
    """The user's own part of a message of the role "user"; "" if there is none. Agents without native calls send
    results of actions in that role, and others put reports of the machine beside the user's words, in tags."""
    if message.role != "user":
        return ""
    text = _TAGGED.sub(" ", message.text[:_MAX_WRITTEN]).strip()
    return "" if _OBSERVED.match(text) else text


def asks_for_edit(text: str) -> bool:
    """Whether a message begins like a request for an edit."""
    rest = text.strip()[:_MAX_CHARACTERS]
    while (shorter := _POLITE.sub("", rest, count=1)) != rest:
        rest = shorter
    first = _WORD.match(rest.lower())
    return bool(first) and first.group() in ASKS_FOR_EDIT


def is_valid(call: MessageCall, tools: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a call names an offered tool, with arguments that fit its schema. Without tools in the request, only the
    JSON is checked."""
    read = read_call(call.name, call.arguments)
    if read.arguments is None or (tools and call.name not in tools):
        return False
    try:
        fitted(read, tools.get(call.name) or {})
    except ToolError:
        return False
    return True


def conversation(dialect: str, body: Mapping[str, Any]) -> list[Message]:
    """The messages of a request: of "chat" (OpenAI), "responses" (OpenAI) or "messages" (Anthropic). What the reader of
    these APIs does not know is left out."""
    return [
        Message(str(message["role"]), content_text(message), tuple(map(_call, message.get("tool_calls", ()))))
        for message in read(dialect, body, strict=False)
    ]


def answer_of(message: Mapping[str, Any], malformed: int = 0) -> Message:
    """The answer in a message of OpenAI's chat completions, of whose calls the server could not read `malformed`."""
    answers = conversation("chat", {"messages": [{"role": "assistant"} | dict(message)]}) or [Message("assistant")]
    return replace(answers[0], malformed=malformed)


def schemas_of(body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The tools of a request, in any dialect: name -> JSON schema of the arguments."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools_of(body, strict=False)}


def _call(call: Mapping[str, Any]) -> MessageCall:
    return MessageCall(call["function"]["name"], call["function"]["arguments"])


def _key(message: Message) -> tuple[str, str, tuple[MessageCall, ...]]:
    return message.role, " ".join(message.text.split()), message.calls
