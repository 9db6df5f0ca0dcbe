"""Sampling parameters of a request beyond temperature and top-p, and their effect on the logits of a draw.

In vLLM's order: allowed and bad words, the ids that must not end the answer yet, `logit_bias`, penalties, the grammar;
then, in units of the temperature, min-p and top-k. Excluded tokens have the logit -inf, so the draw and its
log-probability are those of the remaining tokens, renormalised. At temperature 0 min-p and top-k change nothing. A
request with any of these gets no drafts: a penalty or a grammar depends on the tokens before, and rounding could move a
token over a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

MAX_LOGPROBS = 20
"""The largest number of most probable tokens that a request may get with each sampled token."""
MAX_COUNT = 2**31 - 1
"""The largest number of tokens that a request may name."""
REPETITION_PENALTIES = (0.01, 100.0)
"""Beyond these factors logits lose their digits, and then overflow."""


def shown(value: float) -> str:
    """A number of a request in a refusal, at most so long that it can be read."""
    return str(value) if abs(value) < 1e30 or isinstance(value, float) else "a far larger number"


class NothingAllowed(Exception):
    """The parameters of a request exclude every token."""


class GrammarMatcher(Protocol):
    """The state of one answer in its grammar; `llguidance.LLMatcher` is an implementation."""

    def compute_bitmask(self) -> bytes:
        """One bit per token, the least significant bit of a byte first: whether the token may come next."""
        ...

    def consume_token(self, sampled_token: int, /) -> bool:
        """Advance by a token; false if the grammar does not allow it."""
        ...

    def is_stopped(self) -> bool:
        """Whether only an end token may follow."""
        ...

    def get_error(self) -> str:
        """The error that stopped the matcher, or an empty text."""
        ...


@dataclass(frozen=True, eq=False)
class SamplingParams:
    """Sampling parameters with vLLM's names and meanings. `top_k` 0 and `allowed` None mean all tokens. `grammar` is
    advanced with the answer, so it belongs to one request. `top_logprobs` is the number of most probable tokens to
    return with each sampled token."""

    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    grammar: GrammarMatcher | None = None
    top_logprobs: int = 0

    @property
    def changes_draws(self) -> bool:
        """Whether any parameter changes the distribution of the draws."""
        plain = SamplingParams(top_logprobs=self.top_logprobs)
        return any(getattr(self, name) != getattr(plain, name) for name in self.__dataclass_fields__)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError if an engine with this vocabulary cannot run the request."""
        for name, value, low, high in (
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS),
            ("top_k", self.top_k, 0, MAX_COUNT),
            ("min_tokens", self.min_tokens, 0, MAX_COUNT),
            ("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {shown(value)}")
        if not all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()):
            raise ValueError("a logit_bias must lie in [-100, 100]")
        if self.allowed is not None and not self.allowed:
            raise ValueError("allowed_token_ids allows no token")
        ids = [*self.logit_bias, *(self.allowed or ()), *(token for word in self.bad_words for token in word)]
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(
                f"logit_bias, allowed_token_ids and bad_words name tokens of the vocabulary of {vocab_size}"
            )

    def process(
        self, logits_V: Tensor, ids: np.ndarray, prompt: int, temperature: float, stop: tuple[int, ...]
    ) -> None:
        """Change the float32 logits [V] of the token that follows `ids`, whose first `prompt` tokens were not sampled.
        `stop` are the ids that end the answer. The host does not wait for the logits' device."""
        sampled = ids[prompt:]
        if self.allowed is not None:
            kept = torch.full_like(logits_V, -math.inf)
            index = torch.tensor(self.allowed, device=logits_V.device)
            kept[index] = logits_V[index]
            logits_V.copy_(kept)
        excluded = [word[-1] for word in self.bad_words if _ends_with(sampled, word[:-1])]
        if len(sampled) < self.min_tokens:
            excluded += [token for token in stop if token < len(logits_V)]
        if excluded:
            logits_V[excluded] = -math.inf
        if self.logit_bias:
            index = torch.tensor(list(self.logit_bias), device=logits_V.device)
            logits_V[index] += torch.tensor(list(self.logit_bias.values()), device=logits_V.device)
        self._penalise(logits_V, ids, sampled)
        if self.grammar is not None:
            self._follow_grammar(logits_V)
        if temperature > 0.0:
            if self.min_p > 0.0:
                logits_V.masked_fill_(logits_V < logits_V.max() + temperature * math.log(self.min_p), -math.inf)
            if 0 < self.top_k < len(logits_V):
                logits_V.masked_fill_(logits_V < logits_V.topk(self.top_k).values[-1], -math.inf)

    def _penalise(self, logits_V: Tensor, ids: np.ndarray, sampled: np.ndarray) -> None:
        if self.repetition_penalty != 1.0:  # Keskar et al., CTRL (arXiv 1909.05858), section 4.1; prompts count
            seen = torch.from_numpy(np.unique(ids).astype(np.int64)).to(logits_V.device)
            values = logits_V[seen]
            logits_V[seen] = torch.where(values > 0, values / self.repetition_penalty, values * self.repetition_penalty)
        if len(sampled) and (self.presence_penalty or self.frequency_penalty):
            tokens, counts = np.unique(sampled, return_counts=True)
            penalty = self.presence_penalty + self.frequency_penalty * counts
            index = torch.from_numpy(tokens.astype(np.int64)).to(logits_V.device)
            logits_V[index] -= torch.from_numpy(penalty.astype(np.float32)).to(logits_V.device)

    def _follow_grammar(self, logits_V: Tensor) -> None:
        assert self.grammar is not None
        bits = np.frombuffer(self.grammar.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=min(len(logits_V), 8 * len(bits))).astype(bool)
        allowed = np.pad(allowed, (0, len(logits_V) - len(allowed)))  # embeddings may have more rows than tokens
        logits_V.masked_fill_(torch.from_numpy(~allowed).to(logits_V.device), -math.inf)

    def consume(self, ids: list[int], stop: tuple[int, ...]) -> bool:
        """Advance in the grammar by sampled tokens. Returns whether it ends with them. Raises ValueError for a token
        that the grammar does not allow, which the mask should have excluded."""
        if self.grammar is None:
            return False
        for token in ids:
            if token in stop:
                return True
            if not self.grammar.consume_token(token):
                raise ValueError(f"the grammar cannot go on: {self.grammar.get_error()}")
        return self.grammar.is_stopped()


