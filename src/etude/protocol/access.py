"""Access to a server: its token, and the hosts and origins of requests.

A token is needed where other machines can connect. Host and Origin are checked with or without a token: a web page
reaches servers of the browser's machine, under the page's own host name (DNS rebinding) or under theirs.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import UserError

TOKEN_VARIABLE = "ETUDE_API_KEY"
"""The environment variable with a server's token, which etude's clients send."""

_ANY = ("0.0.0.0", "::")  # listening addresses that are no host names
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^:\[\]/@]+)(?::(?P<port>[0-9]{1,5}))?")
_ORIGIN = re.compile(f"(?P<scheme>https?)://{_HOST.pattern}")
_PORTS = {"http": 80, "https": 443}  # of origins without a port


class Refusal(Exception):
    """A refused request: its HTTP status, and OpenAI's `code` and `param`."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, dict(headers or {})


@dataclass(frozen=True)
class Access:
    """The token of a server, its host names beside those of loopback and its own address, and the origins, as names and
    ports, whose pages may ask beside its own."""

    token: str | None = field(default=None, repr=False)
    hosts: frozenset[str] = frozenset()
    origins: frozenset[tuple[str, int]] = frozenset()

    def check(self, scope: Mapping[str, Any]) -> None:
        """Raises Refusal for a request with another host, from another origin, or without the token."""
        address, port = (scope.get("server") or ("", None))[:2]
        names = self.hosts | {address}
        host = next(headers(scope, b"host"), "")
        match = _HOST.fullmatch(host)
        if match is None or not _is_own(_name(match), names):
            raise Refusal(
                403, f"the host {host[:100]!r} is not a name of this server; give its names with --allow-host", "host"
            )
        ports = {port, int(match["port"] or 80)}  # its own, and by which the client knows it, through a tunnel
        for origin in headers(scope, b"origin"):
            if not self._may_ask(_ORIGIN.fullmatch(origin), names, ports):
                message = f"pages of the origin {origin[:100]!r} may not ask this server; name it with --allow-host"
                raise Refusal(403, message, "origin")
        if _is_part_of_another_page(scope):
            raise Refusal(403, "pages of other sites may not ask this server", "origin")
        if self.token is not None and not any(_same(shown, self.token) for shown in bearers(scope)):
            raise Refusal(
                401,
                "a token is needed: send it as `Authorization: Bearer TOKEN`",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _may_ask(self, origin: re.Match[str] | None, names: frozenset[str], ports: set[int | None]) -> bool:
        """Whether an origin is the server's own, or configured."""
        if origin is None:
            return False
        name, port = _name(origin), int(origin["port"] or _PORTS[origin["scheme"]])
        return (name, port) in self.origins or (_is_own(name, names) and port in ports)


LOOPBACK = Access()
"""No token: for this machine alone."""


def headers(scope: Mapping[str, Any], name: bytes) -> Iterator[str]:
    """The values of a request's headers `name`, a name in lower case."""
    return (value.decode("latin-1").strip() for key, value in scope["headers"] if key == name)


def bearers(scope: Mapping[str, Any]) -> Iterator[str]:
    """The tokens of a request: in `authorization`, or in `x-api-key` from Anthropic's clients."""
    for value in headers(scope, b"authorization"):
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            yield token.strip()
    yield from headers(scope, b"x-api-key")


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode("latin-1"), token.encode())


def _name(match: re.Match[str]) -> str:
    return match["name"].lower().strip("[]").removesuffix(".")


def _is_own(name: str, names: frozenset[str]) -> bool:
    return name in names or is_loopback(name)


def is_loopback(name: str) -> bool:
    """Whether a host name or address always means this machine."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _is_part_of_another_page(scope: Mapping[str, Any]) -> bool:
    """Whether a request is for an image or script of another site's page, which browsers send without an origin."""
    if next(headers(scope, b"sec-fetch-site"), "") != "cross-site" or any(headers(scope, b"origin")):
        return False
    return scope["method"] != "GET" or next(headers(scope, b"sec-fetch-mode"), "") != "navigate"


# Tokens of this process -----------------------------------------------------------------------------------------------


def new_token() -> str:
    """A random token of 256 bits, as text."""
    return secrets.token_urlsafe(32)


def own_token() -> str | None:
    """The token in the environment, else None. Raises UserError for characters that no header can carry."""
    return _checked(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE)


def bearer(token: str | None) -> dict[str, str]:
    """The authorization header of a token; {} without a token."""
    return {"authorization": f"Bearer {token}"} if token else {}


def add_access_flags(parser: argparse._ActionsContainer) -> None:
    """The flags that `access_of` reads."""
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help=f"file with the token to ask for, of mode 0600; without one, ${TOKEN_VARIABLE}",
    )
    parser.add_argument(
        "--allow-host",
        metavar="NAME",
        nargs="+",
        default=(),
        help="further names by which clients know this server, and whose web pages may ask; NAME:PORT for their port",
    )


def access_of(options: argparse.Namespace) -> Access:
    """The access by a server's flags and environment. Raises UserError."""
    if options.api_key_file is not None:
        token = _token_in(options.api_key_file)
    else:
        token = own_token()
    hosts = [*options.allow_host, *([options.host] if getattr(options, "host", "") not in ("", *_ANY) else [])]
    names, origins = set[str](), set[tuple[str, int]]()
    for host in hosts:
        match = _HOST.fullmatch(host)  # an address of IPv6 without brackets has no port
        name = _name(match) if match else host.lower()
        if not re.fullmatch(r"[0-9a-z_.:-]+", name):
            raise UserError(f"--allow-host: {host!r} is not the name of a host, with or without its port")
        names.add(name)
        ports = [int(match["port"])] if match and match["port"] else _PORTS.values()
        origins |= {(name, port) for port in ports}
    return Access(token, frozenset(names), frozenset(origins))


def _token_in(path: Path) -> str:
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except (OSError, ValueError) as e:
        raise UserError(f"--api-key-file: {path} cannot be read ({getattr(e, 'strerror', None) or e})") from None
    if mode & 0o077:
        raise UserError(f"--api-key-file: others may read {path}: chmod 600 {path}")
    return _checked(text, str(path)) or _no_token(str(path))


def _checked(token: str, where: str) -> str | None:
    if token and not re.fullmatch(r"[!-~]+", token):
        raise UserError(f"{where}: a token is one word of printable ASCII characters")
    return token or None


def _no_token(where: str) -> str:
    raise UserError(f"{where} holds no token: make one, e.g. with `openssl rand -hex 32`")
