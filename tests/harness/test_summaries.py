"""Episodes as chains of segments: summaries between turns, and the chain played again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etude.errors import UserError
from etude.harness.loop import AGAIN, LEFT_OUT, MEMORY, SUMMARISE, Sampling, UngradedEpisode, turn_seed
from etude.harness.token_ledger import TokenLedgerError
from etude.protocol.wire import GenerateRequest
from etude.records import Generation, StopReason
from etude.renderers import Renderer, renderer_for
from etude.rollout.replay import RecordedPolicy
from tests.harness.test_loop import WIDE, Routed, dialect, edit, play  # noqa: F401 - `dialect` is a fixture
from tests.harness.test_open_documents import ROOM, Squid, documents_of
from tests.helpers.speakers import PATH, SOURCE, TEMPLATE, MemoryBox, Scripted, Speaker, a_box, a_task, write_model

Dialect = tuple[Renderer, Speaker]


def chain(renderer: Renderer, speaker: Speaker, room: int = 700) -> Sampling:
    """Summaries once a segment has `room` tokens after the task's prompt."""
    (segment,) = play(renderer, Scripted([speaker.turn(("finish", {}))])).segments
    return Sampling(summarise_at=segment.prompt_length + room, summary_tokens=60)


class Agent(Scripted):
    """Works through its turns, and answers a request for a summary with the next of its summaries."""

    def __init__(self, renderer: Renderer, turns: Sequence[list[int]], summaries: Sequence[list[int]]) -> None:
        super().__init__(turns)
        self._ends = renderer.bridge([], "stop", [], SUMMARISE)[-20:]
        self._turns, self._summaries = iter(turns), iter(summaries)
        self.asked: list[int] = []  # numbers of the requests for a summary

    async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
        asked = request.ids[-20:] == self._ends
        if asked:
            self.asked.append(len(self.prompts))
        said = next(self._summaries if asked else self._turns)
        self.turns = lambda _: said
        return await super().generate(request, *rest)


def long_box() -> MemoryBox:
    box = a_box()
    box.files["src/long.py"] = b"".join(b"def f%d(x):\n    return x\n" % i for i in range(20))
    return box


def a_search(speaker: Speaker) -> list[int]:
    """A turn whose result has a few hundred tokens."""
    return speaker.turn(("grep", {"pattern": "def"}))


def notes(speaker: Speaker, count: int) -> list[list[int]]:
    return [speaker.turn(text=f" Found {i} things. ") for i in range(1, count + 1)]


def a_chain(renderer: Renderer, speaker: Speaker) -> tuple[UngradedEpisode, Agent]:
    turns = [a_search(speaker)] * 7 + [speaker.turn(edit(speaker, "- 3", "* 3"), ("test", {}), ("finish", {}))]
    agent = Agent(renderer, turns, notes(speaker, 9))
    return play(renderer, agent, box=long_box(), sampling=chain(renderer, speaker)), agent


def test_a_long_episode_is_a_chain_of_segments(dialect: Dialect) -> None:  # noqa: F811
    renderer, speaker = dialect
    draft, agent = a_chain(renderer, speaker)
    count = len(agent.asked)
    assert count >= 2
    assert (draft.stop_reason, draft.metrics["visible_passed"]) == (StopReason.FINISHED, 1)
    assert (draft.metrics["turns"], draft.metrics["summaries"], draft.metrics["summary_errors"]) == (8, count, 0)
    assert len(draft.segments) == draft.metrics["segments"] == count + 1
    assert len(draft.turns) == 8 + count == sum(len(s.turn_starts) for s in draft.segments)
    assert [r.seed for r in agent.requests] == [turn_seed(7, n) for n in range(8 + count)]
    sampled = [i for s in draft.segments for i in s.arrays()[0][s.arrays()[1] == 1].tolist()]
    assert len(sampled) == draft.metrics["sampled_tokens"]
    assert speaker.tokenizer.decode(sampled).count("Found") == count, "summaries are sampled tokens"
    for number, at in enumerate(agent.asked, 1):
        asked, begun = renderer.text(agent.prompts[at]), renderer.text(agent.prompts[at + 1])
        assert len(agent.prompts[at]) >= chain(renderer, speaker).summarise_at
        assert agent.requests[at].max_tokens == 60
        # The request stands behind the results of the turn before: never inside a call.
        said = draft.segments[number - 1]
        start = said.turn_starts[-2]
        ids, mask, *_ = said.arrays()
        before = ids[start : said.turn_starts[-1]][mask[start : said.turn_starts[-1]] == 1].tolist()
        results = draft.turns[at - 1].results
        assert asked.endswith(renderer.text(renderer.bridge(before, "stop", results, SUMMARISE)))
        assert MEMORY.format(count=number, summary=f"Found {number} things.") in begun
        assert a_task().prompt in begun
        assert f"Found {number - 1} things." not in begun, "an older summary lives on only in the newer one"
        assert "long.py" not in begun
        assert draft.segments[number].prompt_length == len(agent.prompts[at + 1])


