"""Common graders, for comparison: pytest's exit code in the agent's own tree, in a subprocess or in bwrap."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.audit.attacks.library import TASK
from etude.audit.attacks.packs import GOLD, NOTHING, AttackPack, attempt
from etude.audit.attacks.report import AttackReport, AttackResult
from etude.sandbox import Changes, Sandbox

# Left out here: without a box they would write outside of their folder, or search the whole machine.
_HARMFUL = frozenset({"report_files_and_descriptors.sh", "expected_value_from_the_file.sh", "daemon.sh"})
_SECONDS, _HANGING = 120.0, 20.0  # long, so that a busy machine does not look like a stopped attack
_SITE = Path(pytest.__file__).parents[1]  # pytest's folder, for a Python that does not search it


async def compare(sandbox: Sandbox, pack: AttackPack, report: AttackReport, progress: Callable[[str], None]) -> None:
    """Append the results of graders that go by the exit code of pytest; `absent` gets those that are not installed."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        report.absent["bwrap"] = "it is not installed"
    for program in (GOLD, NOTHING, *pack.programs):
        if program.name in _HARMFUL:
            continue
        changes, _ = await attempt(sandbox, pack.data, TASK, program)
        for where in ("subprocess", *(("bwrap",) if bwrap else ())):
            progress(f"{program.item} {program.title} ({where})")
            seconds = _HANGING if program.name == "hang.sh" else _SECONDS
            passed = _graded(pack, changes, seconds, bwrap if where == "bwrap" else None)
            problem = "" if passed is (program is GOLD) else "rewarded" if passed else "not rewarded"
            verdict = "pass" if passed else "fail"
            report.results.append(AttackResult(program.item, program.title, where, verdict, problem))


def _graded(pack: AttackPack, changes: Changes, seconds: float, bwrap: str | None) -> bool:
    with tempfile.TemporaryDirectory(prefix="etude-attack-") as folder:
        root = Path(folder) / "tree"
        shutil.copytree(pack.data.repository, root)
        shutil.copytree(pack.data.hidden, root, dirs_exist_ok=True)
        broken = {path: text.encode() for path, text in TASK.changes.items()}
        for path, data in {**broken, **changes}.items():
            target = root / path
            if data is None:
                target.unlink(missing_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
        if bwrap is not None:
            binds = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--bind", folder, folder]
            command = [bwrap, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", *binds, *command]
        environment = {
            "PYTHONPATH": f"{root}/src:{_SITE}",
            "PATH": "/usr/bin:/bin",
            "HOME": folder,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0
