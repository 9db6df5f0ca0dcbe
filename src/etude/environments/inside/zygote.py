"""The process that all boxes descend from: single-threaded, standard library and pytest only.

Started by `etude.environments.namespace`; argv holds the descriptor of the control socket and a JSON configuration.
Every message on the control socket asks for one handler and carries the handler's own connection. When the owner ends,
or hangs up, the zygote ends, and with it (parent-death signals, pid namespaces) everything below.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

from . import linux, root

_PRELOADED = (
    *("asyncio", "collections.abc", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
    *("functools", "inspect", "io", "itertools", "json", "logging", "math", "operator", "pathlib", "random", "re"),
    *("statistics", "string", "subprocess", "tempfile", "textwrap", "threading", "typing", "unittest.mock"),
    *("urllib.parse", "uuid", "warnings"),
)


def main() -> None:
    """Never returns normally: leaves by os._exit."""
    owner, config = int(sys.argv[2]), json.loads(sys.argv[3])
    control = socket.socket(fileno=int(sys.argv[1]))
    real_root = os.geteuid() == 0
    try:
        linux.unshare(linux.NEWNS) if real_root else linux.become(None, root.BOX_ID, linux.NEWNS)
        linux.die_with_parent(owner)
        root.build(config["prefix"], config["runner"])
        joins = _joins(config["groups"], root.BASE_ID if real_root else None)
    except (OSError, KeyError) as e:
        control.send(json.dumps({"error": str(e)}).encode())
        os._exit(1)
    sys.path[:] = [path for path in sys.path if path.startswith(config["prefix"])] + [root.RUNNER]
    sys.modules[__package__].__path__ = [f"{root.RUNNER}/inside"]
    _preload()
    assert "torch" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handlers are reaped by the kernel
    control.send(json.dumps({"ready": os.getpid(), "joins": joins}).encode())
    serve(control, real_root)
    os._exit(0)


def _joins(groups: list[int], host_id: int | None) -> bool:
    """Whether a box can move into control groups: tried by a process with the rights of one."""
    pid = os.fork()
    if pid == 0:
        try:
            linux.become(host_id, root.BOX_ID, 0)
            linux.join(groups)
            os._exit(0)
        finally:
            os._exit(1)
    for fd in groups:
        os.close(fd)
    return os.waitpid(pid, 0)[1] == 0


def _preload() -> None:
    """Import what tests usually need, so that a fork has it."""
    from . import runs, shell  # noqa: F401

    for name in _PRELOADED:
        __import__(name)


def serve(control: socket.socket, real_root: bool) -> None:
    """Fork a handler for each message, until the owner hangs up."""
    count = 0
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 65536, 8)
        if not data:
            return
        count += 1
        host_id = root.BASE_ID + count % 100_000 if real_root else None
        zygote = os.getpid()
        if os.fork() == 0:
            control.close()
            _handle(socket.socket(fileno=descriptors[0]), json.loads(data), descriptors[1:], host_id, zygote)
        for fd in descriptors:
            os.close(fd)


def _handle(
    connection: socket.socket, hello: dict[str, Any], groups: list[int], host_id: int | None, zygote: int
) -> None:
    """In the fork; never returns. The handler itself only waits: what serves is pid 1 of a namespace below it."""
    from . import runs, shell

    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # what tests print concerns nobody
            os.dup2(null, fd)
        os.close(null)
        root.enter(hello["repository"], hello["site"], host_id, hello["mounts"])
        linux.die_with_parent(zygote)
        pid = os.fork()
        if pid:
            connection.close()
            os.waitpid(pid, 0)
            os._exit(0)
        linux.die_with_parent(0)
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        if hello["live"]:
            served = shell.Live(connection, groups)
        else:
            guard = hello["guard"] or {"token": None, "virtual": {}}
            served = runs.Template(connection, hello["hot"], hello["hidden"], guard["token"], guard["virtual"])
        runs.send(connection, {"ready": True})
        served.serve()
    except BaseException as e:
        runs.send(connection, {"error": f"{type(e).__name__}: {e}"})
    os._exit(0)
