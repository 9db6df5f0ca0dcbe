"""The GPU kernels against the host's, bit for bit: in Triton's interpreter (`make test-triton`), or on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import UserError
from etude.store import open_store
from etude.weights import snapshots
from etude.weights.content import load
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.snapshots import HeldPart, Snapshots
from etude.weights.ulpd import kernels
from etude.weights.ulpd.chunk_grid import FORMATS, Format, schema_of
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.faulty import Faulty
from tests.helpers.small_tensors import copies, nudged, tensors

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a GPU nor TRITON_INTERPRET=1: see `make test-triton`", allow_module_level=True)
pytest.importorskip("triton")

from etude.weights.ulpd import triton_kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
BLOCK = triton_kernels.BLOCK
SEEDS = [0, 1, 1 << 31, (1 << 32) - 1, 0x8000000000000000, 0xF123456789ABCDEF]
# Both zeros, denormals, infinities, quiet and signalling NaN with payloads, of every type of that width.
SPECIAL = {
    8: [0x00, 0x80, 0x01, 0x81, 0x07, 0x7B, 0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFE, 0xFF],
    16: [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x03FF, 0x7C00, 0x7C01, 0x7E00, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0xFF80,
         0xFFC1, 0xFFFF],
    32: [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000,
         0x7FFFFFFF, 0xFFC12345, 0xFFFFFFFF],
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of DEVICE count as a GPU's, so that all that follows is what a GPU's go through."""
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: tensor.device.type == DEVICE)


def there(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(DEVICE)


def assert_as_on_the_host(form: Format, old: np.ndarray, new: np.ndarray, seed: int, first: int) -> None:
    """Digest, scan, steps and steps back are those of the host's kernels, to the last bit: all of it is integers."""
    w, signed, seed64 = form.width, form.signed, np.uint64(seed)
    positions, steps = np.empty(old.size + 2, np.int32), np.empty(old.size, form.integer)
    count, grown = kernels.scan(old, new, seed64, first, w, signed, positions, steps)
    base, target = (int(kernels.digest(part, seed64, first, w)) for part in (old, new))

    mine, other = there(old), there(new)
    assert triton_kernels.digest(mine, seed, first, w) == base
    found = triton_kernels.scan(mine, other, seed, first, w, signed)
    assert np.array_equal(found[0].cpu().numpy(), positions[:count])
    assert np.array_equal(found[1].cpu().numpy(), steps[:count])
    assert found[0].dtype == torch.int32
    assert found[1].cpu().numpy().dtype == form.integer
    assert found[2] == int(grown) == (target - base) % (1 << 64)
    assert np.array_equal(mine.cpu().numpy(), new), "the snapshot went along"
    assert np.array_equal(other.cpu().numpy(), new)
    assert triton_kernels.digest(mine, seed, first, w) == target

    assert triton_kernels.add(mine, found[0], -found[1], seed, first, w, signed) == -int(grown) % (1 << 64)
    assert np.array_equal(mine.cpu().numpy(), old), "taken back"
    assert triton_kernels.add(mine, *found[:2], seed, first, w, signed) == int(grown)
    assert np.array_equal(mine.cpu().numpy(), new)


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_every_special_pattern_becomes_every_other(dtype: str) -> None:
    form = FORMATS[dtype]
    special = np.array(SPECIAL[form.width], form.unsigned)
    assert_as_on_the_host(form, np.repeat(special, special.size), np.tile(special, special.size), SEEDS[-1], 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8"])
def test_every_pattern_there_is(dtype: str) -> None:
    form = FORMATS[dtype]
    old = np.arange(1 << form.width).astype(form.unsigned)
    assert_as_on_the_host(form, old, np.random.default_rng(0).permutation(old), SEEDS[-1], 0)


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])
def test_sizes_around_blocks(size: int, share: float) -> None:
    rng = np.random.default_rng(size)
    old = rng.integers(0, 1 << 16, size).astype(np.uint16)
    new = old.copy()
    new[rng.random(size) < share] += np.uint16(1)
    assert share < 1 or not size or (old != new).all()
    assert_as_on_the_host(FORMATS["bfloat16"], old, new, SEEDS[-1], 1 << 33)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_content(data: st.DataObject) -> None:
    form = FORMATS[data.draw(st.sampled_from(sorted(FORMATS)))]
    size = data.draw(st.integers(0, 2 * BLOCK + 50))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    old = rng.integers(0, 1 << form.width, size).astype(form.unsigned)
    new = old.copy()
    touched = rng.random(size) < data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    new[touched] = rng.integers(0, 1 << form.width, int(touched.sum()))
    if size:
        places = st.dictionaries(st.integers(0, size - 1), st.sampled_from(SPECIAL[form.width]), max_size=6)
        for place, value in data.draw(places).items():
            (old if data.draw(st.booleans()) else new)[place] = value
    seed = data.draw(st.sampled_from(SEEDS) | st.integers(0, (1 << 64) - 1))
    assert_as_on_the_host(form, old, new, seed, data.draw(st.integers(0, 1 << 40)))


