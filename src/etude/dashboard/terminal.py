"""The terminal view while a run goes on, and the table at its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from etude.dashboard.report import LATER, HeldOutSide, RunReport
from etude.dashboard.text import byte_count, compact, duration, inert, optional, percent, points
from etude.dashboard.view import PROCESSES

_BLOCKS = "▁▂▃▄▅▆▇█"
_HISTORY = 48  # values of the sparkline
_LINE_SECONDS = 5.0  # between two plain lines
_ESTIMATE_SECONDS, _ESTIMATE_SHARE = 10.0, 0.1  # of a stage, before the remaining time is shown
_REFRESH = 2  # screens per second: drawing one costs milliseconds that the run needs

# figure -> (label, how it is written); `update` takes others, too, which are written compactly under their own name
_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "reward": ("reward", lambda v: f"{v:.3f}"),
    "pass_rate": ("pass rate", percent),
    "staleness": ("staleness", lambda v: f"{v:.2f} versions"),
    "episodes_per_s": ("episodes/s", lambda v: f"{v:.1f}"),
    "tokens_per_s": ("tokens/s", compact),
    "version": ("weights", lambda v: f"v{v:.0f}"),
}


class LiveView:
    """A view of a running run, fed by plain calls. A context manager. On a terminal it draws in place, twice a second,
    from its own thread. Elsewhere (a CI log) it writes a plain line for each stage, and one at most every five seconds
    when progress is reported."""

    def __init__(
        self,
        title: str,
        stages: Sequence[str],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._draws = self._console.is_terminal and not self._console.is_dumb_terminal  # TERM=dumb: plain lines
        self._clock = clock
        self._title = inert(title)
        self._stages = tuple(stages)
        self._started = self._stage_started = clock()
        self._last_line = float("-inf")
        self._stage = ""
        self._taken: dict[str, float] = {}  # finished stages in seconds
        self._done: float = 0
        self._total: float = 0
        self._unit = ""
        self._note = ""
        self._seconds_left: float | None = None
        self._figures: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=_HISTORY)
        self._processes: dict[str, str] = {}
        self._live = Live(
            get_renderable=self._screen, console=self._console, refresh_per_second=_REFRESH, transient=True
        )

    def __enter__(self) -> LiveView:
        if self._draws:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_stage()
        if self._live.is_started:
            self._live.stop()

    def stage(self, name: str, total: float = 0, unit: str = "") -> None:
        """Enter a stage of `total` units (0: unknown), e.g. `stage("train", 120, "steps")`."""
        self._close_stage()
        self._stage, self._done, self._total, self._unit = inert(name), 0, total, unit
        self._note = ""
        self._seconds_left = None
        self._stage_started = self._clock()
        self._processes.clear()
        self._figures.clear()
        self._plain(f"{self._where()}: {self._stage} …", force=True)

    def update(
        self, done: float | None = None, total: float | None = None, seconds_left: float | None = None, **figures: float
    ) -> None:
        """Report progress and figures: those of `_FIGURES`, such as reward and pass_rate, or any other. `seconds_left`
        overrides the estimate from `done` and `total` until the next `done`, e.g. when the clock ends the stage."""
        if done is not None:
            self._done, self._seconds_left = done, seconds_left
        self._total = self._total if total is None else total
        self._figures.update(figures)
        if "reward" in figures:
            self._rewards.append(figures["reward"])
        self._plain(self._line())

    def process(self, name: str, doing: str) -> None:
        """Report the present state of a process, e.g. `process("engine", "decoding 43 rows")`."""
        self._processes[inert(name)] = inert(doing)

    def note(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Report the progress of the stage in words; a progress callback for `etude.tasks.build_dataset`."""
        self._note = inert(text)
        self.update(done, total)

    def evaluated(self, done: int, total: int, passed: int) -> None:
        """The progress callback of `etude.evals.suite.evaluate`."""
        self.update(done=done, total=total, pass_rate=passed / max(done, 1))

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of each finished stage."""
        return dict(self._taken)

    def _close_stage(self) -> None:
        if self._stage:
            taken = self._clock() - self._stage_started
            self._taken[self._stage] = self._taken.get(self._stage, 0.0) + taken
            self._plain(f"{self._where()}: {self._stage} took {duration(taken)}", force=True)
            self._stage = ""

    def _plain(self, line: str, force: bool = False) -> None:
        if self._draws:
            return
        now = self._clock()
        if force or now - self._last_line >= _LINE_SECONDS:
            self._last_line = now
            self._console.print(Text(line), soft_wrap=True)

    def _where(self) -> str:
        at = f"{self._stages.index(self._stage) + 1}/{len(self._stages)}" if self._stage in self._stages else "-"
        return f"{self._title} [{at}] {duration(self._clock() - self._started)}"

    def _line(self) -> str:
        parts = [f"{self._where()}: {self._stage} {self._count()}".rstrip(), *filter(None, [self._note])]
        parts += [f"{label} {text}" for label, text in self._written()]
        left = self._left()
        return ", ".join(parts if left is None else [*parts, f"{duration(left)} left"])

    def _count(self) -> str:
        if not self._total:
            return f"{self._done:,.0f} {self._unit}".rstrip() if self._done else ""
        return f"{self._done:,.0f} of {self._total:,.0f} {self._unit}".rstrip()

    def _written(self) -> list[tuple[str, str]]:
        figures = dict(self._figures)
        named = [(label, write(figures[name])) for name, (label, write) in _FIGURES.items() if name in figures]
        return named + [(name.replace("_", " "), compact(v)) for name, v in figures.items() if name not in _FIGURES]

    def _left(self) -> float | None:
        if self._seconds_left is not None:
            return max(0.0, self._seconds_left)
        if not self._total or not self._done:
            return None
        elapsed = self._clock() - self._stage_started
        # The first items of a stage are slower than the rest, and items that run together end together.
        if elapsed < _ESTIMATE_SECONDS or self._done < _ESTIMATE_SHARE * self._total:
            return None
        return elapsed / self._done * max(0.0, self._total - self._done)

    def _screen(self) -> RenderableType:
        # Another thread draws, so every container is copied before the iteration.
        body: list[RenderableType] = [self._stage_row(), self._progress_row()]
        if self._note:
            body.append(Text(self._note, "dim", no_wrap=True, overflow="ellipsis"))
        if figures := self._written():
            body.append(self._figure_row(figures))
        table = Table.grid(padding=(0, 2))
        if rewards := tuple(self._rewards):
            table.add_row(Text("reward", "dim"), Text(sparkline(rewards), "green"))
        processes = dict(self._processes)
        for name in sorted(processes, key=lambda p: PROCESSES.index(p) if p in PROCESSES else len(PROCESSES)):
            table.add_row(Text(name, "dim"), Text(processes[name], no_wrap=True, overflow="ellipsis"))
        if table.row_count:
            body.append(table)
        clock = f" {duration(self._clock() - self._started)} "
        return Panel(
            Group(*body),
            title=Text(f" {self._title} ", "bold"),
            title_align="left",
            subtitle=Text(clock, "dim"),
            subtitle_align="right",
            border_style="dim",
        )

    def _stage_row(self) -> Text:
        text = Text()
        for i, name in enumerate(self._stages):
            style = "bold green" if name == self._stage else "green" if name in self._taken else "dim"
            mark = "●" if name == self._stage else "✓" if name in self._taken else "○"
            text.append(f"{'  ' if i else ''}{mark} {name}", style)
        return text

    def _progress_row(self) -> RenderableType:
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True, justify="right", min_width=14)
        left = self._left()
        row.add_row(
            ProgressBar(total=self._total or None, completed=self._done, pulse=not self._total),
            Text(self._count(), "bold"),
            Text("" if left is None else f"{duration(left)} left", "dim"),
        )
        return row

    def _figure_row(self, figures: Sequence[tuple[str, str]]) -> Text:
        text = Text()
        for label, value in figures:  # hard spaces: a label and its value stay on one line
            text.append(f"{label} ".replace(" ", "\u00a0"), "dim").append(value.replace(" ", "\u00a0"), "bold")
            text.append("   ")
        return text


def sparkline(values: Sequence[float]) -> str:
    """One block per value, from the smallest to the largest; a level line in the middle."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if high - low < 1e-12:
        return _BLOCKS[3] * len(values)
    return "".join(_BLOCKS[round((v - low) / (high - low) * (len(_BLOCKS) - 1))] for v in values)


