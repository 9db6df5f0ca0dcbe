"""Files of fingerprints: the values of probes on production machines. `audit/parity/fingerprint.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.code import lines_of
from etude.errors import UserError

FORMAT = 2  # as in the script, which cannot import etude


@dataclass(frozen=True)
class FingerprintSample:
    """The probes of one machine, or of one conversation, at one time."""

    machine: str
    probes: Mapping[str, Any]

    @property
    def is_request(self) -> bool:
        """Whether the sample is of an agent's requests to its model, and not of a machine."""
        return "prompt.system" in self.probes


def read_fingerprints(paths: Sequence[Path]) -> list[FingerprintSample]:
    """The samples in files that the script has printed. Raises UserError that names the file and the line."""
    samples: list[FingerprintSample] = []
    for path in paths:
        try:
            lines = lines_of(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(
                f"{path} cannot be read ({e}); record one with `etude doctor parity --record FILE` in production"
            ) from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                samples.append(parse_fingerprint(line, f"{path}, line {number}"))
    if not samples:
        raise UserError("there is no fingerprint in what --against names; record some on your production machines")
    return samples


def parse_fingerprint(line: str, where: str) -> FingerprintSample:
    """The sample in one line; `where` names the line in errors. Raises UserError."""
    try:
        record = json.loads(line)
        version, name, probes = record["format"], record["machine"], record["probes"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where} is no fingerprint; record it again with this etude's script") from None
    if version != FORMAT or not isinstance(name, str) or not isinstance(probes, dict):
        raise UserError(f"{where} has fingerprint format {version!r}, this etude reads {FORMAT}; record it again")
    return FingerprintSample(name, probes)
