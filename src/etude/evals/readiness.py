"""Whether RL can begin with a model: what its samples of the tasks would teach, and what it does at all.

RL compares the samples of a task with each other, so a task teaches if some of them pass and others do not. A behaviour
that no episode shows is not found by sampling, either: it must be shown first (SFT).
"""

from __future__ import annotations

from etude.errors import UserError
from etude.evals.suite import EvalResult
from etude.records import Record

ENOUGH = 0.2  # share of tasks that teach: below it most of a step's samples are played for nothing
EASY, HARD = 0.8, 0.05  # pass@1, and pass@k with all samples
BROKEN = 0.5  # share of episodes with malformed calls or cut turns


class Readiness(Record, frozen=True):
    """Figures of an evaluation for RL: shares of tasks by their samples (`teach`: some pass and some do not), shares of
    episodes with a behaviour, and a sentence."""

    tasks: int
    samples: int
    pass_1: float
    pass_k: dict[int, float]
    teach: float
    solved: float
    unsolved: float
    behaviours: dict[str, float]
    verdict: str

    @property
    def text(self) -> str:
        """The figures for people."""
        rates = ", ".join(f"pass@{k} {rate:.1%}" for k, rate in sorted(self.pass_k.items()))
        shown = ", ".join(f"{name} {share:.1%}" for name, share in self.behaviours.items())
        return (
            f"readiness for RL, {self.tasks} tasks of {self.samples} samples: {rates}\n"
            f"  tasks: {self.teach:.1%} teach (some samples pass, others do not), {self.solved:.1%} are solved by all "
            f"samples, {self.unsolved:.1%} by none\n"
            f"  episodes with {shown}\n"
            f"  {self.verdict}"
        )


def readiness_of(result: EvalResult) -> Readiness:
    """The readiness by an evaluation. Raises UserError for one sample a task."""
    passed = [task.passed for task in result.tasks if len(task.passed) > 1]
    if not passed:
        raise UserError("readiness compares the samples of a task: play --samples of 2 or more, as many as a group has")
    solved, unsolved = (sum(test(each) for each in passed) / len(passed) for test in (all, _none))
    teach = 1 - solved - unsolved
    return Readiness(
        tasks=len(passed),
        samples=result.samples,
        pass_1=result.pass_1.mean,
        pass_k=result.pass_k,
        teach=teach,
        solved=solved,
        unsolved=unsolved,
        behaviours=result.shares,
        verdict=_verdict(result, teach, unsolved),
    )


def _none(passed: tuple[bool, ...]) -> bool:
    return not any(passed)


def _verdict(result: EvalResult, teach: float, unsolved: float) -> str:
    broken = {
        name: share for name in ("malformed calls", "cut turns") if (share := result.shares.get(name, 0)) > BROKEN
    }
    for name, share in broken.items():
        return f"{share:.0%} of the episodes have {name}: check the template and rollout's limits, or SFT first"
    if teach >= ENOUGH:
        return f"{teach:.0%} of the tasks teach: RL can begin"
    if result.pass_1.mean > EASY:
        return f"too easy, {teach:.0%} of the tasks teach: take harder tasks"
    if 1 - unsolved < HARD:
        return f"too hard, no sample of {unsolved:.0%} of the tasks passes: SFT first, or take easier tasks"
    return f"{teach:.0%} of the tasks teach: SFT first, or play more samples a task"
