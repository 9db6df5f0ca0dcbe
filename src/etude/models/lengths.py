"""Lengths at which a model begins to compute differently: windows of attention, long rotary frequencies (LongRoPE,
arXiv:2402.13753), scales of queries that grow by position. A trial makes them shorter, so that short rows cross them:
in every class that reads them in its forward pass this is the same computation with another constant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

_ROPE = "original_max_position_embeddings"
_NAMES = ("sliding_window", "sliding_window_size", "window_size", "attention_window", "floor_scale", _ROPE)
_Place = tuple[Any, str, int]


def lengths(config: PretrainedConfig) -> list[int]:
    """The lengths in a configuration, sorted. Those of rotary frequencies that are fixed at loading are among them."""
    return sorted(length for _, _, length in _places([config.get_text_config()]))


def _places(owners: list[Any]) -> list[_Place]:
    """Objects and tables with the names and values of their lengths."""
    places: list[_Place] = []
    for owner in owners:
        for name in _NAMES:
            value = vars(owner).get(name)
            if isinstance(value, int) and value > 0:
                places.append((owner, name, value))
        rope = vars(owner).get("rope_parameters")
        for table in [rope, *rope.values()] if isinstance(rope, dict) else []:
            if isinstance(table, dict) and isinstance(value := table.get(_ROPE), int):
                places.append((table, _ROPE, value))
    return places


@contextmanager
def shortened(model: PreTrainedModel, to: int) -> Iterator[None]:
    """A context in which no length is above `to` tokens, in configurations and layers. Rotary frequencies that were
    computed meanwhile are forgotten afterwards."""
    parts = {id(o): o for m in (model, *model.modules()) for o in (m, getattr(m, "config", None)) if o is not None}
    places = _places(list(parts.values()))
    rotary = [m for m in model.modules() if any(name.endswith("inv_freq") for name in m._buffers)]
    states = [(m, dict(vars(m)), {n: (b, b.clone()) for n, b in m._buffers.items() if b is not None}) for m in rotary]
    try:
        for owner, name, length in places:
            _set(owner, name, min(length, to))
        yield
    finally:
        for module, state, buffers in states:
            vars(module).clear()
            vars(module).update(state)
            for name, (buffer, values) in buffers.items():
                module._buffers[name] = buffer.copy_(values)
        for owner, name, length in places:
            _set(owner, name, length)


def _set(owner: Any, name: str, value: int) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)
