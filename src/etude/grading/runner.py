"""Test runs and their reports: sends requests to a backend, remembers results, and checks the output.

A run is a function of image, changes and tests, so equal runs are made once and remembered. Hidden tests are decided in
a process of their own where possible, a verifier; the others, such as one that reads the library's source, run in the
process of the tested code, with sentinels and negative controls among them (`verdict.py`). JavaScript tests have a
runner of their own (`script_runner.py`).

The tests that a verifier can decide are recorded before their first run. A test is tried RUNS times on the right
library, in a verifier (`guest/verifier.py`). If it passes each time, it is decided outside from then on, and the
library may decide at the places where it decided in any of these runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from configparser import ConfigParser
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import blake3

from etude.code import is_script
from etude.config import NamespaceSandboxConfig, SandboxConfig
from etude.grading import verdict
from etude.grading.script_runner import ScriptRunner
from etude.sandbox import (
    WORKSPACE,
    Backend,
    BackendOptions,
    Capabilities,
    Changes,
    ForkRequest,
    ForkResult,
    Image,
    LaunchFailed,
    Limits,
    ProfileSource,
    RunCounts,
    RunImage,
    RunServer,
    TestReport,
    ValueBox,
    VerifyRequest,
)
from etude.sandbox.backends.choose import open_backend
from etude.sandbox.egress import Egress, configured_egress

RUNS = 3  # of a recorded test
SETTINGS = "pytest.ini"  # in the folder of dependencies
BATCH = 50  # tests of one recording run: their records fit into its pipe
RECORD_LIMITS = Limits(seconds=60.0, memory_mb=2048)


@dataclass(frozen=True)
class RecordedTest:
    """The recordings of a test on the right library as one: see `verdict.TestRecording`.

    decoys: the answers on decoys that were the same each time. `origins`: the calls that are made for them.
    equality: share of its judged lines at which the library decides and no decoy checks it.
    """

    places: tuple[str, ...]
    decoys: dict[str, dict[str, bool]]
    origins: tuple[str, ...]
    equality: float

    @property
    def request(self) -> dict[str, Any]:
        """The recording as a verifier takes it."""
        return {"places": self.places, "decoys": self.decoys, "origins": self.origins}


@dataclass
class HiddenTests:
    """The hidden tests of one library.

    image: the right library, without changes. `names` are its top-level modules, `modules` those that tests import, and
        `exports` the names that each gives to `import *`.
    secret: of the decoy comparisons, which no tested process may know.
    recorded: the recordings of tests; None for a test that runs inside.
    prepared: files that templates of the hidden tests keep compiled.
    controlled: whether a test that runs inside has a negative control that fails on the right library.
    """

    image: RunImage
    folder: Path
    sentinels: verdict.SentinelTests
    secret: str
    names: tuple[str, ...]
    modules: list[str] = field(default_factory=list)
    exports: dict[str, tuple[str, ...]] = field(default_factory=dict)
    recorded: dict[str, RecordedTest | None] = field(default_factory=dict)
    controlled: dict[str, bool] = field(default_factory=dict)
    prepared: set[str] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def inside(self) -> RunImage:
        """The image of runs inside the tested process; it holds the hidden tests."""
        return RunImage(self.image.repository, self.image.site, self.folder, controls=self.sentinels.controls)


class TestRunner:
    """A sandbox: the boxes of a backend, with test runs that this process decides. Made by `open_sandbox`."""

    __test__ = False  # for pytest, which would collect the class

    def __init__(self, backend: Backend, *, workers: int = 2, memo: int = 4096, outside: bool = True) -> None:
        """See `open_sandbox`."""
        self.backend = backend
        self.stats = RunCounts()
        self.scripts = ScriptRunner(backend)
        self._slots = asyncio.Semaphore(workers)  # wakes in order of arrival
        self._memo: OrderedDict[bytes, asyncio.Task[TestReport]] = OrderedDict()
        self._memo_size = memo
        self._outside = outside
        self._hidden: dict[tuple[RunImage, Path], HiddenTests] = {}

    @property
    def alive(self) -> bool:
        """Whether boxes can still be made; if not, every call raises BoxDead."""
        return self.backend.alive

    @property
    def zygote_pid(self) -> int | None:
        """The id of the process that makes boxes, if there is one."""
        return self.backend.zygote_pid

    @property
    def python(self) -> str:
        """The version of Python in boxes."""
        return self.backend.python

    def capabilities(self) -> Capabilities:
        """The capabilities of boxes on this machine."""
        return self.backend.capabilities()

    @property
    def image_name(self) -> str:
        """The name of the system in boxes."""
        return self.backend.image_name

    def system_folders(self) -> Mapping[str, Path]:
        """The folders of the system in boxes."""
        return self.backend.system_folders()

    async def create(self, image: Image, limits: Limits, *, bare: bool = False) -> ValueBox:
        """A box on `image`, whose test runs are decided by this runner."""
        return ValueBox(self.backend, image, limits, self.run_tests, bare=bare)

    async def run_tests(
        self, image: Image, changes: Changes, tests: Sequence[str], hidden: Path | None, limits: Limits
    ) -> TestReport:
        """As `Sandbox.run_tests`; equal runs are made once."""
        layers: dict[str, bytes | None] = {**_tree(image), **changes}
        if not self._memo_size:
            self.stats.misses += 1
            return await self._run(image, changes, tests, hidden, limits)
        key = await asyncio.to_thread(_key, image, layers, tests, hidden, limits)  # it may hash megabytes
        task = self._memo.get(key)
        if task is None:
            self.stats.misses += 1
            task = asyncio.create_task(self._run(image, changes, tests, hidden, limits))
            self._memo[key] = task
            task.add_done_callback(lambda done: self._settle(key, done))
        else:
            self.stats.hits += 1
            self._memo.move_to_end(key)
        return await asyncio.shield(task)

    def _settle(self, key: bytes, task: asyncio.Task[TestReport]) -> None:
        """Keep only results that are a function of their key; a deadline also depends on the machine's load."""
        if task.cancelled() or task.exception() is not None or task.result().timed_out:
            self._memo.pop(key, None)
        while len(self._memo) > self._memo_size:
            self._memo.popitem(last=False)

    async def _run(
        self, image: Image, changes: Changes, tests: Sequence[str], hidden: Path | None, limits: Limits
    ) -> TestReport:
        tests = tuple(dict.fromkeys(tests))
        if any(map(is_script, tests)):
            async with self._slots:
                return await self.scripts.run(image, {**_tree(image), **changes}, tests, hidden, limits)
        tree = RunImage(image.repository, image.site, None, tuple(sorted(_tree(image).items())))
        if hidden is None:
            async with self._slots:
                return await self._run_visible(tree, changes, tests, limits)
        known = self._hidden_tests(replace(tree, changes=()), hidden)
        if self._outside:
            await record(self.backend, known, tests)
        outside = [test for test in tests if known.recorded.get(test) is not None]
        inside = [test for test in tests if known.recorded.get(test) is None]
        async with self._slots:
            first = await self._verify(known, tree, changes, outside, limits) if outside else None
            second = await self._run_inside(known, tree, changes, inside, limits) if inside else None
        reports = [report for report in (first, second) if report is not None]
        return verdict.joined(reports, tests)

    def _hidden_tests(self, image: RunImage, folder: Path) -> HiddenTests:
        if (image, folder) not in self._hidden:
            self._hidden[image, folder] = hidden_tests(image, folder)
        return self._hidden[image, folder]

    async def _fork(self, request: ForkRequest) -> ForkResult:
        result = await self.backend.fork(request)
        self.stats.cpu_seconds += result.cpu_seconds
        self.stats.cold += result.cold
        return result

    async def _run_visible(self, tree: RunImage, changes: Changes, tests: Sequence[str], limits: Limits) -> TestReport:
        """Run tests that the agent may see, in the process of the tested code."""
        plan = verdict.plan(tests, None)
        return verdict.decide(plan, await self._fork(ForkRequest(tree, plan.files, plan.tests, changes, limits)))

    async def _run_inside(
        self, hidden: HiddenTests, tree: RunImage, changes: Changes, tests: Sequence[str], limits: Limits
    ) -> TestReport:
        """Run hidden tests in the process of the tested code, with sentinels and controls among them."""
        controlled = [test for test in tests if hidden.controlled.get(test)] if self._outside else None
        plan = verdict.plan(tests, hidden.sentinels, controlled)
        image = replace(hidden.inside, changes=tree.changes)
        return verdict.decide(plan, await self._fork(ForkRequest(image, plan.files, plan.tests, changes, limits)))

    async def _verify(
        self, hidden: HiddenTests, tree: RunImage, changes: Changes, tests: Sequence[str], limits: Limits
    ) -> TestReport:
        """Run hidden tests in a process of their own."""
        recorded = {test: known for test in tests if (known := hidden.recorded[test]) is not None}
        allowed = {test: known.request for test, known in recorded.items()}
        names, exports = hidden.names, hidden.exports
        request = VerifyRequest(
            tree, hidden.folder, names, tests, changes, limits, allowed, hidden.modules, exports, hidden.secret
        )
        result = await self.backend.verify(request)
        self.stats.cpu_seconds += result.verifier.cpu_seconds + result.tested.cpu_seconds
        self.stats.cold += result.tested.cold
        equality = {test: known.equality for test, known in recorded.items()}
        return replace(verdict.decide_outside(tests, result), equality=equality)


