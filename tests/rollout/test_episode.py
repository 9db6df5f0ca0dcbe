"""Whole episodes in the real sandbox: played, graded, and paid for by whoever broke them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.config import RewardConfig
from etude.edits.edit import Edit
from etude.errors import UserError
from etude.grading.cheats import Decoys, plant_decoys
from etude.grading.runner import open_sandbox
from etude.harness import loop
from etude.harness.loop import EngineModel, Sampling, Toolset
from etude.protocol.backends import EngineError
from etude.protocol.wire import GenerateRequest
from etude.records import Budget, Episode, Generation, Outcome, StopReason, decode, encode
from etude.renderers import Renderer
from etude.rollout.environments.code import dataset_part
from etude.rollout.environments.taskset import Taskset
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.rollout.rewards import with_reward
from etude.sandbox.base import BoxDead, Image, LaunchFailed, Limits, TestReport, TooLarge
from etude.sandbox.egress.policy import Egress
from etude.tasks.dataset import Dataset
from tests.helpers.speakers import PATH, SOURCE, Scripted, Speaker, a_box, a_task

SLOT = EpisodeId(group_id=3, member=1, attempt=0, seed=5)
BUDGET = Budget(turns=20, tokens=4000, context=8000, seconds=60.0)


def turns(speaker: Speaker, *scripts: Sequence[Any]) -> list[list[int]]:
    return [speaker.turn(*calls) for calls in scripts]


def edit(speaker: Speaker, old: str, new: str) -> tuple[str, dict[str, object]]:
    return ("edit", {"old": old, "new": new} if speaker.compact else {"path": PATH, "old": old, "new": new})


def repair(speaker: Speaker) -> list[list[int]]:
    wrong, right = edit(speaker, "- 3", "+ 3"), edit(speaker, "- 3", "* 3")
    test, undo, finish = ("test", {}), ("undo", {}), ("finish", {})
    return turns(speaker, [wrong, test], [undo, right, test], [finish])


def attempt(
    dataset: Dataset,
    sandbox: Any,
    renderer: Renderer,
    policy: Any,
    budget: Budget = BUDGET,
    decoys: Decoys | None = None,
) -> Any:
    """One attempt; a coroutine."""
    setting = RolloutContext(
        Taskset((dataset_part(dataset),)), sandbox, EngineModel(policy, renderer, Sampling()), budget
    )
    return run_episode(setting, a_task(), SLOT, decoys)


def test_whole_episodes_in_the_sandbox(
    dataset: Dataset, compact: Renderer, compact_folder: Path, hermes: Renderer, hermes_folder: Path
) -> None:
    small, big = Speaker(compact_folder), Speaker(hermes_folder)
    gives_up = turns(small, [edit(small, "- 3", "+ 3"), ("test", {})], [("finish", {})])
    shell = turns(small, [("run", {"command": "sed -i 's/- 3/* 3/' src/shop.py; cat src/shop.py | grep total"})],
                  [("read", {}), ("test", {}), ("undo", {})], [("finish", {})])  # fmt: skip
    forged = turns(big, [("edit", {"path": "tests/conftest.py", "old": "", "new": "x = 1\n"})], [("finish", {})])

    async def all_of_them() -> list[Episode]:
        async with open_sandbox(workers=1) as sandbox:
            pairs = [
                (compact, repair(small)),
                (hermes, repair(big)),
                (compact, gives_up),
                (compact, shell),
                (hermes, forged),
            ]
            return [await attempt(dataset, sandbox, renderer, Scripted(script)) for renderer, script in pairs]

    repaired, repaired_big, gave_up, by_shell, set_aside = asyncio.run(all_of_them())
    for episode in (repaired, repaired_big):
        assert (episode.outcome, episode.reward, episode.passed) == (Outcome.SCORED, 1.0, True)
        assert (episode.id, episode.group_id, episode.member, episode.attempt) == ("3-1-0", 3, 1, 0)
        assert (episode.task_id, episode.seed, episode.stop_reason) == ("shop-1", 5, StopReason.FINISHED)
        assert decode(encode(episode), Episode) == episode
    assert repaired.turns[0].results == ("ok", "failed: doctest:Shop.price: " + repaired.turns[0].results[1][28:])
    assert "6" in repaired.turns[0].results[1]
    assert repaired.turns[1].results == ("undone", "ok", "passed")
    assert repaired_big.turns[1].results == (f"undone: {PATH}", "ok", "1 of 1 passed")
    assert (gave_up.outcome, gave_up.reward) == (Outcome.SCORED, 0.0)
    assert "test_price" in gave_up.detail
    assert "total = amount * 3" in by_shell.turns[0].results[0]
    assert by_shell.turns[1].results == (
        "def price(self, amount):\n    total = amount * 3\n    return total", "passed", "error: nothing to undo"
    )  # fmt: skip
    assert by_shell.passed
    assert set_aside.reward == 0.0
    assert "tests/conftest.py" in set_aside.detail


def test_a_sketch_is_laid_by_what_the_run_names(dataset: Dataset, hermes: Renderer, hermes_folder: Path) -> None:
    sketch = "# ... existing code ...\n        total = amount * 3\n        return total\n"
    script = turns(Speaker(hermes_folder), [("apply", {"path": PATH, "sketch": sketch})], [("finish", {})])
    asked: list[Edit] = []

    async def clumsy(edit: Edit) -> str:
        asked.append(edit)
        return edit.text.replace("- 3", "+ 3")

    async def both() -> list[Episode]:
        async with open_sandbox(workers=1) as sandbox:
            first, second = (EngineModel(Scripted(script), hermes, Sampling()) for _ in range(2))
            taskset = Taskset((dataset_part(dataset),))
            setting = RolloutContext(taskset, sandbox, first, BUDGET)
            other = replace(setting, model=second, toolset=Toolset(apply_edit=clumsy))
            return [await run_episode(one, a_task(), SLOT) for one in (setting, other)]

    merged, by_model = asyncio.run(both())
    assert (merged.reward, merged.turns[0].results) == (1.0, ("ok",))
    assert (by_model.reward, by_model.turns[0].results) == (0.0, ("ok",))
    assert asked == [Edit(SOURCE, sketch, path=PATH)]


class Fake:
    """A sandbox whose faults are ours to choose."""

    def __init__(self, **faults: BaseException) -> None:
        self.faults = faults
        self.box = a_box()

    async def create(self, image: Image, limits: Limits) -> Any:
        if "create" in self.faults:
            raise self.faults["create"]
        if "changes" in self.faults:
            self.box.changes = self._fail("changes")  # type: ignore[method-assign]
        return self.box

    async def run_tests(self, *_: Any) -> TestReport:
        if "run_tests" in self.faults:
            raise self.faults["run_tests"]
        return TestReport({"tests/test_shop.py::test_price": "passed"}, {}, 0.0)

    def _fail(self, name: str) -> Any:
        async def fail(*_: Any) -> dict[str, bytes | None]:
            raise self.faults[name]

        return fail


@pytest.mark.parametrize(
    ("faults", "outcome", "stop"),
    [
        ({}, Outcome.SCORED, StopReason.FINISHED),
        ({"create": LaunchFailed("no memory")}, Outcome.INFRA, StopReason.ERROR),
        ({"changes": BoxDead("gone")}, Outcome.INFRA, StopReason.ERROR),
        ({"changes": TooLarge("too many files")}, Outcome.SCORED, StopReason.FINISHED),
        ({"run_tests": BoxDead("gone")}, Outcome.INFRA, StopReason.ERROR),
    ],
)
def test_who_pays_for_a_broken_box(
    dataset: Dataset, compact: Renderer, compact_folder: Path, faults: dict[str, BaseException], outcome: Outcome,
    stop: StopReason,
) -> None:  # fmt: skip
    sandbox = Fake(**faults)
    episode = asyncio.run(attempt(dataset, sandbox, compact, Scripted(repair(Speaker(compact_folder)))))
    assert (episode.outcome, episode.stop_reason) == (outcome, stop)
    assert episode.reward == (0.0 if faults else 1.0)
    assert sandbox.box.closed is ("create" not in faults)
    assert all(str(fault) in episode.detail for fault in faults.values())


def test_names_that_are_no_utf8_end_nothing(dataset: Dataset, compact: Renderer, compact_folder: Path) -> None:
    """In the agent's own tests, in the grade, in the record."""
    say = Speaker(compact_folder)
    odd = ("run", {"command": "sed -i 's/- 3/* 3/' src/shop.py; printf x > src/$'\\xff.py'; ls src"})
    script = turns(say, [odd, ("test", {})], [("finish", {})])

    async def played() -> Episode:
        async with open_sandbox(workers=1) as sandbox:
            return await attempt(dataset, sandbox, compact, Scripted(script))

    episode = asyncio.run(played())
    assert (episode.outcome, episode.reward) == (Outcome.SCORED, 1.0)
    assert episode.detail.endswith("; set aside 1: src/\\xff.py")
    assert episode.turns[0].results[1] == "passed"
    assert decode(encode(episode), Episode) == episode


