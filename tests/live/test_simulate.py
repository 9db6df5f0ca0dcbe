"""Simulated users: what they want can be found out, and every planted fault shows where its stage is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.live_clock import SetClock
from benchmarks.live_simulation import bandit
from benchmarks.live_simulation.__main__ import main
from benchmarks.live_simulation.conversations import NextRequest, first_chat, next_chat, next_requests
from benchmarks.live_simulation.habits import HABITS, plant
from benchmarks.live_simulation.judge import FIGURES, compare, judge
from benchmarks.live_simulation.scenarios import SCENARIOS, digest
from benchmarks.live_simulation.served import run_served
from benchmarks.live_simulation.server import drawn, seed_of
from benchmarks.live_simulation.texts import ASKED, read_answer
from benchmarks.live_simulation.traffic import HORIZON, react, records, serve
from benchmarks.live_simulation.windows import LIVE, NULL, ORACLE, Setting, run

from etude.live.log.derive import answer_of, asks_for_edit, conversation, of_next
from etude.live.log.records import SignalKind
from etude.live.simulate import users

ROOT = str(Path(__file__).parents[2])
UNTRAINED = bandit.probabilities(bandit.first_policy())


def test_the_scenarios_are_those_that_were_judged() -> None:
    """A change of a scenario or a bound changes this digest, and asks for seeds 11-30 to be run again."""
    assert digest() == "f5d5f38d7f9a77944c9e66c47d429f69"
    assert {scenario.name for scenario in SCENARIOS} == set(FIGURES)


def test_a_change_is_checked_for_its_properties() -> None:
    before = "def size(x):\n    if x == None:\n        return 0\n    return len(x)\n"
    house = before.replace("x == None", "x is None") + "\n\ndef test_size():\n    assert size(None) == 0\n"
    rules = {"house": r"\bis None\b", "generic": r"== None", "lines": 6}
    assert users.properties_of(before, house, **rules).tolist() == [1, 1, 1, 1, 1]
    generic = before.replace("size(x)", "size(x, y)").replace("x == None", "x == None or y == None")
    assert users.properties_of(before, generic, **rules, question=True).tolist() == [0, 0, 1, 0, 0]
    broken = users.properties_of(before, "def size(x:\n" * 9, **rules)
    assert broken.tolist() == [0, 0, 0, 0, 1]


def test_preferences_of_an_account_can_be_recovered_from_what_survives() -> None:
    """Least squares over the answers of an even policy to each of 30 accounts. An account of a thousand edits has some
    two hundred correct ones that survive, with a deviation of 0.1; their weights differ by as much from each other, so
    a correlation of 0.7 is what is left of a perfect one."""
    rng = np.random.default_rng(1)
    population = users.draw_population(rng, 30, zipf=0.0)
    turns = serve(rng, population, np.full(UNTRAINED.shape, 1 / len(users.ACTIONS)), 40_000)
    signals = react(rng, population, turns)
    told = signals.where(signals.of(SignalKind.SURVIVED) & (signals.horizon_S == HORIZON))
    told = told.where(turns.correct_N[told.turn_S] & (turns.action_N[told.turn_S] >= 0))
    has_NQ = users.has_properties()[turns.variant_N[told.turn_S], turns.action_N[told.turn_S]]
    of_N = turns.account_N[told.turn_S]
    found_AQ = np.array([users.estimate_preferences(has_NQ[of_N == a], told.value_S[of_N == a]) for a in range(30)])
    for q in range(len(users.PROPERTIES)):
        assert np.corrcoef(found_AQ[:, q], population.preference_AQ[:, q])[0, 1] > 0.7


def test_hidden_utility_is_of_accounts_that_are_never_trained_on() -> None:
    population = users.draw_population(np.random.default_rng(2), 200)
    assert population.heldout_A.sum() == 40
    assert not (population.consent_A & population.heldout_A).any()
    swapped = users.SimulatedAccounts(**{**vars(population), "preference_AQ": population.preference_AQ[:, ::-1]})
    assert not np.allclose(users.utility(population), users.utility(swapped))


def test_charm_earns_no_utility() -> None:
    population = users.draw_population(np.random.default_rng(3), 200)
    names = [action.name for action in users.ACTIONS]
    gain_A = users.VARIANT_SHARES @ users.utility(population)
    assert gain_A[names.index("flatter")] < gain_A[names.index("generic")]
    assert gain_A[names.index("tiny")] < gain_A[names.index("generic")]


def test_the_log_has_every_turn_once_and_its_messages_name_the_next() -> None:
    rng = np.random.default_rng(4)
    population = users.draw_population(rng, 100)
    turns = serve(rng, population, UNTRAINED, 500)
    log = records(population, turns, react(rng, population, turns), 3)
    assert len({turn.id for turn in log.turns}) == len(log.turns) == len(turns.account_N)
    assert len({(turn.session, turn.sequence) for turn in log.turns}) == len(log.turns)
    served = {turn.id: turn for turn in log.turns}
    for signal in log.signals:
        if signal.kind == SignalKind.ANSWERED:
            assert served[signal.subject].sequence > 0
        assert signal.arrived_at >= signal.observed_at


def test_a_run_is_a_function_of_its_seed() -> None:
    setting = Setting(versions=2, turns=200)
    first, second, other = run(5, setting), run(5, setting), run(6, setting)
    assert np.array_equal(first.logits[-1], second.logits[-1])
    assert not np.array_equal(first.logits[-1], other.logits[-1])


def test_three_windows_learn_from_labels_and_nothing_from_shuffled_ones() -> None:
    """Three windows of 1,000 requests; the bounds are half of what seeds 1-3 gain, and several times what the null
    does."""
    gains = {mode: run(7, Setting(mode, versions=3, turns=1000)).gain for mode in (LIVE, ORACLE, NULL)}
    assert gains[ORACLE] > gains[LIVE] > 0.08
    assert abs(gains[NULL]) < 0.04


def test_answers_are_read_from_their_tokens() -> None:
    """The server's parser and the gateway find in texts what each way to answer is."""
    kinds = {"question": {SignalKind.QUESTION}, "broken": {SignalKind.INVALID_CALL}}
    for action in users.ACTIONS:
        for number in range(len(ASKED)):
            answer = read_answer(action, number)
            assert answer.kinds == kinds.get(action.outcome, set()), (action.name, number)
            assert answer.characters == (action.characters if action.outcome == "edit" else 0)


