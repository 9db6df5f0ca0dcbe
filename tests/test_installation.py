"""An installation without extras, on Debian's own interpreter: what the core brings works, the rest names its extra."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from etude.cli.main import OLDEST, too_old
from etude.code import extras
from tests.helpers.environments import environment, system_python

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "numba", "tokenizers", "cryptography", "safetensors", "pyarrow", "detect_secrets"}
# Runs command lines in one process; prints, for each, its exit code and the last line of stderr.
MANY = """
import contextlib, io, json, sys
from etude.cli.main import main
ends = []
for words in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(words)
        except SystemExit as e:
            ends.append([e.code, (err.getvalue().splitlines() or [""])[-1]])
print(json.dumps([ends, sorted(sys.modules)]))
"""


def run(python: Path, folder: Path, *words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([str(python), *words], cwd=folder, env=clean, capture_output=True, text=True, timeout=timeout)


def ends(python: Path, folder: Path, lines: list[list[str]]) -> tuple[list[tuple[int, str]], set[str]]:
    """Exit code and last line of each command line, and the modules that were imported."""
    done = run(python, folder, "-c", MANY, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    found, modules = json.loads(done.stdout)
    return [tuple(end) for end in found], {name.partition(".")[0] for name in modules}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("core") / "venv", python=system_python())


def test_the_core_helps_with_every_command_and_loads_nothing_of_the_extras(core: Path, tmp_path: Path) -> None:
    done = run(core, tmp_path, "-c", "from etude.cli import live, main; print(*main.COMMANDS); print(*live.ACTIONS)")
    commands, actions = (line.split() for line in done.stdout.splitlines())
    lines = [[command, "--help"] for command in commands] + [["live", action, "--help"] for action in actions]
    lines += [["tasks", action, "--help"] for action in ("build", "check", "harbor", "fast-apply")]
    lines += [["train", "--keys", stage] for stage in ("midtrain", "sft", "apply", "rl")]
    lines += [
        ["train", str(ROOT / "recipes/demo.toml"), "--dry-run"],
    ]
    found, modules = ends(core, tmp_path, lines)
    assert {" ".join(line): end for line, end in zip(lines, found, strict=True) if end[0] != 0} == {}
    assert not modules & HEAVY


ROOMS = (
    "live", "run", "dashboard", "rollout", "harness", "tasks", "grading", "sandbox", "edits", "ledger", "protocol",
    "renderers", "code", "config",
)  # fmt: skip


def test_the_rooms_of_the_core_import_without_the_extras(core: Path, tmp_path: Path) -> None:
    """Whatever a command imports when it runs."""
    program = f"""
