"""Records the hidden tests of a dataset: which tests a verifier can decide, and at which places the library may decide.

A test is tried RUNS times on the right library, in a verifier (`guest/verifier.py`). If it passes each time, it is
decided outside from then on, and the library may decide at the places where it decided in any of these runs. Tests that
a verifier cannot run, such as one that reads the library's source, run inside the tested process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.grading import verdict
from etude.sandbox import Backend, ForkRequest, Limits, RunImage, VerifyRequest

RUNS = 3
BATCH = 100  # tests of one run: their records fit into its pipe
PARTS = 4  # runs at a time: while a test sleeps, others can run
LIMITS = Limits(seconds=60.0, memory_mb=2048)


@dataclass
class HiddenTests:
    """The hidden tests of one library.

    image: the right library, without changes. `names` are its top-level modules, `modules` those that tests import.
    places: test -> where the library may decide; None for a test that runs inside.
    prepared: files that templates of the hidden tests keep compiled.
    controlled: whether a test that runs inside has a negative control that fails on the right library.
    """

    image: RunImage
    folder: Path
    sentinels: verdict.SentinelTests
    names: tuple[str, ...]
    modules: list[str] = field(default_factory=list)
    places: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    controlled: dict[str, bool] = field(default_factory=dict)
    prepared: set[str] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def inside(self) -> RunImage:
        """The image of runs inside the tested process; it holds the hidden tests."""
        return RunImage(self.image.repository, self.image.site, self.folder, controls=self.sentinels.controls)


def hidden_tests(image: RunImage, folder: Path) -> HiddenTests:
    """The hidden tests of a folder, not yet recorded."""
    return HiddenTests(image, folder, verdict.new_sentinels(), library_names(image.repository, folder))


def library_names(repository: Path, hidden: Path) -> tuple[str, ...]:
    """Top-level modules and packages of a repository, except those that the hidden tests bring."""
    names = set()
    for root in (repository / "src", repository):
        for entry in root.iterdir() if root.is_dir() else ():
            name = entry.name.removesuffix(".py")
            package = (entry.is_dir() and any(entry.glob("*.py"))) or (entry.is_dir() and any(entry.glob("*/*.py")))
            if name.isidentifier() and (entry.suffix == ".py" or package):
                own = hidden / name / "__init__.py", hidden / f"{name}.py"
                if not any(path.exists() for path in own):
                    names.add(name)
    if not (repository / "src" / "__init__.py").exists():
        names.discard("src")
    return tuple(sorted(names))


async def record(backend: Backend, hidden: HiddenTests, tests: Iterable[str]) -> None:
    """Record the tests that have no recording yet. Raises BoxError if boxes fail."""
    async with hidden.lock:
        new = [test for test in dict.fromkeys(tests) if test not in hidden.places]
        candidates = [test for test in new if "::doctest:" not in test]
        made: dict[str, tuple[str, ...] | None] = dict.fromkeys(new)
        for start in range(0, len(candidates), PARTS * BATCH):
            some = candidates[start : start + PARTS * BATCH]
            parts = (_recorded(backend, hidden, some[part::PARTS]) for part in range(min(PARTS, len(some))))
            for places in await asyncio.gather(*parts):
                made |= places
        inside = [test for test, places in made.items() if places is None]
        if inside:
            plan = verdict.plan(inside, hidden.sentinels)
            result = await backend.fork(ForkRequest(hidden.inside, plan.files, plan.tests, {}, LIMITS))
            working = verdict.working_controls(plan, result)
            hidden.controlled |= {test: test in working for test in inside}
        hidden.places |= made


async def _recorded(backend: Backend, hidden: HiddenTests, tests: Sequence[str]) -> dict[str, tuple[str, ...] | None]:
    """Places by test, for the tests that pass each time."""
    places: dict[str, set[str]] = {test: set() for test in tests}
    for _ in range(RUNS):
        groups = [[test for test in tests if test in places]]
        while groups:
            group = groups.pop(0)
            made = await _run(backend, hidden, group) if group else {}
            for test, recording in made.items():
                if recording.outcome == "passed":
                    places[test].update(recording.places)
                else:
                    del places[test]
            rest = [test for test in group if test not in made]
            files = {test.partition("::")[0] for test in rest}
            if made and rest:  # the first test without a recording ended the run for the others
                del places[rest[0]]
                groups.append(rest[1:])
            elif len(files) > 1:
                groups += [[test for test in rest if test.startswith(f"{path}::")] for path in sorted(files)]
            else:  # the import of their file ends the run
                for test in rest:
                    del places[test]
    return {test: tuple(sorted(places[test])) if test in places else None for test in tests}


async def _run(backend: Backend, hidden: HiddenTests, tests: Sequence[str]) -> dict[str, verdict.TestRecording]:
    """Recordings of the tests that ran to their end."""
    request = VerifyRequest(hidden.image, hidden.folder, hidden.names, tests, {}, LIMITS, None, hidden.modules)
    made, learned, library = verdict.recordings(tests, await backend.verify(request))
    hidden.modules += [name for name in library if name not in hidden.modules]
    if library and not hidden.prepared.issuperset(learned.get("sources", ())):
        hidden.prepared.update(learned["sources"])
        await backend.remember(RunImage(hidden.folder, hidden.image.site, None), json.dumps(learned).encode())
    return {test: recording for test, recording in made.items() if recording.fault not in ("gone", "garbage")}
