"""The import rules of AGENTS.md: read from the source, and checked by importing."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import etude

ROOT = Path(etude.__file__).parent
TORCH_FREE = (
    "tasks",
    "environments",
    "harness",
    "rollout",
    "live",
    "config",
    "records",
    "evals",
    "dashboard",
    "edits",
    "errors",
)
HEAVY = {"torch", "transformers"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# the command and the stages that it starts
MAIN = {"cli", "controller", "evaluate", "monitor", "replay", "rl", "run_report", "train"}


def modules(*parts: str) -> list[str]:
    """The modules of etude below the named packages, or all; as in "harness.loop"."""
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in ROOT.rglob("*.py")]
    names = sorted(name.removesuffix(".__init__") for name in names)
    return [name for name in names if not parts or name.split(".")[0] in parts]


def source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module: str) -> Iterator[str]:
    """Every name that the module imports, also inside functions; "a.b.c" for `from a.b import c`.

    Relative imports (the files that run inside boxes, outside the package) stay within their folder and are left out.
    """
    for node in ast.walk(ast.parse(source(module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(module: str, forbidden: tuple[str, ...]) -> list[str]:
    return [name for name in imports(module) if any(name == f or name.startswith(f"{f}.") for f in forbidden)]


@pytest.mark.parametrize("module", modules(*TORCH_FREE))
def test_torch_free_packages_do_not_name_torch(module):
    assert offenders(module, tuple(HEAVY)) == []
    assert offenders(module, ("etude.models", "etude.trainer", "etude.run.loop")) == []


@pytest.mark.parametrize("module", modules("models"))
def test_models_lie_below_trainer_and_inference(module):
    assert offenders(module, ("etude.trainer", "etude.inference", "etude.run.loop")) == []


@pytest.mark.parametrize("module", modules("trainer"))
def test_the_trainer_does_not_import_the_engine(module):
    assert offenders(module, ("etude.inference", "etude.run.loop")) == []


@pytest.mark.parametrize("module", modules("inference"))
def test_the_engine_does_not_import_the_trainer(module):
    assert offenders(module, ("etude.trainer", "etude.run.loop")) == []


def test_triton_is_imported_by_one_module_when_a_gpu_needs_it():
    assert [module for module in modules() if offenders(module, ("triton",))] == ["weights.triton_kernels"]
    assert [m for m in modules() if offenders(m, ("etude.weights.ulpd.triton_kernels",))] == ["weights.device"]
    at_import = [node for node in ast.parse(source("weights.device").read_text()).body if isinstance(node, ast.stmt)]
    named = [alias.name for node in at_import if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    assert "kernels" in named
    assert "triton_kernels" not in named


def test_nothing_below_the_command_imports_the_controller():
    importers = {module for module in modules() if offenders(module, ("etude.run.loop",))}
    assert importers <= MAIN


@pytest.mark.parametrize("module", modules())
def test_no_pickle(module):
    assert offenders(module, tuple(PICKLES)) == []
    calls = [node for node in ast.walk(ast.parse(source(module).read_text())) if isinstance(node, ast.Attribute)]
    assert not [
        c
        for c in calls
        if isinstance(c.value, ast.Name) and (c.value.id, c.attr) in {("torch", "load"), ("torch", "save")}
    ]


def loaded_by(names: list[str]) -> set[str]:
    """The heavy packages that a fresh interpreter holds after importing the modules."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(json.dumps(sorted({HEAVY!r} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_torch_free_packages_loads_no_torch():
    runnable = [
        m for m in modules(*TORCH_FREE) if not m.startswith("environments.inside") and not m.endswith("__main__")
    ]
    assert loaded_by([f"etude.{module}" for module in runnable]) == set()


def test_the_command_line_starts_without_torch():
    assert loaded_by(["etude.cli.main"]) == set()
