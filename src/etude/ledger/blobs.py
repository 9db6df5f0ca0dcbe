"""Episodes in the store. The ledger keeps the digest of an episode's bytes, which proves them when they are read."""

from __future__ import annotations

import blake3

from etude.errors import UserError
from etude.records import Episode, EpisodeBlob, decode, encode
from etude.store import ObjectMissing, Store


class BlobDamaged(UserError):
    """The bytes of an episode are missing, or do not have the digest that the ledger keeps."""


def put_blob(store: Store, key: str, episode: Episode) -> EpisodeBlob:
    """Stores the episode. Returns its key and digest, which the ledger keeps."""
    data = encode(episode)
    store.put(key, data)
    return EpisodeBlob(key=key, digest=blake3.blake3(data).hexdigest())


def get_blob(store: Store, blob: EpisodeBlob) -> Episode:
    """The stored episode. Raises BlobDamaged."""
    advice = "`--resume` plays it again, if it was not trained on"
    try:
        data = store.get(blob.key)
    except ObjectMissing:
        raise BlobDamaged(f"the episode {blob.key} is gone from {store.url}; {advice}") from None
    if blake3.blake3(data).hexdigest() != blob.digest:
        why = "does not have the digest that the ledger keeps"
        raise BlobDamaged(f"the episode {blob.key} in {store.url} is damaged: it {why}; {advice}")
    return decode(data, Episode)
