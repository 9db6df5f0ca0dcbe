"""Plans the tests of a run, and decides the verdict on its output.

Most hidden tests are decided outside of the tested process, in a verifier whose report is reliable
(`guest/verifier.py`). In a run of the other tests, the tested code shares a process with the assertions. So its report
is checked by tests whose result only the owner knows: sentinels, which must pass or fail, and negative controls, which
are real tests with a wrong expectation that honest code fails.
"""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from etude.grading.guest.negative_controls import name as control_name
from etude.renderers import printable
from etude.sandbox import BoxDead, ForkResult, HiddenControls, TestReport, VerifyResult

OUTCOMES = frozenset({"passed", "failed", "error"})
MAX_CONTROLS = 3
MAX_MESSAGE = 160


@dataclass(frozen=True)
class SentinelTests:
    """Tests beside the hidden tests of one image, under names that cannot be guessed.

    expected: sentinel -> outcome in an honest run.
    """

    controls: HiddenControls
    expected: dict[str, str]


def new_sentinels() -> SentinelTests:
    """Three sentinels, and a token for negative controls, drawn at random."""
    token, module, *names = (secrets.token_hex(6) for _ in range(5))
    a, b = secrets.SystemRandom().sample(range(1000), 2)
    path = f"test_{module}.py"
    text = (
        f"def test_{names[0]}():\n    assert [{a}, 'x'] == [{b}, 'x']\n"
        f"def test_{names[1]}():\n    raise ValueError({a})\n"
        f"def test_{names[2]}():\n    assert {{'k': {a}}} == {{'k': {a}}}\n"
    )
    outcomes = ("failed", "failed", "passed")
    expected = {f"{path}::test_{name}": outcome for name, outcome in zip(names, outcomes, strict=True)}
    return SentinelTests(HiddenControls(token, {path: text}), expected)


@dataclass(frozen=True)
class TestPlan:
    """The tests of one run inside the tested process. `tests` are those to run, in order: wanted tests and controls.

    sentinels: node id -> outcome in an honest run.
    controls: node id of a negative control -> node id of its test.
    """

    __test__ = False  # for pytest, which would collect the class

    wanted: tuple[str, ...]
    tests: tuple[str, ...]
    sentinels: dict[str, str]
    controls: dict[str, str]

    @property
    def files(self) -> list[str]:
        """The files that a template must import: test files, and `path::doctest:` for source files."""
        return sorted({_file(test) for test in self.tests})


def _file(test: str) -> str:
    path, _, rest = test.partition("::")
    return f"{path}::doctest:" if rest.startswith("doctest:") else path


def plan(tests: Sequence[str], sentinels: SentinelTests | None, controlled: Collection[str] | None = None) -> TestPlan:
    """Plan a run of `tests`. Hidden ones get sentinels at random places, and negative controls at the end.

    controlled: tests whose negative control exists and fails on the right library. None: all controls are tried.
    """
    wanted = tuple(dict.fromkeys(tests))
    if sentinels is None:
        return TestPlan(wanted, wanted, {}, {})
    random = secrets.SystemRandom()
    mixed = list(wanted)
    for test in sentinels.expected:
        mixed.insert(random.randrange(len(mixed) + 1), test)
    functions = [test for test in wanted if test.count("::") == 1 and "::doctest:" not in test]
    if controlled is None:
        chosen = functions
    else:
        # The first test is one that must start to pass: grades list these before the others.
        known = [test for test in functions if test in controlled]
        chosen = known[:1] + random.sample(known[1:], min(MAX_CONTROLS - 1, len(known[1:])))
    controls = {control_name(test, sentinels.controls.token): test for test in chosen}
    return TestPlan(wanted, (*mixed, *controls), sentinels.expected, controls)