def test_it_is_off_by_default(dialect: Dialect) -> None:  # noqa: F811
    renderer, speaker = dialect
    draft = play(renderer, Scripted([a_search(speaker)] * 7 + [speaker.turn(("finish", {}))]), box=long_box())
    assert len(draft.segments) == 1
    assert "summaries" not in draft.metrics


@pytest.mark.parametrize("played", ["chain", "documents", "routes"])
def test_an_episode_replays_token_by_token(dialect: Dialect, played: str) -> None:  # noqa: F811
    """In a new box, with nothing but the segments: every prompt is asked for again, and every byte is the same."""
    renderer, speaker = dialect
    turns = [a_search(speaker)] * 4 + [speaker.turn(edit(speaker, "- 3", "* 3")), speaker.turn(("finish", {}))]
    sampling, policy, budget = chain(renderer, speaker), Agent(renderer, turns, notes(speaker, 4)), WIDE
    if played == "routes":
        sampling, policy = Sampling(routes=True), Routed(turns)
    if played == "documents":
        sampling, policy, budget = Sampling(documents=True), Squid(turns), ROOM
    draft = play(renderer, policy, budget, box=long_box(), sampling=sampling)
    assert (len(draft.segments) > 1) == (played != "routes")
    recorded = RecordedPolicy(draft.segments)
    assert play(renderer, recorded, budget, box=long_box(), sampling=sampling, seed=99).segments == draft.segments
    assert recorded.played == recorded.turns
    other = long_box()
    other.files["src/long.py"] = b"def g():\n    pass\n"
    with pytest.raises(TokenLedgerError, match=r"turn \d was sampled from \d+ tokens"):
        play(renderer, RecordedPolicy(draft.segments), budget, box=other, sampling=sampling)
    with pytest.raises(TokenLedgerError, match=r"turn \d was never sampled"):
        play(renderer, RecordedPolicy(draft.segments[:-1]), budget, box=long_box(), sampling=sampling)


@pytest.mark.parametrize("again", ["0x7f0b1c9d8e70", "0x7ffff7a1b2c3d4"])
def test_addresses_of_objects_may_differ_in_a_replay(dialect: Dialect, again: str) -> None:  # noqa: F811
    """They are drawn anew in each process; nothing else may differ."""
    renderer, speaker = dialect
    turns = [a_search(speaker)] * 2 + [speaker.turn(("finish", {}))]

    def box(address: str, name: str = "Shelf"):
        made = long_box()
        made.files["src/long.py"] = f"def g():  # <{name} object at {address}>\n    pass\n".encode()
        return made

    played = play(renderer, Scripted(turns), box=box("0x7f3a2b1c0d00"))
    assert "0x7f3a2b1c0d00" in renderer.text(played.segments[0].arrays()[0].tolist())
    recorded = RecordedPolicy(played.segments, renderer.text)
    play(renderer, recorded, box=box(again))
    assert recorded.played == recorded.turns
    with pytest.raises(TokenLedgerError, match=r"turn \d was sampled from"):
        play(renderer, RecordedPolicy(played.segments), box=box(again))
    with pytest.raises(TokenLedgerError, match=r"turn \d was sampled from"):
        play(renderer, RecordedPolicy(played.segments, renderer.text), box=box(again, "Chest"))


def test_bad_summaries_are_kept_and_asked_for_once_more(dialect: Dialect) -> None:  # noqa: F811
    """Empty, a call, cut off; then two bad ones in a row: the agent goes on with what it wrote last."""
    renderer, speaker = dialect
    empty, call = speaker.turn(), speaker.turn(edit(speaker, "- 3", "- 4"))
    long, good = speaker.turn(text="Found so much. " * 40), speaker.turn(text="Found it.")
    early = chain(renderer, speaker, 300)
    for bad, fault in ((empty, "empty"), (call, "empty"), (long, "cut off")):
        box = long_box()
        agent = Agent(renderer, [a_search(speaker), speaker.turn(("finish", {}))], [bad, good])
        draft = play(renderer, agent, box=box, sampling=early)
        assert box.files[PATH] == SOURCE.encode(), "a call in a summary is not run"
        assert (draft.metrics["summaries"], draft.metrics["summary_errors"]) == (1, 1)
        first, second = agent.asked
        kept = bad[: early.summary_tokens]
        bridge = renderer.bridge(kept, "length", [], AGAIN.format(fault=fault) + SUMMARISE)
        assert agent.prompts[second] == agent.prompts[first] + kept + bridge
        begun = renderer.text(agent.prompts[second + 1])
        assert MEMORY.format(count=1, summary="Found it.") in begun
        ids, mask, *_ = draft.segments[0].arrays()
        start = len(agent.prompts[first])
        assert mask[start : start + len(kept)].all()
        assert ids[start : start + len(kept)].tolist() == kept
    for pair, memory in (([long, empty], "Found so much. Found"), ([empty, empty], "(nothing)")):
        agent = Agent(renderer, [a_search(speaker), speaker.turn(("finish", {}))], pair)
        draft = play(renderer, agent, box=long_box(), sampling=early)
        assert (draft.metrics["summary_errors"], draft.stop_reason) == (2, StopReason.FINISHED)
        assert MEMORY.format(count=1, summary=memory) in renderer.text(agent.prompts[-1])


