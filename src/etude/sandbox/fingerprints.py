"""Fingerprints of machines, as `audit/parity/fingerprint.py` prints them: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import UserError
from etude.sandbox import machine_description
from etude.sandbox.machine_profile import Like

FORMAT = 2  # that of fingerprint.py, which runs on other machines and imports nothing


@dataclass(frozen=True)
class FingerprintSample:
    """One fingerprint. Samples of one `machine` never stand on both sides of a fold."""

    machine: str
    probes: Mapping[str, Any]

    @property
    def is_request(self) -> bool:
        """Whether the fingerprint is of an agent's request to its model, and not of a machine."""
        return "prompt.system" in self.probes


def read(paths: Sequence[Path]) -> list[FingerprintSample]:
    """The samples in files that `fingerprint.py` has printed. Raises UserError that names the file and the line."""
    samples: list[FingerprintSample] = []
    for path in paths:
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(
                f"{path} cannot be read ({e}); record one with `etude doctor parity --record FILE` in production"
            ) from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                samples.append(parse(line, f"{path}, line {number}"))
    if not samples:
        raise UserError("there is no fingerprint in the files of --against; record some on your production machines")
    return samples


def parse(line: str, where: str) -> FingerprintSample:
    """One line. Raises UserError."""
    try:
        record = json.loads(line)
        version, name, probes = record["format"], record["machine"], record["probes"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where} is no fingerprint; record it again with this etude's script") from None
    if version != FORMAT or not isinstance(name, str) or not isinstance(probes, dict):
        raise UserError(f"{where} has fingerprint format {version!r}, this etude reads {FORMAT}; record it again")
    return FingerprintSample(name, probes)


def load_profiles(path: Path) -> Like:
    """Machines that boxes imitate: a description (.toml), or fingerprints. Raises UserError."""
    return machine_description.read(path) if path.suffix == ".toml" else [sample.probes for sample in read([path])]
