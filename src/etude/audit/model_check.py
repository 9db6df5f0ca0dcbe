"""The check of one model folder: what its files say (`weights.preflight`), and how exactly it is computed here
(`architectures`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from etude.audit.architectures import table
from etude.errors import UserError
from etude.models import support
from etude.weights.preflight import FolderReport


@dataclass(frozen=True)
class ModelCheck:
    """The check of a model folder. `row` is None where the model cannot be loaded, for the reason `refusal`."""

    report: FolderReport
    row: table.ModelRow | None
    refusal: str = ""

    @property
    def faults(self) -> int:
        """The number of faults: findings, uses that are computed wrong without an error, and a model that does not
        load."""
        return len(self.report.faults) + bool(self.refusal) + (self.row is not None and self.row.verdict == "silent")

    def summary(self) -> dict[str, Any]:
        """The check as an object of JSON."""
        findings = [
            {"name": f.name, "severity": f.severity, "sentence": f.sentence, "edits": [str(edit) for edit in f.edits]}
            for f in self.report.findings
        ]
        if self.refusal:
            findings.insert(0, {"name": "loading", "severity": "fault", "sentence": self.refusal, "edits": []})
        row = {} if self.row is None else {"model_type": self.row.model_type, "cells": asdict(self.row)["cells"]}
        speech = asdict(self.report.speech)
        return {"folder": str(self.report.folder), "ok": not self.faults, "findings": findings, **speech, **row}


def check_model(report: FolderReport) -> ModelCheck:
    """The check of a folder that has been examined; exactness is measured unless a fault keeps the model from being
    loaded."""
    folder = report.folder
    if any(fault.stops for fault in report.faults):
        return ModelCheck(report, None)
    try:
        examined = table.Examined(folder)
        if not support.refusal(examined.config, "rows"):
            assert examined.ours is not None, "the model is loaded here, so that a folder's fault is not one of a use"
    except UserError as e:
        return ModelCheck(report, None, str(e))
    return ModelCheck(report, table.measured(folder.name, examined, table.MEASURED))
