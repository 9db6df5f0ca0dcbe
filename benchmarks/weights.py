"""The delta codec against what others ship, on the same bits in the same run.

real           consecutive bfloat16 versions of models/nano: policy gradient over episodes that it samples itself,
               rewarded for tokens that the program goes on with; AdamW on float32 masters, after Adam's first large
               steps have passed. The learning rates 3e-6 and 8e-6 change about as much of this model as 1e-6 and 3e-6
               do of one with smaller weights; the share that changed is in the row. Seed 0.
iid            normal weights (sd 0.02), a share of which moves by one unit in the last place at random places
ratio          bytes of the weights / bytes of the object, all headers counted
encode, decode bytes of the weights per second on one thread, against XOR + zstd-1, and as a share of memcpy of the same
               arrays: pack included in the first; unpack with checksums, apply and digest in the second; on the real
               1 % pair, every tensor repeated to at least 1 GiB in all. Medians; a memcpy is taken beside each.
baselines      XOR + zstd-1 (slime, SkyRL, stitch); int32 index + value (TRL, vLLM); u16 gap + value, zstd-1 (PULSE)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from benchmarks import weights_live
from etude.config import TrainerConfig
from etude.models.loading import load_model, load_tokenizer
from etude.trainer.optimizer import MasterAdamW, for_policy
from etude.weights.ulpd import codec
from etude.weights.ulpd.chunk_grid import Bits, Schema, Spec, bits, schema_of
from etude.weights.ulpd.codec import ABS, A, B, Codec

NANO = Path(__file__).parents[1] / "models/nano"
GROUP, PROMPT, COMPLETION = 8, 24, 24
REAL = {"real-1pct": 3e-6, "real-2.6pct": 8e-6}
IID = {"iid-0.3pct": 0.003, "iid-1pct": 0.01, "iid-2pct": 0.02}
FLOORS = {
    "ratio/real-1pct": 200.0,
    "ratio/real-2.6pct": 90.0,
    "ratio/iid-1pct": 165.0,
    "ratio/iid-0.3pct": 450.0,
    "vs-xor-zstd/real-1pct": 2.4,
    "encode-A/xor-zstd": 2.0,
    "decode-A/xor-zstd": 6.0,
    "encode-B/xor-zstd": 1.1,
    "decode-B/xor-zstd": 2.0,
    "threads-2/threads-1, of memcpy's": 0.9,
}
Rows = dict[str, tuple[float, str]]  # value and baseline


@dataclass(frozen=True)
class Pair:
    """Two versions of the same tensors."""

    grid: Schema
    old: Mapping[str, Bits]
    new: Mapping[str, Bits]
    learning_rate: float = 1e-6

    @property
    def density(self) -> float:
        changed = sum(int((self.old[name] != self.new[name]).sum()) for name in self.old)
        return changed / sum(part.size for part in self.old.values())


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks. `quick`: fewer steps of training, and 64 MiB instead of 1 GiB for speed."""
    pairs = {name: real_pair(rate, steps=24 if quick else 48) for name, rate in REAL.items()}
    pairs |= {name: iid_pair((4 if quick else 64) * 2**20, share) for name, share in IID.items()}
    sizes, exact = size_rows(pairs)
    large = tiled(pairs["real-1pct"], (64 if quick else 1024) * 2**20)
    speeds, same = speed_rows(large, repeats=3 if quick else 5)
    rows = sizes | speeds
    live = weights_live.rows(quick)
    checks = {"every decoded bit equals the encoded one": exact and same}
    checks |= {f"{name} >= {floor}": rows[name][0] >= floor for name, floor in FLOORS.items()}
    listed = [
        {"case": name, "value": value, "unit": "x", "baseline": baseline} for name, (value, baseline) in rows.items()
    ]
    return {"bench": "weights", "rows": listed + live, "checks": checks}


# Pairs of versions


def real_pair(learning_rate: float, steps: int, settled: bool = False) -> Pair:
    """The last two of `steps` + 1 versions. One group of episodes per step, all sampled by the first version.

    With `settled` the masters begin anywhere in their rounding cells, as after a long run, and not in the middle.
    """
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, tokenizer = load_model(NANO), load_tokenizer(NANO)
    text = torch.tensor(tokenizer(Path(statistics.__file__).read_text())["input_ids"])
    starts_S = torch.randint(len(text) - PROMPT - COMPLETION, (steps,), generator=generator)
    prompts = torch.stack([text[s : s + PROMPT] for s in starts_S.tolist()]).repeat_interleave(GROUP, 0)
    truth_ST = torch.stack([text[s + PROMPT : s + PROMPT + COMPLETION] for s in starts_S.tolist()])
    episodes_SGT = _sampled(model, prompts, generator).view(steps, GROUP, PROMPT + COMPLETION)
    optimizer = for_policy(model, TrainerConfig(lr=learning_rate, warmup_steps=0))
    if settled:
        scatter(optimizer, generator)
    versions = []
    for step in range(steps):
        rewards_G = torch.isin(episodes_SGT[step, :, PROMPT:], truth_ST[step]).float().mean(1)
        _policy_gradient(model, episodes_SGT[step], rewards_G)
        optimizer.collect()
        optimizer.apply(learning_rate)
        if step >= steps - 2:
            versions.append({name: tensor.clone() for name, tensor in optimizer.published().items()})
    old, new = ({name: bits(tensor) for name, tensor in version.items()} for version in versions)
    return Pair(schema_of(versions[0]), old, new, learning_rate)


