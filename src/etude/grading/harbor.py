"""Grades foreign Harbor tasks: `tests/test.sh` runs on the final state of the agent's box, in a box of its own.

Harbor runs the tests where the agent worked. Here only files of the agent's box are kept: those that differ from the
image, executable bits, links and empty folders. Files that would steer Python or pytest are set aside, unless the
task's own solution writes them. The tests come in with this box and run the agent's files in it, with the right to
write a reward: such tests are decided inside of the tested process (docs/threat-model.md).
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from etude.grading.grade import MAX_CHANGES, Grade
from etude.records import Outcome
from etude.renderers import escaped, one_line
from etude.sandbox import WORKSPACE, Box, BoxError, Changes, Image, Limits, NotFound, Sandbox

HARBOR_STATE = ".root/.state"  # file of the work tree with the state that a change set cannot hold
LOGS = ".root/logs"
_MOUNT = "/opt/given"
STATE_SECONDS = 30.0
PREPARE_SECONDS = 30.0
_MAX_REWARD = 1 << 16
_STEERING = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "pytest.py"}
    | {"sitecustomize.py", "usercustomize.py"}
)
_METADATA = (".dist-info/entry_points.txt", ".egg-info/entry_points.txt")  # names pytest's plugins
_NOTE = (
    f"( cd {WORKSPACE} && /usr/bin/find . \\( -path ./{LOGS} -o -path ./.root/solution \\) -prune -o "
    f"\\( -type d -empty -printf 'd %P\\0' -o -type l -printf 'l %P\\0%l\\0' -o -type f -perm /111 -printf 'x %P\\0' "
    f"\\) > {HARBOR_STATE} ) 2>/dev/null"
)
_RESTORE = f"""
import os
os.chdir({WORKSPACE!r})
ours = (b".root/logs", b".root/tests", b".root/solution")
try:
    parts = iter(open({HARBOR_STATE!r}, "rb").read().split(b"\\0"))
except OSError:
    parts = iter(())
for part in parts:
    kind, path = part[:2], part[2:]
    try:
        if kind == b"d ":
            os.makedirs(path, exist_ok=True)
        elif kind == b"l ":
            target = next(parts)
            if not os.path.lexists(path) and not path.startswith(ours):
                os.makedirs(os.path.dirname(path) or b".", exist_ok=True)
                os.symlink(target, path)
        elif kind == b"x " and not os.path.islink(path):
            os.chmod(path, os.stat(path).st_mode | 0o111)
    except OSError:
        pass
