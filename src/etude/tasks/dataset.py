"""A dataset of tasks on disk: one repository, its dependencies, its hidden tests, and a Harbor folder per task.

DIR/dataset.json   the manifest: name, licence, seed, policy, counts, digests
DIR/repository/    layer L1, as the agent sees it; no hidden test is in it
DIR/history.msgpack  its last commits, see `histories.py`
DIR/site/          dependencies of the repository (pip --target)
DIR/hidden/        hidden test files; only ever mounted where work is graded
DIR/verifier/      the grader of other Harbor runners' containers, see `harbor.py`
DIR/tasks/ID/      Harbor task folders, see `harbor.py`
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import blake3
import msgspec

from etude.config import SandboxConfig
from etude.errors import UserError
from etude.grading import Grade, grade_changes
from etude.records import CodeTask, Record
from etude.sandbox import Changes, Image, Limits, Sandbox
from etude.tasks import harbor, histories
from etude.tasks.histories import Histories
from etude.tasks.inventory import files_below

DATASET_FORMAT = 2
_PARTS = ("repository", "site", "hidden", "verifier", "tasks", histories.FILE)
_OWN = "dataset.json"


class Hardening(Record, frozen=True, kw_only=True):
    """The result of attacks on all tasks of a dataset by `etude tasks harden`."""

    tasks: int  # attacked
    fell: int  # gave a reward without the work
    mended: int  # of those: they give none any more
    dropped: int
    unplayed: int  # kept, although boxes lost some of their attacks: not known to be safe
    attackers: dict[str, int]  # kind -> programs
    results: dict[str, str]  # task that fell -> by which programs, and what became of it
    undecided: dict[str, str]  # task -> an attempt of a model that earned a reward, and may be honest

    @property
    def left(self) -> float:
        """The share of the remaining tasks that fall."""
        return self.unplayed / max(1, self.tasks - self.dropped)

    @property
    def figures(self) -> str:
        """The shares before and after, as a sentence."""
        return (
            f"{self.fell} of {self.tasks} tasks ({self.fell / max(1, self.tasks):.1%}) fell, {self.mended} were mended "
            f"and {self.dropped} dropped; of the {self.tasks - self.dropped} that remain {self.left:.1%} fall"
        )


class Manifest(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The content of dataset.json. Digests are blake3: of a file, over sorted (path, content) pairs of a folder, and of
    this record without that digest."""

    format: int
    name: str  # e.g. "pydash-8.1.0"
    licence: str
    licence_source: str  # where the licence was found, e.g. "pyproject.toml"
    seed: int
    python_path: tuple[str, ...]  # folders of the repository to import from, e.g. ("src",)
    source_roots: tuple[str, ...]  # folders or files that hold the code, e.g. ("src/pydash",)
    visible: str  # which tests the agent may run: "doctests" | "half"
    options: dict[str, object]
    counts: dict[str, int]
    warnings: tuple[str, ...] = ()  # limitations of the dataset, see `card.py`
    verdict: str = ""  # "good", "thin" or "hollow", with the reason, see `card.py`
    kind: str = ""  # "harbor": of tasks that others wrote, see `foreign/`
    image: str = ""  # of the boxes that it was built in, unless that is the minimal one: name and digest
    services: tuple[str, ...] = ()  # of these boxes, by name
    hardening: Hardening | None = None  # if attacks were played on the tasks
    digests: dict[str, str]  # of the folders and files beside it, and "dataset.json"


@dataclass(frozen=True)
class Dataset:
    """A loaded dataset. `tasks` are sorted by id."""

    root: Path
    name: str
    repository: Path
    site: Path
    hidden: Path
    tasks: tuple[CodeTask, ...]
    manifest: Manifest
    histories: Histories | None = None  # the git histories that boxes see

    def image(self, task: CodeTask) -> Image:
        """The image of the agent's box: the repository, its dependencies, and the files that break it."""
        history = {} if self.histories is None else self.histories.of(task)
        return Image(repository=self.repository, site=self.site, changes=task.changes, history=history)

    def check_boxes(self, boxes: SandboxConfig | None) -> None:
        """Raises UserError for a table [sandbox] whose boxes lack the image or a service of those that the dataset was
        built in: its tests would fail there, whatever the answer."""
        give = "give the table [sandbox] that it was built with, by --sandbox FILE or in the configuration"
        if self.manifest.image and (boxes is None or boxes.image is None):
            image = self.manifest.image.split()[0]
            raise UserError(
                f"{self.root} was built in boxes of the image {image}, and these have the minimal one: {give}."
            )
        known = {service.name for service in boxes.services} if boxes is not None else set[str]()
        if missing := [name for name in self.manifest.services if name not in known]:
            raise UserError(f"{self.root} was built in boxes with the service {missing[0]}, which these lack: {give}.")

    def limits(self, task: CodeTask) -> Limits:
        """The limits of the agent's box."""
        return Limits()

    async def grade(self, sandbox: Sandbox, task: CodeTask, changes: Changes) -> Grade:
        """Grade a change set by the task's hidden tests. Raises BoxError, payer infra, if the sandbox failed."""
        return await grade_changes(sandbox, task, self.image(task), self.hidden, changes)

    @cached_property
    def by_id(self) -> dict[str, CodeTask]:
        """The tasks by their ids."""
        return {task.id: task for task in self.tasks}

    def split(self, name: str) -> tuple[CodeTask, ...]:
        """The tasks of split "train" or "heldout"."""
        return tuple(task for task in self.tasks if task.split == name)


