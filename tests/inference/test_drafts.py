"""Draft sources and the choice of draft lengths, without a model."""

import numpy as np
import pytest

from etude.inference.engine import costs
from etude.inference.engine.costs import CostCurve, measure
from etude.inference.engine.drafts import MATCHES, Drafter, DraftSource, SharedRates, longest_match
from tests.helpers.clocks import set_clock


def ids(*values):
    return np.array(values, np.int32)


def play(drafter, prompt, answer, width, curve=None):
    """Emit `answer` as verification would: the accepted part of each draft and one token more. Passes, drafted."""
    history, passes, drafted = np.concatenate([prompt, answer[:1]]), 1, 0
    end = len(prompt) + len(answer)
    while len(history) < end:
        proposal = drafter.propose(history, min(width, end - len(history) - 1))
        lengths = [width] if curve is None else curve.choose(1, 1, [len(proposal.ids)], [proposal.rate])
        draft = proposal.ids[: lengths[0]]
        drafter.fed(len(draft))
        rest = answer[len(history) - len(prompt) :]
        right = next((i for i, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), len(draft))
        history = np.concatenate([history, rest[: right + 1]])
        passes, drafted = passes + 1, drafted + len(draft)
    drafter.follow(history)
    return passes, drafted


def test_the_longest_match_wins_and_of_equals_the_nearest_ahead():
    text = ids(1, 2, 3, 9, 1, 2, 3, 8, 7, 2, 3, 6)
    assert longest_match(text, ids(1, 2, 3), 0, 64) == (3, 3)
    assert longest_match(text, ids(1, 2, 3), 4, 64) == (3, 7)
    assert longest_match(text, ids(1, 2, 3), 12, 64) == (3, 7)  # behind: the last one
    assert longest_match(text, ids(7, 2, 3), 0, 64) == (3, 11)
    assert longest_match(text, ids(5, 2, 3), 8, 64) == (2, 11)
    assert longest_match(text, ids(5, 2, 3), 8, 0) == (0, -1)
    assert longest_match(text, ids(6), 0, 64) == (0, -1)
    long = np.arange(200, dtype=np.int32)
    assert longest_match(long, long[50:170], 0, 64) == (MATCHES[-1], 170)


def test_an_edited_answer_takes_a_few_passes():
    rng = np.random.default_rng(0)
    source = rng.integers(0, 1000, 600).astype(np.int32)
    answer = np.concatenate([source[:100], ids(1, 2, 3), source[100:300], source[320:500], ids(7), source[501:]])
    drafter = Drafter((DraftSource("merge", source),), 3, SharedRates())
    passes, _ = play(drafter, ids(4, 5, 6), answer, 64)
    # 584 tokens in drafts of 64, an insertion of 3, a deletion and a replacement: each costs a few passes.
    assert passes <= 30
    accepted, rejected = drafter.counts()
    assert accepted > 500
    assert 20 <= rejected <= 64 * 3


def test_the_second_source_takes_over_where_the_first_is_lost():
    rng = np.random.default_rng(1)
    file, sketch = (rng.integers(0, 1000, n).astype(np.int32) for n in (200, 80))
    answer = np.concatenate([file[:100], sketch, file[100:]])
    sources = (DraftSource("file", file), DraftSource("sketch", sketch))
    passes, _ = play(Drafter(sources, 1, SharedRates()), ids(3), answer, 64)
    without, _ = play(Drafter(sources[:1], 1, SharedRates()), ids(3), answer, 64)
    assert passes <= 20
    assert without > passes + 50


def test_a_useless_source_is_soon_not_believed():
    rng = np.random.default_rng(2)
    source, answer = (rng.integers(0, 5, 400).astype(np.int32) for _ in range(2))
    drafter = Drafter((DraftSource("prediction", source),), 1, SharedRates())
    _, drafted = play(drafter, ids(3), answer, 64, CostCurve([1, 512], [1.0, 200.0]))
    assert 0 < drafted < 100


def test_what_was_proposed_and_not_fed_teaches_too():
    source = np.arange(400, dtype=np.int32)
    drafter = Drafter((DraftSource("prediction", source),), 1, SharedRates())
    history = np.concatenate([ids(999), source[:300]])
    before = drafter.propose(history[:1], 64).rate
    for n in range(2, 300):
        drafter.propose(history[:n], 64)
    assert drafter.propose(history, 64).rate > max(before, 0.97)
    assert drafter.counts() == (0, 0)


def test_empty_sources_and_a_short_history():
    drafter = Drafter((DraftSource("prediction", ids()),), 1, SharedRates())
    assert len(drafter.propose(ids(1), 10).ids) == 0
    assert len(drafter.propose(ids(1, 2), 10).ids) == 0
    loop = ids(*([1, 2, 3, 4] * 8))
    assert drafter.propose(loop, 3).ids.tolist() == [1, 2, 3]
    assert len(drafter.propose(loop, 0).ids) == 0


def test_lengths_follow_the_costs():
    flat, linear = CostCurve([1, 512], [1.0, 1.2]), CostCurve([1, 2, 512], [1.0, 2.0, 512.0])
    assert flat.choose(1, 1, [300], [0.999])[0] > 250
    assert flat.choose(1, 1, [300], [0.1])[0] < 10
    assert linear.choose(1, 1, [300], [0.99]) == [0]
    assert flat.choose(1, 1, [], []) == []
    assert flat.choose(2, 2, [0, 0], [0.9, 0.9]) == [0, 0]
    # Two rows, one with a better draft: it gets more, and neither more than it has.
    steps = CostCurve([1, 64, 512], [1.0, 2.0, 16.0])
    good, bad = steps.choose(2, 2, [30, 30], [0.98, 0.6])
    assert 30 >= good > bad > 0


def test_one_rows_draft_must_outweigh_the_delay_of_all():
    curve = CostCurve([1, 512], [1.0, 20.0])
    assert curve.choose(1, 1, [200], [0.99])[0] > 0
    assert curve.choose(64, 64, [200] + [0] * 63, [0.99] + [0.0] * 63) == [0] * 64
    assert curve.worth_drafting(1, 1)
    assert not CostCurve([1, 2, 512], [1.0, 2.0, 512.0]).worth_drafting(64, 64)


def test_a_curve_is_monotone_and_goes_on_beyond_its_end():
    curve = CostCurve([1, 2, 4], [1.0, 0.5, 2.0])
    assert [s for _, s in curve.points] == [1.0, 1.0, 2.0]
    assert curve.seconds(8) == pytest.approx(4.0)
    assert curve.seconds(3) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="two sizes"):
        CostCurve([1], [1.0])
    sizes = []
    assert len(measure(sizes.append, 16).points) == 5
    assert sizes == [n for n in (1, 16, 4, 2, 8) for _ in range(4)]


def test_the_largest_pass_of_a_slow_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is guessed beyond the measured sizes decides how much is drafted among many sequences."""
    now = [0.0]
    set_clock(monkeypatch, costs, perf_counter=lambda: now[0])

    def run(size: int) -> None:
        now[0] += 0.15 + 0.003 * size

    curve = measure(run, 512)
    assert [size for size, _ in curve.points] == [1, 512]
    assert curve.seconds(512) == pytest.approx(0.15 + 0.003 * 512)
