"""Encodes conversations as training text: messages in JSON lines (OpenAI's format) and ATIF trajectories.

A conversation is encoded as the harness plays it: the prompt up to the first turn of the assistant, then every turn as
the model samples it, then the messages between two turns. So each learned token has the context in which the model
samples it. The tokens of the assistant are learned: text, thoughts, calls, the end of a turn.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}], "tools": [...]}   a line of a .jsonl
    {"schema_version": "ATIF-v1.8", "steps": [...]}                               a .json file, or a line of a .jsonl
    {"text": "..."}                                                  a line of a .jsonl, for mid-training: plain text
    {"prefix": "...", "suffix": "...", "middle": "..."}              the same, for fill-in-the-middle

`"weight": 0` in an assistant's message leaves the message unlearned, as in OpenAI's format. A row that cannot be used
or holds a likely secret is returned as a `RefusedRow` with the reason; no row is dropped or cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from etude.code import secret_in_json
from etude.corpus.corpus_folder import is_corpus
from etude.corpus.packing import Encoded
from etude.errors import UserError
from etude.protocol.apis import RequestRefused, arranged, as_refusal, read, tools_of
from etude.renderers import Message, Renderer, Tool, escaped, printable, printable_json


@dataclass(frozen=True)
class Chat:
    """A conversation in OpenAI's format."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class LearnedRow:
    """A row to learn from: token ids and mask. `id` and `source` are those that the row names, if it does. A `whole`
    row may not be cut, in mid-training either."""

    name: str
    tokens: Encoded
    id: str = ""
    source: str = ""
    whole: bool = False


@dataclass(frozen=True)
class RefusedRow:
    """A row that cannot be used, with the reason."""

    name: str
    why: str


Row = LearnedRow | RefusedRow
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # an escape or bytes of one, perhaps of a whole pair


def encode_chat(chat: Chat, renderer: Renderer) -> Encoded:
    """Ids (uint32) and mask (uint8) of a conversation, [T] each. Messages after the assistant's last turn are left out.
    Raises ValueError if the renderer refuses the messages, or if there is no token to learn."""
    turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not any(chat.messages[i].get("weight", 1) for i in turns):
        raise ValueError("no message of the assistant is to be learned")
    if turns[0] == 0:
        raise ValueError("it begins with the assistant: a message of the user must come first")
    ids, learned = list(renderer.prompt(chat.messages[: turns[0]], chat.tools)), list[tuple[int, int]]()
    for at, following in zip(turns, [*turns[1:], None], strict=True):
        turn = renderer.turn(chat.messages[at])
        if chat.messages[at].get("weight", 1):
            learned.append((len(ids), len(ids) + len(turn)))
        ids += turn
        if following is not None:
            ids += renderer.follow(turn, chat.messages[at + 1 : following])
    mask = np.zeros(len(ids), dtype=np.uint8)
    for start, end in learned:
        mask[start:end] = 1
    return np.array(ids, dtype=np.uint32), mask


@dataclass(frozen=True)
class RowEncoders:
    """The encoders of rows: conversations by the renderer; text, and the parts of fill-in-the-middle (prefix,
    suffix, middle), in mid-training alone. Trajectories with a reward below `min_reward`, or without a reward, are
    refused, and those with token ids from `vocabulary` on."""

    renderer: Callable[[], Renderer]
    text: Callable[[str], Encoded] | None = None
    middle: Callable[[str, str, str], LearnedRow] | None = None
    min_reward: float | None = None
    vocabulary: int = 2**32


