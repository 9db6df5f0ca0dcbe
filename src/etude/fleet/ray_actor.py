"""The actor of Ray that holds a keeper: text in, text out, so that nothing of etude's is pickled but strings and
numbers. Ray names this class to the workers, which import it: they have etude installed.

The actor, not its child, is what Ray starts again: on the same node it finds the keeper of the one before.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

from etude.fleet.keeper import LINGER_SECONDS, KeeperLine, digest, open_keeper

_LOOK_SECONDS = 1.0
_GOES = "its machine is about to go"
_LEAVE_SECONDS = 120.0  # after the notice of a machine that goes, in which it must have gone


class JobActor:
    """Holds the keeper of one job, and answers for it."""

    def __init__(self, order: str) -> None:
        """`order`: a JSON object of the job, the run, `grace`, `restarts` and `ranks`, the number of a group, which
        begins when all its ranks have a place."""
        self._order: dict[str, Any] = json.loads(order)
        self._lock = threading.Lock()
        self._line: KeeperLine | None = None
        self._why, self._opened = "", 0
        self._end: dict[str, Any] | None = None  # the last status of a child that has ended for good
        self._ended = 0.0  # when
        self._away_until = 0.0  # no child is started before: the machine is about to go
        self._begins = threading.Event()
        if not self._order["ranks"]:
            self._begins.set()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def _ask(self, limit: float = 20.0, /, **request: Any) -> dict[str, Any]:
        """The keeper's answer, also for a while after the child's end; a keeper that is gone gets a successor unless
        the child has ended for good. Raises OSError."""
        with self._lock:
            try:
                if self._line is None and self._end is None:
                    if time.monotonic() < self._away_until:
                        raise OSError(_GOES)
                    settings = {key: self._order[key] for key in ("grace", "restarts")}
                    self._line = open_keeper(self._order["job"], self._order["run"], **settings)
                    self._opened += 1
                if self._line is None:
                    return self._end or {}
                status = self._line.ask(limit, **request)
            except OSError:
                if self._line is not None:
                    self._line.close()
                self._line = None
                if self._end is None:
                    raise
                return self._end
            if status["exit_code"] is not None and status["leaving"] and not self._order["ranks"]:
                now = time.monotonic()
                self._away_until = now + _LEAVE_SECONDS if now > self._away_until else self._away_until
                self._why = _GOES
                return {**status, "exit_code": None}
            if status["exit_code"] is not None and self._end is None:
                self._end, self._ended = {**status, "log": ""}, time.monotonic()
            return status

    def _watch(self) -> None:
        """Opens the keeper, and a successor of one that was killed. When the child has ended for good, and whoever
        wanted to know why has had the time, this actor ends, and its resources are free."""
        self._begins.wait()
        while True:
            try:
                if not self._ask(call="status", offset=0, limit=0).get("leaving"):
                    self._why = ""
            except OSError as e:
                self._why = str(e)
            if self._end is not None and time.monotonic() - self._ended > LINGER_SECONDS:
                import ray

                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
            time.sleep(_LOOK_SECONDS)

    def place(self) -> str:
        """The address of this node, and a port that is free on it, for rank 0 of a group."""
        import ray

        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        return json.dumps({"host": ray.util.get_node_ip_address(), "port": port})

    def begin(self, env: str) -> str:
        """Starts a rank of a group, with these variables: a JSON object. "" when it has begun."""
        self._order["job"]["env"] |= json.loads(env)
        self._begins.set()
        return ""

    def digest(self) -> str:
        """The digest of the job."""
        return digest(self._order["job"])

    def status(self, offset: int) -> str:
        """How the child is, and its log from `offset` on: JSON."""
        status: dict[str, Any] = {}
        try:
            status = self._ask(call="status", offset=offset) if self._begins.is_set() else {}
        except OSError as e:
            self._why = str(e)
        import ray

        own = {"why": self._why, "actor": os.getpid(), "opened": self._opened}
        return json.dumps({**status, **own, "host": ray.util.get_node_ip_address()})

    def stop(self, seconds: float, offset: int) -> str:
        """Stops the child for good: SIGTERM, SIGKILL after `seconds`. JSON of its last status, and the log."""
        status: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            status = self._ask(seconds + 20, call="stop", seconds=seconds, offset=offset)
        return json.dumps(status)
