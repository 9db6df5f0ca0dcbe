"""The libraries of this folder's tests as fixtures."""

from __future__ import annotations

from tests.helpers.libraries import clone, releases

__all__ = ["clone", "releases"]
