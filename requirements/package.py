"""`make package`: the wheel, its digest and the notes of this version, in dist/.

The commit must be tagged vVERSION, with the version of pyproject.toml, unless `--untagged` is given. The notes are the
version's section of CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


def notes(changelog: str, version: str) -> str:
    """The section of a version, without its heading. Raises SystemExit: there is none."""
    sections = changelog.split("\n## ")
    found = [text for text in sections[1:] if text.split()[0] == version]
    if not found:
        raise SystemExit(f"CHANGELOG.md has no section {version}; add `## {version}`")
    return found[0].partition("\n")[2].strip() + "\n"


def version() -> str:
    """The version of this checkout."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def main() -> None:
    """Write dist/ anew."""
    number = version()
    text = notes((ROOT / "CHANGELOG.md").read_text(), number)
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    if f"v{number}" not in tags.stdout.split() and "--untagged" not in sys.argv[1:]:
        raise SystemExit(f"this commit is not tagged v{number}; tag it, or give --untagged")
    shutil.rmtree(DIST, ignore_errors=True)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(DIST)]
    subprocess.run([*wheel, str(ROOT)], check=True, timeout=600)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(DIST.glob("*.whl"))]
    (DIST / "SHA256SUMS").write_text("".join(lines))
    (DIST / "NOTES.md").write_text(text)
    print("".join(lines), end="")


if __name__ == "__main__":
    main()
