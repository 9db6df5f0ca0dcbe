"""The first program of a box that a container or a virtual machine isolates, in place of `zygote.py`.

Its standard input and output are a stream to the owner: frames of a length, JSON with a count of bytes, and the bytes.
First come the files of the image, then one hello, then requests for `shell.ShellServer` or a server of test runs, which
see the same socket with memory files as below the zygote. A socket that comes with a request is one end of a wire,
whose other end the owner has (`relay.py`). The server is root and acts as the box's user; the programs
that it starts are that user's, without capabilities and under the system-call filter. When the stream ends, everything
here ends.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib
import io
import json
import os
import signal
import socket
import struct
import sys
import tarfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NoReturn

from . import box, files, linux, relay, root, shell

HOME = "/home/user"
MAX_HEAD = 4 << 20  # bytes of the head of a message that an owner reads


def main(stream: BinaryIO) -> NoReturn:
    """Take files until a hello comes, then serve until the stream ends."""
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    linux.call_itself("/sbin/init", "init")
    os.umask(0o022)
    try:
        while "hello" not in (frame := _frame(stream))[0]:
            _unpack(frame[0]["at"], frame[0]["owner"], frame[1])
    except EOFError:
        os._exit(0)
    hello = frame[0]["hello"]
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        os.dup2(null, 0)
        os.close(out)
        _serve(theirs, hello)
    theirs.close()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as pid 1, this process is the parent of all orphans
    output = OwnerStream(out)
    threading.Thread(target=_replies, args=(ours, output), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError):
        _requests(stream, ours, output)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal_all(hello["user"], signal.SIGKILL)
    os._exit(0)


class OwnerStream:
    """The stream to the owner, which several threads share."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, head: dict[str, Any], body: bytes) -> None:
        """Write a frame."""
        text = json.dumps(head | {"bytes": len(body)}).encode()
        with self._lock:
            self._write(struct.pack("<I", len(text)) + text + body)

    def forward(self, replies: BinaryIO) -> bool:
        """Hand on one message of a server; False once it has hung up. Of a malformed one the owner sees what came."""
        length = replies.read(4)
        if len(length) < 4:
            return False
        (size,) = struct.unpack("<I", length)
        text = replies.read(size) if size <= MAX_HEAD else b""
        try:
            left = int(json.loads(text)["bytes"])
        except (ValueError, LookupError, TypeError, RecursionError):
            left = 0
        with self._lock:
            self._write(length + text)
            while left > 0 and (part := replies.read(min(left, relay.PART))):
                self._write(part)
                left -= len(part)
        return True

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]


def _replies(server: socket.socket, output: OwnerStream) -> NoReturn:
    with server.makefile("rb") as replies:
        while output.forward(replies):
            pass
    os._exit(0)


def _frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Head and body of the next frame. Raises EOFError when the owner has gone."""
    head = stream.read(4)
    data = stream.read(struct.unpack("<I", head)[0]) if len(head) == 4 else b""
    frame = json.loads(data) if data else {"bytes": 0}
    body = stream.read(frame["bytes"])
    if not data or len(body) < frame["bytes"]:
        raise EOFError
    return frame, body


def _requests(stream: BinaryIO, server: socket.socket, output: OwnerStream) -> NoReturn:
    """Hand requests on as the owner's `Connection` would: the payload is in memory that only its reader sees."""
    wire: relay.GuestRelay | None = None
    while True:
        head, body = _frame(stream)
        if "wire" in head:
            assert wire is not None
            wire.take(head, body)
            continue
        memory = os.memfd_create("request", os.MFD_CLOEXEC)
        with open(memory, "wb", closefd=False) as file:
            file.write(body)
        descriptors = [memory]
        if head.get("socket"):
            ours, theirs = socket.socketpair()
            descriptors.append(theirs.detach())
            wire = relay.GuestRelay(ours, output.send)
        data = json.dumps(head).encode()
        socket.send_fds(server, [struct.pack("<I", len(data)) + data], descriptors)
        for fd in descriptors:
            os.close(fd)


def _unpack(at: str, owner: int, data: bytes) -> None:
    """Unpack a trusted folder (tar, gzip) as files of `owner`."""
    os.makedirs(at, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(data))) as archive:
        if hasattr(tarfile, "fully_trusted_filter"):
            archive.extraction_filter = tarfile.fully_trusted_filter
        members = archive.getmembers()
        for member in members:
            member.uid = member.gid = owner
        archive.extractall(at, members, numeric_owner=True)
    os.chown(at, owner, owner)


def _serve(connection: socket.socket, hello: dict[str, Any]) -> NoReturn:
    """Serve a box or test runs, in the fork; never returns."""
    try:
        os.setgroups([])
        if hello["kind"] == "runs":
            server: Any = importlib.import_module(hello["module"])
            served = server.RemoteRuns(connection, hello)
        else:
            served = {"live": Guest, "probe": BoxProbe}[hello["kind"]](connection, hello)
        box.send(connection, {"ready": True})
        served.serve()
    except BaseException as e:
        box.send(connection, {"error": f"{type(e).__name__}: {e}"})
    os._exit(0)