def final_table(report: RunReport, where: Path | None = None) -> RenderableType:
    """The result of a run as a table; `where` is the path of its page."""
    busy, gap = report.utilisation, report.mismatch
    gaps = {"k2": gap.k2, "k3": gap.k3, "largest": gap.max_abs}
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    rows: list[tuple[str, Text]] = [
        ("held-out pass rate, before", _rate(report.pass_before, report.held_out.before)),
        ("held-out pass rate, after", _rate(report.pass_after, report.held_out.after, "bold")),
        ("paired difference", _difference(report)),
        *_training(report),
        ("steps", Text(f"{report.steps:,}")),
        ("episodes", Text(", ".join(f"{inert(name)} {n:,}" for name, n in report.episodes.items()) or "none")),
        ("busy", Text(f"trainer {percent(busy.trainer, 0)}, engine {percent(busy.engine, 0)}")),
        ("weight versions", Text(f"{report.versions:,}, {byte_count(report.bytes_published)} shipped")),
        ("trainer–engine mismatch", Text(", ".join(f"{name} {optional(value)}" for name, value in gaps.items()))),
        ("checks", _check_row(report.checks)),
        ("time", Text(f"{duration(report.seconds)}{_stages(report)}")),
    ]
    if where is not None:
        rows.append(("report", Text(str(where), "bold", overflow="fold")))
    for label, value in rows:
        table.add_row(label, value)
    title = Text(f" {inert(report.setup.name) or 'result'} ", "bold")
    return Panel(table, title=title, title_align="left", expand=False)


