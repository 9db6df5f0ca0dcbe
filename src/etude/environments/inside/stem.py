"""The process of one image that its live boxes are forked from. What they share is mounted here, once.

It never sees what a box is asked to do: that travels on the box's own connection.
Messages: {"box": number of control groups} with the box's connection and the groups, {"keep": name} with the mount of a
frozen layer, {"drop": name}.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from . import box, linux, root, shell

FROZEN_DESCRIPTORS = 16  # of one message, at most


def prepare(changes: Mapping[str, bytes | None]) -> None:
    """Write the files of the task, in a stem that has its own mount namespace."""
    os.umask(0o022)
    linux.mount("tmpfs", root.SHARED, "tmpfs", box.PRIVATE, "mode=755")
    if changes:
        os.mkdir(root.TASK)
        box.write(root.TASK, changes, [root.WORKSPACE])
    os.chmod(root.SHARED, 0)  # for boxes: a stem has the rights to pass


def serve(connection: socket.socket) -> None:
    """Until the owner hangs up."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # boxes are reaped by the kernel
    pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 65536, FROZEN_DESCRIPTORS)
        if not data:
            return
        request = json.loads(data)
        if "keep" in request:
            os.mkdir(f"{root.SHARED}/{request['keep']}")
            linux.attach(descriptors[0], f"{root.SHARED}/{request['keep']}")
        elif "drop" in request:
            linux.unmount(f"{root.SHARED}/{request['drop']}")
            os.rmdir(f"{root.SHARED}/{request['drop']}")
        else:
            _fork(connection, descriptors, pids)
        for fd in descriptors:
            os.close(fd)


def _fork(connection: socket.socket, descriptors: Sequence[int], pids: int) -> None:
    """Pid 1 of a box: the next fork is the first of a new pid namespace."""
    linux.unshare(linux.NEWPID)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            linux.setns(pids, linux.NEWPID)
    if pid:
        return
    connection.close()
    os.close(pids)
    own = socket.socket(fileno=descriptors[0])
    try:
        linux.die_with_parent(0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        shell.Live(own, descriptors[1:]).serve()
    except BaseException as e:
        box.send(own, {"error": f"{type(e).__name__}: {e}"})
    os._exit(0)


def start(connection: socket.socket, hello: dict[str, Any], payload: int) -> None:
    """In the first process of the stem's namespaces."""
    _, changes = box.decode(box.read_all(payload))
    os.close(payload)
    prepare(changes)
    if hello["door"]:
        from . import door  # noqa: F401, so that boxes need not
    box.send(connection, {"ready": True})
    serve(connection)
