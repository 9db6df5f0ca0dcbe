"""The reader of chat APIs: a request as messages and tools of one form, for every entrance.

"chat" (OpenAI's chat completions), "responses" (OpenAI) and "messages" (Anthropic) hold the same things in other
places: texts, thoughts, calls and their results. A message that is read has a `role` ("developer" is "system"), its
text as `content`, and, where it has them, `tool_calls`, `tool_call_id`, `reasoning_content`, `name` and `weight`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, TypeVar

from etude.protocol.apis.conversation import AgentRequest, RequestRefused, invalid, to_answer
from etude.renderers import Message, Tool, document_text, printable

T = TypeVar("T")
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_PLACES = {"chat": ("", "messages"), "responses": ("instructions", "input"), "messages": ("system", "messages")}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_BESIDE = ("name", "weight", "tool_call_id")
_RUN_HERE = re.compile(r"(bash|computer|memory|text_editor)_\d+")  # by the client, with a schema that Anthropic knows
_FREE = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def read(
    api: str,
    body: Mapping[str, Any],
    *,
    strict: bool = True,
    before: Sequence[Message] = (),
    documents: list[str] | None = None,
) -> list[Message]:
    """The messages of a request, behind those of `before`. The texts of documents are appended to `documents`; without
    it they are parts that a model cannot read, as images are. `strict` raises RequestRefused for such parts, and an
    error of `as_refusal` for what is not in the API's format; otherwise both are left out."""
    first, place = _PLACES[api]
    entries: Any = body.get(place)
    if api == "responses" and isinstance(entries, str):
        entries = [{"role": "user", "content": entries}]
    system = [{"role": "system", "content": body[first]}] if body.get(first) else []
    parts = [_each(lambda entry: _messages(entry, strict, documents), each, strict) for each in (system, entries)]
    messages = [*before, *chain.from_iterable(parts)]
    return messages if api != "responses" else _joined(messages)


def request_of(body: Mapping[str, Any], messages: Sequence[Message]) -> AgentRequest:
    """A body with these messages as a request, without its sampling parameters and the tools that a provider runs."""
    stop = body.get("stop") or body.get("stop_sequences") or ()
    return AgentRequest(
        model=str(body.get("model") or ""),
        messages=to_answer(messages),
        tools=tools_of(body),
        stops=tuple(filter(None, [stop] if isinstance(stop, str) else stop)),
        max_tokens=next((body[name] for name in _LIMITS if body.get(name) is not None), None),
        stream=bool(body.get("stream")),
    )


def tools_of(body: Mapping[str, Any], *, strict: bool = True) -> tuple[Tool, ...]:
    """The tools of a request of any API that its client runs, as OpenAI's functions; none if its `tool_choice` says so.
    A tool that a provider runs is left out. `strict`: see `read`."""
    if body.get("tool_choice") in ("none", {"type": "none"}):
        return ()
    return tuple(_each(_functions, body.get("tools") or [], strict))


def _each(parse: Callable[[Any], Iterable[T]], entries: Any, strict: bool) -> Iterator[T]:
    if strict and not isinstance(entries, list):
        raise TypeError("messages and tools are lists")
    for entry in entries if isinstance(entries, list) else ():
        try:
            yield from parse(entry)
        except (RequestRefused, KeyError, TypeError, AttributeError, ValueError):
            if strict:
                raise


