"""Attacks all tasks of a dataset, mends those that fall or drops them, and writes the dataset anew."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.audit.harden.attackers import SHAM, Attacker, attackers_of
from etude.audit.harden.play import TaskFall, play
from etude.config import SandboxConfig
from etude.errors import UserError
from etude.grading import open_sandbox
from etude.records import CodeTask
from etude.sandbox import BoxError, Sandbox
from etude.tasks import Dataset, Hardening, in_order, mended, write_hardened
from etude.tasks.foreign import load_any_dataset

WORKERS = 2
ROUNDS = 2  # of mending a task
SHOWN = 3  # programs that the card names for a task
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TaskResult:
    """What became of a task: `task` is None if it was dropped."""

    task: CodeTask | None
    falls: Sequence[TaskFall] = ()
    why: str = ""
    lost: dict[str, str] = field(default_factory=dict[str, str])


def harden(
    folder: Path,
    out: Path,
    progress: Progress,
    boxes: SandboxConfig | None = None,
    packs: Sequence[Path] = (),
) -> Hardening:
    """Attack every task of the dataset in `folder`, and write the dataset without weak tasks to `out`, which may be the
    same folder. Raises UserError, also if no task would be left."""
    data = load_any_dataset(folder)
    data.check_boxes(boxes)
    results, attackers = asyncio.run(_all(data, progress, boxes, packs))
    hardening = _summary(data, results, attackers)
    kept = [each.task for each in results if each.task is not None]
    if not kept:
        first = next(iter(hardening.results.items()))
        raise UserError(f"all {len(data.tasks)} tasks of {folder} fall, and none can be mended: {first[0]} {first[1]}")
    write_hardened(data, out, kept, hardening)
    return hardening


async def _all(
    data: Dataset, progress: Progress, boxes: SandboxConfig | None, packs: Sequence[Path]
) -> tuple[list[TaskResult], Counter[str]]:
    """The result of each task, and the number of programs by their kind."""
    kinds: Counter[str] = Counter()
    done = fell = 0
    progress("attacking tasks", 0, len(data.tasks))
    async with open_sandbox(boxes, workers=WORKERS) as sandbox:

        async def one(task: CodeTask) -> TaskResult:
            nonlocal done, fell
            attackers = attackers_of(data, task, packs)
            kinds.update({each.kind: 0 for each in attackers})
            for kind, count in Counter(each.kind for each in attackers).items():
                kinds[kind] = max(kinds[kind], count)
            result = await _harden_task(sandbox, data, task, attackers)
            done, fell = done + 1, fell + bool(result.falls)
            progress(f"attacking tasks ({fell} fell)", done, len(data.tasks))
            return result

        return await in_order(one, data.tasks, WORKERS), kinds


async def _harden_task(sandbox: Sandbox, data: Dataset, task: CodeTask, attackers: Sequence[Attacker]) -> TaskResult:
    """Attack a task; if it falls, mend it and attack it again, or drop it. A mended task needs all former tests and
    more, so that only the attackers that earned its reward are played again."""
    first = await play(sandbox, data, task, attackers)
    falls, lost, made = first.falls, dict(first.lost), task
    for _ in range(ROUNDS):
        if not falls:
            break
        try:
            better = await _mended(sandbox, data, made, falls)
        except (BoxError, TimeoutError):
            better = None
        if better is None:
            return TaskResult(None, first.falls, "dropped: no other test tells the wrong answers from the right one")
        made = better
        again = await play(sandbox, data, made, [fall.attacker for fall in first.falls])
        falls, lost = again.falls, lost | again.lost
    if falls:
        return TaskResult(None, first.falls, f"dropped: it still falls to {falls[0].attacker.title}")
    added = sorted(set(made.hidden_tests) - set(task.hidden_tests))
    why = f"mended: {', '.join(f'`{test}`' for test in added[:SHOWN])} decides, too" if added else ""
    return TaskResult(made, first.falls, why, lost)


async def _mended(sandbox: Sandbox, data: Dataset, task: CodeTask, falls: Sequence[TaskFall]) -> CodeTask | None:
    if data.manifest.kind:
        return None
    return await mended(sandbox, data, task, [fall.changes for fall in falls])


def _summary(data: Dataset, results: Sequence[TaskResult], kinds: Counter[str]) -> Hardening:
    texts: dict[str, str] = {}
    for task, result in zip(data.tasks, results, strict=True):
        if result.falls:
            names = [f"{each.attacker.title}" for each in result.falls]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            texts[task.id] = f"fell to {', '.join(names[:SHOWN])}{more}; {result.why}"
    return Hardening(
        tasks=len(data.tasks),
        fell=len(texts),
        mended=sum(bool(each.falls) and each.task is not None for each in results),
        dropped=sum(each.task is None for each in results),
        unplayed=sum(bool(each.lost) and each.task is not None for each in results),
        attackers=dict(sorted(kinds.items(), key=lambda each: (each[0] != SHAM, each[0]))),
        results=texts,
        undecided={},
    )