def test_an_agent_pays_for_a_tree_that_cannot_be_read(
    dataset: Dataset, compact: Renderer, compact_folder: Path
) -> None:
    """Below the source roots; elsewhere it may leave what it likes, and a way out of a bad grade it is not."""
    say = Speaker(compact_folder)
    deep = "n=$(printf '%0250d'); for i in 1 2 3 4 5 6; do mkdir $n; cd $n; done; truncate -s 10M $(seq 19); cd $OLDPWD"
    fix = "sed -i 's/- 3/* 3/' src/shop.py"
    scripts = [turns(say, [("run", {"command": f"{fix}; cd {at}; {deep}"})], [("finish", {})]) for at in ("src", ".")]

    async def both() -> list[Episode]:
        async with open_sandbox(workers=1) as sandbox:
            return [await attempt(dataset, sandbox, compact, Scripted(script)) for script in scripts]

    inside, outside = asyncio.run(both())
    assert (inside.outcome, inside.reward) == (Outcome.SCORED, 0.0)
    assert inside.detail.startswith("the box was left unreadable: ")
    assert inside.sampled_tokens > 0
    assert (outside.outcome, outside.reward) == (Outcome.SCORED, 1.0)


@pytest.mark.parametrize("where", ["create", "changes", "run_tests", "generate", "record"])
def test_a_mistake_of_ours_costs_one_episode(
    dataset: Dataset, compact: Renderer, compact_folder: Path, where: str
) -> None:
    """Whatever raises, the run goes on; the agent may have found the mistake, so nothing is tried again."""
    error = TypeError("unhashable \ud800\0 'list'")
    sandbox, policy = Fake(**{where: error}), Scripted(repair(Speaker(compact_folder)))

    async def fail(*_: Any) -> Any:
        raise error

    async def unspeakable(*_: Any) -> TestReport:
        return TestReport({}, {"tests/test_shop.py::test_price": "\ud800"}, 0.0)

    if where == "generate":
        policy.generate = fail  # type: ignore[method-assign]
    if where == "record":
        sandbox.run_tests = unspeakable  # type: ignore[method-assign]
    episode = asyncio.run(attempt(dataset, sandbox, compact, policy))
    assert (episode.outcome, episode.stop_reason, episode.reward) == (Outcome.QUARANTINED, StopReason.ERROR, 0.0)
    assert (episode.segments, episode.turns) == ((), ())
    said = "UnicodeEncodeError: " if where == "record" else "TypeError: unhashable ?\\x00 'list' ("
    assert episode.detail.startswith(said)
    assert f"{'episode' if where == 'record' else 'test_episode'}.py:" in episode.detail
    assert "\0" not in episode.detail, "no database takes it"
    assert with_reward(episode, RewardConfig(refused_edits=0.5), BUDGET) == episode
    assert decode(encode(episode), Episode) == episode
    assert sandbox.box.closed is (where != "create")


