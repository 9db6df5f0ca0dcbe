"""Rules of secrets: Gitleaks' semantics, texts in other forms, names, and texts that were made to be slow."""

from __future__ import annotations

import base64
import random
import time

import pytest

from etude.code import credential_name, find_secrets, secret_in, secrets
from etude.code.go_regex import compile_go

TOKEN = b"ghp_" + b"aB3dE5gH7" * 4


@pytest.mark.parametrize(
    ("expression", "matching", "other"),
    [
        ("a(?i)b|c", [b"aB", b"C"], [b"Ab"]), ("(x(?i)y|z)w$", [b"xYw", b"Zw"], [b"Xyw", b"xyW", b"xyw\n"]),
        (r"^[[:alnum:]_]+\z", [b"aZ0_"], [b"a-", b"a\n"]), ("(?m)^a$", [b"b\na\nb"], [b"ba"]), ("[^]]", [b"a"], [b"]"]),
    ],
)  # fmt: skip
def test_expressions_in_go_syntax(expression: str, matching: list[bytes], other: list[bytes]) -> None:
    assert all(compile_go(expression).search(text) for text in matching)
    assert not any(compile_go(expression).search(text) for text in other)


def test_every_rule_is_read() -> None:
    rules = secrets._rules()
    assert len(rules) > 230
    assert len({rule.id for rule in rules}) == len(rules)
    assert all(rule.keywords for rule in rules), "an expression without keywords would see whole files"


def test_a_secret_in_other_forms() -> None:
    assert secret_in(b"x = 1\n") is None
    for data in (
        TOKEN, b'{"a": "' + TOKEN + b'"}', TOKEN.decode().encode("utf-16"), TOKEN.decode().encode("utf-16-be"),
        TOKEN.decode().encode("utf-32"), base64.b64encode(b"password: " + TOKEN), b"\x89PNG\r\n\0" + TOKEN + b"\0\xff",
        b"x" * 3_000_000 + b" " + TOKEN, base64.encodebytes(b"[default]\n" * 30 + TOKEN),
    ):  # fmt: skip
        assert secret_in(data) in ("github-pat", "token-form"), data[:80]
    assert secret_in(TOKEN + b"  # gitleaks:allow\n") is not None
    assert secret_in(TOKEN + b"  # gitleaks:allow\n", marked=True) is None
    assert secret_in(TOKEN + b"  # gitleaks:allow\n" + TOKEN, marked=True) is not None


def test_allowlists_and_entropy() -> None:
    for data in (b"AKIAIOSFODNN7" + b"EXAMPLE", b"ghp_" + b"x" * 36, b"postgres://user:password@localhost/db",
                 b"https://user:" + b"Secret123@example.com"):  # fmt: skip
        assert secret_in(data) is None, data
    assert secret_in(b"postgres://shop:" + b"Xk29fLq0@db.corp.net/shop") == "database-url"


def test_places() -> None:
    data = b"a = '" + TOKEN + b"'\nb = '" + TOKEN[::-1] + b"'\n"
    assert {(m.start, m.end) for m in find_secrets(data)} == {(5, 5 + len(TOKEN))}


@pytest.mark.parametrize("name", [
    ".env", "app/.ENV.local", "PROD.env", ".ssh/config", "x/.aws/credentials", "ID_RSA", "id_ed25519.bak", "a.P12",
    ".netrc~", "terraform.tfstate", "service-account.json", "client_secret_1.json", ".htpasswd", ".kube/config",
    ".docker/config.json", "conf/secrets.yml", "kubeconfig", ".vault-token", ".envrc", ".pgpass", "a.kdbx",
])  # fmt: skip
def test_names_of_credentials(name: str) -> None:
    assert credential_name(name) is not None


@pytest.mark.parametrize("name", [
    ".env.example", "sample.env", "id_rsa.pub", "env.py", "environment.yml", "secrets.py", "docs/secrets.md",
    ".docker/Dockerfile", ".github/workflows/secrets.yml", "credentials/__init__.py", "keys.json", "README.md",
])  # fmt: skip
def test_honest_names(name: str) -> None:
    assert credential_name(name) is None


HOSTILE = {
    "keywords": b" = ".join(word for rule in secrets._rules() for word in rule.keywords),
    "headers": b"-----BEGIN " + b"PRIVATE KEY-----\n", "pairs": b"api_key = token : secret ", "blanks": b" ",
    "base64": b"A" * 24 + b"\n", "assigned": b"\n password: " + b"a" * 90, "kind": b"kind: secret\ndata:\n",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_time_is_linear_in_hostile_texts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the text takes at most three times as long; and there is a limit, after which a text counts as unreadable.
    Some expressions that are compiled for Python would take hours without windows."""
    part = HOSTILE[kind]

    def seconds(size: int) -> float:
        data, began = (part * (size // len(part) + 1))[:size], time.thread_time()
        secret_in(data, "a.yaml")
        return time.thread_time() - began

    seconds(1 << 12)
    assert seconds(1 << 16) < 3 * seconds(1 << 15) + 0.2
    monkeypatch.setattr(secrets, "SECONDS", 0.0)
    if kind == "keywords":
        assert secret_in(part * 100) == secrets.UNREADABLE


def test_random_bytes_hold_no_secret() -> None:
    assert secret_in(random.Random(0).randbytes(1 << 20)) is None
