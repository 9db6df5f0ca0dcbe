"""A member of a replica, as a process: looks once per line on its input and tells what is live.

python replica_member.py STORE COORDINATOR NAME
"""

import json
import sys

from small_tensors import tensors, widened

from etude.errors import UserError
from etude.store import open_store
from etude.weights.coordinator import Remote
from etude.weights.digest import digest
from etude.weights.member import Member, NotTogether
from etude.weights.receiver import DamagedVersion, Receiver, WeightsMismatch

store, coordinator, name = sys.argv[1:]
live = widened(tensors(9))
member = Member(Receiver(open_store(store), live), Remote(coordinator, name))
print("ready", flush=True)
for _ in sys.stdin:
    error = ""
    try:
        member.advance(lambda version, apply: apply())
    except (DamagedVersion, UserError, NotTogether, WeightsMismatch) as e:
        error = f"{type(e).__name__}: {e}"
    told = {"version": member.receiver.version, "digest": digest(live), "error": error}
    print(json.dumps(told), flush=True)