def read_row(name: str, source: bytes, encoders: RowEncoders) -> Iterator[Row]:
    """The rows of one JSON text, several of a trajectory. Raises any UserError of the encoders."""
    try:
        row: Any = json.loads(source)
        if _SURROGATE.search(source):  # texts are encoded; ids, names and keys are written to files
            row = printable_json(row)
    except (ValueError, RecursionError) as e:
        yield RefusedRow(name, f"not JSON: {e}")
        return
    if (rule := secret_in_json(row)) is not None:
        yield RefusedRow(name, f"it holds a likely secret ({rule})")
        return
    try:
        with as_refusal():
            names = {key: value for key in ("id", "source") if isinstance(row, dict) and (value := _named(row, key))}
            for one in _rows_of(name, row, encoders):
                if isinstance(one, LearnedRow) and not one.tokens[1].any():
                    one = RefusedRow(one.name, "there is no token to learn in it")
                yield replace(one, **names) if isinstance(one, LearnedRow) else one
    except RequestRefused as e:
        yield RefusedRow(name, str(e))


def _named(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    return value if isinstance(value, str) else ""


def chat_files(path: Path, part: str = "train") -> list[Path]:
    """The file, or the .json and .jsonl files below a folder, sorted; of a corpus folder those of a part. Raises
    UserError if there is none, or for a folder around a corpus, whose held-out rows would be among the others, or
    around one that is being built."""
    if is_corpus(path):
        files = sorted((path / part).rglob("*.jsonl"))
    elif path.is_dir():
        files = sorted(file for kind in ("*.json", "*.jsonl") for file in path.rglob(kind))
        for file in files:
            if file.name == "corpus.json" and (file.parent / "train").is_dir():
                raise UserError(f"data: {path} holds the corpus {file.parent}: name the corpus folder itself")
            if file.name == "plan.json" and file.parent.suffix == ".building":
                raise UserError(f"data: {file.parent} is a corpus that is being built: wait for its end")
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise UserError(f"data: {path} is neither a file nor a folder with .json or .jsonl files")
    for file in files:
        if printable(str(file)) != str(file):
            raise UserError(f"data: the name of {escaped(str(file))} is no text (UTF-8): rename the file")
    return files


def _rows_of(name: str, row: Any, encoders: RowEncoders) -> Iterator[Row]:
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if "steps" in row:
        yield from _trajectory(name, row, encoders)
    elif "messages" in row:
        yield LearnedRow(name, encode_chat(chat_of(name, row), encoders.renderer()))
    elif encoders.text is not None and isinstance(row.get("text"), str):
        if not row["text"]:
            raise ValueError("its `text` is empty")
        yield LearnedRow(name, encoders.text(row["text"]))
    elif encoders.middle is not None and (parts := middle_of(row)) is not None:
        if not any(parts):
            raise ValueError("its `prefix`, `suffix` and `middle` are empty")
        yield replace(encoders.middle(*parts), name=name)
    else:
        known = "`messages` (OpenAI's format) or `steps` (ATIF)"
        known += " or `text`" if encoders.text else ""
        known += " or `prefix`, `suffix` and `middle`" if encoders.middle else ""
        raise ValueError(f"a row has {known}, this one {', '.join(map(str, row)) or '-'}")


def middle_of(row: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Prefix, suffix and middle of a row for fill-in-the-middle; None for another row."""
    prefix, suffix, middle = map(row.get, ("prefix", "suffix", "middle"))
    if isinstance(prefix, str) and isinstance(suffix, str) and isinstance(middle, str):
        return prefix, suffix, middle
    return None


def chat_of(name: str, row: Mapping[str, Any]) -> Chat:
    """A row in OpenAI's format. Raises RequestRefused for what is no chat, ValueError for what cannot be learned."""
    if row.get("functions"):
        raise ValueError("`functions` is the old format of calls: use `tools` and `tool_calls`")
    messages = read("chat", row)
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not any(map(message.get, ("content", "reasoning_content", "tool_calls"))):
            raise ValueError(f"message {number}, of the assistant, is empty")
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(f"message {number} has the weight {message['weight']!r}: it is 0 or 1")
    return Chat(name, arranged(messages), tools_of(row))


def _trajectory(name: str, document: Mapping[str, Any], encoders: RowEncoders) -> Iterator[Row]:
    """The rows of an ATIF trajectory. Trajectories of `etude export` are read by their token ids, others as one
    conversation."""
    renderer, min_reward = encoders.renderer(), encoders.min_reward
    if not str(document.get("schema_version", "")).startswith("ATIF-"):
        raise ValueError('`steps` without a schema_version "ATIF-...": not a trajectory')
    extra = document.get("extra") or {}
    if min_reward is not None and not (extra.get("reward") is not None and extra["reward"] >= min_reward):
        raise ValueError(f"its reward is {extra.get('reward')}, below data.min_reward = {min_reward}")
    if "renderer" not in extra:
        tools = (document.get("agent") or {}).get("tool_definitions")
        chat = chat_of(name, {"messages": list(_messages(document)), "tools": tools})
        yield LearnedRow(name, encode_chat(chat, renderer))
    elif extra["renderer"] != renderer.digest:
        raise ValueError("its prompts are the tokens of another tokenizer or chat template than this model's")
    else:
        yield from _segments(name, document["steps"], encoders.vocabulary)


def _segments(name: str, steps: Sequence[Mapping[str, Any]], vocabulary: int) -> Iterator[Row]:
    """A row for each segment of an exported episode, with the tokens of the episode."""
    segments: list[tuple[list[int], list[int]]] = []
    for step in steps:
        number, metrics = step["step_id"], step.get("metrics")
        if step["source"] != "agent":
            continue
        if metrics is None:
            yield RefusedRow(f"{name}, step {number}", "a turn beside the conversation, whose prompt is not recorded")
            continue
        begins = "prompt_token_ids" in metrics
        seen = _ids(metrics["prompt_token_ids"] if begins else metrics["extra"]["added_token_ids"], vocabulary)
        sampled = _ids(metrics["completion_token_ids"], vocabulary)
        if begins:
            if not seen:
                raise ValueError(f"step {number} has an empty prompt")
            segments.append(([], []))
        if not segments:
            raise ValueError(f"step {number} goes on from a prompt that is not there")
        ids, mask = segments[-1]
        ids += [*seen, *sampled]
        mask += [0] * len(seen) + [1] * len(sampled)
    if not segments:
        raise ValueError("it holds no message of the agent")
    for number, (ids, mask) in enumerate(segments, 1):
        one = name if len(segments) == 1 else f"{name}, segment {number}"
        yield LearnedRow(one, (np.array(ids, dtype=np.uint32), np.array(mask, dtype=np.uint8)))


def _ids(values: Any, vocabulary: int) -> list[int]:
    """Token ids as an episode recorded them. Raises ValueError for anything else."""
    if not isinstance(values, list) or any(type(one) is not int or not 0 <= one < vocabulary for one in values):
        raise ValueError(f"its token ids are no lists of numbers below {vocabulary:,}, the model's vocabulary")
    return values


def _messages(document: Mapping[str, Any]) -> Iterator[Message]:
    """The steps of a trajectory as messages. An observation without a call becomes a message of the user."""
    for step in document["steps"]:
        calls = [
            {
                "id": call["tool_call_id"],
                "function": {"name": call["function_name"], "arguments": call["arguments"]},
            }
            for call in step.get("tool_calls") or ()
        ]
        # A step that is a copy is learned in the earlier trajectory.
        yield {
            "role": {"agent": "assistant"}.get(step["source"], step["source"]),
            "content": step.get("message"),
            "tool_calls": calls,
            "reasoning_content": step.get("reasoning_content"),
            "weight": 0 if step.get("is_copied_context") else None,
        }
        results = (step.get("observation") or {}).get("results") or ()
        named = any(result.get("source_call_id") for result in results)
        for result in results:
            source = result.get("source_call_id")
            shown = {"role": "tool", "tool_call_id": source} if source or (calls and not named) else {"role": "user"}
            yield shown | {"content": result.get("content")}
