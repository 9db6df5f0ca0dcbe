"""The suite's bookkeeping: seeds, retries, concurrency, sums. Attempts are scripted: the agent loop has its tests."""

import asyncio
from collections import Counter

import msgspec
import pytest

from etude.errors import RunFailed
from etude.evals.suite import EvalResult, compare, episode_seed, pick_tasks, run_suite
from etude.records import CodeTask, Episode, Focus, Outcome, StopReason


def make_task(name: str, function: str = "", split: str = "heldout") -> CodeTask:
    return CodeTask(
        id=name, repository="r-1", kind="mutation", operator="op_change", function=function or f"src/r.py::{name}",
        split=split, prompt="Fix it.", focus=Focus(path="src/r.py", first_line=1, last_line=2),
        source_roots=("src",), changes={}, solution={}, visible_tests=(), fail_to_pass=("t",), pass_to_pass=(),
        difficulty={}, licence="MIT",
    )  # fmt: skip


def make_episode(task: CodeTask, seed: int, outcome: Outcome = Outcome.SCORED, passed: bool = False) -> Episode:
    return Episode(
        id=f"{task.id}-{seed}", group_id=0, member=0, attempt=0, task_id=task.id, seed=seed, outcome=outcome,
        stop_reason=StopReason.FINISHED, reward=float(passed), passed=passed, segments=(), turns=(),
        metrics={"turns": 2.0, "edits": float(passed)},
    )  # fmt: skip


def run(tasks, attempt, **options) -> EvalResult:
    options = {"samples": 4, "split": "heldout", "seed": 5, "concurrency": 8} | options
    return asyncio.run(run_suite(tasks, attempt, **options))


TASKS = [make_task("a"), make_task("b", "src/r.py::a"), make_task("c")]


async def first_sample_passes(task, index, sample, number, seed):
    return make_episode(task, seed, passed=sample == 0)


def test_sums_up_what_was_played():
    seen, steps = [], []
    result = run(TASKS, first_sample_passes, on_episode=seen.append, progress=lambda *s: steps.append(s))
    assert [t.passed for t in result.tasks] == [(True, False, False, False)] * 3
    assert result.pass_1.mean == 0.25
    assert result.pass_k == {1: 0.25, 2: 0.5, 4: 1.0}
    assert result.outcomes == {"scored": 12}
    assert result.stops == {"finished": 12}
    assert result.behaviour["turns"] == 2.0
    assert result.behaviour["edits"] == 0.25
    assert result.behaviour["tests_run"] == 0.0
    assert len(seen) == 12
    assert steps[-1] == (12, 12, 3)
    assert steps[2] == (3, 12, 1)  # the samples of a task follow each other


def test_result_is_json_both_ways():
    result = run(TASKS, first_sample_passes)
    assert msgspec.json.decode(msgspec.json.encode(result), type=EvalResult) == result


def test_two_evaluations_meet_the_same_seeds():
    seeds: list[list] = [[], []]

    for collected in seeds:

        async def attempt(task, index, sample, number, seed, collected=collected):
            collected.append((task.id, sample, seed))
            return make_episode(task, seed)

        run(TASKS, attempt, concurrency=1 if collected is seeds[0] else 7)
    assert sorted(seeds[0]) == sorted(seeds[1])
    assert len({seed for _, _, seed in seeds[0]}) == 12


def test_infrastructure_is_retried_twice_with_the_same_seed_then_left_out():
    attempts: Counter = Counter()

    async def attempt(task, index, sample, number, seed):
        attempts[task.id, sample, seed] += 1
        lost = task.id == "b" or (task.id == "a" and number == 0)
        return make_episode(task, seed, Outcome.INFRA if lost else Outcome.SCORED, passed=not lost)

    result = run(TASKS, attempt, samples=2)
    assert set(attempts.values()) == {1, 2, 3}
    assert len(attempts) == 6  # a retry repeats the seed
    assert [(len(t.passed), t.lost) for t in result.tasks] == [(2, 0), (0, 2), (2, 0)]
    assert result.outcomes == {"scored": 4, "infra": 2}
    assert result.retries == 2 + 4
    assert result.pass_1.mean == 1.0


def test_everything_lost_is_an_error():
    async def attempt(task, index, sample, number, seed):
        return make_episode(task, seed, Outcome.INFRA)

    with pytest.raises(RunFailed, match="all 12 episodes of the evaluation were lost"):
        run(TASKS, attempt)


def test_concurrency_is_bounded_and_used():
    live, peak = 0, 0
    full = asyncio.Event()

    async def attempt(task, index, sample, number, seed):
        nonlocal live, peak
        live += 1
        peak = max(peak, live)
        if live == 5:
            full.set()
        await asyncio.wait_for(full.wait(), 10)
        live -= 1
        return make_episode(task, seed)

    run(TASKS, attempt, concurrency=5)
    assert peak == 5


def test_an_error_in_an_attempt_ends_the_evaluation():
    async def attempt(task, index, sample, number, seed):
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        run(TASKS, attempt)


def test_compare_pairs_shared_tasks_by_function():
    async def all_pass(task, index, sample, number, seed):
        return make_episode(task, seed, passed=True)

    before, after = run(TASKS, first_sample_passes), run(TASKS[::-1][:2], all_pass)
    comparison = compare(before, after)
    assert (comparison.tasks, comparison.functions) == (2, 2)
    assert comparison.difference.mean == 0.75
    assert (comparison.better, comparison.worse, comparison.same) == (2, 0, 0)
    with pytest.raises(ValueError, match="share no task"):
        compare(before, run([make_task("z")], all_pass))


def test_tasks_are_picked_by_split_and_hash():
    tasks = [make_task(f"t{i}", split="heldout" if i % 2 else "train") for i in range(40)]
    heldout = pick_tasks(tasks, "heldout")
    assert len(heldout) == 20
    picked = pick_tasks(tasks, "heldout", 5)
    assert len(picked) == 5
    assert {t.id for t in pick_tasks(tasks[::-1], "heldout", 5)} == {t.id for t in picked}
    assert [t.id for t in picked] != [t.id for t in heldout[:5]]


def test_seeds_fit_in_31_bits():
    assert all(0 <= episode_seed(1, "t", i) < 2**31 for i in range(100))


def test_several_repositories_are_measured_apart():
    tasks = [msgspec.structs.replace(make_task(f"{name}{i}"), repository=name) for name in "rs" for i in range(4)]

    async def attempt(task, index, sample, number, seed):
        return make_episode(task, seed, passed=task.repository == "r")

    result = run(tasks, attempt)
    assert {name: rate.mean for name, rate in result.repositories.items()} == {"r": 1.0, "s": 0.0}
    assert run(TASKS, first_sample_passes).repositories == {}, "one repository is the whole"


def test_a_choice_of_tasks_takes_as_many_of_each_repository():
    tasks = [msgspec.structs.replace(make_task(f"{name}{i}"), repository=name) for name in "rs" for i in range(20)]
    tasks.append(msgspec.structs.replace(make_task("t0"), repository="t"))
    chosen = pick_tasks(tasks, "heldout", 9)
    assert Counter(task.repository for task in chosen) == {"r": 4, "s": 4, "t": 1}
