"""Speculative edits: the choice of the drafted tokens to feed, and of those to keep.

Verification is sample and match: at every fed position the token is drawn as in plain decoding, from (seed, position)
and the logits alone, and drafted tokens are kept while they equal the drawn ones. So the emitted tokens are those of
plain decoding with that seed, at any temperature; greedy decoding is the case of temperature 0. A draft decides only
how many tokens one pass yields.

Passes of different sizes sum in different orders, so logits differ in their last bits. In float32, a draw that such a
difference could change (`sampling.MARGIN`) is not taken from a pass with drafts: the sequence draws it in a pass with
one token fed, like plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from etude.inference.engine.costs import CostCurve
from etude.inference.engine.drafts import Drafter, SharedRates
from etude.inference.engine.requests import RunningSequence, SequenceStates


class Speculation:
    """The drafts of an engine's sequences. `curve` is called once, at the first use."""

    def __init__(self, curve: Callable[[], CostCurve]) -> None:
        self._measure = curve
        self._shared = SharedRates()

    @cached_property
    def curve(self) -> CostCurve:
        """Seconds of a pass by its number of tokens."""
        return self._measure()

    def drafts(
        self, sequences: Sequence[RunningSequence], states: SequenceStates, tokens: int
    ) -> list[np.ndarray] | None:
        """The drafted tokens to feed after each sequence's last token, or None if no draft pays. `tokens` is the size
        of the pass without drafts."""
        if not sequences or not self.curve.worth_drafting(len(sequences), tokens):
            return None
        proposals = []
        for sequence in sequences:
            slot, length = sequence.slot, int(states.length[sequence.slot])
            if sequence.drafter is None:
                sequence.drafter = Drafter(sequence.request.sources, len(sequence.request.prompt), self._shared)
            # The last token that the sequence may emit is the model's own.
            alone = sequence.undrafted or states.forced[slot] or sequence.request.params.changes_draws
            room = 0 if alone else int(states.limit[slot]) - length - 1
            proposals.append(sequence.drafter.propose(states.ids[slot, :length], room))
            sequence.undrafted = False
        lengths, rates = [len(p.ids) for p in proposals], [p.rate for p in proposals]
        counts = self.curve.choose(len(sequences), tokens, lengths, rates)
        if not any(counts):
            return None
        drafts = []
        for sequence, proposal, count in zip(sequences, proposals, counts, strict=True):
            draft = proposal.ids[: _until_stop(proposal.ids[:count], sequence.request.stop)]
            assert sequence.drafter is not None
            sequence.drafter.fed(len(draft))
            drafts.append(draft)
        return drafts


def draft_counts(sequence: RunningSequence, states: SequenceStates) -> tuple[int, int]:
    """Numbers of drafted tokens from the sequence's sources that were emitted, and that were never emitted."""
    if sequence.drafter is None:
        return 0, 0
    sequence.drafter.follow(states.ids[sequence.slot, : int(states.length[sequence.slot])])
    return sequence.drafter.counts()


def _until_stop(ids: np.ndarray, stop: tuple[int, ...]) -> int:
    """The number of `ids` to feed: none after a token that ends the sequence."""
    for i, token in enumerate(ids.tolist() if stop else ()):
        if token in stop:
            return i + 1
    return len(ids)


def accepted_length(draft: np.ndarray, ids: np.ndarray, safe: np.ndarray, stop: tuple[int, ...]) -> int:
    """The number of drawn `ids` [K + 1] to emit: the tokens of the draft [K] that are right, and one more. Ends before
    the first draw that is not `safe` and with the first stop token."""
    wrong = np.flatnonzero(draft != ids[:-1])
    count = int(wrong[0]) + 1 if len(wrong) else len(ids)
    if len(unsafe := np.flatnonzero(~safe[:count])):
        count = int(unsafe[0])
    return _until_stop(ids[:count], stop)
