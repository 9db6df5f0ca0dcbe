"""Tenants: their API keys, and their policy.

A key has 256 random bits and is shown once; the log has its BLAKE2b digest. `Directory` is the gateway's copy of keys
and policies, which `refresh` reads again.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass, field

import msgspec
import sqlalchemy as sa

from etude.errors import UserError
from etude.live.log import schema
from etude.live.log.records import LivePolicy
from etude.live.log.scrub import PERSONAL

_PREFIX = "etl_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_KEYS = 100_000
_MAX_DAYS = 36_500


@dataclass(frozen=True)
class ApiKey:
    """The record of a key, without the key itself."""

    digest: str
    tenant: str
    name: str
    created: int
    revoked: int | None
    proxy: bool = False  # it vouches for the names that it signs (`users`)


def digest_of(key: str) -> str:
    """The digest of a key in the log: BLAKE2b-256, hexadecimal. A slow hash would add nothing to 256 random bits."""
    return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=32, person=b"etude-live-key").hexdigest()


def create_key(engine: sa.Engine, tenant: str, name: str, proxy: bool = False) -> str:
    """A new key of a tenant; a missing tenant is made, with the default policy. `proxy`: it may sign its users' names.
    Raises UserError."""
    key = _PREFIX + secrets.token_hex(32)
    _checked(name, "a key")
    with engine.begin() as connection:
        _make_tenant(connection, tenant)
        listed = connection.execute(_keys(tenant)).all()
        if any(row.name == name and row.revoked is None for row in listed):
            raise UserError(f"the tenant {tenant} has a key {name} already; revoke it first, or give another name")
        if connection.execute(sa.select(sa.func.count()).select_from(schema.api_keys)).scalar_one() >= _MAX_KEYS:
            raise UserError(f"a live loop has at most {_MAX_KEYS} keys")
        values = {"digest": digest_of(key), "tenant": tenant, "name": name, "created": time.time_ns(), "proxy": proxy}
        connection.execute(sa.insert(schema.api_keys).values(**values))
    return key


def list_keys(engine: sa.Engine, tenant: str | None = None) -> list[ApiKey]:
    """The keys of a tenant, or of all tenants, revoked ones included."""
    with engine.connect() as connection:
        return [ApiKey(**row) for row in connection.execute(_keys(tenant)).mappings()]


def revoke_key(engine: sa.Engine, tenant: str, name: str) -> None:
    """Revokes a key, which gateways refuse within seconds. Raises UserError for a missing or revoked key."""
    table = schema.api_keys
    chosen = (table.c.tenant == tenant) & (table.c.name == name) & table.c.revoked.is_(None)
    with engine.begin() as connection:
        if not connection.execute(sa.update(table).where(chosen).values(revoked=time.time_ns())).rowcount:
            raise UserError(f"the tenant {tenant} has no key {name} that could be revoked: see `etude live key list`")


def set_policy(engine: sa.Engine, tenant: str, policy: LivePolicy) -> None:
    """Makes a tenant, or changes its policy. Raises UserError."""
    days_are_sane = all(0 < days <= _MAX_DAYS for days in (policy.raw_days, policy.trained_days))
    if policy.requests_per_minute < 1 or not days_are_sane:
        raise UserError(f"a policy has days above 0, at most {_MAX_DAYS}, and at least one request per minute")
    if wrong := sorted(set(policy.keep) - set(PERSONAL)):
        raise UserError(f"{wrong[0]!r} is no personal data that can be kept: one of {', '.join(PERSONAL)}")
    with engine.begin() as connection:
        _make_tenant(connection, tenant)
        text = msgspec.json.encode(policy).decode()
        connection.execute(sa.update(schema.tenants).where(schema.tenants.c.name == tenant).values(policy=text))


def policies(connection: sa.Connection) -> dict[str, LivePolicy]:
    """The policies of all tenants."""
    rows = connection.execute(sa.select(schema.tenants.c.name, schema.tenants.c.policy).order_by(schema.tenants.c.name))
    return {name: msgspec.json.decode(policy, type=LivePolicy) for name, policy in rows}


def _keys(tenant: str | None) -> sa.Select[tuple[object, ...]]:
    table = schema.api_keys
    chosen = sa.select(table).order_by(table.c.tenant, table.c.created, table.c.digest)
    return chosen if tenant is None else chosen.where(table.c.tenant == tenant)


def _make_tenant(connection: sa.Connection, tenant: str) -> None:
    table = schema.tenants
    if connection.execute(sa.select(table.c.name).where(table.c.name == _checked(tenant, "a tenant"))).first() is None:
        policy = msgspec.json.encode(LivePolicy()).decode()
        connection.execute(sa.insert(table).values(name=tenant, policy=policy, at=time.time_ns()))


def _checked(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name of {what}: letters, digits, dots, dashes, at most 64 characters")
    return name


@dataclass
class _Bucket:
    """The requests left to a key, refilled evenly, up to a tenth of its requests per minute, and at least up to ten."""

    left: float
    filled: float  # monotonic seconds


@dataclass
class Directory:
    """Keys and policies, as of the last `refresh`."""

    keys: dict[str, ApiKey] = field(default_factory=dict[str, ApiKey])
    policies: dict[str, LivePolicy] = field(default_factory=dict[str, LivePolicy])
    _buckets: dict[str, _Bucket] = field(default_factory=dict[str, _Bucket])

    def refresh(self, connection: sa.Connection) -> None:
        """Reads keys and policies."""
        valid = _keys(None).where(schema.api_keys.c.revoked.is_(None)).limit(_MAX_KEYS)
        keys = {row["digest"]: ApiKey(**row) for row in connection.execute(valid).mappings()}
        self.policies = policies(connection)
        self.keys = keys
        for digest in list(self._buckets):  # a copy: the event loop adds others meanwhile
            if digest not in keys:
                self._buckets.pop(digest, None)

    def find(self, key: str) -> ApiKey | None:
        """The record of a client's key, or None for an invalid key."""
        return self.keys.get(digest_of(key))

    def wait(self, key: ApiKey) -> float:
        """Takes one request from the key's allowance; returns 0, or the seconds until a request is allowed."""
        now, rate = time.monotonic(), self.policies[key.tenant].requests_per_minute / 60
        most = max(10.0, 6 * rate)
        bucket = self._buckets.setdefault(key.digest, _Bucket(most, now))
        bucket.left, bucket.filled = min(most, bucket.left + rate * (now - bucket.filled)), now
        if bucket.left < 1:
            return (1 - bucket.left) / rate
        bucket.left -= 1
        return 0.0
