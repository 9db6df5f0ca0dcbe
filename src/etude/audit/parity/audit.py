"""The parity audit: fingerprints of boxes against fingerprints of production, and the probes that distinguish them.

`etude doctor parity --against FILES` makes boxes, with and without a machine profile (`sandbox/machine_profile.py`),
runs `fingerprint.py` once in each, and trains a classifier to tell the sides apart. The gate is the AUC on all probes
but the declared exceptions; the AUC on all of them is reported beside it.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.audit.parity import fingerprint, probes
from etude.audit.parity.classifier import FOLDS, auc, folds, held_out, interval, logistic, scores, stumps
from etude.audit.parity.features import Table, table
from etude.config import SandboxConfig
from etude.errors import RunFailed, UserError
from etude.evals import Estimate
from etude.grading import open_sandbox
from etude.harness import messages_of
from etude.renderers import SCHEMAS
from etude.sandbox import (
    FingerprintSample,
    Image,
    Limits,
    ProfileSource,
    Sandbox,
    load_profiles,
    parse_fingerprint,
    read_fingerprints,
)
from etude.tasks import git_history, load_dataset

PARITY_GATE = 0.60
SHOWN = 10
MIN_SAMPLES = 10  # per side; fewer prove nothing
WANTED_MACHINES = 5
SECONDS = 60.0  # of a fingerprint
FINGERPRINT_SCRIPT = Path(fingerprint.__file__)
LIMITS = Limits(memory_mb=2048, processes=64, disk_mb=64)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Tell:
    """A probe, and the AUC on held-out samples by this probe alone."""

    probe: str
    group: str
    auc: float
    seen: str  # the difference, e.g. "size: 3.1 in boxes, 11.0 in production"
    cure: str
    exception: str


@dataclass(frozen=True)
class ParityAudit:
    """`gated` leaves the declared exceptions out, `whole` has all probes; `tells` are sorted by their AUC."""

    gated: Estimate
    whole: Estimate
    tells: tuple[Tell, ...]

    @property
    def telling(self) -> int:
        """The number of probes, without declared exceptions, that distinguish samples by themselves."""
        return sum(tell.auc > PARITY_GATE and not tell.exception for tell in self.tells)


@dataclass(frozen=True)
class Item:
    """The probes of one group, as in `ParityAudit`. `gated` is None if all are declared exceptions."""

    gated: Estimate | None
    whole: Estimate
    tells: tuple[Tell, ...]


@dataclass(frozen=True)
class _Sides:
    """Samples of production and of boxes as a table, label 1 for boxes, with the folds of the test."""

    columns: Table
    labels_N: np.ndarray
    fold_N: np.ndarray
    machines: Sequence[str]

    def estimate(self, wanted: Callable[[str], bool]) -> Estimate:
        """The AUC on the wanted probes by the better of the two classifiers: an estimate that is rather too high."""
        columns = self.columns.only([wanted(probe) for probe in self.columns.probes])
        if not columns.names:
            return Estimate(mean=0.5, low=0.5, high=0.5)
        estimates = [
            interval(scores(columns.values_NC, self.labels_N, self.fold_N, fit), self.labels_N, self.machines)
            for fit in (logistic, stumps)
        ]
        return max(estimates, key=lambda estimate: estimate.mean)

    def tells(self, wanted: Callable[[str], bool]) -> tuple[Tell, ...]:
        tells = [self._tell(probe) for probe in dict.fromkeys(self.columns.probes) if wanted(probe)]
        return tuple(sorted(tells, key=lambda tell: -tell.auc))

    def _tell(self, name: str) -> Tell:
        columns, labels_N = self.columns.only([p == name for p in self.columns.probes]), self.labels_N
        alone = auc(scores(columns.values_NC, labels_N, self.fold_N, stumps), labels_N)
        means = [columns.values_NC[labels_N == side].mean(0) for side in (1, 0)]
        most = int(np.abs((means[0] - means[1]) / (columns.values_NC.std(0) + 1e-9)).argmax())
        known = probes.of(name)
        seen = f"{columns.names[most]}: {means[0][most]:.2f} in boxes, {means[1][most]:.2f} in production"
        return Tell(name, known.group, alone, seen, known.cure, known.exception)


def _check_count(samples: Sequence[FingerprintSample], of: str) -> None:
    if len(samples) < MIN_SAMPLES:
        raise UserError(f"{len(samples)} fingerprints of {of} say nothing; give {MIN_SAMPLES} or more")


def _sides(boxes: Sequence[FingerprintSample], production: Sequence[FingerprintSample]) -> _Sides:
    """The samples of both sides, in folds of whole machines. Raises UserError."""
    _check_count(boxes, "boxes")
    _check_count(production, "production machines")
    machines = [*(f"p{s.machine}" for s in production), *(f"b{s.machine}" for s in boxes)]
    labels_N = np.array([0.0] * len(production) + [1.0] * len(boxes))
    return _Sides(table([*production, *boxes]), labels_N, folds(machines, labels_N), machines)


def _counted(probe: str) -> bool:
    return not probes.of(probe).exception


def compare(boxes: Sequence[FingerprintSample], production: Sequence[FingerprintSample]) -> ParityAudit:
    """The audit of two sides. Raises UserError if one has too few samples."""
    sides = _sides(boxes, production)
    return ParityAudit(
        gated=sides.estimate(_counted), whole=sides.estimate(lambda _: True), tells=sides.tells(lambda _: True)
    )


def compare_pairs_of_machines(boxes: Sequence[FingerprintSample], machines: Sequence[FingerprintSample]) -> ParityAudit:
    """The audit of boxes and machines that were looked at in pairs, each of which is held out together: what both
    share, such as the load at that moment, tells nothing. Raises UserError for too few pairs."""
    _check_count(boxes, "boxes")
    assert len(boxes) == len(machines)
    pair_N = np.random.default_rng(0).permutation(len(boxes)) % FOLDS
    labels_N = np.array([0.0] * len(machines) + [1.0] * len(boxes))
    names = [str(number) for number in range(len(boxes))] * 2
    sides = _Sides(table([*machines, *boxes]), labels_N, np.concatenate([pair_N, pair_N]), names)
    return ParityAudit(
        gated=sides.estimate(_counted), whole=sides.estimate(lambda _: True), tells=sides.tells(lambda _: True)
    )


def by_item(boxes: Sequence[FingerprintSample], production: Sequence[FingerprintSample]) -> dict[str, Item]:
    """Items of the attack suite, each by its own probes. Raises UserError as `compare` does."""
    sides = _sides(boxes, production)
    items: dict[str, Item] = {}
    seen = sorted({probe for sample in (*boxes, *production) for probe in sample.probes})
    for item in sorted({probes.of(probe).group for probe in seen}):
        own = [probe for probe in seen if probes.of(probe).group == item]
        counted = list(filter(_counted, own))
        gated = sides.estimate(counted.__contains__) if counted else None
        items[item] = Item(gated, sides.estimate(own.__contains__), sides.tells(own.__contains__))
    return items


async def box_samples(
    count: int,
    *,
    machine_profiles: ProfileSource | None,
    dataset: Path | None = None,
    boxes: SandboxConfig | None = None,
    progress: Progress = lambda *_: None,
) -> list[FingerprintSample]:
    """Fingerprints of `count` fresh boxes, of the tasks of `dataset`, by the table [sandbox] `boxes`. Raises UserError,
    or BoxError without boxes."""
    samples: list[FingerprintSample] = []
    with tempfile.TemporaryDirectory(prefix="etude-parity-") as folder:
        images = made_up(Path(folder), count) if dataset is None else _of_tasks(dataset, count)
        async with open_sandbox(boxes, machine_profiles=machine_profiles) as sandbox:
            for number, (name, image) in enumerate(images):
                samples.append(FingerprintSample(name, await box_probes(sandbox, image)))
                progress(number + 1, count)
    return samples


async def box_probes(sandbox: Sandbox, image: Image) -> Mapping[str, Any]:
    """The fingerprint of a fresh box on `image`. Raises RunFailed, or BoxError without a box."""
    line = f"python3 -c {shlex.quote(FINGERPRINT_SCRIPT.read_text('utf-8'))} --samples 1 >> /tmp/samples.jsonl"
    box = await sandbox.create(image, LIMITS)
    try:
        done = await box.exec(line, SECONDS)  # into a file, as on users' machines
        done = done if done.rc else await box.exec("cat /tmp/samples.jsonl", SECONDS)
    finally:
        await box.close()
    text = done.output.strip().rpartition("\n")[2]
    if done.rc != 0:
        raise RunFailed(f"a fingerprint could not be taken in a box: {text[-200:]}")
    return parse_fingerprint(text, "the fingerprint of a box").probes


def _of_tasks(dataset: Path, count: int) -> Iterator[tuple[str, Image]]:
    """Images of tasks; boxes of one task are one machine."""
    loaded = load_dataset(dataset)
    for task in (loaded.tasks[number % len(loaded.tasks)] for number in range(count)):
        yield task.id, loaded.image(task)


def made_up(root: Path, count: int) -> Iterator[tuple[str, Image]]:
    """Images of a small library, each with a change of its own."""
    root.chmod(0o755)
    (root / "src").mkdir()
    texts = {"README.md": "A small library.\n", "src/module.py": "def two():\n    return 2\n"}
    for path, text in texts.items():
        (root / path).write_text(text)
    for number in range(count):
        changes = {"src/module.py": f"def two():\n    return {number}\n"}
        files = {path: text.encode() for path, text in (texts | changes).items()}
        who = f"Ada <ada@example.com> {int(time.time()) - 86_400 * (1 + number % 90)} +0100\n"
        past = git_history.single(f"author {who}committer {who}".encode(), b"A small library\n")
        yield str(number), Image(root, None, changes, history=git_history.folder(past, files))


def record_fingerprints(path: Path, samples: int) -> None:
    """Append fingerprints of this machine to `path`, whole or not at all. Raises UserError."""
    if samples < 1:
        raise UserError("--samples must be at least 1")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a folder; give a file in one that exists")
    # Not in a process of its own: the terminal and the parent are to be those of the user's shell.
    lines = "".join(fingerprint.line() + "\n" for _ in range(samples))
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror}); give another file") from None


def requests(count: int, dataset: Path) -> list[FingerprintSample]:
    """Fingerprints of first requests of `count` episodes, in OpenAI's format and without documents."""
    tasks = load_dataset(dataset).tasks
    chosen = [tasks[number % len(tasks)] for number in range(count)]
    bodies = [{"messages": messages_of(task), "tools": SCHEMAS} for task in chosen]
    return [FingerprintSample(conversation, probes) for probes, conversation in map(fingerprint.request, bodies)]


