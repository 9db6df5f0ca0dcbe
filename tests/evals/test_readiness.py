"""Readiness for RL, by hand-made episodes."""

import msgspec
import pytest

from etude.errors import UserError
from etude.evals.readiness import readiness_of
from tests.evals.test_suite import TASKS, make_episode, run

PASSED = {"a": (1, 1, 1, 1), "b": (1, 0, 0, 0), "c": (0, 0, 0, 0)}


def measured(passed, figures=lambda task, sample: {}):
    async def attempt(task, index, sample, number, seed):
        episode = make_episode(task, seed, passed=bool(passed[task.id][sample]))
        return msgspec.structs.replace(episode, metrics=figures(task.id, sample))

    return run(TASKS, attempt)


def test_shares_of_tasks_and_of_episodes():
    """12 episodes: two undo, one of them twice; four search, by either tool; one has a malformed call."""

    def figures(task, sample):
        shown = {"undo": 2.0 * (sample == 0)} if task != "c" else {"malformed": float(sample == 3)}
        return shown | {
            "calls/grep": float(task == "a" and sample < 2),
            "calls/search": float(task == "b" and sample < 2),
        }

    ready = readiness_of(measured(PASSED, figures))
    assert (ready.tasks, ready.samples) == (3, 4)
    assert (ready.teach, ready.solved, ready.unsolved) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert ready.pass_1 == pytest.approx(5 / 12)
    assert ready.pass_k == pytest.approx({1: 5 / 12, 2: (1 + 1 / 2) / 3, 4: 2 / 3})
    assert ready.behaviours == pytest.approx(
        {"undo": 2 / 12, "tests run": 0, "searches": 4 / 12, "malformed calls": 1 / 12, "cut turns": 0}
    )
    assert ready.verdict == "33% of the tasks teach: RL can begin"
    assert "33.3% teach" in ready.text
    assert "undo 16.7%" in ready.text


@pytest.mark.parametrize(
    ("passed", "figures", "verdict"),
    [
        ((1, 1, 1, 1), {}, "too easy, 0% of the tasks teach"),
        ((0, 0, 0, 0), {}, "too hard, no sample of 100% of the tasks passes: SFT first"),
        ((0, 1, 0, 0), {"malformed": 3.0}, "100% of the episodes have malformed calls: check the template"),
        ((0, 1, 0, 0), {"truncated": 1.0}, "100% of the episodes have cut turns"),
    ],
)
def test_the_verdict(passed, figures, verdict):
    ready = readiness_of(measured(dict.fromkeys("abc", passed), lambda *_: figures))
    assert ready.verdict.startswith(verdict)


def test_few_tasks_that_teach_are_not_enough():
    ready = readiness_of(measured({"a": (1, 1, 1, 1), "b": (0, 0, 0, 0), "c": (0, 0, 0, 0)}))
    assert ready.verdict == "0% of the tasks teach: SFT first, or play more samples a task"


def test_one_sample_compares_nothing():
    result = measured(dict.fromkeys("abc", (1, 0, 0, 0)))
    tasks = [msgspec.structs.replace(task, passed=task.passed[:1]) for task in result.tasks]
    with pytest.raises(UserError, match="--samples of 2 or more"):
        readiness_of(msgspec.structs.replace(result, tasks=tuple(tasks)))
