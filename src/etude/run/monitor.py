"""Feeds the terminal view, the engines' part of the timeline and memory.jsonl with figures of the run's processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from etude import runfolder
from etude.code import lines_of
from etude.config import RLConfig
from etude.dashboard import LiveView
from etude.processes import resident_bytes
from etude.run.state import Progress

SECONDS = 0.5
MEMORY_SECONDS = 10.0
NOTE = "note: "
_NUMBERS = ("step", "time/spent", "time/step", "reward/all/mean", "rollout/pass_rate", "off_policy/mean")  # of metrics


class Monitor:
    """Called often by the controller; reads and draws at most twice a second."""

    def __init__(
        self,
        folder: Path,
        config: RLConfig,
        view: LiveView,
        pids: Mapping[str, int],
        trainer: Path,
        expected: float | None = None,
    ) -> None:
        """`pids`: the other processes of the run, by name. `trainer`: the trainer's log, whose lines that begin with
        `note: ` are shown. `expected`: the estimated seconds of a step, used until a step has ended."""
        self._expected = expected
        self._folder, self._config, self._view = folder, config, view
        self._pids = {"controller": os.getpid(), **pids}
        self._memory_read = 0.0
        self._log, self._log_read = trainer, 0
        self._read = 0  # bytes of metrics.jsonl
        self._steps = 0
        self._spent = 0.0  # seconds of training, by the last step
        self._started = self._last = self._stepped = runfolder.now()
        self._engine: dict[str, float] = {}
        self._ended: int | None = None  # episodes, at the last look
        self._new_steps()
        self._earlier = self._steps  # of earlier attempts

    def tick(self, progress: Progress) -> None:
        """Shows the run's progress, at most every `SECONDS`."""
        now = runfolder.now()
        if now - self._last < SECONDS:
            return
        self._notes()
        self._new_steps()
        self._engine_busy(progress.engine, now)
        if now - self._memory_read >= MEMORY_SECONDS:
            self._memory_read = now
            held = {f"memory/{name}": resident_bytes(pid) for name, pid in self._pids.items()}
            runfolder.append_json(self._folder / "memory.jsonl", {"step": self._steps, "time": now, **held})
        before = progress.ended if self._ended is None else self._ended  # not those of earlier attempts
        view = self._view
        view.process("controller", f"{progress.live} of {progress.limit} live episodes, {progress.ended} finished")
        view.process("sandbox", f"{progress.tests_run} test runs, {progress.tests_remembered} answered from memory")
        view.update(
            done=self._steps,
            total=self._config.trainer.steps,
            seconds_left=self._seconds_left(now),
            version=progress.served,
            episodes_per_s=(progress.ended - before) / (now - self._last),
        )
        self._ended, self._last = progress.ended, now

    def _seconds_left(self, now: float) -> float | None:
        """The seconds until trainer.minutes or trainer.steps end the stage, whichever comes first."""
        trainer = self._config.trainer
        elapsed = now - self._started
        taken, left = self._steps - self._earlier, trainer.steps - self._steps
        by_steps = None if self._expected is None else self._expected * left - elapsed
        if taken:
            by_steps = elapsed / taken * left
        by_clock = trainer.minutes * 60 - self._spent - (now - self._stepped) if trainer.minutes else None
        known = [s for s in (by_steps, by_clock) if s is not None]
        return max(0.0, min(known)) if known else None  # a step that has begun is finished

    def _notes(self) -> None:
        """Prints the new notes in the trainer's log."""
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._log_read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._log_read += len(whole)
        for line in lines_of(whole.decode(errors="replace")):
            if line.startswith(NOTE):
                print(f"etude: {line.removeprefix(NOTE)}", file=sys.stderr)

    def _new_steps(self) -> None:
        path = self._folder / "metrics.jsonl"
        if not path.exists() or path.stat().st_size == self._read:
            return
        self._read = path.stat().st_size
        steps = runfolder.read_jsonl(path, _NUMBERS)
        if not steps:
            return
        last = steps[-1]
        self._steps, self._spent, self._stepped = last["step"], last["time/spent"], runfolder.now()
        self._view.process("trainer", f"published version {last['step']} after {last['time/step']:.1f} s")
        self._view.update(
            reward=last["reward/all/mean"], pass_rate=last["rollout/pass_rate"], staleness=last["off_policy/mean"]
        )

    def _engine_busy(self, engine: dict[str, float], now: float) -> None:
        """Adds the engines' busy seconds since the last tick to the timeline, as one span: its length is exact, its
        place is not."""
        if not engine:
            return
        before, self._engine = self._engine or engine, dict(engine)
        busy = engine["busy_seconds"] - before["busy_seconds"]
        tokens = engine["generated_tokens"] - before["generated_tokens"]
        if busy > 0:
            span = {"process": "engine", "state": "generate", "start": self._last, "end": self._last + busy}
            runfolder.append_json(self._folder / "timeline.jsonl", span)
        self._view.process("engine", f"{engine['running']:.0f} running, {engine['waiting']:.0f} waiting")
        self._view.update(tokens_per_s=tokens / (now - self._last))
