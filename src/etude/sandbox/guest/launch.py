"""The first program of a sandbox: makes the root of its image, and becomes the image's interpreter.

Started by `etude.sandbox.namespace.zygote` with this machine's Python; argv holds the descriptor of the control socket,
the pid of the owner and a JSON configuration. `zygote.py` then runs in the image, with the same arguments.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import NoReturn

from . import linux, root

# For any version of Python: the option -P, without which the current folder comes first, is as new as 3.11.
_ZYGOTE = f"""
import sys
sys.path[:] = filter(None, sys.path)
import json, socket
if sys.version_info < (3, 11):
    version = "%d.%d" % sys.version_info[:2]
    socket.socket(fileno=int(sys.argv[1])).send(json.dumps({{"old": version}}).encode())
    sys.exit(1)
sys.path.append("{root.RUNNER}")
from guest.sandbox.guest.zygote import main
main()
"""


def main() -> NoReturn:
    """Never returns: becomes another program."""
    control, owner, config = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    try:
        linux.offer_to_the_kernel(500)  # before the owner, and the trainer and engines beside it
        if os.geteuid() == 0:
            linux.unshare(linux.NEWNS)
        else:
            linux.become(None, root.BOX_ID, linux.NEWNS)
            linux.keep_privileges()
        linux.die_with_parent(owner)
        root.build(config["image"], config["runner"])
        for fd in (control, *config["groups"]):
            os.set_inheritable(fd, True)
        python = config["image"]["python"]
        os.execve(python, [python, "-S", "-s", "-B", "-c", _ZYGOTE, *sys.argv[1:]], config["environment"])
    except (OSError, KeyError) as e:
        socket.socket(fileno=control).send(json.dumps({"error": str(e)}).encode())
    os._exit(1)
