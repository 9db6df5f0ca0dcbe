"""One optimizer step: batch in, updated weights and metrics out. The whole of the algorithm is on this page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from etude.config import RLConfig
from etude.trainer import presets
from etude.trainer.batch import Batch, MicroBatch, pack, unshare
from etude.trainer.guards import Verdict
from etude.trainer.loss import LossStats, Mismatch, Tokens, policy_loss
from etude.trainer.optimizer import MasterAdamW, learning_rate
from etude.trainer.policies import OF_EPISODES, Drift, drift, keep, needs_proximal, shares
from etude.trainer.value import Critic, estimate

_ENTROPY_STRIDE = 16  # a mean over some thousand tokens is exact enough, and a tenth of the step's time otherwise


@dataclass(frozen=True)
class Item:
    """A micro-batch, and what was computed of it before the step's first update."""

    micro: MicroBatch
    proximal_N: torch.Tensor | None = None  # None: the current policy is the proximal one
    target_N: torch.Tensor | None = None  # of the value head


@dataclass
class Sums:
    """Running figures of a step."""

    fresh: Mismatch = field(default_factory=Mismatch)  # tokens sampled by the version that trains on them
    all_lags: Mismatch = field(default_factory=Mismatch)
    stats: LossStats = field(default_factory=LossStats)
    dropped: Counter[str] = field(default_factory=Counter)
    loss: float = 0.0
    value_loss: float | None = None
    entropy: float = 0.0
    entropies: int = 0

    def compare(self, proximal_N: torch.Tensor, micro: MicroBatch, version: int) -> None:
        self.all_lags.add(proximal_N, micro.logprobs_N)
        on_policy = micro.versions_N == version
        self.fresh.add(proximal_N[on_policy], micro.logprobs_N[on_policy])

    def metrics(self) -> dict[str, float]:
        metrics = {"loss/policy": self.loss, "entropy/mean": self.entropy / max(self.entropies, 1)}
        if self.value_loss is not None:
            metrics["loss/value"] = self.value_loss
        metrics |= {name: float(count) for name, count in self.dropped.items()}
        metrics |= self.stats.metrics()
        return metrics | self.fresh.metrics("mismatch") | self.all_lags.metrics("off_policy")


def train_step(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    optimizer: MasterAdamW,
    batch: Batch,
    config: RLConfig,
    version: int,
    progress: float,
    *,
    critic: Critic | None = None,
    judge: Callable[[dict[str, float]], Verdict] = lambda _: Verdict("go", ()),
) -> tuple[dict[str, float], Verdict]:
    """Trains on `batch` with the weights of `version`; returns flat metrics (see `docs/metrics.md`) and the verdict.

    `progress` in [0, 1] is the share of the run that lies behind; `reference` scores the KL term and is None when it is
    off; `critic` is the value head of the ppo preset. `judge` sees the metrics before every update: where it says no,
    the gradients are dropped and the step ends. In deterministic mode rows are not shared and each is its own forward
    pass, so gradients do not depend on how episodes were packed.
    """
    recipe = presets.recipe(config.loss)
    rows = unshare(batch.rows) if config.deterministic else batch.rows
    micro_tokens = 1 if config.deterministic else config.trainer.micro_tokens
    parts = [(list(pack(p, micro_tokens, config.trainer.device)), s) for p, s in shares(rows, config.loss.updates)]
    sums = Sums()
    items = _prepare(model, critic, [micro for micros, _ in parts for micro in micros], batch, config, sums, version)
    of_episode = _drift_from_rollout(items, batch, config)
    lr, applied, metrics, verdict = learning_rate(config.trainer, version + 1, progress), 0, {}, None
    for micros, share in parts:
        some, items = items[: len(micros)], items[len(micros) :]
        drift_E = _drift_of_update(model, some, batch, config) if applied and recipe.surrogate == "sequence" else None
        divisor = presets.divisor(recipe, config.rollout, sum(m.target_N.numel() for m in micros), share)
        for item in some:
            _backward(model, reference, critic, item, config, divisor, version, of_episode, drift_E, sums)
        if not sums.all_lags.tokens:
            continue
        norm = optimizer.collect()
        metrics = {"optim/lr": lr, "optim/grad_norm": norm}
        verdict = judge(sums.metrics() | metrics)
        if not verdict.trains or not math.isfinite(norm):
            optimizer.drop()
            if critic is not None:
                critic.drop()
            break
        optimizer.apply(lr)
        if critic is not None:
            critic.apply()
        applied += 1
    if metrics:
        metrics |= {"optim/skipped": float(applied < len(parts)), "optim/updates": float(applied)}
    return sums.metrics() | metrics, judge(sums.metrics()) if verdict is None else verdict


