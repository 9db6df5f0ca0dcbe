"""Follows the weight store: fetches and verifies the newest version on its own thread, swaps it in between two steps,
and digests what is live then. A version that cannot be verified is reported and never served."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from etude.errors import UserError
from etude.inference.engine import Engine
from etude.models.loading import named_tensors
from etude.store import open_store
from etude.weights.digest import digest
from etude.weights.receiver import DamagedVersion, Receiver

_POLL_SECONDS = 0.1
_SWAP_SECONDS = 120.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """A version and the digest of the live tensors, taken together: they belong to each other."""

    version: int
    digest: str


class Follower:
    """Keeps an engine on the newest version of a store; with no store, it only knows the digest."""

    def __init__(self, engine: Engine, model: PreTrainedModel, store_url: str | None) -> None:
        self._engine = engine
        self._tensors = named_tensors(model)
        # Weights that float32 alone can hold are digested as they are; a store's versions are always bfloat16.
        self._dtype = torch.bfloat16 if store_url or _fits_bfloat16(model) else torch.float32
        self._receiver = Receiver(open_store(store_url), self._tensors) if store_url else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etude-weights", daemon=True)
        self.served = Served(engine.version, self.live_digest())
        self.error = ""

    def live_digest(self) -> str:
        """The digest of the live tensors; it starts with "altered" if no published version can have it."""
        try:
            return digest(self._tensors, self._dtype)
        except ValueError as e:
            return f"altered: {e}"

    def start(self) -> None:
        """Swap in what the store holds already, then keep following it on a thread. The engine must be running."""
        if self._receiver is not None:
            self.poll()
            self._thread.start()

    def poll(self) -> bool:
        """Look once; true if a new version is live now."""
        assert self._receiver is not None
        try:
            update = self._receiver.poll()
            self.error = ""
        except (DamagedVersion, UserError) as e:
            if str(e) != self.error:
                _log.warning("%s", e)
            self.error = str(e)
            return False
        if update is None:
            return False
        version = update.manifest.version
        pause = self._engine.swap(version, update.apply).result(_SWAP_SECONDS)
        # The swap has just proved that the live tensors have this digest.
        self.served = Served(version, update.manifest.digest)
        _log.info("serving version %d after a pause of %.1f ms", version, pause * 1e3)
        return True

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS) and self._engine.failure is None:
            try:
                self.poll()
            except Exception as e:
                if not self._stop.is_set() and self._engine.failure is None:
                    _log.exception("following the weights ended")
                self.error = f"no longer following the weights: {type(e).__name__} {e}"
                return


def _fits_bfloat16(model: PreTrainedModel) -> bool:
    try:
        digest(named_tensors(model))
        return True
    except ValueError:
        return False
