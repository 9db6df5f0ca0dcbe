"""The model folder that a stage starts from and the one that it writes: same architecture, tokenizer, template and
types.

Weights are loaded in the types of the files and saved in them, from the float32 masters, in whatever type the stage
computes. Attention is ours if examples share a row and must not see each other, otherwise transformers' own.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from etude.errors import UserError, first_line
from etude.models import attention, check_folder, context_parallel, dtypes, experts, support
from etude.models.attention import SegmentLayout
from etude.models.head import head_of
from etude.models.key_values import positions
from etude.models.loading import check_tensors, load_config
from etude.models.lora import adapted_layers
from etude.models.segments import Graph, Node
from etude.models.text_models import tensors_beside
from etude.trainer.finetune.config import OptimConfig
from etude.trainer.head import token_logprobs
from etude.trainer.sharding import load_sharded, local, reshard, rows_only, shard_of, whole_on_first, within, world_of
from etude.trainer.world import World
from etude.weights.preflight import check_before_training
from etude.weights.ranks import Shard

log = logging.getLogger(__name__)

Packing = Literal["isolated", "crossing", "none"]
_KEPT = (
    "tokenizer", "chat_template", "additional_chat_templates", "special_tokens", "added_tokens", "vocab", "merges",
    "preprocessor_config", "processor_config", "video_preprocessor_config", "LICENSE",
)  # fmt: skip
_KEPT_ENDS = (".model", ".tiktoken")


def load(folder: Path, config: OptimConfig, world: World) -> PreTrainedModel:
    """The model of a folder on the device, in the types of its files, or this rank's rows of it. Raises UserError for a
    folder that cannot be loaded, that the preflight refuses, whose context is shorter than a row, that lacks layers for
    adapters, or whose rows ranks cannot compute together."""
    check(folder)
    check_before_training(folder)
    if why := support.context_refusal(load_config(folder), config.mesh.context):
        raise UserError(why)
    if config.length > (most := positions(load_config(folder))):
        raise UserError(f"{folder} has a context of {most} tokens: lower trainer.length to it")
    own = dtypes.main_dtype(folder)
    if config.lora is not None and config.dtype != "float32" and own not in (torch.float32, torch.bfloat16):
        raise UserError('adapters leave weights in float16 as they are: set trainer.dtype = "float32"')
    if config.lora is not None and config.dtype == "bfloat16" and own == torch.float32:
        raise UserError('adapters leave weights as they are, and trainer.dtype = "bfloat16" would round them: drop it')
    if config.lora is not None:
        adapted_layers(check_tensors(folder), config.lora.targets)
    try:
        model = load_sharded(folder, held(own, config), world)
    except (RuntimeError, AssertionError) as e:  # no such device, or too little memory
        raise UserError(f"{folder} cannot be loaded on trainer.device = {config.device!r}: {first_line(e)}") from e
    if world.first:
        support.say_noise(model)
    return model


def held(own: torch.dtype, config: OptimConfig) -> torch.dtype:
    """The type in which a model of the type `own` is loaded: that type, if masters are made of the weights of each
    rank; the computed type, if the rows of a divided model are the masters."""
    whole = config.mesh.shard * config.mesh.context == 1
    return own if whole else _computed(own, config)


def check(folder: Path) -> None:
    """Raises UserError unless the folder has a complete model and a tokenizer."""
    if not (folder / "tokenizer.json").is_file() or not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a model folder: give one with a config.json and a tokenizer.json")
    check_folder(folder)


def types_of(folder: Path, model: PreTrainedModel) -> dict[str, torch.dtype]:
    """The types in a folder's files, by the names of the model's tensors."""
    return dtypes.published_dtypes(folder, model, torch.float32)


def packing_of(model: PreTrainedModel, wanted: str) -> Packing:
    """The packing of rows: `wanted`, or for "auto" isolated if our forward pass over several examples agrees with
    transformers' over each. An isolated model gets our attention and experts, any other transformers'. Raises UserError
    if the wanted packing, or the logits of the model, cannot be computed exactly."""
    try:
        return _packing_of(model, wanted)
    finally:
        reshard(model)


def _packing_of(model: PreTrainedModel, wanted: str) -> Packing:
    if wanted in ("auto", "isolated"):
        _use(model, attention.NAME, experts.NAME)
        reason = support.refusal(model.config, "shared prompts")
        reason = reason or support.trial(model, "shared prompts", partial(_log_probs, model, True))
        if not reason:
            return "isolated"
        if wanted == "isolated":
            raise UserError(f'examples cannot share a row of this model: set trainer.packing to "none" ({reason})')
        if not context_parallel.alone():
            raise UserError(f"ranks compute only shared rows together: set trainer.mesh.context to 1 ({reason})")
        log.warning("examples do not share rows, each is a pass of its own: %s", reason)
    reason = ""
    for implementation in ("sdpa", "eager") if model._supports_sdpa else ("eager",):
        _use(model, implementation, "grouped_mm")
        reason = support.trial(model, "rows", partial(_log_probs, model, False))
        if not reason:
            return "crossing" if wanted == "crossing" else "none"
    raise UserError(reason)


def _use(model: PreTrainedModel, attending: str, mixing: str) -> None:
    """Sets the implementations of attention and, in a sparse model, of experts."""
    model.set_attn_implementation(attending)
    _mix(model, mixing)


def use_own_experts(model: PreTrainedModel) -> None:
    """Sets our implementation of experts, the one that knows adapters."""
    _mix(model, experts.NAME)


def _mix(model: PreTrainedModel, mixing: str) -> None:
    with suppress(ValueError):  # a dense model has none
        model.set_experts_implementation(mixing)


def _log_probs(model: PreTrainedModel, isolated: bool, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Log-probabilities [T - 1] of each row's ids after the first, as the stages compute them: together or one by
    one."""
    graphs = [Graph(tuple(map(Node, rows)))] if isolated else [Graph((Node(row),)) for row in rows]
    log_probs: list[np.ndarray] = []
    for graph in graphs:
        logprobs_T = within(model, partial(_next_log_probs, model, graph, isolated)).cpu().numpy()
        for node, start in zip(graph.nodes, graph.offsets.tolist(), strict=False):
            log_probs.append(logprobs_T[start : start + len(node) - 1])
    reshard(model)
    return log_probs


