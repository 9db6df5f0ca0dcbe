"""The policy of egress: allowed hosts, allowed addresses of a name, and the record of a request."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from pathlib import Path
from urllib.parse import urlsplit

from etude.config import SandboxConfig
from etude.errors import UserError

PORTS = (80, 443)
RESOLVE_SECONDS = 10.0
_NAME = re.compile(r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NUMBERS = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]+))*")  # addresses of inet_aton
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class EgressRefused(Exception):
    """A request that the policy does not allow; the text is the reason."""


@dataclass(frozen=True)
class EgressRequest:
    """One request of a box to the outside. Sizes are in bytes; `path` is None for a tunnel, whose content is not read.

    `allowed` is the decision of the policy. `why` is the reason why a request was refused or failed.
    """

    method: str
    host: str
    port: int
    path: str | None
    sent: int
    received: int
    allowed: bool
    why: str


@dataclass(frozen=True)
class AllowedHost:
    """An entry of the allow-list. `name` is in lower case, "*.x.y" any name below x.y. With an `address` the name is
    not resolved, and may be a host of a private network."""

    name: str
    ports: tuple[int, ...] = PORTS
    address: str | None = None

    def covers(self, name: str, port: int) -> bool:
        """Whether a request to this host and port is allowed."""
        below = self.name.startswith("*.") and name.endswith(self.name[1:])
        return (below or name == self.name) and port in self.ports


@dataclass(frozen=True)
class PackageIndex:
    """A simple index (PEP 503, 691, 700) as it was at `before`, without the projects in `without`, normal names."""

    url: str
    before: datetime
    without: frozenset[str]


@dataclass(frozen=True)
class Egress:
    """The hosts and index that boxes may reach. Each request is a line in `log`."""

    hosts: tuple[AllowedHost, ...] = ()
    index: PackageIndex | None = None
    log: Path | None = None

    def find(self, name: str, port: int) -> AllowedHost:
        """The entry that allows a request. Raises EgressRefused."""
        if is_address(name):
            raise EgressRefused("an address, not a name")
        if not _NAME.fullmatch(name):
            raise EgressRefused("not a host name")
        for host in self.hosts:
            if host.covers(name, port):
                return host
        raise EgressRefused("not on the list")


def parse_allowed_hosts(entries: Iterable[str]) -> tuple[AllowedHost, ...]:
    """The allow-list of entries NAME[:PORT][@ADDRESS]. Raises UserError."""
    return tuple(_parse(entry) for entry in entries)


def _parse(entry: str) -> AllowedHost:
    place, at, address = entry.partition("@")
    name, colon, port = place.lower().partition(":")
    wrong = UserError(f"{entry!r} is no host to allow: write NAME, NAME:PORT or NAME:PORT@ADDRESS, or *.NAME.")
    if is_address(name) or not _NAME.fullmatch(name.removeprefix("*.")) or "." not in name.removeprefix("*."):
        raise wrong
    if colon and not (port.isdecimal() and 0 < int(port) < 65536):
        raise wrong
    try:
        fixed = str(ipaddress.ip_address(address)) if at else None
    except ValueError:
        raise wrong from None
    return AllowedHost(name, (int(port),) if colon else PORTS, fixed)


def check_package_index(url: str) -> str:
    """The URL with a slash at its end. Raises UserError."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and not parts.query
    except ValueError:
        right = False
    if not right:
        raise UserError(f"sandbox.index: {url!r} is not the URL of a simple index, such as https://pypi.org/simple/.")
    return url.rstrip("/") + "/"


def package_index(url: str, before: date, without: Iterable[str]) -> PackageIndex:
    """An index as it was when `before` began, in UTC. Raises UserError."""
    names = frozenset(normal_project(name) for name in without)
    return PackageIndex(check_package_index(url), datetime.combine(before, time(), UTC), names)


def configured_egress(config: SandboxConfig, packages: Iterable[str], log: Path | None = None) -> Egress | None:
    """The hosts and the index that [sandbox] allows, without `packages`; None if it allows nothing. Requests are noted
    in the file `log`. Raises UserError."""
    if config.type != "namespace":
        return None
    index = None
    if config.index is not None and config.index_before is not None:
        index = package_index(config.index, config.index_before, {*config.index_without, *packages})
    if not config.egress and index is None:
        return None
    return Egress(parse_allowed_hosts(config.egress), index, log)


def wheel_project(name: str) -> str:
    """The project in "pydash-8.1.0"."""
    return re.sub(r"-v?\d.*", "", name)


def normal_project(project: str) -> str:
    """The normal name of a project (PEP 503)."""
    return re.sub(r"[-_.]+", "-", project).lower()


def is_address(name: str) -> bool:
    """Whether a name is an address, in old spellings too: 0x7f.1, 2130706433."""
    try:
        ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return bool(_NUMBERS.fullmatch(name))
    return True


def public(address: str) -> bool:
    """Whether an address is of the public internet; an IPv6 address that maps an IPv4 address counts as the latter."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner:
            return public(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


async def resolve(host: AllowedHost, name: str, port: int) -> list[str]:
    """Addresses to connect to, each of them public unless the entry names one. Raises EgressRefused or OSError."""
    if host.address is not None:
        return [host.address]
    async with asyncio.timeout(RESOLVE_SECONDS):
        entries = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if not addresses or not all(public(address) for address in addresses):
        raise EgressRefused("its name leads into a private network")
    return addresses