def scatter(optimizer: MasterAdamW, generator: torch.Generator) -> None:
    """Moves every master by up to half a unit in the last place of its bfloat16 value."""
    state = optimizer.state()
    for name, master in state.items():
        if name.startswith("master/"):
            ulp = torch.exp2(torch.frexp(master).exponent.float() - 8)
            state[name] = master + (torch.rand(master.shape, generator=generator) - 0.5) * ulp
    optimizer.load(state)


@torch.no_grad()
def _sampled(model: Any, prompts_NP: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The prompts, continued at temperature 1."""
    ids_NT, fed, cache = prompts_NP, prompts_NP, None
    for _ in range(COMPLETION):
        out = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        fed = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator)
        ids_NT = torch.cat((ids_NT, fed), 1)
    return ids_NT


def _policy_gradient(model: Any, ids_GT: torch.Tensor, rewards_G: torch.Tensor) -> None:
    """Gradients of one group."""
    logits_GTV = model(input_ids=ids_GT, use_cache=False).logits[:, PROMPT - 1 : -1]
    chosen_GT = torch.log_softmax(logits_GTV.float(), -1).gather(2, ids_GT[:, PROMPT:, None]).squeeze(2)
    advantages_G = rewards_G - rewards_G.mean()
    (-(advantages_G[:, None] * chosen_GT).mean()).backward()


def iid_pair(elements: int, share: float) -> Pair:
    """Normal weights of which a share moves by one unit in the last place."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(elements, dtype=np.float32) * np.float32(0.02)
    old = (normal.view(np.uint32) >> 16).astype(np.uint16)
    touched = np.flatnonzero(rng.random(elements, dtype=np.float32) < share)
    new = old.copy()
    new[touched] += rng.choice(np.array([1, 65535], np.uint16), touched.size)
    return Pair(Schema((Spec("weights", "bfloat16", (elements // 4096, 4096)),)), {"weights": old}, {"weights": new})


def tiled(pair: Pair, nbytes: int) -> Pair:
    """The same tensors, each as many times as tall as it takes."""
    times = -(-nbytes // pair.grid.nbytes)
    specs = tuple(Spec(s.name, s.dtype, (times * (s.shape or (1,))[0], *s.shape[1:])) for s in pair.grid.tensors)
    old, new = ({name: np.tile(part, times) for name, part in side.items()} for side in (pair.old, pair.new))
    return Pair(Schema(specs), old, new, pair.learning_rate)


# Rows: one function per group


def size_rows(pairs: Mapping[str, Pair]) -> tuple[Rows, bool]:
    """Ratios of every pair, and whether every bit came back."""
    rows: Rows = {}
    exact = True
    for name, pair in pairs.items():
        base = codec.digests(pair.grid, pair.old)
        data = _encode(pair, base, _options(pair, (A, B, ABS)), 1)
        held = {n: part.copy() for n, part in pair.old.items()}
        _apply(pair, held, base, data, 1)
        exact = exact and all(np.array_equal(held[n], pair.new[n]) for n in held)
        rows[f"ratio/{name}"] = pair.grid.nbytes / len(data), "raw bytes"
        rows[f"changed/{name}"] = pair.density, "all elements"
        sizes = _baseline_sizes(pair)
        for scheme, nbytes in sizes.items():
            rows[f"ratio/{name}/{scheme}"] = pair.grid.nbytes / nbytes, "raw bytes"
        rows[f"vs-xor-zstd/{name}"] = sizes["xor-zstd"] / len(data), "XOR + zstd-1"
    return rows, exact


def _baseline_sizes(pair: Pair) -> dict[str, int]:
    """Bytes by scheme: whole tensors, no headers, so each is a little better than what is shipped."""
    old, new = (np.concatenate([side[s.name] for s in pair.grid.tensors]) for side in (pair.old, pair.new))
    compressor = zstandard.ZstdCompressor(level=1)
    index = np.flatnonzero(old != new)
    gaps = np.diff(index, prepend=-1) - 1
    long = gaps // 65535  # a longer gap is so many full steps and the rest
    gaps_u16 = np.full(gaps.size + int(long.sum()), 65535)
    gaps_u16[np.arange(gaps.size) + np.cumsum(long)] = gaps % 65535
    packed = compressor.compress(gaps_u16.astype(np.uint16).tobytes()) + compressor.compress(new[index].tobytes())
    return {
        "xor-zstd": len(compressor.compress((old ^ new).tobytes())),
        "index-value": (4 + old.itemsize) * index.size,
        "gap-value-zstd": len(packed),
    }


def speed_rows(pair: Pair, repeats: int) -> tuple[Rows, bool]:
    """Speeds against memcpy on one thread, what a second thread gives, and whether every bit came back."""
    held = {name: part.copy() for name, part in pair.old.items()}
    base = codec.digests(pair.grid, pair.old)
    seconds = _Seconds(pair.old, held)
    exact = True
    for label, allowed in (("A", (A, ABS)), ("B", (B, ABS))):
        options = _options(pair, allowed)
        for threads in (1, 2):
            for _ in range(repeats + 1):  # the first one warms up
                data = seconds.take(f"encode-{label}", threads, partial(_encode, pair, base, options, threads))
                seconds.take(f"decode-{label}", threads, partial(_apply, pair, held, base, data, threads))
                exact = exact and all(np.array_equal(held[name], pair.new[name]) for name in held)
    for _ in range(repeats + 1):
        seconds.take("digest", 1, lambda: codec.digests(pair.grid, pair.old, 1))
    _take_xor(pair, seconds, repeats)
    rows: Rows = {}
    for case in ("encode-A", "decode-A", "encode-B", "decode-B", "digest", "xor-zstd-encode", "xor-zstd-decode"):
        rows[f"{case}/memcpy"] = seconds.against_memcpy(case), "memcpy of the same arrays"
    cases = ("encode-A", "decode-A", "encode-B", "decode-B")
    for case in cases:
        other = f"xor-zstd-{case.partition('-')[0]}"
        rows[f"{case}/xor-zstd"] = seconds.median(other, 1) / seconds.median(case, 1), "XOR + zstd-1, one thread"
    for case in cases:
        rows[f"threads-2/threads-1/{case}"] = seconds.median(case, 1) / seconds.median(case, 2), "one thread"
    one, two = (sum(seconds.median(case, threads) for case in cases) for threads in (1, 2))
    rows["threads-2/threads-1"] = one / two, "one thread; sum of A and B, encode and decode"
    allowed = _copying(pair.old, held, repeats)
    rows["threads-2/threads-1/memcpy"] = allowed, "one thread; what this memory allows"
    rows["threads-2/threads-1, of memcpy's"] = one / two / allowed, "what a second thread gives memcpy"
    return rows, exact


def _copying(source: Mapping[str, Bits], target: Mapping[str, Bits], repeats: int) -> float:
    """What a second thread gives a memcpy, each thread copying half of the bytes."""
    halves = [
        (part.view(np.uint8).reshape(-1), target[name].view(np.uint8).reshape(-1)) for name, part in source.items()
    ]
    shares = [
        [(old[: old.size // 2], new[: old.size // 2]) for old, new in halves],
        [(old[old.size // 2 :], new[old.size // 2 :]) for old, new in halves],
    ]

    def copy(share: list[tuple[Any, Any]]) -> None:
        for old, new in share:
            np.copyto(new, old)

    taken: dict[int, list[float]] = {1: [], 2: []}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(repeats + 1):
            for threads, run in (
                (1, lambda: [copy(share) for share in shares]),
                (2, lambda: list(pool.map(copy, shares))),
            ):
                begin = time.perf_counter()
                run()
                taken[threads].append(time.perf_counter() - begin)
    return statistics.median(taken[1][1:]) / statistics.median(taken[2][1:])


def _encode(pair: Pair, base: codec.Digests, options: Codec, threads: int) -> bytes:
    return codec.pack("delta", 1, codec.encode_changes(pair.grid, pair.old, pair.new, base, options, threads)[0])


def _apply(pair: Pair, held: Mapping[str, Bits], base: codec.Digests, data: bytes, threads: int) -> None:
    codec.apply(pair.grid, held, base, codec.unpack(data, len(pair.grid.chunks))[2], threads)


class _Seconds:
    """Times of each case and, beside each, of a memcpy of `source` to `held`, which it finds there."""

    def __init__(self, source: Mapping[str, Bits], held: Mapping[str, Bits]):
        self._source, self._held = source, held
        self._taken: dict[tuple[str, int], list[tuple[float, float]]] = {}

    def take(self, case: str, threads: int, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        for name, part in self._source.items():
            np.copyto(self._held[name], part)
        between = time.perf_counter()
        result = work()
        end = time.perf_counter()
        self._taken.setdefault((case, threads), []).append((between - begin, end - between))
        return result

    def median(self, case: str, threads: int) -> float:
        return statistics.median(seconds for _, seconds in self._taken[case, threads][1:])

    def against_memcpy(self, case: str) -> float:
        return statistics.median(memcpy / seconds for memcpy, seconds in self._taken[case, 1][1:])


def _take_xor(pair: Pair, seconds: _Seconds, repeats: int) -> None:
    """XOR + zstd-1, tensor by tensor."""
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    for _ in range(repeats + 1):
        packed = seconds.take(
            "xor-zstd-encode", 1, lambda: {n: compressor.compress((pair.old[n] ^ pair.new[n]).data) for n in pair.old}
        )
        seconds.take(
            "xor-zstd-decode",
            1,
            lambda packed=packed: [
                pair.old[n] ^ np.frombuffer(decompressor.decompress(data), pair.old[n].dtype)
                for n, data in packed.items()
            ],
        )


def _options(pair: Pair, allowed: tuple[int, ...]) -> Codec:
    return Codec(allowed, learning_rate=pair.learning_rate)
