"""Training on packed rows: fixed-shape batches, so that a compiled step is compiled once, and their loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from etude.corpus import packing
from etude.errors import UserError
from etude.trainer.finetune.config import OptimConfig
from etude.trainer.finetune.loop import Loss, StageRun, TrainingWork, fit
from etude.trainer.finetune.routers import Routers


@dataclass(frozen=True)
class PackedBatches(Sequence[tuple[Tensor, ...]]):
    """Fixed-shape batches of rows: labelled positions are gathered and padded to the same `width` in every batch. Batch
    i is (ids_BT, index_K, targets_K, weights_K), the arguments of `loss_function`'s result."""

    rows: packing.Rows
    batch: int
    width: int

    @classmethod
    def of(cls, rows: packing.Rows, batch: int) -> PackedBatches:
        """Batches of `batch` rows each; the last rows that do not fill one are left out. Raises UserError."""
        if len(rows.ids) < batch:
            raise UserError(f"the corpus gives {len(rows.ids)} rows, less than a batch of {batch}; give it more code")
        whole = len(rows.ids) // batch
        counts = rows.mask[: whole * batch, 1:].reshape(whole, -1).sum(axis=1, dtype=np.int64)
        return cls(rows, batch, min(-(-int(counts.max()) // 64) * 64, batch * (rows.ids.shape[1] - 1)))

    def __len__(self) -> int:
        return len(self.rows.ids) // self.batch

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        at = slice(index * self.batch, (index + 1) * self.batch)
        ids_BT, mask_BT = self.rows.ids[at].astype(np.int64), self.rows.mask[at].astype(bool)
        ahead = np.zeros_like(mask_BT)
        ahead[:, :-1] = mask_BT[:, 1:]
        labelled = np.flatnonzero(ahead)
        index_K, weights_K = np.zeros(self.width, dtype=np.int64), np.zeros(self.width, dtype=np.float32)
        index_K[: len(labelled)], weights_K[: len(labelled)] = labelled, 1.0
        targets_K = np.roll(ids_BT, -1, axis=1).reshape(-1)[index_K]
        return tuple(torch.from_numpy(a) for a in (ids_BT, index_K, targets_K, weights_K))


def loss_function(model: PreTrainedModel) -> Callable[..., Loss]:
    """A function (ids_BT, index_K, targets_K, weights_K) -> (token loss, router balance, expert load [L, E], {}).
    Logits are computed only at the flat positions `index_K`, which are those that predict a labelled token; `weights_K`
    is 0 on padding."""
    routers = Routers.of(model)

    def compute(ids_BT: Tensor, index_K: Tensor, targets_K: Tensor, weights_K: Tensor) -> Loss:
        routers.clear()
        hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        logits_KV = model.lm_head(hidden_BTD.flatten(0, 1)[index_K])
        losses_K = F.cross_entropy(logits_KV.float(), targets_K, reduction="none")
        loss = (losses_K * weights_K).sum() / weights_K.sum().clamp_min(1)
        return loss, *routers.balance(loss), {}

    return compute


@torch.no_grad()
def evaluate_loss(compute: Callable[..., Loss], batches: PackedBatches) -> float:
    """Mean token loss over all batches, weighted by labelled tokens."""
    total = count = 0.0
    for index in range(len(batches)):
        batch = batches[index]
        labelled = float(batch[-1].sum())
        total += float(compute(*batch)[0]) * labelled
        count += labelled
    return total / max(count, 1.0)


def train(
    model: PreTrainedModel,
    rows: packing.Rows,
    held_out: packing.Rows | None,
    config: OptimConfig,
    run: StageRun,
    *,
    measure: Callable[[PreTrainedModel], dict[str, float]] | None = None,
    compute: Callable[..., Loss] | None = None,
) -> PreTrainedModel:
    """Trains on all rows once, in order, by `compute` if it is given, else by `loss_function`. See `loop.fit`. With
    every checkpoint the loss on the rows `held_out` is measured, and `measure` adds its figures."""
    torch.set_num_threads(config.threads)
    tests = PackedBatches.of(held_out, config.batch) if held_out is not None else None
    eager = loss_function(model) if compute is None else compute

    def evaluate() -> dict[str, float]:
        loss = {} if tests is None else {"eval/heldout/loss": evaluate_loss(eager, tests)}
        return loss if measure is None else loss | measure(model)

    work = TrainingWork(
        PackedBatches.of(rows, config.batch),
        config.batch * rows.ids.shape[1],
        torch.compile(eager) if config.compile else eager,
        evaluate,
    )
    return fit(model, work, config, run)
