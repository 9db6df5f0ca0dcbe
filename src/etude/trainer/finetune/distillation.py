"""Distillation: a smaller model learns a teacher's distribution at every token of the answer, besides the answer.

The loss is that of word-level knowledge distillation (Kim & Rush 2016, arXiv:1606.07947, section 3.1; Hinton et al.
2015, arXiv:1503.02531, without a temperature), a mean over the K labelled tokens of a batch:

    (1 - share) * -log p_student(label)  +  share * KL(p_teacher || p_student)

Both models read the same tokens, the right ones. Where they agree, the divergence and its gradient are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from etude.errors import UserError
from etude.models.head import head_of
from etude.renderers import load_tokenizer
from etude.trainer.finetune import folder
from etude.trainer.finetune.config import DistillConfig, OptimConfig
from etude.trainer.finetune.folder import Packing
from etude.trainer.finetune.packed import PackedPass, hidden_states, own_part
from etude.trainer.finetune.routers import Routers
from etude.trainer.finetune.training_loop import Loss
from etude.trainer.sharding import within
from etude.trainer.world import World

_LOGITS = 2**27  # logits of student and of teacher in memory at a time: 512 MiB each in float32


def check_tokenizers(folders: Sequence[Path]) -> None:
    """Raises UserError unless all are model folders whose tokenizers have the same tokens."""
    for one in folders:
        folder.check(one)
    known = [load_tokenizer(one).get_vocab(with_added_tokens=True) for one in folders]
    if any(vocabulary != known[0] for vocabulary in known):
        raise UserError(f"{folders[0]} and {folders[-1]} have different tokenizers: a teacher must have the student's")


def teacher(config: DistillConfig, optim: OptimConfig, kind: Packing, world: World) -> PreTrainedModel:
    """The frozen teacher, on the student's device, divided and for rows packed like the student's. Raises UserError if
    its context is too short, or if it cannot compute such rows."""
    model = folder.load(config.teacher, optim, world).requires_grad_(False)
    folder.packing_of(model, kind)
    folder.cast(model, folder.computed(model, optim))
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


def loss_function(model: PreTrainedModel, teacher: PreTrainedModel, share: float) -> Callable[[PackedPass], Loss]:
    """Like `packed.loss_function`, with the teacher's share and the figure `loss/kl`. Embeddings may be padded to
    different sizes: tokens beyond the smaller size are ignored."""
    routers = Routers.of(model)

    def compute(part: PackedPass) -> Loss:
        routers.clear()
        part, row = own_part(part)
        with torch.no_grad():
            # The head of a divided teacher stays whole afterwards.
            teacher_KD = within(teacher, partial(hidden_states, teacher, part))
        student_KD = hidden_states(model, part)
        size = min(len(head_of(model).weight_VD), len(head_of(teacher).weight_VD))
        rows = max(64, _LOGITS // size)

        def some(student_CD: Tensor, teacher_CD: Tensor, targets_C: Tensor, weights_C: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                teacher_CV = _logits(teacher, teacher_CD, size)
            both = mixed(_logits(model, student_CD, size), teacher_CV, targets_C, weights_C, share)
            weight = weights_C.sum() / part.total
            return both[0] * weight, both[1] * weight

        tensors = (student_KD, teacher_KD, part.targets_K, part.weights_K)
        if len(student_KD) <= rows:
            loss, divergence = some(*tensors)
        else:
            chunks = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
            parts = [checkpoint(some, *chunk, use_reentrant=False) for chunk in chunks]
            loss, divergence = (torch.stack(values).sum() for values in zip(*parts, strict=True))
        return loss, *routers.balance(loss, row), {"loss/kl": divergence.detach()}

    return compute


def _logits(model: PreTrainedModel, hidden_KD: Tensor, size: int) -> Tensor:
    """Float32 logits [K, size]."""
    head = head_of(model)
    return head.finish(F.linear(hidden_KD, head.weight_VD))[:, :size].float()
