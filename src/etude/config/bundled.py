"""Files that come with etude: bundled models by name, recipes and benchmarks."""

from __future__ import annotations

from pathlib import Path

import etude
from etude.errors import UserError


def bundled(path: str) -> Path | None:
    """A file or folder that comes with etude, such as "recipes/demo.toml": of the installed package, else of the
    repository that the package lies in. None if neither has it."""
    package = Path(etude.__file__).parent
    return next((root / path for root in (package / "bundled", package.parents[1]) if (root / path).exists()), None)


def find_model(name: str | Path) -> Path:
    """The absolute folder of a model: `name` is a folder, or the name of a bundled model. Raises UserError. A folder
    `models/NAME` that is gone is looked for among the bundled models, because an installation may have moved."""
    path = Path(name)
    if path.is_dir():
        return path.absolute()
    folder = bundled(f"models/{path.name}") if path.parent.name in ("", "models") else None
    if folder is None:
        raise UserError(f"{name} is not a folder, nor the name of a bundled model such as nano: give an HF folder")
    return folder
