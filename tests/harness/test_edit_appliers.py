"""The `apply` tool: a sketch laid into a file by the merge, and by the bundled apply model behind a real server."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.config import EngineConfig
from etude.harness.edit_appliers import server_applier
from etude.harness.full_tools import FullTools
from etude.records import ToolCall
from etude.sandbox.base import ApplyFailed
from tests.helpers.engines import served
from tests.helpers.speakers import MemoryBox, a_task

MODEL = Path(__file__).parents[2] / "models" / "nano-apply"
BEFORE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a + b\n"
SKETCH = "# ... existing code ...\ndef sub(a, b):\n    return a - b\n"


def tools() -> FullTools:
    return FullTools(MemoryBox({"m.py": BEFORE.encode(), "latin.py": b"# caf\xe9\nx = 1\n"}), a_task())


def ask(tools: FullTools, name: str, **arguments: Any) -> str:
    return asyncio.run(tools.call(ToolCall(name=name, arguments=arguments)))


def test_a_sketch_is_merged_counted_and_taken_back() -> None:
    full = tools()
    assert ask(full, "apply", path="m.py", sketch=SKETCH) == "ok"
    assert ask(full, "read", path="m.py").endswith("return a - b")
    assert full.metrics["edits"] == 1
    assert ask(full, "undo") == "undone: m.py"
    assert asyncio.run(full.text("m.py")) == BEFORE


@pytest.mark.parametrize(
    ("path", "sketch", "why"),
    [
        ("m.py", "zebra(17)\n", "quote a line of the file"),
        ("m.py", BEFORE, "no change"),
        ("m.py", "def add(a, b):\n    return '\udce9'\n", "not UTF-8; use edit"),
        ("latin.py", "x = 2\n", "not UTF-8; use edit"),
        ("gone.py", SKETCH, "gone.py"),
    ],
)
def test_a_sketch_that_cannot_be_laid_changes_nothing(path: str, sketch: str, why: str) -> None:
    full = tools()
    result = ask(full, "apply", path=path, sketch=sketch)
    assert result.startswith("error: ")
    assert why in result
    assert full.metrics["edits"] == 0
    assert full.metrics["edit_errors"] == 1


@pytest.fixture(scope="module")
def url():
    with served(MODEL, EngineConfig(cache_mb=64)) as url:
        yield url


def test_a_model_behind_a_server_applies_the_sketch(url: str) -> None:
    full = tools()
    full.apply_edit = server_applier(url)
    assert ask(full, "apply", path="m.py", sketch=SKETCH, instruction="subtract") == "ok"
    assert asyncio.run(full.text("m.py")).endswith("return a - b\n")
    assert full.metrics["edits"] == 1


def test_what_the_model_refuses_is_told_and_a_dead_server_is_not_the_agents_fault(url: str) -> None:
    full = tools()
    full.apply_edit = server_applier(url)
    long = "".join(f"x{i} = {i}\n" for i in range(2000))
    asyncio.run(full.box.write("long.py", long.encode()))
    result = ask(full, "apply", path="long.py", sketch="x1998 = 1998\nx1999 = 0\n")
    assert "was not applied" in result
    assert "use edit instead" in result
    full.apply_edit = server_applier("http://127.0.0.1:9")
    with pytest.raises(ApplyFailed, match="did not answer"):
        ask(full, "apply", path="m.py", sketch=SKETCH)
    assert asyncio.run(full.text("m.py")) == BEFORE


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (["--rollout.apply", "http://127.0.0.1:9"], "have no tool `apply`: drop rollout.apply"),
        (["--rollout.tools", '["read", "finish"]'], "have the tools that it has words for: drop rollout.tools"),
        (["--rollout.tools", '["read", "dance"]'], "there is no tool 'dance'; known: list, read, grep"),
        (["--rollout.tools", '["read"]'], "an agent ends its work by the tool `finish`: name it among the tools, too"),
    ],
)
def test_a_run_refuses_tools_that_its_agent_cannot_have(
    option: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--model.path", str(MODEL.parent / "nano"), *option]
    with pytest.raises(SystemExit) as stop:
        main.main(["train", str(MODEL.parents[1] / "recipes/demo.toml"), *arguments])
    assert stop.value.code == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()
