"""Groups of episodes -> packed micro-batches: a prompt that members share is computed once.

Suffixes: T tokens of a packed row, C completion tokens of one member, N sampled (trained) tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Literal

import numpy as np
import torch

from etude.models.attention import PackedGroups, SharedPrompt
from etude.records import Episode, Group, Outcome


@dataclass(frozen=True)
class Completion:
    """What follows the prompt in one segment: sampled tokens (mask 1) and tool output (mask 0)."""

    ids_C: np.ndarray
    mask_C: np.ndarray
    logprobs_C: np.ndarray
    versions_C: np.ndarray
    advantages_C: np.ndarray
    episode: int = 0  # its episode's index among those of the batch
    before: int = 0  # sampled tokens of the episode in earlier segments
    length: int = 0  # sampled tokens of the whole episode


@dataclass(frozen=True)
class Row:
    """One prompt and the completions of it: a node and its children in the segment graph."""

    prompt_P: np.ndarray
    completions: tuple[Completion, ...]
    group: int = 0  # its group's index in the batch

    @property
    def tokens(self) -> int:
        return len(self.prompt_P) + sum(len(c.ids_C) for c in self.completions)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass. Token n is predicted from the hidden state at `source_N[n]`."""

    ids_1T: torch.Tensor
    positions_1T: torch.Tensor
    layout: PackedGroups | None  # None: a single plain causal row
    source_N: torch.Tensor
    target_N: torch.Tensor
    logprobs_N: torch.Tensor
    versions_N: torch.Tensor
    advantages_N: torch.Tensor
    episode_N: torch.Tensor  # index of the token's episode in the batch
    order_N: torch.Tensor  # how many tokens its episode sampled before it
    length_N: torch.Tensor  # how many its episode sampled in all


@dataclass(frozen=True)
class Batch:
    """The groups of one step, after advantages. Groups without enough reward variance carry no row."""

    groups: tuple[Group, ...]
    episodes: tuple[tuple[Episode, ...], ...]
    rows: tuple[Row, ...]
    zero_variance: int
    rewards: tuple[float, ...] = ()  # of the episodes that carry rows, by `Completion.episode`

    @property
    def flat(self) -> list[Episode]:
        return [episode for members in self.episodes for episode in members]


def advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean: no division by the standard deviation (arXiv:2603.24477, section 4.1)."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def turn_advantages(rewards: Sequence[float], turns: Sequence[int]) -> list[np.ndarray]:
    """Per member its advantage in every turn: reward minus the mean of the members that came as far.

    With one baseline for all turns, whatever is done after a failed try is punished because the try had failed: those
    turns are seen in bad episodes more often than in good ones. That a turn was reached is decided before it is
    sampled, so the expected gradient keeps its direction in every turn; a mean that includes the member itself scales
    it by (n - 1) / n, as in any group. GiGPO (arXiv:2505.10978) compares equal states; here turns stand for them.
    """
    means = [
        sum(r for r, n in zip(rewards, turns, strict=True) if n > turn) / sum(n > turn for n in turns)
        for turn in range(max(turns, default=0))
    ]
    return [np.array([reward - mean for mean in means[:n]]) for reward, n in zip(rewards, turns, strict=True)]


def make_batch(
    groups: Sequence[Group],
    episodes: Sequence[Sequence[Episode]],
    *,
    baseline: Literal["group", "turn"] = "group",
    min_std: float = 0.0,
    advantage: Literal["mean", "zscore", "value"] = "mean",
) -> Batch:
    """Rows with advantages, of groups whose rewards have a standard deviation above `min_std`.

    "zscore" divides by the group's standard deviation plus 1e-6 (arXiv:2402.03300, section 4.1.2). Under "value" every
    group has rows: a value head takes the baseline's place, and the advantages are still 0. Members lost to
    infrastructure are already absent from `episodes`.
    """
    rows: list[Row] = []
    kept: list[float] = []
    zero_variance = 0
    for index, members in enumerate(episodes):
        assert all(e.outcome is not Outcome.INFRA for e in members), "infrastructure failures must not reach the loss"
        rewards = [e.reward for e in members]
        flat = not rewards or max(rewards) == min(rewards) or pstdev(rewards) <= min_std
        zero_variance += flat
        if not rewards or (flat and advantage != "value"):
            continue
        turns = [max(1, sum(len(segment.turn_starts) for segment in e.segments)) for e in members]
        if advantage == "value":
            per_turn = [np.zeros(n) for n in turns]
        elif baseline == "turn":
            per_turn = turn_advantages(rewards, turns)
        else:
            per_turn = [np.full(n, a) for a, n in zip(advantages(rewards), turns, strict=True)]
        if advantage == "zscore":
            per_turn = [a / (pstdev(rewards) + 1e-6) for a in per_turn]
        rows.extend(_rows(members, per_turn, index, len(kept)))
        kept.extend(rewards)
    return Batch(tuple(groups), tuple(map(tuple, episodes)), tuple(rows), zero_variance, tuple(kept))


