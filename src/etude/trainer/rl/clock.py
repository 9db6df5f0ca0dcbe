"""Accounts for the seconds of a run's training: in timeline.jsonl, in metrics, and against the limit of minutes."""

from __future__ import annotations

import math
from pathlib import Path

from etude import runfolder


class TrainingClock:
    """Counts the seconds of training over all attempts of a run; `minutes` is their limit, or None. A step calls
    `begin` (its groups are ready), `loaded`, `trained`, `end`; between steps the trainer waits. The time before an
    attempt's first groups are ready, in which tasks are built and the model is measured, does not count as training.
    Without `notes` nothing is written."""

    def __init__(self, run: Path, minutes: float | None, *, notes: bool = True):
        self._run, self._notes = run, notes
        self._limit = (minutes or math.inf) * 60
        lines = runfolder.read_jsonl(run / "metrics.jsonl", ("time/spent",))
        self._spent: float = lines[-1]["time/spent"] if lines else 0.0
        self._first = True
        self._waiting = runfolder.now()  # start of the wait
        self._waited = 0.0
        self._began = self._loaded = self._trained = 0.0

    @property
    def over(self) -> bool:
        """Whether the minutes are spent."""
        return self._spent >= self._limit

    def progress(self, published: int, steps: int) -> float:
        """The completed share of the run, in [0, 1]: of its steps or of its minutes, whichever is more."""
        return max(published / steps, self._spent / self._limit)

    def begin(self) -> None:
        """Ends the wait for groups."""
        self._waited = self._note("wait", self._waiting)
        self._spent += 0.0 if self._first else self._waited
        self._began = runfolder.now()

    def loaded(self) -> None:
        """Marks that the batch is in memory."""
        self._loaded = runfolder.now()

    def trained(self) -> None:
        """Marks that the weights are updated, or left unchanged."""
        self._trained = runfolder.now()

    def until_trained(self) -> dict[str, float]:
        """The metrics of the step up to `trained`, in seconds."""
        return {
            "time/load": self._loaded - self._began,
            "time/train": self._trained - self._loaded,
            "time/wait_for_batch": self._waited,
        }

    def repeated(self, since: float) -> None:
        """Records that a step of an earlier attempt was computed again, which does not count as training of this
        one."""
        self._note("repeat", since)

    def end(self) -> dict[str, float]:
        """Ends the step and begins the next wait. Returns the metrics of the whole step."""
        self._note("train", self._began, self._trained)
        figures = self.figures(self._note("publish", self._trained))
        self._spent = figures["time/spent"]
        self._first, self._waiting = False, figures["time"]
        return figures

    def figures(self, publishing: float = 0.0) -> dict[str, float]:
        """The metrics of the whole step, if its publication takes so many seconds."""
        now = self._trained + publishing
        busy = now - self._began
        return {
            "time": now,
            "time/publish": publishing,
            "time/step": busy,
            "time/spent": self._spent + busy,
            "perf/trainer_busy": busy / (busy + self._waited),
        }

    def _note(self, state: str, start: float, end: float | None = None) -> float:
        """Appends a period that ends now, or at `end`, to the timeline. Returns its seconds."""
        end = runfolder.now() if end is None else end
        record = {"process": "trainer", "state": state, "start": start, "end": end}
        if self._notes:
            runfolder.append_json(self._run / "timeline.jsonl", record)
        return end - start
