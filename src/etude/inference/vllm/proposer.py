"""etude's drafts inside an unmodified vLLM: `vllm serve MODEL --speculative-config CONFIG`, where CONFIG is

    {"method": "custom_class", "model": "etude.inference.vllm.proposer.Proposer", "num_speculative_tokens": 128}

vLLM makes one `Proposer` per worker and asks it after every pass. It says nothing of the requests: rows of token ids
come without names and change places. So file and sketch are looked for in the prompt
(`etude.inference.server.prompt_parsing`), and a row is known again by its tokens; rows with equal tokens want equal
drafts. vLLM verifies: drafts decide no token.

Beyond what vLLM's environment holds (numpy, numba, tokenizers) nothing is imported.
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

from etude.edits.edit import Edit
from etude.errors import UserError
from etude.inference.engine.costs import LearnedCosts
from etude.inference.engine.drafts import Drafter, DraftSource, Shared, encode_after
from etude.inference.server.prompt_parsing import find

LONGEST = 128  # vLLM 0.32's rejection sampler asserts that no row has more drafted tokens
_PROMPTS = 64  # prompts whose sources are kept, for requests with n > 1 and groups


class Proposer:
    """What vLLM constructs and calls. Raises UserError for a configuration under which it could not work."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        model, longest = vllm_config.model_config, vllm_config.speculative_config.num_speculative_tokens
        tokenizer = getattr(cached_tokenizer_from_config(model), "backend_tokenizer", None)
        if not isinstance(tokenizer, Tokenizer):
            raise UserError("the model has no fast tokenizer (tokenizer.json), by which file and sketch are found")
        rows = vllm_config.scheduler_config.max_num_seqs
        self._drafts = RowDrafts(tokenizer, longest, model.max_model_len, rows)

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM asks every proposer to; there is none to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafted tokens per row, of any number up to the configured one."""
        return self._drafts.after_pass(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)


@dataclass
class _DraftedSequence:
    drafter: Drafter
    drafted: int = 0  # tokens of the last proposal
    asked: int = 0  # the pass after which it was made


class RowDrafts:
    """Drafts for rows that are known by their tokens only.

    `longest` is the greatest number of drafted tokens per row, `max_length` the model's context, `rows` the greatest
    number of rows. `clock` gives seconds. Raises UserError for a `longest` that vLLM cannot verify.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        longest: int,
        max_length: int,
        rows: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 1 <= longest <= LONGEST:
            raise UserError(f"num_speculative_tokens is {longest}; vLLM verifies 1 to {LONGEST} tokens per request")
        self._tokenizer, self._longest, self._max_length, self._clock = tokenizer, longest, max_length, clock
        self._rows = _SequenceHistories(4 * rows)  # a request that waits for memory is in no pass for a while
        self._sources: OrderedDict[bytes, tuple[DraftSource, ...]] = OrderedDict()
        self._shared = Shared()
        self._costs = LearnedCosts()
        self._passes = 0
        self._returned = 0.0
        # The kernels are compiled now, not in a user's first pass.
        warm = Drafter((DraftSource("file", np.zeros(4, np.int32)),), 1, Shared())
        for length in (2, 3):
            warm.propose(np.arange(1, length + 1, dtype=np.int32), 1)

    def after_pass(
        self, sampled: Sequence[Sequence[int]], lengths: Sequence[int] | np.ndarray, ids_RT: np.ndarray
    ) -> list[list[int]]:
        """Drafts for each row. `sampled` are the tokens that the pass emitted (none within a prompt); row r has
        ids_RT[r, : lengths[r]] with them."""
        begin = self._clock()
        histories = {r: ids_RT[r, : int(lengths[r])] for r, new in enumerate(sampled) if len(new)}
        rows = {r: self._row(history, len(sampled[r])) for r, history in histories.items()}
        if rows and len(rows) == len(sampled) and all(row.asked == self._passes for row in rows.values()):
            # Without a prompt in it, the pass had one token per row and what was drafted. It began when its drafts were
            # given; nobody waits between two passes of the same rows.
            self._costs.note(sum(1 + row.drafted for row in rows.values()), begin - self._returned)
        self._passes += 1
        drafts = self._choose(histories, rows)
        self._returned = self._clock()
        return [drafts.get(r, []) for r in range(len(sampled))]

    def _choose(self, histories: dict[int, np.ndarray], rows: dict[int, _DraftedSequence]) -> dict[int, list[int]]:
        proposals = {}
        for r, row in rows.items():
            room = min(self._longest, self._max_length - len(histories[r]) - 1)
            proposals[r] = row.drafter.propose(histories[r], max(room, 0))
        limits, rates = [len(p.ids) for p in proposals.values()], [p.rate for p in proposals.values()]
        counts = self._costs.curve().choose(len(rows), len(rows), limits, rates)
        drafts = {}
        for (r, proposal), count in zip(proposals.items(), counts, strict=True):
            row = rows[r]
            row.drafter.fed(count)
            row.drafted, row.asked = count, self._passes
            self._rows.put(histories[r], row)
            drafts[r] = proposal.ids[:count].tolist()
        return drafts

    def _row(self, history_T: np.ndarray, new: int) -> _DraftedSequence:
        before_T = history_T[: len(history_T) - new]
        known = self._rows.take(before_T)
        return known or _DraftedSequence(Drafter(self._found(before_T), len(before_T), self._shared), asked=-1)

    def _found(self, prompt_T: np.ndarray) -> tuple[DraftSource, ...]:
        key = prompt_T.tobytes()
        if key not in self._sources:
            self._sources[key] = sources(self._tokenizer, prompt_T.tolist())
            while len(self._sources) > _PROMPTS:
                self._sources.popitem(last=False)
        return self._sources[key]


