"""Runs passes: feeds a batch to the model, draws tokens, and verifies drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from etude.inference.engine.cache import PagedCache
from etude.inference.engine.counters import Counters
from etude.inference.engine.forward import PromptScores, cost_curve, logits_of, score
from etude.inference.engine.requests import RunningSequence, SequenceStates
from etude.inference.engine.sampling import MARGIN, sample
from etude.inference.engine.sampling_params import NothingAllowed, TopLogprobs
from etude.inference.engine.scheduler import ScheduledBatch
from etude.inference.engine.speculation import Speculation, accepted_length
from etude.models import batch_invariant

Drafts = list[np.ndarray] | None


@dataclass(frozen=True)
class Drawn:
    """The draws of one pass: `count_R` of each sequence, in order. `drafts`, if any, belong to the first sequences."""

    sequences: list[RunningSequence]
    drafts: Drafts
    count_R: np.ndarray
    ids_S: np.ndarray
    log_probs_S: np.ndarray
    margin_S: np.ndarray
    tops: dict[int, TopLogprobs]


class Runner:
    """The passes of one model over the cache and the states of its sequences. `serial`: no padding, one sequence at a
    time. `routes`: the experts of every token are kept."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        states: SequenceStates,
        counters: Counters,
        *,
        serial: bool,
        routes: bool,
        speculate: bool,
    ) -> None:
        self._model, self._cache, self._states, self._counters = model, cache, states, counters
        self._serial, self._routes = serial, routes
        self.speculation = Speculation(lambda: cost_curve(model, cache)) if speculate else None
        # In narrower types every draw would be doubtful, so there the pass with drafts decides.
        self._margin = MARGIN if model.dtype == torch.float32 else -1.0

    def run(self, batch: ScheduledBatch, version: int) -> list[str]:
        """Computes the batch and emits tokens. Returns the reasons why its sequences end, as `Scheduler.update` takes
        them. A sequence that cannot be computed fails, and the others go on."""
        try:
            drawn = [self._draw(batch, drafting=True)]
        except Exception:
            drawn = self._draw_alone(batch)
        reasons: dict[RunningSequence, str] = {}
        for part in drawn:
            if part is not None:
                reasons |= self._emit(part, version)
        self._counters.prefilled_tokens += sum(n for _, n in batch.chunks)
        return [reasons.get(s, "") for s in (*batch.decoding, *batch.prompts)] if any(reasons.values()) else []

    def _draw_alone(self, batch: ScheduledBatch) -> list[Drawn | None]:
        """Runs every sequence in a pass of its own, without drafts, after a pass of all has failed. Keys and values
        that it left are overwritten, and no token was emitted. Sequences that fail alone, too, are at fault."""
        alone = [ScheduledBatch([sequence], []) for sequence in batch.decoding]
        alone += [ScheduledBatch([], [chunk]) for chunk in batch.chunks]
        drawn: list[Drawn | None] = []
        for part in alone:
            sequence = [*part.decoding, *(sequence for sequence, _ in part.chunks)][0]
            if sequence.drafter is not None:
                sequence.drafter.fed(0)
            try:
                drawn.append(self._draw(part, drafting=False))
            except Exception as e:
                sequence.fail(e)
        return drawn

    def _draw(self, batch: ScheduledBatch, *, drafting: bool) -> Drawn | None:
        """Runs one pass, and draws at every sampled position; None if it has no such position. Emits nothing yet."""
        decoding, chunks, prompts = batch.decoding, batch.chunks, batch.prompts
        fed = len(decoding) + sum(n for _, n in chunks)
        drafts = self.speculation.drafts(decoding, self._states, fed) if self.speculation and drafting else None
        ids_N, slot_N, position_N, count_R = self._decoding_tokens(decoding, drafts)
        decoded = len(ids_N)
        ids, slots, positions = [ids_N], [slot_N], [position_N]
        for sequence, n in chunks:
            ids.append(np.array(sequence.prefix[sequence.fed : sequence.fed + n], dtype=np.int64))
            slots.append(np.full(n, sequence.slot, dtype=np.int64))
            positions.append(np.arange(sequence.fed, sequence.fed + n))
        ends = np.cumsum([n for _, n in chunks], dtype=np.int64) + decoded - 1
        sampled_S = np.concatenate([np.arange(decoded), ends[batch.complete]])
        ids_N, slot_N, position_N = np.concatenate(ids), np.concatenate(slots), np.concatenate(positions)
        logits_SV = logits_of(
            self._model,
            self._cache,
            self._states.table,
            ids_N,
            slot_N,
            position_N,
            sampled_S,
            alone=self._serial,
            routes=self._routes,
        )
        if not len(sampled_S):
            return None
        states, sequences = self._states, [*decoding, *prompts]
        count_R = np.concatenate([count_R, np.ones(len(prompts), np.int64)])
        slot_S = np.repeat(np.array([sequence.slot for sequence in sequences], dtype=np.int64), count_R)
        top_S = self._process(logits_SV, sequences, count_R)
        # The token after position p is drawn with (seed, p + 1).
        draws = sample(
            logits_SV,
            states.temperature[slot_S],
            states.top_p[slot_S],
            states.seed[slot_S],
            position_N[sampled_S] + 1,
            top_S,
        )
        _fail_without_tokens(sequences, count_R, logits_SV, draws.log_probs_N)
        self._force(slot_S, position_N[sampled_S] + 1, logits_SV, *draws[:2])
        return Drawn(sequences, drafts, count_R, *draws)

    def _process(self, logits_SV: Tensor, sequences: list[RunningSequence], count_R: np.ndarray) -> dict[int, int]:
        """Applies the sampling parameters of sequences to their logits. Returns the requested number of most probable
        tokens, by row. A sequence whose parameters cannot be applied fails."""
        states, start_R, top_S = self._states, np.cumsum(count_R) - count_R, {}
        for sequence, start, count in zip(sequences, start_R.tolist(), count_R.tolist(), strict=True):
            request, params, slot = sequence.request, sequence.request.params, sequence.slot
            if params.top_logprobs:
                top_S |= dict.fromkeys(range(start, start + count), params.top_logprobs)
            if params.changes_draws:  # such sequences are not drafted for: one row
                ids = states.ids[slot, : states.length[slot]]
                try:
                    params.process(
                        logits_SV[start], ids, len(request.prompt), states.temperature[slot].item(), request.stop
                    )
                except Exception as e:
                    sequence.fail(e)
        return top_S

    def _force(
        self, slot_S: np.ndarray, position_S: np.ndarray, logits_SV: Tensor, ids_S: np.ndarray, log_probs_S: np.ndarray
    ) -> None:
        """Replaces draws by forced tokens, with their log-probabilities as `forward.score` computes them."""
        forced_N = np.flatnonzero(self._states.forced[slot_S])
        if len(forced_N):
            ids_N = self._states.ids[slot_S[forced_N], position_S[forced_N]].astype(np.int64)
            log_probs_NV = batch_invariant.log_probs(logits_SV[torch.from_numpy(forced_N).to(logits_SV.device)])
            next_N1 = torch.from_numpy(ids_N).to(logits_SV.device)[:, None]
            ids_S[forced_N], log_probs_S[forced_N] = ids_N, log_probs_NV.gather(1, next_N1)[:, 0].cpu().numpy()
            self._counters.scored_tokens += len(ids_N)

    def score(self, ids: list[int], top: int = 0) -> PromptScores:
        """Log-probabilities as `forward.score` computes them, beside the running sequences."""
        scores = score(self._model, self._cache, ids, top, alone=self._serial)
        self._counters.scored_tokens += len(ids)
        return scores

    def _decoding_tokens(
        self, sequences: list[RunningSequence], drafts: Drafts
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids, slots and positions of every sequence's last token and its draft, and their number per sequence."""
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

    def _emit(self, drawn: Drawn, version: int) -> dict[RunningSequence, str]:
        """Emits for each sequence its drawn token, or as many as its draft was right. Returns the reasons why sequences
        end. A sequence whose draws are not finite fails."""
        states, count_R = self._states, drawn.count_R
        start_R = np.cumsum(count_R) - count_R
        emitted_R = self._verify(drawn, start_R)
        finite_R = np.logical_and.reduceat(np.isfinite(drawn.log_probs_S), start_R)
        finite_R &= np.array([sequence.error is None for sequence in drawn.sequences])
        for sequence in itertools.compress(drawn.sequences, ~finite_R):
            sequence.fail(FloatingPointError(f"the weights of version {version} give logits that are not finite"))
        good = np.flatnonzero(finite_R)
        sequences, start_R, emitted_R = [drawn.sequences[i] for i in good], start_R[good], emitted_R[good]
        slot_R = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
        if drawn.drafts is None:
            done_R = states.append(slot_R, drawn.ids_S[start_R], drawn.log_probs_S[start_R], version)
        else:
            done_R = states.extend(slot_R, start_R, emitted_R, drawn.ids_S, drawn.log_probs_S, version)
        self._counters.sampled_tokens += int(emitted_R[~states.forced[slot_R]].sum())
        complete_R = np.zeros(len(sequences), bool)
        for i, (sequence, start, count) in enumerate(zip(sequences, start_R.tolist(), emitted_R.tolist(), strict=True)):
            span = slice(start, start + count)
            complete_R[i] = self._consume(sequence, drawn.ids_S[span])
            if sequence.request.params.top_logprobs:
                sequence.top_logprobs += [drawn.tops[s] for s in range(start, start + count)]
            if sequence.on_token is not None:
                self._tell(sequence, sequence.on_token, drawn.ids_S[span], drawn.log_probs_S[span])
        if not (done_R | complete_R).any():
            return {}
        reasons = states.reasons(slot_R, done_R)
        return {s: "stop" if complete else r for s, r, complete in zip(sequences, reasons, complete_R, strict=True)}

    @staticmethod
    def _consume(sequence: RunningSequence, ids: np.ndarray) -> bool:
        """Whether the sequence's grammar ends with these tokens."""
        request = sequence.request
        try:
            return request.params.grammar is not None and request.params.consume(ids.tolist(), request.stop)
        except ValueError as e:
            sequence.fail(e)
            return False

    @staticmethod
    def _tell(
        sequence: RunningSequence, on_token: Callable[[int, float], None], ids: np.ndarray, log_probs: np.ndarray
    ) -> None:
        try:
            for token, log_prob in zip(ids.tolist(), log_probs.tolist(), strict=True):
                on_token(token, log_prob)
        except Exception as e:
            sequence.fail(e)

    def _verify(self, drawn: Drawn, start_R: np.ndarray) -> np.ndarray:
        """The number of drawn tokens that each sequence emits, int64 [R]."""
        emitted_R = np.ones(len(drawn.sequences), np.int64)
        if drawn.drafts is None:
            return emitted_R
        safe_S = drawn.margin_S >= self._margin
        for i, (sequence, draft) in enumerate(zip(drawn.sequences, drawn.drafts, strict=False)):
            if len(draft):
                span = slice(start_R[i], start_R[i] + len(draft) + 1)
                emitted_R[i] = accepted_length(draft, drawn.ids_S[span], safe_S[span], sequence.request.stop)
                sequence.undrafted = not safe_S[span][: emitted_R[i] + 1].all()
                self._counters.drafted_tokens += len(draft)
                self._counters.accepted_tokens += max(int(emitted_R[i]) - 1, 0)
        self._counters.draft_passes += 1
        return emitted_R


def _fail_without_tokens(
    sequences: list[RunningSequence], count_R: np.ndarray, logits_SV: Tensor, log_probs_S: np.ndarray
) -> None:
    """Fails the sequences whose parameters exclude every token, which a draw that is no number may mean."""
    for sequence, start in zip(sequences, (np.cumsum(count_R) - count_R).tolist(), strict=True):
        params = sequence.request.params
        if not np.isfinite(log_probs_S[start]) and params.changes_draws and (logits_SV[start] == -torch.inf).all():
            sequence.fail(NothingAllowed("its sampling parameters exclude every token"))
