"""The way out of a live box: a port of its own loopback that leads to one unix socket of the host, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from typing import NoReturn

from . import linux


class Door:
    """`path` is the socket as pid 1 sees it. The port is bound here, so nothing in the box can take it."""

    def __init__(self, path: str, port: int, program: bytes) -> None:
        self.path = path
        self.program = program
        self.listener = socket.create_server(("127.0.0.1", port))
        self.pidfd = -1

    def open(self) -> None:
        """Start the process that carries bytes, unless it runs: programs of the box may have killed it."""
        if self.pidfd >= 0:
            if not select.select([self.pidfd], [], [], 0)[0]:
                return
            os.close(self.pidfd)
        pid = os.fork()
        if pid == 0:
            self._carry()
        self.pidfd = os.pidfd_open(pid)

    def _carry(self) -> NoReturn:
        """In the fork: without the owner's connection, and without any right."""
        try:
            keep = self.listener.fileno()
            os.closerange(3, keep)
            os.closerange(keep + 1, 65536)
            linux.drop_privileges()
            linux.install_filter(self.program)
            asyncio.run(self._serve())
        finally:
            os._exit(1)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connect, sock=self.listener)
        await server.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, here = await asyncio.open_unix_connection(self.path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, here), _pump(there, writer))
        here.close()
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
