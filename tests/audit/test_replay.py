"""Replay of a run outside of whole runs (`tests/run/test_recorded_run.py` plays real ones again)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.audit import replay
from etude.config import RLConfig, validate
from etude.errors import UserError


def test_a_replay_uses_the_backend_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The configured backend is not installed here: nothing is played on another one."""
    table = {"tasks": {"dataset": "unused"}, "sandbox": {"type": "podman", "image": "unused"}}
    episodes: Any = SimpleNamespace(config=validate(RLConfig, table, "test"), keys=[])
    dataset: Any = SimpleNamespace(parts=())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="podman is not installed"):
        asyncio.run(replay._replay(episodes, dataset))
