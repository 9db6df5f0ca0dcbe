"""An episode played again from its segments: proof that the harness still sends the same tokens to the model.

Addresses of objects (`<Shelf object at 0x7f3a...>`) in the output of tools are drawn anew in each process. Texts that
differ in addresses alone count as the same.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from etude.grading.cheats import Decoys
from etude.harness import EngineModel, TokenLedgerError, UngradedEpisode
from etude.protocol import GenerateRequest
from etude.records import Episode, Generation, Routes, Segment, StopReason, Task
from etude.rollout.environments.environment import EnvironmentFailed
from etude.rollout.episode import RolloutContext, open_box
from etude.sandbox import BoxError


async def replay_episode(context: RolloutContext, task: Task, episode: Episode, decoys: Decoys | None = None) -> str:
    """The first difference in tokens when `episode` is played again in a new box: "" if there is none. Its calls are
    run; nothing is sampled or graded. An episode that ended by timeout is compared up to its last turn."""
    if not isinstance(context.model, EngineModel):
        raise TypeError("an episode over a chat API has no tokens that could be played again")
    text = context.model.renderer.text
    recorded = RecordedPolicy(episode.segments, text)
    context = replace(context, model=replace(context.model, policy=recorded))
    timed_out = episode.stop_reason is StopReason.SECONDS
    try:
        again = await _play_again(context, task, episode, decoys)
    except TokenLedgerError as e:
        return "" if timed_out and recorded.played == recorded.turns else str(e)
    except (BoxError, TimeoutError) as e:
        return f"the box was lost: {type(e).__name__}: {e}"
    except EnvironmentFailed as e:
        return str(e)
    if recorded.played < recorded.turns:
        return f"it ended ({again.stop_reason}) after {recorded.played} of {recorded.turns} turns"
    same = again.segments == episode.segments or (
        len(again.segments) == len(episode.segments)
        and all(
            _alike(a.arrays()[0].tolist(), b.arrays()[0].tolist(), text)
            for a, b in zip(again.segments, episode.segments, strict=True)
        )
    )
    return "" if timed_out or same else "what follows the last turn is another text"


async def _play_again(context: RolloutContext, task: Task, episode: Episode, decoys: Decoys | None) -> UngradedEpisode:
    environment, own = context.taskset.of(task)
    async with open_box(context, environment, own, decoys) as box:
        return (await environment.play(context.spec(own, episode.seed), box)).ungraded


# Whole, or as pytest has cut it: long values lose their middle.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}|(?<=at )0x[0-9a-fA-F]*\.\.\.|\.\.\.[0-9a-fA-F]+(?=>)")


def _alike(ids_T: Sequence[int], others_T: Sequence[int], text: Callable[[Sequence[int]], str] | None) -> bool:
    """Whether two lists of tokens are the same, or their texts are but for addresses of objects."""
    one, other = list(ids_T), list(others_T)
    return one == other or (text is not None and _ADDRESS.sub("0x", text(one)) == _ADDRESS.sub("0x", text(other)))


class RecordedPolicy:
    """A policy that repeats the turns of an episode's segments. Each prompt must be, token by token, the one that the
    turn was sampled from, its documents included. With `text`, which decodes tokens, addresses may differ."""

    def __init__(self, segments: Sequence[Segment], text: Callable[[Sequence[int]], str] | None = None) -> None:
        self._text = text
        self._turns = [(segment, *span) for segment in segments for span in segment.spans()]
        self.played = 0

    @property
    def turns(self) -> int:
        """The number of turns in the segments, summaries included."""
        return len(self._turns)

    async def generate(
        self,
        request: GenerateRequest,
        timeout: float,
        on_part: Callable[[Generation], None] | None = None,
        begun: Generation | None = None,
    ) -> Generation:
        """See `harness.loop.Policy`. Raises TokenLedgerError for another prompt, or if no turn is left."""
        if self.played == self.turns:
            raise TokenLedgerError(f"turn {self.played} was never sampled")
        segment, start, end = self._turns[self.played]
        ids_T, _, logprobs_T, versions_T = segment.arrays()
        prompt = [token for part in (*request.documents, request.ids) for token in part]
        if not _alike(ids_T[:start].tolist(), prompt, self._text):
            at = next((i for i, (a, b) in enumerate(zip(ids_T[:start], prompt, strict=False)) if a != b), len(prompt))
            raise TokenLedgerError(
                f"turn {self.played} was sampled from {start} tokens, and is asked for after {len(prompt)} others: "
                f"the first that differs is number {min(at, start)}"
            )
        self.played, shifted = self.played + 1, start != len(prompt)
        sampled = ids_T[start:end].tolist()
        return Generation(
            ids=sampled,
            logprobs=logprobs_T[start:end].tolist(),
            versions=versions_T[start:end].tolist(),
            finish_reason="stop" if sampled and sampled[-1] in request.stop else "length",
            # Those of shifted tokens are not known.
            routes=None if request.routes_from is None or shifted else _routes(segment, request.routes_from, end - 1),
            recipe=segment.recipe,
        )


def _routes(segment: Segment, first: int, end: int) -> Routes | None:
    kept = segment.routes
    if kept is None:
        return None
    array = np.ascontiguousarray(kept.array()[first:end].astype("<u2" if kept.wide else "u1"))
    return Routes(first=first, ids=array.tobytes(), layers=kept.layers, slots=kept.slots, wide=kept.wide)
