"""One interface to where blobs and versions live: a folder (`file://` or a plain path), `s3://`, `gs://` or `az://`.

Keys are slash-separated names below the URL. A put is atomic: readers see the old bytes or the new ones, never a part.
On a folder that holds when the process is killed at any point (a temporary file is renamed over the name, or linked to
it when the name must be new); what is left of a killed put is never listed. A folder that is opened as `durable` keeps
what was put when the power is cut as well: file and folder are synced before a put returns. Cloud credentials, regions
and endpoints come from the environment, e.g. AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from etude.errors import UserError, first_line

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

CLOUDS = ("s3", "gs", "az")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

REQUEST = timedelta(seconds=60)
CONNECT = timedelta(seconds=5)
RETRYING = timedelta(seconds=30)
"""Deadlines: one request, its connection, and how long failed requests are tried again."""

PART = 64 * 1024 * 1024
"""Larger objects go up in parts of this many bytes, so that each request keeps its deadline on a slow link."""


class StoreFailed(UserError):
    """The store cannot be reached, refuses access or is full."""


class ObjectMissing(KeyError):
    """No object has this key."""


@dataclass(frozen=True)
class Entry:
    """One object of a store."""

    key: str
    bytes: int
    modified: float  # seconds since the epoch


class Store:
    """Blobs by key below one URL. Safe to use from several threads. Every method may raise StoreFailed, a UserError."""

    def __init__(self, url: str, backend: ObjectStore, durable: Path | None = None):
        """`durable`: the folder of a local store whose puts are synced."""
        self.url = url
        self._backend = backend
        self._durable = durable

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def put(self, key: str, data: bytes) -> None:
        """Writes or replaces `key`."""
        with self._errors("write", key):
            if self._durable is not None:
                _put_durably(self._durable / key, data, new=False)
            else:
                obstore.put(self._backend, key, data, use_multipart=len(data) > PART, chunk_size=PART)

    def create(self, key: str, data: bytes) -> bool:
        """Writes `key` if it does not exist; False if it does. Of two that race, exactly one gets True."""
        with self._errors("write", key):
            if self._durable is not None:
                return _put_durably(self._durable / key, data, new=True)
            try:
                obstore.put(self._backend, key, data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def get(self, key: str) -> bytes:
        """The bytes of `key`. Raises ObjectMissing."""
        with self._errors("read", key):
            try:
                return bytes(obstore.get(self._backend, key).bytes())
            except FileNotFoundError as e:
                if "NoSuchBucket" in str(e):
                    raise
                raise ObjectMissing(key) from None

    def list(self, folder: str = "", after: str | None = None) -> list[str]:
        """All keys in `folder` and below it, sorted; with `after` only those that sort after that key."""
        with self._errors("list", folder):
            pages = obstore.list(self._backend, folder or None, offset=after)
            return sorted(meta["path"] for page in pages for meta in page)

    def entries(self, folder: str = "") -> tuple[Entry, ...]:
        """The objects in `folder` and below it, by key."""
        with self._errors("list", folder):
            listed = [
                Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for page in obstore.list(self._backend, folder or None)
                for meta in page
            ]
        return tuple(sorted(listed, key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        """Removes `key`; nothing happens if it is not there."""
        with self._errors("delete", key), suppress(FileNotFoundError):
            obstore.delete(self._backend, key)

    def exists(self, key: str) -> bool:
        """Whether `key` is there."""
        with self._errors("read", key):
            try:
                obstore.head(self._backend, key)
            except FileNotFoundError:
                return False
        return True

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        user = _users.setdefault("first", os.getpid())
        assert user == os.getpid(), "a store was used before this process was forked: start a fresh process"
        try:
            yield
        except (BaseError, OSError) as e:
            raise StoreFailed(f"cannot {verb} {key} in {self.url}: {first_line(e)}; {ADVICE}") from e


_users: dict[str, int] = {}  # the first process that used a store; obstore's threads are missing in its forks
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
ADVICE = "check that it is reachable, writable and not full"


def open_store(url: str, *, durable: bool = False) -> Store:
    """The store at `url`; a folder is created if it is missing. Raises UserError for a URL that names no store. A cloud
    store is not contacted before its first use. With `durable`, puts to a folder are synced; a cloud's always last."""
    scheme = urlsplit(url).scheme if "://" in url else "file"
    try:
        if scheme == "file":
            folder = _folder(url)
            return Store(folder.as_uri(), LocalStore(folder, mkdir=True), folder if durable else None)
        if scheme not in CLOUDS:
            raise UserError(f"{url} cannot be opened as a store; give a folder or a file://, s3://, gs:// or az:// URL")
        if not urlsplit(url).netloc:
            raise UserError(f"{url} names no bucket; give {scheme}://BUCKET/FOLDER")
        retries: RetryConfig = {"max_retries": 5, "retry_timeout": RETRYING}
        client: ClientConfig = {"timeout": REQUEST, "connect_timeout": CONNECT}
        if any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS):
            client["allow_http"] = True  # the user's own gateway inside a private network
        return Store(url, from_url(url, client_options=client, retry_config=retries))
    except (BaseError, OSError, ValueError) as e:
        raise UserError(f"{url} cannot be opened as a store: {first_line(e)}; {ADVICE}") from e


def write_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes or replaces a file: whatever is killed or switched off meanwhile, it holds the old bytes or the new."""
    temporary = _written(path, data, mode)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_durably(path: Path, data: bytes, *, new: bool) -> bool:
    """False if the name must be new and is not. LocalStore would give another name to a key with other letters."""
    if not _PLAIN.fullmatch(path.name):
        raise ValueError(f"{path.name!r} is no plain name for an object")
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in missing:
        sync(parent.parent)
    if not new:
        write_durably(path, data)
        return True
    temporary = _written(path, data, 0o666)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    sync(path.parent)
    return True


def _written(path: Path, data: bytes, mode: int) -> Path:
    """A synced file beside `path`, with a name that LocalStore never lists."""
    temporary = path.with_name(f"{path.name}#{secrets.randbelow(10**12)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink()
        raise
    return temporary


def _folder(url: str) -> Path:
    if not url.startswith("file://"):
        return Path(url).absolute()
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UserError(f"{url} is not a local folder; write file:///ABSOLUTE/PATH")
    return Path(unquote(parts.path))