@pytest.mark.parametrize("kind", [SignalKind.FOLLOWUP, SignalKind.RETRY, SignalKind.ANSWERED])
@pytest.mark.parametrize("unhappy", [0.0, 0.3, 1.0])
def test_the_gateway_reads_in_the_next_request_what_its_user_thinks(kind: SignalKind, unhappy: float) -> None:
    """The reader knows an opinion by a few words: it is off by a quarter at most."""
    name = "question" if kind is SignalKind.ANSWERED else "house"
    action = [each.name for each in users.ACTIONS].index(name)
    message = json.loads(drawn(seed_of(action, 1)).message)
    chat = first_chat("s", 1, 7)
    after = next_chat(chat.after(message), NextRequest(0, kind, unhappy), 1, 8)
    before, request = (conversation("chat", {"messages": each.messages}) for each in (chat, after))
    signals = {signal.kind: signal.value for signal in of_next(before, answer_of(message), request)}
    assert kind in signals
    assert asks_for_edit(before[0].text)
    if kind is SignalKind.FOLLOWUP:
        assert abs(signals[kind] - unhappy) < 0.25
    assert (SignalKind.RETRY in signals) == (kind is SignalKind.RETRY)


def test_a_turn_goes_on_where_its_user_reacts_to_the_one_before() -> None:
    rng = np.random.default_rng(8)
    population = users.draw_population(rng, 100)
    turns = serve(rng, population, UNTRAINED, 500)
    signals = react(rng, population, turns)
    after = next_requests(turns, signals)
    assert {SignalKind.FOLLOWUP, SignalKind.RETRY, SignalKind.ANSWERED} == {each.kind for each in after.values()}
    for n, request in after.items():
        assert turns.next_N[request.before] == n
        assert turns.account_N[request.before] == turns.account_N[n]
    answered = np.flatnonzero(turns.question_N >= 0).tolist()
    assert all(after[n].kind is SignalKind.ANSWERED for n in answered)


