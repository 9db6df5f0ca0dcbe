"""The engine's side: find the newest version, fetch and verify it while serving, then flip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import blake3
import torch

from etude.errors import UserError
from etude.records import PolicyVersion
from etude.store import Store
from etude.weights import delta
from etude.weights.digest import digest, narrow
from etude.weights.manifest import read, versions


class DamagedVersion(Exception):
    """A version that cannot be had whole: a payload is missing, altered, or not what its manifest says."""


@dataclass(frozen=True)
class Update:
    """A verified version, not yet live."""

    manifest: PolicyVersion
    staged: Mapping[str, torch.Tensor]
    live: Mapping[str, torch.Tensor]

    @torch.no_grad()
    def apply(self) -> None:
        """Copies the staged tensors into the live ones; call it between two steps of the engine."""
        for name, tensor in self.live.items():
            tensor.copy_(self.staged[name])


class Receiver:
    """Keeps a host copy of the bits it has, so that a delta never touches the live tensors before it is proven."""

    def __init__(self, store: Store, live: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16):
        self._store = store
        self._live = live
        self._staged = {name: narrow(name, t, dtype).cpu().contiguous().clone() for name, t in live.items()}
        self.version = -1

    def poll(self) -> Update | None:
        """The newest version, downloaded and verified; None if there is nothing newer than the last one.

        Raises DamagedVersion if it cannot be had whole; the caller goes on serving what it has, and may ask again.
        """
        numbers = versions(self._store, after=self.version)
        if not numbers:
            return None
        chain = self._chain(numbers[-1])
        staged = {name: tensor.clone() for name, tensor in self._staged.items()}
        for manifest in chain:
            try:
                delta.apply(delta.decode(self._payload(manifest)), staged)
            except ValueError as e:
                raise DamagedVersion(f"version {manifest.version}: {e}") from None
        target = chain[-1]
        if digest(staged) != target.digest:
            raise DamagedVersion(f"version {target.version}: the tensors do not have the digest that was published")
        self._staged, self.version = staged, target.version
        return Update(target, staged, self._live)

    def _chain(self, target: int) -> list[PolicyVersion]:
        """Manifests from the version held, or from the nearest anchor, up to `target`, in the order to apply them."""
        chain: list[PolicyVersion] = []
        number: int | None = target
        while number is not None and (not chain or number != self.version):
            manifest = read(self._store, number)
            if manifest is None:
                raise DamagedVersion(f"version {target} builds on version {number}, whose manifest is gone")
            chain.append(manifest)
            number = manifest.parent
        return chain[::-1]

    def _payload(self, manifest: PolicyVersion) -> bytes:
        try:
            payload = self._store.get(manifest.payload)
        except KeyError:
            raise DamagedVersion(f"version {manifest.version}: its payload {manifest.payload} is gone") from None
        if blake3.blake3(payload).hexdigest() != manifest.payload_digest:
            raise DamagedVersion(f"version {manifest.version}: its payload was altered")
        return payload


def materialise(store: Store, version: int, tensors: Mapping[str, torch.Tensor]) -> PolicyVersion:
    """Writes a published version into `tensors` (bfloat16, host). Raises UserError if it is not there or damaged."""
    if read(store, version) is None:
        raise UserError(f"{store.url} has no version {version}")
    receiver = Receiver(store, tensors)
    try:
        chain = receiver._chain(version)
        for manifest in chain:
            delta.apply(delta.decode(receiver._payload(manifest)), tensors)
    except (DamagedVersion, ValueError) as e:
        raise UserError(f"{store.url}: {e}") from None
    if digest(tensors) != chain[-1].digest:
        raise UserError(f"{store.url}: version {version} does not have the digest that was published")
    return chain[-1]
