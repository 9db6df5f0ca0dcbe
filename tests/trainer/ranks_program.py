"""A program of ranks: gradients and log-probabilities of a batch on several meshes, written to a file by rank 0.

python -m tests.trainer.ranks_program MODEL OUT MESH...        MESH: replicate,shard,expert,context,execution
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from etude.config import MeshConfig
from etude.trainer.rl.balance import divided
from etude.trainer.rl.execution import run
from etude.trainer.rl.plan import Execution, TokenRows, passes_of, shape_of
from etude.trainer.sharding import load_sharded, world_of
from etude.trainer.world import World

SEED = 5


def batch() -> TokenRows:
    """Nine rows of three prompts, of different lengths."""
    noise = np.random.default_rng(SEED)
    rows: list[np.ndarray] = []
    sampled: list[np.ndarray] = []
    for prompt in (18, 33, 21):
        head = noise.integers(0, 97, prompt)
        for length in noise.integers(2, 40, 3):
            rows.append(np.concatenate([head, noise.integers(0, 97, length)]))
            sampled.append(np.arange(prompt, prompt + length))
    return TokenRows(tuple(rows), tuple(sampled))


def computed(model: torch.nn.Module, execution: Execution, aux: float) -> dict[str, torch.Tensor]:
    """Log-probabilities, expert counts and whole gradients of the batch."""
    world, tokens = world_of(model), batch()  # pyright: ignore[reportArgumentType]
    shape = shape_of(model)  # pyright: ignore[reportArgumentType]
    division = divided(tokens, execution, 200, shape, world.mesh.data_ranks)
    passes = passes_of(tokens, execution, division.passes[world.data_rank], shape)
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(SEED))
    result = run(
        model,  # pyright: ignore[reportArgumentType]
        passes.parts,
        tokens.count,
        lambda logprobs_M, item_M: (weight_N[item_M] * logprobs_M).sum() / tokens.count,
        aux=aux,
        divided=True,
    )
    out = {"logprobs": result.logprobs_N, "counts": result.counts_LE, "loss": torch.tensor([result.loss, result.aux])}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        if not isinstance(grad, DTensor):
            world.total((grad,))
        out[f"grad/{name}"] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        parameter.grad = None
    return out


def main() -> None:
    """Runs the meshes one after another."""
    torch.set_num_threads(1)
    folder, out, meshes = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    world: World | None = None
    results: dict[str, dict[str, torch.Tensor]] = {}
    for text in meshes:
        *sizes, execution, dtype, aux = text.split(",")
        mesh = MeshConfig(**dict(zip(("replicate", "shard", "expert", "context"), map(int, sizes), strict=True)))
        if world is None or world.mesh != mesh:
            if world is not None:
                world.close()
                os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # the old store lives on
            world = World.join(mesh, "cpu", 60)
        model = load_sharded(folder, getattr(torch, dtype), world)
        results[text] = computed(model, execution, float(aux))  # pyright: ignore[reportArgumentType]
    if world is not None:
        if world.first:
            torch.save(results, out)
        world.close()


if __name__ == "__main__":
    main()
