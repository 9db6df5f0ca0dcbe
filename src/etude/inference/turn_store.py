"""The turns that an inference server keeps for a gateway until they are fetched, by their names."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

T = TypeVar("T")
NAME = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
"""A turn's name: a ULID."""
WAIT_SECONDS = 10.0
"""The wait for the end of a turn whose client has disconnected."""
_SECONDS = 60.0  # from its beginning, an ended turn is kept this long
_MOST = 4096  # turns
_MAX_SIZE = 4 << 20  # of all turns together


@dataclass(frozen=True)
class _StoredTurn(Generic[T]):
    turn: T
    size: int
    since: float


class TurnStore(Generic[T]):
    """Turns by name; above a limit of number or size the oldest are dropped, and ended turns after a minute.
    `is_ended` tells whether a turn's last token has come."""

    def __init__(self, is_ended: Callable[[T], bool]) -> None:
        self._is_ended = is_ended
        self._kept: dict[str, _StoredTurn[T]] = {}
        self._size = 0

    def keep(self, name: str, turn: T, size: int) -> bool:
        """Keeps a turn of about `size` prompt tokens. False for a name that is no ULID, or is taken, and for a turn
        that is larger than all may be."""
        if not NAME.fullmatch(name) or name in self._kept or size > _MAX_SIZE:
            return False
        self._kept[name] = _StoredTurn(turn, size, time.monotonic())
        self._size += size
        while len(self._kept) > _MOST or self._size > _MAX_SIZE:
            self.take(next(iter(self._kept)))
        before = time.monotonic() - _SECONDS
        old = takewhile(lambda item: item[1].since <= before, self._kept.items())
        for ended in [name for name, kept in old if self._is_ended(kept.turn)]:
            self.take(ended)
        return True

    def take(self, name: str) -> T | None:
        """The turn of a name, which is not kept any more; None for an unknown name."""
        if (kept := self._kept.pop(name, None)) is None:
            return None
        self._size -= kept.size
        return kept.turn
