"""Several ranks on this machine, for tests: processes that meet over gloo and call one function each.

A server process imports torch and transformers once; ranks are its forks.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.helpers.ranks import free_port

SECONDS = 240.0  # deadline of all ranks


def run(function, count, *args):
    """The results of `function(*args)` by rank, with torch.distributed set up. Raises AssertionError with a rank's
    traceback if one fails, and if they need longer than the deadline."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        results = server.Queue()
        ranks = [
            server.Process(target=_rank, args=(function, rank, count, folder, results, args)) for rank in range(count)
        ]
        for rank in ranks:
            rank.start()
        deadline, by_rank = time.monotonic() + SECONDS, {}
        try:
            while len(by_rank) < count:
                rank, result, failure = results.get(timeout=max(0.1, deadline - time.monotonic()))
                assert not failure, f"rank {rank} failed:\n{failure}"
                by_rank[rank] = result
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return [by_rank[rank] for rank in range(count)]


@dataclass(frozen=True)
class Program:
    """A rank that runs as a program of its own, and the file of what it writes."""

    process: BaseProcess
    log: Path

    def end(self, seconds=SECONDS):
        """Its exit status; minus the signal that killed it. Raises AssertionError after the deadline."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        assert code is not None, f"{self.log.name} did not end in {seconds} seconds:\n{self.log.read_text()[-3000:]}"
        return code

    @property
    def output(self):
        """What it has written."""
        return self.log.read_text()


def start(function, count, folder, *args, environments=None):
    """Starts `function(*args)` on ranks with the environment of torchrun, and variables of `environments` by rank. What
    they write is in `folder`."""
    server, port = _server(), str(free_port())
    programs = []
    for rank in range(count):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(environments or {}).get(rank, {})}
        log = Path(folder) / f"rank-{rank}.log"
        process = server.Process(target=_program, args=(function, place, str(log), args), daemon=True)
        programs.append(Program(process, log))
        process.start()
    return programs


def _server():
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.helpers.forked_ranks_preload"])
    return server


def _program(function, environment, log, args):
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    try:
        function(*args)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _rank(function, rank, count, folder, results, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(Path(folder) / "store"), count)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        results.put((rank, function(*args), ""))
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
