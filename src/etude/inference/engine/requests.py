"""Requests, the sequences that run them, and the arrays with the states of running sequences."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from etude.inference.engine.cache import CacheNode
from etude.inference.engine.drafts import Drafter, DraftSource
from etude.inference.engine.sampling_params import MAX_COUNT, NothingAllowed, SamplingParams, TopLogprobs, shown
from etude.protocol import NOBODY, Client, GenerateRequest
from etude.records import Generation

MAX_STOP_IDS = 16
MAX_TEMPERATURE = 1e6
LEAST_TEMPERATURE = 1e-4
"""Below it the most probable token is taken, as at temperature 0: smaller divisors overflow float32 logits."""
MAX_PART_SECONDS = 3600.0
_AFTER_DOCUMENTS = 2**32  # above every token id


class PromptTooLong(ValueError):
    """The prompt leaves no room for an answer in the model's context."""


class RequestFailed(Exception):
    """The engine could not compute this request; others go on. `kind` is that of the refusal."""

    kind: Literal["failed", "invalid"] = "failed"


class ParametersExclude(RequestFailed):
    """The request's own parameters leave no token to draw."""

    kind = "invalid"


class Request(GenerateRequest, frozen=True, kw_only=True, dict=True):
    """One generation as the engine runs it: the fields of the wire, the `sources` of its drafts, and sampling
    parameters. `sources` are texts that the answer may repeat, the most trusted first; they change only the speed. Each
    document is cached by its own tokens, so it should begin with tokens that attention can rest on (a header line).
    `forced` tokens are decoded like sampled ones, but are given by the request; their log-probabilities are those at
    temperature 1."""

    sources: tuple[DraftSource, ...] = ()
    params: SamplingParams = SamplingParams()
    forced: tuple[int, ...] = ()

    @cached_property
    def document_tokens(self) -> int:
        """Number of tokens of all documents."""
        return sum(map(len, self.documents))

    @cached_property
    def prompt(self) -> list[int]:
        """The ids of the documents and of the text after them."""
        return [token for part in (*self.documents, self.ids) for token in part] if self.documents else self.ids

    @cached_property
    def path(self) -> list[int]:
        """The key of the prompt in the prefix cache. A token's keys depend on the tokens that it sees, and documents do
        not see the text before them. So a prompt with documents must not share a prefix with a plain prompt of the same
        ids: the first token of each document, and the first token after the documents, is replaced by a negative
        number."""
        if not self.documents:
            return self.ids
        marked = [token for document in self.documents for token in (~document[0], *document[1:])]
        return [*marked, ~self.ids[0] - _AFTER_DOCUMENTS, *self.ids[1:]]

    def check(self, max_length: int, vocab_size: int) -> None:
        """Raise ValueError if an engine with this context and vocabulary cannot run the request."""
        for i, document in enumerate(self.documents):
            if not document:
                raise ValueError(f"document {i} is empty: leave it out")
        if not self.ids:
            raise ValueError("nothing follows the documents: add a prompt" if self.documents else "the prompt is empty")
        if len(self.prompt) >= max_length:
            parts = f", {self.document_tokens} of them documents" if self.documents else ""
            raise PromptTooLong(
                f"this model's maximum context length is {max_length} tokens, with the answer; the prompt has "
                f"{len(self.prompt)} tokens{parts}"
            )
        if not 0 <= min(self.prompt) <= max(self.prompt) < vocab_size:
            raise ValueError(f"a prompt token is outside the vocabulary of {vocab_size}")
        if not 1 <= self.max_tokens <= MAX_COUNT:
            raise ValueError(f"max_tokens must be at least 1 and at most {MAX_COUNT}, got {shown(self.max_tokens)}")
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature must lie in [0, {MAX_TEMPERATURE:g}], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.part_seconds is not None and not 0.0 <= self.part_seconds <= MAX_PART_SECONDS:
            raise ValueError(f"part_seconds must lie in [0, {MAX_PART_SECONDS:g}], got {self.part_seconds}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), got {shown(self.seed)}")
        if len(self.stop) > MAX_STOP_IDS:
            raise ValueError(f"at most {MAX_STOP_IDS} stop ids, got {len(self.stop)}")
        if self.stop and not 0 <= min(self.stop) <= max(self.stop) < 2**31:
            raise ValueError("a stop id must lie in [0, 2^31)")
        length = len(self.prompt)
        if self.routes_from is not None and not 0 <= self.routes_from < length:
            raise ValueError(f"routes_from must be a position of the prompt of {length}, got {self.routes_from}")
        self.params.check(vocab_size)
        if self.forced and not (len(self.forced) == self.max_tokens and min(self.forced) >= 0):
            raise ValueError(f"forced tokens are all that is answered, got {len(self.forced)} of {self.max_tokens}")
        if self.forced and max(self.forced) >= vocab_size:
            raise ValueError(f"a forced token is outside the vocabulary of {vocab_size}")
        for source in self.sources:
            if len(source.ids) and not 0 <= source.ids.min() <= source.ids.max() < vocab_size:
                raise ValueError(f"a token of the {source.name} is outside the vocabulary of {vocab_size}")


