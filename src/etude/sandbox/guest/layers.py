"""The layers of a live box, seen from its pid 1: what its work tree shows, and what changed in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from . import files, linux, root


def lowers() -> list[str]:
    """Folders that a box's work tree shows below what the box writes, the topmost first."""
    return [*([root.TASK] if os.path.isdir(root.TASK) else []), root.WORKSPACE]


def shared() -> list[int]:
    """Descriptors of what all boxes of an image begin with, before the overlay covers the workspace's own files."""
    return [_folder(lower) for lower in lowers()]


def hide() -> None:
    """Keep the box out of its layers but for the work tree: pid 1 alone may pass."""
    os.chmod(root.LAYER, 0)  # as the template did with the other
    for place in (root.LAYER, root.SHARED):
        linux.set_attributes(place, linux.MS_RDONLY, tree=False)


class WorkTree:
    """The layers of a mounted box, seen by a process that may pass; `shared` are descriptors from `shared()`."""

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
