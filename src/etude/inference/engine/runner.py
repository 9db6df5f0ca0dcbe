"""One pass after the other: feed a batch to the model, draw tokens, and verify drafts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.inference.engine.cache import PagedCache
from etude.inference.engine.counters import Counters
from etude.inference.engine.forward import cost_curve, logits_of, score
from etude.inference.engine.requests import RunningSequence, SequenceStates
from etude.inference.engine.sampling import MARGIN, sample
from etude.inference.engine.scheduler import ScheduledBatch
from etude.inference.engine.speculation import Speculation, accepted_length

Drafts = list[np.ndarray] | None


class Runner:
    """The passes of one model over the cache and the states of its sequences. `serial`: no padding, one sequence at a
    time. `routes`: the experts of every token are kept."""

    def __init__(
        self, model: PreTrainedModel, cache: PagedCache, states: SequenceStates, counters: Counters, *, serial: bool,
        routes: bool, speculate: bool,
    ) -> None:  # fmt: skip
        self._model, self._cache, self._states, self._counters = model, cache, states, counters
        self._serial, self._routes = serial, routes
        self.speculation = Speculation(lambda: cost_curve(model, cache)) if speculate else None
        # In narrower types every draw would be in doubt: there the pass with drafts decides.
        self._margin = MARGIN if model.dtype == torch.float32 else -1.0

    def run(self, batch: ScheduledBatch, version: int) -> list[str]:
        """Computes the batch and emits tokens; returns why its sequences end, as `Scheduler.update` takes it. Raises
        FloatingPointError if the weights give logits that are not finite."""
        decoding, chunks, prompts = batch.decoding, batch.chunks, batch.prompts
        fed = len(decoding) + sum(n for _, n in chunks)
        drafts = self.speculation.drafts(decoding, self._states, fed) if self.speculation else None
        ids_N, slot_N, position_N, count_R = self._decoding_tokens(decoding, drafts)
        decoded = len(ids_N)
        ids, slots, positions = [ids_N], [slot_N], [position_N]
        for sequence, n in chunks:
            ids.append(np.array(sequence.request.prompt[sequence.fed : sequence.fed + n], dtype=np.int64))
            slots.append(np.full(n, sequence.slot, dtype=np.int64))
            positions.append(np.arange(sequence.fed, sequence.fed + n))
        ends = np.cumsum([n for _, n in chunks], dtype=np.int64) + decoded - 1
        sampled_S = np.concatenate([np.arange(decoded), ends[batch.complete]])
        ids_N, slot_N, position_N = np.concatenate(ids), np.concatenate(slots), np.concatenate(positions)
        logits_SV = logits_of(
            self._model, self._cache, self._states.table, ids_N, slot_N, position_N, sampled_S, alone=self._serial,
            routes=self._routes,
        )  # fmt: skip
        self._counters.prefilled_tokens += fed - len(decoding)
        if not len(sampled_S):
            return []
        # The token after position p is drawn with (seed, p + 1).
        count_R = np.concatenate([count_R, np.ones(len(prompts), np.int64)])
        return self._sample([*decoding, *prompts], drafts, count_R, position_N[sampled_S] + 1, logits_SV, version)

    def score(self, ids: list[int]) -> np.ndarray:
        """Log-probabilities as `forward.score` gives them, beside the running sequences."""
        log_probs = score(self._model, self._cache, ids, alone=self._serial)
        self._counters.scored_tokens += len(ids)
        return log_probs

    def _decoding_tokens(
        self, sequences: list[RunningSequence], drafts: Drafts
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids, slots and positions of every sequence's last token and its draft, and how many tokens each has here."""
        states = self._states
        slot_R = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
        if drafts is None:
            return states.last[slot_R], slot_R, states.length[slot_R] - 1, np.ones(len(sequences), np.int64)
        count_R = np.array([len(draft) + 1 for draft in drafts], dtype=np.int64)
        start_R = np.cumsum(count_R) - count_R
        offset_N = np.arange(count_R.sum()) - np.repeat(start_R, count_R)
        ids_N = np.empty(len(offset_N), np.int64)
        ids_N[offset_N > 0] = np.concatenate(drafts)
        ids_N[start_R] = states.last[slot_R]
        slot_N = np.repeat(slot_R, count_R)
        return ids_N, slot_N, states.length[slot_N] - 1 + offset_N, count_R

    def _sample(
        self, sequences: list[RunningSequence], drafts: Drafts, count_R: np.ndarray, position_S: np.ndarray,
        logits_SV: Tensor, version: int,
    ) -> list[str]:  # fmt: skip
        """Draws a token at every sampled position; each sequence emits its own, or as many as its draft was right."""
        states = self._states
        slot_R = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
        slot_S = np.repeat(slot_R, count_R)
        ids_S, log_probs_S, margin_S = sample(
            logits_SV, states.temperature[slot_S], states.top_p[slot_S], states.seed[slot_S], position_S
        )
        if not np.isfinite(log_probs_S).all():
            raise FloatingPointError(f"the weights of version {version} give logits that are not finite")
        start_R = np.cumsum(count_R) - count_R
        if drafts is None:
            emitted_R = count_R
            done_R = states.append(slot_R, ids_S, log_probs_S, version)
        else:
            emitted_R = self._verify(sequences, drafts, start_R, ids_S, margin_S)
            done_R = states.extend(slot_R, start_R, emitted_R, ids_S, log_probs_S, version)
        self._counters.sampled_tokens += int(emitted_R.sum())
        for sequence, start, count in zip(sequences, start_R.tolist(), emitted_R.tolist(), strict=True):
            if sequence.on_token is not None:
                for token, log_prob in zip(ids_S[start : start + count], log_probs_S[start:], strict=False):
                    sequence.on_token(int(token), float(log_prob))
        return states.reasons(slot_R, done_R) if done_R.any() else []

    def _verify(
        self, sequences: list[RunningSequence], drafts: list[np.ndarray], start_R: np.ndarray, ids_S: np.ndarray,
        margin_S: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """How many of its drawn tokens each sequence emits, int64 [R]."""
        emitted_R = np.ones(len(sequences), np.int64)
        safe_S = margin_S >= self._margin
        for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=False)):
            if len(draft):
                span = slice(start_R[i], start_R[i] + len(draft) + 1)
                emitted_R[i] = accepted_length(draft, ids_S[span], safe_S[span], sequence.request.stop)
                sequence.undrafted = not safe_S[span][: emitted_R[i] + 1].all()
                self._counters.drafted_tokens += len(draft)
                self._counters.accepted_tokens += max(int(emitted_R[i]) - 1, 0)
        self._counters.draft_passes += 1
        return emitted_R