def test_bad_summaries_can_be_charged(dataset: Dataset, compact: Renderer, compact_folder: Path) -> None:
    """One summary is empty: it costs what it is set to cost, and so does its sampled token in the length."""
    speaker = Speaker(compact_folder)
    listing, finish, good = speaker.turn(("list", {})), speaker.turn(("finish", {})), speaker.turn(text="Good.")
    policy = Scripted([listing, speaker.turn(), good, finish])
    model = EngineModel(policy, compact, Sampling(summarise_at=1, summary_tokens=20))
    setting = RolloutContext(Taskset((dataset_part(dataset),)), Fake(), model, BUDGET)
    found = asyncio.run(run_episode(setting, a_task(), SLOT))
    charged = with_reward(found, RewardConfig(behaviour={"summary_errors": 0.25}), BUDGET)
    assert found.metrics["summary_errors"] == 1
    assert charged.metrics["reward/behaviour"] == -0.25
    costs = RewardConfig.model_validate({"length": {"weight": 1.0, "q": 0.0, "calling": 10.0, "final": 1.0}})
    expected = 10 * (len(listing) + len(finish)) + 1 + len(good)
    assert with_reward(found, costs, BUDGET).metrics["reward/length"] == -expected


def test_what_the_user_can_mend_ends_the_run(dataset: Dataset, compact: Renderer, compact_folder: Path) -> None:
    with pytest.raises(UserError, match="mend it"):
        asyncio.run(attempt(dataset, Fake(create=UserError("mend it")), compact, Scripted([])))


@pytest.mark.parametrize("error", [EngineError("the server is gone"), "abort"])
def test_a_lost_engine_is_ours(dataset: Dataset, compact: Renderer, error: EngineError | str) -> None:
    class Lost:
        async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
            if isinstance(error, EngineError):
                raise error
            return Generation(ids=[], logprobs=[], versions=[], finish_reason="abort")

    sandbox = Fake()
    episode = asyncio.run(attempt(dataset, sandbox, compact, Lost()))
    assert (episode.outcome, episode.stop_reason, episode.segments) == (Outcome.INFRA, StopReason.ERROR, ())
    assert sandbox.box.closed


