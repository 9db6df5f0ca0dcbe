"""The ranks that train together: their places in the mesh, and the few things that they say to each other.

Every rank is a process with a device of its own, and runs the same program. Rank 0 alone reads the ledger and writes
manifests and metrics; what it decides reaches the others through `World.agree`. The environment is that of torchrun,
whoever starts the ranks:

    RANK, WORLD_SIZE           this rank, and their number
    LOCAL_RANK                 its device on this machine
    MASTER_ADDR, MASTER_PORT   where rank 0 listens; to a loopback address only this machine's processes can connect

    rank = (replica * shard + part) * context + slice

Without these variables a process is a world of its own, which has no collective and copies nothing.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from etude.config import MeshConfig
from etude.errors import RunFailed, UserError, first_line
from etude.processes import LISTENER, place_number

T = TypeVar("T")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 5.0  # at work that only rank 0 does
_SILENT_SECONDS = 4 * _BEAT_SECONDS  # after which a rank without a word has ended, if a collective has failed
_GONE = "rank 0 has ended: its log has the reason; resume the run"
_JOIN_SECONDS = 600.0
"""Deadline of the ranks' meeting at the start, in which each imports its libraries."""


@dataclass(frozen=True)
class World:
    """This rank among those that train together. `context` is the group of the ranks with parts of the same rows, None
    if rows are whole; `control` that of all ranks for the host's memory."""

    rank: int = 0
    mesh: MeshConfig = field(default_factory=MeshConfig)
    device: str = "cpu"
    context: Any = None
    control: Any = None
    watch: _Watch | None = None

    @classmethod
    def join(cls, mesh: MeshConfig, device: str, seconds: float) -> World:
        """Meets the other ranks. `seconds` is the deadline of a wait for another rank. Raises UserError if the
        environment names another number of ranks, RunFailed if they do not come."""
        size = place_number("WORLD_SIZE", "1")
        if size != mesh.ranks:
            raise UserError(
                f"trainer.mesh needs {mesh.ranks} ranks, and this process is one of {size} (WORLD_SIZE): start "
                f"{mesh.ranks}, or change trainer.mesh"
            )
        if size == 1:
            return cls(0, mesh, device)
        rank = place_number("RANK")
        local = place_number("LOCAL_RANK", str(rank))
        if rank >= size:
            raise UserError(f"RANK is {rank} in the environment, and WORLD_SIZE {size}: ranks are counted from 0")
        kind = torch.device(device).type
        own = f"{kind}:{local}" if kind != "cpu" else device
        if kind == "cuda":
            torch.cuda.set_device(local)
        backend = "nccl" if kind == "cuda" else "gloo"
        try:
            store = _store(rank, size)
            limit = timedelta(seconds=2 * seconds)  # the watch ends the process before, and says why
            rendezvous = dist.PrefixStore("etude", store)
            dist.init_process_group(backend, store=rendezvous, rank=rank, world_size=size, timeout=limit)
            control = dist.new_group(backend="gloo", timeout=limit) if backend != "gloo" else dist.group.WORLD
            context = None
            for first in range(0, size, mesh.context):
                ranks = list(range(first, first + mesh.context))
                group = dist.new_group(ranks, timeout=limit) if mesh.context > 1 else None
                context = group if rank in ranks else context
        except (RuntimeError, OSError) as e:  # torch's own errors are RuntimeErrors
            raise RunFailed(f"rank {rank} did not meet the other {size - 1} ranks: {first_line(e)}") from e
        watch = _Watch(store.clone(), rank, size, seconds)
        watch.start()
        return cls(rank, mesh, own, context, control, watch)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.ranks

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes for people and for other processes."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The part of the batch that this rank computes, counted from 0."""
        return self.rank // self.mesh.context

    @property
    def replica(self) -> int:
        """The copy of the model that this rank holds a part of, counted from 0."""
        return self.rank // (self.mesh.shard * self.mesh.context)

    def agree(self, value: Callable[[], T], kind: type[T] | Any = Any) -> T:
        """Rank 0's value, which it alone computes, on all ranks. It crosses as MessagePack; `kind` is its type."""
        if self.size == 1:
            return value()
        own = value() if self.first else None
        data = msgspec.msgpack.encode(own) if self.first else b""
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self.control)
        whole = torch.zeros(int(length), dtype=torch.uint8)
        if self.first:
            whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(whole, 0, group=self.control)
        return cast(T, own) if self.first else msgspec.msgpack.decode(whole.numpy().tobytes(), type=kind)

    def gathered(self, value: T, kind: type[T] | Any = Any) -> list[T]:
        """The values of all ranks, in their order, on each. They cross as MessagePack."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.control)
        longest = max(int(length) for length in lengths)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.nn.functional.pad(data, (0, longest - len(data))), group=self.control)
        pairs = zip(parts, lengths, strict=True)
        return [msgspec.msgpack.decode(part[: int(n)].numpy().tobytes(), type=kind) for part, n in pairs]

    def only_first(self, work: Callable[[], object]) -> None:
        """Runs `work` on rank 0, however long it takes, while the others wait. Raises rank 0's UserError on all."""
        if self.size == 1:
            work()
            return
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work) if self.first else None
            while (end := self.agree(lambda: _end_of(cast(Any, future)), list[str] | None)) is None:
                pass
        if future is not None:
            future.result()
        elif end:
            raise (UserError if end[0] else RunFailed)(end[1])

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        of_all = torch.tensor([number])
        dist.all_reduce(of_all, dist.ReduceOp.MAX, group=self.control)
        return int(of_all)

    def total(self, tensors: Iterable[Tensor]) -> None:
        """Replaces each tensor by its sum over all ranks."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def at(self, place: str) -> None:
        """Says where this rank is, for the sentence about one that does not come. Call it equally often on all."""
        if self.watch is not None:
            self.watch.at(place)

    @contextmanager
    def named_failures(self) -> Iterator[None]:
        """A context in which the error of a collective becomes a RunFailed that names the rank at fault."""
        try:
            yield
        except RuntimeError as e:
            if self.watch is None or isinstance(e, (UserError, RunFailed)):
                raise
            if (culprit := self.watch.culprit()) is None:
                raise
            raise RunFailed(culprit) from e

    def close(self) -> None:
        """Leaves the other ranks, at the end of the program."""
        if self.size > 1:
            assert self.watch is not None
            dist.barrier(group=self.control)
            self.watch.stop()
            dist.destroy_process_group()


def _end_of(future: Future[object]) -> list[str] | None:
    """None if the work goes on after a moment, [] if it is done; else the sentence of its error, behind a mark of a
    user's error."""
    try:
        error = future.exception(_LOOK_SECONDS)
    except TimeoutError:
        return None
    if error is None:
        return []
    return ["user", str(error)] if isinstance(error, UserError) else ["", f"rank 0 failed: {first_line(error)}"]


