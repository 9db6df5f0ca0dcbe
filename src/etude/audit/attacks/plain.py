"""The graders that others use, for comparison: the agent's own tree, its exit code, in a subprocess or in bwrap."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.audit.attacks.library import BROKEN, PATH, Library
from etude.audit.attacks.report import AttackResult
from etude.audit.attacks.submissions import HONEST, NOTHING, SUBMISSIONS, Submission

# Left out here: without a box they would write outside of their folder, or search the whole machine.
_HARMFUL = frozenset({"report files and descriptors", "expected value from the file", "daemon"})
_SECONDS, _HANGING = 120.0, 20.0  # a busy machine must not look like a grader that sees through an attack
_SITE = Path(pytest.__file__).parents[1]  # also where Python would not look for it by itself


def compare(
    library: Library, results: list[AttackResult], absent: dict[str, str], progress: Callable[[str], None]
) -> None:
    """Append the results of graders that go by the exit code of pytest; `absent` gets those that are not installed."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        absent["bwrap"] = "it is not installed"
    for where in ("subprocess", *(("bwrap",) if bwrap else ())):
        for attack in (HONEST, NOTHING, *SUBMISSIONS):
            if attack.line or attack.name in _HARMFUL:
                continue
            progress(f"{attack.item} {attack.name} ({where})")
            passed = _graded(library, attack, bwrap if where == "bwrap" else None)
            wrong = passed is not (attack is HONEST)
            problem = ("rewarded" if passed else "not rewarded") if wrong else ""
            results.append(AttackResult(attack.item, attack.name, where, "pass" if passed else "fail", problem))


def _graded(library: Library, attack: Submission, bwrap: str | None) -> bool:
    with tempfile.TemporaryDirectory(prefix="etude-attack-") as folder:
        root = Path(folder) / "tree"
        shutil.copytree(library.image.repository, root)
        shutil.copytree(library.hidden, root, dirs_exist_ok=True)
        for path, text in {PATH: BROKEN, **attack.files}.items():
            target = root / path
            if text is None:
                target.unlink(missing_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
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
        seconds = _HANGING if attack.name == "hang" else _SECONDS
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0
