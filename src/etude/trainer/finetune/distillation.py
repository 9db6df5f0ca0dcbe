"""Distillation: a smaller model learns a teacher's distribution at every token of the answer, beside the answer.

The loss is that of word-level knowledge distillation (Kim & Rush 2016, arXiv:1606.07947, section 3.1; Hinton et al.
2015, arXiv:1503.02531, without a temperature), a mean over the K labelled tokens of a batch:

    (1 - share) * -log p_student(label)  +  share * KL(p_teacher || p_student)

Both models read the same tokens, the right ones. The divergence is 0, and so is its gradient, where they agree.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from etude.corpus import tokenizer as bpe
from etude.errors import UserError
from etude.trainer.finetune import pretrain
from etude.trainer.finetune.config import ApplyConfig, NewModelConfig
from etude.trainer.finetune.loop import Loss
from etude.trainer.finetune.routers import Routers


def tokenizer_folder(config: ApplyConfig) -> Path:
    """The folder whose tokenizer the student has. Raises UserError if it is no model folder, or if the teacher's is
    none or has another tokenizer."""
    folders = [] if isinstance(config.model, NewModelConfig) else [config.model]
    folders += [config.distill.teacher] if config.distill else []
    for folder in folders:
        if not (folder / "tokenizer.json").is_file() or not (folder / "config.json").is_file():
            raise UserError(f"{folder} is not a model folder: give one with a config.json and a tokenizer.json")
    if len({bpe.load(folder).to_str() for folder in folders}) > 1:
        raise UserError(f"{folders[0]} and {folders[1]} have different tokenizers: a teacher must have the student's")
    return folders[0]


def student(config: ApplyConfig) -> PreTrainedModel:
    """The model to train, in bfloat16: that of a folder, or a new one."""
    if isinstance(config.model, NewModelConfig):
        return pretrain.new_model(config.model, config.seed)
    return AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.bfloat16)


def teacher(config: ApplyConfig) -> PreTrainedModel:
    """The frozen teacher, in bfloat16. Raises UserError if its vocabulary or its context does not fit the student."""
    assert config.distill is not None
    folder = config.distill.teacher
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)
    size, context = model.config.vocab_size, model.config.max_position_embeddings
    if isinstance(config.model, NewModelConfig) and config.model.vocab_size != size:
        raise UserError(f"model.vocab_size = {config.model.vocab_size}, and {folder} has {size}: use the latter")
    if context < config.optim.length:
        raise UserError(f"{folder} has a context of {context} tokens: lower optim.length to it")
    if config.optim.compile:
        model.set_experts_implementation("grouped_mm")
    return model


def mixed(
    student_KV: Tensor, teacher_KV: Tensor, targets_K: Tensor, weights_K: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """(loss, divergence) of float logits, each a mean over the K tokens by `weights_K`."""
    student_KV, teacher_KV = student_KV.log_softmax(-1), teacher_KV.log_softmax(-1)
    losses_K = F.nll_loss(student_KV, targets_K, reduction="none")
    kl_K = F.kl_div(student_KV, teacher_KV, reduction="none", log_target=True).sum(-1)
    total = weights_K.sum().clamp_min(1)
    divergence = (kl_K * weights_K).sum() / total
    return (1 - share) * (losses_K * weights_K).sum() / total + share * divergence, divergence


def loss_function(model: PreTrainedModel, teacher: PreTrainedModel, share: float) -> Callable[..., Loss]:
    """Like `packed.loss_function`, with the teacher's share and the figure `loss/kl`."""
    routers = Routers.of(model)

    def compute(ids_BT: Tensor, index_K: Tensor, targets_K: Tensor, weights_K: Tensor) -> Loss:
        routers.clear()
        with torch.no_grad():
            teacher_KV = _logits(teacher, ids_BT, index_K)
        loss, divergence = mixed(_logits(model, ids_BT, index_K), teacher_KV, targets_K, weights_K, share)
        return loss, *routers.balance(loss), {"loss/kl": divergence.detach()}

    return compute


def _logits(model: PreTrainedModel, ids_BT: Tensor, index_K: Tensor) -> Tensor:
    """Float32 [K, V] at the flat positions `index_K`."""
    hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return model.lm_head(hidden_BTD.flatten(0, 1)[index_K]).float()
