"""The reward of an episode: its grade, less penalties for its behaviour. Evaluation looks at the grade alone.

A model at the limits of its ability fails most episodes. When a whole group fails, the grade teaches nothing; when one
member succeeds by luck, its whole behaviour is reinforced. Behaviour penalties separate such episodes. Composer uses a
length cost and penalties for bad tool use in the same way (arXiv:2603.24477, section 4.2). Every component is kept
with the episode as `reward/NAME`: the reward is their sum. `[reward]` may name a component of the user's, too.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import msgspec

from etude.config import LengthCost, RewardConfig, import_object
from etude.errors import USERS_FAULTS, UserError
from etude.grading.cheats import has_violation
from etude.records import MAX_REWARD, Budget, Episode, Outcome, StopReason

MAX_BEHAVIOUR_COST = 0.5  # of all behaviours together
# Some templates open the thought before the turn.
_THINKING = re.compile(r"(?:<think>|\A(?=(?:(?!<think>).)*</think>)).*?(?:</think>|\Z)", re.DOTALL)


def with_reward(episode: Episode, config: RewardConfig, budget: Budget) -> Episode:
    """The episode with its reward and the components of it. Timeouts, tampering and episodes with a violation pay every
    cost in full and earn no grade: none of them is better than an honest failure with the worst behaviour. The task's
    `budget` bounds the costs of length. An episode that was lost is returned as it is: it has no reward."""
    if episode.outcome.lost:
        return episode
    share = refused_share(episode.metrics) if _sound(episode) else 1.0
    grade = episode.grade or 0.0 if _sound(episode) else 0.0
    components = {"grade": grade}
    if config.refused_edits:
        components["refused_edits"] = -config.refused_edits * share
    if config.length.weight:
        components["length"] = -config.length.weight * length_cost(
            _effort(episode, config.length, budget), config.length
        )
    if config.overlong:
        # DAPO's soft overlong punishment (arXiv:2503.14476, equation 13): from 0 at L - cache tokens to 1 at L.
        over = (episode.sampled_tokens - (budget.tokens - config.overlong)) / config.overlong
        components["overlong"] = -(min(1.0, max(0.0, over)) if _sound(episode) else 1.0)
    if config.behaviour:
        components["behaviour"] = -_behaviour_penalties(episode, config)
    for path in config.custom:
        components[f"custom/{path.rpartition(':')[2]}"] = _custom(episode, path)
    return msgspec.structs.replace(
        episode,
        reward=sum(components.values()),
        grade=grade,
        metrics=episode.metrics
        | {"refused_edits": share}
        | {f"reward/{name}": value for name, value in components.items()},
    )


def _sound(episode: Episode) -> bool:
    return episode.outcome is Outcome.SCORED and not has_violation(episode)


def refused_share(metrics: dict[str, float]) -> float:
    """Share of edit calls that changed nothing: text not found or put in its own place. Any malformed call counts. An
    episode without an edit pays the whole cost, so that doing nothing does not pay."""
    refused = metrics.get("edit_errors", 0.0) + metrics.get("malformed", 0.0)
    calls = metrics.get("edits", 0.0) + refused
    return refused / calls if calls else 1.0


def length_cost(x: float, config: LengthCost) -> float:
    """C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), and ln(1 + k x) / k at q = 1 (arXiv:2603.24477, section 4.2.2). Its
    slope is 1 at x = 0 and falls: an easy task should be done fast, a hard one may take its time."""
    if abs(config.q - 1) < 1e-9:
        return math.log1p(config.k * x) / config.k
    return math.expm1((1 - config.q) * math.log1p(config.k * x)) / (config.k * (1 - config.q))


def effort(episode: Episode, weights: LengthCost) -> float:
    """x: the weighted sum of an episode's tokens by kind, its tool calls and its turns. Thinking and answer are not
    apart in the tokens: a turn's sampled tokens are divided by the shares of its text."""
    whole = [turn for turn in episode.turns if not turn.continued]
    x = weights.turns * len(whole) + weights.calls * sum(len(turn.calls) for turn in whole)
    counts: list[int] = []  # sampled tokens of each turn
    for segment in episode.segments:
        mask_T = segment.arrays()[1]
        ends = [*segment.turn_starts[1:], len(mask_T)]
        counts += [int(mask_T[a:b].sum()) for a, b in zip(segment.turn_starts, ends, strict=True)]
    # A turn cut off by the clock has tokens but no text.
    for number, (turn, sampled) in enumerate(zip(episode.turns, counts, strict=False)):
        thought = sum(map(len, _THINKING.findall(turn.text))) / max(len(turn.text), 1)
        acting = next((later for later in episode.turns[number:] if not later.continued), turn)
        rest = weights.calling if acting.calls else weights.final
        x += sampled * (thought * weights.thinking + (1 - thought) * rest)
    for segment in episode.segments:
        x += weights.output * int((segment.arrays()[1][segment.prompt_length :] == 0).sum())
    return x


def _effort(episode: Episode, weights: LengthCost, budget: Budget) -> float:
    x = effort(episode, weights)
    if _sound(episode):
        return x
    dearest = max(weights.thinking, weights.calling, weights.final)
    return max(x, weights.turns * budget.turns + dearest * budget.tokens)


def _behaviour_penalties(episode: Episode, config: RewardConfig) -> float:
    """The cost of every occurrence of every penalised behaviour, capped."""
    if not _sound(episode):
        return MAX_BEHAVIOUR_COST
    counts = episode.metrics | {
        "unfinished": float(episode.stop_reason is not StopReason.FINISHED),
        "untested": float(episode.metrics.get("edits", 0.0) > 0 and not episode.metrics.get("tests_run", 0.0)),
    }
    return min(MAX_BEHAVIOUR_COST, sum(cost * counts.get(name, 0.0) for name, cost in config.behaviour.items()))


@cache
def custom_component(path: str) -> Callable[[Episode], float]:
    """The user's function at an import path, which takes an episode and returns a number. Raises UserError."""
    component: Any = import_object(path, "reward.custom")
    if not callable(component):
        raise UserError(f"reward.custom: {path} is no function")
    return cast(Callable[[Episode], float], component)


def _custom(episode: Episode, path: str) -> float:
    """The user's component, and no more than 0 where no grade is earned. Raises UserError if it is no finite number."""
    try:
        value = float(custom_component(path)(episode))
    except UserError:
        raise
    except USERS_FAULTS as e:
        raise UserError(f"reward.custom: {path} raised {type(e).__name__}: {e}") from e
    if not abs(value) <= MAX_REWARD:
        raise UserError(f"reward.custom: {path} returned {value}; it must return a finite number")
    return value if _sound(episode) else min(value, 0.0)