class _RunRecord(msgspec.Struct, frozen=True):
    """A line that a run wrote: the record of a test, the reason of an early end, or the end itself.

    line: at which a test failed.
    fault: of a test that was decided outside: "gone", "garbage" or "refused" (`guest/verifier.py`).
    places, decoys, origins, judged, learned: of a recording.
    met: the verifier has received its first bytes from the tested process.
    """

    test: str = ""
    outcome: str = ""
    message: str = ""
    line: int = 0
    fault: str = ""
    places: tuple[str, ...] = ()
    decoys: dict[str, dict[str, bool]] = {}
    origins: tuple[str, ...] = ()
    judged: tuple[int, int, int] = (0, 0, 0)
    learned: dict[str, Any] | None = None
    met: bool = False
    lost: str = ""
    end: int | None = None


@dataclass(frozen=True)
class _RunOutput:
    """The output of a run: a record for each test of the plan, and whether the run wrote anything else."""

    records: dict[str, _RunRecord]
    lost: str  # the run's own message about its early end
    ended: bool
    forged: bool
    learned: dict[str, Any]
    met: bool


def working_controls(plan: TestPlan, result: ForkResult) -> set[str]:
    """Tests whose negative control exists and failed, as it should, in a run of the right library."""
    records = _parsed(frozenset(plan.tests), result).records
    return {test for name, test in plan.controls.items() if name in records and records[name].outcome == "failed"}


def decide(plan: TestPlan, result: ForkResult) -> TestReport:
    """The report on a run inside the tested process."""
    output = _parsed(frozenset(plan.tests), result)
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    for test, record in output.records.items():
        if record.outcome in OUTCOMES:
            outcomes[test] = record.outcome
            messages[test] = printable(record.message[:MAX_MESSAGE])
    tampered = output.forged or _caught(plan, outcomes)
    controlled = sum(control in outcomes for control in plan.controls)
    report = _report(plan.wanted, outcomes, messages, output, result)
    return replace(report, tampered=tampered, controlled=controlled)


@dataclass(frozen=True)
class TestRecording:
    """The outcome of a test on the right library in a verifier.

    places: what the library decided there, and did with the test's objects (`guest/verifier.py`).
    decoys: its answers on decoy comparisons, and `origins`: the calls that are made for them (`guest/decoys.py`).
    judged: lines judged by the verifier, comparisons decided by the library, and those of them that no decoy checks.
    """

    __test__ = False  # for pytest, which would collect the class

    outcome: str
    fault: str
    places: tuple[str, ...]
    decoys: Mapping[str, Mapping[str, bool]]
    origins: tuple[str, ...]
    judged: tuple[int, int, int]


def recordings(
    tests: Sequence[str], result: VerifyResult
) -> tuple[dict[str, TestRecording], dict[str, Any], dict[str, tuple[str, ...]]]:
    """(test -> recording, modules and code to keep, modules of the library that were imported and the names that
    `import *` brings). No code of an agent was run.

    A missing test was not reached: the run ended before it.
    """
    output = _parsed(frozenset(tests), result.verifier)
    made = {
        test: TestRecording(record.outcome, record.fault, record.places, record.decoys, record.origins, record.judged)
        for test, record in output.records.items()
        if record.outcome in OUTCOMES
    }
    library = {str(name): tuple(map(str, names)) for name, names in output.learned.get("library", {}).items()}
    return made, output.learned, library


def decide_outside(tests: Sequence[str], result: VerifyResult) -> TestReport:
    """The report on tests that a verifier decided. Raises BoxDead if the verifier itself failed.

    Failures of the tested process count against the agent: its end, its silence, and any message that no library sends.
    So does an early end of the verifier once it has received anything: with the right library it ends normally each
    time, and what it received is all that is new. Before that, nothing of an agent has reached it, and its end is ours.
    A verifier that is killed was killed by the machine, in either case: its own limits end it in other ways (an
    allocation that fails, a deadline that is reported).
    """
    ran = result.verifier
    output = _parsed(frozenset(tests), ran)
    early = output.lost or ("" if output.ended and ran.status == 0 else f"status {ran.status}")
    if early and not ran.timed_out and (not output.met or ran.status == -signal.SIGKILL):
        raise BoxDead(f"the verifier of hidden tests failed: {early}")
    faults = {record.fault for record in output.records.values()}
    outcomes = {test: record.outcome for test, record in output.records.items() if record.outcome in OUTCOMES}
    messages = {test: printable(record.message[:MAX_MESSAGE]) for test, record in output.records.items()}
    tested = result.tested
    timed_out = tested.timed_out or ran.timed_out
    if timed_out:  # the tests that were not reached by then
        ended = {test for test, record in output.records.items() if record.fault == "gone"}
        outcomes = {test: outcome for test, outcome in outcomes.items() if test not in ended}
        messages = {test: message for test, message in messages.items() if test not in ended}
    report = _report(tests, outcomes, messages, output, replace(ran, timed_out=timed_out))
    seconds = max(tested.seconds, ran.seconds)
    crashed = not timed_out and (report.crashed or "gone" in faults)
    tampered = output.forged or "garbage" in faults
    return replace(report, seconds=seconds, crashed=crashed, tampered=tampered, outside=frozenset(tests))


