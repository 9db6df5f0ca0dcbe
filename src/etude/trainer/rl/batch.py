"""Groups of episodes -> rows of tokens with advantages, and the inputs of the loss for each sampled token.

Suffixes: T tokens of a row, P of its prompt, C of a completion, N sampled (trained) tokens of the batch, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import pstdev
from typing import Literal

import numpy as np
import torch

from etude.errors import RunFailed
from etude.models.document_spans import RECIPE
from etude.models.router_replay import MISSING, UNFED
from etude.records import Episode, Group, Hint, Segment, StopReason, token_digest
from etude.trainer.rl.advantages import advantages, turn_advantages
from etude.trainer.rl.plan import TokenRows

Baseline = Literal["group", "turn", "given"]
Taught = Literal["none", "hinted", "all"]


@dataclass(frozen=True)
class Completion:
    """The tokens after the prompt in one segment: sampled tokens (mask 1) and tool output (mask 0)."""

    ids_C: np.ndarray
    mask_C: np.ndarray
    logprobs_C: np.ndarray
    versions_C: np.ndarray
    advantages_C: np.ndarray
    episode: int = 0  # index of its episode in the batch
    before: int = 0  # sampled tokens of the episode in earlier segments
    length: int = 0  # sampled tokens of the whole episode
    routes_TLK: np.ndarray | None = None  # experts to replay, also of the prompt's tokens, which may differ by member
    hint: Hint | None = None  # additional context for a teacher
    weight: float = 1.0  # factor that the advantages include


@dataclass(frozen=True)
class PromptRow:
    """A prompt and its completions, which make as many rows of tokens. The prompt begins with its documents."""

    prompt_P: np.ndarray
    completions: tuple[Completion, ...]
    group: int = 0  # its group's index in the batch
    documents: tuple[int, ...] = ()  # their lengths


@dataclass(frozen=True)
class Samples:
    """The inputs of the loss for the sampled tokens, [N] each, in the order of `token_rows`."""

    logprobs_N: torch.Tensor
    versions_N: torch.Tensor
    advantages_N: torch.Tensor
    episode_N: torch.Tensor  # index of the token's episode in the batch
    order_N: torch.Tensor  # number of tokens that its episode sampled before
    length_N: torch.Tensor  # number of all tokens that its episode sampled

    def select(self, item_M: torch.Tensor) -> Samples:
        """The tokens with these indices, [M]."""
        return Samples(*(getattr(self, f.name)[item_M] for f in fields(self)))


@dataclass(frozen=True)
class Batch:
    """The groups of one step, after advantages. Groups without a gradient have no rows: their rewards do not differ
    enough, or their recorded advantages are 0."""

    groups: tuple[Group, ...]
    episodes: tuple[tuple[Episode, ...], ...]
    rows: tuple[PromptRow, ...]
    zero_variance: int
    rewards: tuple[float, ...] = ()  # of the episodes with rows, by `Completion.episode`

    @property
    def flat(self) -> list[Episode]:
        """All episodes, group after group."""
        return [episode for members in self.episodes for episode in members]


def make_batch(
    groups: Sequence[Group],
    episodes: Sequence[Sequence[Episode]],
    *,
    baseline: Baseline = "group",
    min_std: float = 0.0,
    advantage: Literal["mean", "zscore", "value"] = "mean",
    routes: tuple[int, int] | None = None,
    taught: Taught = "none",
) -> Batch:
    """Rows with advantages, of groups whose rewards have a standard deviation above `min_std`.

    "zscore" divides by the group's standard deviation plus 1e-6 (arXiv:2402.03300, section 4.1.2). Under "value" every
    group has rows: a value head takes the baseline's place, and the advantages are still 0. With the baseline "given",
    episodes with a recorded advantage have that, times their weight, and groups without are compared as usual. Groups
    in which a teacher judges an episode (`taught`: one with a hint, or any) have rows, too. Members lost to
    infrastructure are already absent from `episodes`. `routes`: the model's MoE layers and experts per token, if
    recorded experts are to be replayed. Raises RunFailed for episodes that recorded another model's experts, whose
    sampled tokens have changed, or that were lost to infrastructure and yet scored.
    """
    rows: list[PromptRow] = []
    kept: list[float] = []
    zero_variance = 0
    for index, members in enumerate(episodes):
        for member in members:
            _check(member)
        rewards = [e.reward for e in members]
        recorded = _recorded_advantages(members, baseline)
        if recorded:
            flat = not any(recorded)
        else:
            flat = not rewards or max(rewards) == min(rewards) or pstdev(rewards) <= min_std
        judged = taught == "all" or (taught == "hinted" and any(e.hint is not None for e in members))
        zero_variance += flat and not judged
        if not rewards or (flat and advantage != "value" and not judged):
            continue
        turns = [max(1, sum(len(segment.turn_starts) for segment in e.segments)) for e in members]
        if recorded:
            per_turn = [np.full(n, a) for a, n in zip(recorded, turns, strict=True)]
        elif advantage == "value":
            per_turn = [np.zeros(n) for n in turns]
        elif baseline == "turn":
            per_turn = turn_advantages(rewards, turns)
        else:
            per_turn = [np.full(n, a) for a, n in zip(advantages(rewards), turns, strict=True)]
        if advantage == "zscore" and not recorded:
            per_turn = [a / (pstdev(rewards) + 1e-6) for a in per_turn]
        rows.extend(_rows(members, per_turn, index, len(kept), routes))
        kept.extend(rewards)
    return Batch(tuple(groups), tuple(map(tuple, episodes)), tuple(rows), zero_variance, tuple(kept))


def _recorded_advantages(members: Sequence[Episode], baseline: Baseline) -> list[float]:
    """The weighted advantages recorded in the members; empty for a group to be compared. Raises RunFailed if the run
    cannot use them."""
    recorded = [e.given.advantage * e.given.weight for e in members if e.given is not None]
    if recorded and (baseline != "given" or len(recorded) < len(members)):
        raise RunFailed(
            f"the episodes of group {members[0].group_id} come with advantages, but not all of them, or the run does "
            'not have trainer.baseline = "given": check the program that wrote them'
        )
    return recorded


def _check(episode: Episode) -> None:
    assert not episode.outcome.lost, "infrastructure failures and quarantined episodes must not reach the loss"
    if episode.stop_reason is StopReason.ERROR:
        raise RunFailed(
            f"episode {episode.id} was lost to infrastructure and scored {episode.reward:g} all the same "
            f"({episode.detail or 'no reason given'}): such a failure must end as Outcome.INFRA and be played again"
        )
    if not all(segment.intact for segment in episode.segments):
        raise RunFailed(
            f"episode {episode.id} does not hold the tokens that were sampled: the digest of their ids and positions "
            "differs; find the program that rewrites or tokenises episodes again after they are played"
        )


def _rows(
    members: Sequence[Episode],
    advantages_G: Sequence[np.ndarray],
    group: int,
    first: int,
    routes: tuple[int, int] | None,
) -> Iterator[PromptRow]:
    """Segments of one group, merged by equal prompt; a member has one advantage per turn of its episode. `first` is the
    index in the batch of the group's first episode."""
    by_prompt: dict[tuple[tuple[int, ...], bytes], tuple[np.ndarray, list[Completion]]] = {}
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
            # Tokens after the last sampled one (a final tool result) predict no trained token.
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
                routes_TLK=None if routes is None else recorded_routes(segment, end, routes),
                hint=episode.hint,
                weight=1.0 if episode.given is None else episode.given.weight,
            )
            sampled_before += int(mask_T.sum())
            key = recorded_documents(segment), ids_T[:p].tobytes()
            by_prompt.setdefault(key, (ids_T[:p], []))[1].append(completion)
    for (documents, _), (prompt_P, completions) in by_prompt.items():
        yield PromptRow(prompt_P, tuple(completions), group, documents)