def check_sequence(ids: list[int], max_length: int, vocab_size: int) -> None:
    """Raise ValueError if an engine with this context and vocabulary cannot score `ids`."""
    if not 2 <= len(ids) <= max_length:
        raise ValueError(f"a sequence to score has 2 to {max_length} tokens, got {len(ids)}")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"a token to score is outside the vocabulary of {vocab_size}")


SampledTokens = tuple[list[int], list[float], list[int]]
"""Ids, log-probabilities and versions of sampled tokens."""


@dataclass(eq=False)
class RunningSequence:
    """A request in the engine, from its submission to its generation."""

    request: Request
    future: Future[Generation]
    on_token: Callable[[int, float], None] | None
    client: Client = NOBODY
    tokens: int = 0  # that it may take, those of the prompt included
    number: int = 0  # by arrival
    aborted: bool = False
    error: RequestFailed | None = None  # why it could not be computed
    slot: int = -1  # in the `SequenceStates`; -1 while it waits and after its end
    fed: int = 0  # prompt tokens whose keys and values are computed
    cached: int = 0  # prompt tokens that were not computed for this request
    cached_documents: int = 0  # the part of them that belongs to documents
    pages: list[int] = field(default_factory=list)
    held: list[CacheNode] = field(default_factory=list)  # of the first pages, which others may share
    kv_version: int = 0  # oldest version that computed a key or value it sees
    drafter: Drafter | None = None
    undrafted: bool = False  # the next token is drawn in a pass without drafts
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # at each sampled token, if requested
    sampled: SampledTokens = ([], [], [])  # before it last gave its place
    sent: int = 0  # sampled tokens that left the engine in parts

    @property
    def prefix(self) -> list[int]:
        """The tokens that are fed before it samples on: the prompt's, and those sampled before it gave its place."""
        return [*self.request.prompt, *self.sampled[0]] if self.sampled[0] else self.request.prompt

    @property
    def path(self) -> list[int]:
        """The key of the prefix in the prefix cache."""
        return [*self.request.path, *self.sampled[0]] if self.sampled[0] else self.request.path

    @property
    def can_give_place(self) -> bool:
        """Whether it can go on later from its tokens alone."""
        request = self.request
        return not request.documents and not request.forced and request.routes_from is None and self.error is None

    def abort(self) -> None:
        """Finish at the next step with the tokens sampled so far and reason "abort"."""
        self.aborted = True

    def fail(self, cause: Exception) -> None:
        """Finish at the next step without a generation; the future raises RequestFailed."""
        if self.error is None:
            self.error = failed(cause)


def failed(cause: Exception) -> RequestFailed:
    """The error of a request that could not be computed because of `cause`."""
    if isinstance(cause, NothingAllowed):
        error = ParametersExclude(f"the request cannot be answered: {cause}")
    else:
        error = RequestFailed(f"the engine could not compute this request: {type(cause).__name__} {cause}".rstrip())
    error.__cause__ = cause
    return error