class _SequenceHistories:
    """Rows by the tokens they had, the latest `kept` of them. Two with equal tokens are interchangeable."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._rows: OrderedDict[tuple[int, int], list[_DraftedSequence]] = OrderedDict()

    def take(self, ids_T: np.ndarray) -> _DraftedSequence | None:
        key = self._key(ids_T)
        rows = self._rows.get(key)
        if rows is None:
            return None
        row = rows.pop()
        if not rows:
            del self._rows[key]
        return row

    def put(self, ids_T: np.ndarray, row: _DraftedSequence) -> None:
        key = self._key(ids_T)
        self._rows.setdefault(key, []).append(row)
        self._rows.move_to_end(key)
        while len(self._rows) > self._kept:
            self._rows.popitem(last=False)

    @staticmethod
    def _key(ids_T: np.ndarray) -> tuple[int, int]:
        # Tokens that share a hash would share drafts, which costs time and changes nothing else.
        return len(ids_T), hash(ids_T.tobytes())


def sources(tokenizer: Tokenizer, prompt: list[int]) -> tuple[DraftSource, ...]:
    """What the answer to a prompt may repeat, the most trusted first: merge, file and sketch of an edit, or nothing
    (then a drafter has the row's own tokens, prompt included)."""
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    asked = find(text)
    if asked is None:
        return ()
    try:
        merged = [Edit(asked.code, asked.update).merged()] if asked.update.strip() else []
    except UserError:  # too large, or a sketch that names no place: the model may know better
        merged = []
    # The answer begins with the opening, unless the prompt ends with it.
    begun = text.endswith(asked.opening)
    left, head = (asked.opening, "") if begun else ("\n", asked.opening)

    def ids(body: str) -> np.ndarray:
        return encode_after(lambda t: tokenizer.encode(t, add_special_tokens=False).ids, left, head + body)

    found = [DraftSource("merge", ids(body + asked.close)) for body in merged]
    found.append(DraftSource("file", ids(asked.code + asked.close)))
    if asked.update:
        found.append(DraftSource("sketch", ids(asked.update)))
    return tuple(found)
