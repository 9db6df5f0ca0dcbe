"""A child process in an environment of its own, which is sent one line of JSON and answers with one, in turns.

Several may live at once and be asked in turn, so that what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[1]


class SideProcess:
    """Runs `module` with a Python of another environment. `name` is for messages. Raises RuntimeError, with the end of
    its log, where it dies or hangs."""

    def __init__(self, name: str, python: str, module: str, environment: Mapping[str, str]) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [python, "-m", module],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer to one message."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self._log.seek(0)
            end = self._log.read()[-4000:]
            raise RuntimeError(f"{self._name} ended or took more than {seconds:.0f} s; its log ends: {end}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # the child ends
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()
        self._log.close()