def hidden_tests(image: RunImage, folder: Path) -> HiddenTests:
    """The hidden tests of a folder, not yet recorded."""
    secret = secrets.token_hex(12)
    return HiddenTests(
        image, folder, verdict.new_sentinels(), secret, library_names(image.repository, folder, image.site)
    )


def library_names(repository: Path, hidden: Path, site: Path | None = None) -> tuple[str, ...]:
    """Top-level modules and packages of a repository, except those that the hidden tests bring. Further folders to
    import from are those of the settings in `site`."""
    settings = ConfigParser(interpolation=None)
    settings.read(() if site is None else site / SETTINGS, "utf-8")
    listed = settings.get("pytest", "pythonpath", fallback="").split()
    roots = ["src", *(path.removeprefix(f"{WORKSPACE}/") for path in listed if path.startswith(f"{WORKSPACE}/"))]
    names = set()
    for root in (*(repository / path for path in roots), repository):
        for entry in root.iterdir() if root.is_dir() else ():
            name = entry.name.removesuffix(".py")
            package = (entry.is_dir() and any(entry.glob("*.py"))) or (entry.is_dir() and any(entry.glob("*/*.py")))
            if name.isidentifier() and (entry.suffix == ".py" or package):
                own = hidden / name / "__init__.py", hidden / f"{name}.py"
                if not any(path.exists() for path in own):
                    names.add(name)
    # A folder to import from is no package itself.
    return tuple(sorted(names - {path for path in roots if not (repository / path / "__init__.py").exists()}))


