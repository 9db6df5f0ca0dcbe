"""Makes a dataset of foreign Harbor folders: a folder is kept if its own solution scores 1 and an unchanged box scores
0.

The gates run in the boxes that training uses. A folder with needs beyond these boxes is left out, with the reason.
"""

import asyncio
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import blake3
import msgspec

from etude.code import table
from etude.config import SandboxConfig
from etude.errors import UserError
from etude.grading import grade_harbor, open_sandbox, run_solution, taken_changes
from etude.sandbox import BoxError, Image, Sandbox
from etude.tasks import dataset
from etude.tasks.check import CheckReport
from etude.tasks.dataset import Dataset
from etude.tasks.foreign.dataset import RECORDS, ForeignDataset, limits_of, read, tests_of
from etude.tasks.foreign.dataset import load_any_dataset as load_dataset
from etude.tasks.foreign.dockerfile import FolderRefused
from etude.tasks.foreign.folder import FOREIGN, Folder, ForeignRecord, find_folders, load
from etude.tasks.foreign.image import make
from etude.tasks.gates import in_order
from etude.tasks.search import Progress

ORACLE_RUNS = 2  # that must both score 1
SOLUTION_SECONDS = 300.0
TRIED = "tried"  # folder of images whose gates have not held yet
TRIES = 3  # of a folder whose boxes are lost to infrastructure
WORKERS = 2


@dataclass(frozen=True)
class Trial:
    """The result of trying one folder: its record if it is kept, else the reason."""

    folder: str
    record: ForeignRecord | None = None
    why: str = ""


@dataclass(frozen=True)
class Trials:
    """The results of all folders that were tried."""

    trials: Sequence[Trial]

    @cached_property
    def kept(self) -> list[ForeignRecord]:
        """The records of the folders that work."""
        return [trial.record for trial in self.trials if trial.record is not None]

    @property
    def share(self) -> str:
        """The share of the folders that pass the gates, as text."""
        total = len(self.trials)
        return f"{len(self.kept)} of {total} folders work ({100 * len(self.kept) / max(1, total):.0f} %)"


def try_folders(
    roots: Sequence[Path], bases: Sequence[str], progress: Progress, boxes: SandboxConfig | None = None
) -> Trials:
    """Try every Harbor folder at and below `roots` in boxes of the table [sandbox] `boxes`, without writing a dataset.
    Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="etude-harbor-") as work:
        return asyncio.run(_try_all(find_folders(roots), Path(work), bases, progress, boxes))


def build_foreign(
    roots: Sequence[Path],
    out: Path,
    progress: Progress,
    *,
    bases: Sequence[str] = (),
    heldout_fraction: float = 0.25,
    boxes: SandboxConfig | None = None,
) -> tuple[Dataset, Trials]:
    """Write a dataset of the folders that pass the gates. Raises UserError if none does, or if `out` exists."""
    folders = find_folders(roots)
    dataset.check_free(out)
    with dataset.unfinished(out) as work:
        trials = asyncio.run(_try_all(folders, work, bases, progress, boxes))
        if not trials.kept:
            first = trials.trials[0]
            raise UserError(f"no Harbor folder of {len(folders)} works here; the first, {first.folder}: {first.why}.")
        names = [re.sub(r"[^A-Za-z0-9]+", "-", root.resolve().name).strip("-") for root in roots]
        _save(work, f"harbor-{'-'.join(names)[:80]}", trials, bases, heldout_fraction, boxes)
    return load_dataset(out), trials


def check_foreign(dataset_dir: Path, progress: Progress, boxes: SandboxConfig | None = None) -> CheckReport:
    """Verify digests, then run the gates of every foreign task again."""
    data = read(dataset_dir, dataset.read_dataset_manifest(dataset_dir))
    problems = [f"{name} has changed since it was built" for name in dataset.changes(dataset_dir, data.manifest)]
    failures = asyncio.run(_failures(data, progress, boxes))
    return CheckReport(tasks=len(data.tasks), problems=tuple(problems), failures=failures)


async def _failures(data: ForeignDataset, progress: Progress, boxes: SandboxConfig | None) -> dict[str, str]:
    """Task id -> the reason why the task's gates do not hold."""
    failures: dict[str, str] = {}
    async with open_sandbox(boxes, memo=0) as sandbox:
        for number, task in enumerate(data.tasks):
            try:
                await _gates(sandbox, data.records[task.id], data.root / "tasks" / task.id, data.image(task))
            except (FolderRefused, BoxError, TimeoutError) as e:
                failures[task.id] = str(e) or "its box did not answer in time"
            progress("checking tasks", number + 1, len(data.tasks))
    return failures


async def _try_all(
    folders: Sequence[Path], work: Path, bases: Sequence[str], progress: Progress, boxes: SandboxConfig | None
) -> Trials:
    ids, done = _ids(folders), 0
    async with open_sandbox(boxes, workers=WORKERS, memo=0) as sandbox:

        async def one(path: Path) -> Trial:
            nonlocal done
            id = ids[path]
            shown = f"{path.parent.name}/{path.name}"
            try:
                folder = load(path, bases)
                trial = Trial(shown, await _try(sandbox, folder, id, work))
            except (FolderRefused, UserError) as e:
                why = str(e).partition(";")[0].rstrip(".") if isinstance(e, UserError) else str(e)
                trial = Trial(shown, why=why)
            done += 1
            progress("trying folders", done, len(folders))
            return trial

        return Trials(await in_order(one, folders, WORKERS))