"""


@dataclass(frozen=True)
class HarborTests:
    """The tests of a task: the folder of tests/, the folder in which they run, and the part of the agent's state that
    they see."""

    folder: Path
    workdir: str
    seconds: float
    environment: Mapping[str, str]
    allowed: Collection[str] = ()  # files that steer Python or pytest and belong to the solution


async def note_state(box: Box) -> None:
    """Write the state that a change set cannot hold into a file of the box. Raises BoxError whose payer is "infra"."""
    try:
        await box.exec(_NOTE, STATE_SECONDS)
    except BoxError as e:  # an agent may have broken its shell
        if e.payer == "infra":
            raise


def taken_changes(changes: Changes, allowed: Collection[str] = ()) -> tuple[dict[str, bytes | None], list[str]]:
    """(files to grade, paths that are set aside)."""
    kept: dict[str, bytes | None] = {}
    aside: list[str] = []
    for path in sorted(changes):
        steering = PurePosixPath(path).name in _STEERING or path.endswith((".pth", ".pyc", *_METADATA))
        ours = path.startswith(tuple(f".root/{name}/" for name in ("logs", "tests", "solution")))
        if (steering and path not in allowed) or ours or len(kept) >= MAX_CHANGES:
            aside.append(path)
        else:
            kept[path] = changes[path]
    return kept, aside


async def run_solution(
    sandbox: Sandbox, image: Image, folder: Path, workdir: str, limits: Limits, seconds: float
) -> Changes:
    """The change set of the reference solution: `solve.sh` of the solution's folder, run in a box for at most
    `seconds`. Raises BoxError."""
    box = await sandbox.create(_with(image, "solution", folder), limits, bare=True)
    try:
        line = f"cp -R {_MOUNT}/. /solution/; cd {shlex.quote(workdir)} && exec bash /solution/solve.sh"
        await box.exec(f"( {line} ) < /dev/null", seconds)
        await note_state(box)
        return {path: data for path, data in (await box.changes()).items() if not path.startswith(".root/solution/")}
    finally:
        await box.close()


async def grade_harbor(sandbox: Sandbox, tests: HarborTests, image: Image, changes: Changes, limits: Limits) -> Grade:
    """Run the tests on `image` with `changes`. They write the reward to /logs/verifier, from 0 to 1; only 1 passes.
    Raises BoxError, payer infra."""
    kept, aside = taken_changes(changes, tests.allowed)
    note = f"; set aside {len(aside)}: {', '.join(map(escaped, aside[:3]))}"[:200] if aside else ""
    flags = ("tests-touched",) if aside else ()
    environment = {**image.environment, **tests.environment}
    image = _with(replace(image, environment=environment), "tests", tests.folder)
    box = await sandbox.create(image, limits, bare=True)
    try:
        try:
            await _lay(box, kept)
            copy = f"cp -R {_MOUNT}/. /tests/; mkdir -p /logs/verifier"
            await box.exec(f"python3 -I -c {shlex.quote(_RESTORE)}; {copy}", PREPARE_SECONDS)
            line = f"( cd {shlex.quote(tests.workdir)} && exec bash /tests/test.sh ) < /dev/null"
            done = await box.exec(line, tests.seconds)
        except BoxError as e:
            if e.payer == "infra":
                raise
            return Grade(Outcome.SCORED, 0.0, False, f"the state cannot be graded: {e}{note}", None, flags)
        reward, why = await _reward(box)
    finally:
        await box.close()
    if done.timed_out:
        late = f"the tests did not end within {tests.seconds:.0f} s{note}"
        return Grade(Outcome.SCORED, 0.0, False, late, None, flags)
    passed = reward >= 1.0 - 1e-9
    ending = "" if passed else f"; their last words: {one_line(' '.join(done.output.split())[-200:], 200)}"
    return Grade(Outcome.SCORED, reward, passed, f"{why}{ending}{note}", None, flags)


def _with(image: Image, name: str, folder: Path) -> Image:
    """The image with a folder that its boxes copy to /`name`, where scripts may write."""
    return replace(image, mounts={**image.mounts, _MOUNT: folder}, places={**image.places, f"/{name}": f".root/{name}"})


async def _lay(box: Box, changes: Changes) -> None:
    """Write files into a box before its first command."""
    for path, data in changes.items():
        if data is None:
            try:
                await box.delete(path)
            except NotFound:
                continue
        else:
            await box.write(path, data)


async def _reward(box: Box) -> tuple[float, str]:
    """The reward that the tests wrote: a number in reward.txt, or numbers by name in reward.json, of which `reward`
    counts, else the mean."""
    for name in ("reward.txt", "reward.json"):
        try:
            text = (await box.read(f"{LOGS}/verifier/{name}", _MAX_REWARD)).decode("utf-8", "replace").strip()
        except BoxError as e:
            if e.payer == "infra":
                raise
            continue
        return read_reward(name, text)
    return 0.0, "the tests wrote no reward"


def read_reward(name: str, text: str) -> tuple[float, str]:
    """The reward in `text` of the file `name`, and the reason. The reward is 0 unless the text is a finite number,
    since the agent may have written the file."""
    try:
        value = float(text) if name == "reward.txt" else _mean(json.loads(text))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return 0.0, f"the tests wrote no number to {name}"
    if math.isfinite(value):
        return min(1.0, max(0.0, value)), f"the tests gave {value:.4g}"
    return 0.0, f"the tests wrote {value} to {name}"


def _mean(value: Any) -> float:
    if not isinstance(value, dict):
        return float(value)
    rewards = cast(dict[str, Any], value)
    if "reward" in rewards:
        return float(rewards["reward"])
    if not rewards:
        raise ValueError("no rewards")
    return sum(float(each) for each in rewards.values()) / len(rewards)
