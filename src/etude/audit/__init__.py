"""Checks of a machine or a run, above everything that they check: `etude doctor` runs them.

`attacks/` is the attack suite on boxes and graders, with its programs against graders in `packs/`; `harden/` plays
programs on the tasks of a dataset; `parity/` compares boxes with production machines; `machine.py` checks this machine;
`mismatch.py`, `rescoring.py` and `replay.py` check a run; `model_check.py` and `architectures/` check
models. `cli/doctor_reports.py`
prints the results.
"""

PUBLIC = (
    "architectures.page",
    "architectures.table",
    "attacks",
    "harden",
    "machine",
    "mismatch",
    "model_check",
    "parity",
    "replay",
)