def _messages(entry: dict[str, Any], strict: bool, documents: list[str] | None) -> Iterator[Message]:
    """A message, or an item of the responses API, as messages: the results in it, then the rest."""
    whole = "role" in entry or "type" not in entry
    role, content = (entry["role"], entry.get("content")) if whole else ("assistant", [entry])
    if role == "function" or entry.get("function_call"):
        raise invalid("`function_call` and function messages are an old format: send `tool_calls` and tool messages")
    if not isinstance(content, str | list | None):
        raise invalid("a message's content must be text or a list of parts")
    texts, calls, results = list[str](), list[dict[str, Any]](), list[Message]()
    thoughts = [thought for key in _THOUGHTS if isinstance(thought := entry.get(key), str)][:1]
    parts = [content] if isinstance(content, str) else content or [entry.get("refusal") or ""]
    parts = [{"text": part} if isinstance(part, str) else part for part in parts]
    for part in [*parts, *(entry.get("tool_calls") or ())]:
        match part.get("type") or ("function" if "function" in part else "text"):
            case "text" | "input_text" | "output_text" | "refusal":
                texts.append(str(part.get("text") or part.get("refusal") or ""))
            case "document" if documents is not None:
                documents.append(_document(part))
            case "thinking":
                thoughts.append(part["thinking"])
            case "reasoning":
                thoughts += [each["text"] for each in part.get("content") or part.get("summary") or ()]
            case "redacted_thinking":
                pass
            case "function":
                calls.append(_call(part.get("id"), part["function"]["name"], part["function"].get("arguments")))
            case "tool_use":
                calls.append(_call(part["id"], part["name"], part["input"]))
            case "function_call":
                calls.append(_call(part["call_id"], part["name"], part["arguments"]))
            case "custom_tool_call":
                calls.append(_call(part["call_id"], part["name"], {"input": part["input"]}))
            case "tool_result" | "function_call_output" | "custom_tool_call_output":
                result = {"role": "tool", "content": part.get("content", part.get("output"))}
                for shown in _messages(result, strict, None):
                    results.append(dict(shown) | {"tool_call_id": part.get("tool_use_id", part.get("call_id"))})
            case kind if strict:
                raise invalid(f"the model reads text only, not a part of type {kind!r}")
    yield from results
    if calls and role != "assistant":
        raise invalid(f"calls stand in messages of the assistant, not of the role {role!r}")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    if texts or calls or (whole and not results):
        message["content"] = printable("".join(texts))
    message |= {key: entry[key] for key in _BESIDE if entry.get(key) is not None}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning_content": printable("".join(thoughts))} if thoughts and role == "assistant" else {}
    if len(message) > 1:
        yield message


def _joined(messages: Iterable[Message]) -> list[Message]:
    """The items of one turn (thoughts, text, calls) as one message; thoughts alone are none."""
    turns: list[Message] = []
    for role, group in groupby(messages, lambda message: message["role"]):
        items = list(group)
        if role == "assistant":
            texts = {key: [item[key] for item in items if key in item] for key in ("content", "reasoning_content")}
            turn: dict[str, Any] = {"role": role} | {key: "".join(text) for key, text in texts.items() if text}
            calls = [call for item in items for call in item.get("tool_calls", ())]
            items = [turn | ({"tool_calls": calls} if calls else {})] if texts["content"] else []
        turns += items
    return turns


def _call(call_id: object, name: object, arguments: object) -> dict[str, Any]:
    """A call of an assistant's message; `arguments` as JSON text or as an object."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(call_id or ""), "type": "function", "function": {"name": str(name), "arguments": text}}


def _document(part: dict[str, Any]) -> str:
    """The text of a document part, in one of two forms:

        {"type": "document", "title": "src/m.py", "text": "def f(): ..."}
        {"type": "document", "title": "src/m.py", "source": {"type": "text", "media_type": "text/plain", "data": "..."}}

    The second is Anthropic's. Other keys (`citations`, `cache_control`, `context`) are ignored."""
    text, title, source = part.get("text"), part.get("title"), part.get("source")
    if text is None and isinstance(source, dict):
        if source.get("type") != "text":
            raise invalid(f"a document's source is of type {source.get('type')!r}: send its text, as type 'text'")
        text = source.get("data")
    if not isinstance(text, str) or not isinstance(title, str | None):
        raise invalid("a document part needs its text, and may have a title: both are strings")
    return document_text(title or "", text)


def _functions(tool: dict[str, Any]) -> Iterator[Tool]:
    kind = tool.get("type") or "custom"
    if _RUN_HERE.match(kind):
        raise invalid(f"the schema of a tool of type {kind!r} is not known here: describe it", "tools")
    if kind not in ("function", "custom"):
        return
    shown = tool.get("function") or tool
    name, schema = shown.get("name"), shown.get("parameters", shown.get("input_schema"))
    if not isinstance(name, str) or not name:
        raise invalid("a tool has no function with a name", "tools")
    if not isinstance(schema, dict | None):
        raise invalid("the parameters of a tool are a JSON schema", "tools")
    schema = schema or (_FREE if tool.get("type") == "custom" else {"type": "object"})
    function = {"name": name, "description": str(shown.get("description") or ""), "parameters": schema}
    yield {"type": "function", "function": function}
