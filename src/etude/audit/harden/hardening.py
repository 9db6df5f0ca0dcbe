"""Attacks all tasks of a dataset, mends those that fall or drops them, and writes the dataset anew."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from etude.audit.attacks.packs import programs
from etude.audit.harden.attackers import SHAM, Attacker, attackers_of
from etude.audit.harden.honesty import Honesty, judge
from etude.audit.harden.model import KIND, ModelAttacker, opened
from etude.audit.harden.play import PlayedTask, TaskFall, earned, final_state, play
from etude.config import SandboxConfig
from etude.errors import UserError
from etude.grading import open_sandbox
from etude.protocol.backends import EngineError
from etude.records import CodeTask
from etude.rollout import foreign_refusal
from etude.run.evaluate import Remote
from etude.sandbox import BoxError, Sandbox
from etude.tasks import Dataset, Hardening, check_place, in_order, mended, write_hardened
from etude.tasks.foreign import ForeignDataset, close_task, load_any_dataset, write_hardened_foreign

WORKERS = 2
ROUNDS = 2  # of mending a task
SHOWN = 3  # programs that the card names for a task
Progress = Callable[[str, int, int], None]


_NO_RULE = {
    False: "no other test tells the wrong answers from the right one",
    True: "its tests run or read what the agent has written",
}


@dataclass(frozen=True)
class TaskMend:
    """A task of a dataset as a rule mends it; `replayed` are the attackers that the rule may not have stopped."""

    data: Dataset
    task: CodeTask
    why: str = ""
    replayed: Sequence[Attacker] = ()


@dataclass(frozen=True)
class HardenedTask:
    """The end of a task: as it was or mended, kept or dropped."""

    mend: TaskMend
    kept: bool
    falls: Sequence[TaskFall] = ()
    why: str = ""
    lost: Mapping[str, str] = field(default_factory=dict[str, str])
    undecided: str = ""


def harden(
    folder: Path,
    out: Path,
    progress: Progress,
    boxes: SandboxConfig | None = None,
    packs: Sequence[Path] = (),
    models: Sequence[Path | Remote] = (),
) -> Hardening:
    """Attack every task of the dataset in `folder`, with `models` as well, and write the dataset without weak tasks to
    `out`, which may be the same folder. Raises UserError, also if no task would be left."""
    data = load_any_dataset(folder)
    data.check_boxes(boxes)
    if isinstance(data, ForeignDataset) and boxes is not None and (why := foreign_refusal(False, boxes.type)):
        raise UserError(why)
    check_place(folder, out)
    for pack in packs:
        programs(pack)
    results, attackers = asyncio.run(_all(data, progress, boxes, packs, models))
    hardening = _summary(data, results, attackers)
    kept = [each.mend for each in results if each.kept]
    if not kept:
        first = next(iter(hardening.results.items()))
        raise UserError(f"all {len(data.tasks)} tasks of {folder} fall, and none can be mended: {first[0]} {first[1]}")
    tasks = [each.task for each in kept]
    if isinstance(data, ForeignDataset):
        records = {e.task.id: e.data.records[e.task.id] for e in kept if isinstance(e.data, ForeignDataset)}
        write_hardened_foreign(replace(data, records=records), out, tasks, hardening)
    else:
        write_hardened(data, out, tasks, hardening)
    return hardening


async def _all(
    data: Dataset,
    progress: Progress,
    boxes: SandboxConfig | None,
    packs: Sequence[Path],
    models: Sequence[Path | Remote],
) -> tuple[list[HardenedTask], Counter[str]]:
    """The result of each task, and the number of programs by their kind."""
    kinds: Counter[str] = Counter()
    done = fell = 0
    progress("attacking tasks", 0, len(data.tasks))
    async with open_sandbox(boxes, workers=WORKERS) as sandbox, opened(models) as chats:

        async def one(task: CodeTask) -> HardenedTask:
            nonlocal done, fell
            attackers = attackers_of(data, task, packs)
            for kind, count in Counter(each.kind for each in attackers).items():
                kinds[kind] = max(kinds[kind], count)
            result = await _harden_task(sandbox, data, task, attackers, chats)
            done, fell = done + 1, fell + bool(result.falls)
            progress(f"attacking tasks ({fell} fell)", done, len(data.tasks))
            return result

        results = await in_order(one, data.tasks, WORKERS)
        return results, kinds + Counter({KIND: len(models)})


async def _attempts(
    sandbox: Sandbox, data: Dataset, task: CodeTask, chats: Sequence[ModelAttacker], played: PlayedTask
) -> str:
    """Let models attack: an attempt that earns a reward and is proved dishonest joins the falls. Returns the reason why
    the last undecided one is none, or ""."""
    undecided = ""
    for chat in chats:
        try:
            attacker = await chat.attack(data, task)
            changes = {} if attacker is None else await final_state(sandbox, data, task, attacker)
            if attacker is None or not changes or not (reward := await earned(sandbox, data, task, changes)):
                continue
            verdict = await judge(sandbox, data, task, changes)
        except (BoxError, TimeoutError, EngineError) as e:
            played.lost[chat.name] = str(e) or "no answer in time"
            continue
        if verdict.honesty is Honesty.FALL:
            kept = Attacker(f"{chat.name}: {verdict.why}", KIND, changes=changes)
            played.falls.append(TaskFall(kept, changes, reward))
        elif verdict.honesty is Honesty.UNDECIDED:
            undecided = f"{chat.name} earns the reward, and {verdict.why}"
    return undecided


async def _harden_task(
    sandbox: Sandbox,
    data: Dataset,
    task: CodeTask,
    attackers: Sequence[Attacker],
    chats: Sequence[ModelAttacker],
) -> HardenedTask:
    """Attack a task; if it falls, mend it and attack it again, or drop it."""
    first = await play(sandbox, data, task, attackers)
    undecided = await _attempts(sandbox, data, task, chats, first)
    falls, lost, mend = first.falls, dict(first.lost), TaskMend(data, task)
    for _ in range(ROUNDS):
        if not falls:
            break
        try:
            better = await _mended(sandbox, mend, falls, first.falls, attackers)
        except (BoxError, TimeoutError):
            better = None
        if better is None:
            if mend.task is not task or mend.data is not data:
                break
            return HardenedTask(mend, False, first.falls, f"dropped: {_NO_RULE[bool(data.manifest.kind)]}")
        mend = better
        again = await play(sandbox, mend.data, mend.task, mend.replayed)
        falls, lost = again.falls, lost | again.lost
    if falls:
        return HardenedTask(mend, False, first.falls, f"dropped: it still falls to {falls[0].attacker.title}")
    return HardenedTask(mend, True, first.falls, f"mended: {mend.why}" if first.falls else "", lost, undecided)


async def _mended(
    sandbox: Sandbox,
    mend: TaskMend,
    falls: Sequence[TaskFall],
    first: Sequence[TaskFall],
    attackers: Sequence[Attacker],
) -> TaskMend | None:
    """The task after the rule for its kind. A foreign task is closed, under which all attackers may do better. Other
    tasks get further tests, and still need the former ones: the attackers that failed would fail again."""
    data, task = mend.data, mend.task
    if isinstance(data, ForeignDataset):
        closed = await close_task(sandbox, data, task)
        why = "grading takes no links out of a folder, and no changes of image or home that the solution does not make"
        return None if closed is None else TaskMend(closed, task, why, attackers)
    better = await mended(sandbox, data, task, [fall.changes for fall in falls])
    if better is None:
        return None
    added = [f"`{test}`" for test in better.hidden_tests if test not in task.hidden_tests]
    return TaskMend(data, better, f"{', '.join(added[:SHOWN])} must pass, too", [each.attacker for each in first])


def _summary(data: Dataset, results: Sequence[HardenedTask], kinds: Counter[str]) -> Hardening:
    texts: dict[str, str] = {}
    for task, result in zip(data.tasks, results, strict=True):
        if result.falls:
            names = [f"{each.attacker.title}" for each in result.falls]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            texts[task.id] = f"fell to {', '.join(names[:SHOWN])}{more}; {result.why}"
    return Hardening(
        tasks=len(data.tasks),
        fell=len(texts),
        mended=sum(bool(each.falls) and each.kept for each in results),
        dropped=sum(not each.kept for each in results),
        unplayed=sum(bool(each.lost) and each.kept for each in results),
        attackers=dict(sorted(kinds.items(), key=lambda each: (each[0] != SHAM, each[0]))),
        results=texts,
        undecided={t.id: r.undecided for t, r in zip(data.tasks, results, strict=True) if r.undecided},
    )
