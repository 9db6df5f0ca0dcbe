"""The placer `ray`: jobs are children on the nodes of a cluster of Ray, each with a keeper that an actor holds.

    this process ── bridge (a driver of Ray) ── actor ── keeper ── child        one arrow, one machine, perhaps
         RayPlacer       ray_bridge           ray_actor   keeper

The run goes on without the head, the bridge or an actor. When the head has gone, Ray ends the bridge, the nodes and the
actors after a minute; keepers hold their children for `GRACE_SECONDS` more. As soon as a head answers again, a new
bridge makes the actors again on the same nodes, and they find their keepers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude import processes
from etude.errors import RunFailed, UserError
from etude.fleet.jobs import FleetJob, stop_all
from etude.fleet.keeper import GRACE_SECONDS
from etude.fleet.supervise import FIRST_SECONDS, LONGEST_SECONDS

CONNECT_SECONDS = 90.0
ROOM_REPORT_SECONDS = 60.0
SMALL_REPORT_SECONDS = 5.0  # of a cluster that is too small as a whole, unless it grows
ROOM_SECONDS = 300.0
"""Time in which a cluster must have room for a group of ranks."""
STOP_SECONDS = 45.0
"""Time that the end of a job may take beyond that of its process."""
_CALL_SECONDS, _POLL_SECONDS, _STOP_LOOK_SECONDS = 90.0, 1.0, 0.25


class RayJob:
    """A job in a cluster. Its log is copied to this machine as it grows."""

    def __init__(self, placer: RayPlacer, job: FleetJob, log: Path) -> None:
        self.name, self.log, self.job = job.name, log, job
        self.status: dict[str, Any] = {}  # the last one
        self.pids: dict[str, int] = {}  # none of this machine's
        self.offset = 0
        self.host = ""  # the node where it runs
        self.delay, self.again_at = FIRST_SECONDS, 0.0
        self.placed_at: float | None = time.monotonic()  # until its first status
        self.waits = ""
        self._placer, self._end = placer, ""
        self._code: int | None = None
        self._over = threading.Event()

    def update(self, status: dict[str, Any]) -> None:
        """Takes a new status, and the part of the log in it."""
        self.placed_at, self.waits = None, ""
        self.status, self.host = {**status, "log": ""}, status.get("host", self.host)
        self.delay = FIRST_SECONDS
        self.keep(text := status.get("log", ""))
        self.offset = status.get("offset", self.offset)
        if status.get("exit_code") is not None and not text:  # the log has been read to its end
            self.finish(status["exit_code"], status["end"])

    @property
    def begun(self) -> bool:
        """Whether a node has had room for the job."""
        return self.placed_at is None

    def keep(self, text: str) -> None:
        """Adds to the log on this machine."""
        if text:
            with self.log.open("a") as file:
                file.write(text)

    def finish(self, code: int, end: str) -> None:
        """The job is gone for good."""
        if not self._over.is_set():
            self._code, self._end = code, end
            self._over.set()

    @property
    def exit_code(self) -> int | None:
        """None while the job runs, or nobody knows better."""
        return self._code

    def failure(self) -> str | None:
        """One sentence if the job is gone for another reason than having finished, else None."""
        return self.end() if self.exit_code else None

    def end(self) -> str:
        """One sentence about a job that is gone."""
        return self._end

    def ends(self, seconds: float) -> bool:
        """Whether the job ends within so many seconds."""
        return self._over.wait(seconds)

    def stop(self, seconds: float) -> None:
        """SIGTERM, then SIGKILL after `seconds`, and no actor any more. Without a head the keeper stops the job itself
        when nobody has asked for it for `GRACE_SECONDS`."""
        self._placer.stop(self, seconds)


class RayRanks:
    """The ranks of one program, placed together. One that fails, or is lost, ends all."""

    def __init__(self, placer: RayPlacer, name: str) -> None:
        self.name, self.ranks, self.pids = name, list[RayJob](), dict[str, int]()
        self._placer, self._refusal, self._failed = placer, "", None
        self._code: int | None = None
        self._over = threading.Event()

    def refuse(self, why: str) -> None:
        """The ranks have no place."""
        self._refusal, self._code = why, 2
        self._over.set()

    def look(self) -> None:
        """Ends all ranks if one of them has failed."""
        codes = [rank.exit_code for rank in self.ranks]
        if self._over.is_set() or not self.ranks:
            return
        if failed := [rank for rank in self.ranks if rank.exit_code]:
            self._failed = failed[0]
            stop_all(self.ranks, 0.0)
            self._code = failed[0].exit_code
        elif None in codes:
            return
        else:
            self._code = 0
        self._over.set()

    @property
    def exit_code(self) -> int | None:
        """None while ranks run, or wait for room; that of the rank which failed first, else 0."""
        return self._code

    @property
    def log(self) -> Path:
        """The log of rank 0, or of the rank that failed first."""
        rank = self._failed or (self.ranks[0] if self.ranks else None)
        return rank.log if rank else Path(os.devnull)

    def failure(self) -> str | None:
        """One sentence about the rank that failed first, else None."""
        return self.end() if self.exit_code else None

    def end(self) -> str:
        """One sentence about ranks that are gone."""
        rank = self._failed or (self.ranks[0] if self.ranks else None)
        return self._refusal or (rank.end() if rank else f"the {self.name} was stopped")

    def ends(self, seconds: float) -> bool:
        """Whether the ranks end within so many seconds."""
        return self._over.wait(seconds)

    def stop(self, seconds: float) -> None:
        """Stops all ranks."""
        self._placer.stop_ranks(self, seconds)


class _Bridge:
    """The process of `ray_bridge`, and the socket to it."""

    def __init__(self, address: str, run: str, log: Path) -> None:
        ours, theirs = socket.socketpair()
        words = ["etude.fleet.ray_bridge", str(theirs.fileno()), address, run]
        env = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
        with theirs:
            self.child = processes.start("bridge to Ray", words, log, env, holds=[theirs.fileno()], apart=True)
        self._socket, self._file = ours, ours.makefile("r")
        self.lock = threading.Lock()
        try:
            self._read(CONNECT_SECONDS)
        except BaseException:
            self.close()
            raise

    def _read(self, seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        if not (text := self._file.readline()):
            raise ConnectionError("the bridge to Ray has ended")
        answer: dict[str, Any] = json.loads(text)
        if "refused" in answer:
            raise UserError(answer["refused"])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, limit: float = _CALL_SECONDS, /, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises OSError when the bridge is gone or late, RuntimeError for errors of Ray, and
        UserError."""
        with self.lock:
            try:
                self._socket.settimeout(_CALL_SECONDS)
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                return self._read(limit)
            except OSError:
                self._socket.close()  # a late answer would be taken for that of the next request
                raise

    def close(self) -> None:
        """Ends the bridge."""
        self._socket.close()
        self._file.close()
        self.child.stop(1)