def _parsed(expected: frozenset[str], result: ForkResult) -> _RunOutput:
    """Read the records of a run; a line that no honest run writes counts as forged."""
    records: dict[str, _RunRecord] = {}
    learned: dict[str, Any] = {}
    lost = ""
    forged = ended = met = False
    lines = result.output.split(b"\n")
    if lines.pop() and not result.timed_out and result.status == 0:
        forged = True  # an honest run that ends by itself ends its last line
    for line in lines:
        record = _line(line)
        if record is None:
            forged = True
        elif record.end is not None and not ended:
            ended = True
        elif record.met:
            met = True
        elif record.learned is not None:
            learned = record.learned
        elif record.lost:
            lost = lost or printable(record.lost[:MAX_MESSAGE])
        elif ended or record.test not in expected or record.test in records:
            forged = True
        else:
            records[record.test] = record
    return _RunOutput(records, lost, ended, forged, learned, met)


def _report(
    wanted: Sequence[str], outcomes: dict[str, str], messages: dict[str, str], output: _RunOutput, result: ForkResult
) -> TestReport:
    lost = output.lost or ("killed" if result.status < 0 else "the test process ended early")
    reason = "timed out" if result.timed_out else lost
    complete = {test: outcomes.get(test, "missing") for test in wanted}
    lines = {test: output.records[test].line for test in wanted if test in messages and output.records[test].line > 0}
    texts = {test: messages.get(test) or reason for test, outcome in complete.items() if outcome != "passed"}
    crashed = not result.timed_out and (not output.ended or result.status != 0)
    return TestReport(complete, texts, result.seconds, result.timed_out, crashed, lines=lines)


def joined(reports: Sequence[TestReport], tests: Sequence[str]) -> TestReport:
    """One report of several runs without common tests, in the order of `tests`."""
    outcomes = {test: outcome for report in reports for test, outcome in report.outcomes.items()}
    messages = {test: message for report in reports for test, message in report.messages.items()}
    equality = {test: share for report in reports for test, share in report.equality.items()}
    lines = {test: line for report in reports for test, line in report.lines.items()}
    return TestReport(
        {test: outcomes[test] for test in tests},
        messages,
        sum(report.seconds for report in reports),
        any(report.timed_out for report in reports),
        any(report.crashed for report in reports),
        any(report.tampered for report in reports),
        frozenset().union(*(report.outside for report in reports)),
        sum(report.controlled for report in reports),
        equality,
        lines,
    )


def _line(line: bytes) -> _RunRecord | None:
    """The record in a line; None for a line that no honest run writes."""
    try:
        return msgspec.convert(json.loads(line), _RunRecord)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def _caught(plan: TestPlan, outcomes: dict[str, str]) -> bool:
    """Whether a sentinel is wrong, a test passed with its control, or all passed and a sentinel or control is
    missing."""
    for test, expected in plan.sentinels.items():
        if outcomes.get(test, expected) != expected:
            return True
    for control, test in plan.controls.items():
        if outcomes.get(test) == "passed" == outcomes.get(control):
            return True
    missing = any(test not in outcomes for test in (*plan.sentinels, *plan.controls))
    return missing and all(outcomes.get(test) == "passed" for test in plan.wanted)
