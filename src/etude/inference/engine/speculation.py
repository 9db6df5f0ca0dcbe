"""Speculative edits: which drafted tokens are fed, and which of them are kept.

Verification is sample and match: at every fed position the token is drawn as if it were the row's turn, from (seed,
position) and the logits alone, and drafted tokens are kept as long as they are the ones that were drawn. What is
emitted is therefore what plain decoding emits with that seed, at any temperature; greedy is the case of temperature 0.
A draft decides nothing but how many tokens one pass yields.

Passes of different sizes sum in different orders, so logits differ in their last bits. In float32 a draw that such a
difference could turn (`sampling.MARGIN`) is not taken from a pass with drafts: the row decides it alone, one token fed,
as plain decoding does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from etude.inference.engine.costs import CostCurve
from etude.inference.engine.drafts import Drafter, Shared
from etude.inference.engine.requests import RunningSequence, Slots

NO_DRAFT = np.empty(0, np.int32)


class Speculation:
    """The drafts of an engine's rows. `curve` is called once, when it is first needed."""

    def __init__(self, curve: Callable[[], CostCurve]) -> None:
        self._measure = curve
        self._curve: CostCurve | None = None
        self._shared = Shared()

    @property
    def curve(self) -> CostCurve:
        if self._curve is None:
            self._curve = self._measure()
        return self._curve

    def drafts(self, rows: Sequence[RunningSequence], slots: Slots, tokens: int) -> list[np.ndarray] | None:
        """The drafted tokens to feed after each row's last one, or None; `tokens` is the size of the pass without."""
        if not rows or not self.curve.worth_drafting(len(rows), tokens):
            return None
        proposals = []
        for row in rows:
            length = int(slots.length[row.slot])
            if row.drafter is None:
                row.drafter = Drafter(row.request.sources, len(row.request.prompt), self._shared)
            # The last token that the row may emit is the model's own.
            room = 0 if row.alone else int(slots.limit[row.slot]) - length - 1
            proposals.append(row.drafter.propose(slots.ids[row.slot, :length], room))
            row.alone = False
        counts = self.curve.choose(len(rows), tokens, [len(p.ids) for p in proposals], [p.rate for p in proposals])
        if not any(counts):
            return None
        drafts = []
        for row, proposal, count in zip(rows, proposals, counts, strict=True):
            draft = proposal.ids[: _until_stop(proposal.ids[:count], row.request.stop)]
            assert row.drafter is not None
            row.drafter.fed(len(draft))
            drafts.append(draft)
        return drafts

    @staticmethod
    def counts(row: RunningSequence, slots: Slots) -> tuple[int, int]:
        """Tokens of the row's sources drafted and emitted, and drafted and never emitted."""
        if row.drafter is None:
            return 0, 0
        row.drafter.follow(slots.ids[row.slot, : int(slots.length[row.slot])])
        return row.drafter.counts()


def _until_stop(ids: np.ndarray, stop: tuple[int, ...]) -> int:
    """How many of `ids` to feed: nothing comes after a token that ends the row."""
    for i, token in enumerate(ids.tolist() if stop else ()):
        if token in stop:
            return i + 1
    return len(ids)


def kept(draft: np.ndarray, ids: np.ndarray, safe: np.ndarray, stop: tuple[int, ...]) -> int:
    """How many of the drawn `ids` [K + 1] are emitted: the draft's [K] as far as it was right, and one more.

    Ends before the first draw that is not `safe` and with the first stop token.
    """
    wrong = np.flatnonzero(draft != ids[:-1])
    count = int(wrong[0]) + 1 if len(wrong) else len(ids)
    if len(unsafe := np.flatnonzero(~safe[:count])):
        count = int(unsafe[0])
    return _until_stop(ids[:count], stop)
