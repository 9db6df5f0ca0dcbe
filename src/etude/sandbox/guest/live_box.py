"""Pid 1 of a live box on namespaces.

Memory pages that a fork of Python writes to, by counting references too, are copied. Pid 1 stays as long as the box, so
it does nothing but serve; its child makes the box and then becomes the shell, which frees those pages.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from . import box, files, layers, linux, machine_profile, shell

ROUNDS = 20  # of a rehearsal
LIMITS = {"addresses": 1 << 30, "memory": 1 << 30, "processes": 1024, "disk": 1 << 20}  # of a rehearsal


class LiveBox(shell.ShellServer):
    """The server of a live box. `profile` is the machine that the box imitates, if any."""

    def __init__(self, connection: socket.socket, groups: Sequence[int], profile: dict[str, Any] | None) -> None:
        super().__init__(connection, groups, shell.SIZE if profile is None else profile["size"])
        self.machine_profile = profile
        self.first = b"{}"  # the first request, which describes the box

    @functools.cached_property
    def request(self) -> dict[str, Any]:
        """The first request, parsed when it is needed."""
        return json.loads(self.first)

    def settings(self) -> shell.Settings:
        """Limits and environment of the first request."""
        return self.request["limits"], self.request["environment"]

    def serve(self) -> None:
        """Make the box, then serve until the owner hangs up."""
        box.enter()
        box.terminals()
        if self.machine_profile is not None:
            machine_profile.count_from(self.machine_profile["pids"])
        linux.hide()
        self.shared = layers.shared()
        ready, done = os.pipe()
        self.shell = shell.BashSession(self.size, None, self.groups, lambda: self._furnish(done))
        os.close(done)
        with open(ready, "rb", 0) as pipe:
            self.first = pipe.readall()
        if not self.first:  # the owner has heard why
            return
        os.chdir("/")
        while True:
            self.serve_one()

    def _furnish(self, done: int) -> shell.Settings:
        """In the child: make the box, write pid 1's part of the request to the pipe `done`, reply to the owner."""
        try:
            self.request, payload = self._request()
            _, changes = box.decode(payload)
            box.furnish(self.request["limits"], changes, layers.lowers(), self.request["places"])
            if self.machine_profile is not None:
                machine_profile.settle(self.machine_profile)
            layers.hide()
            if self.request["host_socket"] is not None:
                self._open_host_socket()
            kept = {name: self.request[name] for name in ("limits", "environment")}
            with open(done, "wb") as pipe:
                pipe.write(json.dumps(kept).encode())
            self._begun()
        except files.FileRefused as e:
            box.send(self.connection, {"id": self.request["id"], "refused": e.kind, "message": str(e)})
            os._exit(1)
        except BaseException as e:
            box.send(self.connection, {"error": f"{type(e).__name__}: {e}"})
            os._exit(1)
        return self.settings()

    def _open_host_socket(self) -> None:
        """Start the server of the host socket by a child that ends, so that pid 1 becomes its parent."""
        from . import host_socket  # it takes long to import, and few boxes have one

        pid = os.fork()
        if pid == 0:
            path, port = self.request["host_socket"]
            host_socket.start(path, port, linux.filter_program(os.uname().machine))
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            raise OSError("the way out could not be opened")

    def _begun(self) -> None:
        """Reply to the first request; with a way out, send a listener on the box's loopback for the owner to serve."""
        if not self.request["port"]:
            box.send(self.connection, {"id": self.request["id"]})
            return
        with socket.create_server(("127.0.0.1", self.request["port"])) as listener:
            box.send(self.connection, {"id": self.request["id"]}, descriptors=[listener.fileno()])

    @functools.cached_property
    def work_tree(self) -> layers.WorkTree:
        """The layers of the box."""
        return layers.WorkTree(self.request["limits"], self.shared)

    @property
    def tree(self) -> int:
        """Descriptor of the work tree."""
        return self.work_tree.descriptor

    def _changed(self, roots: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        return self.work_tree.changes(roots)


class _Rehearsal(LiveBox):
    """Serves commands in no box: the processes that it sees are those of the machine, and none of its business."""

    def _watch(self) -> None:
        pass


def rehearse() -> None:
    """Serve some commands, in no box: forks of code that has run before (PEP 659) write to less memory."""
    owner, connection = socket.socketpair()
    with owner, connection:
        served = _Rehearsal(connection, (), None)
        served.request = {"limits": LIMITS, "environment": {}}
        for number in range(ROUNDS):
            box.terminals()
            data = json.dumps({"op": "exec", "seconds": 60.0, "id": number}).encode()
            line = os.memfd_create("request", os.MFD_CLOEXEC)
            os.write(line, b":")
            socket.send_fds(owner, [struct.pack("<I", len(data)) + data], [line])
            os.close(line)
            served.serve_one()
            owner.recv(65536)
            linux.unmount("/dev/pts")
        assert served.shell is not None
        served.shell.close()
        os.waitpid(served.shell.pid, 0)
