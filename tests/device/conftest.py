"""The device of these tests: `--device fakegpu`, a stand-in (the default), or `--device cuda`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from etude.models import flex
from tests.device.fakegpu import NAME, fakegpu


@dataclass(frozen=True)
class Device:
    """A device and, of the stand-in, how often the host has waited for it, by function and line."""

    name: str
    syncs: Counter[str] = field(default_factory=Counter)

    @property
    def type(self) -> str:
        """Without a number."""
        return torch.device(self.name).type


def dense_flex(query_BHTD: Tensor, key_BKCD: Tensor, value_BKCD: Tensor, **options: object) -> Tensor:
    """What the compiled kernel computes, with the whole matrix of scores: PyTorch compiles for devices it knows."""
    mask, scale = options["block_mask"], options["scale"]
    repeats = query_BHTD.shape[1] // key_BKCD.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key_BKCD, value_BKCD))
    query_T, key_C = (torch.arange(x.shape[2], device=x.device) for x in (query_BHTD, key))
    zero = torch.zeros((), dtype=torch.int64, device=query_T.device)
    seen_TC = mask.mask_mod(zero, zero, query_T[:, None], key_C[None])
    scores = (query_BHTD @ key.transpose(-1, -2)) * scale
    return scores.masked_fill(~seen_TC, float("-inf")).softmax(-1) @ value


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The device under test. On a GPU float32 is multiplied with all its bits."""
    name = request.config.getoption("--device")
    if name == NAME:
        monkeypatch.setattr(flex, "_compiled", lambda: dense_flex)
        with fakegpu() as syncs:
            yield Device(NAME, syncs)
        return
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    yield Device(name)