def _ends_with(ids: np.ndarray, end: tuple[int, ...]) -> bool:
    return not end or (len(ids) >= len(end) and ids[-len(end) :].tolist() == list(end))


TopLogprobs = list[tuple[int, float]]
"""Tokens with their log-probabilities, the most probable first; without tokens that could not have been drawn."""


def top_logprobs(log_probs_V: np.ndarray, count: int, floor: float, shift: float) -> TopLogprobs:
    """The `count` most probable tokens of float32 log-probabilities [V], of equal ones those with the least ids. Those
    below `floor` are left out; `shift` is added to each, to renormalise over a nucleus."""
    count = min(count, len(log_probs_V))
    least = np.partition(log_probs_V, -count)[-count]
    above, equal = np.flatnonzero(log_probs_V > least), np.flatnonzero(log_probs_V == least)
    best = np.concatenate([above, equal[: count - len(above)]])
    return listed(best, log_probs_V[best], count, floor, shift)


def listed(ids_K: np.ndarray, log_probs_K: np.ndarray, count: int, floor: float, shift: float) -> TopLogprobs:
    """`top_logprobs` of the most probable tokens, at least `count` of them, in any order."""
    order = np.lexsort((ids_K, -log_probs_K))[:count]
    pairs = zip(ids_K[order].tolist(), log_probs_K[order], strict=True)
    return [(i, float(value + shift)) for i, value in pairs if value >= floor and value > -np.inf]
