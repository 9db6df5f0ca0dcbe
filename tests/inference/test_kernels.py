"""The attention kernel gives the same bits whether it was compiled in this process or came from numba's cache."""

import os
import subprocess
import sys

import pytest

CALL = """
import hashlib, numpy as np
from etude.models.kernels import paged_attention
rng, f = np.random.default_rng(0), np.float32
query = rng.standard_normal((9, 4, 64)).astype(f)
keys, values = (rng.standard_normal((8, 2, 32, 64)).astype(f) for _ in range(2))
table, rows = np.arange(8, dtype=np.int32)[None].repeat(9, 0), np.arange(9, dtype=np.int32)
out, positions = np.empty_like(query), np.arange(200, 209, dtype=np.int32)
paged_attention(64)(query, keys, values, table, rows, positions, f(0.125), out)
print(hashlib.sha256(out.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_a_kernel_from_the_cache_gives_the_bits_of_a_fresh_one(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", CALL]
    fresh, loaded = (
        subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True).stdout
        for _ in range(2)
    )
    assert list(tmp_path.rglob("*.nbc")), "nothing was cached"
    assert fresh == loaded
