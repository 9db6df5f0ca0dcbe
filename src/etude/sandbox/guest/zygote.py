"""The process that all boxes descend from: single-threaded, standard library only (and pytest for test runs).

Runs in the root of the image, in which `launch.py` has started it; argv holds the descriptor of the control socket, the
pid of the owner, and a JSON configuration, which names the module that serves test runs.
Every message on the control socket requests one handler and carries the handler's own connection. When the owner ends,
or hangs up, the zygote ends, and with it (parent-death signals, pid namespaces) everything below.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import site
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
    config = json.loads(sys.argv[3])
    control = socket.socket(fileno=int(sys.argv[1]))
    real_root = os.geteuid() == 0
    try:
        linux.die_with_parent(int(sys.argv[2]))
        joins = _joins(config["groups"], root.BASE_ID if real_root else None)
    except OSError as e:
        control.send(json.dumps({"error": str(e)}).encode())
        os._exit(1)
    os.set_inheritable(control.fileno(), False)
    root.layered, root.user = tuple(config["image"]["writable"]), config["image"]["user"]
    _find_environment()
    packages = [folder for folder in site.getsitepackages() if os.path.isdir(folder)]
    sys.path[:] = [path for path in sys.path if path and path != root.RUNNER] + [root.RUNNER, *packages]
    templates = _templates(control, config["runs"])
    from . import live_box

    live_box.rehearse()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handlers are reaped by the kernel
    control.send(json.dumps({"python": ".".join(map(str, sys.version_info[:3])), "joins": joins}).encode())
    serve(control, templates, real_root, config["runs"])
    os._exit(0)


def _find_environment() -> None:
    """Read the virtual environment of the image's python3, which -S leaves out; no .pth file of it is run."""
    path = list(sys.path)
    site.addsitepackages = lambda known_paths, prefixes=None: known_paths
    site.venv(set())
    sys.path[:] = path


def _joins(groups: list[int], host_id: int | None) -> bool:
    """Whether a box can move into control groups: tried by a process with a box's rights."""
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


def _templates(control: socket.socket, runs: str) -> socket.socket:
    """Fork the process that templates of test runs are forked from: it has imported the modules of tests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    zygote = os.getpid()
    if os.fork():
        theirs.close()
        return ours
    try:
        linux.die_with_parent(zygote)
        control.close()
        ours.close()
        for name in (runs, *_PRELOADED):
            importlib.import_module(name)
        assert "torch" not in sys.modules
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        serve(theirs, None, False, runs)
    finally:
        os._exit(0)


def serve(control: socket.socket, templates: socket.socket | None, real_root: bool, runs: str) -> None:
    """Fork a handler for each message, or pass it on if it is for a template, until the owner hangs up."""
    from . import image_template  # noqa: F401, so that a fork has it

    count = 0
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 65536, 8)
        if not data:
            return
        hello = json.loads(data)
        if templates is not None:
            count += 1
            hello["host_id"] = root.BASE_ID + count % 100_000 if real_root else None
        if templates is not None and not hello["live"]:
            message = json.dumps(hello).encode()
            try:
                socket.send_fds(templates, [message], descriptors)
            except OSError:  # it has died, perhaps for want of memory
                templates = _templates(control, runs)
                socket.send_fds(templates, [message], descriptors)
        else:
            parent = os.getpid()
            if os.fork() == 0:
                control.close()
                if templates is not None:
                    templates.close()
                _handle(socket.socket(fileno=descriptors[0]), hello, descriptors[1:], parent, runs)
        for fd in descriptors:
            os.close(fd)


def _handle(connection: socket.socket, hello: dict[str, Any], payloads: list[int], parent: int, runs: str) -> None:
    """Handle a message, in the fork; never returns. The handler waits for pid 1 of a new namespace, which serves."""
    from . import box, image_template

    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # the output of tests is not read
            os.dup2(null, fd)
        os.close(null)
        folders = hello["repository"], hello["site"], hello["host_id"], hello["mounts"], hello.get("places", ())
        root.enter(*folders, contained=hello.get("contained", False))
        linux.die_with_parent(parent)
        pid = os.fork()
        if pid:
            connection.close()
            os.waitpid(pid, 0)
            os._exit(0)
        linux.die_with_parent(0)
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        if hello["live"]:
            image_template.start(connection, hello, payloads[0])
        else:
            os.umask(0o022)
            _, changes = box.decode(box.read_all(payloads[0]))
            os.close(payloads[0])
            lowers = box.cover(changes)
            server: Any = importlib.import_module(runs)
            template = server.RunTemplate(connection, hello["hot"], hello["hidden"], hello["controls"], lowers)
            box.send(connection, {"ready": True})
            template.serve()
    except BaseException as e:
        box.send(connection, {"error": f"{type(e).__name__}: {e}"})
    os._exit(0)
