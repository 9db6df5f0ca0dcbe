"""Immutable blobs behind one URL: `file://`, `s3://`, `gs://`, `az://`, or a plain path.

Credentials and endpoints come from the environment, under the cloud's own names (AWS_ENDPOINT_URL, ...). Every call has
a deadline. An object appears whole or not at all: the local backend writes beside the final name, then renames or links.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import ClientConfig, ObjectStore, from_url

from etude.errors import UserError

TIMEOUT = timedelta(seconds=60)
RETRY = timedelta(seconds=120)


class Store:
    """Objects below one URL. Thread-safe; keys are relative paths with forward slashes."""

    def __init__(self, url: str, backend: ObjectStore):
        self.url = url
        self._backend = backend

    def put(self, key: str, data: bytes) -> None:
        """Writes an object, replacing what was there. Raises UserError if the store refuses."""
        try:
            obstore.put(self._backend, key, data)
        except (BaseError, OSError) as e:
            raise self._refused("write", key, e) from None

    def create(self, key: str, data: bytes) -> bool:
        """Writes an object unless it exists; False if it does. Of two concurrent creators exactly one gets True."""
        try:
            obstore.put(self._backend, key, data, mode="create")
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as e:
            raise self._refused("write", key, e) from None
        return True

    def get(self, key: str) -> bytes:
        """The object. Raises KeyError if it is not there."""
        try:
            return bytes(obstore.get(self._backend, key).bytes())
        except FileNotFoundError:
            raise KeyError(key) from None
        except (BaseError, OSError) as e:
            raise self._refused("read", key, e) from None

    def exists(self, key: str) -> bool:
        try:
            obstore.head(self._backend, key)
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as e:
            raise self._refused("read", key, e) from None
        return True

    def list(self, prefix: str, after: str | None = None) -> list[str]:
        """Sorted keys below the folder `prefix`, those greater than `after` only."""
        try:
            batches = list(obstore.list(self._backend, prefix, offset=after))
        except (BaseError, OSError) as e:
            raise self._refused("list", prefix, e) from None
        return sorted(str(entry["path"]) for batch in batches for entry in batch)

    def delete(self, key: str) -> None:
        """Removes an object; one that is not there is fine."""
        try:
            obstore.delete(self._backend, key)
        except FileNotFoundError:
            pass
        except (BaseError, OSError) as e:
            raise self._refused("delete", key, e) from None

    def _refused(self, verb: str, key: str, error: Exception) -> UserError:
        if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
            why = "permission denied; check the credentials"
        elif "No space left" in str(error):
            why = "no space left; free some or choose another store"
        else:
            why = str(error).strip().splitlines()[0]
        return UserError(f"cannot {verb} {key} in {self.url}: {why}")


def open_store(url: str) -> Store:
    """The store at `url`; a local folder is created. Raises UserError if the URL is not one."""
    if "://" not in url:
        url = f"file://{Path(url).absolute()}"
    try:
        if url.startswith("file://"):
            return Store(url, from_url(url, mkdir=True))
        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http:")
        options = ClientConfig(timeout=TIMEOUT, allow_http=plain)
        return Store(url, from_url(url, client_options=options, retry_config={"retry_timeout": RETRY}))
    except (BaseError, ValueError, OSError) as e:
        raise UserError(f"{url} cannot be opened as a store: {str(e).strip().splitlines()[0]}") from None
