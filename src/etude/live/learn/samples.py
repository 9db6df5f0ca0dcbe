"""Samples of a window as episodes for the trainer: groups of one, with the advantage from the window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from etude.config import RLConfig
from etude.harness import TokenLedger, TokenLedgerError
from etude.live.learn.content import unfit
from etude.live.log.records import LiveSample
from etude.records import Episode, Generation, GivenAdvantage, Hint, Outcome, StopReason
from etude.renderers import Renderer, note_place

NOTE = "\n\nAfter your answer the user said what was wanted instead. Answer so that nobody has to say it:\n"
"""The text before a correction in the teacher's prompt."""

VersionsOf = Callable[[LiveSample], Sequence[int] | None]
"""Sample -> version, in the trainer's store, of every token; None for unknown or too old versions."""


@dataclass(frozen=True)
class LiveBatch:
    """The episodes of a window in the order of its samples, by turn; the reasons of refused turns; and the number of
    omitted corrections by reason."""

    episodes: dict[str, Episode]
    refused: dict[str, str]
    hints_left_out: dict[str, int]


def live_batch(samples: Sequence[LiveSample], versions: VersionsOf, renderer: Renderer, config: RLConfig) -> LiveBatch:
    """The episodes of samples; their `group_id` is not set yet. A turn is refused as "stale" (unknown or too old
    weights), "temperature" (sampling other than the trainer's), "too_long" or "tokens" (arrays that do not fit
    together)."""
    episodes: dict[str, Episode] = {}
    refused: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for sample in samples:
        versions_T = versions(sample)
        length = (len(sample.prompt_ids) + len(sample.ids)) // 4
        if versions_T is None:
            refused[sample.turn] = "stale"
        elif sample.temperature != config.rollout.temperature or sample.top_p != 1.0:
            refused[sample.turn] = "temperature"
        elif length > config.rollout.context:
            refused[sample.turn] = "too_long"
        elif (ledger := _ledger(sample, versions_T)) is None:
            refused[sample.turn] = "tokens"
        else:
            hint = None
            if sample.correction:
                hint, why = _hint(sample, renderer, config.rollout.context - length)
                left_out.update([why] if why else [])
            episodes[sample.turn] = _episode(sample, ledger, hint)
    return LiveBatch(episodes, refused, dict(left_out))


def _ledger(sample: LiveSample, versions_T: Sequence[int]) -> TokenLedger | None:
    """The tokens in the form of an episode; None for malformed or missing tokens."""
    ledger = TokenLedger()
    if any(len(data) % 4 for data in (sample.prompt_ids, sample.ids, sample.logprobs)):
        return None
    prompt, ids = (np.frombuffer(data, "<i4").tolist() for data in (sample.prompt_ids, sample.ids))
    logprobs = np.frombuffer(sample.logprobs, "<f4").tolist()
    if not prompt or not ids or min(prompt) < 0:
        return None
    ledger.add_environment(prompt)
    try:
        ledger.add_turn(prompt, Generation(ids=ids, logprobs=logprobs, versions=list(versions_T), finish_reason="stop"))
    except TokenLedgerError:
        return None
    return ledger


def _hint(sample: LiveSample, renderer: Renderer, room: int) -> tuple[Hint | None, str]:
    """The correction as a note of the user; else None and the reason."""
    if why := unfit(sample.correction or ""):
        return None, why
    try:
        at = note_place(renderer, np.frombuffer(sample.prompt_ids, "<i4").tolist())
    except ValueError:
        return None, "prompt"
    ids = renderer.plain(NOTE + (sample.correction or ""))
    if len(ids) > room:
        return None, "too_long"
    return Hint(ids=np.asarray(ids, "<i4").tobytes(), at=at), ""


def _episode(sample: LiveSample, ledger: TokenLedger, hint: Hint | None) -> Episode:
    return Episode(
        id=sample.turn,
        group_id=-1,
        member=0,
        attempt=0,
        task_id=sample.turn,
        seed=0,
        outcome=Outcome.SCORED,
        stop_reason=StopReason.FINISHED,
        reward=sample.reward,
        passed=sample.reward > 0,
        segments=ledger.segments(),
        turns=(),
        metrics={"advantage": sample.advantage, "weight": sample.weight},
        given=GivenAdvantage(advantage=sample.advantage, weight=sample.weight),
        hint=hint,
    )
