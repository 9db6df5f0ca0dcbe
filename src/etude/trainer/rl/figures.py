"""The figures of a step: sums over its updates, statistics of its episodes, and the input of the guards.

`docs/metrics.md` explains each metric. Metrics are for display; decisions use the fields of `StepFigures`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from etude.grading.cheats import has_violation
from etude.models.router_replay import ReplayStatistics
from etude.records import Episode
from etude.trainer.rl.batch import Batch, Samples
from etude.trainer.rl.execution import BatchResult
from etude.trainer.rl.guards import StepFigures
from etude.trainer.rl.loss import LossStats
from etude.trainer.rl.mismatch import Mismatch
from etude.trainer.rl.plan import Execution, ExecutionPlan, TokenRows
from etude.trainer.world import World


@dataclass
class StepSums:
    """Running sums over the updates of a step."""

    fresh: Mismatch = field(default_factory=Mismatch)  # of tokens sampled by the version that trains on them
    all_lags: Mismatch = field(default_factory=Mismatch)
    stats: LossStats = field(default_factory=LossStats)
    dropped: Counter[str] = field(default_factory=Counter)
    loss: float = 0.0
    value_loss: float | None = None
    aux: float = 0.0
    counts_LE: torch.Tensor | None = None  # tokens of all rows that went to each expert
    updates: int = 0
    entropy: float = 0.0
    entropies: int = 0
    executions: Counter[Execution] = field(default_factory=Counter)
    apart: int = 0  # tokens of separate rows
    computed: int = 0  # tokens of the passes that the updates run
    held: int = 0  # most tokens held at a time
    split: int = 0  # tokens computed apart only because rows have different experts
    replayed: ReplayStatistics = field(default_factory=ReplayStatistics)

    def plan(self, tokens: TokenRows, passes: ExecutionPlan, world: World) -> None:
        """Adds the sizes of the passes of an update, over all parts of the batch."""
        of_ranks = world.gathered((passes.cost.tokens, passes.cost.held, passes.split))[:: world.mesh.context]
        self.executions[passes.execution] += 1
        self.apart += sum(map(len, tokens.rows))
        self.computed += sum(tokens for tokens, _, _ in of_ranks)
        self.held = max(self.held, *(held for _, held, _ in of_ranks))
        self.split += sum(split for _, _, split in of_ranks)

    def add_tokens(self, own: StepSums, world: World, *, whole: bool) -> None:
        """Adds the statistics of the tokens of each rank, `own` being this one's. `whole`: each rank has the statistics
        of all tokens."""
        statistics = (own.stats.tokens, own.stats.sums, own.dropped, own.value_loss)
        of_ranks = world.gathered(statistics)
        for number, (tokens, sums, dropped, value_loss) in enumerate(of_ranks):
            if value_loss is not None:
                self.value_loss = (self.value_loss or 0.0) + value_loss
            if whole and number:
                continue
            self.stats.tokens += tokens
            for name, value in sums.items():
                self.stats.sums[name] = self.stats.sums.get(name, 0.0) + value
            self.dropped.update(dropped)

    def compare(self, proximal_N: torch.Tensor, samples: Samples, version: int) -> None:
        """Adds log-probabilities under the weights of `version` to the statistics of the mismatch."""
        self.all_lags.add(proximal_N, samples.logprobs_N)
        on_policy = samples.versions_N == version
        self.fresh.add(proximal_N[on_policy], samples.logprobs_N[on_policy])

    def add(self, result: BatchResult) -> None:
        """Adds the result of the passes of an update."""
        self.updates += 1
        self.loss += result.loss
        self.aux += result.aux
        self.replayed.add(result.replayed)
        self.entropy += result.entropy_sum
        self.entropies += result.entropies
        if result.counts_LE.numel():
            self.counts_LE = result.counts_LE if self.counts_LE is None else self.counts_LE + result.counts_LE

    def judged(self, of_batch: StepFigures, grad_norm: float | None) -> StepFigures:
        """`of_batch` with the figures of the updates so far."""
        replayed = self.replayed
        return replace(
            of_batch,
            weight_cut=self.stats.weight_cut,
            weight_ess=self.stats.weight_ess,
            routes_missing=replayed.missing / replayed.fed if replayed.fed else None,
            routes_refused=replayed.refused / replayed.slots if replayed.slots else None,
            mismatch=self.fresh.means(),
            grad_norm=grad_norm,
        )

    def metrics(self) -> dict[str, float]:
        """The metrics of all updates so far."""
        metrics = {"loss/policy": self.loss, "entropy/mean": self.entropy / max(self.entropies, 1)}
        if self.value_loss is not None:
            metrics["loss/value"] = self.value_loss
        if self.aux:
            metrics["loss/aux"] = self.aux / self.updates
        if self.counts_LE is not None:
            share_LE = self.counts_LE / self.counts_LE.sum(dim=1, keepdim=True)
            metrics["router/load_max"] = share_LE.max().item() * share_LE.shape[1]
        if replay := self.replayed.metrics():
            metrics |= replay | {"router/split": self.split / max(self.computed, 1)}
        if self.computed:
            metrics |= {f"share/{name}": n / self.executions.total() for name, n in self.executions.items()}
            metrics |= {"share/ratio": self.apart / self.computed, "share/held_tokens": float(self.held)}
        metrics |= {name: float(count) for name, count in self.dropped.items()}
        metrics |= self.stats.metrics()
        return metrics | self.fresh.metrics("mismatch") | self.all_lags.metrics("off_policy")


def batch_figures(batch: Batch, version: int) -> StepFigures:
    """The guards' figures of a batch before it is trained on."""
    episodes = batch.flat
    return StepFigures(
        lag=float(max(token_lags(episodes, version), default=0)),
        kv_lag=max(_kv_lags(episodes), default=None),
        empty=_empty(episodes) / len(episodes) if episodes else None,
        zero_variance=batch.zero_variance / len(batch.episodes) if batch.episodes else None,
    )


