import asyncio
import contextlib

import pytest

from etude.protocol.client import EngineClient, EngineError

ANSWER = b'{"status": "ok"}'


async def health(closed: int) -> tuple[list[str], int]:
    """What `EngineClient.health` says, twice, of a server that closes `closed` connections on which it is asked for
    the second time (the first request of each is answered), and how many connections it saw."""
    connections, serving = 0, []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        serving.append(asyncio.current_task())
        answered, drops = 0, connections <= closed
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has closed
            while await reader.readuntil(b"\r\n\r\n") and not (drops and (answered or connections > 1)):
                answered += 1
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with server, EngineClient([url]) as client:
            statuses = [str((await client.health(url))["status"]) for _ in range(2)]
    finally:
        await asyncio.gather(*serving)
    return statuses, connections


def test_a_connection_that_the_server_has_closed_is_no_dead_server():
    assert asyncio.run(health(closed=1)) == (["ok", "ok"], 2)


def test_a_server_that_closes_new_connections_too_is_dead():
    with pytest.raises(EngineError, match="does not answer: RemoteProtocolError"):
        asyncio.run(health(closed=2))
