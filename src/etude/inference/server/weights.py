"""Follows the weight store in a thread: fetches and verifies while the engine serves, and swaps between steps.

A version that cannot be verified is reported and never served; the old version goes on. After every swap a part of the
live weights is digested again, and damaged chunks are repaired while the engine is paused.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from etude.config import WeightSource
from etude.errors import UserError
from etude.inference.engine.engine import Engine
from etude.models.dtypes import Types
from etude.models.loading import named_tensors
from etude.processes import return_memory
from etude.store import open_store
from etude.weights import Trust, read_public_key
from etude.weights.export import folder_tensors
from etude.weights.payloads import DamagedVersion, PayloadSource
from etude.weights.receiver import Receiver, WeightsMismatch
from etude.weights.repair import TRIES, Unrepairable
from etude.weights.ulpd import weights_digest

_POLL_SECONDS = 0.1
_LONGEST_SECONDS = 5.0  # between two tries of a failing operation
_SWAP_SECONDS, _SWAP_SECONDS_A_GB = 120.0, 5.0  # until a step ends, and to write the weights
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedVersion:
    """A version and its digest, verified on the live tensors."""

    version: int
    digest: str


class WeightWatcher:
    """Keeps an engine on the newest version of a store; without a source it only computes the digest of its weights.
    `model` is the id of the model whose versions are expected (`models.loading.model_id`), or empty for any. `types`
    are the tensor types of the store's versions, or of the folder (`models.dtypes`); by default bfloat16 if it can
    represent the weights exactly. `folder` is the model folder: live tensors that do not follow their chain any more
    are read again from there."""

    def __init__(
        self,
        engine: Engine,
        source: WeightSource | None,
        model: str = "",
        types: Types | None = None,
        folder: Path | None = None,
    ) -> None:
        self._engine = engine
        self._tensors = named_tensors(engine.model)
        size = sum(tensor.nbytes for tensor in self._tensors.values())
        self._swap_seconds = _SWAP_SECONDS + _SWAP_SECONDS_A_GB * size / 1e9
        self._types = types or (torch.bfloat16 if source or _fits_bfloat16(engine.model) else torch.float32)
        self._receiver: Receiver | None = None
        if source is not None:
            store = open_store(source.weights)
            key = read_public_key(source.public_key) if source.public_key else None
            trust = Trust(key, memory=source.accepted, model=model)
            read = None if folder is None else partial(folder_tensors, folder)
            payloads = PayloadSource(store, source.relay, trust, read)
            self._receiver = Receiver(store, self._tensors, payloads, source.peers)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etude-weights", daemon=True)
        self._failures = 0  # consecutive failures
        self._damaged: list[int] = []  # chunks that wait for a repair
        self._froze = False  # whether a repair paused the engine
        self.repairs = 0  # chunks repaired
        self.served = ServedVersion(engine.version, self.live_digest())
        self.trouble = ""

    @property
    def error(self) -> str:
        """The reason why the newest version is not served, after failed tries; empty while all is well or being
        repaired."""
        return self.trouble if self._failures >= TRIES else ""

    def live_digest(self) -> str:
        """The digest of the live tensors; it starts with "altered" if no published version can have this digest."""
        try:
            held = self._receiver if self._receiver and self._receiver.manifest else None
            return weights_digest(self._tensors, held.types if held else self._types)
        except ValueError as e:
            return f"altered: {e}"

    def chunk(self, number: int, version: int) -> bytes | None:
        """A chunk of the version that is served, for a peer that repairs itself."""
        return self._receiver.chunk(number, version) if self._receiver else None

    def start(self) -> None:
        """Swap in the newest version in the store, then follow it on a thread. The engine must be running."""
        if self._receiver is not None:
            self.poll()
            self._thread.start()

    def poll(self) -> bool:
        """Look for a version once; true if a new one is live now. A failure is described in `trouble` and tried
        again."""
        receiver = self._receiver
        assert receiver is not None
        try:
            if self._damaged:
                self._repair(receiver)
            moved = receiver.advance(self._swap)
            if moved:
                self._note(receiver)
            self._failures, self.trouble = 0, ""
            return moved
        except (DamagedVersion, UserError, Unrepairable, WeightsMismatch) as e:
            self._failures += 1
            if str(e) != self.trouble:
                _log.warning("%s", e)
            self.trouble = str(e)
            if isinstance(e, WeightsMismatch):
                self._damaged = receiver.scrub(1.0)
            return False

    def close(self) -> None:
        """Stop following the store."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _swap(self, version: int, apply: Callable[[], None]) -> None:
        self._engine.swap(version, apply).result(self._swap_seconds)

    def _note(self, receiver: Receiver) -> None:
        """Record a version that has become live."""
        assert receiver.manifest is not None
        self.served = ServedVersion(receiver.version, receiver.manifest.live)
        _log.info("serving version %d after a pause of %.1f ms", receiver.version, self._engine.last_pause * 1e3)
        return_memory()  # without this an engine kept nearly twice the size of its weights
        self._damaged = receiver.scrub()
        if self._damaged:
            self._repair(receiver)

    def _repair(self, receiver: Receiver) -> None:
        """Repairs damaged chunks. The engine is paused meanwhile: with them it would compute wrong tokens."""
        self.trouble = f"{len(self._damaged)} chunks of version {receiver.version} are damaged; they are being repaired"
        _log.warning("%s", self.trouble)
        if not self._engine.is_paused:
            self._engine.pause("keep", clear_cache=False)
            self._froze = True
        repaired = receiver.find_repair(self._damaged)
        self._engine.swap(receiver.version, lambda: receiver.write_repair(repaired)).result(self._swap_seconds)
        _log.warning("repaired chunks %s", ", ".join(f"{item.chunk} from {item.source}" for item in repaired))
        self.repairs += len(self._damaged)
        self._damaged = []
        if self._froze:
            self._engine.resume()
            self._froze = False

    def _run(self) -> None:
        while not self._stop.wait(self._delay()) and self._engine.failure is None:
            try:
                self.poll()
            except Exception as e:
                if not self._stop.is_set() and self._engine.failure is None:
                    _log.exception("following the weights ended")
                self._failures, self.trouble = TRIES, f"no longer following the weights: {type(e).__name__} {e}"
                return

    def _delay(self) -> float:
        """Seconds to the next poll: longer after each failure, and random so that servers do not poll in step."""
        if not self._failures:
            return _POLL_SECONDS
        longest = min(_POLL_SECONDS * 2 ** min(self._failures, 10), _LONGEST_SECONDS)
        return longest * random.uniform(0.5, 1.0)


def _fits_bfloat16(model: PreTrainedModel) -> bool:
    try:
        weights_digest(named_tensors(model))
        return True
    except ValueError:
        return False
