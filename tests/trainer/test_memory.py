"""Memory of the trainer's process does not grow with the number of shapes that batches have had."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from etude.trainer.rl.memory import bound_kernels

PRODUCTS = """
import os
import torch
from etude.processes import resident_bytes

weight, x = torch.randn(512, 256, dtype=torch.bfloat16), torch.randn(600, 256, dtype=torch.bfloat16)
torch.nn.functional.linear(x[:50], weight)
before = resident_bytes(os.getpid())
for rows in range(100, 500):
    torch.nn.functional.linear(x[:rows], weight)
print(resident_bytes(os.getpid()) - before)
"""


@pytest.mark.slow
def test_kernels_of_shapes_that_are_gone_are_let_go() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    bound_kernels(environment)
    ended = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=True
    )
    # Measured: 0.4 MB a shape, so 35 MB for those of 64 shapes that stay, and 175 MB for all 400.
    assert int(ended.stdout) < 80e6
