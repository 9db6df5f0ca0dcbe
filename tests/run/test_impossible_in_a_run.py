"""Impossible tasks as the controller plays them: real boxes and ledger, a policy that follows a script."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from etude.config import RLConfig
from etude.grading.runner import open_sandbox
from etude.ledger.ledger import Ledger
from etude.records import Episode, Generation, decode
from etude.rollout import Taskset, dataset_part
from etude.rollout.concurrency import episode_concurrency
from etude.run import loop
from etude.run.launch import _impossible
from etude.run.parts import context_of
from etude.run.sources import TaskPool
from etude.run.state import Engines, Run
from etude.sandbox.base import TestReport
from etude.store import open_store

ROOT = Path(__file__).parents[2]


class Finishes:
    """A policy that ends every episode at once."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.from_file(str(ROOT / "models/nano/tokenizer.json"))
        self.ids = tokenizer.encode("<|call|>finish<|end|>", add_special_tokens=False).ids

    async def generate(self, *_: Any) -> Generation:
        n = len(self.ids)
        return Generation(ids=self.ids, logprobs=[-0.1] * n, versions=[3] * n, finish_reason="stop")


def test_an_impossible_task_that_is_passed_is_an_alarm_and_belongs_to_no_group(tmp_path: Path, capsys) -> None:
    tmp_path.chmod(0o755)
    tiny = Taskset((dataset_part(ROOT / "tests/tasks/data/tiny"),))
    config = RLConfig.model_validate(
        {"tasks": {"repository": "unused"}, "cheats": {"impossible": 0.5, "decoys": 1.0}, "rollout": {"context": 2048}}
    )

    async def all_passed(image: Any, changes: Any, tests: Any, hidden: Any, limits: Any) -> TestReport:
        return TestReport(dict.fromkeys(tests, "passed"), {}, 0.0)

    async def scenario() -> Ledger:
        async with open_sandbox() as sandbox:
            client = Finishes()
            settings = config, tiny, sandbox, client
            run = Run(
                folder=tmp_path, config=config, pool=TaskPool(tiny), ledger=Ledger.open(f"sqlite:///{tmp_path}/l.db"),
                weights=open_store(f"{tmp_path}/weights"), rollouts=open_store(f"{tmp_path}/rollouts"), sandbox=sandbox,
                engines=Engines([], client, None),
                children=(), concurrency=episode_concurrency(4, rows=4, staleness=0, prompts=1, group=2),
                impossible=_impossible(tiny, tmp_path / "impossible"),
                training=context_of(*settings, training=True), measuring=context_of(*settings),
            )  # type: ignore[arg-type]  # fmt: skip
            player = loop._ImpossibleTasks(run)
            player.play()
            assert not player.live, "none is due before an episode has ended"
            run.progress.accepted = 4
            player.play()
            await asyncio.gather(*player.live)
            honest = run.ledger.impossible()
            assert (honest.played, honest.passed, honest.tampered) == (1, 0, 0)
            assert "cheating" not in capsys.readouterr().err
            sandbox.run_tests = all_passed  # type: ignore[method-assign]
            player.play()
            await asyncio.gather(*player.live)
            player.play()
            assert not player.live, "two are due after four episodes"
            episode = decode(run.rollouts.get("impossible/000001.msgpack"), Episode)
            assert episode.passed
            return run.ledger

    ledger = asyncio.run(scenario())
    counts, following = ledger.impossible(), ledger.next_impossible()
    assert (counts.played, counts.passed, following) == (2, 1, 2)
    assert "cheating: impossible task 1, made of" in capsys.readouterr().err
    assert ledger.figures().groups == 0
    assert ledger.counts()["scored"] == 0
    ledger.close()
