"""The content of a run's page, read once from the run folder and frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.records import Episode
from etude.runfolder import read_jsonl

if TYPE_CHECKING:
    from tokenizers import Tokenizer


PROCESSES = ("controller", "engine", "trainer", "sandbox")  # the order on the page, top to bottom


@dataclass(frozen=True)
class TimelineSpan:
    """The time from `start` to `end` that one process was in one state, in seconds from an origin that the file
    shares."""

    process: str
    state: str
    start: float
    end: float


@dataclass(frozen=True)
class ShownEpisode:
    """An episode picked for reading. `token_texts` holds one text per token over all segments in order. `advantage` is
    one figure for the episode or one per token in the same order; None leaves the tokens untinted. `stage` groups
    episodes: "before", "training" or "after"."""

    title: str
    episode: Episode
    advantage: float | Sequence[float] | None
    token_texts: Sequence[str]
    stage: str = ""


@dataclass(frozen=True)
class Point:
    """A metric at one trainer step; `minutes` since the first step began."""

    step: int
    minutes: float
    value: float


@dataclass(frozen=True)
class RunView:
    """The data of the run folder for the page, and the episodes picked for it."""

    steps: tuple[Mapping[str, Any], ...] = ()  # lines of metrics.jsonl
    memory: tuple[Mapping[str, Any], ...] = ()  # lines of memory.jsonl
    timeline: tuple[TimelineSpan, ...] = ()
    episodes: tuple[ShownEpisode, ...] = ()

    def series(self, name: str) -> list[Point]:
        """The finite values of a metric in step order; steps that lack it are left out."""
        return self._points(self.steps, name)

    @property
    def repositories(self) -> list[str]:
        """The repositories that have curves of their own."""
        keys = {key for line in self.steps for key in line if key.startswith("repository/")}
        ending = "/pass_rate"
        return sorted(k.removeprefix("repository/").removesuffix(ending) for k in keys if k.endswith(ending))

    def held(self) -> dict[str, list[Point]]:
        """Resident bytes of each process per step, matched to the newest step that was published before the
        measurement."""
        names = dict.fromkeys(key for line in self.memory for key in line if key.startswith("memory/"))
        return {name.removeprefix("memory/"): self._points(self.memory, name) for name in names}

    def _points(self, lines: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
        if not self.steps:
            return []
        origin = float(self.steps[0]["time"]) - float(self.steps[0].get("time/step", 0.0))
        return [
            Point(int(line["step"]), (float(line["time"]) - origin) / 60, float(line[name]))
            for line in lines
            if _is_number(line.get(name))
        ]

    def histogram(self, name: str) -> dict[int, int]:
        """Sum over the steps of a metric whose value is {integer: count}."""
        total: dict[int, int] = {}
        for step in self.steps:
            for key, count in (step.get(name) or {}).items():
                total[int(key)] = total.get(int(key), 0) + int(count)
        return dict(sorted(total.items()))


def load_view(run_dir: Path, episodes: Sequence[ShownEpisode] = ()) -> RunView:
    """The view of a run folder. A missing file is read as empty, so a run that ended early still has a page. Raises
    UserError if a file does not have its format."""
    steps = read_jsonl(run_dir / "metrics.jsonl", ("step", "time"))
    memory = read_jsonl(run_dir / "memory.jsonl", ("step", "time"))
    spans = read_jsonl(run_dir / "timeline.jsonl", ("start", "end"), ("process", "state"))
    timeline = (TimelineSpan(s["process"], s["state"], float(s["start"]), float(s["end"])) for s in spans)
    ordered = sorted(steps, key=lambda line: line["step"])
    return RunView(tuple(ordered), tuple(memory), tuple(timeline), tuple(episodes))


def show_run(
    title: str,
    episode: Episode,
    tokenizer: Tokenizer,
    advantage: float | Sequence[float] | None = None,
    stage: str = "",
) -> ShownEpisode:
    """An episode with the text of each of its tokens."""
    ids = [int(i) for segment in episode.segments for i in segment.arrays()[0]]
    return ShownEpisode(title, episode, advantage, token_texts(tokenizer, ids), stage)


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds. A character split over tokens shows on its last token; the others are empty."""
    texts: list[str] = []
    start = 0  # first token of the character being put together
    for position in range(len(ids)):
        text = tokenizer.decode(list(ids[start : position + 1]), skip_special_tokens=False)
        # a UTF-8 character has at most four bytes, so these are invalid
        complete = not text.endswith("\ufffd") or position - start >= 3
        texts.append(text if complete else "")
        start = position + 1 if complete else start
    if start < len(ids):
        texts[-1] = tokenizer.decode(list(ids[start:]), skip_special_tokens=False)
    return texts


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
