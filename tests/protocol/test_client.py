import asyncio
import contextlib

import pytest

from etude.protocol.backends import EngineClient, EngineError
from etude.protocol.wire import GenerateRequest

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


async def spread(episodes: int) -> list[int]:
    """How many connections each of two servers sees of episodes that begin in the same moment."""
    seen = [0, 0]
    silent = asyncio.Event()

    async def serve(number: int, writer: asyncio.StreamWriter) -> None:
        seen[number] += 1
        await silent.wait()
        writer.close()

    servers = [
        await asyncio.start_server(lambda _, writer, number=number: serve(number, writer), "127.0.0.1", 0)
        for number in range(2)
    ]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    async with EngineClient(urls) as client:
        request = GenerateRequest(ids=[1], max_tokens=1, seed=1)
        begun = [asyncio.create_task(client.generate(request, 20.0)) for _ in range(episodes)]
        async with asyncio.timeout(10.0):
            while sum(seen) < episodes:
                await asyncio.sleep(0.01)
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        silent.set()
    for server in servers:
        server.close()
    return seen


def test_episodes_that_begin_together_are_spread_over_the_servers():
    """Each is counted when its server is chosen: its request is sent only after the others have chosen theirs."""
    assert asyncio.run(spread(10)) == [5, 5]
