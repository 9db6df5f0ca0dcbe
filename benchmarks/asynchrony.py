"""Whole runs, synchronous (O = 0) against asynchronous (O = 4): same model, tasks, seed and number of updates.

long-tail/speedup         episodes per second of the asynchronous run / of the synchronous one, where tools are slow
long-tail/engine-busy     share of the time in which the asynchronous run's engine computed, until the last group was
                          admitted: afterwards there is nothing more to give it
long-tail/max-staleness   versions that a trained token lagged behind the trainer, at most
long-tail/early-tools     mean tool seconds of episodes trained on in the first half of the asynchronous run / of all:
                          below 1, long episodes are trained on late (never less often: every episode is trained on)
long-tail/pass-rate       pass@1 on held-out tasks after the asynchronous run; the baseline has the synchronous run's
demo/...                  the same where tools take what they take

Everything is real: `etude.run.launch` with its processes, and models, tasks and settings of recipes/demo.toml. In the
long-tail load every call of `test` in training is preceded by a `sleep` that the shell of the episode's box executes,
of MEDIAN * exp(SIGMA * z) seconds with z normal, LONGEST at most; drawn from (task, number of the episode of that task,
number of the call), so that both runs draw the same. A run is timed from when its processes are ready to its last
version, the start of the pipeline and its end included.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from etude import runfolder
from etude.config import RLConfig
from etude.errors import RunFailed
from etude.evals.suite import EvalResult
from etude.grading.runner import TestRunner, open_sandbox
from etude.ledger.ledger import Ledger
from etude.records import Episode, PolicyVersion, decode
from etude.run import launch
from etude.sandbox.base import Image, Limits, TestReport
from etude.sandbox.box import ValueBox
from etude.store import open_store
from etude.tasks import dataset as datasets
from etude.weights.manifest import manifests

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "tasks" / "data" / "tiny"
SIGMA = 1.3  # the hundredth call takes twenty times as long as the median one
STALENESS = 4
ROWS = 32  # of the engine: on one core more of them make no more tokens, and batches would end all at once
SPEEDUP, BUSY = 2.8, 0.9  # targets


@dataclass(frozen=True)
class Size:
    """P groups of G episodes a step; median and longest sleep in seconds; a dataset, else the recipe's own tasks."""

    prompts: int
    group: int
    steps: int
    median: float
    longest: float
    dataset: Path | None
    evaluate: bool


FULL = Size(prompts=4, group=8, steps=12, median=0.6, longest=8.0, dataset=None, evaluate=True)
QUICK = Size(prompts=2, group=4, steps=6, median=0.2, longest=2.0, dataset=TINY, evaluate=False)


