"""One optimizer step: batch in, updated weights and metrics out. The whole of the algorithm is on this page.

rows ──> updates, a plan of passes each ──> proximal log-probabilities, values, advantages; only if they are needed
     ──> per update: gradients of the loss, summed over its passes ──> judged ──> optimizer
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from etude.config import RLConfig
from etude.models.batch_invariant import batch_invariant, possible
from etude.trainer.optimizer import MasterAdamW, learning_rate
from etude.trainer.rl import presets
from etude.trainer.rl.batch import Batch, PromptRow, Samples, collate, token_rows
from etude.trainer.rl.execution import BatchResult, ValueHead, evaluate, run
from etude.trainer.rl.figures import Sums
from etude.trainer.rl.guards import GuardVerdict
from etude.trainer.rl.loss import Tokens, policy_loss
from etude.trainer.rl.memory import peak_bytes, reset_peak
from etude.trainer.rl.plan import ExecutionPlan, TokenRows, plan, shape_of
from etude.trainer.rl.policies import OF_EPISODES, PolicyDrift, drift, keep, needs_proximal, shares
from etude.trainer.rl.selfcheck import check
from etude.trainer.rl.value import Critic, estimate


@dataclass(frozen=True)
class OptimizerUpdate:
    """The rows of one optimizer update, and what was computed of them before the step's first one."""

    tokens: TokenRows
    samples: Samples
    passes: ExecutionPlan
    share: float  # of the batch's groups
    proximal_N: Tensor | None = None  # None: the current policy is the proximal one
    target_N: Tensor | None = None  # of the value head


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
    judge: Callable[[dict[str, float]], GuardVerdict] = lambda _: GuardVerdict("go", ()),
    checked: set[str] | None = None,
) -> tuple[dict[str, float], GuardVerdict]:
    """Trains on `batch` with the weights of `version`; returns flat metrics (see `docs/metrics.md`) and the verdict.

    `progress` in [0, 1] is the share of the run that lies behind; `reference` scores the KL term and is None when it is
    off; `critic` is the value head of the ppo preset. `judge` sees the metrics before every update: where it says no,
    the gradients are dropped and the step ends. `checked` are the executions that the self-check has passed, and grows;
    None: no self-check. In deterministic mode each row is its own forward pass, so gradients do not depend on how
    episodes were packed, and exact where it can be, so log-probabilities have the engine's bits.
    """
    with batch_invariant(config.deterministic and possible(model)):
        reset_peak(config.trainer.device)
        sums = Sums()
        updates = [_update(model, rows, share, config, sums) for rows, share in shares(batch.rows, config.loss.updates)]
        metrics = {} if checked is None else _self_check(model, updates, checked)
        updates = _prepare(model, critic, updates, batch, config, sums, version)
        of_episode = _drift_from_rollout(updates, batch, config)
        lr, applied, verdict = learning_rate(config.trainer, version + 1, progress), 0, None
        for update in updates:
            if not update.tokens.count:
                continue
            outcome = _backward(model, reference, critic, update, batch, config, of_episode, applied > 0, sums)
            sums.add(outcome)
            if update.proximal_N is None:
                sums.compare(outcome.logprobs_N, update.samples, version)
            norm = optimizer.collect()
            metrics |= {"optim/lr": lr, "optim/grad_norm": norm}
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
        if verdict is None:
            return sums.metrics(), judge(sums.metrics())
        metrics |= {"optim/skipped": float(applied < len(updates)), "optim/updates": float(applied)}
        return sums.metrics() | metrics | {"memory/peak_bytes": float(peak_bytes(config.trainer.device))}, verdict


def _update(
    model: torch.nn.Module, rows: list[PromptRow], share: float, config: RLConfig, sums: Sums
) -> OptimizerUpdate:
    """The rows of an update, and the passes that they are computed in."""
    options = config.trainer
    execution = "rows" if config.deterministic else options.execution
    tokens = token_rows(rows)
    passes = plan(tokens, execution, options.micro_tokens, shape_of(model))
    sums.plan(tokens, passes)
    return OptimizerUpdate(tokens, collate(rows, options.device), passes, share)


