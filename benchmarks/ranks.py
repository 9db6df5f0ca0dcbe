"""Several ranks of a trainer on this machine (gloo): their numbers against one process's, and what they cost and save.

world-1/overhead     seconds in the functions of several ranks over those of a step, with one rank
world-2/speedup      seconds of a step with one rank over those with two, one thread each
states/rank-share    bytes of states and parameters of the largest rank, over one process's divided by the ranks
packing/imbalance    cost of the dearest of eight ranks over their mean, on log-normal lengths; the worst of the seeds
logprobs/max-abs     largest difference of a log-probability from one process's, over the meshes
digest/equal         share of the published elements that are equal to one process's after five steps, the least of the
                     meshes; differ/MESH: the share of the others

The bundled model, float32, in the execution "packed". Two ranks share this machine's processor, caches and memory, and
exchange tensors through sockets: the speed-up is not that of two devices.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.ranks_side import batch
from benchmarks.side_process import ROOT
from benchmarks.table import Table
from benchmarks.threads import one_thread
from etude.config import TrainerConfig
from etude.processes import start_ranks
from etude.trainer import sharding, world
from etude.trainer.optimizer import for_policy
from etude.trainer.rl import execution
from etude.trainer.rl.balance import divided
from etude.trainer.rl.plan import Shape, TokenRows, passes_of, shape_of

MESHES = ("1,2,1,1", "2,1,1,1", "1,2,2,1", "1,1,1,2", "1,1,2,2", "1,4,1,1", "1,4,2,1", "1,2,2,2")
SECONDS = 300.0
SEEDS, RANKS = 5, 8
_FUNCTIONS = {
    execution: ("last_pass", "reshard", "within", "world_of"),
    world.World: ("agree", "at", "gathered", "largest", "total"),
    sharding: ("first_row", "is_divided", "local", "own_rows", "shard_of"),
}


def run(quick: bool) -> dict[str, Any]:
    """Rows and checks. `quick` takes three of the meshes and smaller batches."""
    table = Table("ranks")
    prompts, steps = (4, 5) if quick else (16, 5)
    with one_thread():
        table.add("world-1/overhead", _overhead(prompts), "share", "seconds of a step with one rank")
    meshes = ("1,2,1,1", "1,2,2,1", "1,1,1,2") if quick else MESHES
    one = _ranks("1,1,1,1", steps, prompts)
    largest, differ, ulps, shares = 0.0, 0, 0, list[float]()
    total = sum(part.numel() for part in one[0]["published"].values())
    for mesh in meshes:
        ranks = _ranks(mesh, steps, prompts)
        count = len(ranks)
        off = max(float((rank["logprobs"] - one[0]["logprobs"]).abs().max()) for rank in ranks)
        others, apart = _apart(one[0]["published"], _joined([rank["published"] for rank in ranks], mesh))
        largest, differ, ulps = max(largest, off), max(differ, others), max(ulps, apart)
        if mesh == "1,2,1,1":
            speedup = _median(one) / _median(ranks)
            table.add("world-2/speedup", speedup, "x", "seconds of a step with one rank; gloo, one machine")
        if mesh.startswith("1,"):
            shares.append(max(rank["bytes"] for rank in ranks) * count / one[0]["bytes"])
        name = mesh.replace(",", "-")
        table.add(f"logprobs/{name}", off, "nats", "one process")
        table.add(f"differ/{name}", others / total, "share of elements", f"one process; {others}, up to {apart} ulp")
    table.add("states/rank-share", max(shares), "x", "one process's bytes divided by the ranks")
    imbalance = max(_imbalance(seed) for seed in range(SEEDS))
    table.add("packing/imbalance", imbalance, "x", f"mean of {RANKS} ranks; 64 prompts, groups of 8, {SEEDS} seeds")
    table.add("logprobs/max-abs", largest, "nats", "one process, over the meshes")
    table.add("digest/equal", 1 - differ / total, "share of elements", f"one process; at most {differ} differ")
    table.checks["log-probabilities within 5e-6 nats"] = largest <= 5e-6
    table.checks["states of a rank within 1.1 of its share"] = max(shares) <= 1.1
    table.checks["imbalance within 1.1"] = imbalance <= 1.1
    table.checks["published elements equal, or 1e-4 of them one unit apart"] = differ <= 1e-4 * total and ulps <= 1
    return table.result()


def _overhead(prompts: int) -> float:
    """The share of a step's seconds that is spent in the functions of several ranks, with one rank."""
    model = sharding.load_sharded(ROOT / "models" / "nano", torch.float32, world.World())
    optimizer, tokens, spent, depth = for_policy(model, TrainerConfig()), batch(prompts, 0), [0.0], [0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            if function.__name__ == "within":  # its time is that of the pass
                return function(*arguments, **options)
            started, depth[0] = time.perf_counter(), depth[0] + 1
            try:
                return function(*arguments, **options)
            finally:
                depth[0] -= 1
                spent[0] += 0.0 if depth[0] else time.perf_counter() - started

        return measured

    passes = passes_of(tokens, "packed", divided(tokens, "packed", 2048, shape_of(model), 1).passes[0], shape_of(model))
    patches = [patch.object(o, n, timed(getattr(o, n))) for o, names in _FUNCTIONS.items() for n in names]
    for one in patches:
        one.start()
    try:
        started = time.perf_counter()
        execution.run(model, passes.parts, tokens.count, lambda logprobs_M, _: logprobs_M.sum(), divided=True)
        optimizer.collect()
        optimizer.apply(1e-5)
        return spent[0] / (time.perf_counter() - started)
    finally:
        for one in patches:
            one.stop()


def _ranks(mesh: str, steps: int, prompts: int) -> list[dict[str, Any]]:
    """The figures and tensors of each rank of a mesh."""
    replicate, shard, _, context = map(int, mesh.split(","))
    count = replicate * shard * context
    with tempfile.TemporaryDirectory() as folder:
        words = ["benchmarks.ranks_side", mesh, folder, str(steps), str(prompts)]
        group = start_ranks("ranks", words, Path(folder), count, {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"})
        try:
            if not group.ends(SECONDS):
                raise RuntimeError(f"mesh {mesh} took more than {SECONDS:.0f} s")
        finally:
            group.stop(5)
        if group.exit_code:
            raise RuntimeError(f"mesh {mesh}: {group.end()}: {group.log.read_text()[-2000:]}")
        files = [Path(folder) / f"rank-{rank}" for rank in range(count)]
        figures = [json.loads(file.with_suffix(".json").read_text()) for file in files]
        return [f | torch.load(file.with_suffix(".pt")) for f, file in zip(figures, files, strict=True)]


def _joined(ranks: list[dict[str, torch.Tensor]], mesh: str) -> dict[str, torch.Tensor]:
    """Whole tensors, of the rows of the ranks that have any, in order. Experts are divided in the order of the ranks of
    a group of expert parallelism, and then over its copies."""
    expert = int(mesh.split(",")[2])
    order = [first + step for first in range(expert) for step in range(0, len(ranks), expert)]
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in ranks[0].items():
        some = [ranks[i][name] for i in (order if "experts" in name else range(len(ranks)))]
        rows = [part for part in some if not part.is_meta and part.numel()]
        whole[name] = torch.cat(rows) if tensor.ndim else rows[0]
    return whole


def _apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The number of elements that differ, and the largest distance in units of the last place, of bfloat16 tensors."""
    differ = largest = 0
    for name, tensor in one.items():
        apart = (_ordered(tensor) - _ordered(other[name])).abs()
        differ, largest = differ + int((apart > 0).sum()), max(largest, int(apart.max()))
    return differ, largest


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, one apart for neighbours."""
    bits = tensor.to(torch.bfloat16).view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


def _median(ranks: list[dict[str, Any]]) -> float:
    return statistics.median(ranks[0]["seconds"][1:])


def _imbalance(seed: int) -> float:
    noise = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    sampled: list[np.ndarray] = []
    for _ in range(64):
        prompt = noise.integers(0, 1000, int(noise.lognormal(7, 0.5)) + 20)
        for length in noise.lognormal(8, 0.8, 8).astype(int) + 1:
            rows.append(np.concatenate([prompt, noise.integers(0, 1000, length)]))
            sampled.append(np.arange(len(prompt), len(rows[-1])))
    tokens = TokenRows(tuple(rows), tuple(sampled))
    return divided(tokens, "packed", 16384, Shape(2e-5, 0.05), RANKS).imbalance
