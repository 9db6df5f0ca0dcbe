"""The README's commands, run as a reader would run them. CI runs the targets of make itself."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from etude.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TINY = ROOT / "tests/tasks/repositories/tiny-1.0"
ETUDE = [sys.executable, "-m", "etude.cli.main"]


def blocks() -> list[str]:
    return re.findall(r"```\n(.*?)```", README, re.S)


def commands() -> list[str]:
    """The lines of the table of commands."""
    (table,) = [block for block in blocks() if block.startswith("etude demo ")]
    return table.splitlines()


def test_every_command_of_the_table_exists_and_none_is_missing() -> None:
    described = {line.split()[1] for line in commands()}
    assert described == set(main.COMMANDS)


def test_every_flag_of_the_table_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands():
        words = re.split(r"\s{2,}", line)[0].split()[1:]
        # The command, and its check or action.
        named = list(itertools.takewhile(re.compile("[a-z][a-z-]*").fullmatch, words))
        for flag in set(re.findall(r"--[a-z]+", line)) - {"--a"}:  # --a.b value stands for any key of the configuration
            with pytest.raises(SystemExit) as stop:
                main.main([*named, "--help"])
            assert not stop.value.code
            assert flag in capsys.readouterr().out, (named, flag)


def test_make_targets_exist() -> None:
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"^make ([a-z-]+)", README, re.M)) <= set(rules)


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_tasks_are_built_and_checked(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    for words in (["tasks", "build", str(TINY), "-o", str(out), "--max-tasks", "4"], ["tasks", "check", str(out)]):
        done = subprocess.run([*ETUDE, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_doctor() -> None:
    done = subprocess.run([*ETUDE, "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_conversation_with_a_served_model() -> None:
    (block,) = [block for block in blocks() if block.startswith("etude serve ")]
    serve, curl = block.replace("\\\n", " ").splitlines()
    words = shlex.split(curl)
    assert words[:2] == ["curl", "-s"]
    argv = ["0" if word == "8000" else word for word in shlex.split(serve)[1:]]
    with subprocess.Popen([*ETUDE, *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")  # its stages, until the server ends
            announced = next((line for line in lines if line.startswith("serving at http://127.0.0.1:")), "")
            assert announced
            url = words[2].replace("localhost:8000", announced.split("//")[1].strip())
            body = json.loads(words[words.index("-d") + 1])
            response = httpx2.post(f"http://{url}", json=body, timeout=60)
        finally:
            server.terminate()
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] > 0