def recorded_documents(segment: Segment) -> tuple[int, ...]:
    """Lengths of the documents at the beginning of a segment, from which the engine's graph can be made again. Raises
    RunFailed for invalid ones."""
    if wrong := document_fault(segment):
        raise RunFailed(f"an episode has {wrong}: were its engines of another etude, or its blob damaged?")
    return tuple(document.length for document in segment.documents)


def document_fault(segment: Segment) -> str:
    """The fault of the documents recorded in a segment; "" if there is none."""
    if segment.documents and segment.recipe != RECIPE:
        return f"documents computed by the recipe {segment.recipe!r}, not {RECIPE!r}"
    ids_T, *_ = segment.arrays()
    start = 0
    for number, document in enumerate(segment.documents):
        end = start + document.length
        if not start < end < segment.prompt_length or token_digest(ids_T[start:end]) != document.digest:
            return f"other tokens in document {number} than it recorded"
        start = end
    return ""


def recorded_routes(segment: Segment, end: int, shape: tuple[int, int]) -> np.ndarray:
    """int16 [end, MoE layers, K]: the experts that the engine recorded for the first `end` tokens; see
    `models.router_replay`. Raises RunFailed for another shape."""
    out = np.full((end, *shape), MISSING, np.int16)
    stored = segment.routes
    if stored is not None:
        if (stored.layers, stored.slots) != shape:
            raise RunFailed(
                f"an episode recorded {stored.slots} experts in {stored.layers} layers, but the model has {shape[1]} "
                f"in {shape[0]}: were the engines started with another model?"
            )
        known = min(stored.end, end)
        out[:known] = stored.array()[:known]
    if end and out[end - 1, 0, 0] == MISSING:
        out[end - 1] = UNFED
    return out


def token_rows(rows: Sequence[PromptRow]) -> TokenRows:
    """Every completion after its prompt. The plan finds their shared prefixes."""
    pairs = [(row.prompt_P, c) for row in rows for c in row.completions]
    routes = tuple(c.routes_TLK for _, c in pairs if c.routes_TLK is not None)
    documents = tuple(row.documents for row in rows for _ in row.completions)
    return TokenRows(
        tuple(np.concatenate([prompt_P, c.ids_C]) for prompt_P, c in pairs),
        tuple(len(prompt_P) + np.flatnonzero(c.mask_C) for prompt_P, c in pairs),
        routes if routes else None,
        documents if any(documents) else None,
    )


def collate(rows: Sequence[PromptRow], device: torch.device | str = "cpu") -> Samples:
    """The sampled tokens of all rows."""
    completions = [c for row in rows for c in row.completions]

    def tensor(arrays: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        sampled = [array[c.mask_C == 1] for array, c in zip(arrays, completions, strict=True)]
        return torch.from_numpy(np.concatenate(sampled) if sampled else np.zeros(0)).to(device, dtype)

    return Samples(
        logprobs_N=tensor([c.logprobs_C for c in completions], torch.float32),
        versions_N=tensor([c.versions_C for c in completions], torch.long),
        advantages_N=tensor([c.advantages_C for c in completions], torch.float32),
        episode_N=tensor([np.full(len(c.ids_C), c.episode) for c in completions], torch.long),
        order_N=tensor([c.before + np.cumsum(c.mask_C, dtype=np.int64) - 1 for c in completions], torch.long),
        length_N=tensor([np.full(len(c.ids_C), c.length) for c in completions], torch.float32),
    )
