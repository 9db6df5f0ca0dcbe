"""Clients as they are published, against a server of the nano model: openai in the environment of the tests, the others
in one of their own (`make agents`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from etude.config import ServerConfig
from etude.run.engines import engine_url, spawn_engine

ROOT = Path(__file__).parents[2]
AGENTS = os.environ.get("ETUDE_MINI_SWE_AGENT")

HELPER = ROOT / "tests" / "helpers" / "stock_clients.py"

pytestmark = pytest.mark.slow
needs_agents = pytest.mark.skipif(
    not AGENTS, reason="ETUDE_MINI_SWE_AGENT names no environment with clients: run make agents"
)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    config = ServerConfig(model=str(ROOT / "models" / "nano"), port=0, threads=1, cache_mb=128)
    child = spawn_engine(config, folder)
    yield engine_url(child, folder)
    child.stop(20)


def run(python, *command, **environment):
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""} | environment
    return subprocess.run(
        [python, *command], env=os.environ | quiet, capture_output=True, text=True, timeout=400,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def found(python, url, *clients):
    child = run(python, str(HELPER), url, *clients)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.smoke
def test_openai(url):
    of_openai = found(sys.executable, url, "openai")["openai"]
    assert of_openai == {
        "call": "edit", "streamed": "edit", "schema": ["ok"], "model": "nano", "models": ["nano"],
        "response": ["function_call"] * len(of_openai["response"]), "response_stream": "completed",
        "second": True, "too_long": "context_length_exceeded",
    }  # fmt: skip
    assert of_openai["response"]


@needs_agents
def test_anthropic_and_litellm(url):
    both = found(f"{AGENTS}/bin/python", url, "anthropic", "litellm")
    assert both["anthropic"] == {
        "stop": "tool_use", "blocks": ["tool_use"] * len(both["anthropic"]["blocks"]), "stream": True,
        "forced": ["list"], "counted": True, "too_long": "prompt is too long",
    }  # fmt: skip
    assert both["anthropic"]["blocks"]
    models = ("openai/nano", "hosted_vllm/nano", "anthropic/nano")
    assert both["litellm"] == {model: ["edit", "edit"] for model in models} | {
        "responses": "incomplete", "too_long": "ContextWindowExceededError"
    }  # fmt: skip


@needs_agents
def test_mini_swe_agent_plays_turns(url, tmp_path):
    """The nano model knows its own tools alone, so the agent's answers are that it does not know them: what is shown is
    that requests and answers are understood on both sides, until the context is full."""
    out = tmp_path / "trajectory.json"
    child = run(
        f"{AGENTS}/bin/python", "-m", "minisweagent.run.mini", "-m", "openai/nano", "--model-class", "litellm",
        "-y", "--exit-immediately", "-t", "Fix `chunk` in src/a.py", "-o", str(out),
        OPENAI_API_BASE=f"{url}/v1", OPENAI_API_KEY="none", MSWEA_COST_TRACKING="ignore_errors",
        MSWEA_CONFIGURED="true", MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path), HOME=str(tmp_path),
    )  # fmt: skip
    assert out.is_file(), child.stdout[-2000:] + child.stderr[-2000:]
    messages = json.loads(out.read_text())["messages"]
    assert [m["role"] for m in messages[:2]] == ["system", "user"]
    assert len(messages) > 2, "the agent read an answer: that it has no tool of that name, or the command's output"
    assert httpx2.get(f"{url}/health", timeout=60).json()["finished"] > 0
