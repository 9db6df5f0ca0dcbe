"""The layers of a live box, seen from its pid 1: the folders of its work tree, and the changed files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from . import files, linux, root


def lowers() -> list[str]:
    """The lower folders of a box's work tree, below the files that the box writes, topmost first."""
    return [*([root.TASK] if os.path.isdir(root.TASK) else []), root.WORKSPACE]


def shared() -> list[int]:
    """Descriptors of the common layers of an image's boxes, taken before the overlay covers the workspace."""
    return [_folder(lower) for lower in lowers()]


def hide() -> None:
    """Close the layers to the box, all but the work tree: pid 1 alone may enter."""
    os.chmod(root.LAYER, 0)  # as the template did with SHARED
    for place in (root.LAYER, root.SHARED):
        linux.set_attributes(place, linux.MS_RDONLY, tree=False)


class WorkTree:
    """The layers of a mounted box, seen by a process that may enter them; `shared` are descriptors from `shared()`."""

    def __init__(self, limits: dict[str, Any], shared: Sequence[int]) -> None:
        self.limits = limits
        self.shared = shared
        self.written = _folder(root.UPPER)
        self.descriptor = _folder(root.WORKSPACE)

    def changes(self, roots: Sequence[str] = ()) -> Iterator[tuple[str, bytes | None]]:
        """Changed files: path, and content or None if deleted."""
        return files.changed(self.written, self.shared, self.descriptor, self.limits["disk"], roots)


def _folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
