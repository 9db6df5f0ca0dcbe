"""The passes of an optimizer step, and their division over ranks.

Collectives join the passes of all ranks one by one, so ranks have equal numbers of passes, and those that run together
have about equal sizes. A rank without a pass in a round computes an idle one, whose loss has the weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from etude.trainer.world import World


class TrainingPass(Protocol):
    """The input of one forward and backward pass."""

    def to(self, device: torch.device) -> Any:
        """The same on a device."""
        ...


P = TypeVar("P", bound=TrainingPass)


@dataclass(frozen=True)
class StepPasses(Sequence[P]):
    """The passes of an optimizer step, of `sizes` tokens each, which are made when they are needed. The sum of their
    losses' weights is `total`; `idle` makes a pass that learns nothing."""

    sizes: tuple[int, ...]
    total: torch.Tensor
    make: Callable[[int], P]
    idle: Callable[[], P]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> P:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.make(index)


def numbers_of(passes: Sequence[Any], world: World) -> list[int | None]:
    """The numbers of this rank's passes, None for an idle one: all passes in order, if the rank is alone."""
    if world.mesh.data_ranks == 1:
        return list(range(len(passes)))
    assert isinstance(passes, StepPasses), "only passes of known sizes are divided"
    return shares(passes.sizes, world.mesh.data_ranks)[world.data_rank]


def pass_of(passes: Sequence[Any], number: int | None) -> Any:
    """A pass by its number in `numbers_of`."""
    if number is not None:
        return passes[number]
    assert isinstance(passes, StepPasses)
    return passes.idle()


def shares(sizes: Sequence[int], ranks: int) -> list[list[int | None]]:
    """The numbers of passes of each rank. In each round the largest pass goes to the rank with the fewest tokens yet;
    rounds have passes of about equal sizes."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    own: list[list[int | None]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for first in range(0, len(order), ranks):
        together = order[first : first + ranks]
        padded = [*together, *[None] * (ranks - len(together))]
        for rank, number in zip(sorted(range(ranks), key=tokens.__getitem__), padded, strict=True):
            own[rank].append(number)
            tokens[rank] += 0 if number is None else sizes[number]
    return own
