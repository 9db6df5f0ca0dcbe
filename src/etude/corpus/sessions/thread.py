"""Threads of messages, and the tree in which their equal beginnings meet.

A request of an agent repeats the conversation so far, a session that is taken back goes on elsewhere, and a fork
copies its beginning: so the same answer stands in many threads. It is learned in one row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import blake3

from etude.protocol.apis import RequestRefused, arranged, as_refusal, conversation_digest
from etude.renderers import Message, Tool

Row = dict[str, Any]


@dataclass(frozen=True)
class AgentThread:
    """One conversation of an agent. Messages are in OpenAI's format; an assistant's message has the weight 1 if the
    model said it, and all of it. `origin` says where the thread is from (JSON-ready)."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class _ThreadNode:
    """A message of the tree, behind `parent`."""

    parent: _ThreadNode | None
    message: Message
    origin: Mapping[str, Any]
    tools: tuple[Tool, ...]
    children: int = 0


def learned(message: Message) -> bool:
    """Whether a message is one of the assistant's to learn from."""
    return message["role"] == "assistant" and bool(message.get("weight", 0))


def readable(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The longest beginning of a conversation whose calls and results are pairs, as renderers take it. Empty if there
    is none with an answer."""
    ends = [len(messages), *(i for i, message in enumerate(messages) if message["role"] == "user")][::-1]
    for end in sorted(set(ends), reverse=True):
        try:
            with as_refusal():
                shown = arranged(messages[:end])
        except RequestRefused:
            continue
        return shown if any(message["role"] == "assistant" for message in shown) else ()
    return ()


def thread_rows(threads: Iterable[AgentThread]) -> Iterator[Row]:
    """A row for each different way through the threads, in the order of their first ends:

        {"messages": [...], "tools": [...], "id": hex, "origin": {...}}

    Each message to learn has the weight 1 in exactly one row. The tree holds each different message once."""
    nodes: dict[bytes, _ThreadNode] = {}
    for thread in threads:
        digest = blake3.blake3(json.dumps(thread.tools, sort_keys=True).encode()).digest()
        parent: _ThreadNode | None = None
        last = max((i for i, message in enumerate(thread.messages) if learned(message)), default=-1)
        for message in thread.messages[: last + 1]:
            digest = conversation_digest(digest, message)
            node = nodes.get(digest)
            if node is None:
                node = nodes[digest] = _ThreadNode(parent, message, thread.origin, thread.tools)
                if parent is not None:
                    parent.children += 1
            elif learned(message) and not learned(node.message):
                node.message, node.origin = message, thread.origin  # as the model said it, thoughts and all
            parent = node
    done: set[int] = set()
    for digest, leaf in nodes.items():
        if leaf.children:
            continue
        way: list[_ThreadNode] = []
        node: _ThreadNode | None = leaf
        while node is not None:
            way.append(node)
            node = node.parent
        way.reverse()
        messages: list[Message] = []
        for node in way:
            first = learned(node.message) and id(node) not in done
            done.add(id(node))
            plain = {key: value for key, value in node.message.items() if key != "weight"}
            messages.append(plain | {"weight": int(first)} if node.message["role"] == "assistant" else plain)
        row: Row = {"messages": messages, "id": digest.hex()[:32], "origin": dict(leaf.origin)}
        yield row | ({"tools": list(leaf.tools)} if leaf.tools else {})
