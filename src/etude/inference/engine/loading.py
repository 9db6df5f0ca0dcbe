"""Loads a model folder into an engine, and checks it against the forward pass of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from etude.config import EngineConfig
from etude.errors import UserError, first_line
from etude.inference.engine.cache import CacheTooSmall
from etude.inference.engine.engine import Engine
from etude.models import check_device, support
from etude.models.dtypes import computed_dtype
from etude.models.key_values import positions
from etude.models.loading import load_config, load_model

_CHUNK = 7  # prompt tokens of a pass in the trial
_STEPS = 1000  # more than the trial takes


def load_engine(
    folder: Path | str,
    config: EngineConfig,
    *,
    max_length: int | None = None,
    deterministic: bool = False,
    routes: bool = False,
) -> Engine:
    """An engine on the model of a Hugging Face folder, not started. Raises UserError for a folder that cannot be
    loaded, a cache too small for `max_length` tokens, and an architecture that the engine computes differently."""
    root = Path(folder)
    check_device(config.device, "device")
    if why := support.refusal(load_config(root), "engine"):
        raise UserError(f"{root}: {why}")
    model = load_model(root, dtype=computed_dtype(config.dtype, config.device, root), device=config.device)
    try:
        engine = Engine(model, config, max_length=max_length, deterministic=deterministic, routes=routes)
        if max_length is not None:
            engine.cache.check_holds(min(max_length, positions(model.config)))
    except CacheTooSmall as e:
        raise UserError(
            f"{e}: raise cache_mb (--cache-mb of `etude serve`, inference.cache_mb of a run), or shorten the context"
        ) from None
    except torch.OutOfMemoryError as e:
        raise UserError(f"{root} does not fit on {config.device}: {first_line(e)}") from None
    except support.FAILURES as e:
        raise UserError(f"{root}: {support.refused(model, 'engine', e)}") from None
    if why := trial(engine):
        raise UserError(f"{root}: {why}")
    return engine


def described(engine: Engine) -> str:
    """A line for people about the loaded weights: their number, type and memory."""
    weights = list({t.data_ptr(): t for t in (*engine.model.parameters(), *engine.model.buffers())}.values())
    count, size = sum(t.numel() for t in weights), sum(t.nbytes for t in weights)
    dtype, device = str(engine.model.dtype).removeprefix("torch."), engine.cache.keys.device.type
    why = ", for which the CPU's kernels are made (--dtype bfloat16 takes half the memory)"
    chosen = why if engine.config.dtype == "auto" and device == "cpu" else ""
    return f"{count / 1e6:,.1f} million in {dtype}, {size / 1e6:,.1f} MB{chosen}"


def trial(engine: Engine) -> str:
    """The first difference between the engine and transformers' own forward pass, or "". The trial runs rows of
    different lengths, their prompts cut into chunks, their other tokens decoded beside each other. The engine must not
    run yet, and is as new afterwards."""

    def ours(rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        engine.scheduler.forget()  # keys of other lengths
        if engine.runner.speculation is not None:
            _ = engine.runner.speculation.curve  # measured now: its passes may fail
        scored = [engine.score(row.tolist(), decoded=True) for row in rows]
        for _ in range(_STEPS):
            if all(future.done() for future in scored):
                break
            engine.step()
        return [np.array(future.result(0)[1]) for future in scored]

    with engine.scheduler.chunks_of(_CHUNK):
        why = support.trial(engine.model, "engine", ours, most=engine.max_length)
    engine.scheduler.forget()
    engine.counters.reset()
    return why
