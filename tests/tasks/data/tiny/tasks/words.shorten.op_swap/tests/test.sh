#!/bin/sh
# Reward 1 if every id of tests.json passes on the submitted tree, else 0.
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cp -R /hidden/. /workspace/
cd /workspace || exit 1
python - <<'PYTHON'
import json, pathlib, pytest

tests = json.loads(pathlib.Path("/tests/tests.json").read_text())
wanted = set(tests["fail_to_pass"]) | set(tests["pass_to_pass"])
passed = set()


class Collect:
    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.outcome == "passed":
            passed.add(report.nodeid)


files = sorted({node.split("::")[0] for node in wanted})
pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "/workspace", *files], plugins=[Collect()])
pathlib.Path("/logs/verifier/reward.txt").write_text("1" if wanted <= passed else "0")
PYTHON
