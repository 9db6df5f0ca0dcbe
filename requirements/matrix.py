"""`make matrix`: the supported interpreters, and the lowest and the newest versions of the direct dependencies.

Each cell is a fresh virtual environment below .venv/matrix. On the newest interpreter the torch-free core is tested,
because a CPU wheel of the pinned torch exists for few interpreters; on the oldest one everything is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST = (3, 11)
TORCH = "torch==2.13.0"
CORE_TESTS = (
    "tests/test_architecture.py", "tests/test_store.py", "tests/ledger", "tests/tasks", "tests/grading",
    "tests/harness", "tests/dashboard",
)  # fmt: skip
TEST_TOOLS = ("hypothesis>=6.140", "boto3>=1.40", "moto[server]>=5.1", "psycopg[binary]>=3.2")


def interpreters() -> list[str]:
    """The oldest supported interpreter, and the newest that is installed."""
    names = [f"python3.{minor}" for minor in range(OLDEST[1], 30)]
    candidates = [path for name in names if (path := shutil.which(name)) and _works(path)]
    if not candidates:
        sys.exit(f"no Python >= {OLDEST[0]}.{OLDEST[1]} is on PATH")
    return list(dict.fromkeys([candidates[0], candidates[-1]]))


def lowest(extras: tuple[str, ...]) -> list[str]:
    """The direct dependencies of the core and of `extras`, each at its lowest supported version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    required = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    return [re.sub(r">=\s*", "==", line) for line in required if not line.startswith(("etude", "torch"))]


def cell(python: str, name: str, packages: list[str], tests: tuple[str, ...]) -> bool:
    """Makes an environment, installs the packages and this checkout, and runs the tests; whether all of it worked."""
    folder = ROOT / ".venv" / "matrix" / name
    shutil.rmtree(folder, ignore_errors=True)
    run([python, "-m", "venv", str(folder)])
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]
    steps = [[*pip, TORCH]] if TORCH in packages else []
    steps += [[*pip, *packages, *TEST_TOOLS], [*pip, "--no-deps", "--editable", str(ROOT)]]
    steps += [[str(folder / "bin/python"), "-m", "pytest", "-q", "-m", "not slow and not gpu and not vllm", *tests]]
    return all(run(step) for step in steps)


def run(command: list[str]) -> bool:
    """Runs a command in the repository; whether it succeeded."""
    return subprocess.run(command, cwd=ROOT).returncode == 0


def _works(python: str) -> bool:
    return subprocess.run([python, "-c", "import venv, sqlite3, ssl"], capture_output=True).returncode == 0


def main() -> int:
    """Runs every cell and prints one line for each. Exit code 1 if one failed."""
    oldest, *newer = interpreters()
    everything = ("play", "serve", "apply")
    cells = [
        (oldest, "oldest-lowest", [TORCH, *lowest(everything)], ("tests",)),
        (oldest, "oldest-newest", [TORCH, f"{ROOT}[train,apply]"], ("tests",)),
        *((python, "newest-lowest", lowest(("play",)), CORE_TESTS) for python in newer),
        *((python, "newest-newest", [f"{ROOT}[play]"], CORE_TESTS) for python in newer),
    ]
    chosen = sys.argv[1:] or [name for _, name, _, _ in cells]
    results = {name: cell(python, name, packages, tests) for python, name, packages, tests in cells if name in chosen}
    for name, worked in results.items():
        print(f"{name}: {'passed' if worked else 'FAILED'}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
