"""Prints what this machine gives to boxes, for `etude doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict

from etude.audit.machine import checks


def show_machine(*, as_json: bool) -> int:
    """Print the checks of this machine; exit code 0 if boxes can be made here and hold, else 1."""
    results = checks()
    ok = all(check.ok for check in results if check.needed)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in results]}, indent=1))
        return 0 if ok else 1
    for check in results:
        mark = "ok  " if check.ok else "FAIL" if check.needed else "no  "
        print(f"{mark} {check.name:32} {check.detail}" + (f"\n     cure: {check.cure}" if mark == "FAIL" else ""))
    return 0 if ok else 1
