"""Curves as one SVG file, for the pages under docs/."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Curve = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 170, 64, 150, 30, 22
COLUMNS = 500  # points of a drawn curve at most: means of neighbours
COLORS = ("#3b6fd4", "#d2602b", "#2f9668", "#9a55c4", "#b3932b")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.t{font-weight:600}.a{stroke:#999;stroke-width:.5}"
    "@media (prefers-color-scheme:dark){text{fill:#ccc}}"
)


@dataclass(frozen=True)
class Panel:
    """Curves over one axis: steps. `low`, `high` fix the values shown; else they hold zero and every point."""

    title: str
    curves: Mapping[str, Curve]
    low: float | None = None
    high: float | None = None
    log: bool = False


def svg(panels: Sequence[Panel]) -> str:
    """The panels below each other, over one range of steps."""
    last = max(x for panel in panels for curve in panel.curves.values() for x, _ in curve)
    body = "".join(_panel(panel, i * HEIGHT, last) for i, panel in enumerate(panels))
    size = f'width="{WIDTH}" height="{HEIGHT * len(panels)}" viewBox="0 0 {WIDTH} {HEIGHT * len(panels)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{STYLE}</style>{body}</svg>\n'


def smoothed(curve: Curve, reach: int) -> list[tuple[float, float]]:
    """The mean of the `reach` points that end at each."""
    values = [y for _, y in curve]
    return [(x, sum(values[max(0, i + 1 - reach) : i + 1]) / min(i + 1, reach)) for i, (x, _) in enumerate(curve)]


def _panel(panel: Panel, top: int, last: float) -> str:
    curves = {
        name: [(x, _value(y, panel.log)) for x, y in curve if math.isfinite(y)] for name, curve in panel.curves.items()
    }
    values = [y for curve in curves.values() for _, y in curve]
    low = min([*values, *([] if panel.log else [0.0])]) if panel.low is None else _value(panel.low, panel.log)
    high = max(values, default=1.0) if panel.high is None else _value(panel.high, panel.log)
    span = (high - low) or 1.0
    x0, x1, y0, y1 = LEFT, WIDTH - RIGHT, top + HEIGHT - BOTTOM, top + TOP

    def place(x: float, y: float) -> str:
        return f"{x0 + (x1 - x0) * x / last:.1f},{y0 + (y1 - y0) * (min(max(y, low), high) - low) / span:.1f}"

    parts = [f'<text class="t" x="{x0}" y="{top + 18}">{escape(panel.title)}</text>']
    for y in (low, (low + high) / 2, high):
        at = place(0, y).split(",")[1]
        label = f"{10**y:.1e}" if panel.log else f"{y:.3g}"
        parts.append(f'<line class="a" x1="{x0}" x2="{x1}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{x0 - 6}" y="{float(at) + 4:.0f}" text-anchor="end">{label}</text>')
    for x in (0, last / 2, last):
        at = place(x, low).split(",")[0]
        parts.append(f'<text x="{at}" y="{y0 + 15}" text-anchor="middle">{x:.0f}</text>')
    for i, (name, curve) in enumerate(curves.items()):
        color = COLORS[i % len(COLORS)]
        points = " ".join(place(x, y) for x, y in _thinned(curve))
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.3" points="{points}"/>')
        parts.append(f'<text x="{x1 + 8}" y="{y1 + 12 + 16 * i}" style="fill:{color}">{escape(name)}</text>')
    return "".join(parts)


def _value(y: float, log: bool) -> float:
    return math.log10(max(y, 1e-12)) if log else y


def _thinned(curve: Curve) -> list[tuple[float, float]]:
    """At most COLUMNS points: the means of as many runs of neighbours."""
    reach = math.ceil(len(curve) / COLUMNS)
    runs = [curve[i : i + reach] for i in range(0, len(curve), reach)]
    return [(run[-1][0], sum(y for _, y in run) / len(run)) for run in runs]
