"""Accounts: keyed hashes of users, and a key for the contents of each, whose destruction forgets the account.

    account = BLAKE2b(tenant, user), keyed                     nobody can list the users of a log without `keys.json`
    blob    = AES-256-GCM(key of the account, content)         `destroy` makes every copy of the content unreadable
    column  = AES-256-GCM(key of the folder, key of the account)

`FOLDER/keys.json` (mode 0600) holds the two keys of the folder. Keep it out of the database's backups: without it, an
account's key in an old backup is of no use. `etude live forget` does not change the folder's keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from etude.errors import UserError
from etude.live.log import journal, schema
from etude.live.log.records import ulid
from etude.live.log.users import person_of
from etude.store import Store, open_store, sync

_NONCE = 12


def folder_of(path: Path) -> Path:
    """The folder of a live loop, made with mode 0700 if it is missing. Raises UserError if others may read it."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = path.stat().st_mode
    except OSError as e:
        raise UserError(f"the folder {path} of the live loop cannot be made: {e.strerror}") from None
    if mode & 0o077:
        raise UserError(f"others may read the folder {path} of the live loop: chmod 700 {path}")
    return path


def open_log(folder: Path, database: str | None) -> sa.Engine:
    """The log of a live loop: that at `database`, by default live.db in its folder. Raises UserError."""
    return schema.connect(database or f"sqlite:///{folder_of(folder) / 'live.db'}")


def open_blobs(folder: Path) -> Store:
    """The encrypted contents of a live loop, synced with each put. Raises UserError."""
    return open_store(str(folder_of(folder) / "blobs"), durable=True)


class Accounts:
    """The names of a folder's accounts, and their keys. Raises UserError for keys that others may read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder_of(folder) / "keys.json"
        self._hash_key, self._wrapping_key = _folder_keys(self._path)

    def check(self, engine: sa.Engine) -> Accounts:
        """These accounts, once the log is known to use the same keys; a new log is marked with them. Raises UserError
        for a log of other keys, in which accounts, forgotten ones too, have other names."""
        keys, mark = schema.meta.c.key == "keys", self.digest("mark")
        with engine.begin() as connection:
            journal.stamp(connection)  # locks out other writers
            held = connection.execute(sa.select(schema.meta.c.value).where(keys)).scalar()
            if held is None:
                connection.execute(sa.insert(schema.meta).values(key="keys", value=mark))
            elif held != mark:
                raise UserError(f"{self._path} has not the keys with which the log was begun: restore that file")
        return self

    def name(self, tenant: str, user: str) -> str:
        """The account of a tenant's user: 32 hexadecimal digits. A session in the user's name is left out."""
        return self.digest("account", tenant, person_of(user)[0] or user)

    def proxy_secret(self, key: str) -> str:
        """The secret with which the owner of a proxy key, by its digest, signs its users' names."""
        return f"ets_{self.digest('proxy', key)}{self.digest('proxy, second half', key)}"

    def digest(self, purpose: str, *parts: str) -> str:
        """A keyed hash of texts, for one purpose: 32 hexadecimal digits."""
        text = json.dumps([purpose, *parts]).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=16, key=self._hash_key).hexdigest()

    def keys(self, connection: sa.Connection, owners: dict[str, str], at: int) -> dict[str, bytes]:
        """The keys of accounts, made if missing; `owners` maps accounts to their tenants. Accounts whose keys were
        destroyed are left out."""
        keys: dict[str, bytes] = {}
        table, names = schema.account_keys, sorted(owners)
        for low in range(0, len(names), 500):
            chosen = sa.select(table.c.account, table.c.secret).where(table.c.account.in_(names[low : low + 500]))
            rows = {row.account: row.secret for row in connection.execute(chosen)}
            for account in names[low : low + 500]:
                if account not in rows:
                    keys[account] = secrets.token_bytes(32)
                    sealed = seal(self._wrapping_key, keys[account], account)
                    values = {"account": account, "tenant": owners[account], "secret": sealed, "at": at}
                    connection.execute(sa.insert(table).values(**values))
                elif rows[account] is not None:
                    keys[account] = unseal(self._wrapping_key, bytes(rows[account]), account)
        return keys

    def key(self, connection: sa.Connection, account: str) -> bytes | None:
        """The key of an account; None for a missing or destroyed key."""
        table = schema.account_keys
        secret = connection.execute(sa.select(table.c.secret).where(table.c.account == account)).scalar()
        return None if secret is None else unseal(self._wrapping_key, bytes(secret), account)

    def destroy(self, connection: sa.Connection, account: str, tenant: str, at: int) -> None:
        """Destroys the key of an account, which gets no new key."""
        table = schema.account_keys
        gone = sa.update(table).where(table.c.account == account).values(secret=None, destroyed=at)
        if not connection.execute(gone).rowcount:
            values = {"account": account, "tenant": tenant, "secret": None, "at": at, "destroyed": at}
            connection.execute(sa.insert(table).values(**values))


def new_blob(account: str) -> str:
    """The name of a new blob in the store; all blobs of an account lie in one folder."""
    return f"{account[:2]}/{account}/{ulid()}"


def seal(key: bytes, data: bytes, name: str) -> bytes:
    """`data` encrypted, and bound to its name: 12 bytes of nonce, then AES-256-GCM."""
    nonce = os.urandom(_NONCE)
    return nonce + _cipher(key).encrypt(nonce, data, name.encode())


def unseal(key: bytes, data: bytes, name: str) -> bytes:
    """The data that was sealed. Raises ValueError for another key or name, or for altered data."""
    from cryptography.exceptions import InvalidTag

    try:
        return _cipher(key).decrypt(data[:_NONCE], data[_NONCE:], name.encode())
    except InvalidTag:
        raise ValueError(f"{name} is not what was encrypted with this key") from None


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _folder_keys(path: Path) -> tuple[bytes, bytes]:
    """The key that hashes account names and the key that encrypts account keys; a missing file is made."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        if not path.exists():
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump({"names": secrets.token_hex(32), "keys": secrets.token_hex(32)}, file)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)  # of two processes that make it, one wins
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
            sync(path.parent)
        if path.stat().st_mode & 0o077:
            raise UserError(f"others may read {path}: chmod 600 {path}")
        held = json.loads(path.read_text())
        names, keys = bytes.fromhex(held["names"]), bytes.fromhex(held["keys"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"the keys of the live loop in {path} cannot be read ({e}); restore the file") from None
    if len(names) != 32 or len(keys) != 32:
        raise UserError(f"the keys of the live loop in {path} are not 32 bytes each; restore the file")
    return names, keys
