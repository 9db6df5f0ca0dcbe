"""Who may ask: tokens, hosts, origins, and what a server beyond loopback needs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from etude import processes
from etude.config import ServerConfig
from etude.errors import UserError
from etude.protocol.access import TOKEN_VARIABLE, Access, Refusal, access_of, add_access_flags
from etude.protocol.serving import open_listener
from etude.run.engines import engine_token, engine_url, spawn_engine
from tests.helpers.http_apps import guarded
from tests.protocol.test_guard import app, ask

NANO = Path(__file__).parents[2] / "models" / "nano"


def scope(*headers: tuple[str, str], method: str = "GET", server: object = ("10.1.2.3", 80)):
    shown = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return {"type": "http", "method": method, "server": server, "headers": shown}


def verdict(access: Access, *headers: tuple[str, str], **options: object) -> int:
    try:
        access.check(scope(*headers, **options))
    except Refusal as e:
        return e.status
    return 200


@pytest.mark.parametrize(("host", "status"), [
    ("localhost", 200), ("LOCALHOST:8000", 200), ("localhost.", 200), ("a.localhost:1", 200), ("127.0.0.1:65535", 200),
    ("127.9.9.9", 200), ("[::1]:8000", 200), ("[::ffff:127.0.0.1]", 200), ("10.1.2.3:80", 200), ("serve.corp", 200),
    ("Serve.Corp:8000", 200),
    ("", 403), ("evil.example", 403), ("10.1.2.4", 403), ("localhost.evil.example", 403), ("evil:localhost", 403),
    ("127.0.0.1.evil.example", 403), ("localhost@evil.example", 403), ("evil.example/localhost", 403), ("0.0.0.0", 403),
    ("localhost:99999999", 403), ("[::1", 403), ("localhost,evil.example", 403), ("127.0.0.1 ", 200), ("127.1", 403),
    ("2130706433", 403), ("xlocalhost", 403), ("\u00e9", 403),
])  # fmt: skip
def test_hosts(host: str, status: int) -> None:
    assert verdict(Access(hosts=frozenset({"serve.corp"})), ("host", host)) == status


def test_a_request_without_host_and_one_on_a_unix_socket() -> None:
    assert verdict(Access()) == 403
    for server in (None, ("/tmp/socket", None)):
        assert verdict(Access(), ("host", "localhost"), server=server) == 200
        assert verdict(Access(), ("host", "evil.example"), server=server) == 403


@pytest.mark.parametrize(("origin", "status"), [
    ("http://localhost:8000", 200), ("https://127.0.0.1:8000", 200), ("http://[::1]:8000", 200),
    ("http://10.1.2.3:8000", 200), ("http://localhost:9000", 200), ("https://page.corp", 200),
    ("http://page.corp:8000", 200), ("http://dev.corp:5173", 200), ("http://localhost:3000", 200),
    ("http://localhost:3001", 403), ("http://localhost", 403), ("https://127.0.0.1", 403), ("http://10.1.2.3", 403),
    ("http://[::1]:5173", 403), ("http://page.corp:5173", 403), ("http://dev.corp:5174", 403),
    ("http://localhost:80000", 403), ("null", 403), ("", 403), ("http://evil.example", 403),
    ("https://localhost.evil.example", 403), ("file://localhost", 403), ("http://localhost:80@evil.example", 403),
    ("chrome-extension://localhost", 403),
    ("http://localhost/", 403), ("http://localhost http://evil.example", 403),
])  # fmt: skip
def test_origins(origin: str, status: int) -> None:
    """The port counts: the server's own is 8000, and the client knows it by 9000, as through a tunnel."""
    access = parsed("--allow-host", "page.corp", "dev.corp:5173", "localhost:3000")
    asked = {"server": ("10.1.2.3", 8000)}
    assert verdict(access, ("host", "localhost:9000"), ("origin", origin), **asked) == status
    own = ("origin", "http://localhost:8000")
    assert verdict(access, ("host", "localhost:9000"), own, ("origin", origin), **asked) == status


def test_parts_of_other_pages_that_send_no_origin() -> None:
    host, cross = ("host", "localhost"), ("sec-fetch-site", "cross-site")
    assert verdict(Access(), host, cross, ("sec-fetch-mode", "no-cors")) == 403
    assert verdict(Access(), host, cross, ("sec-fetch-mode", "navigate")) == 200, "a link that somebody follows"
    assert verdict(Access(), host, cross, ("sec-fetch-mode", "navigate"), method="POST") == 403
    assert verdict(Access(), host, ("sec-fetch-site", "same-origin")) == 200