def _store(rank: int, size: int) -> Any:
    """The store of the rendezvous. torchrun's agent has it already; else rank 0 makes it."""
    if not (host := os.environ.get("MASTER_ADDR", "")):
        raise UserError("MASTER_ADDR is missing in the environment: it is the address of rank 0's machine")
    port = place_number("MASTER_PORT")
    limit = timedelta(seconds=_JOIN_SECONDS)
    own = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options: dict[str, Any] = {}
    if host in _LOOPBACK:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        if own:  # by default a store listens at all addresses of the machine
            inherited = os.environ.pop(LISTENER, None)
            listens = int(inherited) if inherited else socket.create_server((host, port)).detach()
            options["master_listen_fd"] = listens
    return dist.TCPStore(host, port, size, own, timeout=limit, wait_for_workers=False, **options)


class _Watch(threading.Thread):
    """Tells the other ranks once a second where this one is, and ends the process if one of them stays behind."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        super().__init__(name="ranks", daemon=True)
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        self._count, self._place, self._beat = 0, "the start", 0
        self._ended = threading.Event()
        self._unanswered = 0  # own beats since the store has answered
        # Of each other rank: its last word, or the last number of its places, and when that was new.
        self._seen: dict[tuple[int, bool], tuple[str, float]] = {}
        self._lock = threading.Lock()
        store.set(f"rank/{rank}", f"0|0|{self._place}")  # a rank that ends within the first second is named, too

    def at(self, place: str) -> None:
        """Says where this rank is."""
        self._count, self._place = self._count + 1, place

    def stop(self) -> None:
        """Ends the watch."""
        self._ended.set()

    def run(self) -> None:
        """Ends the process with 1, after a sentence, if another rank stays behind for longer than the deadline."""
        threading.Thread(target=self._outwait, name="ranks-store", daemon=True).start()
        while not self._ended.wait(_BEAT_SECONDS):
            try:
                behind = self._look(self._seconds)
                self._unanswered = 0
            except RuntimeError:  # collectives fail by themselves, over gloo at once
                behind = _GONE
                self._ended.wait(_SILENT_SECONDS)
            if behind is not None:
                self._give_up(behind)

    def _outwait(self) -> None:
        """Ends the process with 1, after a sentence, if the store does not answer: rank 0 has it, and may be stopped.
        Own beats count, not a clock: this process may have been stopped, too."""
        while not self._ended.wait(_BEAT_SECONDS):
            self._unanswered += 1
            if self._unanswered * _BEAT_SECONDS > self._seconds + _SILENT_SECONDS:
                self._give_up(
                    f"rank 0 has ended or hangs: it does not answer rank {self._rank}, which waits at {self._place!r}; "
                    "see the log of rank 0, then resume"
                )

    def _give_up(self, sentence: str) -> None:
        if not self._ended.is_set():
            print(f"etude: {sentence}", file=sys.stderr, flush=True)
            os._exit(1)

    def culprit(self) -> str | None:
        """A sentence about the rank that has ended or hangs, after the failure of a collective; None if all live."""
        deadline = time.monotonic() + 2 * _SILENT_SECONDS
        while time.monotonic() < deadline:
            try:
                behind = self._look(_SILENT_SECONDS, beats=True)
            except RuntimeError:
                return _GONE
            if behind is not None:
                return behind
            time.sleep(_BEAT_SECONDS)
        return None

    def _look(self, limit: float, *, beats: bool = False) -> str | None:
        with self._lock:
            self._beat += 1
            self._store.set(f"rank/{self._rank}", f"{self._count}|{self._beat}|{self._place}")
            now = time.monotonic()
            for rank in range(self._size):
                if rank == self._rank or not self._store.check([f"rank/{rank}"]):
                    continue
                word = cast(bytes, self._store.get(f"rank/{rank}")).decode()
                count, _, place = word.split("|", 2)
                # A rank that is ahead or level and alive may wait for this one.
                alive = beats or int(count) >= self._count
                key = word if alive else count
                last, since = self._seen.get((rank, alive), ("", now))
                if last != key:
                    self._seen[rank, alive] = key, now
                elif now - since > limit:
                    return (
                        f"rank {rank} has ended or hangs: the last that it said was {place!r}, and rank {self._rank} "
                        f"waits at {self._place!r} for {now - since:.0f} seconds; see the log of rank {rank}, then "
                        "resume"
                    )
        return None
