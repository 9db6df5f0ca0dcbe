"""Servers outside of the boxes, on this machine's loopback: web pages over HTTP and TLS, and a package index.

Requests that arrive are kept: they show which data an attack got out.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import ssl
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from etude.sandbox.egress import INDEX_JSON, AllowedHost, Egress, package_index, parse_allowed_hosts

NAME = "docs.example.test"  # an allowed host
TEXT = b"a page from outside\n"
BEFORE = date(2024, 1, 1)
UNDER_TEST = "lib"
FILES: dict[str, dict[str, str | None]] = {  # project -> version -> upload time
    "helper": {"1.0": "2023-05-01T00:00:00Z", "1.1": "2023-12-31T23:59:59.999Z", "2.0": "2024-01-01T00:00:00Z"},
    "undated": {"1.0": None},
    UNDER_TEST: {"1.0": "2020-01-01T00:00:00Z"},
}


@dataclass
class Outside:
    """Two servers. `seen` holds the method and path of every request that has arrived."""

    port: int
    tls_port: int
    seen: list[str] = field(default_factory=list[str])

    def egress(self, log: Path | None) -> Egress:
        """A policy that allows the pages, the packages, and a name that leads to this machine."""
        hosts = parse_allowed_hosts([f"{NAME}:{self.port}@127.0.0.1", f"{NAME}:{self.tls_port}@127.0.0.1"])
        index = package_index(f"http://127.0.0.1:{self.port}/simple/", BEFORE, [UNDER_TEST])
        return Egress((*hosts, AllowedHost("localhost", (self.port,))), index, log)


def wheel(project: str, version: str) -> bytes:
    """The smallest package that pip accepts."""
    folder = f"{project}-{version}.dist-info"
    files = {
        f"{project}.py": f"VERSION = {version!r}\n",
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: etude\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={_digest(text.encode())},{len(text)}" for path, text in files.items()]
    files[f"{folder}/RECORD"] = "\n".join([*rows, f"{folder}/RECORD,,", ""])
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return data.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _listing(project: str) -> bytes:
    files = []
    for version, uploaded in FILES[project].items():
        name = f"{project}-{version}-py3-none-any.whl"
        hashed = {"sha256": hashlib.sha256(wheel(project, version)).hexdigest()}
        file = {"filename": name, "url": f"../../files/{name}", "hashes": hashed, "core-metadata": True}
        files.append(file if uploaded is None else file | {"upload-time": uploaded})
    return json.dumps({"meta": {"api-version": "1.1"}, "name": project, "versions": [], "files": files}).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    outside: Outside

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self.outside.seen.append(f"{self.command} {self.path}")
        # Uploads are read to the end: a server that hangs up first would hide whether the gate does.
        self.rfile.read(int(self.headers.get("content-length", 0)))
        match self.path.partition("?")[0].split("/"):
            case ["", "simple", project, ""] if project in FILES:
                self._reply(200, INDEX_JSON, _listing(project))
            case ["", "files", name]:
                project, version, *_ = name.split("-")
                self._reply(200, "application/octet-stream", wheel(project, version))
            case ["", "away"]:
                self._reply(302, "text/plain", b"", location="http://169.254.169.254/latest/meta-data/")
            case ["", "page"]:
                self._reply(200, "text/plain", TEXT)
            case _:
                self._reply(404, "text/plain", b"no such page\n")

    do_POST = do_PUT = do_GET

    def _reply(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def outside() -> Iterator[Outside]:
    """Both servers, until the end of the block."""
    handler = type("Handler", (_Handler,), {})
    plain = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    secure = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with plain, secure:
        secure.socket = _context().wrap_socket(secure.socket, server_side=True, do_handshake_on_connect=False)
        world = Outside(plain.server_address[1], secure.server_address[1])
        handler.outside = world  # type: ignore[attr-defined]
        for server in (plain, secure):
            server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that breaks off
            threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield world
        finally:
            plain.shutdown()
            secure.shutdown()


def _context() -> ssl.SSLContext:
    """A self-signed certificate for NAME."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
        file.write(certificate.public_bytes(encoding))
        file.flush()
        context.load_cert_chain(file.name)
    return context
