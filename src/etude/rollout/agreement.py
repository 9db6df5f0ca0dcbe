"""Two rollouts that agree: a way to learn from a repository without its tests or its installation.

    first rollout    changes a function by a vague instruction, and leaves a patch
    request          the model writes the title and the body that would lead to this patch
    second rollout   sees the request alone, in a fresh box; it is kept if its patch has most of the first one's lines

The method, with its measure of agreement (recall of the first patch's changed lines), is that of SERA
(arXiv 2601.20789). A rollout counts only if the agent ended it. Rows are conversations in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from typing import Any

from msgspec import structs

from etude.code import lines_of
from etude.code.functions import is_junk
from etude.harness import EngineModel, EpisodeSpec, FullTools, Model, Opening, Tools, UngradedEpisode, run_agent_loop
from etude.records import Budget, StopReason, Task
from etude.renderers import SCHEMAS, ParsedTurn
from etude.rollout.environments.environment import BOX_SECONDS
from etude.rollout.pull_requests import REQUEST_SYSTEM
from etude.sandbox import BoxError, Image, Limits, Sandbox

KINDS = {
    "edge": "It does not handle every input at the limits of what it takes. Find such a case, and handle it.",
    "error": "A caller's mistake leads to a confusing error, or to none. Make it fail early and clearly.",
    "bug": "There may be a mistake in what it does. Find the most likely one, and correct it.",
    "simplify": "It is harder to read than it has to be. Simplify it without a change of what it does.",
    "speed": "It does work that it could save. Make it faster without a change of what it returns.",
    "option": "It serves fewer uses than it could. Add a small option whose default keeps what it does.",
    "duplicate": "Part of it stands elsewhere in the repository, or is said twice. Share that part.",
    "contract": "Its documentation and what it does may differ. Bring them together.",
    "state": "It may change what belongs to its caller, or keep something open. Look for this, and mend it.",
    "split": "It does several things at once. Move one of them to a function of its own.",
    "types": "Its annotations are missing, or wider than they need to be. Make them say what it takes and returns.",
    "callers": "Look at how it is called. Change it, and its callers where needed, so that calls become simpler.",
}
_VAGUE = """Look at `{name}` in {path}, lines {first} to {last}. {kind}

Change code only, as little as it takes. If something else than that is clearly wrong with it, mend that instead."""
_ASK = """This is a patch of the repository {repository}:

```diff
{patch}
```

Write the request that would lead a colleague to this patch, as the title and the body of a pull request: what is wrong
or missing, where it shows, and what is to hold afterwards. The colleague does not see the patch. Quote no line of it.
Answer with the title on the first line, an empty line, and the body; nothing else."""
_WRITER = "You write clear requests for changes of a code base."
CHANGE_TOOLS = tuple(name for schema in SCHEMAS if (name := schema["function"]["name"]) not in ("test", "history"))
MAX_PATCH = 12_000  # characters
MAX_TITLE, MAX_REQUEST = 200, 4000  # characters
_QUOTED = 12  # characters of a changed line that is a quotation wherever it stands; a shorter one where it stands alone
_BLANK = re.compile(r"\s+")


class LeftOut(Exception):
    """A try makes no row, for a reason."""


@dataclass(frozen=True)
class ChangeTarget:
    """A function that the first rollout changes, and the kind of change, a key of KINDS."""

    repository: str
    path: str
    name: str
    first_line: int
    last_line: int
    kind: str

    @property
    def instruction(self) -> str:
        """The user's message of the first rollout."""
        place = {"name": self.name, "path": self.path, "first": self.first_line, "last": self.last_line}
        return _VAGUE.format(kind=KINDS[self.kind], **place)


@dataclass(frozen=True)
class RepositoryTree:
    """The files of a repository by path, and the image of a box that holds them."""

    files: Mapping[str, bytes]
    image: Image


@dataclass(frozen=True)
class LinePatch:
    """A change of files: as a unified diff, and its removed and added lines with path and sign, blank ones left out."""

    text: str = ""
    lines: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])


@dataclass(frozen=True)
class PlayedChange:
    """A rollout that its agent ended: the conversation, and the patch."""

    messages: Sequence[dict[str, Any]]
    patch: LinePatch

    def row(self) -> dict[str, Any]:
        """The conversation with its tools, to train on."""
        tools = [schema for schema in SCHEMAS if schema["function"]["name"] in CHANGE_TOOLS]
        return {"messages": list(self.messages), "tools": tools}


@dataclass(frozen=True)
class AgreedPair:
    """Two rollouts whose patches agree, and the share of the first patch's lines that the second has."""

    first: PlayedChange
    second: PlayedChange
    agreement: float


def line_patch(before: Mapping[str, bytes], changes: Mapping[str, bytes | None]) -> LinePatch:
    """The patch of a box's changes (None: deleted). Binary files and caches are not in it."""
    texts: list[str] = []
    lines: Counter[tuple[str, str]] = Counter()
    for path in sorted(changes):
        old, new = before.get(path, b""), changes[path] or b""
        if is_junk(path) or b"\0" in old + new:
            continue
        old_lines, new_lines = (lines_of(data.decode("utf-8", "replace")) for data in (old, new))
        diff = list(unified_diff(old_lines, new_lines, f"a/{path}", f"b/{path}", lineterm=""))
        texts += diff
        for line in diff[2:]:
            if line[0] in "+-" and line[1:].strip():
                lines[path, line.rstrip()] += 1
    return LinePatch("\n".join(texts), lines)


def agreement(first: LinePatch, second: LinePatch) -> float:
    """The share of the first patch's changed lines that the second has, too. The first is not empty."""
    return (first.lines & second.lines).total() / first.lines.total()


