"""An engine of a run that a placer has started: `python -m etude.run.member FILE` (`away.py`).

The process starts the inference server as its child, joins the ledger with the server's URL, and watches both. Asked to
leave, by SIGTERM or by the ledger, the server hands back the turns that it cannot finish, and new ones go to others.
What the server prints is in this process's output, too, each line behind `SERVER_MARK`: the placer keeps that alone.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from etude.errors import RunFailed, UserError
from etude.processes import Child
from etude.protocol import bearer, own_token
from etude.run.away import RESTART, AwayProcess, Patience, run_process
from etude.run.engines import engine_token, start_engine, start_seconds

LOOK_SECONDS = 1.0
PRINT_SECONDS = 0.25  # between two looks at the server's log
REJOIN_SECONDS = 60.0  # between two tries to join, at most
SERVER_MARK = "server | "
DRAIN_SECONDS = 25.0  # that a server has to end its turns, or to hand them back


def serve(process: AwayProcess, stopping: threading.Event) -> int:
    """Serves until it is asked to leave or the server ends. Returns the exit code. Raises UserError."""
    process.check_store()
    with printed(process.place / f"inference-{process.number}.log"):
        return _serve(process, stopping)


def _serve(process: AwayProcess, stopping: threading.Event) -> int:
    config, ledger = process.config, process.open_ledger()
    kind = config.inference.device.partition(":")[0]  # its placer shows it its own GPUs alone
    config = config.model_copy(update={"inference": config.inference.model_copy(update={"device": kind})})
    engine = start_engine(
        process.folder, config, process.place, engine_token(), process.number, host=process.address, placed=True
    )
    served = process.place / "served"  # by an earlier start of this job
    try:
        try:
            url = engine.url(start_seconds(config.inference, config.model.path))
        except UserError as e:
            if served.exists():  # not the user's mistake: memory of the killed one is not free yet, or a port is taken
                raise RunFailed(str(e)) from None
            raise
        served.touch()
        ledger.members.join(url, process.name)
        print(f"{process.name} serves at {url}", flush=True)
        why = _until_it_leaves(process, engine.child, stopping, url)
        ended = engine.child.exit_code
        if ended is None:
            engine.child.popen.terminate()  # first: the ledger's server may be away
        ledger.members.drain(url, why)
        engine.child.stop(DRAIN_SECONDS)
        ledger.members.set([(url, "gone", why, -1)])
        print(f"{process.name} has left: {why}", flush=True)
        return 0 if ended is None else 2 if ended == 2 else RESTART
    finally:
        engine.child.stop(1)
        ledger.close()


@contextmanager
def printed(log: Path) -> Iterator[None]:
    """Prints what is added to a log meanwhile, line by line, behind `SERVER_MARK`."""
    begin, over = log.stat().st_size if log.exists() else 0, threading.Event()

    def follow() -> None:
        rest, place, last = b"", begin, False
        while not last:
            last = over.wait(PRINT_SECONDS)
            if log.exists():
                with log.open("rb") as file:
                    file.seek(place)
                    added = file.read()
                place += len(added)
                *lines, rest = (rest + added).split(b"\n")
                for line in [*lines, rest] if last and rest else lines:
                    print(SERVER_MARK + line.decode(errors="replace").rstrip("\r").rpartition("\r")[2], flush=True)

    thread = threading.Thread(target=follow, name="log of the server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LOOK_SECONDS * 10)


def _until_it_leaves(process: AwayProcess, child: Child, stopping: threading.Event, url: str) -> str:
    """Waits until the engine must leave; returns why."""
    ledger, patience = process.open_ledger(), Patience()
    again, wait = 0.0, LOOK_SECONDS  # until it joins once more, longer each time: the run may have refused it
    try:
        while not stopping.wait(LOOK_SECONDS):
            if child.exit_code is not None:
                return child.end()
            row = next((row for row in ledger.members.engines() if row.url == url), None)
            if row is not None and row.leaving:
                return row.leaving
            if row is not None and row.state == "serving":
                wait = LOOK_SECONDS
            if (row is None or row.state == "gone") and time.monotonic() > again and _answers(url):
                ledger.members.join(url, process.name)  # it was silent for a while
                wait = min(2 * wait, REJOIN_SECONDS)
                again = time.monotonic() + wait
            if patience.over(ledger.members.stage()[1]):
                return "its run has ended"
        return "its host ends it"
    finally:
        ledger.close()


def _answers(url: str) -> bool:
    try:
        health = httpx2.get(f"{url}/health", timeout=LOOK_SECONDS, trust_env=False, headers=bearer(own_token()))
    except httpx2.HTTPError:
        return False
    return health.status_code == 200


if __name__ == "__main__":
    sys.exit(run_process(Path(sys.argv[1]), serve))
