"""What `etude tasks build` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from etude.code.mutate import OPERATORS
from etude.errors import UserError
from etude.tasks import classes

KINDS = ("mutation", "removal", "combined", "class", "feature", "commit")
Kind = Literal["mutation", "removal", "combined", "class", "feature", "commit"]


@dataclass(frozen=True)
class BuildOptions:
    """Options of `etude.tasks.build`. Raises UserError if they contradict each other."""

    seed: int = 1
    max_tasks: int = 600
    kinds: tuple[Kind, ...] = ("mutation",)
    operators: tuple[str, ...] = ()  # mutation operators to use; empty: all of them
    per_function: int = 3  # tasks of one function and kind, at most
    min_lines: int = 3  # lines of the body, docstring left out
    max_lines: int = 30
    max_functions: int | None = None  # functions to try, drawn by the seed; None: all of them
    max_test_files: int | None = None  # of JavaScript, drawn by the seed: each is a process or more; None: all of them
    heldout_fraction: float = 0.22  # share of functions kept for evaluation
    bootstrap: str = "declared"  # dependencies as declared, or looked for by "rules" or by the model at a URL
    visible: Literal["auto", "doctests", "half"] = "auto"  # which tests the agent may run
    visible_failure: bool = False  # only tasks in which a test fails that the agent may run
    repeats: int = 3  # times that each gate must hold
    workers: int = 2
    test_cap: int = 12  # hidden tests of a task that must change, and that must not; bounds the price of grading
    hang_seconds: float = 5.0  # a broken program that runs longer is dropped

    @property
    def wanted(self) -> int:
        """Tasks of one function over all kinds, at most."""
        return self.per_function * len(self.kinds)

    def __post_init__(self) -> None:
        if self.max_tasks < 2 or self.per_function < 1 or self.repeats < 1 or self.workers < 1 or self.test_cap < 1:
            raise UserError("max_tasks must be at least 2; per_function, repeats, workers and test_cap at least 1")
        if not 0 < self.min_lines <= self.max_lines:
            raise UserError("min_lines must be positive and not above max_lines")
        if not 0 < self.heldout_fraction < 1:
            raise UserError("heldout_fraction must lie between 0 and 1")
        if self.bootstrap not in ("declared", "rules") and not self.bootstrap.startswith(("http://", "https://")):
            raise UserError("bootstrap must be declared, rules, or the URL of an OpenAI-compatible server")
        if unknown := sorted(set(self.operators) - set(OPERATORS) - set(classes.OPERATORS)):
            raise UserError(
                f"unknown operator {unknown[0]}; there are {', '.join(sorted({**OPERATORS, **classes.OPERATORS}))}"
            )
        if not self.kinds or set(self.kinds) - set(KINDS):
            raise UserError(f"kinds must be some of {', '.join(KINDS)}")
