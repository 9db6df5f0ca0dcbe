"""Descriptions of the machines that an agent works on; `workspace.toml` beside this file is the reference."""

from __future__ import annotations

import math
import random
import tomllib
from pathlib import Path

import msgspec

from etude.errors import UserError

REFERENCE = Path(__file__).with_name("workspace.toml")


class _Sometimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    environment: dict[str, str] = {}
    home: dict[str, str] = {}


class _Folders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    always: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `workspace.toml`, where they are explained. Ranges are (least, most), sizes (rows, columns)."""

    name: str
    users: tuple[str, ...]
    hosts: tuple[str, ...]
    known_host: bool
    machine_id: bool
    accounts: int
    init: tuple[str, ...]
    uptime_hours: tuple[float, float]
    checkout_minutes: tuple[float, float]
    depth: int
    pids: tuple[float, float]
    terminals: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    path: tuple[str, ...]
    history: tuple[int, int]
    commands: tuple[str, ...]
    environment: dict[str, str]
    home: dict[str, str]
    folders: _Folders = _Folders()
    sometimes: _Sometimes = _Sometimes()
    checkout_rate: tuple[float, float] = (500.0, 8000.0)
    kernel_line: str | None = None  # None: the host's
    hypervisor: bool | None = None  # whether /proc/cpuinfo shows one; None: as the host's


def read(path: Path) -> Description:
    """Read a description of machines. Raises UserError that names the fault."""
    try:
        description = msgspec.convert(tomllib.loads(path.read_text("utf-8")), Description)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise UserError(f"{path} describes no machines ({e}); see {REFERENCE}.") from None
    for name in ("users", "hosts", "init", "terminals", "sizes", "path", "commands"):
        if not getattr(description, name):
            raise UserError(f"{path}: {name} is empty; give at least one.")
    for name in ("uptime_hours", "checkout_minutes", "checkout_rate", "pids", "history"):
        low, high = getattr(description, name)
        if not 0 < low <= high:
            raise UserError(f"{path}: {name} is no range from a positive number to one that is no less.")
    return description


def within(rng: random.Random, ends: tuple[float, float]) -> float:
    """A number drawn from a range, evenly on a logarithmic scale."""
    return math.exp(rng.uniform(*map(math.log, ends)))
