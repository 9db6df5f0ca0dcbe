"""A keeper: the process on a node of Ray that supervises one child for an actor, and outlives the actor for a while.

Ray ends actors when a node loses the head; the child must not notice. So an actor holds a connection to a keeper, which
is in a session of its own and no child of Ray's worker; an actor that starts on the node finds it by its socket. When
nobody has been connected for `grace` seconds, the keeper stops its child and ends. The child dies with the keeper, and
the keeper with no one: two supervisors never start the same child, since a folder has one keeper, which holds its lock.

    /tmp/etude-fleet-UID/RUN/NAME/    of one job, for its user alone
      lock  control                   held by the keeper; its socket
      log   files/                    of the child

`main` reads a JSON object from the standard input. Requests and answers on the socket are JSON lines.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from etude import processes
from etude.fleet.jobs import with_folder, write_files
from etude.fleet.supervise import Supervised

GRACE_SECONDS = 180.0
"""Time without an actor after which a keeper stops its child."""
DRAIN_SECONDS = 25.0  # that a child whose keeper ends may take, as after a spot notice
LOG_PIECE = 256 * 1024
"""Bytes of a log in one answer, at most."""
LINGER_SECONDS = 30.0  # of a keeper whose child has ended, so that an actor learns how
HELD = 3  # exit code of a keeper whose folder has another one
_OPEN_SECONDS, _LOOK_SECONDS = 20.0, 0.25
_OF_RAY = ("RAY_", "PYTHONBREAKPOINT")


def _root() -> Path:
    return Path(f"/tmp/etude-fleet-{os.getuid()}")


def job_folder(run: str, name: str) -> Path:
    """The folder of a job on this machine, made for this user alone. Raises OSError if another user has it."""
    root = _root()
    place = root / hashlib.sha256(run.encode()).hexdigest()[:16] / name
    for folder in (root, place.parent, place):
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
        if state.st_uid != os.getuid() or state.st_mode & 0o077 or folder.is_symlink():
            raise OSError(f"{folder} is not a folder of this user alone")
    return place


class KeeperLine:
    """A connection to a keeper: requests and answers are JSON lines. Raises OSError when the keeper is gone."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_OPEN_SECONDS)
        try:
            self._socket.connect(str(folder / "control"))
        except OSError:
            self._socket.close()
            raise
        self._file = self._socket.makefile("r")
        self._lock = threading.Lock()

    def ask(self, limit: float = _OPEN_SECONDS, /, **request: Any) -> dict[str, Any]:
        """The keeper's answer."""
        with self._lock:
            self._socket.settimeout(limit)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            if not (line := self._file.readline()):
                raise ConnectionError("the keeper is gone")
        return json.loads(line)

    def close(self) -> None:
        """Lets the keeper go."""
        self._file.close()
        self._socket.close()


def open_keeper(job: dict[str, Any], run: str, *, grace: float, restarts: int) -> KeeperLine:
    """A connection to the keeper of a job on this node: to the one that runs it already, else to a new one. A keeper
    of another job of this name, or with other GPUs, is ended first. Raises OSError."""
    folder = job_folder(run, job["name"])
    own = {"digest": digest(job), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "") if job["gpus"] else ""}
    _end_orphans(folder, own["gpus"])
    deadline = time.monotonic() + 2 * DRAIN_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            line = KeeperLine(folder)
            status = line.ask(call="status", offset=0, limit=0)
            if {key: status[key] for key in own} == own and status["exit_code"] is None:
                return line
            line.ask(DRAIN_SECONDS + _OPEN_SECONDS, call="end", seconds=DRAIN_SECONDS)
            line.close()
        text = json.dumps({"job": job, "folder": str(folder), "grace": grace, "restarts": restarts, **own})
        words = [sys.executable, "-P", "-c", "from etude.fleet.keeper import main; main()"]
        done = subprocess.run(words, input=text.encode(), timeout=_OPEN_SECONDS, start_new_session=True, check=False)
        if done.returncode not in (0, HELD):
            raise OSError(f"the keeper of {job['name']} exited with code {done.returncode}: see {folder}/keeper.log")
    raise OSError(f"the keeper of {job['name']} does not answer: see {folder}/keeper.log")


def drain_host() -> None:
    """Stops the children of all keepers of this user on this machine at once, for a machine that is about to go. Ray
    starts them elsewhere once it is gone."""

    def stop(folder: Path) -> None:
        with contextlib.suppress(OSError), contextlib.closing(KeeperLine(folder)) as line:
            line.ask(DRAIN_SECONDS + _OPEN_SECONDS, call="leave", seconds=DRAIN_SECONDS)

    folders = [path.parent for path in _root().glob("*/*/control")]
    threads = [threading.Thread(target=stop, args=[folder]) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DRAIN_SECONDS + _OPEN_SECONDS)