def check_free(out: Path) -> None:
    """Raises UserError if `out` exists and is no empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another folder or remove it.")


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """The folder `out`.incomplete, which is renamed to `out` at the end, and removed after an error. Raises UserError
    if it cannot be made."""
    work = out.with_name(out.name + ".incomplete")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
    except OSError as e:
        raise UserError(f"{out} cannot be written ({e.strerror}); choose another folder with -o.") from None
    try:
        yield work
        if out.exists():
            out.rmdir()
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load_dataset(root: Path) -> Dataset:
    """Load a dataset that `save` made. Raises UserError if `root` is not a dataset, is unfinished, has changed since,
    or holds foreign tasks (`foreign/dataset.py` loads those as well)."""
    manifest = read_dataset_manifest(root)
    refuse_changes(root, manifest)
    return _read(root, manifest)


def load_changed(root: Path) -> tuple[Dataset, list[str]]:
    """Load a dataset, even one that has changed since it was built. Returns it with the changed files and folders."""
    manifest = read_dataset_manifest(root)
    return _read(root, manifest), changes(root, manifest)


def refuse_changes(root: Path, manifest: Manifest) -> None:
    """Raises UserError for a dataset that has changed since it was built."""
    if changed := changes(root, manifest):
        raise UserError(
            f"{root / changed[0]} has changed since the dataset was built (its digest is in dataset.json): restore "
            "it from a copy, or build the dataset again."
        )


def read_dataset_manifest(root: Path) -> Manifest:
    """Read dataset.json of the folder `root`. Raises UserError if it is missing or malformed."""
    path = root / _OWN
    if not path.is_file():
        raise UserError(f"{root} is not a task dataset (no dataset.json); make one with `etude tasks build`.")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.MsgspecError as e:
        raise UserError(f"{path} cannot be read ({e}); build the dataset again.") from None
    if manifest.format != DATASET_FORMAT:
        raise UserError(
            f"{root} has dataset format {manifest.format}, this etude reads {DATASET_FORMAT}; build it again."
        )
    return manifest


def changes(root: Path, manifest: Manifest) -> list[str]:
    """The files and folders that have changed since the dataset was built."""
    current = {_OWN: _own_digest(manifest)} | _digests(root, manifest)
    return [name for name, digest in current.items() if digest != manifest.digests.get(name)]


def _read(root: Path, manifest: Manifest) -> Dataset:
    if manifest.kind:
        raise UserError(
            f"{root} holds foreign Harbor tasks: runs, `etude eval` and `etude tasks check` take them, nothing else "
            "does"
        )
    folders = sorted(p for p in (root / "tasks").iterdir() if p.is_dir())
    return _dataset(root, manifest, tuple(map(harbor.read_harbor_task, folders)))


def save(root: Path, manifest: Manifest, tasks: Sequence[CodeTask]) -> Dataset:
    """Write the tasks and dataset.json under `root`, which already holds repository/, site/ and hidden/. Fills in the
    counts and digests of the manifest."""
    ordered = tuple(sorted(tasks, key=lambda task: task.id))
    for task in ordered:
        harbor.write_task(task, root / "tasks" / task.id)
    (root / "tasks").mkdir(exist_ok=True)
    harbor.write_verifier(root, manifest.name, manifest.python_path, manifest.source_roots)
    counts = manifest.counts | {
        "tasks": len(ordered),
        "train": sum(task.split == "train" for task in ordered),
        "heldout": sum(task.split == "heldout" for task in ordered),
    }
    return _dataset(root, seal(root, msgspec.structs.replace(manifest, counts=counts)), ordered)


def seal(root: Path, manifest: Manifest) -> Manifest:
    """Write dataset.json with the digests of the files and folders beside it."""
    digests = _digests(root, manifest)
    manifest = msgspec.structs.replace(manifest, digests=digests)
    manifest = msgspec.structs.replace(manifest, digests=digests | {_OWN: _own_digest(manifest)})
    (root / "dataset.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    return manifest


def tree_digest(folder: Path) -> str:
    """blake3 over the sorted paths and contents of every file below `folder`."""
    digest = blake3.blake3()
    for path, file in files_below(folder):
        name, data = path.encode(), file.read_bytes()
        digest.update(b"%d %d " % (len(name), len(data)) + name + data)
    return digest.hexdigest()


def _digests(root: Path, manifest: Manifest) -> dict[str, str]:
    """The digests of the files and folders beside the manifest, which may be missing."""
    names = ("tasks", "images", "harbor.json") if manifest.kind else _PARTS
    return {name: _digest(root / name) for name in names}


def _digest(path: Path) -> str:
    return blake3.blake3(path.read_bytes()).hexdigest() if path.is_file() else tree_digest(path)


def _own_digest(manifest: Manifest) -> str:
    others = {name: digest for name, digest in manifest.digests.items() if name != _OWN}
    record = msgspec.json.encode(msgspec.structs.replace(manifest, digests=others), order="sorted")
    return blake3.blake3(record).hexdigest()


def _dataset(root: Path, manifest: Manifest, tasks: tuple[CodeTask, ...]) -> Dataset:
    return Dataset(
        root=root,
        name=manifest.name,
        repository=root / "repository",
        site=root / "site",
        hidden=root / "hidden",
        tasks=tasks,
        manifest=manifest,
        histories=histories.load(root, root / "repository"),
    )
