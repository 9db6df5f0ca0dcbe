"""The way out of a live box: a port of its own loopback that leads to one unix socket of the host, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from . import linux


def start(path: str, port: int, program: bytes) -> None:
    """Fork a process without the owner's rights that carries bytes from `port` to the socket at pid 1's `path`."""
    listener = socket.create_server(("127.0.0.1", port))
    if os.fork():
        listener.close()
        return
    try:
        keep = listener.fileno()
        os.closerange(3, keep)
        os.closerange(keep + 1, 65536)
        linux.drop_privileges()
        linux.install_filter(program)
        asyncio.run(_serve(listener, path))
    finally:
        os._exit(1)


async def _serve(listener: socket.socket, path: str) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, here = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, here), _pump(there, writer))
        here.close()
        writer.close()

    server = await asyncio.start_server(connect, sock=listener)
    await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
