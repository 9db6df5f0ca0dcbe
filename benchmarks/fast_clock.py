"""A clock that passes faster, for this process and all that it starts: `time.time` and `time.time_ns`. The monotonic
clock stays: deadlines of machines are those of this one.

    set_clock(folder, 32.0)                          # here, and in children, by a `sitecustomize` on their PYTHONPATH
    python -m benchmarks.fast_clock MODULE ARG...    # a command of the live loop, whose pauses are of that clock
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

import etude

VARIABLE = "ETUDE_DAYS_CLOCK"
"""The environment variable with the time and the monotonic time (ns) at which the clock began, and its speed."""
_SITE = f"""import os, time
if "{VARIABLE}" in os.environ:
    _start, _began, _speed = os.environ["{VARIABLE}"].split()
    time.time_ns = lambda: int(_start) + int((time.monotonic_ns() - int(_began)) * float(_speed))
    time.time = lambda: time.time_ns() / 1e9
"""


def set_clock(folder: Path, speed: float) -> None:
    """Lets `speed` seconds pass in one from now on. `folder` gets the module that children load at their start."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE, "utf-8")
    roots = [folder.absolute(), Path(etude.__file__).parents[1], Path(__file__).absolute().parents[1]]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, roots))
    os.environ[VARIABLE] = f"{time.time_ns()} {time.monotonic_ns()} {speed!r}"
    exec(_SITE, {})


def speed() -> float:
    """The seconds that pass in one."""
    return float(os.environ[VARIABLE].split()[2])


def _run(module: str) -> None:
    """Runs a module as a command. The loop's pauses pass on the clock; what servers need to follow a store does not."""
    from etude.live import legs
    from etude.live.release import operations

    operations.TICK_SECONDS /= speed()
    operations.DEADLINE *= speed()
    legs.AGAIN_SECONDS /= speed()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    _run(sys.argv[0])
