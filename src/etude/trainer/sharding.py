"""A model whose tensors are divided over ranks: transformers' interface to FSDP2 and expert parallelism, in one place.

Each rank holds consecutive rows (of the first dimension) of every parameter, as the local part of a DTensor. A layer's
whole weights exist while the layer is computed. With expert parallelism a rank computes some experts only, and tokens
travel to them. Gradients are summed over the ranks, not averaged: every loss is divided by counts of the whole batch.

Ranks that only replicate hold the whole model each, and one rank takes the same functions, which do nothing there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardOf
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from etude.errors import UserError
from etude.models import context_parallel, support
from etude.models.dtypes import set_computing_dtype
from etude.models.experts import grouped_products, record_before_dispatch
from etude.models.loading import load_config, load_model
from etude.trainer.checkpoint import rows_of
from etude.trainer.world import World
from etude.weights.ranks import Shard

T = TypeVar("T")
_WORLD = "etude_world"


def load_sharded(path: Path | str, dtype: torch.dtype, world: World) -> PreTrainedModel:
    """The model of a folder, computed in `dtype` on the device of the rank, which reads its rows only. With several
    ranks and bfloat16 the rows are float32, and layers are rounded when they are gathered. Raises UserError as
    `load_model` does, and for an architecture that transformers cannot divide."""
    context_parallel.join(world.context)
    mesh, narrow = world.mesh, dtype != torch.float32
    if world.size > 1 and (why := support.mesh_refusal(load_config(path), mesh)):
        raise UserError(f"{path}: {why}")
    if mesh.shard * mesh.context == 1:
        model = load_model(path, dtype=dtype, device=world.device)
        setattr(model, _WORLD, world)
        return model
    there = torch.accelerator.current_accelerator()
    if there is not None and there.type != torch.device(world.device).type:
        raise UserError(f'several ranks train on the accelerators of a machine: set trainer.device = "{there.type}"')
    try:
        distributed = DistributedConfig(
            dp_replicate_size=mesh.replicate,
            fsdp_size=mesh.shard * mesh.context,
            ep_size=mesh.expert,
            fsdp_mixed_precision=narrow,
        )
        model = load_model(path, distributed=distributed)
    except (ValueError, OSError) as e:
        raise UserError(f"{path} cannot be divided over ranks: {e}") from e
    if narrow and (kept := wide_parameter(model)):
        raise UserError(
            f"{path}: {model.config.model_type} keeps {kept} in float32, which ranks with a part of each tensor would "
            'round to bfloat16: set trainer.dtype = "float32"'
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if getattr(module, "_is_expert_parallel", False):
            record_before_dispatch(module, cast(Any, module).num_experts * mesh.expert)
    set_computing_dtype(model, dtype)
    _share_tied(model)
    for module in (model, *_own_groups(model)):
        cast(Any, module).computed = MethodType(lambda _self, work: work(), module)
        register_fsdp_forward_method(module, "computed")
    setattr(model, _WORLD, world)
    return model


def wide_parameter(model: PreTrainedModel) -> str:
    """A parameter that the architecture computes in float32 beside bfloat16 ones, or "": FSDP2's policy knows one
    type."""
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return next((name for name, _ in model.named_parameters() if any(kept in name for kept in strict)), "")


def _share_tied(model: PreTrainedModel) -> None:
    """Makes tied embeddings one parameter of one FSDP group. transformers ties them after FSDP2 has been applied, so
    that the head would be gathered on its own, from a copy of the rows that the optimizer does not know."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or cast(Any, head).weight is not cast(Any, embeddings).weight:
        return
    for module in model.modules():
        for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            group.fsdp_params = [p for p in group.fsdp_params if p._module_info.module is not head]
            for parameter in group.fsdp_params:
                about = parameter._module_info
                if about.module is embeddings and head not in about.shared_modules:
                    about.shared_modules.append(head)
                    about.shared_param_names.append("weight")
    state = cast(Any, model)._get_fsdp_state()
    state._fsdp_param_groups = [group for group in state._fsdp_param_groups if group.fsdp_params]


def world_of(model: PreTrainedModel) -> World:
    """The ranks that a model is divided over."""
    return getattr(model, _WORLD, None) or World()


def within(model: PreTrainedModel, work: Callable[[], T]) -> T:
    """`work`, which computes with the model's decoder and head, and returns tensors (or tuples of them) that a backward
    pass may begin at. With several ranks the head is whole meanwhile."""
    if not isinstance(model, FSDPModule):
        return work()
    for module in _own_groups(model):
        work = partial(cast(Any, module).computed, work)
    with grouped_products():
        return cast(Any, model).computed(work)


