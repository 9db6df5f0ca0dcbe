"""Several ranks on this machine, for tests: processes that meet over gloo and call one function each.

A server process imports torch and transformers once; ranks are its forks.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path

SECONDS = 120.0  # deadline of all ranks


def run(function, count, *args):
    """The results of `function(*args)` by rank, with torch.distributed set up. Raises AssertionError with a rank's
    traceback if one fails, and if they need longer than the deadline."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.helpers.forked_ranks_preload"])
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
