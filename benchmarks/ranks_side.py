"""A rank of `benchmarks.ranks`: trains the bundled model for some steps on a mesh, and writes its figures.

python -m benchmarks.ranks_side MESH OUT STEPS PROMPTS        MESH: replicate,shard,expert,context; OUT: a folder
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from etude.config import MeshConfig, TrainerConfig
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.balance import divided
from etude.trainer.rl.execution import BatchResult, evaluate, run
from etude.trainer.rl.plan import ExecutionPlan, TokenRows, passes_of, shape_of
from etude.trainer.sharding import load_sharded, local
from etude.trainer.world import World
from etude.weights.ranks import held_rows

NANO = Path(__file__).parent.parent / "models" / "nano"
GROUP, PROMPT, BUDGET, RATE = 4, 120, 2048, 1e-5


def batch(prompts: int, seed: int) -> TokenRows:
    """Rows of random ids: groups that share a prompt, with answers of log-normal lengths."""
    noise = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    sampled: list[np.ndarray] = []
    for _ in range(prompts):
        prompt = noise.integers(7, 4000, PROMPT)
        for length in noise.lognormal(4.5, 0.6, GROUP).astype(int) + 2:
            rows.append(np.concatenate([prompt, noise.integers(7, 4000, length)]))
            sampled.append(np.arange(PROMPT, PROMPT + length))
    return TokenRows(tuple(rows), tuple(sampled))


def main() -> None:
    """Trains, and writes `OUT/rank-R.json` and the rows of this rank in `OUT/rank-R.pt`."""
    torch.set_num_threads(1)
    text, out, steps, prompts = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    sizes = zip(("replicate", "shard", "expert", "context"), map(int, text.split(",")), strict=True)
    world = World.join(MeshConfig(**dict(sizes)), "cpu", 120)
    model = load_sharded(NANO, torch.float32, world)
    optimizer = for_policy(model, TrainerConfig())
    first = batch(prompts, 0)
    passes = _passes(world, model, first)
    logprobs_N = evaluate(model, passes.parts, first.count, divided=True).logprobs_N
    seconds: list[float] = []
    for step in range(steps):
        tokens = batch(prompts, step)
        started = time.perf_counter()
        result = _step(world, model, tokens)
        optimizer.collect()
        optimizer.apply(RATE)
        seconds.append(time.perf_counter() - started)
        assert np.isfinite(result.loss)
    states = {name: held_rows(tensor) for name, tensor in optimizer.state().items()}
    figures = {
        "seconds": seconds,
        "bytes": sum(t.nbytes for t in states.values()) + sum(local(p).nbytes for p in model.parameters()),
    }
    (out / f"rank-{world.rank}.json").write_text(json.dumps(figures))
    published = {name: held_rows(part) for name, part in optimizer.published().items()}
    torch.save({"logprobs": logprobs_N, "published": published}, out / f"rank-{world.rank}.pt")
    world.close()


def _passes(world: World, model: torch.nn.Module, tokens: TokenRows) -> ExecutionPlan:
    shape = shape_of(model)  # pyright: ignore[reportArgumentType]
    division = divided(tokens, "packed", BUDGET, shape, world.mesh.data_ranks)
    return passes_of(tokens, "packed", division.passes[world.data_rank], shape)


def _step(world: World, model: torch.nn.Module, tokens: TokenRows) -> BatchResult:
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(tokens.count))
    return run(
        model,  # pyright: ignore[reportArgumentType]
        _passes(world, model, tokens).parts,
        tokens.count,
        lambda logprobs_M, item_M: (weight_N[item_M] * logprobs_M).sum() / tokens.count,
        divided=True,
    )


if __name__ == "__main__":
    main()
