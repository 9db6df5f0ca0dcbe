"""A command whose process is one of several ranks, and the command that starts its ranks on this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from etude.errors import RunFailed, UserError
from etude.processes import RankGroup, start_ranks

_LOOK_SECONDS = 0.05
_STOP_SECONDS = 10.0


def run_ranks(count: int, name: str, words: Sequence[str], advice: str) -> int | None:
    """Runs `etude WORDS` as `count` > 1 ranks on this machine. Rank 0 prints, and its exit code is returned. Raises
    UserError or RunFailed, which ends with `advice`, if another rank fails, or one is killed."""
    with tempfile.TemporaryDirectory(prefix="etude-ranks-") as logs:
        group = start_ranks(name, ["etude.cli.main", *words], Path(logs), count, shown=True)
        assert isinstance(group, RankGroup)
        first = group.children[0]
        try:
            while (code := group.exit_code) is None:
                time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            first.popen.send_signal(signal.SIGINT)  # it says so, and closes its view
            if first.ends(_STOP_SECONDS) and (code := first.exit_code or 0) > 0:
                return code
            raise
        finally:
            group.stop(_STOP_SECONDS)
        failure = group.failure()
        if failure is None or (code > 0 and group.log == first.log):  # rank 0 has said why
            return code
        if code == 2:
            raise UserError(failure)
        if group.log != first.log:
            sys.stderr.write(group.log.read_text(errors="replace"))  # a traceback, of which the sentence has one line
        raise RunFailed(f"{failure}; {advice}")


@contextmanager
def silent() -> Iterator[None]:
    """A context in which nothing is printed, for ranks but the first. Errors that leave it are printed by `main`."""
    sys.stdout.flush()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