def _self_check(model: torch.nn.Module, updates: list[OptimizerUpdate], checked: set[str]) -> dict[str, float]:
    """Compares the gradients of new executions with those of separate rows; raises RunFailed if they differ."""
    distances = []
    for update in updates:
        if update.tokens.count and update.passes.execution not in checked:
            distances.append(check(model, update.tokens, update.passes.execution))
            checked.add(update.passes.execution)
    return {"mismatch/self_check": max(distances)} if distances else {}


def _prepare(
    model: torch.nn.Module,
    critic: Critic | None,
    updates: list[OptimizerUpdate],
    batch: Batch,
    config: RLConfig,
    sums: Sums,
    version: int,
) -> list[OptimizerUpdate]:
    """The updates with what the step needs of the proximal policy, in a pass of its own only if it must be."""
    if not needs_proximal(config.loss, presets.recipe(config.loss)):
        return updates
    value = None if critic is None else ValueHead(critic.values)
    found = [
        evaluate(model, u.passes.parts, u.tokens.count, temperature=config.rollout.temperature, value=value)
        for u in updates
    ]
    updates = [replace(u, proximal_N=o.logprobs_N) for u, o in zip(updates, found, strict=True)]
    for update, outcome in zip(updates, found, strict=True):
        sums.compare(outcome.logprobs_N, update.samples, version)
    if critic is None:
        return updates
    values = [outcome.values_N for outcome in found]
    estimates = estimate([u.samples for u in updates], values, batch.rewards, config.loss.gamma, config.loss.lam)
    return [
        replace(u, samples=replace(u.samples, advantages_N=advantage_N), target_N=target_N)
        for u, (advantage_N, target_N) in zip(updates, estimates, strict=True)
    ]


def _drift_from_rollout(updates: list[OptimizerUpdate], batch: Batch, config: RLConfig) -> PolicyDrift | None:
    """How far each episode's tokens have drifted from the policy that sampled them, where a mask asks for it."""
    if not OF_EPISODES & set(config.loss.masks):
        return None
    proximal = [u.proximal_N for u in updates if u.proximal_N is not None]
    samples = [u.samples for u in updates]
    return drift(samples, proximal, [some.logprobs_N for some in samples], len(batch.rewards))


def _backward(
    model: torch.nn.Module,
    reference: torch.nn.Module | None,
    critic: Critic | None,
    update: OptimizerUpdate,
    batch: Batch,
    config: RLConfig,
    of_episode: PolicyDrift | None,
    moved: bool,
    sums: Sums,
) -> BatchResult:
    """Adds the gradient of an update's loss, and its figures; `moved`: the step has updated the weights before."""
    recipe, count, parts = presets.recipe(config.loss), update.tokens.count, update.passes.parts
    temperature = config.rollout.temperature
    divisor = presets.divisor(recipe, config.rollout, count, update.share)
    reference_N = None
    if reference is not None:
        reference_N = evaluate(reference, parts, count, temperature=temperature, replays=False).logprobs_N
    # The ratio of an episode needs all its tokens; before the first update it is 1.
    by_episode = moved and recipe.surrogate == "sequence"

    def loss(logprobs_M: Tensor, item_M: Tensor) -> Tensor:
        samples, detached_M = update.samples.select(item_M), logprobs_M.detach()
        proximal_M = detached_M if update.proximal_N is None else update.proximal_N[item_M]
        drift_M = None
        if by_episode:
            mean_E = drift([samples], [detached_M], [proximal_M], len(batch.rewards)).mean_E
            drift_M = mean_E.float()[samples.episode_N]
        tokens = Tokens(
            current=logprobs_M,
            proximal=proximal_M,
            rollout=samples.logprobs_N,
            advantage=samples.advantages_N,
            reference=None if reference_N is None else reference_N[item_M],
            length=samples.length_N,
            keep=keep(samples, proximal_M, of_episode, config.loss.masks, sums.dropped),
            drift=drift_M,
        )
        return policy_loss(tokens, recipe, divisor, sums.stats)

    value = None
    if critic is not None and (target_N := update.target_N) is not None:

        def value_loss(values_M: Tensor, item_M: Tensor) -> Tensor:
            error = critic.loss(values_M, target_N[item_M], divisor)
            sums.value_loss = (sums.value_loss or 0.0) + error.item()
            return config.loss.value_weight * error

        value = ValueHead(critic.values, value_loss)
    aux, separable = config.trainer.router_aux, not by_episode
    return run(model, parts, count, loss, temperature=temperature, value=value, separable=separable, aux=aux)
