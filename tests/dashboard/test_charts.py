"""Marks lie where the values say."""

import re

import pytest

from etude.dashboard.charts import Series, bar_chart, interval_chart, is_waiting, line_chart, timeline
from etude.dashboard.text import percent
from etude.dashboard.view import Point, TimelineSpan
from etude.evals.stats import Estimate


def points(values) -> list[Point]:
    return [Point(step=i, minutes=i / 2, value=v) for i, v in enumerate(values, 1)]


def path(html: str) -> list[tuple[float, float]]:
    found = re.search(r'class="s1" d="M([^"]*)"', html)
    return [tuple(map(float, pair.split())) for pair in found[1].split("L")]


def test_a_line_goes_through_its_points():
    html = line_chart("t", "n", [Series("s", points([0, 5, 10]))])
    assert path(html) == [(0, 1000), (500, 500), (1000, 0)]
    assert "step 2 · 1.0 min" in html


def test_zeros_of_a_log_chart_lie_on_the_floor():
    html = line_chart("t", "n", [Series("s", points([0, 1e-6, 1e-4]))], log=True)
    assert path(html) == [(0, 1000), (500, 1000), (1000, 0)]


@pytest.mark.parametrize("values", [[0, 0], [3], [-1, 1], [1e-12, 2e-12], [1e12]])
@pytest.mark.parametrize("log", [False, True])
def test_odd_ranges_draw(values, log):
    html = line_chart("t", "n", [Series("s", points(values))], log=log)
    assert "nan" not in html
    assert "inf" not in html.replace("info", "")


def test_no_data_no_chart():
    assert line_chart("t", "n", [Series("s", [])]) == bar_chart("t", "n", []) == timeline([]) == ""


def test_labels_are_escaped():
    html = line_chart("<u>", "<u>", [Series("<u>", points([1, 2]))])
    html += bar_chart("<u>", "<u>", [("<u>", 1.0)]) + timeline([TimelineSpan("<u>", "<u>", 0, 1)])
    html += interval_chart([("<u>", Estimate(mean=0, low=0, high=1), 1)], percent)
    assert "<u>" not in html
    assert html.count("&lt;u&gt;") >= 9


def test_bars_are_as_high_as_their_values():
    html = bar_chart("t", "n", [("a", 1.0), ("b", 4.0)])
    assert re.findall(r'y="([\d.]+)" height="([\d.]+)"', html) == [("750.0", "250.0"), ("0.0", "1000.0")]


def test_intervals_lie_on_the_axis():
    html = interval_chart([("before", Estimate(mean=0.2, low=0.1, high=0.4), 1)], percent)
    assert 'style="left:25.00%;width:75.00%"' in html  # 0.1 to 0.4 of an axis from 0 to 0.4
    assert "20.0 %</b> <small>10.0 % to 40.0 %" in html


def test_timeline_sums_states_and_knows_waiting():
    html = timeline(
        [
            TimelineSpan("engine", "decode", 100, 130),
            TimelineSpan("engine", "waiting", 130, 140),
            TimelineSpan("a", "x", 100, 120),
        ]
    )
    assert "75 % busy" in html
    assert "decode <b>75 %</b>" in html
    assert html.index("<b>a</b>") < html.index("<b>engine</b>")
    assert is_waiting("Idle") and not is_waiting("decode")  # noqa: PT018


def test_overlapping_spans_never_fill_more_than_the_lane():
    html = timeline([TimelineSpan("p", "x", 0, 10), TimelineSpan("p", "y", 0, 10)])
    assert not re.search(r"M\d+ -", html)


def test_a_moment_is_a_timeline():
    assert "lane" in timeline([TimelineSpan("p", "x", 5, 5)])
