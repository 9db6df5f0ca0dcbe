"""The episodes in a run's ledger, for commands that show them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude import runfolder
from etude.config import RLConfig
from etude.errors import UserError
from etude.ledger.digests import get_blob
from etude.ledger.ledger import Ledger, blob_key
from etude.records import Episode, EpisodeBlob
from etude.store import Store, open_store


@dataclass(frozen=True)
class StoredEpisodes:
    """Episodes of a run by the keys of their blobs."""

    config: RLConfig
    rollouts: Store
    blobs: Mapping[str, EpisodeBlob]

    @property
    def keys(self) -> Sequence[str]:
        """The keys of all episodes, by group and member."""
        return tuple(self.blobs)

    def read(self, key: str) -> Episode:
        """The episode with this key. Raises UserError if its bytes are missing or damaged."""
        return get_blob(self.rollouts, self.blobs[key])


def run_episodes(run: Path, names: Sequence[str]) -> StoredEpisodes:
    """The named episodes of a run folder (GROUP-MEMBER-ATTEMPT), or without names all in its ledger. Raises
    UserError."""
    config = runfolder.load_config(run)
    ledger = Ledger.open(config.ledger or f"sqlite:///{run}/ledger.db", config.name)
    held = {blob.key: blob for blob in ledger.blobs()}
    ledger.close()
    if not held:
        raise UserError(f"{run} holds no episodes; let the run play some first")
    chosen = {key: held[key] for key in (_key(name, held, run) for name in names)}
    return StoredEpisodes(config, open_store(f"{config.store or run}/rollouts"), chosen or held)


def _key(name: str, keys: Collection[str], run: Path) -> str:
    numbers = name.split("-")
    if len(numbers) == 3 and all(n.isdecimal() for n in numbers):
        group, member, attempt = map(int, numbers)
        if (key := blob_key(group, member, attempt)) in keys:
            return key
    raise UserError(f"the ledger of {run} has no episode {name!r}; give GROUP-MEMBER-ATTEMPT, e.g. 3-1-0")
