"""A Python that has a vLLM of some version, which is a line of text."""

import sys
from pathlib import Path


def python_with(folder: Path, version: str, log: str = "") -> str:
    """The path of a Python in which vLLM has this version; its server prints `log` and ends with code 1."""
    package, about = folder / "vllm/entrypoints/cli", folder / f"vllm-{version}.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (package / "main.py").write_text(f"print({log!r})\nraise SystemExit(1)")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)