def signal_all(user: int, number: int) -> None:
    """Signal every process of the box's user, and no other process of this machine."""
    pid = os.fork()
    if pid == 0:
        try:
            os.seteuid(0)
            os.setresuid(user, user, user)
            os.kill(-1, number)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def folders(user: int) -> None:
    """Makes the folders that the box's user may write to; the rest belongs to root, and RUN cannot be listed."""
    for path, mode in ((root.RUNNER, 0o755), (root.SITE, 0o755), (root.RUN, 0o711)):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
    for path in (root.WORKSPACE, HOME):
        os.makedirs(path, exist_ok=True)
        os.chown(path, user, user)
    for path in ("/tmp", "/var/tmp", "/dev/shm"):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, 0o1777)
    with contextlib.suppress(OSError):  # an image that is read-only keeps its accounts
        with open("/etc/passwd") as file:
            known = any(line.split(":")[2:3] == [str(user)] for line in file)
        if not known:
            with open("/etc/passwd", "a") as file:
                file.write(f"user:x:{user}:{user}::{HOME}:/bin/bash\n")


def lay(changes: dict[str, bytes | None], user: int) -> None:
    """Write a change set over the workspace, with the modes and times of the replaced files."""
    for path, data in changes.items():
        target = f"{root.WORKSPACE}/{path}"
        old = None
        with contextlib.suppress(OSError):
            old = os.stat(target)
            os.unlink(target)
        if data is None:
            continue
        folder = root.WORKSPACE
        for part in path.split("/")[:-1]:
            folder += f"/{part}"
            if not os.path.isdir(folder):
                os.mkdir(folder)
                os.chown(folder, user, user)
        with open(target, "wb") as file:
            file.write(data)
        os.chown(target, user, user)
        if old is not None:
            os.chmod(target, old.st_mode & 0o777)
            os.utime(target, ns=(old.st_atime_ns, old.st_mtime_ns))


class Guest(shell.ShellServer):
    """A live box: its files are the machine's, its change set is the difference from its start."""

    def __init__(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        super().__init__(connection, (), user=hello["user"])

    def serve(self) -> None:
        """Make the box of the first request, then serve until the owner hangs up."""
        request, payload = self._request()
        self.limits, self.environment = request["limits"], request["environment"]
        _, changes = box.decode(payload)
        try:
            self._settle(changes)
        except files.FileRefused as e:
            box.send(self.connection, {"id": request["id"], "refused": e.kind, "message": str(e)})
            return
        box.send(self.connection, {"id": request["id"]})
        while True:
            self.serve_one()

    def settings(self) -> shell.Settings:
        """Limits and environment of the first request."""
        return self.limits, self.environment

    def _settle(self, changes: dict[str, bytes | None]) -> None:
        user = self.user
        assert user is not None
        self.spared = set(os.listdir("/proc"))
        self.environment["PATH"] = f"{os.path.dirname(sys.executable)}:{self.environment['PATH']}"
        folders(user)
        workspace = os.open(root.WORKSPACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.before = files.state(workspace, files.Allowance.endless())
        os.close(workspace)
        with files.refusing("a changed file", ""):
            lay(changes, user)
        for path in changes:  # files of the task were not there before
            self.before.setdefault(path, (0, 0, 0, 0))
        os.setegid(user)
        os.seteuid(user)
        os.chdir("/")
        self.tree = os.open(root.WORKSPACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _changed(self, roots: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        return files.differing(self.tree, self.before, self.limits["disk"], roots)

    def _signal(self, number: int) -> None:
        assert self.user is not None
        signal_all(self.user, number)


class BoxProbe:
    """Tries the protections of a box as its user."""

    def __init__(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        self.connection, self.user = connection, hello["user"]

    def serve(self) -> None:
        """Answer one request with the protections that hold."""
        request = json.loads(socket.recv_fds(self.connection, 65536, 1)[0][4:])
        tried = ("filter", "memory", "processes", "network")
        held = [name for name in tried if self._holds(name, request["limits"])]
        box.send(self.connection, {"id": request["id"], "held": held, "bash": os.path.exists("/bin/bash")})

    def _holds(self, name: str, limits: dict[str, Any]) -> bool:
        pid = os.fork()
        if pid == 0:
            try:
                folders(self.user)
                box.confine(limits, linux.filter_program(os.uname().machine), self.user)
                getattr(self, f"_{name}")(limits)
                os._exit(1)
            except (OSError, MemoryError):
                os._exit(0)
            finally:
                os._exit(2)
        status = os.waitpid(pid, 0)[1]
        signal_all(self.user, signal.SIGKILL)
        return status == 0

    def _filter(self, limits: dict[str, Any]) -> None:
        try:
            linux.setns(0, 0)
        except OSError as e:
            if e.errno == errno.EPERM:  # else the call has reached the kernel
                raise

    def _network(self, limits: dict[str, Any]) -> None:
        """Raises OSError unless the network answers, even with a refusal."""
        addresses = ["1.1.1.1", "8.8.8.8"]
        with contextlib.suppress(OSError), open("/proc/net/route") as file:
            gateways = [int(line.split()[2], 16) for line in file.readlines()[1:]]
            addresses += [socket.inet_ntoa(struct.pack("<I", gateway)) for gateway in gateways if gateway]
        for address in addresses:
            for port in (53, 443):
                with contextlib.suppress(OSError), socket.socket() as probe:
                    probe.settimeout(1.0)
                    if probe.connect_ex((address, port)) in (0, errno.ECONNREFUSED):
                        return
        raise OSError("nothing answers")

    def _memory(self, limits: dict[str, Any]) -> None:
        bytearray(limits["memory"] + 1)

    def _processes(self, limits: dict[str, Any]) -> None:
        for _ in range(limits["processes"] + 1):
            if os.fork() == 0:
                signal.pause()
