"""The loss presets: ten rows of one table, or a loss of the user's. No torch here.

Loss = -(1/N) * sum over tokens of m * W * S, plus a KL term; `etude.trainer.rl.loss` computes it from a `LossPreset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from etude.config import LossConfig, import_object
from etude.errors import UserError

Divisor = Literal["budget", "tokens", "episodes", "one"]


@dataclass(frozen=True)
class LossPreset:
    """One row of the table.

    advantage   mean: reward - group mean; zscore: that / (std + 1e-6); value: GAE over a trained value head
    surrogate   score: A*l; clip: min(r*A, clip(r)*A); sequence: the same with the episode's geometric-mean ratio;
                stopped: sg(clip(r))*A*l
    divisor     budget: P*G*L with L the token budget; tokens: sampled tokens; one: 1;
                episodes: P*G, every token weighted by 1 / (sampled tokens of its episode)
    custom      a function of the user's: `loss.LossTokens` -> the loss of every token [N], in the place of -W*S
    """

    advantage: Literal["mean", "zscore", "value"]
    surrogate: Literal["score", "clip", "sequence", "stopped"]
    divisor: Divisor
    clip: tuple[float, float] = (0.8, 1.2)  # least and greatest ratio r
    anchor: Literal["proximal", "rollout"] = "proximal"
    correction: Literal["none", "truncate", "band"] = "none"
    cap: tuple[float, float] = (0.0, 2.0)
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    kl_beta: float = 0.0
    custom: Callable[[Any], Any] | None = None


PRESETS = {
    # arXiv:2603.24477, section 4.1
    "composer2": LossPreset("mean", "score", "budget", kl="k1"),
    # fw-ai/cookbook, training/utils/rl
    "fireworks": LossPreset("zscore", "clip", "one", correction="truncate", cap=(0.0, 5.0), kl="k3", kl_beta=1e-3),
    # DeepSeekMath, arXiv:2402.03300, equations 3 and 4
    "grpo": LossPreset("zscore", "clip", "episodes", kl="k3", kl_beta=0.04),
    # arXiv:2503.20783, section 3.2
    "dr_grpo": LossPreset("mean", "clip", "budget"),
    # arXiv:2503.14476, equation 8
    "dapo": LossPreset("zscore", "clip", "tokens", clip=(0.8, 1.28)),
    # the same with truncated importance sampling, fengyao.notion.site/off-policy-rl
    "tis": LossPreset("zscore", "clip", "tokens", clip=(0.8, 1.28), correction="truncate"),
    # arXiv:2510.18855, section 3
    "icepop": LossPreset("zscore", "clip", "tokens", correction="band", cap=(0.5, 5.0)),
    # MiniMax-M1, arXiv:2506.13585, equations 4 and 5, whose old policy is the sampling policy
    "cispo": LossPreset("zscore", "stopped", "tokens", clip=(0.0, 5.0), anchor="rollout"),
    # arXiv:2507.18071, equations 5, 7 and 13 to 16
    "gspo": LossPreset("zscore", "sequence", "episodes", clip=(1 - 3e-4, 1 + 4e-4)),
    # arXiv:1707.06347, equations 7, 9 and 11
    "ppo": LossPreset("value", "clip", "tokens"),
}


def loss_preset(config: LossConfig) -> LossPreset:
    """The preset with the values that the configuration replaces. Raises UserError for an impossible combination, and
    for a custom loss that cannot be imported or called."""
    preset = PRESETS[config.preset]
    preset = replace(
        preset,
        kl=config.kl or preset.kl,
        kl_beta=preset.kl_beta if config.kl_beta is None else config.kl_beta,
        anchor=config.anchor or preset.anchor,
        correction=config.correction or preset.correction,
        clip=_band(preset.clip, config.clip_low, config.clip_high),
        cap=_band(preset.cap, None, config.cap_high),
        custom=None if config.custom is None else import_object(config.custom, "loss.custom"),
    )
    if preset.custom is not None and not callable(preset.custom):
        raise UserError(f"loss.custom = {config.custom!r} is not callable; give a function of a forward pass's tokens")
    if not preset.clip[0] <= 1 <= preset.clip[1] or not preset.cap[0] <= 1 <= preset.cap[1]:
        raise UserError("loss: a ratio of 1 must lie between clip_low and clip_high, and below cap_high")
    if preset.kl_beta and preset.kl == "none":
        raise UserError("loss.kl_beta needs an estimator: set loss.kl to k1, k2 or k3")
    return preset


def _band(preset: tuple[float, float], low: float | None, high: float | None) -> tuple[float, float]:
    return preset[0] if low is None else low, preset[1] if high is None else high


def divisor(preset: LossPreset, episodes: float, budget: int, tokens: int) -> float:
    """N of the loss, for an update on `tokens` sampled tokens of so many episodes, each with a `budget`. It is a
    constant of the run, except under "tokens": with a batch's own lengths the meaning of a step would vary."""
    choices = {"budget": episodes * budget, "episodes": episodes, "one": 1.0, "tokens": max(tokens, 1)}
    return float(choices[preset.divisor])
