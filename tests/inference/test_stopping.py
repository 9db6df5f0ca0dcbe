"""A server that is told to stop while it has more to do than it can finish."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from etude.config import ServerConfig
from etude.run.engines import engine_url, spawn_engine
from tests.inference.conftest import NANO

pytestmark = pytest.mark.slow

_CLIENTS = 40  # more answers than the server gives within the five seconds that it takes to stop


def test_a_server_that_stops_under_load_leaves_no_traceback(tmp_path: Path) -> None:
    """Answers come whole, are refused with 503, or end with their connection; streamed ones, too."""
    child = spawn_engine(ServerConfig(model=str(NANO), port=0, threads=1, cache_mb=64), tmp_path)
    statuses: list[int] = []
    try:
        url = engine_url(child, tmp_path)

        def ask(number: int) -> None:
            chat = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 900, "ignore_eos": True,
                    "stream": number % 2 == 0}  # fmt: skip
            request = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(chat).encode(), {"content-type": "application/json"}
            )
            while True:
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        answer.read()
                        statuses.append(answer.status)
                except urllib.error.HTTPError as e:
                    statuses.append(e.code)
                    return
                except (OSError, http.client.HTTPException):  # cut, or no server any more
                    return

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(_CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(3)
        child.popen.send_signal(signal.SIGINT)
        for client in clients:
            client.join(60)
    finally:
        child.stop(30)
    assert child.exit_code == 0, child.log.read_text()[-3000:]
    assert "Traceback" not in child.log.read_text()
    assert set(statuses) <= {200, 503}
