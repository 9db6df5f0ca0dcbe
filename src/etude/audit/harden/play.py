"""Plays the attackers of one task: each leaves a final state, which is graded as an episode's would be."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.audit.attacks.packs import attempt
from etude.audit.harden.attackers import Attacker
from etude.code import parse
from etude.records import CodeTask, Outcome
from etude.sandbox import BoxError, Changes, Sandbox
from etude.tasks import Dataset

PLAY_SECONDS = 120.0  # of one attacker, its grade included
_TRIES = 2  # of an attack whose boxes are lost


@dataclass(frozen=True)
class TaskFall:
    """A reward that an attacker earned."""

    attacker: Attacker
    changes: Changes
    detail: str


@dataclass
class PlayedTask:
    """The result of all attackers of a task. `lost` are those that boxes lost, with the reason."""

    falls: list[TaskFall] = field(default_factory=list[TaskFall])
    lost: dict[str, str] = field(default_factory=dict[str, str])


async def play(sandbox: Sandbox, data: Dataset, task: CodeTask, attackers: Sequence[Attacker]) -> PlayedTask:
    """The falls of a task; equal final states are graded once."""
    played, seen = PlayedTask(), set[frozenset[tuple[str, bytes | None]]]()
    for attacker in attackers:
        try:
            changes = await final_state(sandbox, data, task, attacker)
            state = frozenset(changes.items())
            if not changes or state in seen or is_gold(task, changes):
                continue
            seen.add(state)
            if reward := await earned(sandbox, data, task, changes):
                played.falls.append(TaskFall(attacker, changes, reward))
        except (BoxError, TimeoutError) as e:
            played.lost[attacker.name] = str(e) or "no answer in time"
    return played


async def final_state(sandbox: Sandbox, data: Dataset, task: CodeTask, attacker: Attacker) -> Changes:
    """The changes that an attacker leaves. Raises BoxError or TimeoutError after the last try."""
    if attacker.changes is not None:
        return attacker.changes
    assert attacker.program is not None
    for left in reversed(range(_TRIES)):
        try:
            async with asyncio.timeout(PLAY_SECONDS):
                changes, _ = await attempt(sandbox, data, task, attacker.program, tested=False)
                return changes
        except (BoxError, TimeoutError):
            if not left:
                raise
    raise AssertionError


async def earned(sandbox: Sandbox, data: Dataset, task: CodeTask, changes: Changes) -> str:
    """The detail of the grade if the changes earn the whole reward, else "". Raises BoxError or TimeoutError."""
    for left in reversed(range(_TRIES)):
        try:
            async with asyncio.timeout(PLAY_SECONDS):
                graded = await data.grade(sandbox, task, changes)
        except (BoxError, TimeoutError):
            if not left:
                raise
            continue
        if graded.outcome is not Outcome.INFRA or not left:
            return graded.detail if graded.passed and graded.outcome is Outcome.SCORED else ""
    raise AssertionError


def is_gold(task: CodeTask, changes: Changes) -> bool:
    """Whether the changes are the gold answer, apart from layout and comments."""
    if not task.solution:
        return False
    for path, text in task.solution.items():
        data = changes.get(path, b"" if path in changes else task.changes.get(path, "").encode())
        if _plain(path, (data or b"").decode("utf-8", "replace")) != _plain(path, text):
            return False
    return True


def _plain(path: str, text: str) -> str:
    tree = parse(text) if path.endswith(".py") else None
    return " ".join(text.split()) if tree is None else ast.dump(tree)
