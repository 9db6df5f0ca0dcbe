"""Ranks that hold rows of every tensor write the chain that one process writes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.errors import RunFailed, UserError
from etude.store import Store, open_store
from etude.weights import halo, manifests, publisher
from etude.weights.audit import audit
from etude.weights.content import load, load_content, replay_chunk
from etude.weights.manifest import ManifestDamaged, Trust
from etude.weights.payloads import PayloadSource
from etude.weights.publisher import Publisher
from etude.weights.ranks import (
    AnchorFailed,
    Attempt,
    Parts,
    Ranks,
    Shard,
    Share,
    digest_of_parts,
    schema_of_parts,
)
from etude.weights.ulpd import codec, digest_text, weights_digest
from etude.weights.ulpd.chunk_grid import Window, schema_of
from tests.helpers.publishing_ranks import ANCHOR_PART, MOVES, SHAPES, VERSIONS, WORLDS, chain, made, parts

FRAME = codec.pack("delta", 0, [])  # an object without records: head and tail
TYPES = {name: dtype for name, (_, dtype) in SHAPES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stores that the ranks have written, and what they returned."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.helpers.publishing_ranks", str(out)]
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(command) as ranks:
        patch.setattr(publisher, "ANCHOR_PART", ANCHOR_PART)
        chain(out, 1, 0, None)
        assert ranks.wait(200) == 0
    return out


def results(folder: Path, name: str, case: str) -> list:
    """What each rank returned."""
    files = sorted(folder.glob(f"{name}-*.json"))
    return [json.loads(file.read_text())[case] for file in files]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def records(store: Store, objects: tuple) -> list[codec.ChunkRecord]:
    """The records of some objects, by chunk; each object holds what its range says."""
    out: list[codec.ChunkRecord] = []
    for part in objects:
        _, _, some = codec.unpack(store.get(part.key), 10**6)
        assert (part.first, part.stop) == (some[0].chunk, some[-1].chunk + 1)
        out += some
    return sorted(out, key=lambda record: record.chunk)


def payloads(manifest) -> Iterator[tuple]:
    yield manifest.delta
    yield manifest.anchor.parts
    yield from (skip.parts for skip in manifest.skips)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_ranks_write_what_one_process_writes(folder: Path, world: int) -> None:
    """Bytes differ by head and tail of the further objects alone."""
    one, many = (open_store(str(folder / f"world-{count}")) for count in (1, world))
    ours, theirs = manifests(one), manifests(many)
    assert len(ours) == len(theirs) == VERSIONS
    assert max(m.anchor.version for m in ours) > 0
    assert all(len(m.anchor.parts) > world for m in theirs)
    assert [skip.base for m in ours for skip in m.skips] == [0]
    for own, other in zip(ours, theirs, strict=True):
        for field in ("version", "parent", "digest", "changed", "elements", "schema", "groups", "kind"):
            assert getattr(own, field) == getattr(other, field)
        assert own.anchor.version == other.anchor.version
        assert [skip.base for skip in own.skips] == [skip.base for skip in other.skips]
        assert own.digest == weights_digest(made(own.version), TYPES)
        for objects, others in zip(payloads(own), payloads(other), strict=True):
            assert records(one, objects) == records(many, others)
            more = len(FRAME) * (len(others) - len(objects))
            assert sum(part.bytes for part in others) == sum(part.bytes for part in objects) + more
    assert many.list("shares") == []
    assert equal(load(many, VERSIONS - 1)[1], made(VERSIONS - 1))
    assert audit(many, Trust()).problems == ()


@pytest.mark.parametrize("world", WORLDS[1:])
def test_a_rank_holds_its_rows_and_the_ends_of_chunks(folder: Path, world: int) -> None:
    figures = [own[str(world)] for own in results(folder, "living", "chains")[:world]]
    assert digest_text(sum(own["digest"] for own in figures)) == weights_digest(made(VERSIONS - 1), TYPES)
    for rank, own in enumerate(figures):
        held = {n: p.rows if isinstance(p, Shard) else p for n, p in parts(made(0), world, rank).items()}
        for name, size in own["kept"].items():
            assert held[name].numel() <= size < held[name].numel() + 2**18


def test_a_chunk_is_read_back_from_the_objects_of_ranks(folder: Path) -> None:
    source = PayloadSource(open_store(str(folder / "world-4")))
    _, content = load_content(source.store, VERSIONS - 1)
    for number in range(len(content.schema.chunks)):
        assert np.array_equal(replay_chunk(source, VERSIONS - 1, content, number), content.chunk(number))


def test_ranks_change_and_the_chain_goes_on(folder: Path) -> None:
    store = open_store(str(folder / "moves"))
    published = manifests(store)
    assert [m.parent for m in published] == [None, *range(2 * len(MOVES) - 1)]
    assert {m.anchor.version for m in published} == {0}
    assert [m.kind for m in published] == ["folder"] + ["delta"] * (2 * len(MOVES) - 1)
    assert len({m.run for m in published}) == 1
    assert len({m.writer for m in published}) == len(MOVES)
    one = {m.version: m for m in manifests(open_store(str(folder / "world-1")))}
    for manifest in published:
        assert manifest.digest == one[manifest.version].digest
        if manifest.version:
            assert manifest.changed == one[manifest.version].changed
        assert equal(load(store, manifest.version, lambda: made(0))[1], made(manifest.version))


def test_one_rank_fails_and_all_say_why(folder: Path) -> None:
    every = results(folder, "living", "refusals")[:3]
    for case, why in {
        "nan": "UserError: version 0 is not published: cut hold NaN or infinity",
        "edge": "UserError: version 0 is not published: cut hold NaN or infinity",
        "gap": "ValueError: the ranks together do not hold flat",
        "schema": "ValueError: the tensors of rank 1 have other names",
        "resumed": "ValueError: the tensors do not have the digest of version 0",
        "moved": "ValueError: the rows have moved to other ranks",
    }.items():
        assert len({own[case] for own in every}) == 1
        assert every[0][case].startswith(why)
    store = open_store(str(folder / "refusals"))
    assert equal(load(store, 0)[1], made(0))
    assert store.list("shares") == []


def test_adapters_lie_on_one_rank(folder: Path) -> None:
    store = open_store(str(folder / "adapters"))
    assert [m.kind for m in manifests(store)] == ["anchor", "delta"]
    assert equal(load(store, 1)[1], {name: made(1)[name] for name in ("norm", "flat")})


def test_an_anchor_that_one_rank_cannot_write_is_begun_again_by_all(folder: Path) -> None:
    first, second, *_ = results(folder, "living", "failed_anchor")
    assert first["errors"] == second["errors"]
    assert [error[:12] for error in first["errors"]] == ["", "", "AnchorFailed", "", "", ""]
    store = open_store(str(folder / "anchors"))
    last = manifests(store)[-1]
    assert (last.version, last.anchor.version) == (4, 3)
    assert equal(load(store, 4)[1], made(4))


def test_a_killed_rank_is_named_and_the_next_attempt_publishes(folder: Path) -> None:
    errors = [own["error"] for own in results(folder, "killed", "killed")]
    follower = "RunFailed: rank 1 did not write its part of version 1 in time; start the trainer again"
    first = "RunFailed: rank 0 did not publish version 1 in time; start the trainer again"
    assert errors == [follower, follower, first]
    for victim in (0, 1):
        store = open_store(str(folder / f"killed-{victim}"))
        again = Publisher(store)
        again.resume(manifests(store)[-1], made(0))
        published = again.publish(1, made(1), (), {})
        assert (published.kind, published.parent, published.digest) == ("delta", 0, weights_digest(made(1), TYPES))
        assert equal(load(store, 1)[1], made(1))


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        (ManifestDamaged("the manifest is damaged"), UserError, "the manifest is damaged"),
        (AnchorFailed("no space"), AnchorFailed, "no space"),
        (RunFailed("rank 2 is late"), RunFailed, "rank 2 is late"),
        (RuntimeError("out of memory\nat line 7"), RunFailed, "rank 1 failed at version 3: out of memory; see its log"),
    ],
)
def test_the_error_of_a_rank_is_that_of_all(tmp_path: Path, error: Exception, kind: type, why: str) -> None:
    store = open_store(str(tmp_path))
    first, second, third = (Attempt(store, Ranks(rank, 3, "s"), 3, 1) for rank in range(3))
    own = Share(delta=(), skips={}, own_anchor=(), anchor=None, base=0, target=0, changed=0)
    third.wait()
    second.announce_failure(error)
    with pytest.raises(kind, match=f"^{why}$") as raised:
        first.gather(own, time.monotonic() + 60)
    first.announce_failure(raised.value)
    with pytest.raises(kind, match=f"^{why}$") as same:
        third.wait()
    assert type(raised.value) is type(same.value) is kind
    Attempt(store, Ranks(2, 3, "s"), 3, 2).wait()  # the next attempt knows nothing of it
    first.clear()
    assert store.list() == []


@pytest.mark.parametrize("world", [1, 2, 5, 9])
def test_each_chunk_has_a_writer_with_all_of_its_elements(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """Shards of random sizes in a random order of ranks."""
    rng = np.random.default_rng(world)
    whole = {
        f"t{i}": torch.empty(shape, dtype=torch.uint8, device="meta") for i, (shape, _) in enumerate(SHAPES.values())
    }
    schema, ranges = schema_of(whole), dict[str, list[range]]()
    for name, tensor in whole.items():
        rows = len(tensor) if tensor.ndim else 1
        edges = [0, *sorted(rng.integers(0, rows + 1, world - 1).tolist()), rows]
        some = [range(*edges[i : i + 2]) for i in range(world)]
        ranges[name] = [some[i] for i in rng.permutation(world)]

    def held(rank: int) -> Parts:
        out: dict[str, torch.Tensor | Shard] = {}
        for name, tensor in whole.items():
            own = ranges[name][rank]
            shape = (len(own), *tensor.shape[1:]) if tensor.ndim else ()
            device = "cpu" if own else "meta"
            out[name] = Shard(
                torch.empty(shape, dtype=torch.uint8, device=device), own.start, len(tensor) if shape else 1
            )
        return out

    tables = np.array([[halo._elements_of(held(rank)[spec.name]) for spec in schema.tensors] for rank in range(world)])
    monkeypatch.setattr(halo, "_gather", lambda *_: tables)
    owners: list[int] = []
    for rank in range(world):
        assert schema_of_parts(held(rank)) == schema
        own = halo.divide(Ranks(rank, world, "s"), schema, held(rank), None)
        owners += own.chunks
        for number, spec in enumerate(schema.tensors):
            chunks = [schema.chunks[i] for i in own.chunks if schema.chunks[i].tensor == number]
            runs = sorted((run.start, run.stop) for run in own.received if run.tensor == number)
            ends = [tables[rank, number, 1], *(stop for _, stop in runs)]
            assert [start for start, _ in runs] == ends[:-1], f"{spec.name}: one after the other"
            if chunks:
                assert ends[-1] == max(chunks[-1].stop, ends[0])
            else:
                assert not runs
    assert sorted(owners) == list(range(len(schema.chunks)))


def test_a_window_counts_in_the_whole_tensor() -> None:
    window = Window(np.arange(5, 9, dtype=np.uint16), 5)
    assert window[6:8].tolist() == [6, 7]
    for beyond in (slice(4, 6), slice(8, 10)):
        with pytest.raises(IndexError, match="are not in the window"):
            window[beyond]


def test_digests_of_shards_add_up_also_in_a_wider_type() -> None:
    tensors = {n: t for n, t in made(0).items() if t.dtype == torch.bfloat16}
    shards = [
        {n: Shard(t[part].float(), part.start, len(t)) for n, t in tensors.items()}
        for part in (slice(0, 2), slice(2, 97))
    ]
    total = sum(digest_of_parts(own, dict.fromkeys(tensors, torch.bfloat16)) for own in shards)
    assert digest_text(total) == weights_digest(tensors)
    with pytest.raises(ValueError, match="cut holds values"):
        digest_of_parts({"cut": Shard(torch.full((1, 6000), 1 / 3), 0, 97)}, {"cut": torch.bfloat16})
