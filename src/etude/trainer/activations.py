"""Activation checkpointing: only the input of each decoder layer is kept, and the backward pass computes the layer
again.

A layer's result depends on contexts that have ended by then: the batch-invariant mode, the replayed experts, the
observed experts, the slice of a row that this rank computes. They are entered again around the second forward pass, on
the thread of the backward pass. Experts are counted in the first pass only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from etude.errors import UserError
from etude.models import batch_invariant, context_parallel, experts, router_replay, support


def checkpoint_activations(model: PreTrainedModel, *, offload: bool = False) -> None:
    """Makes layers keep only their input, also in evaluation mode; with `offload` in the host's memory, pinned where
    that speeds up copies. Raises UserError for a model whose layers transformers cannot compute again."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        what = type(model).__name__
        raise UserError(f"{what} has no layers that can be computed again: drop trainer.activation_checkpointing")
    noisy = bool(support.noises(model))
    for layer in cast(list[Any], layers):
        # No layer draws random numbers, so their state need not be saved; fetching it from the device takes time.
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)
        again = partial(_without_noise, layer, again) if noisy else again
        layer._gradient_checkpointing_func = partial(_on_host, again) if offload else again
        layer.gradient_checkpointing = layer.training = True  # its parts stay in evaluation mode


def _without_noise(layer: Any, again: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """`again` of a layer that drops hidden states itself, which is in evaluation mode while it is computed."""

    def evaluated(*inputs: Any) -> Any:
        layer.training = False
        try:
            return function(*inputs)
        finally:
            layer.training = True

    return again(evaluated, *args)


def _on_host(again: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    pinned = any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in args)
    with save_on_cpu(pin_memory=pinned):
        return again(function, *args)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _again(batch_invariant.is_on(), context_parallel.current(), router_replay.again())


@contextmanager
def _again(
    exactly: bool, row: context_parallel.RowSlice | None, replay: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    with (
        batch_invariant.batch_invariant(exactly),
        context_parallel.computing(row),
        experts.unobserved(),
        replay(),
    ):
        yield
