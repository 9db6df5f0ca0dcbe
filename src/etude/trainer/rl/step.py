"""One optimizer step: batch in, updated weights and metrics out. The whole algorithm is in this file.

rows ──> updates, a plan of passes each ──> proximal log-probabilities, values, advantages; only if they are needed
     ──> per update: gradients of the loss, summed over its passes ──> judged ──> optimizer
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from etude.config import RLConfig
from etude.models.batch_invariant import batch_invariant, possible
from etude.trainer.optimizer import MasterAdamW, learning_rate
from etude.trainer.rl.balance import divided
from etude.trainer.rl.batch import Batch, PromptRow, Samples, collate, token_rows
from etude.trainer.rl.distill import judged_by_teacher
from etude.trainer.rl.execution import BatchResult, ValueHead, evaluate, run
from etude.trainer.rl.figures import StepSums, batch_figures
from etude.trainer.rl.guards import GuardVerdict, StepFigures
from etude.trainer.rl.loss import LossTokens, policy_loss
from etude.trainer.rl.memory import peak_bytes, reset_peak
from etude.trainer.rl.plan import Execution, ExecutionPlan, TokenRows, passes_of, plan, shape_of
from etude.trainer.rl.policies import OF_EPISODES, PolicyDrift, drift, keep, needs_proximal, shares
from etude.trainer.rl.presets import LossPreset, divisor, loss_preset
from etude.trainer.rl.reference import Reference
from etude.trainer.rl.selfcheck import check
from etude.trainer.rl.value import WEIGHT as VALUE_WEIGHT
from etude.trainer.rl.value import Critic, estimate
from etude.trainer.sharding import world_of


@dataclass(frozen=True)
class Learner:
    """The networks of a step and their optimizers."""

    model: PreTrainedModel
    optimizer: MasterAdamW
    reference: Reference | None = None  # scores the KL term; None: the loss has none
    critic: Critic | None = None  # the value head of the ppo preset
    execution: Execution | Literal["auto"] | None = None  # allowed by the model; None: the configuration's
    teacher: Reference | None = None  # of [distill]; None: the model itself

    @property
    def swaps(self) -> bool:
        """Whether other weights take the place of the model's during a step."""
        return self.reference is not None or self.teacher is not None

    def drop(self) -> None:
        """Frees the collected gradients without an update."""
        self.optimizer.drop()
        if self.critic is not None:
            self.critic.drop()


@dataclass(frozen=True)
class StepResult:
    """The result of a step: its metrics (docs/metrics.md, for display), the guards' verdict, and the figures they
    judged. `lr` is the learning rate of its `updates`; None if the batch had no rows to train on."""

    metrics: dict[str, float]
    verdict: GuardVerdict
    figures: StepFigures
    lr: float | None = None
    updates: int = 0


@dataclass(frozen=True)
class OptimizerUpdate:
    """The rows of one optimizer update, and the values computed for them before the step's first update."""

    tokens: TokenRows
    samples: Samples
    passes: ExecutionPlan
    planned: float  # expected number of episodes in this share of the batch
    episodes: int  # of the whole batch
    proximal_N: Tensor | None = None  # None: the current policy is the proximal one
    target_N: Tensor | None = None  # of the value head
    of_episode: PolicyDrift | None = None  # drift of episodes from the rollout policy, if a mask needs it