def _own_groups(model: PreTrainedModel) -> list[Any]:
    """The head, where it is gathered on its own, and not with the last norm or with the embeddings."""
    head: Any = model.get_output_embeddings()
    alone = isinstance(head, FSDPModule) and len(cast(Any, head)._get_fsdp_state()._modules) == 1
    return [head] if alone else []


def reshard(model: PreTrainedModel) -> None:
    """Frees whole weights that a pass without backward has left, so that the next pass gathers the present ones."""
    if isinstance(model, FSDPModule):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def last_pass(model: PreTrainedModel, last: bool) -> None:
    """Says before a pass whether it is the last before the gradients are used: sums over replicas wait for it."""
    if isinstance(model, FSDPModule) and world_of(model).mesh.replicate > 1:
        model.set_requires_all_reduce(last)


def rows_only(model: PreTrainedModel) -> bool:
    """Whether this rank holds some rows of the model's tensors; false for a rank with a whole model."""
    return isinstance(model, FSDPModule)


def is_divided(tensor: Tensor) -> bool:
    """Whether this rank holds some rows of a tensor; false for a tensor that every rank holds whole."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds, on the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def computed_experts(tensor: Tensor) -> slice:
    """The experts of a divided weight [E, ...] that this rank computes: all, or with expert parallelism its own."""
    assert isinstance(tensor, DTensor)
    names = tensor.device_mesh.mesh_dim_names or ()
    if "ep" not in names:
        return slice(None)
    index, count = tensor.device_mesh.get_local_rank("ep"), tensor.device_mesh.size(names.index("ep"))
    own = rows_of(tensor.shape[0], index, count)
    return slice(own.start, own.stop)


def own_rows(tensor: Tensor, values: Tensor) -> Tensor:
    """The part of `values`, whole or divided like `tensor`, that belongs to the rows of `tensor` on this rank."""
    if isinstance(values, DTensor) or not isinstance(tensor, DTensor):
        return local(values)
    first = first_row(tensor)
    return values[first : first + len(local(tensor))]


def first_row(tensor: Tensor) -> int:
    """The first row that this rank holds."""
    if not isinstance(tensor, DTensor):
        return 0
    first, total = 0, tensor.shape[0] if tensor.ndim else 1
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    places = list(zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True))
    # Experts are divided first, plainly; FSDP divides each part again, which is a strided placement.
    for placement, index, count in sorted(places, key=lambda place: type(place[0]) is not ShardOf):
        if isinstance(placement, Replicate):
            continue
        if getattr(placement, "dim", None) != 0:
            raise UserError(f"a tensor is divided along dimension {getattr(placement, 'dim', '?')}, not by rows")
        own = rows_of(total, index, count)
        first, total = first + own.start, len(own)
    return first


def shard_of(tensor: Tensor, values: Tensor, world: World) -> Tensor | Shard:
    """`values` of the rows of `tensor` that this rank holds, for checkpoints and versions, where one rank has each row:
    of replicas the first, of tensors that all ranks hold rank 0. The whole tensor, if the rank is alone."""
    if world.size == 1:
        return values
    if not isinstance(tensor, DTensor):
        if world.first:
            return values
        return Shard(values[:0], 0, values.shape[0]) if values.ndim else values.to("meta")
    own = values if world.replica == 0 else values[:0]
    return Shard(own, first_row(tensor), tensor.shape[0])


def whole_on_first(tensor: Tensor, values: Tensor | Shard, dtype: torch.dtype, world: World) -> Tensor | None:
    """`values` of all rows of `tensor` in another type, in the host's memory of rank 0; None on the others. Each rank
    gives its `shard_of`, and sends it to rank 0 alone."""
    if not isinstance(values, Shard):
        return values.detach().to("cpu", dtype) if world.first else None
    if not is_divided(tensor):
        return None
    shard = replace(values, rows=values.rows.detach().to("cpu", dtype).contiguous())
    places = world.gathered((shard.first, len(shard.rows)), tuple[int, int])
    if not world.first:
        if len(shard.rows):
            dist.send(shard.rows.view(torch.uint8), 0, group=world.control)
        return None
    whole = torch.empty((shard.total, *shard.rows.shape[1:]), dtype=dtype)
    for rank, (first, count) in enumerate(places):
        rows = whole[first : first + count]
        if rank == 0:
            rows.copy_(shard.rows)
        elif count:
            dist.recv(rows.view(torch.uint8), rank, group=world.control)
    return whole
