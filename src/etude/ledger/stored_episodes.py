"""The episodes that a run's ledger holds, for commands that look at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude import runfolder
from etude.config import RLConfig
from etude.errors import UserError
from etude.ledger.ledger import Ledger, blob_key
from etude.records import Episode, decode
from etude.store import Store, open_store


@dataclass(frozen=True)
class Episodes:
    """Episodes of a run by the keys of their blobs."""

    config: RLConfig
    rollouts: Store
    keys: Sequence[str]

    def read(self, key: str) -> Episode:
        """The episode with this key."""
        return decode(self.rollouts.get(key), Episode)


def episodes(run: Path, names: Sequence[str]) -> Episodes:
    """The named episodes of a run folder (GROUP-MEMBER-ATTEMPT), or all that its ledger holds. Raises UserError."""
    config = runfolder.load_config(run)
    ledger = Ledger.open(config.ledger or f"sqlite:///{run}/ledger.db", config.name)
    keys = ledger.blobs()
    ledger.close()
    if not keys:
        raise UserError(f"{run} holds no episodes; let the run play some first")
    return Episodes(config, open_store(f"{config.store or run}/rollouts"), [_key(n, keys, run) for n in names] or keys)


def _key(name: str, keys: Sequence[str], run: Path) -> str:
    numbers = name.split("-")
    if len(numbers) == 3 and all(n.isdecimal() for n in numbers):
        group, member, attempt = map(int, numbers)
        if (key := blob_key(group, member, attempt)) in keys:
            return key
    raise UserError(f"the ledger of {run} has no episode {name!r}; give GROUP-MEMBER-ATTEMPT, e.g. 3-1-0")