def train_step(
    learner: Learner,
    batch: Batch,
    config: RLConfig,
    version: int,
    progress: float,
    *,
    judge: Callable[[StepFigures], GuardVerdict] = lambda _: GuardVerdict("go", ()),
    checked: set[str] | None = None,
    lr: float | None = None,
) -> StepResult:
    """Trains on `batch` with the weights of `version`. `progress` in [0, 1] is the completed share of the run before
    the step. `judge` gets the figures before every update; without its "go" the gradients are dropped and the step
    ends. `checked` are the executions that have passed the self-check, which adds to them; None: no self-check. In
    deterministic mode each row is its own forward pass, so gradients do not depend on the packing of episodes, and
    batch-invariant if the model allows, so log-probabilities have the engine's bits. `lr` is the learning rate of a
    step that is computed again. Raises RunFailed if the self-check fails."""
    preset, of_batch, world = loss_preset(config.loss), batch_figures(batch, version), world_of(learner.model)
    with batch_invariant(config.deterministic and possible(learner.model)):
        reset_peak(learner.model.device)
        batch, metrics = _distilled(learner, batch, config)
        sums, parts = StepSums(), shares(batch.rows, config.loss.updates)
        updates = [_update(learner, rows, share, batch, config, sums) for rows, share in parts]
        metrics |= {} if checked is None else _self_check(learner, updates, checked)
        updates = _prepare(learner, updates, batch, config, sums, version)
        if OF_EPISODES & set(config.loss.masks):
            samples = [u.samples for u in updates]
            proximal = [u.proximal_N for u in updates if u.proximal_N is not None]
            of_episode = drift(samples, proximal, [some.logprobs_N for some in samples], updates[0].episodes)
            updates = [replace(u, of_episode=of_episode) for u in updates]
        lr = learning_rate(config.trainer, version + 1, progress) if lr is None else lr
        applied, verdict = 0, None
        figures = sums.judged(of_batch, None)
        for update in updates:
            if not update.tokens.count:
                continue
            result = _backward(learner, update, config, preset, applied > 0, sums)
            sums.add(result)
            if update.proximal_N is None:
                sums.compare(result.logprobs_N, update.samples, version)
            norm = learner.optimizer.collect()
            figures = sums.judged(of_batch, norm)
            metrics |= {"optim/lr": lr, "optim/grad_norm": norm}
            verdict = judge(figures)
            if not verdict.trains or not math.isfinite(norm):
                learner.drop()
                break
            learner.optimizer.apply(lr)
            if learner.critic is not None:
                learner.critic.apply(world)
            applied += 1
        if verdict is None:
            return StepResult(sums.metrics() | metrics, judge(figures), figures)
        metrics |= {"optim/skipped": float(applied < len(updates)), "optim/updates": float(applied)}
        metrics |= {"memory/peak_bytes": float(world.largest(peak_bytes(learner.model.device)))}
        return StepResult(sums.metrics() | metrics, verdict, figures, lr, applied)


def _update(
    learner: Learner, rows: list[PromptRow], share: float, batch: Batch, config: RLConfig, sums: StepSums
) -> OptimizerUpdate:
    """The rows of an update, and the passes that they are computed in."""
    options, world = config.trainer, world_of(learner.model)
    tokens = token_rows(rows)
    passes = _planned(learner, tokens, config)
    sums.plan(tokens, passes, world)
    # A batch with recorded advantages has no planned size; any other counts lost episodes, too.
    played = len(batch.flat) if options.baseline == "given" else config.rollout.prompts * config.rollout.group
    return OptimizerUpdate(tokens, collate(rows, learner.model.device), passes, played * share, len(batch.rewards))


def _planned(learner: Learner, tokens: TokenRows, config: RLConfig) -> ExecutionPlan:
    """The passes that this rank computes the rows in."""
    execution = "rows" if config.deterministic else learner.execution or config.trainer.execution
    world, shape, budget = world_of(learner.model), shape_of(learner.model), config.trainer.micro_tokens
    if world.size == 1:
        return plan(tokens, execution, budget, shape)
    execution = "packed" if execution == "auto" else execution
    division = divided(tokens, execution, budget * world.mesh.context, shape, world.mesh.data_ranks)
    return passes_of(tokens, execution, division.passes[world.data_rank], shape)


def _distilled(learner: Learner, batch: Batch, config: RLConfig) -> tuple[Batch, dict[str, float]]:
    """The batch with the teacher's judgement in its advantages, and the figures of the judgement."""
    if config.distill is None:
        return batch, {}

    def logprobs_N(tokens: TokenRows) -> Tensor:
        temperature, passes = config.rollout.temperature, _planned(learner, tokens, config)
        scored = evaluate(
            learner.model, passes.parts, tokens.count, temperature=temperature, replays=False, divided=True
        )
        return scored.logprobs_N

    def teacher_logprobs_N(tokens: TokenRows) -> Tensor:
        if learner.teacher is None:
            return logprobs_N(tokens)
        with learner.teacher.weights():
            return logprobs_N(tokens)

    longest = getattr(learner.model.config, "max_position_embeddings", None)
    return judged_by_teacher(batch, config.distill, logprobs_N, teacher_logprobs_N, longest)


