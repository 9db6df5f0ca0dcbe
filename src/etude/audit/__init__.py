"""Checks of a machine or a run, above everything that they check: `etude doctor` runs them.

`attacks/` is the attack suite on boxes and graders, whose programs against graders lie in `packs/`; `parity/` tells
boxes from production machines, `machine.py` says what this machine gives to boxes, `mismatch.py` and `replay.py` look
into a run. `cli/doctor_reports.py` prints.
"""

PUBLIC = ("architectures.page", "architectures.table", "attacks", "machine", "mismatch", "parity", "replay")