async def record(backend: Backend, hidden: HiddenTests, tests: Iterable[str]) -> None:
    """Record the tests that have no recording yet. Raises BoxError if boxes fail."""
    async with hidden.lock:
        new = [test for test in dict.fromkeys(tests) if test not in hidden.recorded]
        candidates = [test for test in new if "::doctest:" not in test]
        made: dict[str, RecordedTest | None] = dict.fromkeys(new)
        count = backend.recordings
        for start in range(0, len(candidates), count * BATCH):
            some = candidates[start : start + count * BATCH]
            parts = (_recorded(backend, hidden, some[part::count]) for part in range(min(count, len(some))))
            results = await asyncio.gather(*parts, return_exceptions=True)
            if any(isinstance(result, LaunchFailed) for result in results):
                break  # a plugin of pytest imports the library: all is decided inside, where boxes start at all
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                made |= result
        inside = [test for test, recorded in made.items() if recorded is None]
        if inside:
            plan = verdict.plan(inside, hidden.sentinels)
            result = await backend.fork(ForkRequest(hidden.inside, plan.files, plan.tests, {}, RECORD_LIMITS))
            working = verdict.working_controls(plan, result)
            hidden.controlled |= {test: test in working for test in inside}
        hidden.recorded |= made


async def _recorded(backend: Backend, hidden: HiddenTests, tests: Sequence[str]) -> dict[str, RecordedTest | None]:
    """The recordings of tests that pass each time. A test that fails with the decoys of constructors is recorded
    without these, and one that fails with others without any."""
    made: dict[str, RecordedTest | None] = {}
    for kind in ("all", "plain", "none"):
        decoyed: set[str] = set()
        made |= await _record_runs(backend, hidden, tests, kind, decoyed)
        tests = [test for test in tests if made[test] is None and test in decoyed]
        if not tests:
            break
    return made