def _rows(members: Sequence[Episode], advantages_G: Sequence[np.ndarray], group: int, first: int) -> Iterator[Row]:
    """Segments of one group, merged by equal prompt; a member's advantages are given per turn of its episode.

    `first` is the index in the batch of the group's first episode.
    """
    by_prompt: dict[bytes, tuple[np.ndarray, list[Completion]]] = {}
    for number, (episode, advantage_of_turn) in enumerate(zip(members, advantages_G, strict=True), first):
        turns_before, sampled_before = 0, 0
        length = episode.sampled_tokens
        for segment in episode.segments:
            ids_T, mask_T, logprobs_T, versions_T = segment.arrays()
            assert len(ids_T) == len(mask_T) == len(logprobs_T) == len(versions_T), "token arrays differ in length"
            p = segment.prompt_length
            assert not mask_T[:p].any(), "the prompt holds sampled tokens"
            if not mask_T.any():
                continue
            # Tokens after the last sampled one (a final tool result) predict nothing that is trained.
            end = int(np.flatnonzero(mask_T)[-1]) + 1
            turn_C = np.searchsorted(segment.turn_starts, np.arange(p, end), side="right") - 1 + turns_before
            turns_before += len(segment.turn_starts)
            part = slice(p, end)
            advantages_C = advantage_of_turn[np.maximum(turn_C, 0)].astype(np.float32)
            completion = Completion(
                ids_T[part],
                mask_T[part],
                logprobs_T[part],
                versions_T[part],
                advantages_C,
                episode=number,
                before=sampled_before,
                length=length,
            )
            sampled_before += int(mask_T.sum())
            by_prompt.setdefault(ids_T[:p].tobytes(), (ids_T[:p], []))[1].append(completion)
    for prompt_P, completions in by_prompt.values():
        yield Row(prompt_P, tuple(completions), group)


def unshare(rows: Sequence[Row]) -> list[Row]:
    """One row per completion: every prompt is computed again, so that a row's numbers depend on that row alone."""
    return [Row(row.prompt_P, (completion,), row.group) for row in rows for completion in row.completions]


def pack(rows: Sequence[Row], micro_tokens: int, device: str = "cpu") -> Iterator[MicroBatch]:
    """Micro-batches of whole rows with at most `micro_tokens` tokens each (a longer row gets its own)."""
    pending: list[Row] = []
    for row in rows:
        if pending and sum(r.tokens for r in pending) + row.tokens > micro_tokens:
            yield _micro_batch(pending, device)
            pending = []
        pending.append(row)
    if pending:
        yield _micro_batch(pending, device)


def _micro_batch(rows: Sequence[Row], device: str) -> MicroBatch:
    ids, groups = [], []
    source, target, logprobs, versions, advantage = [], [], [], [], []
    episode, order, length = [], [], []
    start = 0
    for row in rows:
        p = len(row.prompt_P)
        ids.append(row.prompt_P)
        groups.append(SharedPrompt(p, tuple(len(c.ids_C) for c in row.completions)))
        offset = start + p
        for c in row.completions:
            ids.append(c.ids_C)
            sampled = np.flatnonzero(c.mask_C)
            # The first token of every completion is predicted by the prompt's last position.
            source.append(np.where(sampled == 0, start + p - 1, offset + sampled - 1))
            target.append(c.ids_C[sampled])
            logprobs.append(c.logprobs_C[sampled])
            versions.append(c.versions_C[sampled])
            advantage.append(c.advantages_C[sampled])
            episode.append(np.full(len(sampled), c.episode))
            order.append(c.before + np.arange(len(sampled)))
            length.append(np.full(len(sampled), c.length))
            offset += len(c.ids_C)
        start = offset

    def tensor(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, dtype)

    layout = PackedGroups(groups, device)
    plain = len(groups) == 1 and len(groups[0].completion_lengths) == 1
    return MicroBatch(
        ids_1T=tensor(ids, torch.long)[None],
        positions_1T=layout.position_ids,
        layout=None if plain else layout,
        source_N=tensor(source, torch.long),
        target_N=tensor(target, torch.long),
        logprobs_N=tensor(logprobs, torch.float32),
        versions_N=tensor(versions, torch.long),
        advantages_N=tensor(advantage, torch.float32),
        episode_N=tensor(episode, torch.long),
        order_N=tensor(order, torch.long),
        length_N=tensor(length, torch.float32),
    )
