"""Labels by hand for each rule, the weights of censored turns, and what must not change a label."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.config.live import LabelsConfig
from etude.live.learn.attribution import slow_signals
from etude.live.learn.rewards import censoring_weights, components, rewards, rules_version
from etude.live.log.records import Label, LabelState, Signal, SignalKind, TurnKind
from tests.helpers.live_story import SECOND, Story, time

K, S = SignalKind, LabelState
EXACT = {"rel": 0, "abs": 1e-12}  # sums of a few products of float64


def one(label: Label) -> tuple[str, float]:
    return str(label.state), round(label.reward, 12)


def edited(*told: tuple[SignalKind, float] | tuple[SignalKind, float, float], characters: int = 100) -> Label:
    """The label of one turn at 0 s with one edit, of signals (kind, time, value)."""
    story = Story()
    story.turn("s", "t", 0)
    story.edit("t", "e", 0, characters)
    for kind, at, *value in told:
        if kind == K.SURVIVED:
            story.survived("e", value[0], at)
        else:
            story.signal("e", kind, at, *value)
    return story.labels()["t"]


def spoken(*told: tuple[SignalKind, float] | tuple[SignalKind, float, float], rated: bool = False) -> Label:
    """The label of one turn at 0 s without an edit, of signals (kind, time, value) of the turn."""
    story = Story()
    story.turn("s", "t", 0)
    for kind, at, *value in told:
        story.signal("t", kind, at, *value)
    return story.labels(rated=["t"] if rated else [])["t"]


@pytest.mark.parametrize(
    ("told", "characters", "state", "reward"),
    [
        ([(K.SURVIVED, 1800, 1.0)], 100, S.MATURED, 0.6 * 100 / 200),  # half of the characters that earn all
        ([(K.SURVIVED, 1800, 1.0)], 1000, S.MATURED, 0.6),  # padding earns nothing more
        ([(K.SURVIVED, 1800, 0.5)], 100, S.MATURED, 0.6 * 50 / 200 - 0.4 * 0.5),
        ([(K.UNDONE, 10)], 100, S.MATURED, -0.4 - 0.2),
        ([(K.RESTORED, 10)], 100, S.MATURED, -0.4 - 0.2),
        ([(K.REJECTED, 10)], 100, S.MATURED, -0.4 - 0.2 * 0.25),
        ([(K.APPLIED, 5), (K.SURVIVED, 1800, 1.0)], 200, S.MATURED, 0.6 + 0.2 * 0.75),
        ([(K.APPLIED, 5), (K.UNDONE, 60)], 200, S.MATURED, -0.4 - 0.2 + 0.2 * 0.75),
        ([(K.SURVIVED, 1800, 1.0), (K.UNDONE, 1900)], 200, S.MATURED, 0.6),  # the window was closed
        ([(K.UNDONE, 50_000)], 100, S.MATURED, -0.6),  # late, and no survival was seen before it
        ([], 100, S.CENSORED, 0.0),
        ([(K.APPLIED, 5)], 100, S.CENSORED, 0.0),  # accepted is not kept
        ([(K.GONE, 900)], 100, S.CENSORED, 0.0),
        ([(K.GONE, 900), (K.UNDONE, 1000)], 100, S.MATURED, -0.6),  # told afterwards
        ([(K.GONE, 900), (K.SURVIVED, 1900, 1.0)], 200, S.MATURED, 0.6),  # as this is
        ([(K.SURVIVED, 5000, 1.0)], 200, S.MATURED, 0.6),  # late, but told
        ([(K.SURVIVED, 60, 1.0)], 100, S.CENSORED, 0.0),  # half an hour cannot have passed after a minute
        ([(K.SURVIVED, 1720, 1.0)], 200, S.MATURED, 0.6),  # clocks that run 5 % apart are believed
        ([(K.COMMITTED, 600, 1.0), (K.MERGED, 700)], 100, S.CENSORED, 0.0),  # for monitoring
        ([(K.INVALID_CALL, 1)], 100, S.MATURED, -0.6),  # known at once
        ([(K.SURVIVED, 1800, 1.0), (K.RETRY, 5)], 200, S.MATURED, 0.6 - 0.3),  # told of an edit, meant of its turn
    ],
)
def test_the_label_of_an_edit(told: list[tuple[SignalKind, float]], characters: int, state: str, reward: float):
    label = edited(*told, characters=characters)
    assert (label.state, label.reward) == (state, pytest.approx(reward, **EXACT))
    assert label.reward == pytest.approx(sum(label.components.values()), **EXACT)


@pytest.mark.parametrize(
    ("told", "state", "reward"),
    [
        ([], S.CENSORED, 0.0),
        ([(K.INVALID_CALL, 1)], S.MATURED, -0.6),
        ([(K.INVALID_CALL, 1), (K.INVALID_CALL, 2)], S.MATURED, -0.6),
        ([(K.NO_EDIT, 1)], S.MATURED, -0.5),
        ([(K.QUESTION, 1)], S.MATURED, -0.25),
        ([(K.QUESTION, 1), (K.NO_EDIT, 1)], S.MATURED, -0.25),
        ([(K.STOPPED, 1)], S.MATURED, -0.2),
        ([(K.TESTS, 1, 0.5)], S.MATURED, 0.1),
        ([(K.TESTS, 1, 0.5), (K.TESTS, 9, -0.5)], S.MATURED, -0.1),  # the last counts
        ([(K.LINT, 1, 5.0)], S.MATURED, -0.05),
        ([(K.LINT, 1, -400.0)], S.MATURED, 0.1),
        ([(K.RATING, 1, 1.0)], S.CENSORED, 0.0),  # not covered
        ([(K.ERROR, 1)], S.DROPPED, 0.0),
    ],
)
def test_the_label_of_a_turn_without_an_edit(told: list[tuple[SignalKind, float]], state: str, reward: float):
    label = spoken(*told)
    assert (label.state, label.reward) == (state, pytest.approx(reward, **EXACT))


def test_covered_ratings_count():
    assert one(spoken((K.RATING, 1, 1.0), rated=True)) == ("matured", 0.2)
    assert one(spoken((K.RATING, 1, 1.0), (K.RATING, 3, -1.0), rated=True)) == ("matured", -0.2)


def test_all_components_together_stay_in_bounds_and_are_kept():
    story = Story()
    story.turn("s", "t", 0, seconds=600.0)
    story.edit("t", "e", 0, 1000)
    story.signal("t", K.INVALID_CALL, 1)
    story.signal("t", K.STOPPED, 2)
    story.signal("e", K.UNDONE, 3)
    label = story.labels()["t"]
    assert label.reward == -1.0
    assert label.components == {
        "invalid_call": -0.6,
        "latency": -0.05,
        "stopped": -0.2,
        "kept": 0.0,
        "lost": -0.4,
        "undone": -0.2,
        "choice": 0.0,
    }


def test_what_a_message_tells_belongs_to_the_main_turn_before_it():
    story = Story()
    story.turn("s", "a", 0)
    story.turn("s", "title", 1, kind=TurnKind.SIDE)
    story.turn("s", "b", 60)
    story.signal("b", K.FOLLOWUP, 61, 0.8, confidence=0.5)
    story.signal("a", K.RETRY, 62)  # nothing was before the first turn
    story.signal("b", K.FOLLOWUP, 63, 0.5, source="explicit")  # a comment on the answer itself
    found = story.labels()
    assert sorted(found) == ["a", "b"]
    assert (found["a"].state, found["a"].reward) == (S.MATURED, pytest.approx(-0.3 * 0.4, **EXACT))
    assert (found["b"].state, found["b"].reward) == (S.MATURED, pytest.approx(-0.15, **EXACT))


@pytest.mark.parametrize(
    ("answered", "survived", "state", "reward"),
    [
        (True, 1.0, S.MATURED, 0.0),
        (True, 0.4, S.MATURED, -0.25),  # less than half of the edit
        (True, None, S.CENSORED, 0.0),  # not known, so not 0
        (False, 1.0, S.MATURED, -0.25),
    ],
)
def test_a_question_costs_unless_it_is_answered_and_an_edit_survives(answered, survived, state, reward):
    story = Story()
    story.turn("s", "a", 0)
    story.signal("a", K.QUESTION, 1)
    story.turn("s", "b", 60)
    story.edit("b", "e", 60)
    if answered:
        story.signal("b", K.ANSWERED, 61)
    if survived is not None:
        story.survived("e", survived, 1860)
    label = story.labels()["a"]
    assert (label.state, label.reward) == (state, pytest.approx(reward, **EXACT))


def test_a_second_question_in_a_row_costs():
    story = Story()
    for i in range(3):
        story.turn("s", f"t{i}", i * 60)
        story.signal(f"t{i}", K.QUESTION, i * 60 + 1) if i < 2 else story.edit("t2", "e", 120)
        if i:
            story.signal(f"t{i}", K.ANSWERED, i * 60 + 1)
    story.survived("e", 1.0, 1920)
    found = story.labels()
    assert [round(found[f"t{i}"].reward, 9) for i in range(3)] == [-0.25, 0.0, 0.3]


def _overwritten(share: float, by: float, later: float | None, alive: float | None = None) -> Label:
    story = Story()
    story.turn("s", "a", 0)
    story.edit("a", "e", 0, 200)
    story.turn("s", "b", 60)
    story.edit("b", "f", 60, 400)
    story.edit("b", "elsewhere", 60, 100, path="b.py")
    story.signal("e", K.OVERWRITTEN, 61, by)
    story.signal("elsewhere", K.UNDONE, 62)
    if alive is not None:
        story.survived("e", alive, 1800)
    if later is not None:
        story.survived("f", later, 1860)
    return story.labels()["a"]


def test_an_overwritten_edit_is_alive_as_far_as_what_replaced_it():
    kept = 0.6 * 0.75 - 0.4 * 0.25
    assert one(_overwritten(1.0, 1.0, 0.75)) == ("matured", round(kept, 12))
    assert one(_overwritten(1.0, 0.5, 0.5, alive=0.5)) == ("matured", round(kept, 12))  # 0.5 + 0.5 * 0.5
    assert _overwritten(1.0, 1.0, None).state == S.CENSORED
    assert _overwritten(1.0, 0.5, 1.0).state == S.CENSORED  # the rest of it was never looked at


def test_what_replaced_an_edit_did_so_within_its_window():
    story = Story()
    for turn, at in (("a", 0), ("b", 60), ("c", 2000)):
        story.turn("s", turn, at)
        story.edit(turn, f"edit of {turn}", at, 200)
    story.signal("edit of a", K.OVERWRITTEN, 61, 1.0)
    story.signal("edit of b", K.UNDONE, 70)
    story.survived("edit of c", 1.0, 3800)
    assert one(story.labels()["a"]) == ("matured", -0.4)


def test_an_overwritten_edit_waits_for_what_replaced_it():
    story = Story()
    for turn, at in (("a", 0), ("b", 1000)):
        story.turn("s", turn, at)
        story.edit(turn, f"edit of {turn}", at, 200)
    story.signal("edit of a", K.OVERWRITTEN, 1001, 1.0)
    assert (story.labels(2500)["a"].state, story.labels(2500)["a"].reason) == (S.OPEN, "open")
    assert story.labels(3400)["a"].state == story.labels(5700)["a"].state == S.OPEN  # its signals may be late
    assert story.labels(5801)["a"].state == S.CENSORED


def test_overwritten_by_somebody_else_is_lost():
    story = Story()
    story.turn("s", "a", 0)
    story.edit("a", "e", 0, 200)
    story.signal("e", K.OVERWRITTEN, 61, 1.0)
    assert one(story.labels()["a"]) == ("matured", -0.4)


def test_a_turn_has_the_share_of_all_its_edits_by_their_characters():
    story = Story()
    story.turn("s", "t", 0)
    story.edit("t", "e", 0, 150)
    story.edit("t", "f", 5, 50)
    story.survived("e", 1.0, 1800)
    story.signal("f", K.UNDONE, 20)
    assert story.labels()["t"].reward == pytest.approx(0.6 * 150 / 200 - 0.4 * 0.25 - 0.2, **EXACT)
    story.edit("t", "g", 5, 1)  # of which nothing is told
    assert story.labels()["t"].state == S.CENSORED


def test_signals_of_the_turn_tell_of_its_edits_where_no_edit_is_named():
    story = Story()
    story.turn("s", "t", 0)
    story.survived("t", 0.5, 1800)
    assert story.labels()["t"].reward == pytest.approx(0.6 * 0.5 - 0.4 * 0.5, **EXACT)


def test_the_outcome_of_a_session_fades_for_earlier_turns():
    story = Story()
    for i in range(3):
        story.turn("s", f"t{i}", i)
    assert {label.state for label in story.labels().values()} == {S.CENSORED}
    story.signal("s", K.ENDED, 100, 1.0)
    found = story.labels()
    assert [found[f"t{i}"].reward for i in range(3)] == pytest.approx([0.2 * 0.64, 0.2 * 0.8, 0.2], **EXACT)


def test_a_turn_is_open_until_its_window_has_passed_whatever_came_early():
    story = Story()
    story.turn("s", "t", 0)
    story.edit("t", "e", 0)
    story.signal("e", K.UNDONE, 5)
    assert (story.labels(2399)["t"].state, story.labels(2399)["t"].reason) == (S.OPEN, "delay")
    assert story.labels(2400)["t"].state == S.MATURED


def test_a_question_waits_for_the_edit_after_it():
    story = Story()
    story.turn("s", "a", 0)
    story.signal("a", K.QUESTION, 1)
    story.turn("s", "b", 1000)
    story.edit("b", "e", 1000)
    story.signal("b", K.ANSWERED, 1001)
    found = story.labels(2500)
    assert (found["a"].state, found["a"].reason) == (S.OPEN, "open")


def test_corrections_come_with_the_label_and_go_before_other_texts():
    story = Story()
    story.turn("s", "a", 0)
    story.turn("s", "b", 60)
    story.signal("b", K.FOLLOWUP, 61, 1.0, text="complaint")
    assert story.labels()["a"].correction == "complaint"
    story.edit("a", "e", 0)
    story.signal("e", K.CORRECTION, 50, text="wanted")
    assert story.labels()["a"].correction == "wanted"


def test_another_tenant_and_unknown_subjects_tell_nothing():
    story = Story()
    story.turn("s", "t", 0)
    story.edit("t", "e", 0)
    before = story.labels()
    story.signal("e", K.UNDONE, 5, tenant="other")
    story.signal("t", K.INVALID_CALL, 5, tenant="other")
    story.signal("nobody", K.UNDONE, 5)
    assert story.labels() == before


def test_slow_signals_are_for_monitoring():
    story = Story()
    story.turn("s", "t", 0)
    story.edit("t", "e", 0)
    story.survived("e", 1.0, 1800)
    before = story.labels()
    slow = [story.survived("e", 0.0, 86_400, horizon=86_400.0), story.signal("e", K.REVERTED, 90_000)]
    assert story.labels() == before
    assert slow_signals(story.signals, time(100_000), LabelsConfig()) == slow
    assert slow_signals(story.signals, time(80_000), LabelsConfig()) == []
    story.signals = slow
    assert story.labels()["t"].state == S.CENSORED


def test_the_rules_have_another_version_with_other_settings():
    assert rules_version(LabelsConfig()) == rules_version(LabelsConfig())
    assert rules_version(LabelsConfig(question_cost=0.5)) != rules_version(LabelsConfig())


def test_components_of_columns():
    nan = math.nan
    columns = {"share": np.array([1.0, nan]), "characters": np.array([50.0, nan]), "question": np.array([nan, 1.0])}
    parts = components(columns, LabelsConfig())
    assert rewards(parts).tolist() == pytest.approx([0.15, -0.25], **EXACT)
    assert np.isnan(parts["kept"]).tolist() == [False, True]
    assert rewards({}).tolist() == []
    with pytest.raises(ValueError, match="no component is made of"):
        components({"charm": np.ones(1)}, LabelsConfig())


# What stands for the censored


def _shared_out(rows: list[tuple[int, bool]]) -> list[Fraction]:
    """Weights by hand: from the first on, each censored turn gives its weight in equal parts to all that were seen for
    longer; of turns that end at the same time, outcomes come first."""
    order = sorted(range(len(rows)), key=lambda i: (rows[i][0], not rows[i][1]))
    weight = [Fraction(1)] * len(rows)
    for place, i in enumerate(order):
        if not rows[i][1]:
            later = order[place + 1 :]
            for j in later:
                weight[j] += weight[i] / len(later)
            weight[i] = Fraction(0)
    return weight


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 2)), max_size=30))
@settings(max_examples=200, deadline=None)
def test_censored_turns_are_shared_out_among_those_that_were_seen_for_longer(rows: list[tuple[int, bool, int]]):
    seconds, known, cell = (np.array([row[i] for row in rows], kind) for i, kind in ((0, float), (1, bool), (2, int)))
    found = censoring_weights(seconds, known, cell, 1e9)
    for c in range(3):
        mine = [i for i in range(len(rows)) if rows[i][2] == c]
        expected = [float(w) for w in _shared_out([rows[i][:2] for i in mine])]
        assert found[mine] == pytest.approx(expected, rel=1e-9, abs=1e-12)
        if mine and max((rows[i][0], not rows[i][1]) for i in mine)[1] is False:
            assert found[mine].sum() == pytest.approx(len(mine), rel=1e-9)


def test_a_weight_is_bounded():
    seconds, known = np.r_[np.zeros(99), 1.0], np.r_[np.zeros(99, bool), True]
    assert censoring_weights(seconds, known, np.zeros(100, int), 1e9)[-1] == pytest.approx(100.0)
    assert censoring_weights(seconds, known, np.zeros(100, int), 10.0)[-1] == 10.0


def test_weights_take_out_the_error_of_leaving_censored_turns_out():
    """Undone edits are known early, kept ones only at the horizon, so that clients who leave hide more of the kept."""
    rng = np.random.default_rng(5)
    count = 40_000
    bad = rng.random(count) < 0.4
    outcome = np.where(bad, rng.exponential(200.0, count).clip(max=1799), 1800.0)
    leaves = rng.exponential(1500.0, count)
    known = outcome <= leaves
    weight = censoring_weights(np.minimum(outcome, leaves), known, np.zeros(count, int), 10.0)
    dropped = bad[known].mean()
    weighted = (weight * bad).sum() / weight.sum()
    assert dropped > 0.55
    assert weighted == pytest.approx(0.4, abs=0.015)  # four standard errors of the weighted mean are 0.014


def test_the_weight_of_a_label_is_that_of_its_tenant_and_kind():
    story = Story()
    for i, (gone, tenant) in enumerate([(True, "acme"), (False, "acme"), (False, "other")]):
        story.session(f"s{i}", tenant=tenant)
        story.turn(f"s{i}", f"t{i}", 0)
        story.edit(f"t{i}", f"e{i}", 0)
        story.signal(f"e{i}", K.GONE, 900) if gone else story.survived(f"e{i}", 1.0, 1800, tenant=tenant)
    found = story.labels()
    assert [found[f"t{i}"].weight for i in range(3)] == [0.0, 2.0, 1.0]
    assert story.labels(of=["t1", "t2"])["t1"].weight == 1.0  # only what is asked for stands for each other


# What changes nothing


def _crowd(seed: int) -> Story:
    """Sixty sessions with edits, questions, conversations and clients that leave, 20 s and more apart."""
    rng = random.Random(seed)
    story = Story()
    for i in range(60):
        base, number = 100.0 * i, iter(range(99))

        def tell(
            subject: str,
            kind: SignalKind,
            after: float,
            value: float = 1.0,
            base: float = base,
            number=number,
            **fields: object,
        ) -> None:
            story.signal(subject, kind, base + after, value, client_sequence=next(number), **fields)

        for j in range(2):
            story.turn(f"s{i}", f"t{i}.{j}", base + 40 * j)
            story.edit(f"t{i}.{j}", f"e{i}.{j}", base + 40 * j, rng.randint(1, 300))
        tell(f"e{i}.0", K.APPLIED, 30)
        if rng.random() < 0.4:
            tell(f"e{i}.0", rng.choice([K.UNDONE, K.REJECTED, K.OVERWRITTEN]), 70 + rng.random())
        tell(f"t{i}.1", K.FOLLOWUP, 90, rng.random())
        if rng.random() < 0.3:
            tell(f"s{i}", K.GONE, 500 + 10 * rng.random())
        else:
            tell(f"e{i}.0", K.SURVIVED, 1800, rng.random(), horizon=1800.0)
            tell(f"e{i}.1", K.SURVIVED, 1841, rng.random(), horizon=1800.0)
            tell(f"e{i}.1", K.UNDONE, 1860)
    return story


def _same(story: Story, signals: list[Signal]) -> bool:
    other = Story()
    other.sessions, other.turns, other.suggestions = (
        list(reversed(x)) for x in (story.sessions, story.turns, story.suggestions)
    )
    other.signals = signals
    return msgspec.json.encode(story.labels()) == msgspec.json.encode(dict(sorted(other.labels().items())))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_repeated_and_reordered_signals_give_the_same_labels(seed: int):
    """Each signal is delivered up to three times, the repetitions up to a day later, and the log is read in any
    order."""
    story, rng = _crowd(seed % 7), random.Random(seed)
    told: list[Signal] = []
    for signal in story.signals:
        for again in range(rng.randint(1, 3)):
            late = rng.randint(SECOND, 80_000 * SECOND) if again else 0
            told.append(msgspec.structs.replace(signal, arrived_at=signal.arrived_at + late))
    rng.shuffle(told)
    assert _same(story, told)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_signals_that_overtake_each_other_give_the_same_outcomes(seed: int):
    """Each is up to 30 s late, so that those of a client arrive in another order. States, rewards and components are
    the same; a weight may differ where another turn was censored within these seconds."""
    story, rng = _crowd(seed % 7), random.Random(seed)
    late = [msgspec.structs.replace(s, arrived_at=s.arrived_at + rng.randint(0, 30 * SECOND)) for s in story.signals]
    other = Story()
    other.sessions, other.turns, other.suggestions, other.signals = (
        story.sessions,
        story.turns,
        story.suggestions,
        late,
    )
    before, after = story.labels(), other.labels()
    for turn, label in before.items():
        assert msgspec.structs.replace(after[turn], weight=label.weight) == label


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clients_clock_changes_nothing(days: int):
    story = _crowd(1)
    skewed = [msgspec.structs.replace(s, observed_at=s.observed_at + days * 86_400 * SECOND) for s in story.signals]
    assert _same(story, skewed)


@given(cut=st.floats(0, 9000), seed=st.integers(0, 6))
@settings(max_examples=20, deadline=None)
def test_labels_depend_on_nothing_that_came_after_the_cut(cut: float, seed: int):
    story = _crowd(seed)
    before = Story()
    before.sessions = [s for s in story.sessions if s.opened <= time(cut)]
    before.turns = [t for t in story.turns if t.at <= time(cut)]
    before.suggestions = [s for s in story.suggestions if s.shown <= time(cut)]
    before.signals = [s for s in story.signals if s.arrived_at <= time(cut)]
    assert before.labels(cut) == story.labels(cut)


@pytest.mark.parametrize(("horizon", "at", "state"), [
    (600.0, 610, S.MATURED), (3600.0, 3610, S.MATURED), (120.0, 130, S.CENSORED), (86_400.0, 86_410, S.CENSORED),
])  # fmt: skip
def test_a_client_with_another_window_keeps_edits_too(horizon: float, at: float, state: str) -> None:
    """What is kept counts as what is undone does: neither is censored because its client looks at another time."""
    story = Story()
    for turn in ("kept", "undone", "silent"):
        story.turn(turn, turn, 0)
        story.edit(turn, f"edit of {turn}", 0, 200)
    story.survived("edit of kept", 1.0, at, horizon=horizon)
    story.signal("edit of undone", K.UNDONE, 60)
    found = story.labels(90_000)
    assert [found[turn].state for turn in ("kept", "undone", "silent")] == [state, S.MATURED, S.CENSORED]
    assert found["kept"].reward == pytest.approx(0.6 if state == S.MATURED else 0.0, **EXACT)


def test_an_edit_that_is_there_is_no_missing_edit() -> None:
    """The gateway derives NO_EDIT from an answer without code; the client made an edit of it all the same."""
    for told, reward in (((K.SURVIVED, 1800, 1.0), 0.6), ((K.UNDONE, 60), -0.6)):
        story = Story()
        story.turn("s", "t", 0)
        story.edit("t", "e", 0, 200)
        story.signal("t", K.NO_EDIT, 1)
        story.survived("e", told[2], told[1]) if told[0] == K.SURVIVED else story.signal("e", told[0], told[1])
        label = story.labels()["t"]
        assert (label.state, label.reward) == (S.MATURED, pytest.approx(reward, **EXACT))
        assert "no_edit" not in label.components


def test_thanks_are_no_correction() -> None:
    story = Story()
    story.turn("s", "a", 0)
    story.turn("s", "b", 60)
    story.signal("b", K.FOLLOWUP, 61, 0.1, text="thanks")
    story.turn("s", "c", 120)
    story.signal("c", K.FOLLOWUP, 121, 0.9, text="complaint", reader="judge m")
    found = story.labels()
    assert (found["a"].correction, found["b"].correction) == (None, "complaint")
    assert (found["a"].reader, found["b"].reader) == ("", "judge m")


def test_a_late_signal_makes_another_label_at_a_later_cut_only():
    story = Story()
    story.turn("s", "t", 0)
    story.edit("t", "e", 0)
    early = story.labels(4900)
    story.survived("e", 1.0, 5000)
    assert story.labels(4900) == early
    assert (early["t"].state, story.labels(6000)["t"].state) == (S.CENSORED, S.MATURED)
    assert story.labels(6000)["t"].cut == time(6000)


def test_a_clients_numbers_order_what_arrives_out_of_order():
    story = Story()
    story.turn("s", "t", 0)
    story.edit("t", "e", 0, 200)
    story.signal("e", K.UNDONE, 1900, client_sequence=2)
    story.survived("e", 1.0, 2000, client_sequence=1)  # sent first: it survived the window, and was undone then
    assert story.labels()["t"].reward == pytest.approx(0.6, **EXACT)
    story.signals = [replace_sequence(s) for s in story.signals]
    assert story.labels()["t"].reward == pytest.approx(-0.6, **EXACT)


def replace_sequence(signal: Signal) -> Signal:
    return msgspec.structs.replace(signal, client_sequence=None)
