"""The process of one image that its live boxes are forked from. Their common layers are mounted here, once.

It never sees the requests to a box, which travel on the box's own connection. Each message makes a box, and carries
the box's connection and its control groups.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from . import box, linux, live_box, machine_profile, root

DESCRIPTORS = 16  # of one message, at most


def start(connection: socket.socket, hello: dict[str, Any], payload: int) -> None:
    """Serve in the first process of the template's namespaces, until the owner hangs up."""
    request, changes = box.decode(box.read_all(payload))
    os.close(payload)
    os.umask(0o022)
    linux.mount("tmpfs", root.SHARED, "tmpfs", box.PRIVATE, "mode=755")
    if changes:
        os.mkdir(root.TASK)
        box.write(root.TASK, changes, [root.WORKSPACE])
    if request["machine_profile"] is not None:
        machine_profile.prepare(request["machine_profile"])
    os.chmod(root.SHARED, 0)  # closed to boxes: the template may pass
    linux.filter_program(os.uname().machine)  # kept for boxes
    if hello["host_socket"]:
        from . import host_socket  # noqa: F401, so that boxes need not
    box.send(connection, {"ready": True})
    _serve(connection, request["machine_profile"])


def _serve(connection: socket.socket, profile: dict[str, Any] | None) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # boxes are reaped by the kernel
    pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 65536, DESCRIPTORS)
        if not data:
            return
        _fork(connection, descriptors, pids, profile)
        for fd in descriptors:
            os.close(fd)


def _fork(connection: socket.socket, descriptors: Sequence[int], pids: int, profile: dict[str, Any] | None) -> None:
    """Fork pid 1 of a box, the first process of a new pid namespace."""
    if linux.fork_first(pids):
        return
    connection.close()
    os.close(pids)
    own = socket.socket(fileno=descriptors[0])
    try:
        # It dies with the template, the first of the namespace that holds it.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        live_box.LiveBox(own, descriptors[1:], profile).serve()
    except BaseException as e:
        box.send(own, {"error": f"{type(e).__name__}: {e}"})
    os._exit(0)