def _divided(records: Sequence[ForeignRecord], heldout_fraction: float) -> list[ForeignRecord]:
    """The records with a share of the tasks held out, chosen by a hash of their ids."""
    ordered = sorted((record.id for record in records), key=lambda id: blake3.blake3(id.encode()).digest())
    count = max(1, round(heldout_fraction * len(records))) if heldout_fraction and len(records) > 1 else 0
    sides = dict.fromkeys(ordered[:count], "heldout")
    return [msgspec.structs.replace(record, split=sides.get(record.id, "train")) for record in records]


async def _try(sandbox: Sandbox, folder: Folder, id: str, work: Path) -> ForeignRecord:
    """The record of a folder whose image can be made and whose gates hold. Boxes that infrastructure loses are made
    again, in another folder, since a sandbox keeps the content of a folder that it has read. Raises FolderRefused or
    UserError."""
    left = TRIES
    while True:
        left -= 1
        root = work / TRIED / f"{id}.{left}"
        root.mkdir(parents=True)
        try:
            image = await make(sandbox, folder, root, limits_of(folder.record))
            record = msgspec.structs.replace(folder.record, id=id, environment=dict(image.environment))
            record = await _gates(sandbox, record, folder.path, image)
        except (BoxError, TimeoutError) as e:
            if not left or (isinstance(e, BoxError) and e.payer == "agent"):
                raise FolderRefused(f"its box was lost: {e or 'no answer in time'}") from None
            continue
        (work / "images").mkdir(exist_ok=True)
        root.rename(work / "images" / id)
        shutil.copytree(folder.path, work / "tasks" / id, symlinks=True)
        return record


async def _gates(sandbox: Sandbox, record: ForeignRecord, folder: Path, image: Image) -> ForeignRecord:
    """The record with the files that grading must accept from a solution. Raises FolderRefused, and BoxError if a box
    is lost."""
    limits, tests = limits_of(record), folder / "tests"
    nothing = await grade_harbor(sandbox, tests_of(record, tests), image, {}, limits)
    if nothing.score > 0:
        raise FolderRefused(f"doing nothing scores {nothing.score:.3g}")
    solution = folder / "solution"
    solved = await run_solution(sandbox, image, solution, record.workdir, limits, SOLUTION_SECONDS)
    record = msgspec.structs.replace(record, allowed=tuple(taken_changes(solved)[1]))
    for _ in range(ORACLE_RUNS):
        oracle = await grade_harbor(sandbox, tests_of(record, tests), image, solved, limits)
        if not oracle.passed:
            raise FolderRefused(f"its own solution scores {oracle.score:.3g}: {oracle.detail}")
    return record


def _ids(folders: Sequence[Path]) -> dict[Path, str]:
    ids: dict[Path, str] = {}
    for path in folders:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).strip(".-") or "task"
        id, number = plain, 2
        while id in ids.values():
            id, number = f"{plain}-{number}", number + 1
        ids[path] = id
    return ids


def _save(
    work: Path,
    name: str,
    trials: Trials,
    bases: Sequence[str],
    heldout_fraction: float,
    boxes: SandboxConfig | None,
) -> None:
    records = _divided(trials.kept, heldout_fraction)
    shutil.rmtree(work / TRIED)
    (work / "hidden").mkdir()
    (work / RECORDS).write_bytes(msgspec.json.format(msgspec.json.encode(records), indent=1) + b"\n")
    splits = [record.split for record in records]
    counts = {"tried": len(trials.trials), "tasks": len(splits)}
    manifest = dataset.Manifest(
        format=dataset.DATASET_FORMAT,
        name=name,
        licence="",
        licence_source="",
        seed=0,
        python_path=(),
        source_roots=(),
        visible="",
        options={"base": list(bases)},
        counts=counts | {side: splits.count(side) for side in ("train", "heldout")},
        digests={},
        kind=FOREIGN,
        image=(boxes.image or "") if boxes is not None else "",
        services=tuple(service.name for service in (boxes.services if boxes is not None else ())),
        warnings=(DECIDED_INSIDE,),
    )
    dataset.seal(work, manifest)
    (work / "DATACARD.md").write_text(_card(name, trials, records), encoding="utf-8")


DECIDED_INSIDE = (
    "these tasks are decided inside: their tests run the agent's files in the box that the reward is written in, so "
    "tested code can forge it; tasks.min_decided = 0 trains on them nevertheless"
)


def _card(name: str, trials: Trials, records: Sequence[ForeignRecord]) -> str:
    """DATACARD.md: the folders in the dataset, and the reasons for which others were left out."""
    kept = [(record.id, record.split, "decided inside", record.licence or "not stated") for record in records]
    left = [(trial.folder, trial.why) for trial in trials.trials if trial.record is None]
    return "\n".join(
        [
            f"# {name}\n",
            f"Foreign Harbor tasks. {trials.share}.\n",
            f"**Warning:** {DECIDED_INSIDE}.\n",
            "## Tasks\n",
            table(("task", "split", "decided", "licence"), kept),
            "## Left out\n",
            table(("folder", "reason"), left) if left else "None.\n",
        ]
    )


def trial_lines(trials: Trials) -> list[str]:
    """The output of `etude tasks harbor`: a line for each folder, and the share that works."""
    folders = [
        f"{'works  ' if t.record else 'refused'} {t.folder}{f': {t.why}' if t.why else ''}" for t in trials.trials
    ]
    return [*folders, trials.share]


def trials_as_json(trials: Trials) -> Mapping[str, object]:
    """The trials as JSON."""
    folders = {trial.folder: trial.why for trial in trials.trials}
    return {"tried": len(trials.trials), "works": len(trials.kept), "folders": folders}
