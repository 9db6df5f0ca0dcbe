"""Services of an image, such as a database on the loopback: started in a box before its first command or test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

# Arguments: name of the service, the command that starts it, and the one that succeeds once the service is ready.
# A service that ends badly ends the wait two seconds later: it may have left a process in the background all the same.
SCRIPT = """
tries=60
setsid bash -c "$1" </dev/null >"/tmp/$0.log" 2>&1 &
until bash -c "$2" </dev/null >"/tmp/$0.ready" 2>&1; do
  if ! kill -0 $! 2>/dev/null && ! wait $! && ! ((tries--)); then exit 1; fi
  sleep 0.03
done
rm -f "/tmp/$0.ready"
"""


def command(service: dict[str, Any]) -> list[str]:
    """A program that starts a service and ends once the service is ready."""
    return ["bash", "-c", SCRIPT, service["name"], service["start"], service["ready"]]


def log(service: dict[str, Any]) -> list[str]:
    """A program that prints the end of the output of a service, and of the command that says whether it is ready."""
    line = 'tail -c 300 "/tmp/$0.log"; echo "; the last of ready: $(tail -c 200 "/tmp/$0.ready")"'
    return ["bash", "-c", f"exec >&2; {line}", service["name"]]


def start(services: Sequence[dict[str, Any]]) -> None:
    """Start services one after another, in this process's box. Raises TimeoutError for one that does not get ready,
    or ends before."""
    for service in services:
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                null = os.open(os.devnull, os.O_RDWR)
                for fd in (0, 1, 2):
                    os.dup2(null, fd)
                os.closerange(3, 65536)
                argv = command(service)
                os.execvp(argv[0], argv)
            finally:
                os._exit(127)
        until = time.monotonic() + service["seconds"]
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > until:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise TimeoutError(f"the service {service['name']} was not ready within {service['seconds']:.0f} s")
            time.sleep(0.002)
        if ended[1]:
            raise TimeoutError(f"the service {service['name']} ended before it was ready")
