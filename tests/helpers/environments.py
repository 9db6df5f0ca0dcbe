"""Virtual environments that hold what some extras of etude bring and nothing else, made of links to this one's files.

They are made in half a second, without pip or network; `make install-check` installs the wheel instead.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def system_python() -> str:
    """Debian's interpreter, in whose folder there is no `python`, if it can import what is installed here."""
    path, here = "/usr/bin/python3", f"{sys.version_info[0]}.{sys.version_info[1]}"
    line = "import sys, venv; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"
    if Path(path).exists():
        done = subprocess.run([path, "-c", line], capture_output=True, text=True, timeout=30, check=False)
        if done.stdout.strip() == here:
            return path
    return sys.executable


def environment(folder: Path, *extras: str, python: str = sys.executable) -> Path:
    """A new environment with the core and `extras`; its interpreter."""
    command = [python, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    seen: set[tuple[str, frozenset[str]]] = set()
    for found in _closure("etude", frozenset(extras), seen):
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link, source = site / top, Path(str(found.locate_file(top)))
            if source.exists() and not link.exists() and top != "__pycache__":
                link.symlink_to(source)
    return folder / "bin/python"


def _closure(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[Distribution]:
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    try:
        found = distribution(name)
    except PackageNotFoundError:  # of another platform
        return
    yield found
    for line in found.requires or ():
        wanted = Requirement(line)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield from _closure(wanted.name, frozenset(wanted.extras), seen)