def _end_orphans(folder: Path, gpus: str) -> None:
    """Ends unwatched keepers of the run's other jobs with one of these GPUs: Ray believes it free."""
    own = {name for name in gpus.split(",") if name}
    for other in folder.parent.iterdir() if own else ():
        with contextlib.suppress(OSError):
            if other != folder:
                line = KeeperLine(other)
                status = line.ask(call="status", offset=0, limit=0)
                if own & {*status["gpus"].split(",")} and status["lines"] == 1:
                    line.ask(DRAIN_SECONDS + _OPEN_SECONDS, call="end", seconds=DRAIN_SECONDS)
                line.close()


def digest(job: dict[str, Any]) -> str:
    """The digest of a job: a job of the same name and digest is the same."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


class _Keeper:
    """The state of this process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.folder = order, Path(order["folder"])
        self.lines, self.left_at = 0, time.monotonic() + _OPEN_SECONDS  # connections; since when there is none
        self.lock, self.over = threading.Lock(), threading.Event()
        self.leaving = False  # the machine is about to go
        job: dict[str, Any] = order["job"]
        write_files(self.folder / "files", job["files"])
        log = self.folder / "log"
        log.touch()
        begins = partial(
            processes.start,
            job["name"],
            with_folder(job["argv"], self.folder / "files"),
            log,
            job["env"],
            python=job["python"] or sys.executable,
        )
        self.child = Supervised(job["name"], log, begins, order["restarts"])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        if request["call"] in ("stop", "end", "leave"):
            self.leaving |= request["call"] == "leave"
            self.child.stop(request["seconds"])
            if request["call"] == "end":
                self.over.set()
        offset, limit, code = request.get("offset", 0), request.get("limit", LOG_PIECE), self.child.exit_code
        with self.child.log.open("rb") as file:
            offset = offset if offset <= file.seek(0, os.SEEK_END) else 0  # the log of another node was longer
            file.seek(offset)
            piece = file.read(limit)
        return {
            "exit_code": code,
            "end": "" if code is None else self.child.end(),
            "pid": next(iter(self.child.pids.values()), None),
            "keeper": os.getpid(),
            "starts": self.child.starts,
            "log": piece.decode(errors="replace"),
            "offset": offset + len(piece),
            "digest": self.order["digest"],
            "gpus": self.order["gpus"],
            "lines": self.lines,
            "leaving": self.leaving,
        }

    def serve(self, connection: socket.socket) -> None:
        """Answers the requests of one connection."""
        with self.lock:
            self.lines += 1
        try:
            with connection, connection.makefile("r") as requests:
                for line in requests:
                    connection.sendall(json.dumps(self.answer(json.loads(line))).encode() + b"\n")
        except OSError:
            pass
        finally:
            with self.lock:
                self.lines -= 1
                self.left_at = time.monotonic()

    def watch(self) -> None:
        """Returns when the keeper is to end: it was told so, or its child has ended and everybody knows, or nobody has
        been connected for the grace time."""
        ended: float | None = None
        while not self.over.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if ended is None and self.child.exit_code is not None:
                ended = now
            if ended is not None and now - ended > LINGER_SECONDS:
                return
            with self.lock:
                left = self.lines == 0 and now - self.left_at > self.order["grace"]
            if left:
                self.child.stop(DRAIN_SECONDS)
                return


def _keep(order: dict[str, Any], listener: socket.socket) -> None:
    keeper = _Keeper(order)

    def drain(*_: object) -> None:  # the notice of a machine that is about to go
        leave = {"call": "leave", "seconds": DRAIN_SECONDS}
        threading.Thread(target=keeper.answer, args=[leave], daemon=True).start()

    signal.signal(signal.SIGTERM, drain)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=keeper.serve, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    keeper.watch()
    (keeper.folder / "control").unlink(missing_ok=True)
    shutil.rmtree(keeper.folder / "files", ignore_errors=True)
    time.sleep(_LOOK_SECONDS)  # the last answer is on its way


def main() -> None:
    """Makes the socket, leaves the process that started this one, and keeps the job."""
    order = json.load(sys.stdin)
    folder = Path(order["folder"])
    os.chdir(folder)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(HELD)
    (folder / "control").unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "control"))
    listener.listen()
    if os.fork():  # Ray ends the children of its workers: the keeper is none
        os._exit(0)
    with open(folder / "keeper.log", "ab") as log, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name in [name for name in os.environ if name.startswith(_OF_RAY)]:
        del os.environ[name]  # Ray's token among them
    _keep(order, listener)
