"""Programs on this machine that stand for a program elsewhere, as `podman run` does."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from typing import IO

from etude.errors import last_line
from etude.sandbox.backends.host import ProgramStream

CHUNK = 1 << 18
QUESTION_SECONDS = 30.0
END_SECONDS = 10.0  # for a machine that has lost its stream; it takes a fraction of a second


class ProcessStream(ProgramStream):
    """The standard streams of a program on this machine that stands for a program elsewhere."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes], end: Sequence[str]) -> None:
        self._process = process
        self._errors = errors
        self._end = end

    async def read(self) -> bytes:
        """As `ProgramStream.read`; the error is the last line that the program printed."""
        assert self._process.stdout is not None
        data = await self._process.stdout.read(CHUNK)
        if not data and not self._errors.closed and await self._process.wait():
            self._errors.seek(0)
            raise OSError(last(self._errors.read().decode("utf-8", "replace")))
        return data

    async def write(self, data: bytes) -> None:
        """As `ProgramStream.write`."""
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await output(self._end)
        await self._process.wait()
        self._errors.close()


async def attached(command: Sequence[str], end: Sequence[str]) -> ProcessStream:
    """Start `command`; `end` removes the program elsewhere if it is stuck. Raises FileNotFoundError."""
    pipe = asyncio.subprocess.PIPE
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # the stream closes it
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=errors)
    return ProcessStream(process, errors, end)


async def output(command: Sequence[str], seconds: float = QUESTION_SECONDS) -> tuple[int, str]:
    """(exit code, output) of a command; its errors are in the output if it failed, and may be warnings else. A code of
    124 if it took too long. Raises FileNotFoundError."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(seconds):
            printed, errors = await process.communicate()
    except TimeoutError:
        return 124, f"no answer within {seconds:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    printed += errors if process.returncode else b""
    return process.returncode or 0, printed.decode("utf-8", "replace").strip()


def last(text: str) -> str:
    """The last line of a program's output."""
    return last_line(text, "no reason given")[:200]
