"""Finds the memory of a checkpoint's tensors in a vLLM model, by watching vLLM's own loader.

vLLM stacks queries, keys and values, gates and ups, and experts; each model's `load_weights` decides the place of each
tensor. So that loader gets placeholder tensors, and every copy into the model's memory is recorded instead of made: its
source identifies the published elements, its destination their place. No table of names per architecture is needed. The
loader cannot know whether a kernel rearranged the memory after loading. So the same loader then gets the checkpoint
that the server was started with, and every copy must find its values there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from etude.errors import UserError
from etude.weights.ulpd import Schema

Run = tuple[int, int, int]
"""A run of elements that are contiguous in source and destination: start in each, and number."""


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


def live_tensors(model: LoadableModel, published: Schema) -> dict[str, torch.Tensor]:
    """The model's own memory under the names and in the shapes of the published tensors. Raises UserError if a tensor
    is incomplete or out of order (several GPUs share it, it was transposed), or if the model has a parameter that no
    published tensor fills."""
    sources = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in published.tensors}
    names = {_storage(tensor): name for name, tensor in sources.items()}
    filled: set[int] = set()
    places: dict[str, list[tuple[Run, torch.Tensor]]] = {name: [] for name in sources}

    def note(there: torch.Tensor, source: torch.Tensor) -> None:
        name = names.get(_storage(source))
        if name is None:
            raise UserError(f"this server's loader does not copy weights as they are; {_HELP}")
        filled.add(_storage(there))
        places[name] += [(run, there) for run in _runs(name, source, there)]

    _load(model, sources.items(), note)
    for name, parameter in model.named_parameters():
        if parameter.numel() and _storage(parameter) not in filled:
            raise UserError(f"no published tensor fills {name}; serve the model that the run trains")
    return {name: _joined(name, sources[name], pieces) for name, pieces in places.items()}


def check_plain(model: LoadableModel, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises UserError unless the model's memory holds the checkpoint's values where its loader puts them."""

    def compare(there: torch.Tensor, source: torch.Tensor) -> None:
        if not torch.equal(_bytes(there), _bytes(source.to(there.device, there.dtype))):
            raise UserError(f"this server rearranged its weights after it had loaded them; {_HELP}")

    _load(model, checkpoint, compare)


def memory(model: LoadableModel) -> frozenset[int]:
    """Addresses of the model's parameters; loading the model anew changes them."""
    return frozenset(_storage(parameter) for _, parameter in model.named_parameters() if parameter.numel())


_HELP = "serve unquantised weights on one device with a backend that keeps them as they are"


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


def _runs(name: str, source: torch.Tensor, there: torch.Tensor) -> Iterator[Run]:
    if source.shape != there.shape:
        raise UserError(f"{name} has shape {tuple(source.shape)}, on this server {tuple(there.shape)}; {_HELP}")
    inner, dims = 1, source.dim()
    while dims and (source.size(dims - 1) == 1 or source.stride(dims - 1) == there.stride(dims - 1) == inner):
        dims -= 1
        inner *= source.size(dims)
    if inner == 1 and source.numel() > 1:
        raise UserError(f"{name} lies transposed in this server; {_HELP}")
    for index in product(*(range(size) for size in source.shape[:dims])):
        yield _offset(source, index), _offset(there, index), inner


def _offset(tensor: torch.Tensor, index: tuple[int, ...]) -> int:
    """Offset in its storage of the first element with these leading indices."""
    return int(tensor.storage_offset()) + sum(i * step for i, step in zip(index, tensor.stride(), strict=False))


def _joined(name: str, source: torch.Tensor, pieces: list[tuple[Run, torch.Tensor]]) -> torch.Tensor:
    """One tensor over all pieces, which are contiguous in both source and destination."""
    pieces = sorted(pieces, key=lambda piece: piece[0])
    reached = 0
    for (first, second, length), there in pieces:
        (begin, start, _), storage = pieces[0][0], pieces[0][1]
        if first != reached or second - first != start - begin or _storage(there) != _storage(storage):
            raise UserError(f"{name} lies in several places of this server; {_HELP}")
        reached += length
    if not pieces or reached != source.numel():
        raise UserError(f"this server has {reached} of {source.numel()} elements of {name}; {_HELP}")
    there = pieces[0][1].detach()
    return there.as_strided(source.shape, source.stride(), pieces[0][0][1])


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
