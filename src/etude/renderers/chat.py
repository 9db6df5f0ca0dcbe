"""Renders models with a Hugging Face chat template, in the dialect of tool calls that a round trip detects (`trial`).

The tokens that the environment adds between two sampled turns (the bridge) are rendered by the template: a short
conversation with the turn's calls, cut where the turn ends. So names and ids of calls stand where the template puts
them. Sampled tokens are never rendered again; thoughts stay in the context, even if the template would drop them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Self

import blake3
import jinja2

from etude.config import CHAT_TEMPLATES
from etude.errors import UserError
from etude.renderers import trial
from etude.renderers.arguments import as_meant, read_arguments
from etude.renderers.base import ROLES, Message, ParsedTurn, Tool, content_text
from etude.renderers.dialects import DIALECTS, ToolDialect, TurnParts
from etude.renderers.marked import MarkedCodec, map_strings, mark_for
from etude.renderers.template import ChatTemplate
from etude.renderers.trial import REQUEST, RESULTS, TURN, USER, TemplateForm, TemplateRefused, result

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ORDER: Message = {"role": "system", "content": "Dummy order."}
_CHATML = ("<|im_start|>", "<|im_end|>")  # around a turn; the second is an end of turns under any model configuration
_NO_TOOLS = ToolDialect("none", lambda text, tools: TurnParts(text, ()))


class ChatRenderer(MarkedCodec):
    """A renderer by chat template; see the module. `digest` covers the tokenizer, the template and its variables.
    Without `tools` a template that cannot call tools is accepted, too, for conversations without calls. Raises
    UserError for a template that cannot be used turn by turn."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        eos_ids: Sequence[int] = (),
        dialect: str | None = None,
        *,
        tools: bool = True,
    ) -> None:
        super().__init__(tokenizer)
        self._eos_ids = tuple(eos_ids)
        self._candidates = [d for d in DIALECTS if dialect in (None, d.name)]
        self._tools_needed = tools
        self._fit(template)

    def with_template_kwargs(self, chat_template_kwargs: Mapping[str, Any]) -> Self:
        """The same renderer with further variables of the template. Raises UserError for unknown ones."""
        other = copy(self)
        other._fit(self._template.with_variables(chat_template_kwargs))
        return other

    @property
    def thinks(self) -> bool:
        """Whether the template has tags of thoughts."""
        return self._tags[1] in self._template.source and not self._form.dialect.thinks

    @property
    def calls_per_turn(self) -> int | None:
        """1 if the template writes one call per turn, 0 if none, None if any number."""
        return 0 if self._form.dialect is _NO_TOOLS else None if self._form.several else 1

    @property
    def note(self) -> str:
        """A sentence on the parts of a conversation that the template silently leaves out; "" if there are none."""
        thought = {"reasoning_content": "Dummy thought.", "thinking": "Dummy thought."}
        turns: dict[str, Message] = {"thoughts": {"role": "assistant", "content": TURN} | thought}
        if not self._no_tools:
            turns["texts beside calls"] = self._form.turn([self._form.call("dummy", {}, 0)]) | {"content": TURN}
        dropped = ["tools"] if self._no_tools else []
        for what, turn in turns.items():
            with suppress(ValueError):  # a refusal is reported when it occurs
                text = self._rendered([USER, turn], generate=False)
                dropped += [] if turn.get("thinking", TURN) in text else [what]
        return f"the chat template of {self._template.name} drops {' and '.join(dropped)}" if dropped else ""

    def _fit(self, template: ChatTemplate) -> None:
        self._template = template
        self.digest = blake3.blake3(f"chat\n{template.digest}\n{self._tokenizer.to_str()}".encode()).hexdigest()
        self._tags = trial.thought_tags(template)
        self._orders = True  # whether it writes a system message in its place behind others
        self._no_tools = ""
        named = {template.eos_token, *(mark for mark in _CHATML[1:] if mark in template.source)}
        ends = {self._contents[i] for i in self._eos_ids if i in self._contents} | named & self._ids.keys()
        try:
            self._opening = trial.openings(template, self._tags)
            try:
                self._form = trial.find_form(
                    template, self, self._opening, self._tags, frozenset(ends), self._candidates
                )
                self._check_rounds()
            except (TemplateRefused, jinja2.TemplateError) as e:
                if self._tools_needed:
                    raise
                self._form, self._no_tools = TemplateForm(_NO_TOOLS, frozenset(ends)), str(e)
                self._check_rounds()
        except TemplateRefused as e:
            raise self._refusal(str(e)) from None
        except jinja2.TemplateError as e:
            raise self._refusal(f"it fails on a conversation: {e}") from None
        self.dialect = self._form.dialect.name
        try:
            self.prompt([USER, _ORDER, {"role": "assistant", "content": TURN}, _ORDER, REQUEST, _ORDER])
            self.follow((), [_ORDER, REQUEST])
        except ValueError:
            self._orders = False

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a conversation with these tools. Raises ValueError for roles or an order that the template refuses,
        and for calls and texts that it would drop."""
        if self._no_tools and tools:
            raise ValueError(self._cannot_call())
        mark = mark_for(messages, tools)
        plain = self._as_template_takes(messages, mark)
        shown = map_strings(list(tools), lambda text: self.escape(text, mark))
        return self.encode_marked(self._written(plain, lambda messages: self._rendered(messages, shown)), mark)

    def parse(self, ids: Sequence[int], finish_reason: str = "stop", tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Calls of a sampled turn; an unclosed call is malformed for every finish reason. The schemas of `tools` decide
        whether a value is a text or a number."""
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        text, mark = self.seen(ids)
        reasoning = ""
        if not self._form.dialect.thinks:
            reasoning, text = self._split_thought(text)
        parts = trial.unmarked(self._form.dialect.parse(text, tools), mark)
        reasoning = parts.reasoning or (reasoning.replace(mark, "") if mark else reasoning)
        calls = tuple(as_meant(parsed.call, tools) for parsed in parts.calls)
        ids_of_calls = tuple(parsed.id for parsed in parts.calls)
        return ParsedTurn(parts.text.strip(), calls, reasoning.strip(), ids_of_calls)

    def bridge(
        self, sampled_ids: Sequence[int], finish_reason: str, results: Sequence[str], request: str = ""
    ) -> list[int]:
        """See `Renderer.bridge`."""
        parsed = self.parse(sampled_ids, finish_reason)
        named = [*zip((call.name for call in parsed.calls), parsed.ids, strict=True)]
        named += [("", "")] * (len(results) - len(named))
        messages: list[Message] = [
            {"role": "tool", "content": text, "name": name, "tool_call_id": call_id or f"call{number:05d}"}
            for number, ((name, call_id), text) in enumerate(zip(named, results, strict=False))
        ]
        requests = [{"role": "user", "content": request}] if request else []
        try:
            return self.follow(sampled_ids, [*messages, *requests])
        except ValueError:
            if not request:
                raise
            raise self._refusal("it has no place for a request after a turn") from None

    def follow(self, sampled_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """See `Renderer.follow`."""
        if not self._requests and any(message["role"] == "user" for message in messages):
            raise ValueError(f"the chat template of {self._template.name} has no place for a user after a turn")
        mark = mark_for(messages)
        calls = [
            {"id": m.get("tool_call_id"), "function": {"name": str(m.get("name") or "unknown"), "arguments": {}}}
            for m in messages
            if m["role"] == "tool"
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        turn, *taken = self._as_template_takes([turn, *messages], mark, one_call=False)
        behind = self._written(taken, lambda shown: self._behind(turn.get("tool_calls", ()), shown))
        return self._after(sampled_ids, behind, mark)

    def turn(self, message: Message) -> list[int]:
        """See `Renderer.turn`."""
        mark = mark_for(message)
        (taken,) = self._as_template_takes([message], mark)
        whole = self._written([taken], lambda turns: self._rendered([USER, *turns], generate=False), learned=True)
        ids = self.encode_marked(self._sampled(whole), mark)
        ends = [self._ids[end] for end in self._form.ends]
        at = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in ends), None)
        return [*ids, self._ends_of_turns[bool(taken.get("tool_calls"))]] if at is None else ids[: at + 1]

    def _sampled(self, whole: str) -> str:
        """The part of a conversation that a model samples after the generation prompt. Raises ValueError."""
        opening, closing = self._tags
        opened = self._opening.whole
        if whole.startswith(opened):
            return whole[len(opened) :]
        before = opened.rstrip()
        if before.endswith(closing):  # an empty thought, which the history omits or writes differently
            before = before.removesuffix(closing).rstrip().removesuffix(opening)
            rest = whole.removeprefix(before).removeprefix(closing)
            if whole.startswith(before) and not rest.startswith(opening):
                return rest
        elif before.endswith(opening):  # a thought that is closed at once
            before = before.removesuffix(opening)
            rest = whole.removeprefix(before).removeprefix(opening)
            if whole.startswith(before) and rest.startswith(closing):
                return rest
        raise ValueError(f"the chat template of {self._template.name} does not open this turn as it opens a sample")

    # A conversation cut at the end of a turn

    def _behind(self, calls: Sequence[dict[str, Any]], messages: Sequence[Message]) -> str:
        """The text from the end of a turn with these calls on, with `messages` after it. Raises ValueError."""
        if calls:
            last = self._form.call(calls[-1]["function"]["name"], {"dummy": TURN}, len(calls) - 1, calls[-1]["id"])
            turn = self._form.turn([*calls[:-1], last] if self._form.several else [last])
        else:
            turn = {"role": "assistant", "content": TURN}
        rest = self._rendered([USER, turn, *messages]).partition(TURN)[2]
        match = self._ends.search(rest)
        if match is None:
            raise ValueError(f"the chat template of {self._template.name} has no place for this after a turn")
        return rest[match.start() :]

    def _after(self, sampled_ids: Sequence[int], behind: str, mark: str) -> list[int]:
        """Ids of the text behind a turn, without the end of the turn if it was sampled."""
        match = self._ends.match(behind)
        assert match is not None
        end, rest = match.group(), behind[match.end() :]
        same = self._form.dialect.ends if end in self._form.dialect.ends else (end,)
        closed = bool(sampled_ids) and self._contents.get(sampled_ids[-1]) in same
        return ([] if closed else [self._ids[end]]) + self.encode_marked(rest, mark)

    def _written(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str], learned: bool = False
    ) -> str:
        """The text that `render` makes of messages. Raises ValueError if it has not the text of each in its place; some
        templates drop the text beside calls, which counts where it is `learned`."""
        shown = [dict(m) | ({"content": f"Dummy {n}."} if m["content"] else {}) for n, m in enumerate(messages)]
        due = {n: m for n, m in enumerate(shown) if m["content"] and (learned or not m.get("tool_calls"))}
        numbers = map(int, re.findall(r"Dummy (\d{1,9})\.", render(shown)))
        missed = [n for n, other in zip_longest(due, [n for n in numbers if n in due]) if n != other]
        if missed:
            role, name = messages[missed[0] or 0]["role"], self._template.name
            raise ValueError(f"the chat template of {name} does not write the text of a message by {role!r} in place")
        return render(messages)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool] = (), generate: bool = True) -> str:
        try:
            return self._template.render(messages, tools, generate)
        except jinja2.TemplateError as e:
            raise ValueError(f"the chat template of {self._template.name} refuses these messages: {e}") from None

    # Messages

    def _as_template_takes(
        self, messages: Sequence[Message], mark: str, *, one_call: bool = True
    ) -> list[dict[str, Any]]:
        """The messages in the template's form: names of tokens marked, arguments and ids of calls converted."""
        ids: dict[str, dict[str, Any]] = {}  # calls by the client's id
        out = []
        for message in messages:
            role = message["role"]
            if role not in ROLES:
                raise ValueError(f"unknown role {role!r}; known: {', '.join(ROLES)}")
            taken = map_strings({k: v for k, v in message.items() if k != "role"}, lambda t: self.escape(t, mark))
            taken["role"] = "user" if role == "system" and out and not self._orders else role
            # The assistant's text may hold tokens such as <think>, which a client sends back as text.
            taken["content"] = self.escape(content_text(message), mark, special=role == "assistant")
            thought, beside = taken.get("reasoning_content"), taken["content"] and message.get("tool_calls")
            # Text beside calls is the thought there; only a turn to learn from is refused if it has both.
            if thought and "message.thinking" in self._template.source and not (beside and messages[1:]):
                taken["thinking"] = thought
            if self._no_tools and (role == "tool" or message.get("tool_calls")):
                raise ValueError(self._cannot_call())
            if message.get("tool_calls"):
                calls = [self._call(call, number, mark) for number, call in enumerate(message["tool_calls"])]
                if len(calls) > 1 and not self._form.several and one_call:
                    raise ValueError(f"the chat template of {self._template.name} writes one call a turn")
                ids |= {str(old.get("id")): new for old, new in zip(message["tool_calls"], calls, strict=True)}
                taken |= {"tool_calls": calls} | ({} if taken["content"] else {"content": self._form.empty})
            if role == "tool" and (call := ids.get(str(message.get("tool_call_id")))) is not None:
                taken = result(call, taken["content"])
            out.append({k: v for k, v in taken.items() if k != "tool_calls" or v})
        return out

    def _call(self, call: Mapping[str, Any], number: int, mark: str) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = map_strings(read_arguments(function.get("arguments")), lambda text: self.escape(text, mark))
        name, call_id = (self.escape(str(text or ""), mark) for text in (function["name"], call.get("id")))
        return self._form.call(name, arguments, number, call_id)

    def end_of_thought(self, ids: Sequence[int]) -> list[int]:
        """See `Renderer.end_of_thought`."""
        (opening, closing), text = self._tags, self.seen(ids)[0].lstrip()
        within = self._opening.in_thought or text.startswith(opening)
        return self.encode_marked(f"\n{closing}\n\n", "") if self.thinks and within and closing not in text else []

    def _split_thought(self, text: str) -> tuple[str, str]:
        """Reasoning and the rest. A thought begins with the turn, or with the generation prompt."""
        opening, closing = self._tags
        stripped = text.lstrip()
        if not self._opening.in_thought and not stripped.startswith((opening, closing)):
            return "", text
        head, closed, tail = stripped.removeprefix(opening).partition(closing)
        return (head, tail) if closed else (head, "")

    # Turns put together

    def _check_rounds(self) -> None:
        """Finds the tokens that end a turn, and whether a user may speak after one. Raises TemplateRefused if a
        conversation rendered at once differs from the same conversation rendered turn by turn."""
        rounds: list[tuple[Message, list[Message]]] = []
        for index, count in enumerate((1, 3, 2, 1) if self._form.dialect is not _NO_TOOLS else ()):
            calls = [
                self._form.call("dummy", {"text": f"Dummy {index}."}, number, f"call{index:03d}{number:02d}")
                for number in range(count if self._form.several else 1)
            ]
            rounds.append(
                (self._form.turn(calls), [result(call, text) for call, text in zip(calls, RESULTS, strict=False)])
            )
        with_requests: list[tuple[Message, list[Message]]] = [({"role": "assistant", "content": TURN}, [REQUEST])] * 2
        self._requests = True
        try:
            self._check_conversations([*rounds, *with_requests])
        except (TemplateRefused, jinja2.TemplateError):
            if not rounds:
                raise
            self._requests = False  # some templates have no place for a user after results of tools
            with_text = [(dict(turn) | {"content": "Dummy text."}, then) for turn, then in rounds[2:]]
            self._check_conversations([*rounds, *with_text])

    def _check_conversations(self, rounds: Sequence[tuple[Message, list[Message]]]) -> None:
        dialect = self._form.dialect
        self._ends = trial.ends_pattern(self._form.ends)
        ends = {self._turn(*each)[1]: bool(each[0].get("tool_calls")) for each in rounds}
        # Of tokens that equally end a turn in the history, only the dialect's stops end a sampled one.
        stops = [end for end in ends if not (dialect.stops and end in dialect.ends)] + list(dialect.stops)
        ids = [*(self._ids[name] for name in stops if name in self._ids), *self._eos_ids]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        # The token after a turn without and with calls, for templates that write it with the next message.
        behind = {calls: self._ids[end] for end, calls in ends.items()}
        self._ends_of_turns = tuple(behind.get(calls, self.stop_ids[0]) for calls in (False, True))
        for tools in ((), (trial.TOOL,)) if dialect is not _NO_TOOLS else ((),):
            self._check_conversation(rounds, tools)

    def _turn(self, turn: Message, then: Sequence[Message]) -> tuple[str, str]:
        """The text of a turn as the model should sample it, and the token that ends it."""
        text = self._opening.after(self._template.render([USER, turn, *then]))
        sampled, end, _ = trial.cut(text, self._form.ends, then[0]["content"])
        return trial.without_tags(sampled, self._tags), end

    def _check_conversation(self, rounds: Sequence[tuple[Message, list[Message]]], tools: Sequence[Tool]) -> None:
        messages: list[Message] = [{"role": "system", "content": "Dummy system."}, USER]
        try:
            ids = self.prompt(messages, tools)
        except ValueError:  # some templates have no place for a system message
            del messages[0]
            ids = self.encode_marked(self._template.render(messages, tools), "\0")
        thought = f"Dummy thought.{self._tags[1]}" if self._opening.in_thought else ""
        for turn, then in rounds:
            text, end = self._turn(turn, then)
            sampled = [*self.encode_marked(thought + text, "\0"), self._ids[end]]
            calls = [_name_and_arguments(call) for call in turn.get("tool_calls", ())]
            if [(c.name, c.arguments) for c in self.parse(sampled, "stop", [trial.TOOL]).calls] != calls:
                raise TemplateRefused("a call behind a thought is not read again")
            try:
                results = [m["content"] for m in then]
                ids += sampled + (self.bridge(sampled, "stop", results) if calls else self.follow(sampled, then))
            except ValueError as e:
                raise TemplateRefused(str(e)) from None
            messages += [turn, *then]
        whole = self._template.render(messages, tools)
        own = self._tokenizer.encode(whole, add_special_tokens=False).ids
        if self.encode_marked(whole, "\0") != own:
            raise TemplateRefused("its text is cut into tokens in a way that cannot be followed")
        # The model saw its thoughts, so they stay where templates drop them.
        if self._skeleton(self.text(ids), thought) != self._skeleton(self.text(own), thought):
            raise TemplateRefused("turns put together differ from the whole conversation")

    def _skeleton(self, text: str, thought: str) -> str:
        text = text.replace(thought, "") if thought else text
        return re.sub(rf"\s|{'|'.join(map(re.escape, self._tags))}", "", text)

    def _refusal(self, why: str) -> UserError:
        return UserError(
            f"The chat template of {self._template.name} cannot be used by turns: {why}; {self._advice()}."
        )

    def _cannot_call(self) -> str:
        return f"the chat template of {self._template.name} cannot call tools: {self._no_tools}; {self._advice()}"

    def _advice(self) -> str:
        """Advice on a refused template: a bundled one serves models that mark turns like ChatML."""
        name = CHAT_TEMPLATES[0] if self._ids.keys() >= set(_CHATML) else "FILE"
        return f"give another with --chat-template {name} (model.chat_template), or use another model"


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, Any]:
    arguments = call["function"]["arguments"]
    return call["function"]["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
