"""Turns of models that think at length: the whole budget for a turn, and thoughts that are closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.config import validate
from etude.config.run import RolloutConfig
from etude.errors import UserError
from etude.harness.loop import Sampling
from etude.records import StopReason
from etude.renderers import Renderer
from etude.rollout.replay import RecordedPolicy
from etude.run.parts import sampling_of
from tests.harness.test_loop import play, spend
from tests.helpers.speakers import Scripted, Speaker


def test_a_turn_has_the_whole_budget_unless_it_is_bounded(hermes: Renderer, hermes_folder: Path) -> None:
    """The thought of 3,000 tokens and its call are one turn; with a bound, the cut thought ends the episode."""
    speaker = Speaker(hermes_folder)
    turns = [speaker.turn(("finish", {}), text="<think>" + "so " * 3000 + "</think>")]
    budget = spend({"tokens": 4000, "context": 16_000})
    whole = play(hermes, Scripted(turns), budget=budget)
    assert (whole.stop_reason, whole.turns[0].calls[0].name) == (StopReason.FINISHED, "finish")
    assert whole.metrics["truncated"] == 0
    cut = play(hermes, Scripted(turns), budget=budget, sampling=Sampling(max_tokens=1024))
    assert (cut.stop_reason, cut.turns[0].calls) == (StopReason.TOKENS, ())
    assert (cut.metrics["truncated"], cut.metrics["sampled_tokens"]) == (1, 1024)


def test_a_long_thought_is_closed_and_the_turn_goes_on(hermes: Renderer, hermes_folder: Path) -> None:
    """The tag is in the ledger with mask 0 between two sampled spans, and the call behind it is the turn's."""
    speaker = Speaker(hermes_folder)
    thought = speaker.encode("<think>" + "so " * 200)
    policy = Scripted([thought, speaker.turn(("list", {})), speaker.turn(("finish", {}))])
    sampling = Sampling(thinking_budget=100)
    draft = play(hermes, policy, sampling=sampling)
    assert [call.name for turn in draft.turns for call in turn.calls] == ["list", "finish"]
    assert (draft.metrics["turns"], draft.metrics["thoughts_closed"], draft.metrics["truncated"]) == (2, 1, 0)
    ids, mask, _, _ = draft.segments[0].arrays()
    (_, end), (start, _), *_ = draft.segments[0].spans()
    assert hermes.text(ids[end:start].tolist()) == "\n</think>\n\n"
    assert not mask[end:start].any()
    assert policy.prompts[1] == ids[:start].tolist()
    assert [turn.continued for turn in draft.turns] == [True, False, False]
    assert draft.turns[0].text.endswith("\n</think>\n\n")
    replayed = play(hermes, RecordedPolicy(draft.segments), sampling=sampling)
    assert replayed.segments == draft.segments


def test_a_thought_that_spends_the_budget_is_a_cut_turn(hermes: Renderer, hermes_folder: Path) -> None:
    policy = Scripted([Speaker(hermes_folder).encode("<think>" + "so " * 200)])
    draft = play(hermes, policy, budget=spend({"tokens": 100}), sampling=Sampling(thinking_budget=100, max_tokens=150))
    assert (draft.stop_reason, draft.metrics["truncated"], draft.metrics.get("thoughts_closed")) == (
        StopReason.TOKENS,
        1,
        None,
    )
    assert [turn.continued for turn in draft.turns] == [False]


@pytest.mark.parametrize("text", ["<think>so</think>" + " so" * 200, "so " * 200])
def test_only_an_open_thought_is_closed(hermes: Renderer, hermes_folder: Path, text: str) -> None:
    """A turn that has ended its thought, or has none, goes on behind its own tokens."""
    speaker = Speaker(hermes_folder)
    ids = speaker.turn(("finish", {}), text=text)
    draft = play(hermes, Scripted([ids[:100], ids[100:]]), sampling=Sampling(thinking_budget=100))
    assert (draft.metrics["thoughts_closed"], draft.turns[-1].calls[0].name) == (0, "finish")
    _, mask, _, _ = draft.segments[0].arrays()
    assert int(mask.sum()) == len(ids)


def test_templates_tell_whether_a_thought_is_open(compact: Renderer, hermes: Renderer) -> None:
    assert (compact.thinks, hermes.thinks) == (False, True)
    assert compact.end_of_thought([1, 2]) == []


@pytest.mark.parametrize(("keys", "why"), [
    ({"tokens": 400, "thinking_budget": 400}, "leaves nothing of the 400 tokens of a turn"),
    ({"tokens": 400, "turn_tokens": 100, "thinking_budget": 200}, "or raise rollout.turn_tokens"),
    ({"tokens": 900, "context": 4096, "thinking_budget": 600, "summarise_at": 2048}, "or raise rollout.summary_tokens"),
    ({"tokens": 400, "thinking_budget": 100, "agent": {"command": "x"}}, "is for the built-in loop"),
])  # fmt: skip
def test_budgets_of_thoughts_that_cannot_be(keys: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=why):
        validate(RolloutConfig, keys, "x.toml")


def test_a_run_samples_as_its_keys_say() -> None:
    assert sampling_of(RolloutConfig()).max_tokens is None
    sampling = sampling_of(RolloutConfig(tokens=9000, turn_tokens=3000, thinking_budget=2000))
    assert (sampling.max_tokens, sampling.thinking_budget) == (3000, 2000)