@dataclass(frozen=True)
class ParityComparison:
    """Boxes against production: as a run makes them, and without machine profiles. `notes` qualify the figures."""

    treated: ParityAudit
    untreated: ParityAudit
    machines: int
    samples: int
    boxes: int
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether the gated AUC of boxes with machine profiles is within the gate."""
        return self.treated.gated.mean <= PARITY_GATE


def compare_boxes(
    files: Sequence[Path],
    count: int,
    *,
    dataset: Path | None = None,
    machine_profiles: Path | None = None,
    boxes: SandboxConfig | None = None,
) -> ParityComparison:
    """Make 2 x `count` boxes and compare them with the fingerprints in `files`. Raises UserError.

    Boxes are of the tasks of `dataset`, and have the machine profiles of a file; by default they imitate half of the
    machines, and are compared with the others.
    """
    if count < MIN_SAMPLES:
        raise UserError(f"--boxes must be at least {MIN_SAMPLES}")
    production = [sample for sample in read_fingerprints(files) if not sample.is_request]
    models, rest = _halves(production)
    source: ProfileSource = [sample.probes for sample in models]
    if machine_profiles is not None:
        source, rest = load_profiles(machine_profiles), production
    _check_count(rest, "production machines to compare with")
    if os.environ.get("TERM", "dumb") != "dumb":
        print(f"making {2 * count} boxes", file=sys.stderr)
    sides = [
        asyncio.run(box_samples(count, machine_profiles=each, dataset=dataset, boxes=boxes)) for each in (source, None)
    ]
    treated, untreated = (compare(side, rest) for side in sides)
    machines = len({sample.machine for sample in production})
    labels_N = np.array([0.0] * len(rest) + [1.0] * count)
    names = [*(s.machine for s in rest), *(s.machine for s in sides[0])]
    notes = _notes(machines, held_out(names, labels_N))
    return ParityComparison(treated, untreated, machines, len(production), count, notes)


def _halves(production: Sequence[FingerprintSample]) -> tuple[list[FingerprintSample], list[FingerprintSample]]:
    """Samples to draw machine profiles from, and samples to compare boxes with, of other machines if possible."""
    machines = sorted({sample.machine for sample in production})
    if len(machines) < 2:
        return list(production[::2]), list(production[1::2])
    models = set(machines[::2])
    return [s for s in production if s.machine in models], [s for s in production if s.machine not in models]


def _notes(machines: int, split: bool) -> list[str]:
    notes = []
    if machines < WANTED_MACHINES:
        notes.append(
            f"The fingerprints come from {machines} machine{'s' * (machines > 1)}: whatever is peculiar to "
            f"{'them' if machines > 1 else 'it'} tells a box apart. Record on {WANTED_MACHINES} or more."
        )
    if not split:
        notes.append("Samples of one machine stand on both sides of a fold, for there is no other to hold out.")
    return notes