@pytest.mark.parametrize("largest", [BLOCK + 3, triton_kernels.LARGEST])
@pytest.mark.parametrize(("run", "step"), [(1, 7), (5, 5), (37, 41), (BLOCK + 1, 3 * BLOCK)])
def test_rows_of_a_digest(monkeypatch, run, step, largest) -> None:
    monkeypatch.setattr(triton_kernels, "LARGEST", largest)
    rows = 3 * BLOCK // run + 2
    values = np.arange(rows * run).astype(np.uint16)
    starts = [11 + (1 << 33) + row * step for row in range(rows)]
    digest = sum(int(kernels.digest(values[i * run :][:run], np.uint64(7), s, 16)) for i, s in enumerate(starts))
    assert triton_kernels.digest_rows(there(values), run, step, 7, starts[0], 16) == digest % 2**64
    assert int(kernels.digest_rows(values, run, step, np.uint64(7), starts[0], 16)) == digest % 2**64


def test_a_digest_of_more_than_one_launch(monkeypatch) -> None:
    monkeypatch.setattr(triton_kernels, "LARGEST", BLOCK + 3)
    values = np.arange(3 * BLOCK).astype(np.uint16)
    assert triton_kernels.digest(there(values), 7, 11, 16) == int(kernels.digest(values, np.uint64(7), 11, 16))


# Where CUDA tensors arrive -------------------------------------------------------------------------------------------


def chain(count: int):
    made = [tensors(0) | {"frozen": torch.ones(70, dtype=torch.bfloat16)}]
    for version in range(1, count):
        made.append(nudged(made[-1], version) | {"frozen": made[0]["frozen"]})
    return made


def moved(of):
    return {name: t.to(DEVICE) for name, t in copies(of).items()}


def held(schema, live):
    return [HeldPart(spec, live[spec.name]) for spec in schema.tensors]


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].cpu().view(torch.int16), b[n].view(torch.int16)) for n in b)


@pytest.mark.parametrize("largest", [triton_kernels.LARGEST, 300])
def test_only_changes_travel_after_the_first_copy(gpu, monkeypatch, largest) -> None:
    monkeypatch.setattr(triton_kernels, "LARGEST", largest)
    copied: list[int] = []
    here = snapshots._here
    monkeypatch.setattr(snapshots, "_here", lambda flat, tail: copied.append(flat.numel()) or here(flat, tail))
    made = chain(4)
    schema = schema_of(made[0])
    taker, before = Snapshots(), None
    for version, now in enumerate(made):
        live = moved(now)
        finish = taker.take(held(schema, live))
        for tensor in live.values():
            tensor.zero_()  # the next step writes over the weights
        taken = finish()
        assert len(copied) == len(schema.tensors), f"version {version}"
        for name, tensor in now.items():
            assert np.array_equal(taken[name].bits, tensor.view(torch.uint16).flatten().numpy())
        if before is not None:
            assert taken["frozen"].bits is before["frozen"].bits
            assert taken["b"].bits is not before["b"].bits, "what was given out is never written to"
        before = taken


def test_what_was_never_asked_for_is_copied_whole(gpu) -> None:
    made = chain(3)
    schema = schema_of(made[0])
    taker = Snapshots()
    taker.take(held(schema, moved(made[0])))()
    taker.take(held(schema, moved(made[1])))  # its thread died
    taken = taker.take(held(schema, moved(made[2])))()
    assert all(np.array_equal(taken[n].bits, t.view(torch.uint16).flatten().numpy()) for n, t in made[2].items())


def test_of_a_shard_only_changes_and_the_tail_travel(gpu) -> None:
    made = chain(3)
    schema, rows = schema_of(made[0]), slice(7, 29)
    spec = next(spec for spec in schema.tensors if spec.name == "b")
    taker, copies_of = Snapshots(), []
    for now in (*made, made[-1]):
        bits = now["b"].view(torch.uint16).flatten().numpy()
        live = now["b"][rows].clone().to(DEVICE)
        finish = taker.take([HeldPart(spec, live, 7 * 25, bits[29 * 25 : 31 * 25])])
        live.zero_()
        window = finish()["b"]
        assert np.array_equal(window[7 * 25 : 31 * 25], bits[7 * 25 : 31 * 25])
        copies_of.append(window.bits)
    assert copies_of[2] is copies_of[3], "nothing has changed"
    assert copies_of[1] is not copies_of[2]
    moved_on = taker.take([HeldPart(spec, made[0]["b"][8:29].to(DEVICE), 8 * 25, None)])()["b"]
    assert np.array_equal(moved_on.bits, made[0]["b"][8:29].view(torch.uint16).flatten().numpy())


