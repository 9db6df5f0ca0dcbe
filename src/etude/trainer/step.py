"""One optimizer step: batch in, updated weights and metrics out. The whole of the algorithm is on this page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch

from etude.config import RLConfig
from etude.trainer.batch import Batch, MicroBatch, pack, unshare
from etude.trainer.loss import Mismatch, composer2
from etude.trainer.optimizer import MasterAdamW

_ENTROPY_STRIDE = 16  # a mean over some thousand tokens is exact enough, and a tenth of the step's time otherwise


def train_step(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    optimizer: MasterAdamW,
    batch: Batch,
    config: RLConfig,
    version: int,
    progress: float,
) -> dict[str, float]:
    """Trains on `batch` with the weights of `version`; returns flat metrics (see `docs/metrics.md`).

    `progress` in [0, 1] is the share of the run that lies behind.

    `reference` scores the k1 penalty and is None when it is off. In deterministic mode rows are not shared and each is
    its own forward pass, so gradients do not depend on how episodes were packed.
    """
    rollout = config.rollout
    normaliser = float(rollout.prompts * rollout.group * rollout.tokens)
    rows = unshare(batch.rows) if config.deterministic else batch.rows
    micro_tokens = 1 if config.deterministic else config.trainer.micro_tokens
    fresh, all_lags, entropy, entropies, loss_sum = Mismatch(), Mismatch(), 0.0, 0, 0.0
    for micro in pack(rows, micro_tokens, config.trainer.device):
        logprobs_N, entropy_M = score(model, micro)
        reference_N = None
        if reference is not None:
            with torch.no_grad():
                reference_N, _ = score(reference, micro)
        loss = composer2(
            logprobs_N, micro.advantages_N, reference_N, kl_beta=config.trainer.kl_beta, normaliser=normaliser
        )
        loss.backward()
        loss_sum += loss.item()
        entropy += entropy_M.sum().item()
        entropies += len(entropy_M)
        detached = logprobs_N.detach()
        all_lags.add(detached, micro.logprobs_N)
        on_policy = micro.versions_N == version
        fresh.add(detached[on_policy], micro.logprobs_N[on_policy])
    trained = all_lags.tokens
    metrics = {"loss/policy": loss_sum, "entropy/mean": entropy / max(entropies, 1)}
    if trained:
        metrics |= optimizer.step(version + 1, progress)
    return metrics | fresh.metrics("mismatch") | all_lags.metrics("off_policy")


def score(model: torch.nn.Module, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability [N] of the sampled tokens, and entropy of every 16th; head and log-softmax in float32."""
    hidden_1TD = model.get_decoder()(
        input_ids=micro.ids_1T, position_ids=micro.positions_1T, layout=micro.layout, use_cache=False
    ).last_hidden_state
    hidden_ND = hidden_1TD[0].index_select(0, micro.source_N)
    head = model.get_output_embeddings()
    logits_NV = torch.nn.functional.linear(hidden_ND.float(), head.weight.float())
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    chosen_N = logprobs_NV.gather(1, micro.target_N[:, None]).squeeze(1)
    with torch.no_grad():
        some_MV = logprobs_NV[::_ENTROPY_STRIDE]
        entropy_M = -(some_MV.exp() * some_MV).sum(-1)
    return chosen_N, entropy_M


def batch_metrics(batch: Batch, version: int) -> dict[str, float | dict[str, int]]:
    """What the episodes of a batch looked like, including the groups that carry no gradient."""
    episodes = batch.flat
    lag: Counter[int] = Counter()
    for episode in episodes:
        for segment in episode.segments:
            _, mask_T, _, versions_T = segment.arrays()
            lag.update((version - versions_T[mask_T == 1]).tolist())
    tokens = sum(lag.values())
    metrics: dict[str, float | dict[str, int]] = {
        "reward/all/mean": _mean(e.reward for e in episodes),
        "reward/all/std": _std([e.reward for e in episodes]),
        "rollout/pass_rate": _mean(float(e.passed) for e in episodes),
        "rollout/episodes": float(len(episodes)),
        "rollout/zero_variance": float(batch.zero_variance),
        "rollout/length": tokens / max(len(episodes), 1),
        "off_policy/mean": sum(k * n for k, n in lag.items()) / max(tokens, 1),
        "off_policy/max": float(max(lag, default=0)),
        "off_policy/histogram": {str(k): n for k, n in sorted(lag.items())},
    }
    for name in sorted({key for e in episodes for key in e.metrics}):
        metrics[f"rollout/{name}"] = _mean(e.metrics.get(name, 0.0) for e in episodes)
    for kind, count in sorted(Counter(e.outcome.value for e in episodes).items()):
        metrics[f"outcome/{kind}"] = float(count)
    for reason, count in sorted(Counter(e.stop_reason.value for e in episodes).items()):
        metrics[f"stop/{reason}"] = float(count)
    return metrics


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _std(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean((v - mean) ** 2 for v in values))
