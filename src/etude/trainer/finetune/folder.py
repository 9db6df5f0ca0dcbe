"""The model folder that a stage starts from and the one that it writes: same architecture, tokenizer, template and
types.

Weights are loaded in the types of the files and saved in them, from the float32 masters, in whatever type the stage
computes. Attention is ours if examples share a row and must not see each other, otherwise transformers' own.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
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
from etude.models.loading import check_tensors, load_config, load_model
from etude.models.lora import adapted_layers
from etude.models.segments import Graph, Node
from etude.models.text_models import tensors_beside
from etude.trainer.finetune.config import OptimConfig
from etude.trainer.head import token_logprobs
from etude.weights.preflight import check_before_training

log = logging.getLogger(__name__)

Packing = Literal["isolated", "crossing", "none"]
_KEPT = (
    "tokenizer", "chat_template", "additional_chat_templates", "special_tokens", "added_tokens", "vocab", "merges",
    "preprocessor_config", "processor_config", "video_preprocessor_config", "LICENSE",
)  # fmt: skip
_KEPT_ENDS = (".model", ".tiktoken")


def load(folder: Path, config: OptimConfig) -> PreTrainedModel:
    """The model of a folder on the device, in the types of its files. Raises UserError for a folder that cannot be
    loaded, that the preflight refuses, whose context is shorter than a row, or that lacks layers for adapters."""
    check(folder)
    check_before_training(folder)
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
        model = load_model(folder, dtype=own, device=config.device)
    except (RuntimeError, AssertionError) as e:  # no such device, or too little memory
        raise UserError(f"{folder} cannot be loaded on trainer.device = {config.device!r}: {first_line(e)}") from e
    support.say_noise(model)
    return model


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
    if wanted in ("auto", "isolated"):
        _use(model, attention.NAME, experts.NAME)
        reason = support.refusal(model.config, "shared prompts")
        reason = reason or support.trial(model, "shared prompts", partial(_log_probs, model, True))
        if not reason:
            return "isolated"
        if wanted == "isolated":
            raise UserError(f'examples cannot share a row of this model: set trainer.packing to "none" ({reason})')
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
        hidden_TD = hidden_of(model, graph, isolated=isolated)
        for node, start in zip(graph.nodes, graph.offsets.tolist(), strict=False):
            at = slice(start, start + len(node) - 1)
            targets = node.ids_n[1:]
            logprobs, _ = token_logprobs(head_of(model), hidden_TD[at], np.arange(len(targets)), targets)
            log_probs.append(logprobs.float().cpu().numpy())
    return log_probs


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
    own = main_dtype(model)
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if own == torch.float16 else own


def main_dtype(model: PreTrainedModel) -> torch.dtype:
    """The type of most parameters: some classes keep a few in float32."""
    return max(model.parameters(), key=lambda parameter: parameter.numel()).dtype


@torch.no_grad()
def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Converts the parameters of the model's main type to another; those that its class keeps in float32 stay."""
    own = main_dtype(model)
    for parameter in model.parameters():
        if parameter.dtype == own:
            parameter.data = parameter.data.to(dtype)


def save(
    target: Path,
    model: PreTrainedModel,
    masters: Mapping[str, Tensor],
    types: Mapping[str, torch.dtype],
    tokenizer: Path,
) -> None:
    """Replaces the folder `target` by the model, with `masters` as its weights, each in its type of `types`, and the
    tokenizer's files from the folder `tokenizer`. A reader never sees an incomplete folder. Raises UserError if it
    cannot be written."""
    part, old = (target.with_name(target.name + end) for end in (".incomplete", ".old"))
    shutil.rmtree(part, ignore_errors=True)
    by_place = {p.data_ptr(): masters[name] for name, p in model.named_parameters() if name in masters}
    made: dict[int, Tensor] = {}  # tied weights stay one tensor
    state: dict[str, Tensor] = {}
    live: dict[str, Tensor] = model.state_dict()
    for name, tensor in live.items():
        place = tensor.data_ptr()
        if place not in made:
            made[place] = by_place.get(place, tensor).detach().to("cpu", types.get(name, tensor.dtype))
        state[name] = made[place]
    dtype = max(made.values(), key=lambda tensor: tensor.numel()).dtype
    try:
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
        size = sum(tensor.nbytes for tensor in made.values()) / 1e6
        raise UserError(f"the model cannot be written to {target} ({why}); it takes {size:,.1f} MB") from None
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)
