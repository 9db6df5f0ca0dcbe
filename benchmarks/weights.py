"""The delta codec against what others ship, on the same bits in the same run, one thread.

Synthetic bfloat16 weights (normal, sd 0.02) of which a share moves by one unit in the last place at random places.

ratio              bytes of the weights / bytes of the payload, all headers counted
encode, decode     bytes of the weights per second, as a share of a memcpy of the same array; medians
baselines          XOR + zstd-1 (slime, SkyRL, stitch); u16 gaps + values + zstd-1 (PULSE); int32 index + value (vLLM)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard

from etude.weights import codec
from etude.weights.codec import ABS, A, B, Codec
from etude.weights.schema import Bits, Schema, Spec

SHARES = (0.003, 0.01, 0.02)
COLUMNS = 4096


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks. 1 GiB of weights, several minutes; `quick`: 32 MiB."""
    elements = (32 if quick else 1024) * 2**20 // 2
    repeats = 3 if quick else 5
    rows: list[dict[str, Any]] = []
    exact = True

    def add(case: str, value: float, baseline: str) -> None:
        rows.append({"case": case, "value": value, "unit": "x", "baseline": baseline})

    old = _weights(elements)
    grid = Schema((Spec("weights", "bfloat16", (elements // COLUMNS, COLUMNS)),))
    base = codec.digests(grid, {"weights": old})
    for share in SHARES:
        new = _moved(old, share)
        name = f"{share:.1%} changed"
        size, seconds = _baselines(old, new, repeats)
        for baseline, nbytes in size.items():
            add(f"{name}: ratio, {baseline}", old.nbytes / nbytes, "raw bytes")
        for label, allowed in (("A", (A, ABS)), ("A and B", (A, B, ABS))):
            memcpy, encode, decode, payload, same = _ulpd(grid, old, new, base, Codec(allowed), repeats)
            exact = exact and same
            add(f"{name}: ratio, ULPD {label}", old.nbytes / payload, "raw bytes")
            add(f"{name}: ratio, ULPD {label} / XOR + zstd-1", size["XOR + zstd-1"] / payload, "XOR + zstd-1")
            add(f"{name}: encode, ULPD {label} / memcpy", memcpy / encode, "memcpy of the same array")
            add(f"{name}: decode and apply, ULPD {label} / memcpy", memcpy / decode, "memcpy of the same array")
        add(f"{name}: encode, XOR + zstd-1 / memcpy", memcpy / seconds[0], "memcpy of the same array")
        add(f"{name}: decode, XOR + zstd-1 / memcpy", memcpy / seconds[1], "memcpy of the same array")
    digest = _median(lambda: codec.digests(grid, {"weights": old}), repeats)
    add("full digest / memcpy", memcpy / digest, "memcpy of the same array")
    return {"bench": "weights", "rows": rows, "checks": {"every decoded bit equals the encoded one": exact}}


def _weights(elements: int) -> Bits:
    normal = np.random.default_rng(0).standard_normal(elements, dtype=np.float32)
    normal *= np.float32(0.02)
    return (normal.view(np.uint32) >> 16).astype(np.uint16)


def _moved(old: Bits, share: float) -> Bits:
    rng = np.random.default_rng(1)
    touched = np.flatnonzero(rng.random(old.size, dtype=np.float32) < share)
    new = old.copy()
    new[touched] += rng.choice(np.array([1, 65535], np.uint16), touched.size)
    return new


def _ulpd(
    grid: Schema, old: Bits, new: Bits, base: codec.Digests, options: Codec, repeats: int
) -> tuple[float, float, float, int, bool]:
    """Seconds of memcpy, encode, and decode with apply; bytes; whether every bit came back."""
    records = codec.encode(grid, {"weights": old}, {"weights": new}, base, options)
    data = codec.pack("delta", 1, records)
    held = old.copy()
    memcpy = _median(lambda: np.copyto(held, old), repeats)
    encode = _median(
        lambda: codec.pack("delta", 1, codec.encode(grid, {"weights": old}, {"weights": new}, base, options)), repeats
    )
    seconds = []
    for _ in range(repeats):
        np.copyto(held, old)
        start = time.perf_counter()
        codec.apply(grid, {"weights": held}, base, codec.unpack(data, len(grid.chunks))[2])
        seconds.append(time.perf_counter() - start)
    return memcpy, encode, statistics.median(seconds), len(data), bool(np.array_equal(held, new))


def _baselines(old: Bits, new: Bits, repeats: int) -> tuple[dict[str, int], tuple[float, float]]:
    """Bytes by scheme, and seconds to encode and decode XOR + zstd-1."""
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    xored = compressor.compress((old ^ new).tobytes())
    encode = _median(lambda: compressor.compress((old ^ new).data), repeats)
    decode = _median(lambda: old ^ np.frombuffer(decompressor.decompress(xored), np.uint16), repeats)
    index = np.flatnonzero(old != new)
    gaps = np.diff(index, prepend=-1)
    assert gaps.max() < 1 << 16
    pairs = compressor.compress(gaps.astype(np.uint16).tobytes()) + compressor.compress(new[index].tobytes())
    sizes = {
        "XOR + zstd-1": len(xored),
        "u16 gaps + values + zstd-1": len(pairs),
        "int32 index + value": 6 * index.size,
    }
    return sizes, (encode, decode)


def _median(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
