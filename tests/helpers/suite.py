"""Runs a part of the tests as the gate does: `python -m tests.helpers.suite "MARKERS"`.

The tests run in two processes. What failed runs once more, alone and serially; a part fails if a test fails twice, or
is skipped then. Where a process dies, the part fails at once, for what was left to it has not run; a test that hangs
ends its process after half an hour, with a traceback. Options of the caller's PYTEST_ADDOPTS do not count: with -x the
rest would not run. A test that passed the second time is written to `.ci/flaky.txt` with the date and the commit. The
file is committed, and tests/test_suite.py fails when a test stands there twice: the test is to be mended or dropped.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
FLAKY = ROOT / ".ci/flaky.txt"
MAX_AGAIN = 10  # more failures than that are no accident
PARALLEL = ["-n", "2", "--dist", "loadfile", "--max-worker-restart", "0"]
SLOWEST = ["--durations=15", "--durations-min=4"]
HANGS = ["-o", "faulthandler_timeout=1800", "-o", "faulthandler_exit_on_timeout=true"]
TESTS_FAILED = 1  # pytest's exit status; other ones but 0 mean that not all tests ran


def run_twice(arguments: list[str], root: Path = ROOT, flaky: Path = FLAKY, parallel: list[str] = PARALLEL) -> int:
    """pytest's exit status for `arguments`, after what failed has run once more."""
    with tempfile.TemporaryDirectory() as folder:  # not the checkout's: another pytest may end there meanwhile
        told = Path(folder) / "first.xml"
        status = _pytest([*parallel, *arguments, "-o", f"cache_dir={folder}", f"--junitxml={told}"], root)
        if status != TESTS_FAILED or _died(told):
            return status
        failed = list(json.loads((Path(folder) / "v/cache/lastfailed").read_text()))
        if not failed or len(failed) > MAX_AGAIN:
            return status
        print(f"\n{len(failed)} failed, and run once more, alone:", *failed, sep="\n  ", flush=True)
        told = Path(folder) / "again.xml"
        if status := _pytest([*failed, "-p", "no:xdist", f"--junitxml={told}"], root):
            return status
        if not _all_passed(told):
            print("what failed was skipped the second time, or did not end", flush=True)
            return TESTS_FAILED
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True).stdout
    with flaky.open("a") as file:
        file.writelines(f"{date.today()} {commit.strip()} {test}\n" for test in failed)
    print(f"passed the second time, and written to {flaky.name}: mend these tests, and commit the file", flush=True)
    return 0


def _died(told: Path) -> bool:
    """Whether a process of xdist has died, or all did before pytest came to its end."""
    errors = ElementTree.parse(told).iter("error") if told.exists() else None
    return errors is None or any("crashed while running" in error.attrib["message"] for error in errors)


def _all_passed(told: Path) -> bool:
    """Whether pytest came to its end (a test may end the process with status 0) and skipped nothing."""
    suites = ElementTree.parse(told).findall("testsuite") if told.exists() else []
    return bool(suites) and all(int(suite.attrib["skipped"]) == 0 for suite in suites)


def _pytest(arguments: list[str], root: Path) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *HANGS, *SLOWEST, *arguments], cwd=root, env=environment
    ).returncode


if __name__ == "__main__":
    began = time.monotonic()
    ended = run_twice(["-m", sys.argv[1], *sys.argv[2:]])
    print(f"{sys.argv[1]}: {time.monotonic() - began:.0f} s, exit status {ended}", flush=True)
    sys.exit(ended)
