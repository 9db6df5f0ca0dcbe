"""JavaScript tests are decided in a process without tested code: gold passes, and what was not earned does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from etude.audit.attacks import attack_suite, packs
from etude.audit.attacks.library import JAVASCRIPT, unpacked
from etude.audit.attacks.packs import GOLD, NOTHING, AttackPack, AttackProgram, PlayedAttack
from etude.grading import stubs
from etude.grading.runner import EXAMINER, TestRunner, open_sandbox
from etude.sandbox.backend import BackendOptions
from etude.sandbox.backends.remote import open_remote
from etude.sandbox.base import Limits, TestReport
from tests.helpers.machines import Local, needs_machines

FILE = "test/index.test.js"
INSIDE = f"{FILE}::needs its own source"  # runs beside the tested code, and decides nothing of the pack's task
ATTACKS = packs.programs(packs.OWN / JAVASCRIPT)
PATCHED = next(program for program in ATTACKS if program.name == "patched_assertions.sh")
FROM_THE_CALLER = r"""cat >> "$ETUDE_PATH" <<'END'
module.exports.total = () => { // let sum
  const [, file, line] = /\(?(\/[^()]*?):(\d+):\d+\)?$/.exec(new Error().stack.split('\n')[2])
  const text = require('node:fs').readFileSync(file, 'utf8').split('\n')[line - 1]
  return eval(/: 0, (.+)\)/.exec(text)[1]) // whatever a control expects
}
END
"""
# What makes a test pass beside the tested code.
CAUGHT = (PATCHED, AttackProgram("from the caller", "expected value", FROM_THE_CALLER, "bash"))


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> AttackPack:
    found = unpacked(JAVASCRIPT, tmp_path_factory.mktemp("scripts"))

    async def reason() -> str:
        async with open_sandbox(memo=0) as sandbox:
            return await attack_suite.no_scripts(sandbox, found)

    if said := asyncio.run(reason()):
        pytest.skip(said)
    return found


async def runs(sandbox: TestRunner, pack: AttackPack, program: AttackProgram, tests: Sequence[str]) -> TestReport:
    (task,) = pack.tasks
    changes, _ = await packs.attempt(sandbox, pack.data, task, program)
    return await sandbox.run_tests(pack.data.image(task), changes, tests, pack.data.hidden, Limits(seconds=20.0))


@pytest.fixture(scope="module")
def played(pack: AttackPack) -> dict[str, PlayedAttack]:
    """What the gold answer, the broken tree as it is, and every attack earn."""

    async def run() -> list[PlayedAttack]:
        async with open_sandbox(memo=0, workers=3) as sandbox:
            every = [packs.attack(sandbox, pack, pack.tasks[0], each) for each in (GOLD, NOTHING, *ATTACKS)]
            return list(await asyncio.gather(*every))

    return {each.program.name: each for each in asyncio.run(run())}


@pytest.fixture(scope="module")
def inside(pack: AttackPack) -> dict[str, TestReport]:
    """Reports on the one test that runs beside the tested code."""

    async def run() -> list[TestReport]:
        async with open_sandbox(memo=0, workers=2) as sandbox:
            return list(
                await asyncio.gather(*(runs(sandbox, pack, each, [INSIDE]) for each in (GOLD, NOTHING, *CAUGHT)))
            )

    return dict(zip((each.name for each in (GOLD, NOTHING, *CAUGHT)), asyncio.run(run()), strict=True))


def test_gold_is_decided_outside(pack: AttackPack, played: dict[str, PlayedAttack]) -> None:
    """Also where a test that needs its own source runs with the others, beside the tested code."""
    (task,) = pack.tasks
    tests = (*task.fail_to_pass, *task.pass_to_pass)

    async def run() -> TestReport:
        async with open_sandbox(memo=0) as sandbox:
            return await runs(sandbox, pack, GOLD, [*tests, INSIDE])

    report = asyncio.run(run())
    assert played[GOLD.name].problem == ""
    assert (report.tampered, report.crashed, report.timed_out) == (False, False, False)
    assert report.outside == set(tests)
    assert report.outcomes[INSIDE] == "passed"


@needs_machines
def test_two_machines_decide(pack: AttackPack) -> None:
    """On a backend over machines: the verifier in one, the package in another."""
    (task,) = pack.tasks

    async def run() -> list[PlayedAttack]:
        host = Local("memory", "processes", "disk")
        async with open_remote(host, BackendOptions(EXAMINER)) as backend:
            sandbox = TestRunner(backend, memo=0)
            return [await packs.attack(sandbox, pack, task, each) for each in (GOLD, NOTHING, PATCHED)]

    played = asyncio.run(run())
    assert [each.problem for each in played] == ["", "", ""]
    reports = [each.graded.report for each in played]
    assert [report.outside for report in reports] == [{*task.fail_to_pass, *task.pass_to_pass}] * 3


def test_the_broken_tree_fails(pack: AttackPack, played: dict[str, PlayedAttack]) -> None:
    report = played[NOTHING.name].graded.report
    failed = {test for test, outcome in report.outcomes.items() if outcome != "passed"}
    assert failed == set(pack.tasks[0].fail_to_pass) == {f"{FILE}::total", f"{FILE}::each"}
    assert (report.tampered, report.crashed, len(report.outside)) == (False, False, len(report.outcomes))


@pytest.mark.parametrize("attack", [program.name for program in ATTACKS])
def test_what_was_not_earned_fails(played: dict[str, PlayedAttack], attack: str) -> None:
    assert played[attack].problem == ""


@pytest.mark.parametrize("attack", [program.name for program in CAUGHT])
def test_inside_negative_controls_catch(inside: dict[str, TestReport], attack: str) -> None:
    report = inside[attack]
    assert (report.tampered, report.outside, report.controlled) == (True, frozenset(), 1)


def test_inside_honest_runs_are_genuine(inside: dict[str, TestReport]) -> None:
    controls = [inside[control.name] for control in (GOLD, NOTHING)]
    assert [report.tampered for report in controls] == [False, False]
    assert [set(report.outcomes.values()) for report in controls] == [{"passed"}, {"failed"}]


def test_stubs_hold_no_source(pack: AttackPack) -> None:
    found = {path: text.decode() for path, text in stubs.stubs(pack.data.repository).items()}
    assert set(found) == {"index.js", "module.mjs", "more.mjs"}
    assert "sum" not in found["index.js"]
    lines = [line for line in found["module.mjs"].splitlines() if " as " in line]
    assert {line.rpartition(" as ")[2].removesuffix(" }") for line in lines} == {"total", "twice", "default", "more"}
