"""The README's commands, run as a reader would run them. CI runs the targets of make itself."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import etude
from etude.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TINY = ROOT / "tests/tasks/repositories/tiny-1.0"
ETUDE = [sys.executable, "-m", "etude.cli.main"]


def fenced(page: str, kind: str) -> list[str]:
    """The blocks of a page that are marked as `kind`."""
    return [text for name, text in re.findall(r"^```(\w*)\n(.*?)^```", page, re.S | re.M) if name == kind]


def blocks() -> list[str]:
    return fenced(README, "")


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


def test_every_page_is_listed() -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages - set(re.findall(r"\]\(([^)#:]+)\)", README)) == set()


def test_tasks_are_built_and_checked(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    for words in (["tasks", "build", str(TINY), "-o", str(out), "--max-tasks", "4"], ["tasks", "check", str(out)]):
        done = subprocess.run([*ETUDE, *words], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_doctor() -> None:
    done = subprocess.run([*ETUDE, "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_environment_of_the_readme_trains_and_is_measured(tmp_path: Path) -> None:
    """As printed, in an empty folder: `python` and `etude` are those of the installation."""
    (code,) = fenced(README, "python")
    (tmp_path / "signs.py").write_text(code)
    (lines,) = [block for block in blocks() if "signs.py" in block]
    environment = os.environ | {"PYTHONPATH": str(Path(etude.__file__).parents[1]), "TERM": "dumb"}
    for line in lines.splitlines():
        program, *words = shlex.split(line)
        command = {"python": [sys.executable], "etude": ETUDE}[program]
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "outputs/signs" in done.stdout
    assert "pass@1" in done.stdout
    rows = [json.loads(row) for row in (tmp_path / "outputs/signs/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/all/mean"] for row in rows]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3]), rewards


@contextmanager
def served() -> Iterator[tuple[str, dict[str, Any]]]:
    """The README's server on a free port: the URL and the body of the README's request."""
    (block,) = [block for block in blocks() if block.startswith("etude serve ")]
    serve, curl = block.replace("\\\n", " ").split("\n", 1)
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
            yield f"http://{url}", json.loads(words[words.index("-d") + 1])
        finally:
            server.terminate()


@pytest.mark.slow
def test_the_served_model_mends_what_the_readme_asks_for() -> None:
    with served() as (url, body):
        assert "len(items) != 0" in body["messages"][0]["content"]
        for seed in range(5):
            response = httpx2.post(url, json=body | {"seed": seed}, timeout=60)
            assert response.status_code == 200, response.text
            message = response.json()["choices"][0]["message"]
            assert message["role"] == "assistant"
            edit = json.loads(message["tool_calls"][0]["function"]["arguments"])
            assert edit["new"].strip() == "return len(items) == 0"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
def test_the_live_loop_of_its_page_starts(tmp_path: Path) -> None:
    page = (ROOT / "docs/live.md").read_text()
    server, gateway = _free_port(), _free_port()
    (tmp_path / "live.toml").write_text(
        fenced(page, "toml")[0].replace("8000", str(server)) + f"\n[gateway]\nport = {gateway}\n"
    )
    lines = next(block for block in fenced(page, "") if "etude live serve" in block).splitlines()
    running: list[subprocess.Popen[str]] = []
    key = ""
    try:
        for line in lines:
            words = shlex.split(line.partition("#")[0].replace("8000", str(server)))
            if words[1] == "serve" or words[2] == "serve":
                running.append(subprocess.Popen([*ETUDE, *words[1:]], cwd=tmp_path, stdout=subprocess.PIPE, text=True))
                assert next(said for said in running[-1].stdout or () if " at http://127.0.0.1:" in said)
            else:
                done = subprocess.run([*ETUDE, *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=120)
                assert done.returncode == 0, done.stderr
                key = key or (done.stdout.strip() if words[2:4] == ["key", "create"] else "")
        body = {"model": "nano", "messages": [{"role": "user", "content": "Fix `f` in m.py\ndef f():\n    return 1"}]}
        response = httpx2.post(
            f"http://127.0.0.1:{gateway}/v1/chat/completions", json=body, timeout=60,
            headers={"authorization": f"Bearer {key}"},
        )  # fmt: skip
        assert (response.status_code, response.headers["X-Etude-Recorded"]) == (200, "true"), response.text
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.communicate(timeout=60)
