"""The models that simulated users can teach, with the numbers that fit their speed on two CPU cores."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import BuildConfig
from etude.live.simulate.clients import UserModel


@dataclass(frozen=True)
class DemoSizes:
    """A model and its loop. `folder`: name or folder of the model; `live`, `train`: the recipes; `turns`: of users
    before a window, at least; `samples`: of each held-out request; `suite_tasks`: of the gate's suite, most of them
    held out; `canary_seconds`: deadline of a canary."""

    model: UserModel
    folder: str
    live: str
    train: str
    accounts: int
    turns: int
    samples: int
    suite_tasks: int
    cache_mb: int
    canary_seconds: float

    @property
    def suite(self) -> BuildConfig:
        """The gate's suite: damage to one token, as in recipes/demo.toml."""
        return BuildConfig(
            kinds=("mutation",),
            operators=("bool_flip", "negate_cond", "op_flip"),
            min_lines=1,
            max_lines=20,
            visible_failure=True,
            symptoms=False,
            max_tasks=self.suite_tasks,
            per_function=1,
            heldout_fraction=0.9,
        )


NANO = DemoSizes(
    UserModel("nano", tokens=160, at_once=12),
    folder="nano",
    live="recipes/live.toml",
    train="recipes/live-train.toml",
    accounts=360,
    turns=700,
    samples=2,
    suite_tasks=40,
    cache_mb=64,
    canary_seconds=420.0,
)
SMOLLM2 = DemoSizes(
    UserModel("smollm2", tokens=128, at_once=8),
    folder="outputs/smollm2-live",
    live="recipes/live-smollm2.toml",
    train="recipes/live-train-smollm2.toml",
    accounts=240,
    turns=300,
    samples=1,
    suite_tasks=40,
    cache_mb=256,
    canary_seconds=3600.0,
)
SIZES = {sizes.model.name: sizes for sizes in (NANO, SMOLLM2)}
"""By the model's name."""
