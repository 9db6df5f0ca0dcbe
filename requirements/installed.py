"""`make core` and `make wheel`: etude as a user installs the wheel, in an empty environment and an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
MOST_MB = 150  # of the core's files, without pip and without the bytecode that Python writes beside them
HEAVY = ("torch", "transformers", "numba")
CORE = (
    ("--help",),
    ("doctor",),
    ("tasks", "build", str(ROOT / "tests/tasks/repositories/tiny-1.0"), "-o", "tasks", "--max-tasks", "6"),
    ("tasks", "check", "tasks"),
)
TRAIN = (
    ("doctor",),
    ("demo", "--trainer.steps", "2", "--eval.max_tasks", "8", "--tasks.max_tasks", "40"),
    ("eval", "nano", "--suite", "outputs/demo/tasks", "--max-tasks", "4", "--samples", "1"),
    ("bench", "shared-prompt", "--quick", "--json"),
)


def megabytes(folder: Path) -> tuple[float, float]:
    """Size of the installed files without pip, and of Python's bytecode among them."""
    files = [p for p in folder.rglob("*") if p.is_file() and not p.relative_to(folder).parts[0].startswith("pip")]
    code = sum(p.stat().st_size for p in files if p.suffix == ".pyc")
    return (sum(p.stat().st_size for p in files) - code) / 1e6, code / 1e6


def install(folder: Path, extra: str) -> Path:
    """A fresh environment with the wheel of this checkout; its folder of commands."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder / "wheel"), str(ROOT)], check=True)
    wheel = next((folder / "wheel").glob("etude-*.whl"))
    if extra:
        subprocess.run([*pip, "install", TORCH], check=True)
    subprocess.run([*pip, "install", f"{wheel}{extra}"], check=True)
    return folder / "bin"


def main() -> int:
    """Runs the commands of a user, stops at the first that fails, and prints the size of the core."""
    what = sys.argv[1]
    folder = ROOT / ".venv" / what
    bin = install(folder, "[train]" if what == "train" else "")
    empty = folder / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments in TRAIN if what == "train" else CORE:
        print("$ etude", *arguments, flush=True)
        code = subprocess.run([str(bin / "etude"), *arguments], cwd=empty, env=environment).returncode
        if code:
            return code
    if what == "core":
        packages = next(folder.glob("lib/python*/site-packages"))
        files, bytecode = megabytes(packages)
        print(f"site-packages without pip: {files:.0f} MB of files, and {bytecode:.0f} MB of bytecode")
        heavy = [name for name in HEAVY if (packages / name).exists()]
        return int(bool(heavy) or files > MOST_MB)
    return 0


if __name__ == "__main__":
    sys.exit(main())
