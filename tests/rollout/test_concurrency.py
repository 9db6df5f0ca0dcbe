import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rollout.concurrency import DEAD_BAND, WINDOW_SECONDS, Load, episode_concurrency, mean_load, next_limit

BOUNDS = {"rows": 64, "lowest": 8, "highest": 10_000}


def demand(live: float, share: float, rows: int) -> float:
    """Requests at engines of `rows`, where an episode would spend `share` of its life if it never queued.

    A closed loop: below saturation live * share; above, the engines end rows / s requests per second (s is the time of
    one), so that rows * tool seconds / s episodes are at their tools and all others are here.
    """
    return max(live * share, live - rows * (1 - share) / share)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("start", [8, 64, 9000])
def test_it_finds_the_number_that_fills_the_rows(share, start):
    limit = start
    for _ in range(40):
        limit = next_limit(limit, Load(limit, demand(limit, share, 64)), **BOUNDS)
    assert demand(limit, share, 64) == pytest.approx(64, rel=DEAD_BAND), limit
    assert next_limit(limit, Load(limit, demand(limit, share, 64)), **BOUNDS) == limit, "and stays there"


def test_a_queue_makes_it_back_off_by_a_bounded_step():
    assert next_limit(400, Load(400, 200), **BOUNDS) == 300
    assert next_limit(400, Load(400, 80), **BOUNDS) == 384, "a short queue: a short step"
    assert next_limit(400, Load(400, 70), **BOUNDS) == 400, "so short that it may be chance"


def test_empty_rows_make_it_grow_by_a_bounded_step():
    assert next_limit(100, Load(100, 10), **BOUNDS) == 150
    assert next_limit(100, Load(100, 0), **BOUNDS) == 150, "all are at their tools"
    assert next_limit(100, Load(100, 50), **BOUNDS) == 128


def test_what_something_else_holds_back_is_not_allowed_more():
    assert next_limit(100, Load(50, 5), **BOUNDS) == 100
    assert next_limit(100, Load(0, 0), **BOUNDS) == 100
    assert next_limit(100, Load(50, 100), **BOUNDS) == 75, "but less, where even those queue"


@given(
    st.integers(1, 500), st.floats(0, 500), st.floats(0, 500), st.integers(1, 300), st.integers(1, 50),
    st.integers(50, 400),
)  # fmt: skip
def test_it_stays_within_its_bounds(limit, live, at_engine, rows, lowest, highest):
    found = next_limit(limit, Load(live, at_engine), rows=rows, lowest=lowest, highest=highest)
    assert lowest <= found <= highest


def test_the_limit_moves_at_the_end_of_a_window():
    auto = episode_concurrency(None, rows=64, staleness=4, prompts=8, group=16)
    assert (auto.limit, auto.highest) == (64, 5 * 8 * 16)
    auto.observe(100.0, 64, 32)
    auto.observe(100.0 + WINDOW_SECONDS - 0.1, 64, 16)
    assert auto.limit == 64
    auto.observe(100.0 + WINDOW_SECONDS, 64, 24)
    assert auto.limit == 96, "twice as many would fill the rows; a window moves by half at most"
    auto.observe(101.0 + WINDOW_SECONDS, 96, 500)
    assert auto.limit == 96, "the old window's samples are gone, and the new one has only begun"


def test_a_number_is_kept_whatever_the_load():
    fixed = episode_concurrency(6, rows=128, staleness=0, prompts=2, group=3)
    for second in range(20):
        fixed.observe(float(second), 6, 0)
        assert fixed.limit == 6


def test_load_is_the_mean_of_its_samples():
    assert mean_load([(1, 0), (3, 1)]) == Load(2.0, 0.5)
