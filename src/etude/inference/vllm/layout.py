"""Finds the memory of a checkpoint's tensors in a vLLM model, by watching vLLM's own loader.

vLLM stacks queries, keys and values, gates and ups, and experts, and divides them among workers; each model's
`load_weights` decides the place of each tensor. So that loader gets placeholder tensors, and every copy into the
model's memory is recorded instead of made: its source identifies the published elements, its destination their place.
No table of names per architecture is needed. The loader cannot know whether a kernel rearranged the memory after
loading. So the same loader then gets the checkpoint that the server was started with, and every copy must find its
values there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from etude.errors import UserError
from etude.weights.slabs import Slab, Sliced, joined, slab_of
from etude.weights.ulpd import Schema


class LoadableModel(Protocol):
    """The part of a vLLM model that is used here."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Copies a checkpoint into the model."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All parameters by name."""
        ...


class _Copies(TorchDispatchMode):
    """Passes each copy into `memory` to `seen`, destination first, instead of making it."""

    def __init__(self, memory: frozenset[int], seen: Callable[[torch.Tensor, torch.Tensor], None]):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._memory = memory
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and _storage(args[0]) in self._memory:
            self._seen(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


def live_tensors(model: LoadableModel, published: Schema) -> dict[str, Sliced]:
    """The model's own memory of the published tensors, whole ones or slices. Raises UserError if the loader makes other
    tensors of them, or if the model has a parameter that no published tensor fills."""
    sources = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in published.tensors}
    names = {_storage(tensor): name for name, tensor in sources.items()}
    filled: set[int] = set()
    places: dict[str, list[Slab]] = {name: [] for name in sources}

    def note(there: torch.Tensor, source: torch.Tensor) -> None:
        name = names.get(_storage(source))
        if name is None:
            raise UserError(f"this server's loader does not copy weights as they are; {_HELP}")
        filled.add(_storage(there))
        if source.shape != there.shape:
            raise UserError(f"{name} has shape {tuple(source.shape)}, on this server {tuple(there.shape)}; {_HELP}")
        if source.numel():
            places[name].append(_slab(name, source, there))

    _load(model, sources.items(), note)
    for name, parameter in model.named_parameters():
        if parameter.numel() and _storage(parameter) not in filled:
            raise UserError(f"no published tensor fills {name}; serve the model that the run trains")
    return {name: _sliced(name, sources[name], slabs) for name, slabs in places.items()}


def check_plain(model: LoadableModel, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises UserError unless the model's memory holds the checkpoint's values where its loader puts them."""

    def compare(there: torch.Tensor, source: torch.Tensor) -> None:
        if not torch.equal(_bytes(there), _bytes(source.to(there.device, there.dtype))):
            raise UserError(f"this server rearranged its weights after it had loaded them; {_HELP}")

    _load(model, checkpoint, compare)


def memory(model: LoadableModel) -> frozenset[int]:
    """Addresses of the model's parameters; loading the model anew changes them."""
    return frozenset(_storage(parameter) for _, parameter in model.named_parameters() if parameter.numel())


_HELP = "serve unquantised weights with a backend that keeps them as they are"


def _load(
    model: LoadableModel,
    weights: Iterable[tuple[str, torch.Tensor]],
    seen: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    try:
        with torch.no_grad(), _Copies(memory(model), seen):
            model.load_weights(weights)
    except UserError:
        raise
    except Exception as e:  # loaders raise various errors for unknown names and shapes
        why = str(e).partition(". ")[0]  # then vLLM lists all names
        raise UserError(f"the model that is served does not load these weights ({type(e).__name__}: {why})") from e


def _slab(name: str, source: torch.Tensor, there: torch.Tensor) -> Slab:
    slab = slab_of(source, there)
    if slab is None:
        raise UserError(f"{name} lies in several places of this server; {_HELP}")
    return slab


def _sliced(name: str, source: torch.Tensor, slabs: list[Slab]) -> Sliced:
    kinds = {(slab.memory.dtype, slab.memory.device) for slab in slabs}
    if len(kinds) > 1:
        raise UserError(f"{name} lies in memory of several kinds of this server; {_HELP}")
    dtype, device = kinds.pop() if kinds else (source.dtype, source.device)
    return Sliced(tuple(source.shape), joined(slabs), dtype, device)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
