"""Ranks that publish shards: `python -m tests.helpers.publishing_ranks FOLDER` writes the stores that
tests/weights/test_publishing_by_ranks.py reads. One process imports, and its forks are the ranks of all cases."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from etude.errors import RunFailed, UserError
from etude.store import open_store
from etude.weights import newest_manifest, publisher
from etude.weights.publisher import Publisher
from etude.weights.ranks import Ranks, Shard, digest_of_parts
from etude.weights.ulpd.chunk_grid import schema_of

VERSIONS = 9
WORLDS = (1, 2, 3, 4)
ANCHOR_PART = 300_000
MOVES = (1, 2, 4, 1)
"""Worlds of one run, each resumed from the one before after two versions."""
SHAPES = {
    "cut": ((97, 3000), torch.bfloat16),  # a chunk has 87 rows
    "experts": ((5, 40, 1500), torch.float32),
    "flat": ((300_001,), torch.float32),
    "long": ((3, 2**18 + 5), torch.bfloat16),  # a row is two chunks
    "packed": ((97, 3000), torch.uint8),
    "norm": ((3,), torch.float32),  # fewer rows than ranks
    "none": ((0, 3), torch.bfloat16),
    "scale": ((), torch.float32),
}


@cache
def made(version: int) -> dict[str, torch.Tensor]:
    """The whole tensors of a version; few elements move from one to the next."""
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(number)
        values = torch.rand(shape, generator=generator) * 100
        moves = torch.randint(0, 4 * VERSIONS, shape, generator=generator)  # the version at which an element moves
        tensors[name] = torch.where(moves <= version, values * 1.01 + 1, values).to(dtype)
    return tensors


def rows_of(world: int, rank: int, total: int) -> range:
    """The rows of a rank. Of three, the ranks are not in the order of the rows; of four, one has none."""
    place, count = {3: ((rank + 1) % 3, 3), 4: (rank - (rank > 1), 3 if rank != 1 else 0)}.get(world, (rank, world))
    each = -(-total // max(count, 1))
    return range(min(place * each, total), min((place + 1) * each, total)) if count else range(0)


def parts(tensors: dict[str, torch.Tensor], world: int, rank: int) -> dict[str, torch.Tensor | Shard]:
    """What a rank holds of the tensors; the scalar is on rank 0."""
    out: dict[str, torch.Tensor | Shard] = {}
    for name, tensor in tensors.items():
        if tensor.ndim:
            own = rows_of(world, rank, len(tensor))
            out[name] = Shard(tensor[own.start : own.stop], own.start, len(tensor))
        else:
            out[name] = tensor if rank == 0 else tensor.to("meta")
    return out


Groups = dict[int, Any]


def chain(folder: Path, world: int, rank: int, group: object) -> dict:
    """All versions by one world. Returns the number of elements that this rank keeps of each tensor, and the digest of
    its shards."""
    ranks = Ranks(rank, world, f"s{world}", group)
    writer = Publisher(open_store(str(folder / f"world-{world}")), anchor_versions=3, ranks=ranks, seconds=60)
    for version in range(VERSIONS):
        writer.publish(version, parts(made(version), world, rank), (version,), {})
        writer.finish_anchor()
    assert writer._last is not None
    types = {name: dtype for name, (_, dtype) in SHAPES.items()}
    kept = {name: window.bits.size for name, window in writer._last.bits.items()}
    return {"kept": kept, "digest": digest_of_parts(parts(made(VERSIONS - 1), world, rank), types)}


def chains(folder: Path, rank: int, groups: Groups) -> dict:
    """The same versions by each world of several ranks, in a store each."""
    return {world: chain(folder, world, rank, groups[world]) for world in WORLDS[1:] if rank < world}


def moves(folder: Path, rank: int, groups: Groups) -> None:
    """One run whose ranks change."""
    store, version = open_store(str(folder / "moves")), 0
    for number, world in enumerate(MOVES):
        if rank < world:
            ranks = Ranks(rank, world, f"m{number}", groups[world])
            writer = Publisher(store, ranks=ranks, of_folder=True, seconds=60)
            if version:
                last = newest_manifest(store)
                assert last is not None
                writer.resume(last, parts(made(version - 1), world, rank))
            for now in (version, version + 1):
                writer.publish(now, parts(made(now), world, rank), (), {})
        version += 2
        dist.barrier()


def sentence(work: Callable[[], object]) -> str:
    """The error of a call."""
    try:
        work()
    except (UserError, RunFailed, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def refusals(folder: Path, rank: int, groups: Groups) -> dict:
    """What each of three ranks says of tensors that cannot be published, and then the version."""
    if rank > 2:
        return {}
    store, first = open_store(str(folder / "refusals")), made(0)
    writer = Publisher(store, ranks=Ranks(rank, 3, "r", groups[3]), seconds=60)

    def publish(version: int, held: dict) -> Callable[[], object]:
        return lambda: writer.publish(version, held, (), {})

    figures = {}
    for name, row in (("nan", 50), ("edge", 33)):  # row 33 is the first of a shard, of a chunk that began on another
        broken = first | {"cut": first["cut"].clone()}
        broken["cut"][row, 7] = float("nan")
        figures[name] = sentence(publish(0, parts(broken, 3, rank)))
    gap = parts(first, 3, rank)
    if rank == 1:
        gap["flat"] = Shard(first["flat"][:5], 0, len(first["flat"]))
    figures["gap"] = sentence(publish(0, gap))
    other = parts(first, 3, rank)
    if rank == 1:
        other["more"] = torch.ones(3)
    figures["schema"] = sentence(publish(0, other))
    writer.publish(0, parts(first, 3, rank), (), {})
    moved = Publisher(store, ranks=Ranks(rank, 3, "r2", groups[3]), seconds=60)
    last = newest_manifest(store)
    assert last is not None
    wrong = first | {"cut": first["cut"].clone()}
    wrong["cut"][96] += 1
    figures["resumed"] = sentence(lambda: moved.resume(last, parts(wrong, 3, rank)))
    figures["moved"] = sentence(publish(1, parts(first, 3, (rank + 1) % 3)))
    adapters = Publisher(
        open_store(str(folder / "adapters")),
        ranks=Ranks(rank, 3, "a", groups[3]),
        base=schema_of(first),
        seconds=60,
    )
    for version in range(2):
        whole = {name: tensor for name, tensor in made(version).items() if name in ("norm", "flat")}
        adapters.publish(version, {n: t if rank == 0 else t.to("meta") for n, t in whole.items()}, (), {})
    return figures


def failed_anchor(folder: Path, rank: int, groups: Groups) -> dict:
    """Rank 1 cannot write its part of an anchor: all say so, and begin another together."""
    if rank > 1:
        return {}
    store = open_store(str(folder / "anchors"))
    put, broken = store.put, [rank == 1]

    def refusing(key: str, data: bytes) -> None:
        if broken[0] and "00000001-anchor" in key:
            raise UserError("the store answers 500; try again")
        put(key, data)

    store.put = refusing  # pyright: ignore[reportAttributeAccessIssue]
    writer = Publisher(store, anchor_versions=1, ranks=Ranks(rank, 2, "f", groups[2]), seconds=60)
    errors: list[str] = []
    for version in (0, 1, 2, 2, 3, 4):
        errors.append(sentence(lambda v=version: writer.publish(v, parts(made(v), 2, rank), (), {})))
        writer.finish_anchor()
    return {"errors": errors}


def killed(folder: Path, rank: int, groups: Groups) -> dict:
    """Two trainers: a rank of each, 1 of three and 0 of two, dies after its object of version 1, before it announces
    that or writes the manifest."""
    world, rank, victim = (3, rank, 1) if rank < 3 else (2, rank - 3, 0)
    ranks = Ranks(rank, world, f"k{world}", groups[world])
    writer = Publisher(open_store(str(folder / f"killed-{victim}")), ranks=ranks, seconds=60)
    writer.publish(0, parts(made(0), world, rank), (), {})
    if rank == victim:
        os.environ["ETUDE_FAILPOINT"] = "publisher.payload:1"
    writer._seconds = 4.0
    return {"error": sentence(lambda: writer.publish(1, parts(made(1), world, rank), (), {}))}


def rank_of(folder: Path, name: str, cases: tuple[Callable, ...], teams: tuple[range, ...], rank: int) -> None:
    """A rank: runs the cases in order and writes what they return. `teams` are ranks that publish together."""
    count, limit = max(team.stop for team in teams), timedelta(seconds=60)
    rendezvous = dist.FileStore(str(folder / f"{name}.rendezvous"), count)
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=count, timeout=limit)
    groups: Groups = {len(team): dist.new_group(list(team), timeout=limit) for team in teams}
    results = {case.__name__: case(folder, rank, {1: None} | groups) for case in cases}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(results))


def main() -> int:
    """Runs all ranks. Returns 1 if one of them ended otherwise than planned."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder, ends = Path(sys.argv[1]), []
    torch.set_num_threads(1)
    publisher.ANCHOR_PART = ANCHOR_PART
    for version in range(VERSIONS):
        made(version)
    for name, cases, teams in (
        ("living", (chains, moves, refusals, failed_anchor), (range(2), range(3), range(4))),
        ("killed", (killed,), (range(3), range(3, 5))),
    ):
        children: list[int] = []
        for rank in range(teams[-1].stop):
            pid = os.fork()
            if pid == 0:
                signal.alarm(100)
                try:
                    rank_of(folder, name, cases, teams, rank)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(pid)
        ends.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
    print(ends, file=sys.stderr)
    return int(ends != [[0] * 4, [0, -signal.SIGKILL, 0, -signal.SIGKILL, 0]])


if __name__ == "__main__":
    sys.exit(main())
