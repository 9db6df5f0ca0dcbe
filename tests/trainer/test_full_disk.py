"""A full disk under a stage's run: a sentence, and nothing that a resumed run cannot read."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from etude import runfolder
from etude.corpus.windows import StreamPlace, write_report
from etude.errors import RunFailed, UserError
from etude.trainer.finetune.reading import RowReader
from etude.trainer.finetune.training_loop import _TrainingRecord

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    for name in ("lock", "metrics.jsonl"):
        (tmp_path / name).symlink_to(FULL)
    with pytest.raises(UserError, match=r"lock cannot be written: .*; check the disk"), runfolder.lock(tmp_path):
        pass
    record = _TrainingRecord(tmp_path / "metrics.jsonl", 1, 0, 0.0, None)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        record.write({"step": 1.0})


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    report = tmp_path / "gone" / "data.json"
    with pytest.raises(UserError, match=r"data\.json cannot be written"):
        write_report(report, {})


def test_a_reader_that_dies_is_named_with_what_killed_it(tmp_path: Path) -> None:
    """Not with the signal by which the trainer would end it."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    reader = RowReader(run, 0, StreamPlace())
    with pytest.raises(RunFailed, match="the reader exited with code 1"):
        reader.frame()
    reader.close()
    reader = RowReader(run, 0, StreamPlace())
    os.kill(reader.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match="the reader was killed by SIGKILL; resume the run"):
        reader.frame()
    reader.close()
