"""Members of a replica, each a process: forked from one that has imported everything, one per connection.

python replica_member.py SOCKET. A member reads its arguments as a JSON object, answers "ready", then looks once per
line and tells what is live.
"""

import json
import os
import signal
import socket
import sys

import numpy as np

from etude.errors import UserError
from etude.store import open_store
from etude.weights.payloads import DamagedVersion
from etude.weights.receiver import LiveTensors, Receiver, WeightsMismatch
from etude.weights.replica import CoordinatorVote, NotTogether, ReplicaMember
from etude.weights.ulpd import codec
from etude.weights.ulpd.chunk_grid import bits, schema_of
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.small_tensors import nudged, tensors, widened


def play(connection: socket.socket) -> None:
    with connection.makefile("rw") as file:
        arguments = json.loads(file.readline())
        os.environ["ETUDE_FAILPOINT"] = arguments["failpoint"]
        live = widened(tensors(9))
        votes = CoordinatorVote(arguments["coordinator"], arguments["name"])
        member = ReplicaMember(Receiver(open_store(arguments["store"]), live), votes)
        print("ready", file=file, flush=True)
        for _ in file:
            error = ""
            try:
                member.advance(lambda version, apply: apply())
            except (DamagedVersion, UserError, NotTogether, WeightsMismatch) as e:
                error = f"{type(e).__name__}: {e}"
            told = {"version": member.receiver.version, "digest": weights_digest(live), "error": error}
            print(json.dumps(told), file=file, flush=True)


def warm_up() -> None:
    """Compile what members run, once for all. No store is opened: its threads would not survive the fork."""
    old, live = tensors(0), widened(tensors(0))
    grid, before, after = schema_of(old), *({n: bits(t).copy() for n, t in v.items()} for v in (old, nudged(old, 1)))
    base = codec.digests(grid, before)
    codec.apply(
        grid, {n: a.copy() for n, a in before.items()}, base ^ np.uint64(1), codec.encode_anchor(grid, before, base)
    )
    codec.apply(grid, before, base, codec.encode_changes(grid, before, after, base, codec.Codec())[0])
    spec = grid.tensors[0]
    change = LiveTensors(live).stage(spec, np.arange(spec.elements), after[spec.name])
    LiveTensors(live).write(change)
    assert LiveTensors(live).holds(change)
    assert weights_digest(old)


warm_up()
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listening", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        accepted, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            play(accepted)
            os._exit(0)
        accepted.close()