def _training(report: RunReport) -> list[tuple[str, Text]]:
    training = report.training
    if training is None:
        return []
    rows: list[tuple[str, Text]] = []
    if training.new is not None:
        text = Text(f"{percent(training.new[0])}, then {percent(training.new[1])}")
        text.append(f"  first and last quarter of {training.tasks:,} tasks, as they were met", "dim")
        rows.append(("new training tasks", text))
    if training.first is not None and training.last is not None:
        text = Text(f"{percent(training.first)}, then {percent(training.last)}")
        text.append(f"  {training.again:,} tasks, at their first group and at their last", "dim")
        rows.append(("played again", text))
    later = "" if training.teach_later is None else f", {percent(training.teach_later, 0)} from step {LATER} on"
    return [*rows, ("groups that teach", Text(f"{percent(training.teach, 0)}{later}"))]


def _rate(rate: float | None, side: HeldOutSide | None, style: str = "") -> Text:
    if rate is None:
        return Text("not measured", "dim")
    text = Text(percent(rate), style)
    if side is not None:
        text.append(f"  95 %: {percent(side.interval.low)} to {percent(side.interval.high)}", "dim")
    return text


def _difference(report: RunReport) -> Text:
    diff = report.paired_diff
    if diff is None:
        return Text("not measured", "dim")
    style = "bold green" if diff.low > 0 else "bold red" if diff.high < 0 else "bold"
    over = f"{report.held_out.tasks} tasks of {report.held_out.functions} functions"
    text = Text(f"{points(diff.mean)} points", style)
    return text.append(f"  95 %: {points(diff.low)} to {points(diff.high)}, {over}", "dim")


def _stages(report: RunReport) -> str:
    named = ", ".join(f"{inert(name)} {duration(seconds)}" for name, seconds in report.stages.items())
    return f" ({named})" if named else ""


def _check_row(checks: dict[str, bool]) -> Text:
    text = Text()
    for name, holds in checks.items():
        mark, style = ("✓", "green") if holds else ("✗ FAILED", "bold red")
        text.append(f"{mark} {inert(name).replace('_', ' ')}  ", style)
    return text if checks else Text("none", "dim")