class RayPlacer:
    """Starts jobs in the cluster at `address`, as those of `run`. Raises UserError if there is none, or without its
    token, and RunFailed if it does not work. A thread starts the bridges, which die with it, copies logs, and makes
    actors that are missing again."""

    def __init__(self, address: str, run: str, logs: Path, restarts: int) -> None:
        check_token()
        self._address, self._run, self._logs, self._restarts = address, run, logs, restarts
        self._jobs = dict[str, RayJob]()
        self._starting = threading.Lock()
        self._ranks: RayRanks | None = None
        self._bridge: _Bridge | None = None
        self._refusal: Exception | None = None
        self._opened, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._tend, name="placer ray", daemon=True)
        self._thread.start()
        self._opened.wait(CONNECT_SECONDS + 10)
        if self._bridge is None:
            self._closed.set()
            raise (
                self._refusal
                if isinstance(self._refusal, UserError)
                else RunFailed(f"the cluster of Ray at {address} cannot be used ({self._refusal}): see {logs}/ray.log")
            )

    def start(self, job: FleetJob) -> RayJob:
        """Starts a job, or takes the running one of the same name if it is the same job. Raises UserError."""
        placed = RayJob(self, job, self._logs / f"{job.name}.log")
        self._jobs[job.name] = placed
        with contextlib.suppress(OSError, RuntimeError):  # then it is missing, and started by the thread
            self._start(placed)
        return placed

    def start_group(self, job: FleetJob, count: int) -> RayRanks:
        """Places `count` ranks together once there is room, and starts them. They end with this process."""
        self._ranks = RayRanks(self, job.name)
        threading.Thread(target=self._place, args=[self._ranks, job, count], daemon=True).start()
        return self._ranks

    def close(self) -> None:
        """Ends the bridge. Jobs that were not stopped go on."""
        self._closed.set()
        if self._bridge is not None:
            self._bridge.close()
        self._thread.join(10)

    def stop(self, job: RayJob, seconds: float) -> None:
        """Stops a job for good. Many threads may stop many jobs at once."""
        with self._starting:  # afterwards nothing starts it again
            self._jobs.pop(job.name, None)
        status, deadline, offset = dict[str, Any](), time.monotonic() + seconds + STOP_SECONDS, job.offset
        with contextlib.suppress(OSError, RuntimeError):
            while job.exit_code is None and time.monotonic() < deadline:
                status = self._open().ask(call="stop", name=job.name, seconds=seconds, offset=offset)
                if status["done"]:
                    break
                time.sleep(_STOP_LOOK_SECONDS)
        if job.offset == offset:
            job.keep(status.get("log", ""))
        code = status.get("exit_code")
        job.finish(0 if code is None else code, status.get("end") or f"the {job.name} was stopped")

    def stop_ranks(self, ranks: RayRanks, seconds: float) -> None:
        """Stops ranks together: they wait for each other."""
        stop_all(ranks.ranks, seconds)
        ranks.look()
        if ranks.exit_code is None:
            ranks.refuse(f"the {ranks.name} was stopped")

    def _open(self) -> _Bridge:
        if self._bridge is None:
            raise ConnectionError("no head of Ray answers")
        return self._bridge

    def _order(self, job: FleetJob, *, grace: float, restarts: int, ranks: int = 0) -> dict[str, Any]:
        own = {**asdict(job), "env": dict(job.env), "files": dict(job.files), "argv": list(job.argv)}
        return {"job": own, "run": self._run, "grace": grace, "restarts": restarts, "ranks": ranks}

    def _start(self, placed: RayJob) -> None:
        placed.again_at = time.monotonic() + placed.delay
        placed.delay = min(2 * placed.delay, LONGEST_SECONDS)
        order = self._order(placed.job, grace=GRACE_SECONDS, restarts=self._restarts)
        with self._starting:
            if placed.name in self._jobs:
                self._open().ask(call="start", order=order, host=placed.host)

    def _place(self, ranks: RayRanks, job: FleetJob, count: int) -> None:
        """Starts ranks once there is room, and refuses them after `ROOM_SECONDS` without. Each request is short: others
        go on meanwhile."""
        order, deadline = self._order(job, grace=0.0, restarts=0, ranks=count), time.monotonic() + ROOM_SECONDS
        answer = dict[str, Any]()
        try:
            while ranks.exit_code is None and time.monotonic() < deadline:
                if names := (answer := self._open().ask(call="group", order=order, count=count)).get("names"):
                    ranks.ranks += [RayJob(self, FleetJob(n, job.argv), self._logs / f"{n}.log") for n in names]
                    return
                self._closed.wait(_POLL_SECONDS)
            self._open().ask(call="drop group")
        except (UserError, OSError, RuntimeError) as e:
            return ranks.refuse(f"the {job.name}: {e}")
        if ranks.exit_code is None:
            needs = f"{count} ranks, which need {_of(job.cpus, job.gpus)} each, and have to be placed together"
            ranks.refuse(
                f"the cluster of Ray had no room within {ROOM_SECONDS:.0f} seconds for {needs}: all of it "
                f"has {_of(*answer['has'])}"
            )

    def _tend(self) -> None:
        delay = FIRST_SECONDS
        while not self._closed.is_set():
            if self._bridge is None:
                try:
                    self._bridge = _Bridge(self._address, self._run, self._logs / "ray.log")
                    delay = FIRST_SECONDS
                except (UserError, OSError, RuntimeError) as e:
                    self._refusal = e
                self._opened.set()
                if self._bridge is None:
                    self._closed.wait(delay)
                    delay = min(2 * delay, LONGEST_SECONDS)
                    continue
            try:
                self._look(self._bridge)
            except (UserError, RuntimeError):
                pass  # an error of Ray's: the next look may succeed
            except (OSError, ValueError):
                bridge, self._bridge = self._bridge, None
                bridge.close()
                for rank in self._ranks.ranks if self._ranks else ():
                    rank.finish(1, f"the {rank.name} ended with the head of Ray")
            if self._ranks is not None:
                self._ranks.look()
            self._closed.wait(_POLL_SECONDS)

    def _lack(self, bridge: _Bridge, job: FleetJob, seconds: float) -> str:
        """A sentence about a job that has had no room for so many seconds; "" if it is too soon for one."""
        if seconds < SMALL_REPORT_SECONDS:
            return ""
        cpus, gpus = bridge.ask(call="has")["has"]
        if seconds < ROOM_REPORT_SECONDS and job.cpus <= cpus and job.gpus <= gpus:
            return ""
        return (
            f"the cluster of Ray has no room for {job.name}, which needs {_of(job.cpus, job.gpus)}: all of it has "
            f"{_of(cpus, gpus)}, less what others use"
        )

    def _look(self, bridge: _Bridge) -> None:
        """Takes news of all jobs, and starts those that Ray does not know."""
        ranks = {rank.name: rank for rank in (self._ranks.ranks if self._ranks else ())}
        going = {name: job for name, job in {**self._jobs, **ranks}.items() if job.exit_code is None}
        if not going:
            return
        answers = bridge.ask(call="poll", offsets={name: job.offset for name, job in going.items()})
        for name, job in going.items():
            if name in self._jobs and not job.waits and job.placed_at is not None:
                job.waits = self._lack(bridge, job.job, time.monotonic() - job.placed_at)
                if job.waits:
                    print(f"etude: {job.waits}; it waits", file=sys.stderr)
        for name, status in answers.items():
            job = going[name]
            if "missing" not in status:
                job.update(status)
            elif name in ranks:
                job.finish(1, f"the {name} is lost: Ray has ended its node or its actor")
            elif time.monotonic() > job.again_at:  # else it is being started, or stopped
                self._start(job)


