"""What a test run is asked, and what its answer is worth: decided here, outside the tested process.

Most tests are asked as questions (`questions.py`): values come back, and are compared here. In a run of the others the
tested code shares a process with the assertions, so its report is checked by tests whose result only we know: sentinels
that must pass or fail, and twins of the real tests with a wrong expectation, which honest code fails.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.grading.questions import AssertionSplit, judged, masked
from etude.sandbox.base import TestReport
from etude.sandbox.guest.negative_controls import name as twin_name

OUTCOMES = frozenset({"passed", "failed", "error"})
COLD = b'{"cold": true}\n'  # a hot template's answer when a change needs a fresh import
MAX_TWINS = 3
MAX_MESSAGE = 160


@dataclass(frozen=True)
class SentinelTests:
    """Tests that the grading template of one image holds besides the real ones, under names that can't be guessed."""

    token: str  # in the names of twins
    virtual: dict[str, str]  # path -> text of the module of sentinels
    expected: dict[str, str]  # sentinel -> outcome that an honest run reports


def new_guard() -> SentinelTests:
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
    return SentinelTests(token, {path: text}, expected)


@dataclass(frozen=True)
class Questions:
    """The tests of one run in order, the guard's mixed in."""

    wanted: tuple[str, ...]
    asked: tuple[str, ...]
    sentinels: dict[str, str]  # node id -> outcome that an honest run reports
    twins: dict[str, str]  # node id of a twin -> node id of its test

    @property
    def files(self) -> list[str]:
        """What a template has to import: test files, and `path::doctest:` for source files."""
        return sorted({_file(test) for test in self.asked})


def _file(test: str) -> str:
    path, _, rest = test.partition("::")
    return f"{path}::doctest:" if rest.startswith("doctest:") else path


def ask(tests: Sequence[str], guard: SentinelTests | None) -> Questions:
    """Questions for `tests`; with sentinels at random places, and twins at the end, if there is a guard."""
    wanted = tuple(dict.fromkeys(tests))
    if guard is None:
        return Questions(wanted, wanted, {}, {})
    random = secrets.SystemRandom()
    asked = list(wanted)
    for test in guard.expected:
        asked.insert(random.randrange(len(asked) + 1), test)
    functions = [test for test in wanted if test.count("::") == 1 and "::doctest:" not in test]
    # The first test is one that decides: a grade asks for those before the others.
    chosen = functions[:1] + random.sample(functions[1:], min(MAX_TWINS - 1, len(functions[1:])))
    twins = {twin_name(test, guard.token): test for test in chosen}
    return Questions(wanted, (*asked, *twins), guard.expected, twins)


@dataclass(frozen=True)
class _RunOutput:
    """What a run wrote: a record per test that was asked, and whether anything else."""

    records: dict[str, dict[str, Any]]
    lost: str  # why it ended early, in its own words
    ended: bool
    forged: bool


def decide(questions: Questions, status: int, timed_out: bool, seconds: float, data: bytes) -> TestReport:
    """The report of a run that wrote `data` and left with `status` (negative: a signal)."""
    said = _listen(frozenset(questions.asked), status, timed_out, data)
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    for test, record in said.records.items():
        if record.get("outcome") in OUTCOMES:
            outcomes[test] = record["outcome"]
            messages[test] = str(record.get("message"))[:MAX_MESSAGE]
    tampered = said.forged or _caught(questions, outcomes)
    mirrored = sum(twin in outcomes for twin in questions.twins)
    return _report(questions.wanted, outcomes, messages, said, status, timed_out, seconds, tampered, mirrored=mirrored)


def decide_apart(
    sheet: AssertionSplit, tests: Sequence[str], status: int, timed_out: bool, seconds: float, data: bytes
) -> TestReport:
    """The report of a run that answered the questions of `tests`: every comparison is made here."""
    said = _listen(frozenset(map(sheet.id, tests)), status, timed_out, data)
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    tampered = said.forged
    for test in tests:
        record = said.records.get(sheet.id(test), {})
        if "answers" in record:
            outcomes[test], text, proof = judged(*sheet.rows[test][1:], record["answers"])
            tampered = tampered or proof
        elif record.get("outcome") in ("failed", "error"):
            outcomes[test], text = record["outcome"], str(record.get("message"))
        else:
            continue
        messages[test] = masked(text)
    return _report(tests, outcomes, messages, said, status, timed_out, seconds, tampered, apart=len(tests))


def _listen(asked: frozenset[str], status: int, timed_out: bool, data: bytes) -> _RunOutput:
    records: dict[str, dict[str, Any]] = {}
    lost = ""
    forged = ended = False
    lines = data.split(b"\n")
    if lines.pop() and not timed_out and status == 0:
        forged = True  # an honest run that ends by itself ends its last line
    for line in lines:
        record = _record(line)
        if "end" in record and not ended:
            ended = True
        elif "lost" in record:
            lost = lost or str(record["lost"])[:MAX_MESSAGE]
        elif ended or record.get("test") not in asked or record["test"] in records:
            forged = True
        else:
            records[record["test"]] = record
    return _RunOutput(records, lost, ended, forged)


def _report(
    wanted: Sequence[str],
    outcomes: dict[str, str],
    messages: dict[str, str],
    said: _RunOutput,
    status: int,
    timed_out: bool,
    seconds: float,
    tampered: bool,
    *,
    apart: int = 0,
    mirrored: int = 0,
) -> TestReport:
    lost = said.lost or ("killed" if status < 0 else "the test process ended early")
    reason = "timed out" if timed_out else lost
    result = {test: outcomes.get(test, "missing") for test in wanted}
    texts = {test: messages.get(test) or reason for test, outcome in result.items() if outcome != "passed"}
    crashed = not timed_out and (not said.ended or status != 0)
    return TestReport(result, texts, seconds, timed_out, crashed, tampered, apart, mirrored)


def joined(first: TestReport, second: TestReport, tests: Sequence[str]) -> TestReport:
    """One report of two runs, in the order of `tests`."""
    outcomes = first.outcomes | second.outcomes
    return TestReport(
        {test: outcomes[test] for test in tests},
        first.messages | second.messages,
        first.seconds + second.seconds,
        first.timed_out or second.timed_out,
        first.crashed or second.crashed,
        first.tampered or second.tampered,
        first.apart + second.apart,
        first.mirrored + second.mirrored,
    )


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _caught(questions: Questions, outcomes: dict[str, str]) -> bool:
    """Whether a sentinel came out wrong, a test and its twin both passed, or all passed but a sentinel is missing."""
    for test, expected in questions.sentinels.items():
        if outcomes.get(test, expected) != expected:
            return True
    for twin, test in questions.twins.items():
        if outcomes.get(test) == "passed" == outcomes.get(twin):
            return True
    missing = any(test not in outcomes for test in (*questions.sentinels, *questions.twins))
    return missing and all(outcomes.get(test) == "passed" for test in questions.wanted)
