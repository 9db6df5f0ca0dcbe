"""Clocks of single modules under test.

The functions of `time` belong to all threads of the test's process. While a test alters them there, the event loop of a
server that another test has left running sets its next sleep by them, and is deaf until that time has come.
"""

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


def set_clock(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **functions: Callable[..., object]) -> None:
    """Replaces functions of `time` for one module only, e.g. `monotonic=lambda: 5.0`."""
    monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), **functions}))
