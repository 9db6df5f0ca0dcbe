"""One optimizer step: batch in, updated weights and metrics out. The whole of the algorithm is on this page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import torch

from etude.config import RLConfig
from etude.trainer.batch import Batch, collate, token_rows
from etude.trainer.execution import evaluate, run
from etude.trainer.loss import Mismatch, composer2
from etude.trainer.memory import peak_bytes, reset_peak
from etude.trainer.optimizer import MasterAdamW
from etude.trainer.plan import Plan, TokenRows, plan, shape_of
from etude.trainer.selfcheck import check


def train_step(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    optimizer: MasterAdamW,
    batch: Batch,
    config: RLConfig,
    version: int,
    progress: float,
    checked: set[str],
) -> dict[str, float]:
    """Trains on `batch` with the weights of `version`; returns flat metrics (see `docs/metrics.md`).

    `progress` in [0, 1] is the share of the run that lies behind. `reference` scores the k1 penalty and is None when it
    is off. `checked` are the executions that the self-check has passed; it grows. In deterministic mode each row is its
    own forward pass, so gradients do not depend on how episodes were packed.
    """
    rollout, options = config.rollout, config.trainer
    reset_peak(options.device)
    tokens, samples = token_rows(batch.rows), collate(batch.rows, options.device)
    execution = "rows" if config.deterministic else options.execution
    passes = plan(tokens, execution, options.micro_tokens, shape_of(model))
    metrics: dict[str, float] = {}
    if options.self_check and tokens.count and passes.execution not in checked:
        metrics["mismatch/self_check"] = check(model, tokens, passes.execution)
        checked.add(passes.execution)
    reference_N = None
    if reference is not None:
        reference_N = evaluate(reference, passes.parts, tokens.count).logprobs_N

    def loss(logprobs_M: torch.Tensor, item_M: torch.Tensor) -> torch.Tensor:
        return composer2(
            logprobs_M,
            samples.advantages_N[item_M],
            None if reference_N is None else reference_N[item_M],
            kl_beta=options.kl_beta,
            normaliser=float(rollout.prompts * rollout.group * rollout.tokens),
        )

    outcome = run(model, passes.parts, tokens.count, loss, aux=options.router_aux)
    metrics |= {"loss/policy": outcome.loss, "entropy/mean": outcome.entropy}
    if options.router_aux:
        metrics["loss/aux"] = outcome.aux
    fresh, all_lags = Mismatch(), Mismatch()
    all_lags.add(outcome.logprobs_N, samples.logprobs_N)
    on_policy = samples.versions_N == version
    fresh.add(outcome.logprobs_N[on_policy], samples.logprobs_N[on_policy])
    metrics |= _sharing(passes, tokens) | {"memory/peak_bytes": float(peak_bytes(options.device))}
    if outcome.counts_LE.numel():
        share_LE = outcome.counts_LE / outcome.counts_LE.sum(dim=1, keepdim=True)
        metrics["router/load_max"] = share_LE.max().item() * share_LE.shape[1]
    if tokens.count:
        metrics |= optimizer.step(version + 1, progress)
    return metrics | fresh.metrics("mismatch") | all_lags.metrics("off_policy")


def _sharing(passes: Plan, tokens: TokenRows) -> dict[str, float]:
    """Tokens of separate rows over tokens computed, and the most that were held at a time."""
    apart = sum(map(len, tokens.rows))
    return {
        f"share/{passes.execution}": 1.0,
        "share/ratio": apart / max(passes.cost.tokens, 1),
        "share/held_tokens": float(passes.cost.held),
    }


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
