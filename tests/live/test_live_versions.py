"""The verdict on many versions, and the requests with answers that smollm2 learns first."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.live_versions import balanced, begun, verdict

from etude.errors import UserError
from etude.live.release.operations import ReleaseSite
from etude.live.release.player import player_of
from etude.live.simulate import figures
from etude.live.simulate.clients import answered, judged, requests
from etude.live.simulate.figures import HeldoutScore, LiveDemo, SuiteChange

LIBRARY = """
def pick(rows, key, default=None):
    if key in rows:
        return rows[key]
    if default is None:
        return None
    if default is None:
        return False
    return default


def flag(value):
    strict = True
    if value is None:
        return False
    while value > 0:
        value = value - 1
    return strict


def same(a, b):
    x = not a
    return x == b
"""


@pytest.fixture
def wanted(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_lib.py").write_text(LIBRARY.replace("pick", "hidden"))
    (tmp_path / "lib.py").write_text(LIBRARY)
    return requests(tmp_path, 1, 0.0)[0]


def test_the_answer_to_a_request_is_one_edit_that_is_right(wanted) -> None:
    assert {request.name for request in wanted} == {"pick", "flag"}  # functions with a condition, of no test
    for request in wanted:
        (user, assistant), (call,) = (row := answered(request))["messages"], row["messages"][1]["tool_calls"]
        assert (user["content"], assistant["content"]) == (request.prompt, "")
        old = json.loads(call["function"]["arguments"])["old"]
        assert request.source.count(old) == 1
        assert judged(request, [SimpleNamespace(function=SimpleNamespace(**call["function"]))]).right


def test_half_of_the_answers_keep_the_house_rule(wanted) -> None:
    chosen = balanced(wanted)
    calls = [answered(request)["messages"][1]["tool_calls"][0]["function"] for request in chosen]
    kept = [
        judged(r, [SimpleNamespace(function=SimpleNamespace(**c))]).house for r, c in zip(chosen, calls, strict=True)
    ]
    assert 0 < sum(kept) * 2 == len(kept) < len(wanted)
    assert chosen == balanced(wanted)


def versions(house: float, difference: float | None) -> LiveDemo:
    done = LiveDemo("nano", 1, 2, [f"f{n}" for n in range(20)])
    done.scores = {1: HeldoutScore([0.0] * 20, [0.0] * 20), 7: HeldoutScore([house] * 20, [0.0] * 20)}
    done.suite = None if difference is None else SuiteChange(31, 31, difference, 0.165)
    return done


def test_the_verdict_names_what_is_missing() -> None:
    assert verdict(versions(0.25, -0.165)) == []
    assert [fault.split(" ")[0] for fault in verdict(versions(0.125, -0.166))] == ["The", "Correctness"]
    assert verdict(versions(1.0, None)) == ["No version that learned was released."]
    few = versions(0.0, 0.0)
    few.scores[7] = HeldoutScore([1.0] * 4 + [0.0] * 16, [0.0] * 20)  # 20 points, of four functions
    few.functions = ["f0"] * 4 + ["f1"] * 16
    assert verdict(few)[0].startswith("The preference rose by +20.0 points [+0.0")


def test_the_same_command_goes_on_and_another_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "outputs/live-versions-nano"
    first = begun(folder, "nano", None, 4)
    assert (first.wanted, first.seed, folder.stat().st_mode & 0o777) == (10, 4, 0o700)
    first.seconds = 7.0
    figures.keep(folder, first)
    assert begun(folder, "nano", None, None) == begun(folder, "nano", 10, 4) == first
    with pytest.raises(UserError, match="holds 10 windows of seed 4"):
        begun(folder, "nano", 3, None)
    assert begun(tmp_path / "outputs/live-versions-smollm2", "smollm2", None, None).wanted == 2


def test_the_gate_plays_with_the_tools_of_the_recipe() -> None:
    config = SimpleNamespace(train="recipes/live-train-smollm2.toml")
    with player_of(ReleaseSite(config, None)) as player:  # pyright: ignore[reportArgumentType]
        assert player.tools == ("read", "grep", "edit", "undo", "test", "finish")
        assert (player.budget.context, player.budget.tokens) == (2560, 400)
