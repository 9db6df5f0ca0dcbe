"""The wheel: what it holds, and that it works in an empty folder, without the repository beside it."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from etude.cli.main import command_parser

ROOT = Path(__file__).parents[1]


def requirement(name):
    """A program of requirements/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"requirements/{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder that the wheel of this checkout was unpacked into."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=300, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "etude.cli.main", *arguments]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_wheel_brings_what_the_demo_needs(installed):
    bundled = installed / "etude/bundled"
    assert {path.name for path in bundled.iterdir()} == {"benchmarks", "models", "recipes"}
    assert (bundled / "models/nano/model.safetensors").stat().st_size > 1e6
    assert not list(bundled.rglob("__pycache__"))
    assert not list(installed.glob("tests"))


def test_the_wheel_brings_the_attack_packs_as_they_are(installed):
    """The own programs of `etude doctor sandbox`, and nothing that was compiled beside them."""
    here, there = (folder / "etude/audit/packs" for folder in (ROOT / "src", installed))
    files = [{path.relative_to(root) for path in root.rglob("*") if path.is_file()} for root in (here, there)]
    assert files[1] == {path for path in files[0] if "__pycache__" not in path.parts}
    assert len({path for path in files[1] if path.parent.name == "attacks"}) > 60


def test_the_demo_finds_its_recipe_and_its_model_from_any_folder(installed, tmp_path):
    done = run(installed, tmp_path, "train", str(installed / "etude/bundled/recipes/demo.toml"), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert str(installed / "etude/bundled/models/nano") in done.stdout


def test_what_init_writes_comes_with_the_wheel(installed, tmp_path):
    done = run(installed, tmp_path, "init", "--environment")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my_environment.py").read_text() == (ROOT / "recipes/init/my_environment.py").read_text()


def test_an_evaluation_finds_the_bundled_model_by_name(installed, tmp_path):
    done = run(installed, tmp_path, "eval", "nano", "--suite", "missing")
    assert done.returncode == 2
    assert "missing" in done.stderr
    assert "nano" not in done.stderr


def test_benchmarks_run_from_any_folder(installed, tmp_path):
    done = run(installed, tmp_path, "bench", "--help")
    assert done.returncode == 0, done.stderr
    code = "from etude.config import bundled; print(bundled('benchmarks/asynchrony.py'))"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(installed / "etude/bundled/benchmarks/asynchrony.py"), done.stderr


def test_the_lock_holds_every_direct_dependency_with_digests_and_no_address():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["optional-dependencies"]
    named = [
        *project["dependencies"],
        *(line for extra in ("play", "serve", "apply", "live", "postgres", "dev") for line in groups[extra]),
    ]
    lock = (ROOT / "requirements/dev.txt").read_text()
    for line in named:
        name = line.split(">=")[0].split("[")[0]
        if name not in ("etude", "torch"):
            assert f"\n{name}==" in f"\n{lock}" or f"\n{name.replace('_', '-')}==" in f"\n{lock}", name
    assert "://" not in lock
    assert all("--hash=sha256:" in block for block in lock.split("\n    # via")[0:1])
    assert "\ntorch==" not in lock


def test_a_package_has_the_notes_of_its_version_and_a_tag(tmp_path, monkeypatch):
    package = requirement("package")
    changelog = "# Changelog\n\n## 0.2.0\n\n- New.\n\n## 0.1.0 (2026)\n\n- Old.\n"
    assert package.notes(changelog, "0.1.0") == "- Old.\n"
    with pytest.raises(SystemExit, match=r"no section 0\.3\.0"):
        package.notes(changelog, "0.3.0")
    assert package.notes((ROOT / "CHANGELOG.md").read_text(), package.version())
    for name in ("pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "one"], cwd=tmp_path, check=True)
    monkeypatch.setattr(package, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["package"])
    with pytest.raises(SystemExit, match="is not tagged v"):
        package.main()


def test_the_commands_of_the_install_check_are_those_that_there_are(capsys):
    for step in (step for part in requirement("installed").STEPS.values() for step in part if not step.python):
        words = step.line.split()
        with contextlib.suppress(SystemExit):  # --help and --keys end at once, others with a word on stderr
            arguments, rest = command_parser(words).parse_known_args(words)
            assert not rest or arguments.takes_overrides, step.line
        assert not capsys.readouterr().err, step.line
