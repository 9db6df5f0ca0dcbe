"""All checks of a model folder, and the part that precedes a stage of training."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from etude.errors import UserError
from etude.models import has_weights
from etude.weights.preflight import limits, special_tokens, tensors, turns
from etude.weights.preflight.findings import CONFIG, Finding, ModelFiles


@dataclass(frozen=True)
class FolderReport:
    """The files of a model folder, as they were read: findings, faults first, and how the model speaks."""

    folder: Path
    findings: tuple[Finding, ...]
    speech: turns.Speech

    @property
    def faults(self) -> list[Finding]:
        """The findings that must be mended."""
        return [finding for finding in self.findings if finding.severity == "fault"]


def checked(files: ModelFiles, *, whole: bool = False) -> list[Finding]:
    """The findings in a folder's files, but for the trial of the template. With `whole` all weights are read."""
    return [
        *files.unreadable,
        *tensors.findings(files, whole=whole),
        *special_tokens.findings(files),
        *limits.findings(files),
    ]


def examine(folder: Path, *, whole: bool = True) -> FolderReport:
    """The report on a model folder; with `whole` all its weights are read. Raises UserError for a folder without
    config.json."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is no model folder: give one with a config.json")
    files = ModelFiles(folder)
    speech, more = turns.spoken(files)
    ordered = sorted([*checked(files, whole=whole), *more], key=lambda finding: finding.severity != "fault")
    return FolderReport(folder, tuple(ordered), speech)


def check_before_training(folder: Path) -> None:
    """Reads the small files and the headers of the weights before a stage begins. Faults that etude is not concerned
    by, and notes, are printed once. Raises UserError for a fault that would spoil the run."""
    findings = checked(ModelFiles(folder))
    if not has_weights(folder):  # of a run that is planned for another machine; a stage has refused it before
        findings = [finding for finding in findings if finding.name != "files"]
    for finding in findings:
        if finding.stops:
            cure = " --repair DIR` mends it in a copy" if finding.edits else "` says more"
            raise UserError(f"{folder}: {finding.sentence}; `etude doctor model {folder}{cure}")
    for finding in findings:
        cure = f"; `etude doctor model {folder} --repair DIR` mends it in a copy" if finding.edits else ""
        print(f"note: {folder.name}: {finding.sentence}{cure}", file=sys.stderr, flush=True)
