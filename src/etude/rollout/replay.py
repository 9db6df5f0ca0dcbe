"""An episode played again from its segments: proof that the harness still puts the same tokens before the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from etude.grading.cheats.decoys import Decoys
from etude.harness.ledger import TokenLedgerError
from etude.harness.loop import UngradedEpisode, fork_episode, run_episode
from etude.protocol.wire import GenerateRequest
from etude.records import Episode, Generation, Routes, Segment, StopReason, Task
from etude.rollout import apply_edits
from etude.rollout.episode import RolloutContext
from etude.sandbox.base import BoxError


async def replay(setting: RolloutContext, task: Task, episode: Episode, decoys: Decoys | None = None) -> str:
    """What is another token when `episode` is played again in a new box, as it was: "" if none is.

    Its calls are run, and nothing is sampled or graded. One that the clock ended is compared up to its last turn.
    """
    recorded = Recorded(episode.segments)
    timed_out = episode.stop_reason is StopReason.SECONDS
    try:
        draft = await _played(replace(setting, policy=recorded), task, episode, decoys)
    except TokenLedgerError as e:
        return "" if timed_out and recorded.played == recorded.turns else str(e)
    except (BoxError, TimeoutError) as e:
        return f"the box was lost: {type(e).__name__}: {e}"
    if recorded.played < recorded.turns:
        return f"it ended ({draft.stop_reason}) after {recorded.played} of {recorded.turns} turns"
    return "" if timed_out or draft.segments == episode.segments else "what follows the last turn is another text"


async def _played(setting: RolloutContext, task: Task, episode: Episode, decoys: Decoys | None) -> UngradedEpisode:
    plan, fork = setting.play(task, episode.seed), episode.fork
    if task.sketch is not None:
        return (await apply_edits.attempt(plan))[0]
    box = await setting.box(task, decoys)
    try:
        if fork is None:
            return await run_episode(plan, box)
        trunk = await fork_episode(plan, box, fork.after, [episode.seed])
        if trunk.fault:
            return trunk.draft
        (branch,) = trunk.branches
        try:
            return await branch.play()
        finally:
            await branch.box.close()
    finally:
        await box.close()


class Recorded:
    """A policy that says what an episode's segments hold, turn by turn.

    Each prompt must be, token by token, the one that the turn was sampled from, its documents included; if it is
    another one, or there is no turn left, it raises TokenLedgerError.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._turns = [(segment, *span) for segment in segments for span in segment.spans()]
        self.played = 0

    @property
    def turns(self) -> int:
        """How many turns the segments hold, summaries included."""
        return len(self._turns)

    async def generate(
        self, request: GenerateRequest, timeout: float, on_tokens: Callable[[list[int]], None] | None = None
    ) -> Generation:
        """See `harness.loop.Policy`."""
        if self.played == self.turns:
            raise TokenLedgerError(f"turn {self.played} was never sampled")
        segment, start, end = self._turns[self.played]
        ids_T, _, logprobs_T, versions_T = segment.arrays()
        asked = [token for part in (*request.documents, request.ids) for token in part]
        if ids_T[:start].tolist() != asked:
            at = next((i for i, (a, b) in enumerate(zip(ids_T[:start], asked, strict=False)) if a != b), len(asked))
            raise TokenLedgerError(
                f"turn {self.played} was sampled from {start} tokens, and is asked for after {len(asked)} others: "
                f"the first that differs is number {min(at, start)}"
            )
        self.played += 1
        said = ids_T[start:end].tolist()
        return Generation(
            ids=said,
            logprobs=logprobs_T[start:end].tolist(),
            versions=versions_T[start:end].tolist(),
            finish_reason="stop" if said and said[-1] in request.stop else "length",
            routes=None if request.routes_from is None else _routes(segment, request.routes_from, end - 1),
            recipe=segment.recipe,
        )


def _routes(segment: Segment, first: int, end: int) -> Routes | None:
    kept = segment.routes
    if kept is None:
        return None
    array = np.ascontiguousarray(kept.array()[first:end].astype("<u2" if kept.wide else "u1"))
    return Routes(first=first, ids=array.tobytes(), layers=kept.layers, slots=kept.slots, wide=kept.wide)
