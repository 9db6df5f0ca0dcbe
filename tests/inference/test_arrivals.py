"""Requests arrive from many threads while the engine works: none is lost and the engine does not trip over them."""

import threading

from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from tests.helpers.tiny_models import random_model


def test_requests_may_arrive_at_any_moment():
    engine = Engine(random_model())
    engine.start()
    rows, lock = [], threading.Lock()

    def client(number: int) -> None:
        for i in range(40):
            row = engine.submit(Request(ids=[1 + number, 2, 3 + i % 5], max_tokens=2, seed=i))
            with lock:
                rows.append(row)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        assert all(len(row.future.result(60).ids) == 2 for row in rows)
        assert len(rows) == 240
        assert engine.failure is None
    finally:
        engine.close()
