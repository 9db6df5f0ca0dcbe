"""The workers of a tensor-parallel vLLM server agree on what each of them holds and counts.

Each has watched its own loader. They exchange their findings once, over vLLM's group of the host, when a store is
opened; afterwards a worker writes and digests on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as _typed_dist

from etude.errors import UserError, first_line
from etude.weights.slabs import Sliced, counted, counted_elements, patterns

dist = cast(Any, _typed_dist)  # its functions have no types
_HELD, _FAILED = b"+", b"-"


@dataclass(frozen=True)
class Workers:
    """This worker among those of its server. `group` is their torch.distributed group for the host's memory."""

    rank: int
    count: int
    group: Any = None

    def counted(self, watch: Callable[[], dict[str, Sliced]]) -> dict[str, Sliced]:
        """The slices that `watch` finds in this worker, each element counted by one worker that holds it. Raises
        UserError, on all workers, if one cannot watch its loader, or if together they do not hold the tensors."""
        live, failure = dict[str, Sliced](), ""
        try:
            live = watch()
        except UserError as e:
            failure = str(e)
        except Exception as e:  # the others wait for a word
            failure = f"worker {self.rank} failed ({type(e).__name__}: {first_line(e)}): look at the server's log"
        words = self._gather(_FAILED + failure.encode() if failure else _HELD + patterns(live))
        if failures := [word[1:].decode() for word in words if word[:1] == _FAILED]:
            raise UserError(failures[0])
        try:
            return counted(live, [word[1:] for word in words], self.rank)
        except ValueError as e:
            raise UserError(f"this server {e}; serve the model that the run trains") from None

    def sum(self, tensor: torch.Tensor) -> None:
        """Adds the bytes of all workers, in place."""
        if self.count > 1:
            dist.all_reduce(tensor.view(-1).view(torch.uint8), group=self.group)

    def _gather(self, word: bytes) -> list[bytes]:
        if self.count == 1:
            return [word]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(word)]), group=self.group)
        longest = max(int(size) for size in sizes)
        words = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
        own = torch.frombuffer(bytearray(word.ljust(longest, b"\0")), dtype=torch.uint8)
        dist.all_gather(words, own, group=self.group)
        return [bytes(one[: int(size)].tolist()) for one, size in zip(words, sizes, strict=True)]


def whole_tensors(workers: Workers, live: Mapping[str, Sliced]) -> dict[str, torch.Tensor]:
    """The whole tensors on the host, put together from the slices of all workers; empty if a single worker holds them
    whole. A chain that begins with the model folder begins with these."""
    if workers.count == 1 and all(part.is_whole for part in live.values()):
        return {}
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(live):
        tensors[name] = counted_elements(live[name])
        workers.sum(tensors[name])
    return tensors
