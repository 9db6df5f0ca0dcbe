"""Requests, and the rows they become."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from etude.inference.cache import Node
from etude.records import Generation

MAX_STOP_IDS = 16


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation. `session` names the episode whose older keys and values this request may reuse."""

    ids: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()
    seed: int = 0
    session: str | None = None
    experts: bool = False


@dataclass(eq=False)
class Row:
    """A request on its way through the engine."""

    request: Request
    future: Future[Generation]
    on_token: Callable[[int, float], None] | None
    aborted: bool = False
    slot: int = -1
    fed: int = 0  # prompt tokens whose keys and values are computed
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    held: list[Node] = field(default_factory=list)
    kv_version: int = 0

    def abort(self) -> None:
        """Finish at the next step with what is sampled so far and reason "abort"."""
        self.aborted = True


class Slots:
    """What the rows' steps need, as arrays over slots, so that no step loops over rows in Python."""

    def __init__(self, rows: int, max_length: int, blocks_per_row: int) -> None:
        self.free = list(range(rows - 1, -1, -1))
        self.max_length = max_length
        self.table = np.zeros((rows, blocks_per_row), dtype=np.int32)
        self.length = np.zeros(rows, dtype=np.int64)  # tokens of the row, the sampled ones included
        self.limit = np.zeros(rows, dtype=np.int64)  # length at which the row ends
        self.last = np.zeros(rows, dtype=np.int64)
        self.temperature = np.zeros(rows, dtype=np.float64)
        self.top_p = np.zeros(rows, dtype=np.float64)
        self.seed = np.zeros(rows, dtype=np.int64)
        self.stop = np.full((rows, MAX_STOP_IDS), -1, dtype=np.int64)
        self.ids = np.zeros((rows, max_length), dtype=np.int32)  # by position; only sampled ones are filled in
        self.log_probs = np.zeros((rows, max_length), dtype=np.float32)
        self.versions = np.zeros((rows, max_length), dtype=np.int32)

    def open(self, row: Row) -> None:
        request, slot = row.request, self.free.pop()
        row.slot = slot
        self.write_pages(row)
        self.length[slot] = len(request.ids)
        self.limit[slot] = min(len(request.ids) + request.max_tokens, self.max_length)
        self.temperature[slot] = request.temperature
        self.top_p[slot] = request.top_p
        self.seed[slot] = request.seed
        self.stop[slot] = -1
        self.stop[slot, : len(request.stop)] = request.stop

    def write_pages(self, row: Row) -> None:
        self.table[row.slot, : len(row.pages)] = row.pages

    def append(self, slot_N: np.ndarray, ids_N: np.ndarray, log_probs_N: np.ndarray, version: int) -> np.ndarray:
        """Note one sampled token per slot; true where the row ends with it."""
        position_N = self.length[slot_N]
        self.ids[slot_N, position_N] = ids_N
        self.log_probs[slot_N, position_N] = log_probs_N
        self.versions[slot_N, position_N] = version
        self.last[slot_N] = ids_N
        self.length[slot_N] += 1
        return (self.stop[slot_N] == ids_N[:, None]).any(axis=1) | (position_N + 1 >= self.limit[slot_N])

    def reasons(self, slot_N: np.ndarray, done_N: np.ndarray) -> list[str]:
        """Why each row ends; "" where it goes on."""
        stopped_N = (self.stop[slot_N] == self.last[slot_N][:, None]).any(axis=1)
        return ["" if not done else "stop" if stop else "length" for done, stop in zip(done_N, stopped_N, strict=True)]

    def result(self, row: Row) -> tuple[list[int], list[float], list[int]]:
        sampled = slice(len(row.request.ids), int(self.length[row.slot]))
        arrays = (self.ids, self.log_probs, self.versions)
        ids, log_probs, versions = (array[row.slot, sampled].tolist() for array in arrays)
        return ids, log_probs, versions

    def close(self, row: Row) -> None:
        self.free.append(row.slot)
        row.slot = -1