def checked_request(answer: str, patch: LinePatch) -> str:
    """A model's answer as title and body. Raises LeftOut if it has not this form or quotes a changed line."""
    title, _, body = (part.strip() for part in answer.strip().partition("\n"))
    if not body or not re.search(r"\w", title) or len(title) > MAX_TITLE or len(title + body) > MAX_REQUEST:
        raise LeftOut("its request is no title and body")
    text = f"{title}\n\n{body}"
    whole = _BLANK.sub(" ", text)
    pieces = [*lines_of(text), *re.findall(r"`+([^`]+)`+", text)]
    alone = {_BLANK.sub(" ", piece).strip(" `>+-*") for piece in pieces}
    for _, changed in patch.lines:
        line = _BLANK.sub(" ", changed[1:]).strip()
        if (len(line) >= _QUOTED and line in whole) or line.strip(" `>+-*") in alone:
            raise LeftOut("its request quotes the patch")
    return text


async def agreed_pair(
    target: ChangeTarget,
    tree: RepositoryTree,
    sandbox: Sandbox,
    model: Model,
    budget: Budget,
    seed: int,
    threshold: float,
) -> AgreedPair:
    """Two rollouts whose patches agree by at least `threshold`. Raises LeftOut, and the errors of `run_agent_loop`."""
    first = await _change(target.instruction, tree, sandbox, EpisodeSpec(_task("first"), model, budget, seed), "first")
    if not first.patch.lines:
        raise LeftOut("its first rollout changes nothing")
    if len(first.patch.text) > MAX_PATCH:
        raise LeftOut("its first patch is too long")
    writer = EpisodeSpec(_task("request"), model, structs.replace(budget, turns=1), seed + 1)
    request = await _request(target.repository, first.patch, writer)
    second = await _change(request, tree, sandbox, EpisodeSpec(_task("second"), model, budget, seed + 2), "second")
    if not second.patch.lines:
        raise LeftOut("its second rollout changes nothing")
    if (share := agreement(first.patch, second.patch)) < threshold:
        raise LeftOut("its patches disagree")
    return AgreedPair(first, second, share)


def _task(id: str) -> Task:
    return Task(id=id, prompt="")


async def _change(prompt: str, tree: RepositoryTree, sandbox: Sandbox, spec: EpisodeSpec, which: str) -> PlayedChange:
    """A rollout in a fresh box."""
    opened = [{"role": "system", "content": REQUEST_SYSTEM}, {"role": "user", "content": prompt}]

    async def messages(memory: str) -> list[dict[str, str]]:
        return [*opened[:1], {"role": "user", "content": f"{prompt}\n\n{memory}".strip()}]

    async with asyncio.timeout(BOX_SECONDS):
        box = await sandbox.create(tree.image, Limits())
    try:
        ungraded = await run_agent_loop(spec, Opening(FullTools(box, spec.task, names=CHANGE_TOOLS), messages))
        if ungraded.stop_reason is not StopReason.FINISHED or ungraded.timed_out:
            raise LeftOut(f"its {which} rollout does not end by itself")
        try:
            async with asyncio.timeout(BOX_SECONDS):
                changes = await box.changes()
        except BoxError as e:
            if e.payer == "infra":
                raise
            raise LeftOut(f"its {which} rollout leaves a box that cannot be read") from None
    finally:
        await box.close()
    patch = await asyncio.to_thread(line_patch, tree.files, changes)
    return PlayedChange([*opened, *_turn_messages(spec.model, ungraded)], patch)


async def _request(repository: str, patch: LinePatch, spec: EpisodeSpec) -> str:
    """The request for a patch, in one turn without tools."""
    prompt = _ASK.format(repository=repository, patch=patch.text)

    async def messages(_: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": _WRITER}, {"role": "user", "content": prompt}]

    no_box: Any = None  # there are no tools
    ungraded = await run_agent_loop(spec, Opening(Tools(no_box, spec.task), messages))
    if ungraded.stop_reason is not StopReason.FINISHED or ungraded.turns[-1].calls:
        raise LeftOut("its request is no title and body")
    return checked_request(ungraded.answer, patch)


def _turn_messages(model: Model, ungraded: UngradedEpisode) -> list[dict[str, Any]]:
    """The turns as messages, up to the last one of the assistant. A turn with a malformed call is context, not a
    target."""
    texts = [(turn.text, "") for turn in ungraded.turns]
    if isinstance(model, EngineModel):
        texts = [
            (parsed.text.strip(), parsed.reasoning)
            for segment in ungraded.segments
            for start, end in segment.spans()
            for parsed in [_parsed(model, segment.arrays()[0][start:end].tolist())]
        ]
    messages: list[dict[str, Any]] = []
    for number, (turn, (text, thoughts)) in enumerate(zip(ungraded.turns, texts, strict=True)):
        ids = [f"call_{number}_{at}" for at in range(len(turn.calls))]
        calls = [
            {"id": id, "type": "function", "function": {"name": call.name or "unnamed", "arguments": arguments}}
            for id, call in zip(ids, turn.calls, strict=True)
            for arguments in [json.dumps(call.arguments or {})]
        ]
        if calls or text or thoughts:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            message |= {"reasoning_content": thoughts} if thoughts else {}
            message |= {"tool_calls": calls} if calls else {}
            messages.append(message | ({"weight": 0} if any(call.arguments is None for call in turn.calls) else {}))
        messages += [
            {"role": "tool", "tool_call_id": id, "content": result}
            for id, result in zip(ids, turn.results, strict=False)  # calls after `finish` have none
        ]
    while messages and messages[-1]["role"] == "tool":
        messages.pop()
    return messages


def _parsed(model: EngineModel, ids: list[int]) -> ParsedTurn:
    return model.renderer.parse(ids, "stop" if ids and ids[-1] in model.renderer.stop_ids else "length")
