"""Charts as inline SVG. Only marks are SVG, stretched to their box; all text is HTML placed by percentages, so that a
chart is as readable on a phone as on a desk, and nothing moves while the page loads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from etude.dashboard.text import clock, compact, escape, tick
from etude.dashboard.view import Point, TimelineSpan
from etude.evals import Estimate

Format = Callable[[float], str]
_SIZE = 1000  # the side of every view box; the browser stretches it
_BINS = 240  # columns of the timeline
_WAITING = ("wait", "idle", "sleep", "stopped")


@dataclass(frozen=True)
class Series:
    """One curve of a line chart."""

    label: str
    points: Sequence[Point]
    color: int = 1  # 1 to 6, see static/page.css


def line_chart(
    title: str, note: str, series: Sequence[Series], fmt: Format = compact, log: bool = False, smooth: bool = True
) -> str:
    """A line chart over steps, which the page can switch to minutes; its axis starts at zero. Empty without data.
    `smooth` adds a running mean to long curves; `log` draws zeros at the lower end of the axis."""
    series = [s for s in series if s.points]
    if not series:
        return ""
    values = [p.value for s in series for p in s.points]
    scale = _LogScale(values) if log and max(values) > 0 else _linear([0.0, *values])
    keys = "".join(_key(s.color, s.label, fmt(s.points[-1].value)) for s in series)
    plots = "".join(_plot(series, scale, fmt, smooth, by_minutes) for by_minutes in (False, True))
    return _figure(title, note, f'<p class="keys">{keys}</p>', plots)


def bar_chart(title: str, note: str, bars: Sequence[tuple[str, float]], fmt: Format = compact, color: int = 1) -> str:
    """One bar per (label, value), from zero. Empty without data."""
    if not bars:
        return ""
    scale = _linear([0.0, *(value for _, value in bars)])
    width = _SIZE / len(bars)
    gap = min(0.18 * width, 12)
    heights = [scale(value) for _, value in bars]
    marks = "".join(
        f'<rect x="{i * width + gap / 2:.1f}" width="{width - gap:.1f}" y="{_SIZE - h:.1f}" height="{h:.1f}"/>'
        for i, h in enumerate(heights)
    )
    centres = [(i + 0.5) / len(bars) for i in range(len(bars))]
    every = math.ceil(len(bars) / 8)
    ticks = [(centres[i], bars[i][0]) for i in range(0, len(bars), every)]
    tips = _tips(centres, [label for label, _ in bars], {"": [fmt(value) for _, value in bars]})
    return _figure(title, note, "", _frame(f'<g class="f{color}">{marks}</g>', scale, fmt, ticks, "", tips))


def interval_chart(rows: Sequence[tuple[str, Estimate, int]], fmt: Format) -> str:
    """Rows of (label, estimate, color): a dot with its 95 % interval, on one axis that shows zero."""
    scale = _linear([0.0, *(edge for _, e, _ in rows for edge in (e.low, e.high))])
    zero = f'<i class="zero" style="left:{scale(0) / 10:.2f}%"></i>'
    lines: list[str] = []
    for label, estimate, color in rows:
        low, mid, high = (scale(v) / 10 for v in (estimate.low, estimate.mean, estimate.high))
        lines.append(
            f'<div class="est"><span class="who">{escape(label)}</span><span class="rail">{zero}'
            f'<i class="bar f{color}" style="left:{low:.2f}%;width:{max(high - low, 0.2):.2f}%"></i>'
            f'<i class="dot f{color}" style="left:{mid:.2f}%"></i></span><span class="fig"><b>{fmt(estimate.mean)}</b> '
            f"<small>{fmt(estimate.low)} to {fmt(estimate.high)}</small></span></div>"
        )
    axis = "".join(f'<span style="left:{scale(t) / 10:.2f}%">{tick(fmt(t))}</span>' for t in scale.ticks)
    lines.append(f'<div class="est axis"><span class="who"></span><span class="rail">{axis}</span></div>')
    return f'<div class="ests">{"".join(lines)}</div>'


def timeline(spans: Sequence[TimelineSpan], order: Sequence[str] = ()) -> str:
    """A timeline of processes: one lane each, in columns stacked by the share of time in each state."""
    if not spans:
        return ""
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    length = max(end - start, 1e-9)
    names = sorted({s.process for s in spans}, key=lambda n: (order.index(n) if n in order else len(order), n))
    lanes = "".join(_lane(name, [s for s in spans if s.process == name], start, length) for name in names)
    step = next((s for s in (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600) if length / s <= 6), length / 6)
    times = [i * step for i in range(int(length / step) + 1)]
    ticks = "".join(f'<span style="left:{100 * t / length:.2f}%">{clock(t)}</span>' for t in times)
    return f'<div class="lanes">{lanes}<div class="lane axis"><span></span><span class="xs">{ticks}</span></div></div>'


def is_waiting(state: str) -> bool:
    """Whether a process in this state is idle."""
    return any(word in state.lower() for word in _WAITING)


def _lane(name: str, spans: Sequence[TimelineSpan], start: float, length: float) -> str:
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.state] = seconds.get(span.state, 0.0) + span.end - span.start
    ranked = sorted(seconds, key=lambda state: (is_waiting(state), -seconds[state]))
    working = [state for state in ranked if not is_waiting(state)]
    color = {state: working.index(state) % 5 + 1 if state in working else 0 for state in ranked}
    shares = _binned(spans, ranked, start, length)
    floor = [0.0] * _BINS
    paths: list[str] = []
    for state in ranked:
        path = "".join(
            f"M{i} {1000 - 1000 * (floor[i] + share):.0f}h1V{1000 - 1000 * floor[i]:.0f}h-1z"
            for i, share in enumerate(shares[state])
            if share > 0.002
        )
        floor = [a + b for a, b in zip(floor, shares[state], strict=True)]
        paths.append(f'<path class="f{color[state]}" d="{path}"/>')
    busy = sum(seconds[state] for state in working) / length
    keys = "".join(_key(color[state], state, f"{100 * seconds[state] / length:.0f} %") for state in ranked)
    centres = [(i + 0.5) / _BINS for i in range(_BINS)]
    texts = {state: [f"{100 * v:.0f} %" if v > 0.002 else "" for v in shares[state]] for state in ranked}
    tips = _tips(centres, [clock(x * length) for x in centres], texts)
    return (
        f'<div class="lane"><span class="who"><b>{escape(name)}</b><small>{100 * busy:.0f} % busy</small></span>'
        f'<div class="area" {tips}><svg viewBox="0 0 {_BINS} {_SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)} over time" shape-rendering="crispEdges">{"".join(paths)}</svg>'
        f'<i class="cross"></i></div><p class="keys">{keys}</p></div>'
    )


def _binned(
    spans: Sequence[TimelineSpan], states: Sequence[str], start: float, length: float
) -> dict[str, list[float]]:
    """Share of each column spent in each state. Overlapping spans of one process are scaled back to one."""
    width = length / _BINS
    shares = {state: [0.0] * _BINS for state in states}
    for span in spans:
        first, last = (span.start - start) / width, (span.end - start) / width
        for i in range(max(0, int(first)), min(_BINS, math.ceil(last))):
            shares[span.state][i] += max(0.0, min(last, i + 1) - max(first, i))
    for i in range(_BINS):
        total = sum(shares[state][i] for state in states)
        if total > 1:
            for state in states:
                shares[state][i] /= total
    return shares


def _plot(series: Sequence[Series], scale: _Scale, fmt: Format, smooth: bool, by_minutes: bool) -> str:
    def at(p: Point) -> float:
        return p.minutes if by_minutes else float(p.step)

    positions = [at(p) for s in series for p in s.points]
    left, right = 0.0 if by_minutes else min(positions), max(positions)
    span = max(right - left, 1e-9)
    marks = "".join(_curve(s, [(at(p) - left) / span for p in s.points], scale, smooth) for s in series)
    ticks = [((t - left) / span, compact(t)) for t in _nice_ticks(left, right, whole=not by_minutes)]
    longest = max(series, key=lambda s: len(s.points)).points
    texts: dict[str, list[str]] = {}
    for s in series:
        by_step = {p.step: fmt(p.value) for p in s.points}
        texts[s.label] = [by_step.get(p.step, "") for p in longest]
    heads = [f"step {p.step} · {p.minutes:.1f} min" for p in longest]
    tips = _tips([(at(p) - left) / span for p in longest], heads, texts)
    name = "minutes" if by_minutes else "step"
    return f'<div class="by-{name}">{_frame(marks, scale, fmt, ticks, name, tips)}</div>'


def _curve(series: Series, xs: Sequence[float], scale: _Scale, smooth: bool) -> str:
    ys = [scale(p.value) for p in series.points]
    if len(ys) == 1:
        return f'<path class="s{series.color} point" d="M{_SIZE * xs[0]:.0f} {_SIZE - ys[0]:.0f}h0"/>'
    path = _path(xs, ys)
    if len(ys) < 20 or not smooth:
        return f'<path class="s{series.color}" d="{path}"/>'
    reach = max(2, len(ys) // 20)
    means = [sum(w := ys[max(0, i - reach) : i + reach + 1]) / len(w) for i in range(len(ys))]
    return f'<path class="s{series.color} faint" d="{path}"/><path class="s{series.color}" d="{_path(xs, means)}"/>'


def _path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{_SIZE * x:.0f} {_SIZE - y:.0f}" for x, y in zip(xs, ys, strict=True))


def _figure(title: str, note: str, keys: str, body: str) -> str:
    return (
        f'<figure class="card chart"><figcaption><h3>{escape(title)}</h3><p class="note">{escape(note)}</p>{keys}'
        f"</figcaption>{body}</figure>"
    )


def _key(color: int, label: str, value: str) -> str:
    return f'<span class="key"><i class="c{color}"></i>{escape(label)} <b>{escape(value)}</b></span>'


def _frame(
    marks: str, scale: _Scale, fmt: Format, x_ticks: Sequence[tuple[float, str]], x_label: str, tips: str
) -> str:
    """Axes and grid around the marks; every label is HTML."""
    grid = "".join(f'<path class="grid" d="M0 {_SIZE - scale(t):.0f}H{_SIZE}"/>' for t in scale.ticks)
    ys = "".join(f'<span style="bottom:{scale(t) / 10:.2f}%">{tick(fmt(t))}</span>' for t in scale.ticks)
    xs = "".join(f'<span style="left:{100 * x:.2f}%">{escape(label)}</span>' for x, label in x_ticks)
    label = f"<em>{escape(x_label)}</em>" if x_label else ""
    return (
        f'<div class="plot"><div class="ys">{ys}</div><div class="area" {tips}>'
        f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" aria-hidden="true">{grid}{marks}</svg>'
        f'<i class="cross"></i></div><div class="xs">{xs}{label}</div></div>'
    )


def _tips(xs: Sequence[float], heads: Sequence[str], texts: Mapping[str, Sequence[str]]) -> str:
    """The tips that the page's script shows at each x (0 to 1): a head and one text per series; empty texts are left
    out."""
    tips = {"x": [round(x, 4) for x in xs], "l": list(heads), "s": [{"n": n, "v": list(v)} for n, v in texts.items()]}
    return f'data-tips="{escape(json.dumps(tips, separators=(",", ":"), ensure_ascii=False))}"'


class _Linear:
    def __init__(self, low: float, high: float, ticks: Sequence[float]) -> None:
        self.low, self.high, self.ticks = low, high, ticks

    def __call__(self, value: float) -> float:
        return _SIZE * (value - self.low) / (self.high - self.low)


class _LogScale:
    """A logarithmic scale whose decades hold every positive value; zero and less lie at its lower end."""

    def __init__(self, values: Sequence[float]) -> None:
        positive = [v for v in values if v > 0]
        self.low = math.floor(math.log10(min(positive)))
        self.high = max(math.ceil(math.log10(max(positive))), self.low + 1)
        every = math.ceil((self.high - self.low) / 5)
        self.ticks = [10.0**e for e in range(self.low, self.high + 1, every)]

    def __call__(self, value: float) -> float:
        exponent = math.log10(value) if value > 0 else self.low
        return _SIZE * (max(exponent, self.low) - self.low) / (self.high - self.low)


_Scale = _Linear | _LogScale


def _linear(values: Sequence[float]) -> _Linear:
    """A linear scale: round limits that hold all values, with a tick at each of about four steps."""
    low, high = min(values), max(values)
    if high - low < 1e-12:
        high = low + 1.0
    step = _nice_step((high - low) / 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(i * step, 12) for i in range(first, last + 1)]
    return _Linear(ticks[0], ticks[-1], ticks)


def _nice_step(rough: float) -> float:
    unit = 10.0 ** math.floor(math.log10(rough))
    return unit * next(m for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)


def _nice_ticks(low: float, high: float, whole: bool) -> list[float]:
    """About five round values inside [low, high]."""
    if high - low < 1e-9:
        return [low]
    step = _nice_step((high - low) / 5)
    step = max(1.0, math.ceil(step)) if whole else step
    return [round(i * step, 9) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