def batch_metrics(batch: Batch, version: int) -> dict[str, float | dict[str, int]]:
    """Statistics of the episodes of a batch, including the groups without a gradient."""
    episodes = batch.flat
    lag = token_lags(episodes, version)
    tokens = sum(lag.values())
    metrics: dict[str, float | dict[str, int]] = {
        "reward/all/mean": _mean(e.reward for e in episodes),
        "reward/all/std": _std([e.reward for e in episodes]),
        "rollout/pass_rate": _mean(float(e.passed) for e in episodes),
        "rollout/episodes": float(len(episodes)),
        "rollout/groups": float(len(batch.episodes)),
        "rollout/zero_variance": float(batch.zero_variance),
        "drop/groups/zero_variance": float(batch.zero_variance),
        "drop/episodes/empty": float(_empty(episodes)),
        "rollout/length": tokens / max(len(episodes), 1),
        "off_policy/mean": sum(k * n for k, n in lag.items()) / max(tokens, 1),
        "off_policy/max": float(max(lag, default=0)),
        "off_policy/histogram": {str(k): n for k, n in sorted(lag.items())},
    }
    if known := _kv_lags(episodes):
        metrics["stale/kv_lag"] = max(known)
    for name in sorted({e.repository for e in episodes} - {""}):
        own = [e for e in episodes if e.repository == name]
        metrics[f"repository/{name}/pass_rate"] = _mean(float(e.passed) for e in own)
        metrics[f"repository/{name}/reward"] = _mean(e.reward for e in own)
        metrics[f"repository/{name}/groups"] = float(len({e.group_id for e in own}))
    for name, count in sorted(Counter(flag for e in episodes for flag in e.flags).items()):
        metrics[f"flag/{name}"] = float(count)
    metrics["flag/charged"] = float(sum(map(has_violation, episodes)))
    for name in sorted({key for e in episodes for key in e.metrics}):
        shown = f"{name}/mean" if name.startswith("reward/") else f"rollout/{name}"
        metrics[shown] = _mean(e.metrics.get(name, 0.0) for e in episodes)
    for kind, count in sorted(Counter(e.outcome.value for e in episodes).items()):
        metrics[f"outcome/{kind}"] = float(count)
    for reason, count in sorted(Counter(e.stop_reason.value for e in episodes).items()):
        metrics[f"stop/{reason}"] = float(count)
    return metrics


def token_lags(episodes: Iterable[Episode], version: int) -> Counter[int]:
    """Number of sampled tokens by the number of versions that they are older than `version`."""
    lags: Counter[int] = Counter()
    for episode in episodes:
        for segment in episode.segments:
            _, mask_T, _, versions_T = segment.arrays()
            lags.update((version - versions_T[mask_T == 1]).tolist())
    return lags


def _kv_lags(episodes: Iterable[Episode]) -> list[float]:
    return [e.metrics["kv_lag"] for e in episodes if "kv_lag" in e.metrics]


def _empty(episodes: Iterable[Episode]) -> int:
    return sum(not e.sampled_tokens for e in episodes)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _std(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean((v - mean) ** 2 for v in values))
