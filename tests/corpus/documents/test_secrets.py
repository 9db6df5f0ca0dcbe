"""Secrets of many kinds, planted in texts, paths, conversations and licences: none is in any part."""

from __future__ import annotations

import base64
import json
import random
import string

import pytest

from etude.corpus.documents.seal import MOST, sealed
from etude.corpus.documents.structs import CorpusDocument
from tests.corpus.documents.sources import build, folder, module, repository, rows

LETTERS = string.ascii_letters + string.digits


def drawn(rng: random.Random, count: int, letters: str = LETTERS) -> str:
    return "".join(rng.choices(letters, k=count))


def secrets(rng: random.Random) -> dict[str, tuple[str, str]]:
    """Kind -> (a line that holds the secret, what must not be in any part)."""
    hexes, upper = "0123456789abcdef", string.ascii_uppercase + "234567"
    tokens = {
        "github": "ghp_" + drawn(rng, 36),
        "gitlab": "glpat-" + drawn(rng, 20),
        "aws": "AKIA" + drawn(rng, 16, upper),
        "slack": f"xoxb-{rng.randrange(10**11, 10**12)}-{rng.randrange(10**12, 10**13)}-{drawn(rng, 24)}",
        "stripe": "sk_live_" + drawn(rng, 28),
        "sendgrid": f"SG.{drawn(rng, 22)}.{drawn(rng, 43)}",
        "npm": "npm_" + drawn(rng, 36),
        "pypi": "pypi-AgEIcHlwaS5vcmc" + drawn(rng, 90),
        "google": "AIza" + drawn(rng, 35),
        "jwt": f"eyJhbGciOiJIUzI1NiJ9.eyJ{drawn(rng, 40)}.{drawn(rng, 43)}",
        "generic": drawn(rng, 40, hexes),
        "anthropic": "sk-ant-api03-" + drawn(rng, 93) + "AA",
    }
    lines = {kind: (f'{kind}_api_key = "{token}"', token) for kind, token in tokens.items()}
    password = drawn(rng, 12)
    lines["url"] = (f'url = "postgres://shop:{password}@db.corp.net/shop"', password)
    key = "\n".join(drawn(rng, 64) for _ in range(12))
    lines["key"] = (f'"""\n-----BEGIN RSA PRIVATE KEY-----\n{key}\n-----END RSA PRIVATE KEY-----\n"""', key[200:260])
    hidden = base64.b64encode(f"[default] token = {tokens['github']} and some more words".encode()).decode()
    lines["base64"] = (f'blob = "{hidden}"', hidden[20:60])
    return lines


def planted(line: str, seed: int) -> str:
    parts = module(seed, 6).split("\n\n\n")
    return "\n\n\n".join([*parts[:3], line, *parts[3:]])


def test_none_of_100_planted_secrets_is_in_any_part(tmp_path):
    rng = random.Random(5)
    files: dict[str, str] = {}
    gone: list[str] = []
    chats: list[str] = []
    while len(gone) < 100:
        for kind, (line, secret) in secrets(rng).items():
            seed = len(gone)
            match seed % 4:
                case 0 | 1:
                    files[f"src/{kind}_{seed}.py"] = planted(line, seed)
                case 2:
                    files[f"web/{kind}_{seed}.js"] = (
                        "\n".join(f"function f{n}(a) {{ return a * {n * seed} }}" for n in range(9))
                        + "\n"
                        + (f"/*\n{line}\n*/\n" if "\n" in line else f"const {line};\n")
                    )
                case _:
                    arguments = json.dumps({"path": f"{seed}.py", "text": line})
                    call = {"id": "1", "type": "function", "function": {"name": "edit", "arguments": arguments}}
                    chats.append(
                        json.dumps(
                            {
                                "messages": [
                                    {"role": "user", "content": f"{seed}: {line}"},
                                    {"role": "assistant", "content": "", "tool_calls": [call]},
                                ]
                            }
                        )
                    )
            gone.append(secret)
    token = "ghp_" + drawn(rng, 36)
    files[f"src/{token}.py"] = module(900)
    gone.append(token)
    shop = repository(tmp_path / "shop", ("2026-01-01", files))
    replay = folder(tmp_path / "replay", {"chats.jsonl": "\n".join(chats) + "\n"})
    made = build(tmp_path / "corpus", own=[shop], replay=[replay], window_characters=4000, windows=0.5)
    parts = b"".join(path.read_bytes() for path in tmp_path.glob("corpus/**/*") if path.is_file())
    assert [secret for secret in gone if secret.encode() in parts or json.dumps(secret)[1:-1].encode() in parts] == []
    assert len(rows(tmp_path / "corpus")) > 60
    assert sum(source["secrets_replaced"] for source in made["sources"]) > 60
    assert b"<github-pat>" in parts
    assert all("replaced" not in source["dropped"] for source in made["sources"])
    assert made["sources"][0]["dropped"]["secrets"] >= 5, "those within base64, and the one in a path"


@pytest.mark.parametrize("count", [1, MOST, MOST + 1])
def test_a_document_with_many_secrets_is_dropped(count):
    rng = random.Random(count)
    tokens = ["ghp_" + drawn(rng, 36) for _ in range(count)]
    text = "".join(f"t{n} = '{token}'  # é\n" for n, token in enumerate(tokens))
    made, replaced = sealed(CorpusDocument(source=0, path="a.py", text=text))
    if count > MOST:
        assert made is None
    else:
        assert made is not None
        assert made.text == "".join(f"t{n} = '<github-pat>'  # é\n" for n in range(count))
        assert replaced == count


def test_files_of_credentials_are_left_out_by_name(tmp_path):
    files = {"a.py": module(1), "config/credentials.json": '{"a": 1}\n' * 20, "service-account.json": '{"a": 1}\n' * 20}
    build(tmp_path / "corpus", own=[folder(tmp_path / "own", files)])
    assert {row["origin"]["path"] for row in rows(tmp_path / "corpus")} == {"a.py"}
