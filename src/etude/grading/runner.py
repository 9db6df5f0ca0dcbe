"""Test runs and their reports: sends requests to a backend, remembers results, and checks the output.

A run is a function of image, changes and tests, so equal runs are made once and remembered. Hidden tests are decided in
a process of their own where possible (`recordings.py`); the others run in the process of the tested code, with
sentinels and negative controls among them (`verdict.py`). JavaScript tests have a runner of their own
(`script_runner.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import blake3

from etude.config import NamespaceSandboxConfig, SandboxConfig
from etude.grading import recordings, verdict
from etude.grading.javascript import is_script
from etude.grading.recordings import HiddenTests
from etude.grading.script_runner import ScriptRunner
from etude.sandbox import (
    Backend,
    BackendOptions,
    Capabilities,
    Changes,
    ForkRequest,
    ForkResult,
    Image,
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
from etude.sandbox.egress import Egress


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

    def capabilities(self) -> Capabilities:
        """The capabilities of boxes on this machine."""
        return self.backend.capabilities()

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
            await recordings.record(self.backend, known, tests)
        outside = [test for test in tests if known.places.get(test) is not None]
        inside = [test for test in tests if known.places.get(test) is None]
        async with self._slots:
            first = await self._verify(known, tree, changes, outside, limits) if outside else None
            second = await self._run_inside(known, tree, changes, inside, limits) if inside else None
        reports = [report for report in (first, second) if report is not None]
        return verdict.joined(reports, tests)

    def _hidden_tests(self, image: RunImage, folder: Path) -> HiddenTests:
        if (image, folder) not in self._hidden:
            self._hidden[image, folder] = recordings.hidden_tests(image, folder)
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
        allowed = {test: hidden.places[test] or () for test in tests}
        request = VerifyRequest(tree, hidden.folder, hidden.names, tests, changes, limits, allowed, hidden.modules)
        result = await self.backend.verify(request)
        self.stats.cpu_seconds += result.verifier.cpu_seconds + result.tested.cpu_seconds
        self.stats.cold += result.tested.cold
        return verdict.decide_outside(tests, result)


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
    repeatable: bool = False,
) -> AsyncIterator[TestRunner]:
    """Open the backend that `config` names (default: this machine's namespaces), with its test runner.

    workers: test runs at a time.
    memo: test reports to remember; 0: every run is made.
    outside: decide hidden tests in a process of their own. False runs all of them in that of the tested code.
    machine_profiles, egress, repeatable: see `BackendOptions`.

    Raises UserError where boxes cannot be made, or for an option that the backend lacks.
    """
    options = BackendOptions(EXAMINER, machine_profiles, egress, repeatable)
    async with open_backend(config or NamespaceSandboxConfig(), options) as backend:
        yield TestRunner(backend, workers=workers, memo=memo, outside=outside)
