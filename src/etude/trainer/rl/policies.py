"""The three policies of a step, token by token: the masks over tokens, and the drift of episodes.

    rollout   mu, recorded by the engine with the version that sampled the token
    proximal  o, the weights at the start of the step, without gradient
    current   l, the weights now

With one update per batch the current policy is the proximal one, and no extra pass is needed; several updates, masks of
whole episodes and a value head take one forward pass over the batch before the first update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.config import LossConfig, Mask
from etude.trainer.rl.batch import PromptRow, Samples
from etude.trainer.rl.presets import LossPreset

IPO, DPPO = 0.1, 0.2  # difference of probabilities; PrimeIntellect-ai/prime-rl, docs/ipo.md and #2808
GEO_RS = (0.999, 1.001)  # geometric mean of an episode's ratio; verl docs/algo/rollout_corr.md
OPSM = 1e-4  # mean of mu - o of an episode with a negative advantage; THUDM/slime
VETO = math.log(1e-4)  # of one token's ratio; below, the episode is masked; verl docs/algo/rollout_corr.md
OF_EPISODES: frozenset[Mask] = frozenset({"geo_rs", "opsm", "veto"})


@dataclass(frozen=True)
class PolicyDrift:
    """Per episode of a batch: the mean and the least of a log ratio over its sampled tokens, [E]."""

    mean_E: Tensor
    least_E: Tensor


def needs_proximal(config: LossConfig, preset: LossPreset) -> bool:
    """Whether the step needs the proximal log-probabilities of the whole batch before its first update."""
    return config.updates > 1 or preset.advantage == "value" or bool(OF_EPISODES & set(config.masks))


def drift(samples: Sequence[Samples], above: Sequence[Tensor], below: Sequence[Tensor], episodes: int) -> PolicyDrift:
    """Mean and minimum of above - below over the tokens of each episode; 0 for one without tokens."""
    device = samples[0].episode_N.device if samples else "cpu"
    total_E, count_E, least_E = (torch.zeros(episodes, dtype=torch.double, device=device) for _ in range(3))
    for some, a_N, b_N in zip(samples, above, below, strict=True):
        d_N = (a_N - b_N).double()
        total_E.index_add_(0, some.episode_N, d_N)
        count_E.index_add_(0, some.episode_N, torch.ones_like(d_N))
        least_E.scatter_reduce_(0, some.episode_N, d_N, "amin")
    return PolicyDrift(total_E / count_E.clamp_min(1), least_E)


def keep(
    samples: Samples, proximal_N: Tensor, of_episode: PolicyDrift | None, masks: Sequence[Mask], dropped: Counter[str]
) -> Tensor | None:
    """bool [N]: the tokens that no mask leaves out; None without masks. Counts the tokens of each mask separately.
    `of_episode` is the drift of the proximal from the rollout policy, which the masks of whole episodes need."""
    if not masks:
        return None
    keep_N = torch.ones_like(proximal_N, dtype=torch.bool)
    change_N = proximal_N.exp() - samples.logprobs_N.exp()
    for mask in masks:
        if mask == "ipo":
            drop_N = change_N.abs() > IPO
        elif mask == "dppo":
            # Only tokens that the advantage would push further away.
            drop_N = (change_N * samples.advantages_N.sign()) > DPPO
        else:
            assert of_episode is not None, "the proximal pass comes before masks of whole episodes"
            mean_N, least_N = of_episode.mean_E[samples.episode_N], of_episode.least_E[samples.episode_N]
            if mask == "geo_rs":
                drop_N = (mean_N < math.log(GEO_RS[0])) | (mean_N > math.log(GEO_RS[1]))
            elif mask == "opsm":
                drop_N = (samples.advantages_N < 0) & (-mean_N > OPSM)
            else:
                drop_N = least_N < VETO
        dropped[f"drop/tokens/{mask}"] += int(drop_N.sum())
        keep_N &= ~drop_N
    dropped["drop/tokens/all_masks"] += int((~keep_N).sum())
    return keep_N


def shares(rows: Sequence[PromptRow], updates: int) -> list[tuple[list[PromptRow], float]]:
    """The rows in `updates` parts of whole groups, fewer if there are fewer groups, and each part's share of them."""
    groups = sorted({row.group for row in rows})
    count = min(updates, len(groups)) or 1
    part_of = {group: i * count // len(groups) for i, group in enumerate(groups)}
    parts: list[list[PromptRow]] = [[] for _ in range(count)]
    for row in rows:
        parts[part_of[row.group]].append(row)
    sizes = Counter(part_of.values())
    return [(part, sizes[i] / max(len(groups), 1) if count > 1 else 1.0) for i, part in enumerate(parts)]
