"""A link of bytes to a server, in the test's own event loop: `cut` breaks it in the middle of an answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


class CutLink:
    """Passes bytes on until it is cut; then nothing connects any more, as after a kill of the server."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._writers: list[asyncio.StreamWriter] = []
        self.server: asyncio.Server | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where clients connect to."""
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Breaks all connections at once, and takes no new ones."""
        assert self.server is not None
        self.server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        onward_reader, onward = await asyncio.open_connection(self._target.hostname, self._target.port)
        self._writers += [writer, onward]
        await asyncio.gather(self._pass(reader, onward), self._pass(onward_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def cut_link(target: str) -> AsyncIterator[CutLink]:
    """A link to the server at `target`."""
    link = CutLink(target)
    link.server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    try:
        yield link
    finally:
        link.cut()
        await asyncio.gather(*link.tasks, return_exceptions=True)