def _next_log_probs(model: PreTrainedModel, graph: Graph, isolated: bool) -> Tensor:
    """Log-probability [T] of the token behind each token in the layout, also behind the last one of a node."""
    hidden_SD = hidden_of(model, graph, isolated=isolated)
    here = context_parallel.row_slice(graph.length).here
    of_S, target_S = np.arange(here.stop - here.start), np.roll(graph.ids_T, -1)[here]
    logprobs_T = torch.zeros(graph.length, device=hidden_SD.device)
    logprobs_T[here] = token_logprobs(head_of(model), hidden_SD[: len(of_S)], of_S, target_S)[0].float()
    return context_parallel.total(logprobs_T)


def hidden_of(model: PreTrainedModel, graph: Graph, *, isolated: bool) -> Tensor:
    """Last hidden states [T, D] of a row: the nodes of the graph, under its mask if isolated, else one causal row.
    Where ranks compute rows together, those of this rank's slice (`context_parallel.row_slice`)."""
    row = context_parallel.row_slice(graph.length)
    options: dict[str, Any] = {"layout": SegmentLayout(graph)} if isolated else {}
    ids_1T, positions_1T = (
        torch.from_numpy(row.cut(x))[None].to(model.device) for x in (graph.ids_T, graph.positions_T)
    )
    if isolated or row.ranks > 1:
        options["position_ids"] = positions_1T
    with few_shapes(model), context_parallel.computing(row):
        return model.get_decoder()(input_ids=ids_1T, use_cache=False, **options).last_hidden_state[0]


