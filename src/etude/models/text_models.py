"""The text model inside of a multimodal one: its decoder and its output embeddings, under the names of the whole.

A multimodal folder is loaded by its own class, whose other parts (encoders of images or sound, projectors) are dropped
after loading: what is trained, served and published is text alone. A folder that is written later gets the tensors of
these parts from the folder that was loaded, unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from etude.models.dtypes import live_names


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether the configuration holds one of a text model beside others."""
    return config.get_text_config() is not config


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that loads a folder of this configuration whole."""
    known = is_multimodal(config) and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if known else AutoModelForCausalLM


def keep_text(model: PreTrainedModel) -> None:
    """Drops the parts of a multimodal model that a pass over text does not read, in place."""
    if not is_multimodal(model.config):
        return
    kept = {id(part) for part in (model.get_decoder(), model.get_output_embeddings())}
    holders = [model] if model.base_model is model else [model, model.base_model]
    for holder in holders:
        for name, part in list(holder.named_children()):
            if kept.isdisjoint(id(inner) for inner in part.modules()):
                setattr(holder, name, None)


def tensors_beside(root: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors in the files of the multimodal folder `root` that are not of the text model `model`, by their names
    there; {} for a folder of text alone."""
    if not is_multimodal(model.config):
        return {}
    live = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for tensor, name in live_names(root, model):
        if name not in live:
            with safe_open(tensor.file, "pt") as file:
                tensors[tensor.name] = file.get_tensor(tensor.name)
    return tensors
