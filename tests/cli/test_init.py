"""`etude init`: what it writes is accepted as it stands, and runs; what is there stays."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from etude.cli import main
from etude.config import RLConfig, bundled, validate
from etude.run.parts import part_of, renderer_of

TINY = Path(__file__).parents[1] / "tasks/repositories/tiny-1.0"
SHORT = ["--trainer.steps", "1", "--tasks.max_tasks", "4", "--rollout.prompts", "1", "--rollout.group", "2",
         "--eval.samples", "1", "--eval.max_tasks", "1"]  # fmt: skip


def etude(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main.main(words)
    return int(stop.value.code or 0)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in a folder of its own, which is the current one."""
    monkeypatch.chdir(shutil.copytree(TINY, tmp_path / "tiny"))
    return Path.cwd()


def test_the_configuration_of_a_repository(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert etude("init", "--exclude", "docs") == 0
    said = capsys.readouterr().out
    assert "functions of 1 to 20 lines in src/tiny; 2 test files in tests" in said
    tables = tomllib.loads(Path("etude.toml").read_text())
    assert (tables["name"], tables["tasks"]["exclude"]) == ("tiny", ["docs", "outputs", "etude.toml"])
    assert etude("train", "etude.toml", "--dry-run") == 0
    resolved = json.loads(capsys.readouterr().out)
    assert resolved["tasks"]["repository"] == str(repository)
    assert not Path("outputs").exists()


def test_of_a_clone_nothing_but_the_configuration_is_left_out(repository: Path) -> None:
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], check=True)
    assert etude("init") == 0
    assert tomllib.loads(Path("etude.toml").read_text())["tasks"]["exclude"] == ["etude.toml"]


def test_the_configuration_of_a_javascript_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tree_sitter_javascript")
    monkeypatch.chdir(tmp_path)
    Path("package.json").write_text('{"name": "sums"}')
    Path("index.js").write_text("exports.add = function add(a, b) {\n  return a + b\n}\n")
    Path("test").mkdir()
    Path("test/add.test.js").write_text(
        "const { test } = require('node:test')\ntest('add', () => require('assert')(require('..').add(1, 1) === 2))\n"
    )
    assert etude("init") == 0
    assert "JavaScript: 1 functions of 1 to 20 lines in index.js; 1 test files in test" in capsys.readouterr().out
    assert etude("train", "etude.toml", "--dry-run") == 0


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "has no Python package or module at its root or in src/"),
        ({"pkg/__init__.py": "def f(a):\n    return a + 1\n"}, "has no test modules"),
        ({"pkg/__init__.py": "", "test_pkg.py": "def test(): pass\n"}, "has no function of 1 to 20 lines"),
        ({"etude.toml": "mine"}, "etude.toml is there already, and is not replaced"),
        ({"package.json": "{}", "index.js": "function f() { return 1 }"}, "has no test files that define tests"),
    ],
)
def test_a_folder_without_tasks_is_one_sentence(
    files: dict[str, str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    assert etude("init") == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()} == set(files)
    assert all(Path(name).read_text() == text for name, text in files.items())


def test_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert etude("init", "--environment") == 0
    assert etude("train", "my_environment.toml", "--dry-run") == 0
    config = validate(RLConfig, tomllib.loads(Path("my_environment.toml").read_text()), "")
    part = part_of(config.tasks, renderer_of(config), config.rollout.budget())
    assert len(part.split("train")) > len(part.split("heldout")) > 8
    capsys.readouterr()
    assert etude("init", "--environment") == 2
    assert "my_environment.py is there already" in capsys.readouterr().err


def test_of_two_files_none_is_written_if_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_environment.toml").symlink_to("nowhere")
    assert etude("init", "--environment") == 2
    assert not Path("my_environment.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "words"),
    [
        (["init"], ["etude.toml", *SHORT]),
        (["init", "--environment"], ["my_environment.toml", "--trainer.steps", "2", "--eval.samples", "1"]),
    ],
)
def test_what_is_written_runs(repository: Path, init: list[str], words: list[str]) -> None:
    for command in (init, ["train", *words]):
        done = subprocess.run(
            [sys.executable, "-m", "etude.cli.main", *command], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (repository / "outputs").iterdir()
    report = json.loads((run / "report.json").read_text())
    assert all(report["checks"].values()), report["checks"]


@pytest.mark.parametrize("pattern", ["\udcff", "a\x7fb"])
def test_a_pattern_that_toml_cannot_hold_writes_nothing(repository: Path, pattern: str) -> None:
    assert etude("init", "--exclude", pattern) == 2
    assert not Path("etude.toml").exists()


@pytest.mark.parametrize(
    ("name", "text"), [("pyproject.toml", "a=" + "[" * 5000), ("src/tiny/deep.py", "x=" + "-" * 100000 + "1")]
)
def test_a_file_that_is_too_deep_is_one_sentence(repository: Path, name: str, text: str) -> None:
    Path(name).write_text(text)
    assert etude("init") == 2
    assert not Path("etude.toml").exists()


def test_a_folder_of_the_repository_does_not_stand_in_for_the_bundled_model(repository: Path) -> None:
    Path("nano").mkdir()
    Path("nano/config.json").write_text('{"stage": "rl", "store": "s3://theirs", "tasks": {"repository": "x"}}')
    assert etude("init") == 0
    config = validate(RLConfig, tomllib.loads(Path("etude.toml").read_text()), "etude.toml")
    assert config.model.path == str(bundled("models/nano"))