class SequenceStates:
    """The running sequences as arrays over slots, so that no step loops over sequences in Python. `count` sequences run
    at a time, each with up to `max_length` tokens on `pages` pages."""

    def __init__(self, count: int, max_length: int, pages: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self.max_length = max_length
        self.table = np.zeros((count, pages), dtype=np.int32)
        self.length = np.zeros(count, dtype=np.int64)  # tokens of the sequence, the sampled ones included
        self.limit = np.zeros(count, dtype=np.int64)  # length at which the sequence ends
        self.forced = np.zeros(count, dtype=bool)  # whether `ids` holds the coming tokens
        self.last = np.zeros(count, dtype=np.int64)
        self.temperature = np.zeros(count, dtype=np.float64)
        self.top_p = np.zeros(count, dtype=np.float64)
        self.seed = np.zeros(count, dtype=np.int64)
        self.stop = np.full((count, MAX_STOP_IDS), -1, dtype=np.int64)
        self.ids = np.zeros((count, max_length), dtype=np.int32)  # by position
        self.log_probs = np.zeros((count, max_length), dtype=np.float32)
        self.versions = np.zeros((count, max_length), dtype=np.int32)

    def open(self, sequence: RunningSequence) -> None:
        """Give the sequence a free slot. Raises IndexError if there is none."""
        request, slot = sequence.request, self.free.pop()
        sequence.slot = slot
        self.write_pages(sequence)
        length, prefix = len(request.prompt), sequence.prefix
        self.ids[slot, : len(prefix)] = prefix
        self.log_probs[slot, length : len(prefix)], self.versions[slot, length : len(prefix)] = sequence.sampled[1:]
        self.length[slot] = len(prefix)
        self.limit[slot] = min(length + request.max_tokens, self.max_length)
        self.forced[slot] = bool(request.forced)
        self.ids[slot, length : self.limit[slot]][: len(request.forced)] = request.forced[: self.max_length - length]
        self.temperature[slot] = request.temperature if request.temperature >= LEAST_TEMPERATURE else 0.0
        self.top_p[slot] = request.top_p
        self.seed[slot] = request.seed
        self.stop[slot] = -1
        self.stop[slot, : len(request.stop)] = request.stop

    def write_pages(self, sequence: RunningSequence) -> None:
        """Update the page table after the sequence's pages have changed."""
        self.table[sequence.slot, : len(sequence.pages)] = sequence.pages

    def append(self, slot_N: np.ndarray, ids_N: np.ndarray, log_probs_N: np.ndarray, version: int) -> np.ndarray:
        """Record one sampled token per slot. Returns bool [N], true where the sequence ends with it."""
        position_N = self.length[slot_N]
        self.ids[slot_N, position_N] = ids_N
        self.log_probs[slot_N, position_N] = log_probs_N
        self.versions[slot_N, position_N] = version
        self.last[slot_N] = ids_N
        self.length[slot_N] += 1
        return self._ended(slot_N)

    def extend(
        self,
        slot_N: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        ids_S: np.ndarray,
        log_probs_S: np.ndarray,
        version: int,
    ) -> np.ndarray:
        """Record `counts[n]` sampled tokens, from `starts[n]` on, per slot. Returns bool [N], true where a sequence
        ends."""
        for slot, start, count in zip(slot_N.tolist(), starts.tolist(), counts.tolist(), strict=True):
            if count:
                where = slice(self.length[slot], self.length[slot] + count)
                self.ids[slot, where] = ids_S[start : start + count]
                self.log_probs[slot, where] = log_probs_S[start : start + count]
                self.versions[slot, where] = version
                self.last[slot] = ids_S[start + count - 1]
        self.length[slot_N] += counts
        return self._ended(slot_N) & (counts > 0)

    def _ended(self, slot_N: np.ndarray) -> np.ndarray:
        stopped_N = (self.stop[slot_N] == self.last[slot_N][:, None]).any(axis=1)
        return stopped_N | (self.length[slot_N] >= self.limit[slot_N])

    def reasons(self, slot_N: np.ndarray, done_N: np.ndarray) -> list[str]:
        """The reason why each sequence ends, "stop" or "length", or "" where it goes on."""
        stopped_N = (self.stop[slot_N] == self.last[slot_N][:, None]).any(axis=1)
        return ["" if not done else "stop" if stop else "length" for done, stop in zip(done_N, stopped_N, strict=True)]

    def count(self, sequence: RunningSequence) -> int:
        """The number of sampled tokens."""
        if sequence.slot < 0:
            return len(sequence.sampled[0])
        return int(self.length[sequence.slot]) - len(sequence.request.prompt)

    def result(self, sequence: RunningSequence, first: int = 0) -> SampledTokens:
        """Ids, log-probabilities and versions of the sampled tokens, from number `first` on. A sequence without a slot
        has those from before it gave its place."""
        if sequence.slot < 0:
            ids, log_probs, versions = sequence.sampled
            return ids[first:], log_probs[first:], versions[first:]
        sampled = slice(len(sequence.request.prompt) + first, int(self.length[sequence.slot]))
        arrays = (self.ids, self.log_probs, self.versions)
        ids, log_probs, versions = (array[sequence.slot, sampled].tolist() for array in arrays)
        return ids, log_probs, versions

    def close(self, sequence: RunningSequence) -> None:
        """Free the sequence's slot."""
        self.free.append(sequence.slot)
        sequence.slot = -1