def test_a_host_copy_that_went_astray_is_noticed(gpu) -> None:
    made = chain(2)
    schema = schema_of(made[0])
    taker = Snapshots()
    first = taker.take(held(schema, moved(made[0])))()
    changed = torch.nonzero((made[0]["b"] != made[1]["b"]).flatten())[0].item()
    first["b"].bits[changed] ^= 1
    with pytest.raises(RuntimeError, match="changes of b did not arrive"):
        taker.take(held(schema, moved(made[1])))()


def test_versions_published_from_a_gpu_are_those_of_the_host(gpu, monkeypatch, tmp_path: Path) -> None:
    made = chain(4)
    stores = [Faulty(open_store(str(tmp_path / name))) for name in ("gpu", "host")]
    manifests = []
    for store, place in zip(stores, (moved, copies), strict=True):
        if place is copies:
            monkeypatch.setattr(kernels, "on_gpu", lambda tensor: False)
        publisher = Publisher(store)
        publisher.publish(0, place(made[0]), (), {})
        publisher.publish(1, place(made[1]), (), {})
        store.refuse = lambda key: key.startswith("payloads/")
        with pytest.raises(UserError):
            publisher.publish(2, place(made[3]), (), {})
        store.refuse = lambda key: False
        manifests.append([publisher.publish(n, place(made[n]), (), {}) for n in (2, 3)])
        assert all(equal(load(store, n)[1], made[n]) for n in range(4))
        resumed = Publisher(store)
        resumed.resume(manifests[-1][-1], place(made[3]))
        manifests[-1].append(resumed.publish(4, place(made[2]), (), {}))
    for mine, hosts in zip(*manifests, strict=True):
        assert (mine.digest, mine.changed) == (hosts.digest, hosts.changed)
        # Objects are named by the digests of their bytes; the session is at the end of the name.
        assert [part.digest for part in mine.delta] == [part.digest for part in hosts.delta]


@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_live_tensors_are_digested_where_they_are(gpu, tmp_path: Path, wide: torch.dtype) -> None:
    store, made = open_store(str(tmp_path / "weights")), chain(2)
    publisher = Publisher(store)
    expected = [publisher.publish(n, of, (), {}).digest for n, of in enumerate(made)]
    live = {name: torch.zeros_like(t, dtype=wide, device=DEVICE) for name, t in made[0].items()}
    receiver = Receiver(store, live)
    receiver.apply(receiver.poll(0))
    assert weights_digest(live) == expected[0]
    receiver.apply(receiver.poll(1))
    assert weights_digest(live) == expected[1]
    assert receiver.scrub(1.0) == []
    live["b"].view(-1)[17] += 1.0
    damaged = receiver.scrub(1.0)
    assert len(damaged) == 1
    receiver.write_repair(receiver.find_repair(damaged))
    assert weights_digest(live) == expected[1]


# Machine code --------------------------------------------------------------------------------------------------------

BUILD = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from etude.weights.ulpd import triton_kernels as t

architecture, w, signed = map(int, sys.argv[1:])
u, s, lists = f"*u{w}", f"*i{w}", {"positions": "*i32", "steps": f"*i{w}"}
constants = {"W": w, "SIGNED": bool(signed), "BLOCK": t.BLOCK}
for kernel, types in (
    (t.digest_kernel, {"bits": u, "start": "i64", "n": "i32", "sums": "*i64"}),
    (t.count_kernel, {"old": u, "new": u, "n": "i32", "counts": "*i32"}),
    (t.compact_kernel, {"old": u, "new": u, "n": "i32", "places": "*i64"} | lists),
    (t.add_kernel, {"bits": u, "start": "i64", "n": "i32", "sums": "*i64"} | lists),
):
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items() if name in names},
    )
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    print(len(built.asm["cubin"]))
"""


@pytest.mark.parametrize(("architecture", "dtype"), [(80, "float32"), (90, "bfloat16"), (100, "uint8")])
def test_kernels_compile_to_machine_code(tmp_path: Path, architecture: int, dtype: str) -> None:
    """The interpreter takes what the compiler may not. No GPU is needed: Triton brings the assembler."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    form = FORMATS[dtype]
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(architecture), str(form.width), str(int(form.signed))],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len([size for size in done.stdout.split() if int(size) > 1000]) == 4
