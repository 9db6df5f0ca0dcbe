"""The live loop before a real vLLM server: exact tokens, releases and rollbacks. Needs `make vllm`; takes a minute."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import sqlalchemy as sa
import torch

from etude.inference.vllm.feed import feed
from etude.live.learn.window import LiveContents
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, open_blobs, open_log
from etude.live.log.records import ServedTurn, TurnContent
from etude.models.loading import load_model, named_tensors
from etude.store import open_store
from etude.weights.manifest import manifests
from etude.weights.publisher import Publisher
from tests.helpers.live import client, live_config, new_key, running_gateway
from tests.helpers.small_tensors import nudged
from tests.helpers.vllm_server import MODEL, on_vllm, serving

OPTIONS = [
    *["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--logprobs-mode", "processed_logprobs"],
    *["--worker-extension-cls", "etude.inference.vllm.worker.WorkerExtension"],
    *["--middleware", "etude.inference.vllm.kept_turns.TurnKeeper", "--generation-config", "vllm"],
]
MESSAGES = [{"role": "user", "content": "Fix `add` in a.py\ndef add(a, b):\n    return a - b\n"}]
REQUESTS = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 40}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 40, "stream": True}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 40}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 40, "stream": True}),
    ("/v1/responses", {"input": MESSAGES, "max_output_tokens": 40}),
    ("/v1/responses", {"input": MESSAGES, "max_output_tokens": 40, "stream": True}),
]


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, content: TurnContent) -> np.ndarray:
    """The log-probabilities of a turn's tokens by etude's model."""
    prompt, ids = (np.frombuffer(part, "<i4") for part in (content.prompt_ids, content.ids))
    whole_T = torch.tensor(np.concatenate([prompt, ids]).astype("int64"))
    scores_TV = torch.log_softmax(model(whole_T[None]).logits[0].float(), -1)
    return scores_TV[len(prompt) - 1 : -1].gather(1, whole_T[len(prompt) :, None])[:, 0].numpy()


def until(holds: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@on_vllm
def test_turns_that_vllm_served_are_recorded_and_its_releases_followed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    publisher = Publisher(store)
    model = load_model(MODEL)
    publisher.publish(0, named_tensors(model), (), {})
    with serving(MODEL, tmp_path / "vllm.log", *OPTIONS, VLLM_SERVER_DEV_MODE="1") as url:
        threading.Thread(target=feed, args=(url, store), kwargs={"every": 0.2}, daemon=True).start()
        health = lambda: httpx2.get(f"{url}/health", timeout=10).json()  # noqa: E731
        until(lambda: health()["version"] == 0)
        config = live_config(tmp_path, url)
        with running_gateway(config) as (gateway, at), client(at, new_key(config, consent=True)) as http:
            until(lambda: http.get("/v1/models").status_code == 200)
            for path, body in REQUESTS:
                answer = http.post(path, json=body | {"model": "m"})
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-etude-recorded"] == "true"
            publisher.publish(1, nudged(named_tensors(model), 1), (), {})
            until(lambda: health()["version"] == 1)
            until(lambda: gateway.clusters.all[0].version == 1)
            http.post(REQUESTS[0][0], json=REQUESTS[0][1] | {"model": "m"})
            until(lambda: not gateway.recorder.open)
        engine = open_log(Path(config.folder), None)
        contents = LiveContents(engine, Accounts(Path(config.folder)), open_blobs(Path(config.folder)))
        with engine.connect() as connection:
            query = sa.select(schema.turns, schema.sessions.c.account).join(
                schema.sessions, schema.sessions.c.id == schema.turns.c.session
            )
            rows = [dict(row) for row in connection.execute(query.order_by(schema.turns.c.at)).mappings()]
        accounts = [row.pop("account") for row in rows]
        keys = contents.keys(accounts)
        digests = [manifest.live for manifest in manifests(store)]
        assert [row["reason"] for row in rows] == [""] * 7
        assert [row["manifest"] for row in rows] == [digests[0]] * 6 + [digests[1]]
        for account, row in list(zip(accounts, rows, strict=True))[:6]:
            turn: Any = journal.record(ServedTurn, row)  # pyright: ignore[reportArgumentType]
            key = keys[account]
            assert key is not None
            content = contents.turn(key, turn)
            assert isinstance(content, TurnContent), content
            assert b"edit" in content.response
            # float32 against float32, other orders of sums
            assert np.allclose(np.frombuffer(content.logprobs, "<f4"), logprobs_of(model, content), atol=2e-4)
        assert (health()["version"], health()["digest"]) == (1, digests[1])
        engine.dispose()