def test_processes_read_the_clock_that_is_set(tmp_path: Path) -> None:
    clock = SetClock(tmp_path / "clock")
    clock.set(1_000_000_000.5)
    with clock.here():
        assert time.time() == 1_000_000_000.5
        assert time.time_ns() == 1_000_000_000_500_000_000
    assert time.time() > 1_700_000_000
    ran = "import sys; from benchmarks.live_clock import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", ran, str(tmp_path / "clock"), "live", "key", "create", "live.toml", "acme", "ann"]
    (tmp_path / "live.toml").write_text(
        'stage = "live"\nfolder = "live"\n[[clusters]]\nname = "a"\nurls = ["http://127.0.0.1:9"]\nstore = "s"\n'
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    command[-4:] = ["list", "live.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "2001-09-09" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_learned_through_the_gateway_is_what_is_learned_in_memory(tmp_path: Path) -> None:
    """The same users: the gain differs by what a window of 200 requests leaves to chance. No answer is lost, and only
    the outcome of a turn keeps it from being trained on."""
    first = bandit.first_policy(1)
    served = run_served(tmp_path, 5, 4, 200, first)
    memory = run(5, Setting(versions=4, turns=200), first)
    assert served.learning.gain > 0.06
    assert abs(served.learning.gain - memory.gain) < 0.06
    assert {name.split()[0] for name in served.exits} <= {"dropped", "held"}
    assert {name.split()[1] for name in served.exits} <= {"censored", "account_cap", "coverage", "open"}
    assert served.answers > 800
    assert served.signals > served.answers


@pytest.mark.parametrize("name", HABITS)
def test_a_planted_habit_shows_in_its_signal_within_one_window_and_is_unlearned(name: str) -> None:
    seen = plant(name, 11, versions=4, turns=1000)
    assert seen.errors > 4, seen
    assert seen.after < seen.before / 1.5, seen


FAST = ("secret", "slow-regression", "clock-skew", "reordered", "duplicates", "delayed", "silent-client", "bad-at-5")


@pytest.mark.parametrize("name", FAST)
def test_a_fault_is_stopped_by_its_stage_and_shows_without_it(name: str) -> None:
    row = judge(name, [11])
    assert row.stopped == 1, row.on
    assert row.shown == 1, row.off


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FIGURES) - set(FAST) - {"sybils"}))
def test_a_hack_is_stopped_by_its_stage_and_wins_without_it(name: str) -> None:
    row = judge(name, [11])
    assert row.stopped == 1, row.on
    assert row.shown == 1, row.off


@pytest.mark.release
def test_all_scenarios_over_twenty_seeds() -> None:
    """The acceptance of the live loop: at least 19 of 20 seeds, which were not looked at when bounds were chosen."""
    seeds = list(range(11, 31))
    clean = compare(seeds)
    assert clean.share(LIVE) >= 0.85
    assert abs(clean.share(NULL)) <= 0.02
    assert max(clean.share(naive) for naive in ("plus", "zero", "dropped")) < clean.share(LIVE)
    for scenario in SCENARIOS:
        row = judge(scenario.name, seeds)
        assert min(row.stopped, row.shown) >= 19, scenario.name


def test_the_command_prints_its_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secret", "--seeds", "1-2", "--json"]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert any(line.startswith("| secret") for line in table)
    assert json.loads(last)["faults"]["secret"] == {"with": 0.0, "without": 100.0, "stopped": 2, "shown": 2}


@pytest.mark.parametrize(
    ("words", "said"), [(["nonsense"], "no scenario"), (["clean", "--seeds", "3-1"], "--seeds 3-1")]
)
def test_a_wrong_word_is_answered_in_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "etude.code.extras.missing_packages", lambda extra: ["detect-secrets"] if extra == "live" else []
    )
    assert main(["secret"]) == 2
    assert "pip install 'etude[live]'" in capsys.readouterr().err
