"""A stand-in for GPUs: the devices "fakegpu:0" and "fakegpu:1", whose tensors lie in the host's memory and can be
reached by no other.

Values are computed by the host's kernels, so they can be compared with the host's. What a GPU does not do fails here
with the same kinds of errors, or gives values that no test takes for right:

    tensors of two devices together     refused, but for copies and numbers (tensors without dimensions)
    `.numpy()` and a host's generator   refused
    memory that nobody has written      is not a number
    copies with `non_blocking`          to the device: read at the next operation there. To the host: not a number until
                                        the host waits for the device
    deterministic algorithms            refused where CUDA has none, and products without CUBLAS_WORKSPACE_CONFIG
    products of integers                refused

What it cannot show: speed, the sums of other kernels, several streams. Pageable and pinned memory are the same to it.

The device is PyTorch's PrivateUse1 backend for Python (torch/utils/backend_registration.py), which gives autograd a
device guard; its tensors are wrappers without memory of their own. Nothing of PyTorch is replaced that others keep
references to: transformers' loading takes `torch.tensor` for another function once it has been replaced.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "fakegpu"
aten = torch.ops.aten

# Functions that take host tensors beside device tensors on a GPU, too: copies, and the indices of `x[i]`.
_COPIES = {aten.copy_.default, aten._to_copy.default}
_INDEXED = {
    aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default,
}  # fmt: skip
# Functions that wait for the device: the host needs a value, or a size that depends on values.
_SYNCS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_consecutive.default, aten.bincount.default, aten.equal.default, aten.is_nonzero.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip
_EMPTY = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten._grouped_mm.default}
# torch.use_deterministic_algorithms names these as those that raise an error for CUDA tensors.
_UNORDERED = {
    aten.put_.default, aten.histc.default, aten.median.dim, aten.nll_loss2d_forward.default,
}  # fmt: skip

_late_reads: list[Callable[[], object]] = []  # of the host's memory, by copies to the device
_late_writes: list[Callable[[], object]] = []  # to the host's memory
_syncs: Counter[str] = Counter()


class Backend(_DummyBackendModule):
    """What `torch.fakegpu` is. An exception in a backward pass, which runs on the device's thread, ends the process."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Activation checkpointing asks for it."""
        return [torch.bfloat16]


class DeviceError(RuntimeError):
    """What a GPU would refuse."""


