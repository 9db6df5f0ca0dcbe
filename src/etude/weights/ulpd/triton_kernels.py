"""GPU kernels of the delta codec in Triton, with the arithmetic of `kernels`: scan, digest, and steps into weights.

Elements are flat tensors of unsigned integers of w bits (`chunk_grid.unsigned`), positions int32, steps signed integers
of w bits, all on one device. Arithmetic is in 64 bits, modulo 2^64. With TRITON_INTERPRET=1 in the environment before
Triton is imported the same kernels run on host tensors. Import this module through `kernels.gpu_kernels` only.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LARGEST = 1 << 30
"""Largest number of elements of a scan or change list: positions inside a launch are int32."""
BLOCK = 2048

_MODULUS = 1 << 64
_K = tl.constexpr(0x9E3779B97F4A7C15)
_M1, _M2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
_UNSPECIALIZED = ["start", "n", "run", "step"]  # one compilation serves all values


@triton.jit
def _hash(start, index, value, W: tl.constexpr):
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014) of an element; `start` is the first value of its tensor's
    hashes."""
    z = start.to(tl.uint64) + _K * ((index.to(tl.uint64) << W) + value)
    z = (z ^ (z >> 30)) * _M1
    z = (z ^ (z >> 27)) * _M2
    return z ^ (z >> 31)


@triton.jit
def _ordered(u, W: tl.constexpr, SIGNED: tl.constexpr):
    """The code of a bit pattern (uint64) that grows with its value, modulo 2^W; its own inverse."""
    if SIGNED:
        u = u ^ (u >> (W - 1)) * ((1 << (W - 1)) - 1)
    return u


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def digest_kernel(
    bits,
    start: tl.int64,
    n: tl.int32,
    run: tl.int32,
    step: tl.int64,
    sums,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sums[block]: the sum of the hashes of the block's elements, which with ROWS are rows of `run` elements in their
    tensor, one every `step`."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(bits + i, mask=i < n, other=0).to(tl.uint64)
    index = i
    if ROWS:
        index = (i // run).to(tl.int64) * step + i % run
    hashes = tl.where(i < n, _hash(start, index, value, W), 0)
    tl.store(sums + block, tl.sum(hashes, 0).to(tl.int64))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def count_kernel(old, new, n: tl.int32, counts, BLOCK: tl.constexpr):
    """counts[block]: number of the block's elements that differ."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    before, after = tl.load(old + i, mask=i < n, other=0), tl.load(new + i, mask=i < n, other=0)
    tl.store(counts + block, tl.sum((before != after).to(tl.int32), 0))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def compact_kernel(
    old, new, n: tl.int32, places, positions, steps, W: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the block's changes, in order, to the lists from index places[block] on."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    before, after = tl.load(old + i, mask=i < n, other=0), tl.load(new + i, mask=i < n, other=0)
    differ = before != after
    place = tl.load(places + block) + tl.cumsum(differ.to(tl.int32), 0) - 1
    step = _ordered(after.to(tl.uint64), W, SIGNED) - _ordered(before.to(tl.uint64), W, SIGNED)
    tl.store(positions + place, i, mask=differ)
    tl.store(steps + place, step.to(steps.dtype.element_ty), mask=differ)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def add_kernel(
    bits,
    positions,
    steps,
    start: tl.int64,
    n: tl.int32,
    sums,
    W: tl.constexpr,
    SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves n elements; sums[block]: growth of the digest."""
    block = tl.program_id(0)
    j = block * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(positions + j, mask=j < n, other=0)
    step = tl.load(steps + j, mask=j < n, other=0).to(tl.int64).to(tl.uint64)
    before = tl.load(bits + i, mask=j < n, other=0).to(tl.uint64)
    after = _ordered((_ordered(before, W, SIGNED) + step) & ((1 << W) - 1), W, SIGNED)
    tl.store(bits + i, after.to(bits.dtype.element_ty), mask=j < n)
    grown = tl.where(j < n, _hash(start, i, after, W) - _hash(start, i, before, W), 0)
    tl.store(sums + block, tl.sum(grown, 0).to(tl.int64))


def digest(bits: torch.Tensor, seed: int, first: int, w: int) -> int:
    """Sum of the hashes of all elements, modulo 2^64; `first` is the tensor's index of the first one."""
    return digest_rows(bits, 1, 1, seed, first, w)


def digest_rows(bits: torch.Tensor, run: int, step: int, seed: int, first: int, w: int) -> int:
    """`digest` of elements that lie in the tensor as rows of `run` elements, at most LARGEST, one every `step`."""
    rows, total = LARGEST // run, 0
    for row in range(0, bits.numel() // run, rows):
        part = bits[row * run : (row + rows) * run]
        sums, n = _per_block(part, torch.int64), part.numel()
        start = _start(seed, first + row * step, w)
        _launch(digest_kernel, sums, part, start, n, run, step, sums, W=w, ROWS=step != run)
        total += int(sums.sum())
    return total % _MODULUS


def scan(
    old: torch.Tensor, new: torch.Tensor, seed: int, first: int, w: int, signed: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(positions, ascending; steps; growth of the digest) of the changes; `old` becomes `new`. At most LARGEST
    elements. `new` is read twice: no other stream may write to it in between."""
    n = new.numel()
    assert old.numel() == n <= LARGEST
    integer = {8: torch.int8, 16: torch.int16, 32: torch.int32}[w]
    counts = _per_block(new, torch.int32)
    if n:
        _launch(count_kernel, counts, old, new, n, counts)
    ends = counts.cumsum(0)  # int64
    total = int(ends[-1]) if n else 0
    positions = torch.empty(total, dtype=torch.int32, device=new.device)
    steps = torch.empty(total, dtype=integer, device=new.device)
    if total:
        _launch(compact_kernel, counts, old, new, n, ends - counts, positions, steps, W=w, SIGNED=signed)
    # Applying the changes to `old` writes and hashes nothing but changed elements.
    return positions, steps, add(old, positions, steps, seed, first, w, signed)


def add(
    bits: torch.Tensor, positions: torch.Tensor, steps: torch.Tensor, seed: int, first: int, w: int, signed: bool
) -> int:
    """Moves elements by so many steps, in place. Returns the growth of the digest, modulo 2^64. Adding -steps undoes
    it. Positions are distinct and below LARGEST, `first` is the tensor's index of bits[0]."""
    n = positions.numel()
    assert steps.numel() == n <= LARGEST
    if not n:
        return 0
    sums = _per_block(positions, torch.int64)
    _launch(add_kernel, sums, bits, positions, steps, _start(seed, first, w), n, sums, W=w, SIGNED=signed)
    return int(sums.sum()) % _MODULUS


def _per_block(elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for one number per block of the elements."""
    return torch.empty(triton.cdiv(elements.numel(), BLOCK), dtype=dtype, device=elements.device)


def _start(seed: int, first: int, w: int) -> int:
    """The first value of the hashes of a part, at its element 0, as a signed integer."""
    start = (seed + _K.value * (first << w)) % _MODULUS
    return start - _MODULUS if start >> 63 else start


def _launch(kernel: Any, per_block: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    with torch.cuda.device_of(per_block):  # Triton launches on the current device
        kernel[(per_block.numel(),)](*arguments, BLOCK=BLOCK, **constants)
