"""The common part of the processes of a run that a placer starts, on any host: engines (`member.py`) and players
(`player.py`).

Such a process gets the run's configuration in a file, without secrets, and these in its environment: $ETUDE_API_KEY is
the token of the engines, $PGPASSWORD the password of the ledger. Ledger and store tell it all else. It ends when it is
asked to (SIGTERM), or when the controller has shown no sign of life for `GRACE_SECONDS`: a run that is resumed within
that time takes it over.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from etude.config import RLConfig, validate
from etude.config.secrets import without_secrets
from etude.errors import RunFailed, UserError
from etude.ledger import Ledger, Outage
from etude.store import StoreFailed

GRACE_SECONDS = 600.0
RESTART = 1  # exit code after which the placer starts the process again


@dataclass(frozen=True)
class AwayProcess:
    """The description of such a process: the run's folder and configuration, the name in the fleet, the number among
    those of the same table, and the most episodes that a player plays at a time. `away`: the process does not end with
    the controller, and listens at its host's address instead of the loopback device. `host`: that of the controller."""

    folder: Path
    config: RLConfig
    name: str
    number: int = 0
    episodes: int = 0
    away: bool = False
    host: str = field(default_factory=socket.gethostname)
    place: Path = Path()  # the folder of the file, for the process's own files

    def text(self) -> str:
        """The file that describes the process, as `described` reads it."""
        config = json.loads(without_secrets(self.config).model_dump_json())
        values = vars(self) | {"folder": str(self.folder.absolute()), "config": config}
        return json.dumps({name: value for name, value in values.items() if name != "place"}, indent=2) + "\n"

    def open_ledger(self) -> Ledger:
        """The run's ledger. Raises UserError."""
        url = self.config.ledger or f"sqlite:///{self.folder}/ledger.db"
        if url.startswith("sqlite") and self.host != socket.gethostname():
            raise UserError(
                f"the ledger is an SQLite file of the machine {self.host}, and this is {socket.gethostname()}: set "
                'ledger = "postgresql://..."'
            )
        return Ledger.open(url, self.config.name)

    def check_store(self) -> None:
        """Raises UserError if the run's store is a folder that is not there."""
        if self.config.store is None and not (self.folder / "config.json").exists():
            raise UserError(
                f"{self.folder} is no folder of a run on {socket.gethostname()}: set store to a URL such as "
                "s3://BUCKET/RUN, or share the folder between the machines"
            )

    @property
    def address(self) -> str:
        """The address that the process listens at."""
        return _own_address() if self.away else "127.0.0.1"


def described(path: Path) -> AwayProcess:
    """The process that the file describes. Raises UserError."""
    values = json.loads(path.read_text())
    config = validate(RLConfig, values.pop("config"), str(path))
    return AwayProcess(Path(values.pop("folder")), config, **values, place=path.absolute().parent)


def _own_address() -> str:
    """The address by which other machines reach this one: that of the device with the default route. No packet is
    sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class Patience:
    """How long the controller has shown no sign of life, on this process's clock."""

    def __init__(self) -> None:
        self._beat, self._since = -1, time.monotonic()

    def over(self, beat: int) -> bool:
        """Whether the controller has been silent for too long; `beat` is the ledger's count."""
        if beat != self._beat:
            self._beat, self._since = beat, time.monotonic()
        return time.monotonic() - self._since > GRACE_SECONDS


def run_process(path: Path, work: Callable[[AwayProcess, threading.Event], int]) -> int:
    """Runs the described process; `work` gets an event that SIGTERM sets. Returns the exit code: 2 for a mistake of the
    user's, with a sentence; `RESTART` for all else that another start may mend."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        return work(described(path), stopping)
    except (Outage, StoreFailed, RunFailed) as e:
        print(f"etude: {e}", file=sys.stderr, flush=True)
        return RESTART
    except UserError as e:
        print(f"etude: {e}", file=sys.stderr, flush=True)
        return 2
