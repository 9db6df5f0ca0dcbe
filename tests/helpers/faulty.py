"""A real store behind a link and a service that fail on demand."""

import threading
from collections.abc import Callable

from etude.errors import UserError
from etude.store import Store


class Faulty(Store):
    """`Store` on the same backend, with faults switched on by attributes."""

    def __init__(self, of: Store):
        super().__init__(of.url, of._backend)
        self.refuse: Callable[[str], bool] = lambda key: False  # 500 for writes of such keys
        self.stall: Callable[[str], bool] = lambda key: False  # writes of such keys wait for `released`
        self.lose: Callable[[str], bool] = lambda key: False  # they succeed, and the answer is lost
        self.retry = False  # after a lost answer the client tries again by itself
        self.stale: list[str] | None = None  # what listings still say
        self.released = threading.Event()
        self.stalled = threading.Event()

    def put(self, key: str, data: bytes) -> None:
        self._before(key)
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._before(key)
        created = super().create(key, data)
        if self.lose(key):
            if self.retry:
                return super().create(key, data)
            raise UserError(f"cannot write {key}: connection reset")
        return created

    def list(self, folder: str = "", after: str | None = None) -> list[str]:
        found = super().list(folder, after)
        return found if self.stale is None else [key for key in found if key in self.stale]

    def _before(self, key: str) -> None:
        if self.refuse(key):
            raise UserError(f"cannot write {key}: 500 internal server error")
        if self.stall(key):
            self.stalled.set()
            assert self.released.wait(120)
