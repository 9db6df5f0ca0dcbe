"""A hundred secrets of forty kinds in all places that a client can write to: what of them lies on a disk afterwards.

Half of the kinds were kept back while the scrubbing was written (`planted_secrets.KINDS[1::2]`). Before it read
escapes, URLs and base64, 106 of 440 of the open half and 118 of 440 of the other stayed in requests alone; now 0 and 0.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.live.log import schema
from etude.live.log.records import ulid
from etude.live.log.scrub import known_client, scrub_documents
from tests.helpers.http_apps import answering
from tests.helpers.live import EchoServer, client, live_config, new_key, readable_bytes, running_gateway
from tests.helpers.planted_secrets import BODIES, HEADERS, KINDS, PLACES, forms_of, secret_of
from tests.live.test_gateway import rows, until

COMMONEST = 20


def test_every_kind_is_found_in_every_place_of_a_request() -> None:
    stays: list[tuple[str, str]] = []
    for kind, (name, _, _) in enumerate(KINDS):
        secret, line = secret_of(kind)
        for place, body in BODIES.items():
            (kept,), counts = scrub_documents([json.dumps(body(secret, line)).encode()], ("home",))
            stays += [(name, place)] if any(form in kept for form in forms_of(secret, line)) or not counts else []
    assert stays == []


def test_planted_secrets_reach_no_disk(tmp_path: Path) -> None:
    """Each secret has a place, and each place has some five secrets; headers and ids hold the secret alone."""
    planted = [(n % len(KINDS), n // len(KINDS), PLACES[(n + n // len(PLACES)) % len(PLACES)]) for n in range(100)]
    with answering(EchoServer().app()) as url:
        config = live_config(tmp_path, url)
        key = new_key(config, consent=True)
        with running_gateway(config) as (gateway, at):
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda each: _send(at, key, *each), planted))
            until(lambda: not gateway.recorder.open)
        kept = readable_bytes(config)
        assert len(rows(config, schema.turns)) == len(planted)
    stays = [each for each in planted if any(form in kept for form in forms_of(*secret_of(*each[:2])))]
    assert [each for each in stays if each[0] < COMMONEST] == []
    assert len(stays) <= 5, stays


def _send(at: str, key: str, kind: int, seed: int, place: str) -> None:
    secret, line = secret_of(kind, seed)
    body = BODIES[place](secret, line) if place in BODIES else BODIES["prompt"]("", "nothing")
    header = {place: " ".join(secret.split())} if place in HEADERS else {}
    with client(at, key, **header) as http:
        turn = http.post("/v1/chat/completions", json=body | {"model": "m"}).headers["x-etude-generation"]
        assert turn
        if place in ("event_id", "comment"):
            text = {"event_id": secret[:128]} if place == "event_id" else {"comment": f"I wanted {line}"}
            sent = {"response_id": turn, "name": "correction", "comment": "use it", **text}
            assert http.post("/v1/feedback", json=sent).status_code == 200
        if place in ("path", "base", "new"):
            digest = "".join(c for c in secret if c.isalnum() or c in ":_-")[:128]
            edit = {"id": ulid(), "path": "a.py", "base": "b", "old_lines": [0, 1], "new": "n", "characters": 3}
            edit |= {"path": secret} if place == "path" else {place: digest}
            assert http.post("/v1/suggestions", json={"turn": turn, "suggestions": [edit]}).status_code == 200


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("claude-cli/2.0.14", "claude-cli/2.0.14"),
        ("OpenAI/Python", "OpenAI digest"),
        ("codex_cli_rs/0.46.0", "codex_cli_rs/0.46.0"),
        ("python-httpx/0.28.1", "python-httpx/0.28.1"),
        ("my-ci-bot ghp_012345678901234567890123456789012345", "my-ci-bot ghp digest"),
        ("sk-ant-api03-abcdefghijkl", "sk-ant digest"),
        ("8f14e45fceea467f", "digest"),
        ("", ""),
    ],
)
def test_of_a_clients_name_stays_what_is_surely_a_name(header: str, kept: str) -> None:
    assert known_client(header, "digest") == kept