class FakeGpuTensor(torch.Tensor):
    """A tensor on a stand-in device; `host` holds its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, index: int = 0, requires_grad: bool = False) -> FakeGpuTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.size(), host.stride(), host.storage_offset(), dtype=host.dtype, layout=host.layout,
            device=torch.device(NAME, index), requires_grad=requires_grad,
        )  # fmt: skip
        made.host = host.detach()
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        """Values in the host's memory; PyTorch does not let subclasses have it."""
        return self.to("cpu").tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FakeGpuTensor({self.host!r})"


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of tensors on the device, or one that makes them."""
    flat = _flat((*args, *kwargs.values()))
    there = [x for x in flat if isinstance(x, FakeGpuTensor)]
    devices = [x for x in flat if isinstance(x, torch.device)]
    to_host = any(x.type != NAME for x in devices) or (
        func is aten.copy_.default and not isinstance(args[0], FakeGpuTensor)
    )
    later = bool(kwargs.get("non_blocking") or (func is aten.copy_.default and len(args) > 2 and args[2]))
    _check(func, args, kwargs, flat, there)
    if there:
        _finish(_late_reads)
    if (to_host and func in _COPIES and not later) or func in _SYNCS or _by_mask(func, args):
        _finish(_late_writes)
        _syncs[f"{func} in {_caller()}"] += 1
    index = there[0].device.index if there else 0
    index = next((x.index or 0 for x in devices if x.type == NAME), index)
    if later:
        return _copied_later(func, args, kwargs, index, to_host)
    out = func(*map(_host, args), **{name: _host(x) for name, x in kwargs.items()})
    if func in _EMPTY:
        _spoil(out)
    if func is aten.copy_.default:
        return args[0]
    if to_host or not isinstance(out, torch.Tensor | tuple | list):
        return out
    if isinstance(out, torch.Tensor):
        out = FakeGpuTensor(out, index)
    else:
        out = [FakeGpuTensor(x, index) if isinstance(x, torch.Tensor) else x for x in out]
    return return_and_correct_aliasing(func, args, kwargs, out) if there else out


def _flat(values: Iterable[Any]) -> list[Any]:
    """The values, and of lists their elements."""
    return [x for value in values for x in (value if isinstance(value, list | tuple) else (value,))]


def _copied_later(func: Any, args: Any, kwargs: Any, index: int, to_host: bool) -> torch.Tensor:
    """A copy for which the host does not wait."""
    if func is aten.copy_.default:
        result, target, source = args[0], _host(args[0]), _host(args[1])
    else:
        source = _host(args[0])
        target = torch.empty_like(source, dtype=kwargs.get("dtype") or source.dtype)
        result = target if to_host else FakeGpuTensor(target, index)
    if to_host:  # what the device has now, in the host's memory when the host has waited
        _late_writes.append(partial(target.copy_, source.clone()))
    else:  # what the host has when the device gets there
        _late_reads.append(partial(target.copy_, source))
    _spoil(target)
    return result


def _finish(late: list[Callable[[], object]]) -> None:
    while late:
        late.pop(0)()


def _spoil(x: torch.Tensor) -> None:
    """Makes of it memory that nobody has written."""
    if x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype is not torch.bool:
        x.fill_(torch.iinfo(x.dtype).max)


def _check(func: Any, args: Any, kwargs: Any, flat: list[Any], there: list[FakeGpuTensor]) -> None:
    """Raises DeviceError for what a GPU does not do."""
    if func not in _COPIES:
        together = _flat((args[0], *args[2:])) if func in _INDEXED else flat
        tensors = [x for x in together if isinstance(x, torch.Tensor)]
        if there and any(x.ndim and not isinstance(x, FakeGpuTensor) for x in tensors):
            places = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors if x.ndim)
            raise DeviceError(f"{func}: expected all tensors on one device, but got {places}")
        if len({x.device for x in tensors if x.ndim and isinstance(x, FakeGpuTensor)}) > 1:
            raise DeviceError(f"{func}: expected all tensors on one device, but got two of {NAME}")
    if isinstance(kwargs.get("generator"), torch.Generator):
        raise DeviceError(f"{func}: expected a generator of {NAME}, but got one of the host")
    if func in _PRODUCTS and not all(x.dtype.is_floating_point for x in there[:2]):
        raise DeviceError(f"{func}: not implemented for {there[0].dtype}")
    if torch.are_deterministic_algorithms_enabled():
        weights = func is aten.bincount.default and len(args) > 1 and args[1] is not None
        sums = func is aten.cumsum.default and args[0].dtype.is_floating_point
        if weights or sums or func in _UNORDERED:
            raise DeviceError(f"{func} has no deterministic implementation")
        if func in _PRODUCTS and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
            raise DeviceError(f"{func}: deterministic behavior needs CUBLAS_WORKSPACE_CONFIG=:4096:8")


def _by_mask(func: Any, args: Any) -> bool:
    """Whether a tensor is indexed by a mask, whose count the host must know."""
    return func in _INDEXED and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _caller() -> str:
    """The line of etude that waits."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not frame.f_globals.get("__name__", "").startswith("etude."):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}:{frame.f_lineno}"


def _host(x: Any) -> Any:
    """What the host computes with in place of a tensor, or of the device."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if isinstance(x, list | tuple):
        return [_host(one) for one in x]
    return x.host if isinstance(x, FakeGpuTensor) else x


@cache
def _register() -> list[torch.library.Library]:
    _setup_privateuseone_for_python_backend(NAME, Backend())
    everything, copies = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    # PyTorch has one for all backends, which would go before a fallback and needs memory to copy to.
    copies.impl("_to_copy", partial(_run, aten._to_copy.default), "PrivateUse1")
    return [everything, copies]


def _moved(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`Module.to`, which keeps parameters shared on a GPU, and would make copies of those of a wrapper."""
    shared: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    _module_to(module, *args, **kwargs)
    for first, *others in shared.values():
        for name in others:
            path, _, own = name.rpartition(".")
            setattr(module.get_submodule(path), own, module.get_parameter(first))
    return module


_module_to = torch.nn.Module.to


def _without_gradients(self: Any) -> None:
    self.without = torch.no_grad()
    self.without.__enter__()


def _with_gradients_again(self: Any, *error: Any) -> None:
    self.without.__exit__(*error)


@contextmanager
def fakegpu() -> Iterator[Counter[str]]:
    """Inside, tensors can be made on the devices; yields the count of host syncs by function and line. The first use
    must come before the first backward pass of the process, when autograd makes a queue for each kind of device."""
    _register()
    _syncs.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "to", _moved)
        # Wrappers cannot be views of inference tensors.
        patch.setattr(torch.inference_mode, "__enter__", _without_gradients)
        patch.setattr(torch.inference_mode, "__exit__", _with_gradients_again)
        yield _syncs