def _of(cpus: float, gpus: float) -> str:
    """Resources in words."""
    return f"{cpus:g} CPU{'s' * (cpus != 1)} and {gpus:g} GPU{'s' * (gpus != 1)}"


def check_token() -> None:
    """Raises UserError if this process has no token of a cluster of Ray."""
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not named and not (Path.home() / ".ray" / "auth_token").is_file():
        raise UserError(
            'placer = "ray" needs the token of the cluster: set RAY_AUTH_TOKEN, or write it into ~/.ray/auth_token '
            "(`ray get-auth-token --generate` makes one)"
        )


def ray_log(address: str, run: str, name: str) -> Iterator[str]:
    """The log of a job in a cluster, in pieces, as long as it is now. Raises UserError."""
    check_token()
    with tempfile.TemporaryDirectory() as folder:
        try:
            bridge = _Bridge(address, run, Path(folder) / "ray.log")
        except (OSError, RuntimeError) as e:
            raise UserError(f"the cluster of Ray at {address} cannot be used ({e})") from None
        try:
            offset, deadline = 0, time.monotonic() + _CALL_SECONDS
            while time.monotonic() < deadline:
                status = bridge.ask(call="poll", offsets={name: offset}).get(name)
                if status is not None and "missing" in status:
                    raise UserError(f"the cluster of Ray at {address} has no process {name!r} of this run")
                if status is not None and "offset" in status:
                    yield status["log"]
                    if status["offset"] == offset:
                        return
                    offset = status["offset"]
            raise UserError(
                f"the process {name!r} did not answer for {_CALL_SECONDS:.0f} seconds: perhaps the cluster has no room "
                "for it"
            )
        finally:
            bridge.close()
