"""Grades a Python task outside of etude, in the container of the verifier: writes 1 or 0 to Harbor's reward file.

/grade holds the original repository, /hidden the hidden tests, /workspace the work that the agent submitted, /tests the
task. Only the source roots of /workspace count. Every id of tests.json must be reported as passed by name.
"""

import json
import os
import pathlib
import shutil
import sys

sys.path[:] = [path for path in sys.path if path not in ("", "/verifier")]
REWARD = pathlib.Path("/logs/verifier/reward.txt")


def main() -> None:
    """Grade the submitted tree."""
    REWARD.parent.mkdir(parents=True, exist_ok=True)
    REWARD.write_text("0")
    tests = json.loads(pathlib.Path("/tests/tests.json").read_text())
    for root in json.loads(pathlib.Path("/verifier/roots.json").read_text()):
        submitted, target = pathlib.Path("/workspace", root), pathlib.Path("/grade", root)
        if target.is_dir():
            shutil.rmtree(target)
        elif target.exists():
            target.unlink()
        if submitted.is_dir():
            shutil.copytree(submitted, target)
        elif submitted.exists():
            shutil.copyfile(submitted, target)
    shutil.copytree("/hidden", "/grade", dirs_exist_ok=True)
    os.chdir("/grade")
    import pytest

    passed = set()

    class Collect:
        def pytest_runtest_logreport(self, report):  # type: ignore[no-untyped-def]
            if report.when == "call" and report.outcome == "passed":
                passed.add(report.nodeid)

    wanted = {*tests["fail_to_pass"], *tests["pass_to_pass"]}
    files = sorted({node.partition("::")[0] for node in wanted})
    settings = "/site/pytest.ini" if os.path.isfile("/site/pytest.ini") else os.devnull
    options = ["-q", "-p", "no:cacheprovider", "-c", settings, "--rootdir", "/grade", "--continue-on-collection-errors"]
    pytest.main([*options, *files], plugins=[Collect()])
    missing = sorted(wanted - passed)
    print(f"{len(wanted) - len(missing)} of {len(wanted)} tests pass", *missing[:20], sep="\n")
    REWARD.write_text("0" if missing else "1")


if __name__ == "__main__":
    main()