async def _record_runs(
    backend: Backend, hidden: HiddenTests, tests: Sequence[str], kind: str, decoyed: set[str]
) -> dict[str, RecordedTest | None]:
    """RUNS recordings with some `kind` of decoys. `decoyed` gets the tests in which the library compares."""
    runs: dict[str, list[verdict.TestRecording]] = {test: [] for test in tests}
    for n in range(RUNS):
        order = tests if n % 2 == 0 else tests[::-1]  # what a test does must not depend on those before it
        groups = [[test for test in order if test in runs]]
        while groups:
            group = groups.pop(0)
            origins = {test: runs[test][0].origins for test in group if runs[test] and kind == "all"}
            secret = hidden.secret if kind != "none" else ""
            made = await _record_once(backend, hidden, group, secret, origins) if group else {}
            for test, recording in made.items():
                decoyed.update([test] if recording.judged[1] else ())
                if recording.outcome == "passed":
                    runs[test].append(recording)
                else:
                    del runs[test]
            rest = [test for test in group if test not in made]
            files = {test.partition("::")[0] for test in rest}
            if made and rest:  # the first test without a recording ended the run for the others
                del runs[rest[0]]
                groups.append(rest[1:])
            elif len(files) > 1:
                groups += [[test for test in rest if test.startswith(f"{path}::")] for path in sorted(files)]
            else:  # the import of their file ends the run
                for test in rest:
                    del runs[test]
    return {test: _agreed(runs[test], kind == "all") if test in runs else None for test in tests}


def _agreed(runs: Sequence[verdict.TestRecording], constructed: bool) -> RecordedTest:
    """One recording. The first run only finds the calls of which the later ones make decoys."""
    places = {place for run in runs for place in run.places}
    first, *others = runs
    decoys: dict[str, dict[str, bool]] = {}
    for place, known in others[-1].decoys.items():
        decoys[place] = {
            name: answer
            for name, answer in known.items()
            if all(run.decoys.get(place, {}).get(name, None if run in others else answer) is answer for run in runs)
        }
    shares = [open_ / max(1, judged + decided) for judged, decided, open_ in (run.judged for run in others)]
    return RecordedTest(tuple(sorted(places)), decoys, first.origins if constructed else (), round(max(shares), 3))


async def _record_once(
    backend: Backend, hidden: HiddenTests, tests: Sequence[str], secret: str, origins: Mapping[str, Sequence[str]]
) -> dict[str, verdict.TestRecording]:
    """Recordings of the tests that ran to their end."""
    request = VerifyRequest(
        hidden.image, hidden.folder, hidden.names, tests, {}, RECORD_LIMITS, None, hidden.modules, {}, secret, origins
    )
    made, learned, library = verdict.recordings(tests, await backend.verify(request))
    hidden.modules += [name for name in library if name not in hidden.modules]
    hidden.exports |= {name: names for name, names in library.items() if name not in hidden.exports}
    if library and not hidden.prepared.issuperset(learned.get("sources", ())):
        hidden.prepared.update(learned["sources"])
        await backend.remember(RunImage(hidden.folder, hidden.image.site, None), json.dumps(learned).encode())
    return {test: recording for test, recording in made.items() if recording.fault not in ("gone", "garbage")}


def _tree(image: Image) -> dict[str, bytes]:
    """The files that the task changes, by path."""
    return {path: text.encode("utf-8", "surrogateescape") for path, text in image.changes.items()}


def _key(image: Image, layers: Changes, tests: Sequence[str], hidden: Path | None, limits: Limits) -> bytes:
    digest = blake3.blake3(ascii((image.repository, image.site, hidden, limits, tuple(tests))).encode())
    for path, data in sorted(layers.items()):
        name, size = os.fsencode(path), -1 if data is None else len(data)
        digest.update(b"%d %d " % (len(name), size) + name + (data or b""))
    return digest.digest()


EXAMINER = RunServer(Path(__file__).parent / "guest", "grading.guest")


@asynccontextmanager
async def open_sandbox(
    config: SandboxConfig | None = None,
    *,
    workers: int = 2,
    memo: int = 4096,
    outside: bool = True,
    machine_profiles: ProfileSource | None = (),
    egress: Egress | None = None,
    packages: Iterable[str] = (),
    repeatable: bool = False,
) -> AsyncIterator[TestRunner]:
    """Open the backend that `config` names (default: this machine's namespaces), with its test runner.

    workers: test runs at a time.
    memo: test reports to remember; 0: every run is made.
    outside: decide hidden tests in a process of their own. False runs all of them in that of the tested code.
    machine_profiles, egress, repeatable: see `BackendOptions`. Without `egress` boxes reach what `config` allows.
    packages: projects that an index of `config` leaves out, those that tasks are made from.

    Raises UserError where boxes cannot be made, or for an option that the backend lacks.
    """
    config = config or NamespaceSandboxConfig()
    egress = configured_egress(config, packages) if egress is None else egress
    services = tuple(service.model_dump() for service in config.services)
    options = BackendOptions(EXAMINER, machine_profiles, egress, repeatable, services)
    async with open_backend(config, options) as backend:
        yield TestRunner(backend, workers=workers, memo=memo, outside=outside)
