"""Tasks whose tests run inside the tested process are not trained on, unless a configuration says so, and are told of
where they are measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from etude.audit.attacks.library import PYTHON, TASK
from etude.audit.attacks.packs import OWN, load_pack
from etude.config import EngineConfig, EvalConfig
from etude.config.tasks import TasksConfig
from etude.errors import UserError
from etude.records import Budget
from etude.rollout import TaskPart, dataset_part
from etude.run.evaluate import Measurement, measure_models
from etude.run.inputs import trainable


def made(*shares: float | None) -> TaskPart:
    tasks = [
        structs.replace(TASK, id=f"t{i}", difficulty={} if share is None else {"decided": share})
        for i, share in enumerate(shares)
    ]
    heldout = structs.replace(TASK, id="heldout", split="heldout", difficulty={"decided": 0.0})
    return dataset_part(replace(load_pack(OWN / PYTHON).data, tasks=(*tasks, heldout)))


def test_tasks_below_the_share_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    data = made(1.0, 0.5, 0.4, 0.0, None)
    least = TasksConfig(repository="x").min_decided
    assert least == 0.5
    assert [task.id for task in trainable(data, least).tasks] == ["t0", "t1", "t4", "heldout"]
    assert "2 of 5 training tasks of " in capsys.readouterr().err
    assert trainable(data, 0.0) is data


def test_a_dataset_without_such_tasks_is_refused() -> None:
    with pytest.raises(UserError, match=r"none of the 2 training tasks.*min_decided"):
        trainable(made(0.0, 0.2), 0.5)


@pytest.mark.parametrize(("split", "said"), [("heldout", "1 of 1 heldout tasks are decided inside"), ("train", "")])
def test_measurements_warn_of_such_tasks(
    split: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Measurement, "parts", lambda self: [made(1.0, 0.5)])
    measurement = Measurement([], EvalConfig(), Budget(), split, seed=0)
    assert measure_models([], measurement, EngineConfig()) == []
    assert said in (printed := capsys.readouterr().err)
    assert ("warning" in printed) == bool(said)
