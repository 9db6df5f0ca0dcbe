"""The token ledger of an episode: append-only, one entry per token, never tokenised again.

The policy always reads exactly the tokens of the ledger, and its samples are appended unchanged, so training uses the
tokens of inference. Every violation is a mistake of ours or of the engine's and raises TokenLedgerError; nothing is
repaired.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import blake3
import numpy as np

from etude.records import Document, Generation, Routes, Segment, segment_digest, token_digest


class TokenLedgerError(AssertionError):
    """Tokens that do not fit together: training on them would be wrong."""


class TokenLedger:
    """One segment in the making, after the `earlier` ones of its episode. It begins with its documents. All figures
    count for the whole episode: `sampled` tokens; `checks`, the turns whose prompt was proved to extend all earlier
    tokens; `kv_lag`, by how many versions a sampled token was ahead of the oldest key it saw, at most."""

    def __init__(self, documents: Sequence[list[int]] = (), earlier: tuple[Segment, ...] = ()) -> None:
        self.documents = tuple(documents)
        self.sampled = 0
        self.checks = 0
        self.kv_lag = 0
        self._earlier = earlier
        self._recipe = ""
        self._ids = array("i")
        self._mask = bytearray()
        self._logprobs = array("f")
        self._versions = array("i")
        self._prompt_length = 0
        self._turn_starts: list[int] = []
        self._routes: list[Routes] = []  # of each turn
        self._seen = blake3.blake3(), blake3.blake3()  # of ids and mask, token by token as they come
        for ids in self.documents:
            self.add_environment(ids)
        self._tail = len(self._ids)  # where the conversation begins

    def __len__(self) -> int:
        return len(self._ids)

    def add_environment(self, ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not sample: mask 0, log-probability 0, version -1."""
        n = len(ids)
        self._ids.extend(ids)
        self._mask.extend(bytes(n))
        self._logprobs.frombytes(bytes(4 * n))
        self._versions.extend([-1] * n)
        self._note(ids, 0)
        if not self._turn_starts:
            self._prompt_length = len(self._ids)

    @property
    def routed(self) -> int:
        """Positions whose experts are known: the next turn requests those from here on, so none travels twice. The
        experts of a position are those of its first computation, from which its token was sampled."""
        return self._routes[-1].end if self._routes else 0

    def prompt(self) -> list[int]:
        """The ids to sample from: everything so far but the documents, which are sent beside it."""
        return self._ids[self._tail :].tolist()

    def continued(self, documents: Sequence[list[int]]) -> TokenLedger:
        """A new segment of the episode, with further documents: the whole conversation so far is its prompt. Documents
        precede the conversation, so a new one moves every token after it, and tokens sampled without it are
        trained on in the segment that ends here."""
        new = self.restarted((*self.documents, *documents))
        new.add_environment(self.prompt())
        return new

    def restarted(self, documents: Sequence[list[int]] = ()) -> TokenLedger:
        """A new segment of the episode that begins with these documents alone: the conversation is forgotten. The
        trainer gives the tokens of all segments the episode's advantage."""
        new = TokenLedger(documents, self.segments())
        new.sampled, new.checks, new.kv_lag = self.sampled, self.checks, self.kv_lag
        return new

    def add_turn(self, prompt: Sequence[int], generation: Generation) -> None:
        """Appends the generation from `prompt`, which must be the whole ledger after its documents."""
        if array("i", prompt) != self._ids[self._tail :]:
            raise TokenLedgerError(
                f"turn {len(self._turn_starts)} was sampled from a prompt that does not extend the earlier tokens"
            )
        self.checks += 1
        ids, logprobs, versions = generation.ids, generation.logprobs, generation.versions
        if not len(ids) == len(logprobs) == len(versions):
            raise TokenLedgerError(
                f"{len(ids)} sampled ids came with {len(logprobs)} log-probabilities and {len(versions)} versions"
            )
        if not all(math.isfinite(x) and x <= 1e-3 for x in logprobs):  # float error around a certain token
            raise TokenLedgerError("a sampled token has a log-probability that is not finite or is above 0")
        if any(i < 0 for i in ids) or any(v < 0 for v in versions):
            raise TokenLedgerError("a sampled token has a negative id or version")
        if bool(generation.recipe) != bool(self.documents) or self._recipe not in ("", generation.recipe):
            raise TokenLedgerError(
                f"the engine says that it computed the documents as {generation.recipe!r}, after {self._recipe!r}"
            )
        self._recipe = generation.recipe
        if (new := generation.routes) is not None:  # of the positions that the engine has fed by now
            end = len(self._ids) + len(ids) - 1
            if (new.first, new.end) != (self.routed, end):
                raise TokenLedgerError(
                    f"the engine sent the experts of positions {new.first} to {new.end}, not {self.routed} to {end}"
                )
            self._routes.append(new)
            if len({(part.layers, part.slots, part.wide) for part in self._routes}) > 1:
                raise TokenLedgerError("the engine's expert ids have changed their shape within an episode")
        self._turn_starts.append(len(self._ids))
        self._ids.extend(ids)
        self._mask.extend(b"\1" * len(ids))
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)
        self._note(ids, 1)
        self.sampled += len(ids)
        if generation.kv_version >= 0:
            self.kv_lag = max(self.kv_lag, max(versions, default=0) - generation.kv_version)

    def _note(self, ids: Sequence[int], sampled: int) -> None:
        """Adds tokens to the digest as soon as they come."""
        hash_ids, hash_mask = self._seen
        hash_ids.update(np.array(ids, "<i4").tobytes())
        hash_mask.update(bytes([sampled]) * len(ids))

    def segments(self) -> tuple[Segment, ...]:
        """All segments of the episode in which tokens were sampled."""
        if not any(self._mask):
            return self._earlier
        if not len(self._ids) == len(self._mask) == len(self._logprobs) == len(self._versions):
            raise TokenLedgerError("the ledger's arrays differ in length")
        routes = None
        if self._routes:
            one, data = self._routes[0], b"".join(part.ids for part in self._routes)
            routes = Routes(first=0, ids=data, layers=one.layers, slots=one.slots, wide=one.wide)
        segment = Segment(
            ids=np.asarray(self._ids, "<i4").tobytes(),
            mask=bytes(self._mask),
            logprobs=np.asarray(self._logprobs, "<f4").tobytes(),
            versions=np.asarray(self._versions, "<i4").tobytes(),
            prompt_length=self._prompt_length,
            turn_starts=tuple(self._turn_starts),
            routes=routes,
            digest=segment_digest(*self._seen),
            documents=tuple(Document(length=len(ids), digest=token_digest(ids)) for ids in self.documents),
            recipe=self._recipe,
        )
        return (*self._earlier, segment)