def test_a_result_that_leaves_no_room_for_a_summary_is_left_out(dialect: Dialect) -> None:  # noqa: F811
    renderer, speaker = dialect
    base = len(play(renderer, Scripted([speaker.turn(("finish", {}))])).segments[0].ids) // 4
    budget = msgspec.structs.replace(WIDE, context=base + 450)
    agent = Agent(renderer, [a_search(speaker), speaker.turn(("finish", {}))], notes(speaker, 1))
    sampling = Sampling(summarise_at=budget.context, summary_tokens=40)
    draft = play(renderer, agent, budget, box=long_box(), sampling=sampling)
    assert draft.stop_reason is StopReason.FINISHED
    assert LEFT_OUT in renderer.text(agent.prompts[1])
    assert "def f" in draft.turns[0].results[0]
    assert all(len(s.ids) // 4 < budget.context for s in draft.segments)


def test_budgets_bound_a_chain(dialect: Dialect) -> None:  # noqa: F811
    """Even where every prompt is too long at once: a turn is played in each segment, and turns are counted."""
    renderer, speaker = dialect
    always = Sampling(summarise_at=1, summary_tokens=30)

    def ended(**budget: Any) -> UngradedEpisode:
        agent = Agent(renderer, [speaker.turn(("list", {}))] * 99, notes(speaker, 99))
        return play(renderer, agent, msgspec.structs.replace(WIDE, **budget), sampling=always)

    draft = ended(turns=4)
    assert (draft.stop_reason, draft.metrics["turns"], draft.metrics["summaries"]) == (StopReason.TURNS, 4, 3)
    assert [len(s.turn_starts) for s in draft.segments] == [2, 2, 2, 1]
    size = len(speaker.turn(("list", {})))
    draft = ended(tokens=size + 2)
    assert (draft.stop_reason, draft.metrics["sampled_tokens"]) == (StopReason.TOKENS, size + 2)


def test_a_chain_begins_again_with_the_open_file_as_documents(hermes: Renderer, hermes_folder: Path) -> None:
    speaker = Speaker(hermes_folder)

    class Both(Agent, Squid):
        pass

    turns = [speaker.turn(("read", {"path": "src/long.py"})), speaker.turn(("list", {})), speaker.turn(("finish", {}))]
    agent = Both(hermes, turns, notes(speaker, 9))
    draft = play(hermes, agent, ROOM, box=long_box(),
                 sampling=Sampling(documents=True, summarise_at=500, summary_tokens=60))  # fmt: skip
    assert agent.asked
    sent = [documents_of(request) for request in agent.requests]
    assert sent[agent.asked[0] + 1] == sent[0]
    assert sent[0]
    assert draft.segments[-1].documents == draft.segments[0].documents


def test_a_request_behind_results_is_rendered_as_the_template_does(dialect: Dialect) -> None:  # noqa: F811
    renderer, speaker = dialect
    said = speaker.turn(text="Dummy turn.")
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]
    start = renderer.prompt(asked)
    for results in ([], ["one"], ["one", "two", "three <|im_end|><|end|>"]):
        messages = [*asked, {"role": "assistant", "content": "Dummy turn."}]
        messages += [{"role": "tool", "content": result} for result in results]
        messages += [{"role": "user", "content": "Sum up <|im_start|><|user|>."}]
        found = start + said + renderer.bridge(said, "stop", results, "Sum up <|im_start|><|user|>.")
        assert found == renderer.prompt(messages)


def test_a_template_without_a_place_for_requests_is_refused_before_the_first_turn(
    hermes_folder: Path, tmp_path: Path
) -> None:
    speaker = Speaker(hermes_folder)
    strict = "{%- if messages[-1].role == 'user' and messages | length > 3 %}{{ raise_exception('no') }}{% endif %}"
    renderer = renderer_for(write_model(tmp_path, speaker.tokenizer, strict + TEMPLATE))
    script = [speaker.turn(("finish", {}))]
    assert play(renderer, Scripted(script)).stop_reason is StopReason.FINISHED
    policy = Scripted(script)
    with pytest.raises(UserError, match="no place for a request"):
        play(renderer, policy, sampling=Sampling(summarise_at=9999))
    assert policy.prompts == []
