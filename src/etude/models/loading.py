"""Loads models and tokenizers from Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    __version__,
)
from transformers.utils import logging as transformers_logging

from etude.errors import UserError, first_line
from etude.models import attention, experts
from etude.models.dtypes import restore_buffers
from etude.models.files import check_config, check_folder
from etude.models.text_models import auto_class, keep_text

_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "use_cache")


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    distributed: Any = None,
) -> PreTrainedModel:
    """The causal language model of a Hugging Face folder, in evaluation mode, with our attention and experts. Weights
    stored in a narrower type are widened exactly, and buffers stored in float32 stay so. With `distributed`,
    transformers' DistributedConfig, this rank has its part, on its own device. Raises UserError for a folder that is
    missing, incomplete or damaged, or whose architecture transformers does not support."""
    root = Path(path)
    model = _loaded(root, dtype=dtype, **({} if distributed is None else {"distributed_config": distributed}))
    restore_buffers(root, model)
    keep_text(model)
    return model.eval() if distributed is not None else model.to(device).eval()


def check_tensors(path: Path | str) -> PreTrainedModel:
    """The model of a folder without memory, on the meta device. Raises UserError as `load_model` does, for tensors that
    the model lacks, or whose shapes are not its own. Only headers are read, in less than a second."""
    model = _loaded(Path(path), device_map="meta")
    keep_text(model)
    return model


def _loaded(root: Path, **options: Any) -> Any:
    """The model by transformers' loader, with nothing left out. Raises UserError."""
    config = load_config(root)
    transformers_logging.disable_progress_bar()
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # no table of all tensors that do not fit: one is named below
    try:
        model, info = auto_class(config).from_pretrained(
            root,
            config=config,
            attn_implementation=attention.NAME,
            experts_implementation=experts.NAME,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # these are refused below
            output_loading_info=True,
            **options,
        )
    except Exception as e:  # any kind: the values are a user's, the checks transformers'
        raise UserError(f"{root} cannot be loaded as a causal language model: {_why(e)}") from e
    finally:
        transformers_logging.set_verbosity(level)
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info.get(problem):
            name = sorted(key if isinstance(key, str) else str(key[0]) for key in info[problem])[0]
            count = len(info[problem])
            raise UserError(f"{root} does not fit its config.json: {count} {problem.replace('_', ' ')}, e.g. {name}")
    return model


def load_config(path: Path | str) -> PretrainedConfig:
    """The configuration of a complete Hugging Face folder. Raises UserError as `load_model` does."""
    check_folder(Path(path))
    return read_config(Path(path))


def read_config(root: Path) -> PretrainedConfig:
    """The configuration of a folder, whose weights may be missing. Raises UserError for one that is damaged, or of an
    architecture that transformers lacks. Code in the folder is never run."""
    kind, remote = (written := check_config(root))["model_type"], written.get("auto_map")
    if kind not in CONFIG_MAPPING:
        own = f"needs code of its own (auto_map), which is never run: give a model of transformers {__version__}"
        raise UserError(f"{root}: {kind} {own if remote else f'is no model of transformers {__version__}'}")
    try:
        return AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    except Exception as e:  # any kind: the values are a user's, the checks transformers'
        raise UserError(f"{root / 'config.json'} is no configuration of {kind} ({_why(e)})") from e


def _why(error: Exception) -> str:
    """An error of transformers on one line."""
    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return "its attention cannot be replaced by ours"
    if "automatic conversion of the weights" in str(error):
        return "tensors that are joined, as those of experts, are missing or of different sizes"
    text = f"{error} is not known" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return " ".join(text.split())[:300]


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Raises UserError if there is none."""
    root = Path(path)
    if not (root / "tokenizer.json").is_file() and not (root / "tokenizer_config.json").is_file():
        raise UserError(f"{root} has no tokenizer.json: give the folder of a model with its tokenizer")
    if (root / "config.json").is_file():
        read_config(root)
    try:
        return AutoTokenizer.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"the tokenizer in {root} cannot be loaded: {first_line(e)}") from e


def model_id(path: Path | str) -> str:
    """An id of a folder's configuration and vocabulary, not of its weights: 32 hexadecimal digits. Models with
    different ids give the same weights different meanings, even if every shape is equal. Raises UserError."""
    root = Path(path)
    config = load_config(root).to_dict()
    try:
        file = root / "tokenizer.json"
        tokenizer = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{root} cannot be loaded: {first_line(e)}") from e
    meaning = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    vocabulary = {name: tokenizer.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
    return blake3.blake3(json.dumps([meaning, vocabulary], sort_keys=True).encode()).hexdigest()[:32]


def named_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The live tensors by name, sorted; tied weights once, without buffers that are not saved."""
    saved = model.state_dict().keys()
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(sorted(tensors.items()))