def test_tokens() -> None:
    access, host = Access("s3cret"), ("host", "localhost")
    good = [("authorization", "Bearer s3cret"), ("Authorization".lower(), "bearer  s3cret "), ("x-api-key", "s3cret")]
    for header in good:
        assert verdict(access, host, header) == 200
    wrong = [("authorization", "s3cret"), ("authorization", "Basic s3cret"), ("authorization", "Bearer s3cre"),
             ("authorization", "Bearer s3crett"), ("x-api-key", ""), ("x-api-key", "\u00e9"),
             ("cookie", "s3cret")]  # fmt: skip
    for header in wrong:
        assert verdict(access, host, header) == 401
    assert verdict(access, ("host", "evil.example"), good[0]) == 403
    assert "s3cret" not in repr(access)


def parsed(*flags: str) -> Access:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default=argparse.SUPPRESS)
    add_access_flags(parser)
    return access_of(parser.parse_args(flags))


def test_where_a_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert parsed() == Access()
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    file.chmod(0o600)
    assert parsed("--api-key-file", str(file)).token == "of-the-file"
    monkeypatch.setenv(TOKEN_VARIABLE, "of-the-environment")
    assert parsed("--allow-host", "Serve.Corp", "[::2]", "page.corp:5173", "[::3]:80") == Access(
        "of-the-environment",
        frozenset({"serve.corp", "::2", "page.corp", "::3"}),
        frozenset({(name, port) for name in ("serve.corp", "::2") for port in (80, 443)})
        | {("page.corp", 5173), ("::3", 80)},
    )
    assert parsed("--api-key-file", str(file)).token == "of-the-file"
    with pytest.raises(SystemExit):  # the list of processes would show it
        parsed("--api-key", "given")
    assert parsed("--host", "serve.corp").hosts == {"serve.corp"}
    assert parsed("--host", "0.0.0.0").hosts == parsed("--host", "::").hosts == frozenset()
    assert engine_token() == "of-the-environment", "a run's engines show it to the relay, too"
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    assert len(engine_token()) >= 43
    assert engine_token() != engine_token()


@pytest.mark.parametrize(("flags", "sentence"), [
    (["--api-key-file", "gone"], "gone cannot be read"),
    (["--api-key-file", "open"], "others may read open: chmod 600 open"),
    (["--api-key-file", "empty"], "empty holds no token"),
    (["--api-key-file", "two"], "two: a token is one word"),
    (["--api-key-file", "binary"], "binary cannot be read"),
    (["--allow-host", "http://a.b"], "'http://a.b' is not the name of a host"),
])  # fmt: skip
def test_bad_tokens_are_one_sentence(
    flags: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in {"open": b"t", "empty": b"\n", "two": b"a b", "binary": b"\xff\xfe"}.items():
        Path(name).write_bytes(data)
        Path(name).chmod(0o644 if name == "open" else 0o600)
    with pytest.raises(UserError, match=sentence):
        parsed(*flags)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_a_token_is_needed(host: str) -> None:
    with pytest.raises(UserError, match=f"--host {host} lets other machines in: give a token"):
        open_listener(host, 0, Access())
    open_listener(host, 0, Access("token")).close()
    open_listener("localhost", 0, Access()).close()


@pytest.mark.parametrize("flags", [["--host", "0.0.0.0"], ["--host", "no.such.host.invalid"], ["--port", "99999"]])
def test_a_relay_that_cannot_listen_ends_with_one_sentence(flags: list[str], tmp_path: Path) -> None:
    argv = ["etude.weights.relay", "--store", str(tmp_path), *flags]
    child = processes.start("relay", argv, tmp_path / "log", {TOKEN_VARIABLE: ""})
    try:
        assert child.popen.wait(60) == 2
    finally:
        child.stop(0)
    lines = child.log.read_text().splitlines()
    assert len(lines) == 1
    said = ("--host 0.0.0.0 lets other machines in", "cannot listen on")
    assert lines[0].removeprefix("etude: ").startswith(said)


def test_a_token_is_asked_for_and_compared_over_http() -> None:
    with guarded(app, Access("s3cret")) as port:
        status, headers, body = ask(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (status, headers["www-authenticate"], headers["connection"]) == (401, "Bearer", "close")
        assert (body["error"]["code"], body["error"]["type"]) == ("invalid_api_key", "invalid_request_error")
        head = b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer s3cret\r\n\r\n"
        assert ask(port, head)[0] == 200


@pytest.mark.slow
def test_the_token_of_an_engine_is_in_no_file(tmp_path: Path) -> None:
    """Nor on its command line: in the environment of the process alone."""
    token = "t0ken-that-is-nowhere"
    child = spawn_engine(ServerConfig(model=str(NANO), port=0, threads=1, cache_mb=32), tmp_path, token=token)
    try:
        port = int(engine_url(child, tmp_path).rpartition(":")[2])
        assert ask(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 401
        head = f"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        status, _, health = ask(port, head)
        assert (status, health["status"]) == (200, "ok")
        assert token not in json.dumps(health)
        assert token.encode() not in Path(f"/proc/{child.popen.pid}/cmdline").read_bytes()
    finally:
        child.stop(20)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert not [path for path in files if token.encode() in path.read_bytes()]