def _self_check(learner: Learner, updates: list[OptimizerUpdate], checked: set[str]) -> dict[str, float]:
    """Compares the gradients of new executions with those of separate rows; raises RunFailed if they differ."""
    distances = []
    for update in updates:
        if update.tokens.count and update.passes.execution not in checked:
            trained = learner.optimizer.live.values()
            distances.append(check(learner.model, update.tokens, update.passes.execution, trained))
            checked.add(update.passes.execution)
    return {"mismatch/self_check": max(distances)} if distances else {}


def _prepare(
    learner: Learner, updates: list[OptimizerUpdate], batch: Batch, config: RLConfig, sums: StepSums, version: int
) -> list[OptimizerUpdate]:
    """The updates with the proximal log-probabilities, values and drifts that the step needs, computed in a pass of its
    own only if necessary."""
    if not needs_proximal(config.loss, loss_preset(config.loss)):
        return updates
    critic = learner.critic
    value = None if critic is None else ValueHead(critic.values)
    results = [
        evaluate(
            learner.model,
            u.passes.parts,
            u.tokens.count,
            temperature=config.rollout.temperature,
            value=value,
            divided=True,
        )
        for u in updates
    ]
    updates = [replace(u, proximal_N=r.logprobs_N) for u, r in zip(updates, results, strict=True)]
    for update, result in zip(updates, results, strict=True):
        sums.compare(result.logprobs_N, update.samples, version)
    if critic is None:
        return updates
    values = [result.values_N for result in results]
    estimates = estimate([u.samples for u in updates], values, batch.rewards, config.loss.lam)
    return [
        replace(u, samples=replace(u.samples, advantages_N=advantage_N), target_N=target_N)
        for u, (advantage_N, target_N) in zip(updates, estimates, strict=True)
    ]


def _backward(
    learner: Learner, update: OptimizerUpdate, config: RLConfig, preset: LossPreset, moved: bool, sums: StepSums
) -> BatchResult:
    """Adds the gradient of an update's loss, and its figures. `moved`: an earlier update of the step has changed the
    weights."""
    count, parts, temperature = update.tokens.count, update.passes.parts, config.rollout.temperature
    n = divisor(preset, update.planned, config.rollout.tokens, count)
    reference_N = None
    if learner.reference is not None:
        with learner.reference.weights() as model:
            scored = evaluate(model, parts, count, temperature=temperature, replays=False, divided=True)
            reference_N = scored.logprobs_N
    # The ratio of an episode needs all its tokens; before the first update it is 1.
    by_episode = moved and preset.surrogate == "sequence"
    own = StepSums()  # of the tokens that this rank computes

    def loss(logprobs_M: Tensor, item_M: Tensor) -> Tensor:
        samples, detached_M = update.samples.select(item_M), logprobs_M.detach()
        proximal_M = detached_M if update.proximal_N is None else update.proximal_N[item_M]
        drift_M = None
        if by_episode:
            mean_E = drift([samples], [detached_M], [proximal_M], update.episodes).mean_E
            drift_M = mean_E.float()[samples.episode_N]
        tokens = LossTokens(
            current=logprobs_M,
            proximal=proximal_M,
            rollout=samples.logprobs_N,
            advantage=samples.advantages_N,
            reference=None if reference_N is None else reference_N[item_M],
            length=samples.length_N,
            keep=keep(samples, proximal_M, update.of_episode, config.loss.masks, own.dropped),
            drift=drift_M,
        )
        return policy_loss(tokens, preset, n, own.stats)

    value, critic, target_N = None, learner.critic, update.target_N
    if critic is not None and target_N is not None:

        def value_loss(values_M: Tensor, item_M: Tensor) -> Tensor:
            error = critic.loss(values_M, target_N[item_M], n)
            own.value_loss = (own.value_loss or 0.0) + error.item()
            return VALUE_WEIGHT * error

        value = ValueHead(critic.values, value_loss)
    aux, separable = config.trainer.router_aux, not by_episode
    options = {"temperature": temperature, "value": value, "separable": separable, "aux": aux, "divided": True}
    result = run(learner.model, parts, count, loss, **options)
    sums.add_tokens(own, world_of(learner.model), whole=by_episode)
    return result
