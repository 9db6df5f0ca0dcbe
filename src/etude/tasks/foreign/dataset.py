"""A dataset of foreign Harbor tasks on disk, and their grading.

DIR/dataset.json   kind "harbor", name, counts, digests
DIR/harbor.json    a record per task: the folders of its boxes, its limits, its split
DIR/tasks/ID/      the Harbor folder as it was
DIR/images/ID/     tree/, site/ and provided/: the folders of its boxes (`image.py`)
DIR/hidden/        empty; the tests of a task are tasks/ID/tests
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from etude.errors import UserError
from etude.grading import HARBOR_STATE, Grade, HarborTests, grade_harbor
from etude.records import CodeTask
from etude.sandbox import Changes, Image, Limits, Sandbox
from etude.tasks import dataset as datasets
from etude.tasks.dataset import Dataset, Hardening, Manifest
from etude.tasks.foreign.dockerfile import ASIDE, HOME
from etude.tasks.foreign.folder import FOREIGN, ForeignRecord
from etude.tasks.foreign.image import image_of
from etude.tasks.hardened import CARD, replace_dataset

RECORDS = "harbor.json"
PROCESSES, DISK_MB = 256, 256  # of a box


@dataclass(frozen=True, kw_only=True)
class ForeignDataset(Dataset):
    """A dataset of foreign Harbor tasks."""

    records: Mapping[str, ForeignRecord]

    def image(self, task: CodeTask) -> Image:
        """The image of the agent's box, without tests and solution."""
        record = self.records[task.id]
        return image_of(self.root / "images" / task.id, record.places, record.environment)

    def limits(self, task: CodeTask) -> Limits:
        """The limits of a task's boxes."""
        return limits_of(self.records[task.id])

    async def grade(self, sandbox: Sandbox, task: CodeTask, changes: Changes) -> Grade:
        """Run the task's own tests on the final state. Raises BoxError, payer infra."""
        record = self.records[task.id]
        tests = tests_of(record, self.root / "tasks" / task.id / "tests")
        if record.closed is not None:
            changes = _without_closed(changes, record.closed, self.root / "images" / task.id / "tree")
        return await grade_harbor(sandbox, tests, self.image(task), changes, self.limits(task))


def closed(data: ForeignDataset, task: CodeTask, solved: Changes) -> ForeignDataset:
    """The dataset with the task closed: grading takes no change to a file of the image or of the home folder that the
    solution leaves alone. `solved` are the changes of the solution."""
    record = msgspec.structs.replace(data.records[task.id], closed=tuple(sorted(solved)))
    return replace(data, records={**data.records, task.id: record})


def _without_closed(changes: Changes, own: Collection[str], tree: Path) -> Changes:
    home = f"{ASIDE}{HOME}/"
    kept = {
        path: data
        for path, data in changes.items()
        if path in own or not (path.startswith(home) or (tree / path).exists())
    }
    if state := changes.get(HARBOR_STATE):
        kept[HARBOR_STATE] = _without_links(state)
    return kept


def _without_links(state: bytes) -> bytes:
    """The state without links that lead out of their folder, such as to the tests."""
    parts, kept = iter(state.split(b"\0")), list[bytes]()
    for part in parts:
        target = next(parts, b"") if part.startswith(b"l ") else None
        if target is None:
            kept.append(part)
        elif not target.startswith(b"/") and b".." not in target.split(b"/"):
            kept += [part, target]
    return b"\0".join(kept)


def write_hardened_foreign(data: ForeignDataset, out: Path, tasks: Sequence[CodeTask], hardening: Hardening) -> None:
    """As `write_hardened`."""

    def fill(work: Path) -> None:
        for task in tasks:
            for name in ("tasks", "images"):
                shutil.copytree(data.root / name / task.id, work / name / task.id, symlinks=True)
        (work / "hidden").mkdir()
        shutil.copy2(data.root / CARD, work / CARD)
        records = [data.records[task.id] for task in tasks]
        (work / RECORDS).write_bytes(msgspec.json.format(msgspec.json.encode(records), indent=1) + b"\n")
        splits = [task.split for task in tasks]
        counts = {"tasks": len(tasks), **{side: splits.count(side) for side in ("train", "heldout")}}
        manifest = msgspec.structs.replace(data.manifest, counts=data.manifest.counts | counts, hardening=hardening)
        datasets.seal(work, manifest)

    replace_dataset(data.root, out, hardening, fill)


def limits_of(record: ForeignRecord) -> Limits:
    """The limits of a task's boxes; compilers and runtimes reserve more addresses than they use."""
    return Limits(record.memory_mb, addresses_mb=4 * record.memory_mb, processes=PROCESSES, disk_mb=DISK_MB)


def tests_of(record: ForeignRecord, folder: Path) -> HarborTests:
    """The tests of a task, in `folder`, and the way in which they are run."""
    return HarborTests(folder, record.workdir, record.seconds, record.verifier_environment, record.allowed)


def load_any_dataset(root: Path) -> Dataset:
    """Load the dataset in `root`, of foreign tasks or of our own. Raises UserError, also if it has changed."""
    manifest = datasets.read_dataset_manifest(root)
    if not manifest.kind:
        return datasets.load_dataset(root)
    datasets.refuse_changes(root, manifest)
    return read(root, manifest)


def read(root: Path, manifest: Manifest) -> ForeignDataset:
    """Read the dataset of foreign tasks in `root`, whether or not it has changed. Raises UserError."""
    try:
        records = msgspec.json.decode((root / RECORDS).read_bytes(), type=list[ForeignRecord])
    except (OSError, msgspec.MsgspecError) as e:
        raise UserError(f"{root / RECORDS} cannot be read ({e}); build the dataset again.") from None
    tasks = tuple(_task(root, manifest.name, record) for record in records)
    empty = root / "hidden"
    return ForeignDataset(
        root=root,
        name=manifest.name,
        repository=empty,
        site=empty,
        hidden=empty,
        tasks=tasks,
        manifest=manifest,
        records={record.id: record for record in records},
    )


def _task(root: Path, name: str, record: ForeignRecord) -> CodeTask:
    instruction = (root / "tasks" / record.id / "instruction.md").read_text("utf-8").strip()
    tree = next((place for place, folder in record.places.items() if not folder), "/workspace")
    where = f"\n\nYou work in {record.workdir}. Paths that tools take are relative to {tree}."
    return CodeTask(
        id=record.id,
        repository=name,
        kind=FOREIGN,
        function=record.id,
        split=record.split,
        prompt=instruction + where,
        source_roots=("",),
        difficulty={"decided": 0.0},
        licence=record.licence,
    )
