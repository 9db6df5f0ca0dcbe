"""etude's drafts inside an unmodified vLLM: `vllm serve MODEL --speculative-config CONFIG`, where CONFIG is

    {"method": "custom_class", "model": "etude.inference.vllm.proposer.Proposer", "num_speculative_tokens": 128}

vLLM makes one `Proposer` per worker and calls it after every pass. It does not name the requests: rows of token ids
change places from pass to pass. So file and sketch are parsed from the prompt (`prompt_parsing.py`), and a sequence is
recognised by its tokens; sequences with equal tokens get equal drafts. vLLM verifies: drafts change no token.

The module imports only packages of vLLM's environment (it has numpy, numba, tokenizers).
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from etude.edits import Edit
from etude.errors import UserError
from etude.inference.engine.costs import LearnedCosts
from etude.inference.engine.drafts import Drafter, DraftSource, SharedRates, encode_after
from etude.inference.vllm.prompt_parsing import parse_prompt

LONGEST = 128  # vLLM 0.32's rejection sampler asserts that no sequence has more drafted tokens
_PROMPTS = 64  # number of prompts whose sources are kept, for requests with n > 1 and groups


class Proposer:
    """The class that vLLM constructs and calls. Raises UserError for a configuration that it does not support."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        model, longest = vllm_config.model_config, vllm_config.speculative_config.num_speculative_tokens
        tokenizer = getattr(cached_tokenizer_from_config(model), "backend_tokenizer", None)
        if not isinstance(tokenizer, Tokenizer):
            raise UserError("the model has no fast tokenizer (tokenizer.json), by which file and sketch are found")
        sequences = vllm_config.scheduler_config.max_num_seqs
        self._drafts = SequenceDrafts(tokenizer, longest, model.max_model_len, sequences)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Does nothing: there is no model to load. vLLM calls this on every proposer."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafted tokens per row of `token_ids_cpu`, at most the configured number."""
        return self._drafts.after_pass(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


@dataclass
class _DraftedSequence:
    """A sequence that vLLM runs, between two passes."""

    drafter: Drafter
    drafted: int = 0  # tokens of the last proposal
    proposed: int = 0  # the pass after which the proposal was made


class SequenceDrafts:
    """Drafts for sequences that only their tokens identify. `longest` is the greatest number of drafted tokens per
    sequence, `max_length` the model's context, `sequences` the greatest number of sequences. `clock` returns seconds.
    Raises UserError for a `longest` that vLLM cannot verify."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        longest: int,
        max_length: int,
        sequences: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 1 <= longest <= LONGEST:
            raise UserError(f"num_speculative_tokens is {longest}; vLLM verifies 1 to {LONGEST} tokens per request")
        self._tokenizer, self._longest, self._max_length, self._clock = tokenizer, longest, max_length, clock
        self._known = _SequenceHistories(4 * sequences)  # includes requests that wait for memory
        self._sources: OrderedDict[bytes, tuple[DraftSource, ...]] = OrderedDict()
        self._shared = SharedRates()
        self._costs = LearnedCosts()
        self._passes = 0
        self._returned = 0.0
        # Compile the kernels now, not in a user's first pass.
        warm = Drafter((DraftSource("file", np.zeros(4, np.int32)),), 1, SharedRates())
        for length in (2, 3):
            warm.propose(np.arange(1, length + 1, dtype=np.int32), 1)

    def after_pass(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int] | np.ndarray, ids_RT: np.ndarray
    ) -> list[list[int]]:
        """Drafts for each row. `sampled` are the tokens that the pass emitted (none within a prompt); row r includes
        them in ids_RT[r, : lengths[r]]."""
        begin = self._clock()
        histories = {r: ids_RT[r, : int(lengths[r])] for r, new in enumerate(sampled) if len(new)}
        sequences = {r: self._sequence(history, len(sampled[r])) for r, history in histories.items()}
        complete = len(sequences) == len(sampled) and all(s.proposed == self._passes for s in sequences.values())
        if sequences and complete:
            # Without a prompt, the pass had one token per sequence and the drafted tokens. It began when its drafts
            # were returned: between two passes of the same sequences there is no waiting.
            self._costs.note(sum(1 + s.drafted for s in sequences.values()), begin - self._returned)
        self._passes += 1
        drafts = self._choose(histories, sequences)
        self._returned = self._clock()
        return [drafts.get(r, []) for r in range(len(sampled))]

    def _choose(self, histories: dict[int, np.ndarray], sequences: dict[int, _DraftedSequence]) -> dict[int, list[int]]:
        proposals = {}
        for r, sequence in sequences.items():
            room = min(self._longest, self._max_length - len(histories[r]) - 1)
            proposals[r] = sequence.drafter.propose(histories[r], max(room, 0))
        limits, rates = [len(p.ids) for p in proposals.values()], [p.rate for p in proposals.values()]
        counts = self._costs.curve().choose(len(sequences), len(sequences), limits, rates)
        drafts = {}
        for (r, proposal), count in zip(proposals.items(), counts, strict=True):
            sequence = sequences[r]
            sequence.drafter.fed(count)
            sequence.drafted, sequence.proposed = count, self._passes
            self._known.put(histories[r], sequence)
            drafts[r] = proposal.ids[:count].tolist()
        return drafts

    def _sequence(self, history_T: np.ndarray, new: int) -> _DraftedSequence:
        """The sequence whose history ended before the `new` last tokens, or a new sequence with that prompt."""
        before_T = history_T[: len(history_T) - new]
        known = self._known.take(before_T)
        return known or _DraftedSequence(Drafter(self._of_prompt(before_T), len(before_T), self._shared), proposed=-1)

    def _of_prompt(self, prompt_T: np.ndarray) -> tuple[DraftSource, ...]:
        key = prompt_T.tobytes()
        if key not in self._sources:
            self._sources[key] = sources(self._tokenizer, prompt_T.tolist())
            while len(self._sources) > _PROMPTS:
                self._sources.popitem(last=False)
        return self._sources[key]


class _SequenceHistories:
    """The latest `kept` sequences, by their tokens. Two sequences with equal tokens are interchangeable."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._sequences: OrderedDict[tuple[int, int], list[_DraftedSequence]] = OrderedDict()

    def take(self, ids_T: np.ndarray) -> _DraftedSequence | None:
        """Remove and return a sequence with these tokens; None if there is none."""
        key = self._key(ids_T)
        equal = self._sequences.get(key)
        if equal is None:
            return None
        sequence = equal.pop()
        if not equal:
            del self._sequences[key]
        return sequence

    def put(self, ids_T: np.ndarray, sequence: _DraftedSequence) -> None:
        """Keep a sequence under its tokens."""
        key = self._key(ids_T)
        self._sequences.setdefault(key, []).append(sequence)
        self._sequences.move_to_end(key)
        while len(self._sequences) > self._kept:
            self._sequences.popitem(last=False)

    @staticmethod
    def _key(ids_T: np.ndarray) -> tuple[int, int]:
        # Sequences with equal hashes share drafts, which costs time and changes nothing else.
        return len(ids_T), hash(ids_T.tobytes())


def sources(tokenizer: Tokenizer, prompt: list[int]) -> tuple[DraftSource, ...]:
    """Texts that the answer to a prompt may repeat, the most trusted first: merge, file and sketch of an edit. Empty
    for another prompt; a drafter then has only the sequence's own tokens, prompt included."""
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    edit = parse_prompt(text)
    if edit is None:
        return ()
    try:
        merged = [Edit(edit.code, edit.update).draft().text] if edit.update.strip() else []
    except UserError:  # too large, or a sketch that fits no place: go on without the merge
        merged = []
    # The answer begins with the opening tag, unless the prompt ends with it.
    begun = text.endswith(edit.opening)
    left, head = (edit.opening, "") if begun else ("\n", edit.opening)

    def ids(body: str) -> np.ndarray:
        return encode_after(lambda t: tokenizer.encode(t, add_special_tokens=False).ids, left, head + body)

    drafts = [DraftSource("merge", ids(body + edit.close)) for body in merged]
    drafts.append(DraftSource("file", ids(edit.code + edit.close)))
    if edit.update:
        drafts.append(DraftSource("sketch", ids(edit.update)))
    return tuple(drafts)