@torch.no_grad()
def _prepare(
    model: torch.nn.Module,
    critic: Critic | None,
    micros: list[MicroBatch],
    batch: Batch,
    config: RLConfig,
    sums: Sums,
    version: int,
) -> list[Item]:
    """The micro-batches with what the step needs of the proximal policy, in a pass of its own only if it must be."""
    if not needs_proximal(config.loss, presets.recipe(config.loss)):
        return [Item(micro) for micro in micros]
    proximal, values = [], []
    for micro in micros:
        logprobs_N, _ = score(model, micro, config.rollout.temperature)
        sums.compare(logprobs_N, micro, version)
        proximal.append(logprobs_N)
        if critic is not None:
            values.append(critic.values(micro))
    if critic is None:
        return [Item(micro, o_N) for micro, o_N in zip(micros, proximal, strict=True)]
    estimates = estimate(micros, values, batch.rewards, config.loss.gamma, config.loss.lam)
    return [
        Item(replace(micro, advantages_N=advantage_N), o_N, target_N)
        for micro, o_N, (advantage_N, target_N) in zip(micros, proximal, estimates, strict=True)
    ]


def _drift_from_rollout(items: list[Item], batch: Batch, config: RLConfig) -> Drift | None:
    """How far each episode's tokens have drifted from the policy that sampled them, where a mask asks for it."""
    if not OF_EPISODES & set(config.loss.masks):
        return None
    proximal = [item.proximal_N for item in items if item.proximal_N is not None]
    micros = [item.micro for item in items]
    return drift(micros, proximal, [micro.logprobs_N for micro in micros], len(batch.rewards))


@torch.no_grad()
def _drift_of_update(model: torch.nn.Module, items: list[Item], batch: Batch, config: RLConfig) -> torch.Tensor:
    """Mean of l - o per episode, [E], with the weights as the step's earlier updates have left them."""
    micros = [item.micro for item in items]
    current = [score(model, micro, config.rollout.temperature)[0] for micro in micros]
    proximal = [item.proximal_N for item in items if item.proximal_N is not None]
    return drift(micros, current, proximal, len(batch.rewards)).mean_E.float()


def _backward(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    critic: Critic | None,
    item: Item,
    config: RLConfig,
    divisor: float,
    version: int,
    of_episode: Drift | None,
    drift_E: torch.Tensor | None,
    sums: Sums,
) -> None:
    """Adds the gradient of one micro-batch, and its figures."""
    micro, recipe = item.micro, presets.recipe(config.loss)
    logprobs_N, entropy_M = score(model, micro, config.rollout.temperature)
    reference_N = None
    if reference is not None:
        with torch.no_grad():
            reference_N, _ = score(reference, micro, config.rollout.temperature)
    detached = logprobs_N.detach()
    proximal_N = detached if item.proximal_N is None else item.proximal_N
    tokens = Tokens(
        current=logprobs_N,
        proximal=proximal_N,
        rollout=micro.logprobs_N,
        advantage=micro.advantages_N,
        reference=reference_N,
        length=micro.length_N,
        keep=keep(micro, proximal_N, of_episode, config.loss.masks, sums.dropped),
        drift=None if drift_E is None else drift_E[micro.episode_N],
    )
    loss = policy_loss(tokens, recipe, divisor, sums.stats)
    sums.loss += loss.item()
    if critic is not None and item.target_N is not None:
        value = critic.loss(micro, item.target_N, divisor)
        sums.value_loss = (sums.value_loss or 0.0) + value.item()
        loss = loss + config.loss.value_weight * value
    loss.backward()
    sums.entropy += entropy_M.sum().item()
    sums.entropies += len(entropy_M)
    if item.proximal_N is None:
        sums.compare(detached, micro, version)


def score(model: torch.nn.Module, micro: MicroBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability [N] of the sampled tokens under the distribution they were drawn from, and entropy of every 16th.

    Head and log-softmax in float32, after the division by the temperature, as in the engine.
    """
    hidden_1TD = model.get_decoder()(
        input_ids=micro.ids_1T, position_ids=micro.positions_1T, layout=micro.layout, use_cache=False
    ).last_hidden_state
    hidden_ND = hidden_1TD[0].index_select(0, micro.source_N)
    head = model.get_output_embeddings()
    logits_NV = torch.nn.functional.linear(hidden_ND.float(), head.weight.float())
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
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
        "rollout/groups": float(len(batch.episodes)),
        "rollout/zero_variance": float(batch.zero_variance),
        "drop/groups/zero_variance": float(batch.zero_variance),
        "drop/episodes/empty": float(sum(not e.sampled_tokens for e in episodes)),
        "rollout/length": tokens / max(len(episodes), 1),
        "off_policy/mean": sum(k * n for k, n in lag.items()) / max(tokens, 1),
        "off_policy/max": float(max(lag, default=0)),
        "off_policy/histogram": {str(k): n for k, n in sorted(lag.items())},
    }
    for name in sorted({key for e in episodes for key in e.metrics}):
        shown = f"{name}/mean" if name.startswith("reward/") else f"rollout/{name}"
        metrics[shown] = _mean(e.metrics.get(name, 0.0) for e in episodes)
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
