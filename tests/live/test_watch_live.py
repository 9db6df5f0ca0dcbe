"""The watcher from end to end: a real agent; the gateway and `etude live watch` as processes; hooks that git runs.

Only the model is played: a server that says chosen answers and names them as `etude serve` does, by X-Etude-Turn.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from etude.live.log import journal
from etude.live.log.accounts import open_log
from etude.live.log.records import LivePolicy, ServedTurn, Signal, Suggestion
from etude.live.log.tenants import create_key, set_policy
from tests.live.test_watch import BASE, git

pytestmark = pytest.mark.slow
AGENTS = os.environ.get("ETUDE_MINI_SWE_AGENT")
SECONDS = 60.0
ADDED = "def added(first, second):\\n    total = first + second\\n    return total * factor(first)\\n"
STEPS = [
    f"printf '{ADDED}' >> a.py; sleep 0.3",
    "git add -A && git commit -q -m Work; sleep 0.3",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
]
# An agent of our own that tells by JSON lines.
TALKER = """
import json, os, subprocess, sys, time, urllib.request
messages = [{"role": "user", "content": "Add a function"}]
for _ in range(3):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_API_BASE"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        turn, message = answer.headers["x-etude-generation"], json.load(answer)["choices"][0]["message"]
    started = time.time()
    call = message["tool_calls"][0]
    subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True, check=True)
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"turn": turn, "started": started, "ended": time.time(), "model": "m"}) + chr(10))
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "done"}]
"""


class Player(BaseHTTPRequestHandler):
    """A server whose n-th answer of a conversation is the n-th command."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        models = {"data": [{"id": "m", "object": "model"}], "object": "list"}
        self._say(models if self.path == "/v1/models" else {"version": 3, "digest": "d3"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        step = STEPS[min(2, sum(message["role"] == "assistant" for message in body["messages"]))]
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": step})},
        }
        message = {"role": "assistant", "content": "I go on.", "tool_calls": [call]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        name = self.headers.get("x-etude-turn", "none")
        self._say(
            {
                "id": f"chatcmpl-{name}",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }
        )

    def _say(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := true()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


class Place:
    """A gateway before the player, and a developer's repository."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.root, self.live = folder, folder / "repo", folder / "live"
        self.live.mkdir(mode=0o700)
        self.engine = open_log(self.live, None)
        set_policy(self.engine, "acme", LivePolicy(consent=True))
        self.key = create_key(self.engine, "acme", "ann")
        (folder / "store").mkdir()
        self.config = folder / "live.toml"
        self.config.write_text(
            f'stage = "live"\nfolder = "{self.live}"\n[gateway]\nport = 0\n[[clusters]]\nname = "a"\nurls = ["{url}"]\n'
            f'store = "{folder / "store"}"\n'
        )
        self.children: list[subprocess.Popen[str]] = []
        self.url = ""
        self.root.mkdir()
        git(self.root, "init", "-q", "-b", "main")
        (self.root / "a.py").write_text("\n".join(BASE) + "\n")
        (self.root / ".etude").mkdir()
        (self.root / ".etude/consent.toml").write_text("share = true\n")
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "-m", "Begin")

    @property
    def environment(self) -> dict[str, str]:
        person = {f"GIT_{who}_{what}": "a@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        return (
            os.environ
            | person
            | {
                "XDG_STATE_HOME": str(self.folder / "state"),
                "ETUDE_API_KEY": self.key,
                "OPENAI_API_KEY": self.key,
                "OPENAI_API_BASE": f"{self.url}/v1",
                "GIT_CONFIG_GLOBAL": "/dev/null",
                "HOME": str(self.folder),
            }
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "etude.cli.main", "live", *words]
        child = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.children.append(child)
        return child

    def serve(self) -> subprocess.Popen[str]:
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        environment = self.environment | {"ETUDE_API_KEY": ""}
        command = [
            sys.executable,
            "-m",
            "etude.cli.main",
            "live",
            "serve",
            str(self.config),
            "--ready-file",
            str(ready),
        ]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        self.children.append(child)  # pyright: ignore[reportArgumentType]
        until(ready.exists, "the gateway begins")
        self.url = json.loads(ready.read_text())["url"]
        port = self.url.rsplit(":", 1)[1].strip("/")
        self.config.write_text(self.config.read_text().replace("port = 0", f"port = {port}"))
        return child  # pyright: ignore[reportReturnType]

    def watch(self, agent: Path, *words: str) -> subprocess.Popen[str]:
        return self.start(
            "watch", str(self.root), "--gateway", self.url, "--agent", str(agent), "--interval", "0.1", *words
        )

    def told(self) -> tuple[list[ServedTurn], list[Suggestion], list[Signal]]:
        with journal.reading(self.engine) as connection:
            end = 1 << 62
            return (
                list(journal.turns(connection, end)),
                list(journal.suggestions(connection, end)),
                list(journal.signals(connection, end)),
            )

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait(SECONDS)
            if child.stdout is not None:
                child.stdout.close()
        self.engine.dispose()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Player)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = Place(tmp_path, f"http://127.0.0.1:{server.server_address[1]}")
    yield made
    made.close()
    server.shutdown()
    server.server_close()


def has_kinds(place: Place, *kinds: str) -> bool:
    return {str(each.kind) for each in place.told()[2]} >= set(kinds)


@pytest.mark.parametrize("agent", ["mini-swe-agent", "own"])
def test_signals_of_a_real_agents_edit_are_in_the_log(place: Place, agent: str) -> None:
    if agent == "mini-swe-agent" and not AGENTS:
        pytest.skip("ETUDE_MINI_SWE_AGENT names no environment that has it: run make agents")
    place.serve()
    tail = place.folder / ("trajectory.json" if agent == "mini-swe-agent" else "agent.jsonl")
    watcher = place.watch(tail)
    assert watcher.stdout is not None
    assert watcher.stdout.readline().startswith("watching")
    command = [sys.executable, "-c", TALKER, str(tail)]
    if agent == "mini-swe-agent":
        command = [
            f"{AGENTS}/bin/python",
            "-m",
            "minisweagent.run.mini",
            "-m",
            "openai/m",
            "--model-class",
            "litellm",
            "-y",
            "--exit-immediately",
            "-t",
            "Add a function",
            "-o",
            str(tail),
        ]
    quiet = {
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_GLOBAL_CONFIG_DIR": str(place.folder),
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        command,
        cwd=place.root,
        env=place.environment | quiet,
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    until(lambda: has_kinds(place, "shown", "applied", "committed"), "the edit is in the log")
    watcher.send_signal(signal.SIGTERM)
    said, _ = watcher.communicate(timeout=SECONDS)
    turns, edits, signals = place.told()
    assert watcher.returncode == 0, said
    assert "0 refused, 0 wait" in said
    assert len(turns) == 3
    (edit,) = edits
    assert edit.turn == turns[0].id, "the turn whose command made it"
    assert edit.old_lines == (len(BASE), 0)
    assert Counter(str(each.kind) for each in signals if each.subject == edit.id) == Counter(
        ["shown", "applied", "committed", "gone"]
    )
    assert {each.value for each in signals} == {1.0}
    trace = json.loads((place.root / ".agent-trace/traces.jsonl").read_text())
    assert trace["files"][0]["conversations"][0]["url"] == f"urn:etude:turn:{turns[0].id}"


def turn_of(place: Place) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": f"Add {random.random()}"}]}
    headers = {"authorization": f"Bearer {place.key}"}
    answer = httpx2.post(f"{place.url}/v1/chat/completions", json=body, headers=headers, timeout=SECONDS)
    assert answer.json()["id"] == f"chatcmpl-{answer.headers['x-etude-generation']}"
    return answer.headers["x-etude-generation"]


def test_kills_of_watcher_and_gateway_lose_no_signal(place: Place) -> None:
    """Six kills of the one or the other at random moments, while a dozen turns edit; then every edit is in the log with
    each of its signals once."""
    gateway = place.serve()
    tail, draw = place.folder / "agent.jsonl", random.Random(7)
    names = [turn_of(place) for _ in range(12)]
    watcher = place.watch(tail)
    watcher.stdout.readline()  # pyright: ignore[reportOptionalMemberAccess]
    for number, name in enumerate(names):
        started = time.time()
        (place.root / f"new_{number}.py").write_text(f"def made_{number}(value):\n    return value * {number} + 1\n")
        with tail.open("a") as file:
            file.write(json.dumps({"turn": name, "started": started, "ended": time.time()}) + "\n")
        time.sleep(draw.uniform(0.05, 0.6))
        if number % 4 == 3:
            gateway.kill()
            gateway.wait(SECONDS)
            gateway = place.serve()
        elif number % 4 == 1:
            watcher.kill()
            watcher.wait(SECONDS)
            watcher = place.watch(tail)
    until(lambda: len(place.told()[2]) >= 24, "all signals are in the log")
    watcher.send_signal(signal.SIGKILL)
    watcher.wait(SECONDS)
    once = place.watch(tail, "--once")
    assert "0 wait for the gateway" in once.communicate(timeout=SECONDS)[0]
    _, edits, signals = place.told()
    assert sorted(edit.turn for edit in edits) == sorted(names)
    assert Counter((each.subject, str(each.kind)) for each in signals) == Counter(
        (edit.id, kind) for edit in edits for kind in ("shown", "applied")
    )


@pytest.mark.smoke
def test_a_hook_tells_of_a_commit_without_a_watcher(place: Place) -> None:
    place.serve()
    tail = place.folder / "agent.jsonl"
    install = place.start("hook", "install", str(place.root), "--gateway", place.url, "--agent", str(tail))
    assert "post-commit" in install.communicate(timeout=SECONDS)[0]
    ran = place.folder / "ran"  # git starts a hook in the work tree, whose modules are not to be imported
    (place.root / "argparse.py").write_text(f"open({str(ran)!r}, 'w')\n")
    place.watch(tail, "--once").communicate(timeout=SECONDS)
    started = time.time()
    (place.root / "new.py").write_text("def made(value):\n    return value * 3 + 1\n")
    with tail.open("a") as file:
        file.write(json.dumps({"turn": turn_of(place), "started": started, "ended": time.time()}) + "\n")
    time.sleep(0.3)
    subprocess.run(["git", "add", "new.py"], cwd=place.root, env=place.environment, check=True, timeout=SECONDS)
    subprocess.run(
        ["git", "commit", "-q", "-m", "New"], cwd=place.root, env=place.environment, check=True, timeout=SECONDS
    )
    until(lambda: has_kinds(place, "shown", "applied", "committed"), "the hook's own watcher sends")
    assert not ran.exists()
    again = place.start("hook", "remove", str(place.root))
    assert again.communicate(timeout=SECONDS)[0].count("removed") == 3
    (place.root / ".git/hooks/post-commit").write_text("#!/bin/sh\n")
    refused = place.start("hook", "install", str(place.root), "--gateway", place.url)
    assert "is another's hook" in refused.communicate(timeout=SECONDS)[0]
    assert refused.returncode == 2