@dataclass(frozen=True)
class Measured:
    """One run."""

    seconds: float
    episodes: int
    engine_busy: float
    max_staleness: int
    early_tools: float  # mean tool seconds of the episodes of the first half / of all
    tools: float  # mean tool seconds of an episode
    whole: bool  # every admitted episode ended, and was trained on once
    heldout: EvalResult | None  # after training

    @property
    def rate(self) -> float:
        return self.episodes / self.seconds


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks, in some 13 minutes on two idle cores. A first run that is not measured compiles kernels.

    `quick`: six steps of a library of four functions, shorter sleeps, the long-tail load alone, nothing held out. Six
    steps are mostly start and end of a pipeline that holds five, so it says less. There the asynchronous run is first:
    what cold caches cost is held against it.
    """
    size = QUICK if quick else FULL
    rows: list[dict[str, Any]] = []
    checks: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as folder, contextlib.redirect_stdout(sys.stderr):
        root = Path(folder)
        if not quick:
            _play(root, "warm-up", replace(size, steps=1, evaluate=False), 0.0, 0)
            size = replace(size, dataset=root / "warm-up" / "tasks")
        for load, median in (("long-tail", size.median), *(() if quick else (("demo", 0.0),))):
            overlapped, sync = (_measure(root, load, size, median, o) for o in (STALENESS, 0))
            rows += _rows(load, size, sync, overlapped)
            checks |= _checks(load, sync, overlapped)
    return {"bench": "async", "rows": rows, "checks": checks}


def _rows(load: str, size: Size, sync: Measured, overlapped: Measured) -> list[dict[str, Any]]:
    def row(case: str, value: float, unit: str, baseline: str) -> dict[str, Any]:
        return {"case": f"{load}/{case}", "value": value, "unit": unit, "baseline": baseline}

    what = f"synchronous, {size.steps} steps of {size.prompts} x {size.group} episodes, {sync.rate:.2f} episodes/s"
    rows = [
        row("speedup", overlapped.rate / sync.rate, "x", what),
        row("engine-busy", overlapped.engine_busy, "x", f"synchronous {sync.engine_busy:.3f}"),
        row("max-staleness", overlapped.max_staleness, "versions", f"bound {STALENESS}"),
        row("early-tools", overlapped.early_tools, "x", f"all episodes, {overlapped.tools:.2f} s each"),
        row("episodes-per-s", overlapped.rate, "1/s", f"synchronous {sync.rate:.2f}"),
    ]
    if sync.heldout and overlapped.heldout:
        was = sync.heldout.pass_1
        baseline = f"synchronous {was.mean:.3f} [{was.low:.3f}, {was.high:.3f}]"
        rows.append(row("pass-rate", overlapped.heldout.pass_1.mean, "x", baseline))
    return rows


def _checks(load: str, sync: Measured, overlapped: Measured) -> dict[str, bool]:
    checks = {
        f"{load}: no token is staler than {STALENESS} versions": overlapped.max_staleness <= STALENESS,
        f"{load}: the synchronous run is on-policy": sync.max_staleness == 0,
        f"{load}: every episode is trained on once": sync.whole and overlapped.whole,
    }
    if sync.heldout and overlapped.heldout:
        name = f"{load}: held-out pass rate not below the synchronous run's interval"
        checks[name] = overlapped.heldout.pass_1.mean >= sync.heldout.pass_1.low
    if load == "long-tail":
        checks[f"{load}: speed-up of at least {SPEEDUP}"] = overlapped.rate / sync.rate >= SPEEDUP
        checks[f"{load}: engine busy at least {BUSY:.0%}"] = overlapped.engine_busy >= BUSY
    return checks


def _measure(root: Path, load: str, size: Size, median: float, staleness: int) -> Measured:
    name = f"{load}-{'sync' if staleness == 0 else 'async'}"
    _play(root, name, size, median, staleness)
    return measured(root / name, size, staleness)


def _play(root: Path, name: str, size: Size, median: float, staleness: int) -> None:
    """A whole run in root/name."""
    boxes = _SlowTools(size, median).open if median else open_sandbox
    report = launch.train_rl(config_of(name, size, staleness), root / name, resume=False, toml=None, boxes=boxes)
    assert report.steps == size.steps, "neither a clock nor a guard may end it"


def config_of(name: str, size: Size, staleness: int) -> RLConfig:
    """recipes/demo.toml, but for the sizes; guards watch and do not act, so that no run ends early."""
    values = tomllib.loads((ROOT / "recipes" / "demo.toml").read_text())
    changes: dict[str, dict[str, Any]] = {
        "model": {"path": str(ROOT / "models" / "nano")},
        "tasks": {"dataset": str(size.dataset)} if size.dataset else {},
        "rollout": {
            "prompts": size.prompts,
            "group": size.group,
            "staleness": staleness,
            "max_in_flight": "auto",
        },
        "guards": {"act": False},
        "cheats": {"decoys": 0.0, "impossible": 0.0},
        "trainer": {"steps": size.steps, "minutes": None},
        "inference": {"max_batch": ROWS},
        "eval": {"before": False, "after": size.evaluate, "samples": 2},
    }
    library = values["tasks"].pop("sources")[0]  # the other one is for training alone
    values["tasks"] |= {} if size.dataset else library
    merged = {section: values.get(section, {}) | changed for section, changed in changes.items()}
    return RLConfig.model_validate(values | merged | {"name": name})


def measured(folder: Path, size: Size, staleness: int) -> Measured:
    """What the folder of a finished run says."""
    published = manifests(open_store(str(folder / "weights")))
    timeline = runfolder.read_jsonl(folder / "timeline.jsonl")
    started = next(span["start"] for span in timeline if (span["process"], span["state"]) == ("controller", "train"))
    created = {manifest.version: manifest.created for manifest in published}
    admitted = created[max(0, size.steps - staleness - 1)]  # the version that let the last groups in
    spans = [(span["start"], span["end"]) for span in timeline if span["process"] == "engine"]
    busy = sum(max(0.0, min(end, admitted) - max(start, started)) for start, end in spans)
    ledger = Ledger.open(f"sqlite:///{folder}/ledger.db")
    trained, generated = ledger.represented()
    whole = ledger.conservation(published).ok and trained == generated
    ledger.close()
    steps = runfolder.read_jsonl(folder / "metrics.jsonl")
    tools = _tool_seconds(folder, published)
    means = [sum(sum(each) for each in part) / sum(map(len, part)) for part in (tools[: len(tools) // 2], tools)]
    return Measured(
        seconds=created[size.steps] - started,
        episodes=generated.episodes,
        engine_busy=busy / (admitted - started),
        max_staleness=int(max(step["off_policy/max"] for step in steps)),
        early_tools=means[0] / means[1],
        tools=means[1],
        whole=whole and generated.episodes == size.steps * size.prompts * size.group,
        heldout=_heldout(folder) if size.evaluate else None,
    )


def _heldout(folder: Path) -> EvalResult:
    return msgspec.json.decode((folder / "eval-after.json").read_bytes(), type=EvalResult)


def _tool_seconds(folder: Path, published: Sequence[PolicyVersion]) -> list[list[float]]:
    """Seconds that each episode spent on tools, by the version that was trained on them."""
    store = open_store(str(folder / "rollouts"))
    seconds: dict[int, list[float]] = {}
    for key in store.list():
        episode = decode(store.get(key), Episode)
        seconds.setdefault(episode.group_id, []).append(sum(turn.seconds_tools for turn in episode.turns))
    return [[s for group in manifest.groups for s in seconds[group]] for manifest in published if manifest.groups]


class _SlowTools:
    """Makes sandboxes in whose boxes a sleep stands before every call of `test`, on tasks that are not held out."""

    def __init__(self, size: Size, median: float) -> None:
        assert size.dataset is not None
        self._size, self._median = size, median
        tasks = datasets.load_dataset(size.dataset).split("train")
        self._names = {tuple(sorted(task.changes.items())): task.id for task in tasks}
        self._played: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[TestRunner]:
        async with open_sandbox(**options) as sandbox:

            async def create(image: Image, limits: Limits) -> ValueBox:
                name = self._names.get(tuple(sorted(image.changes.items())))
                if name is None:
                    return ValueBox(sandbox.backend, image, limits, sandbox.run_tests)
                self._played[name] += 1
                return _SlowBox(sandbox, image, limits, self._seconds(name, self._played[name]))

            sandbox.create = create
            yield sandbox

    def _seconds(self, task: str, number: int) -> Iterator[float]:
        draws = random.Random(f"{task}/{number}")
        while True:
            yield min(self._size.longest, self._median * math.exp(SIGMA * draws.gauss(0, 1)))


class _SlowBox(ValueBox):
    def __init__(self, sandbox: TestRunner, image: Image, limits: Limits, sleeps: Iterator[float]) -> None:
        super().__init__(sandbox.backend, image, limits, sandbox.run_tests)
        self._sleeps = sleeps

    async def run_tests(self, tests: Sequence[str], timeout: float) -> TestReport:
        seconds = next(self._sleeps)
        done = await self.exec(f"sleep {seconds:.3f}", timeout + seconds)
        if done.rc != 0:
            raise RunFailed(f"a box did not sleep: {done.output[-200:]!r}, exit {done.rc}")
        return await super().run_tests(tests, timeout)