def few_shapes(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """A context in which experts in bfloat16 on a CPU have few shapes; see `experts.few_shapes`."""
    return experts.few_shapes() if model.dtype == torch.bfloat16 and model.device.type == "cpu" else nullcontext()


def pad_of(model: PreTrainedModel) -> int:
    """An id for padding, which no token sees and no loss includes."""
    config = model.config.get_text_config()
    ids = [config.pad_token_id, config.eos_token_id]
    first = next((i for i in ids if i is not None), 0)
    return first[0] if isinstance(first, list) else first


def computed(model: PreTrainedModel, config: OptimConfig) -> torch.dtype:
    """The type that the stage computes in."""
    return _computed(dtypes.computing_dtype(model), config)


def _computed(own: torch.dtype, config: OptimConfig) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if own == torch.float16 else own


def main_dtype(model: PreTrainedModel) -> torch.dtype:
    """The type of most parameters as they are held: some classes keep a few in float32."""
    return max(model.parameters(), key=lambda parameter: parameter.numel()).dtype


@torch.no_grad()
def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Converts the parameters of the model's main type to another; those that its class keeps in float32 stay, and the
    rows of a divided model, which passes round."""
    if rows_only(model):
        return
    own = main_dtype(model)
    for parameter in model.parameters():
        if parameter.dtype == own:
            parameter.data = parameter.data.to(dtype)


def save(
    target: Path,
    model: PreTrainedModel,
    masters: Mapping[str, Tensor | Shard],
    types: Mapping[str, torch.dtype],
    tokenizer: Path,
) -> None:
    """Replaces the folder `target` by the model, with `masters` as its weights, each in its type of `types`, and the
    tokenizer's files from the folder `tokenizer`. A reader never sees an incomplete folder. Every rank gives its part
    of the masters, and rank 0 writes. Raises UserError if it cannot be written."""
    world = world_of(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_place = {id(p): masters[name] for name, p in model.named_parameters() if name in masters}
    made: dict[int, Tensor | None] = {}  # tied weights stay one tensor
    state: dict[str, Tensor] = {}
    live: dict[str, Tensor] = model.state_dict()
    for name, tensor in live.items():
        place = id(parameters.get(name, tensor))
        if place not in made:
            values = by_place[place] if place in by_place else shard_of(tensor, local(tensor), world)
            made[place] = whole_on_first(tensor, values, types.get(name, tensor.dtype), world)
        if (whole := made[place]) is not None:
            state[name] = whole
    world.only_first(lambda: _write(target, model, state, tokenizer))


def _write(target: Path, model: PreTrainedModel, state: dict[str, Tensor], tokenizer: Path) -> None:
    part, old = (target.with_name(target.name + end) for end in (".incomplete", ".old"))
    shutil.rmtree(part, ignore_errors=True)
    dtype = max(state.values(), key=lambda tensor: tensor.numel()).dtype
    size = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in state.values()}.values()) / 1e6
    try:
        with _written_alone(model):
            model.save_pretrained(part, state_dict=state | tensors_beside(tokenizer, model))
        written = json.loads((part / "config.json").read_text())
        written["dtype"] = str(dtype).removeprefix("torch.")
        (part / "config.json").write_text(json.dumps(written, indent=2) + "\n")
        for file in sorted(tokenizer.iterdir()):
            if file.name.startswith(_KEPT) or file.name.endswith(_KEPT_ENDS):
                (shutil.copytree if file.is_dir() else shutil.copy)(file, part / file.name)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(part, ignore_errors=True)
        why = (e.strerror if isinstance(e, OSError) else None) or first_line(e)
        raise UserError(f"the model cannot be written to {target} ({why}); it takes {size:,.1f} MB") from None
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _written_alone(model: PreTrainedModel) -> Iterator[None]:
    """A context in which transformers writes the tensors that it is given, without collectives."""
    config: Any = model.config
    divided = getattr(config, "distributed_config", None)
    if divided is None:
        yield
        return
    try:
        config.distributed_config = None
        yield
    finally:
        config.distributed_config = divided