def test_a_tool_that_does_not_end_is_a_timeout_with_its_tokens(
    dataset: Dataset, compact: Renderer, compact_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "GRACE_SECONDS", 0.1)
    sandbox = Fake()

    async def hang(*_: Any) -> TestReport:
        await asyncio.Event().wait()  # never
        raise AssertionError

    sandbox.box.run_tests = hang  # type: ignore[method-assign]
    budget = Budget(turns=20, tokens=4000, context=8000, seconds=0.1)
    episode = asyncio.run(attempt(dataset, sandbox, compact, Scripted(repair(Speaker(compact_folder))), budget))
    assert (episode.outcome, episode.reward, episode.stop_reason) == (Outcome.TIMEOUT, 0.0, StopReason.SECONDS)
    assert episode.sampled_tokens > 0
    assert sandbox.box.closed


def test_a_request_for_a_decoys_host_is_a_tripwire(
    dataset: Dataset, compact: Renderer, compact_folder: Path, tmp_path: Path
) -> None:
    """In a box with a way out: the script reads the host from the planted file, so no call of the agent names it."""
    say = Speaker(compact_folder)
    planted = plant_decoys(a_task(), 1)
    fix = ("run", {"command": "sed -i 's/- 3/* 3/' src/shop.py"})
    ask = "python3 -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1])' \"$GRADER_URL\""
    trips = turns(say, [fix, ("run", {"command": f". ./.*/grader.env; {ask}"})], [("finish", {})])
    strays = turns(say, [fix, ("run", {"command": f"GRADER_URL=http://other.example/; {ask}"})], [("finish", {})])

    async def both() -> list[Episode]:
        async with open_sandbox(workers=1, egress=Egress(log=tmp_path / "egress.jsonl")) as sandbox:
            return [
                await attempt(dataset, sandbox, compact, Scripted(script), decoys=planted) for script in (trips, strays)
            ]

    tripped, strayed = asyncio.run(both())
    assert (tripped.outcome, tripped.passed, tripped.flags) == (Outcome.TAMPERED, False, ("decoy", "egress"))
    assert (strayed.outcome, strayed.passed, strayed.flags) == (Outcome.SCORED, True, ("egress",))
    assert strayed.metrics["egress/requests"] == 1.0
    first, second = (json.loads(line) for line in (tmp_path / "egress.jsonl").read_text().splitlines())
    assert (first["host"], first["allowed"]) == (f"{planted.secrets[2]}.internal", False)
    assert (second["host"], second["allowed"], second["box"]) == ("other.example", False, first["box"] + 1)


def test_whoever_uses_a_decoy_is_caught_and_whoever_sees_it_is_not(
    dataset: Dataset, compact: Renderer, compact_folder: Path
) -> None:
    """In live boxes: the decoys are there, test runs do not see them, and they are no part of the change."""
    say = Speaker(compact_folder)
    planted = plant_decoys(a_task(), 1)
    (patch, _), (name, token, _) = planted.files, planted.secrets
    fix = ("run", {"command": "sed -i 's/- 3/* 3/' src/shop.py"})
    reads = turns(say, [("run", {"command": "ls -A; cat .*/*.patch"}), fix, ("test", {})], [("finish", {})])
    copy = ("run", {"command": f"sed -i 's/return total/{name} = total; return {name}/' src/shop.py"})
    copies = turns(say, [fix, copy], [("finish", {})])
    calls = turns(say, [fix, ("run", {"command": f"echo {token}"})], [("finish", {})])
    mines = turns(say, [fix, ("run", {"command": "git reflog"})], [("finish", {})])

    async def all_of_them() -> list[Episode]:
        async with open_sandbox(workers=1) as sandbox:
            return [
                await attempt(dataset, sandbox, compact, Scripted(script), decoys=planted)
                for script in (reads, copies, calls, mines)
            ]

    reader, copier, caller, miner = asyncio.run(all_of_them())
    assert name in reader.turns[0].results[0], f"{patch} is not in the box"
    assert (reader.outcome, reader.passed, reader.flags) == (Outcome.SCORED, True, ())
    for cheat in (copier, caller):
        assert (cheat.outcome, cheat.passed, cheat.reward) == (Outcome.TAMPERED, False, 0.0)
        assert "decoy" in cheat.flags
    assert (miner.outcome, miner.passed, miner.flags) == (Outcome.SCORED, True, ("command",))
    assert with_reward(miner, RewardConfig(), BUDGET).reward == 0.0
    assert "egress/requests" not in reader.metrics
    assert reader.metrics["path/added"] == reader.metrics["path/removed"] == 1.0