import importlib, json, pkgutil, sys, etude
for module in pkgutil.walk_packages(etude.__path__, "etude."):
    if module.name.split(".")[1] in {ROOMS} and ".guest." not in module.name:
        importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
    done = run(core, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    assert not {name.partition(".")[0] for name in json.loads(done.stdout)} & HEAVY


LIVE = 'folder = "live"\n[[clusters]]\nname = "main"\nurls = ["http://127.0.0.1:9"]\nstore = "none"\n'
LACKING = {
    "train demo.toml": "train",
    "demo": "train",
    "serve nano": "serve",
    "eval nano --suite tasks": "serve",
    "eval nano --suite fast-apply": "serve,apply",
    "weights verify store": "serve",
    "weights keygen key": "serve",
    "bench weights": "train",
    "apply file.py --edit x --model nano-apply": "serve",
    "tasks fast-apply repo -o table": "apply",
    "tasks build js -o tasks": "apply",
    "export run -o out": "play",
    "doctor mismatch run": "serve",
    "doctor replay run": "serve",
    "doctor model": "serve",
    "doctor sandbox": "serve",
    "live serve live.toml": "live",
    "live key list live.toml": "live",
    "live status live.toml": "live",
    "live demo": "train,live",
    "live gate live.toml": "serve,live",
}


def test_a_missing_extra_is_one_sentence_that_names_it_and_leaves_nothing(core: Path, tmp_path: Path) -> None:
    (tmp_path / "js").mkdir()
    (tmp_path / "js/package.json").write_text("{}")
    (tmp_path / "demo.toml").write_text((ROOT / "recipes/demo.toml").read_text())
    (tmp_path / "live.toml").write_text(LIVE)
    (tmp_path / "file.py").write_text("x = 1\n")
    before = sorted(tmp_path.rglob("*"))
    found, _ = ends(core, tmp_path, [line.split() for line in LACKING])
    for (line, names), (code, said) in zip(LACKING.items(), found, strict=True):
        assert (code, said.startswith("etude: ")) == (2, True), (line, said)
        assert said.endswith(f": pip install 'etude[{names}]'"), (line, said)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_module_that_a_configuration_asks_for_names_its_extra(core: Path, tmp_path: Path) -> None:
    """A database, which no command line shows."""
    (tmp_path / "live.toml").write_text(f'database = "postgresql://localhost/x"\n{LIVE}')
    live = environment(tmp_path / "venv", "live")
    folder = tmp_path / "work"
    folder.mkdir()
    ((code, said),), _ = ends(live, folder, [["live", "serve", str(tmp_path / "live.toml")]])
    assert (code, list(folder.iterdir())) == (2, []), said
    assert said.endswith("needs psycopg, which is not installed: pip install 'etude[postgres]'")
    assert extras.missing_extra_message("`etude eval`", "pyarrow.parquet") == (
        "`etude eval` needs pyarrow, which is not installed: pip install 'etude[apply]'"
    )
    assert extras.missing_extra_message("`etude eval`", "nothing") is None


def test_a_box_of_debians_python_has_this_interpreter_as_python(core: Path, tmp_path: Path) -> None:
    """/usr/bin has python3 alone."""
    (tmp_path / "work").mkdir()
    done = run(core, tmp_path / "work", "-c", BOX)
    first, second, own = (line.strip() for line in done.stdout.splitlines() if line.strip())
    assert first == second == own, done.stdout + done.stderr


@pytest.mark.skipif(system_python() == sys.executable, reason="needs Debian's Python, whose library may lie elsewhere")
def test_a_box_finds_a_python_in_a_folder_that_boxes_cover(tmp_path: Path) -> None:
    """As uv and pyenv have theirs in a home; tmp_path is below /tmp. The image has it in /usr/local."""
    name = os.path.realpath(system_python())
    prefix, here = tmp_path / "python", f"python3.{sys.version_info.minor}"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    shutil.copy(name, prefix / "bin" / here)
    (prefix / "lib" / here).symlink_to(f"/usr/lib/{here}")
    (tmp_path / "work").mkdir()
    python = environment(tmp_path / "venv", python=str(prefix / "bin" / here))
    done = run(python, tmp_path / "work", "-c", BOX)
    first, second, own = (line.strip() for line in done.stdout.splitlines() if line.strip())
    assert first == second == own.replace(str(prefix), "/usr/local"), done.stdout + done.stderr


BOX = """
import asyncio, sys
from pathlib import Path
from etude.grading.runner import open_sandbox
from etude.sandbox.base import Image, Limits

async def main():
    async with open_sandbox() as sandbox:
        Path("module.py").write_text("")
        box = await sandbox.create(Image(Path("."), None, {}), Limits())
        code = "import sys, pytest; print(sys.base_prefix, *sys.version_info)"
        line = f"for name in python python3; do $name -c '{code}'; done"
        print((await box.exec(line, 20)).output, sys.base_prefix, *sys.version_info)
        await box.close()

asyncio.run(main())
"""


def test_an_old_python_is_told() -> None:
    assert too_old((3, 10, 13)).startswith("this is Python 3.10.13; make a virtual environment of Python 3.11")
    assert not too_old((3, 11, 0))
    assert f'requires-python = ">={".".join(map(str, OLDEST))}"' in (ROOT / "pyproject.toml").read_text()
