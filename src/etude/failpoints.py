"""Named places where a test can kill this process with SIGKILL.

`ETUDE_FAILPOINT=trainer.published:2` kills the process when it comes to that failpoint for the second time. While the
variable is unset, a failpoint costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Kills the process here if the environment names this failpoint and how often it was passed, counted from 1."""
    wanted = os.environ.get("ETUDE_FAILPOINT")
    if wanted is None:
        return
    _passed[name] += 1
    if wanted == f"{name}:{_passed[name]}":
        os.kill(os.getpid(), signal.SIGKILL)
