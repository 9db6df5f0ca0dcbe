"""Several sources of tasks in a run: configuration, building, refusals; and a whole run on two repositories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.config import RLConfig, validate
from etude.dashboard.terminal import LiveView
from etude.errors import UserError
from etude.ledger.ledger import Ledger
from etude.records import Episode, decode
from etude.rollout import dataset_part
from etude.run import inputs, launch, sources
from etude.run.inputs import check_inputs, run_taskset, trainable
from etude.run.parts import built_beside, folders_of_tasks
from etude.store import open_store
from etude.tasks import dataset
from tests.helpers.mixtures import TINY, renamed

ROOT = Path(__file__).parents[2]


def config(*sources: dict[str, Any], **tasks: Any) -> RLConfig:
    return validate(RLConfig, {"tasks": {"sources": list(sources)} | tasks}, "run.toml")


def test_sources_take_what_they_lack_from_the_table() -> None:
    found = config({"repository": "a", "kinds": ["commit"]}, {"dataset": "b", "weight": 2}, max_tasks=7).tasks.sources
    assert [source.max_tasks for source in found] == [7, 7]
    assert [source.kinds for source in found] == [("commit",), ("mutation", "removal")]
    assert [source.weight for source in found] == [1.0, 2.0]
    assert [source.where for source in found] == [str(Path("a").absolute()), str(Path("b").absolute())]
    again = RLConfig.model_validate_json(config({"repository": "a"}, {"dataset": "b"}, seed=4).model_dump_json())
    assert [source.seed for source in again.tasks.sources] == [4, 4], "a resumed run reads the same"


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"sources": [{"weight": 1}]}, "tasks.sources.0: give a source's repository, dataset or harbor"),
        ({"sources": [{"dataset": "b", "weight": 0}]}, "tasks.sources.0.weight"),
        ({"sources": [{"dataset": "b"}], "dataset": "a"}, "tasks.sources stand alone"),
        ({"repository": ["a", "b"]}, "give a table [[tasks.sources]] for each"),
        ({"sources": [{"dataset": "b", "weigth": 1}]}, "unknown key tasks.sources.0.weigth"),
        ({"repository": "a", "heldout_fraction": 0}, "heldout_fraction = 0 leaves no tasks to measure on"),
        ({"sources": [{"repository": "a"}, {"harbor": "b"}], "heldout_fraction": 0}, "leaves no tasks to measure on"),
    ],
)
def test_wrong_sources_are_refused(tasks: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        validate(RLConfig, {"tasks": tasks}, "run.toml")
    assert said in str(refused.value)


def test_one_source_may_be_for_training_alone() -> None:
    found = config({"repository": "a"}, {"repository": "b", "heldout_fraction": 0})
    assert [source.heldout_fraction for source in found.tasks.sources] == [0.25, 0]
    unmeasured = {"tasks": {"repository": "a", "heldout_fraction": 0}, "eval": {"before": False, "after": False}}
    assert validate(RLConfig, unmeasured, "run.toml").tasks.heldout_fraction == 0


def test_a_mixture_is_loaded_and_drawn_by_weight(tmp_path: Path) -> None:
    other = renamed(tmp_path / "other", "other-2.0")
    loaded = run_taskset(config({"dataset": str(TINY)}, {"dataset": str(other), "weight": 3}), tmp_path, print)
    assert loaded.mixed
    curriculum = sources.curriculum_of(loaded, 8, 1)
    drawn = Counter(loaded.by_id[curriculum.draw(index)].repository for index in range(40))
    assert drawn == {"tiny-1.0": 10, "other-2.0": 30}


def test_a_source_that_fails_to_build_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any training: `run_taskset` comes before engines and trainer are started."""
    bad = tmp_path / "bad"
    bad.mkdir()
    (tmp_path / "run").mkdir()
    wrong = config({"dataset": str(TINY)}, {"repository": str(bad)})
    with pytest.raises(UserError, match=rf"tasks.sources: {bad} gives no tasks: .*has no"):
        run_taskset(wrong, tmp_path / "run", lambda *_: None)
    gone = config({"dataset": str(TINY)}, {"repository": str(tmp_path / "gone")})
    with pytest.raises(UserError, match=r"tasks.sources.repository: .*gone is not a folder"):
        check_inputs(gone)

    built: list[Path] = []

    def build(repository: Path, out: Path, *_: object, boxes: object) -> dataset.Dataset:
        assert boxes == wrong.sandbox
        built.append(out)
        return dataset.load_dataset(renamed(out, "other-2.0"))

    monkeypatch.setattr(inputs, "build_dataset", build)
    for _ in range(2):  # the second start finds what the first has built
        assert len(run_taskset(wrong, tmp_path / "run", lambda *_: None).parts) == 2
    assert built == [tmp_path / "run/tasks/1"]


def test_a_source_for_training_alone_joins_when_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run begins without it. Whether it was there or came, tasks have the same ids, and sources the same shares."""
    folder = tmp_path / "run"
    folder.mkdir()
    found = config(
        {"dataset": str(TINY)}, {"repository": "a", "heldout_fraction": 0, "weight": 3},
        {"repository": "b", "heldout_fraction": 0, "weight": 4},
    )  # fmt: skip
    monkeypatch.setattr(
        inputs, "build_dataset", lambda repo, out, *_, **__: dataset.load_dataset(renamed(out, f"{repo.name}-1.0"))
    )
    pool = sources.TaskPool(run_taskset(found, folder, print), sources.missing(found, folder))
    assert (pool.waiting, sources.arrived(folder, pool)) == ((1, 2), [])
    assert all(task.id.startswith("tiny-1.0:") for task in pool.taskset.tasks)
    curriculum = sources.curriculum_of(pool.taskset, 8, 1)
    assert {pool.taskset.by_id[curriculum.draw(i)].repository for i in range(8)} == {"tiny-1.0"}

    inputs.build_numbered(found, 2, folder, print)
    assert sources.arrived(folder, pool) == [2]
    sources.join(found, folder, pool, 2)
    sources.extend(curriculum, pool.taskset, 8, 1)
    assert Counter(pool.taskset.by_id[curriculum.draw(i)].repository for i in range(8, 18)) == {
        "tiny-1.0": 2,
        "b-1.0": 8,
    }
    assert (pool.waiting, sources.arrived(folder, pool)) == ((1,), [])

    resumed = run_taskset(found, folder, print)
    assert (resumed.by_id, resumed.weights) == (pool.taskset.by_id, pool.taskset.weights)
    assert sources.missing(found, folder) == (1,)


def test_the_least_share_of_decided_tests_is_a_source_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a source before it in the list is still being built."""
    other, asked = renamed(tmp_path / "other", "other-2.0"), []
    found = config(
        {"dataset": str(TINY), "min_decided": 0.1},
        {"repository": "a", "heldout_fraction": 0, "min_decided": 0.0},
        {"dataset": str(other), "min_decided": 0.9},
    )
    monkeypatch.setattr(sources, "trainable", lambda part, share: asked.append(share) or part)
    whole = launch._taskset(found, tmp_path, LiveView("", ()))
    assert ([part.name for part in whole.parts], asked) == (["tiny-1.0", "other-2.0"], [0.1, 0.9])
    assert folders_of_tasks(found, tmp_path) == [TINY, other], "what an evaluation can measure of the run"


@pytest.mark.parametrize(
    "changes",
    [
        {"deterministic": True, "rollout": {"staleness": 0}},
        {"sandbox": {"index": "https://index/simple", "index_before": "2026-01-01"}},
        {"eval": {"before": False, "after": False}, "only": True},
    ],
)
def test_sources_that_are_built_before_the_run(changes: dict[str, Any]) -> None:
    """In a run that is to be repeated; where boxes install from an index without them; where all are for training."""
    given = [{"repository": "b", "heldout_fraction": 0}]
    if not changes.pop("only", False):
        given.append({"repository": "a"})
    assert built_beside(validate(RLConfig, {"tasks": {"sources": given}} | changes, "run.toml")) == ()


def test_a_folder_of_harbor_tasks_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built as `etude tasks harbor` builds it, and may have a share of decided tests of its own."""
    found = config({"dataset": str(TINY)}, {"harbor": "tasks", "min_decided": 0.0, "heldout_fraction": 0.5})
    given: list[tuple[Any, ...]] = []

    def build(
        roots: list[Path], out: Path, note: Any, *, heldout_fraction: float, boxes: object
    ) -> tuple[dataset.Dataset, None]:
        assert boxes == found.sandbox
        given.append((roots, out, heldout_fraction))
        return dataset.load_dataset(renamed(out, "harbor-tasks")), None

    monkeypatch.setattr(inputs, "build_foreign", build)
    assert [part.name for part in run_taskset(found, tmp_path, print).parts] == ["tiny-1.0", "harbor-tasks"]
    assert given == [([Path("tasks").absolute()], tmp_path / "tasks/1", 0.5)]
    assert [source.min_decided for source in found.tasks.sources] == [0.5, 0.0]


def test_a_source_whose_tasks_can_be_forged_ends_the_start(tmp_path: Path) -> None:
    part = dataset_part(TINY)
    assert trainable(part, 0.5) is part
    part = dataset_part(renamed(tmp_path / "empty", "empty-1.0"))
    with pytest.raises(UserError, match=r"empty-1.0 has no training tasks"):
        trainable(replace(part, tasks=part.split("heldout")), 0.5)


CONFIG = """
stage = "rl"
name = "run"
deterministic = true

[model]
path = "{model}"

[[tasks.sources]]
dataset = "{tiny}"

[[tasks.sources]]
dataset = "{other}"
weight = 3

[rollout]
prompts = 4
group = 2
staleness = 0
max_in_flight = 8
turns = 2
tokens = 32
context = 512

[trainer]
steps = 2

[cheats]
impossible = 0

[eval]
samples = 1
before = false
"""


@pytest.mark.slow
def test_a_run_on_two_repositories_has_curves_of_each(tmp_path: Path) -> None:
    other = renamed(tmp_path / "other", "other-2.0")
    (tmp_path / "run.toml").write_text(CONFIG.format(model=ROOT / "models/nano", tiny=TINY, other=other))
    done = subprocess.run(
        [sys.executable, "-m", "etude.cli.main", "train", "run.toml"], cwd=tmp_path, text=True, capture_output=True,
        timeout=240, env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs/run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert (line["repository/tiny-1.0/groups"], line["repository/other-2.0/groups"]) == (1, 3)
        assert 0 <= line["repository/other-2.0/pass_rate"] <= 1
    store = open_store(str(run / "rollouts"))
    episodes = [decode(store.get(key), Episode) for key in store.list() if not key.startswith("eval-")]
    assert Counter(e.repository for e in episodes) == {"tiny-1.0": 4, "other-2.0": 12}
    assert all(e.task_id.startswith(f"{e.repository}:") for e in episodes)
    assert set(json.loads((run / "eval-after.json").read_bytes())["repositories"]) == {"tiny-1.0", "other-2.0"}
    report = json.loads((run / "report.json").read_text())
    assert all(report["checks"].values()), report["checks"]
    assert report["setup"]["dataset"] == "tiny-1.0 + other-2.0"
    assert set(report["held_out"]["repositories"]) == {"tiny-1.0", "other-2.0"}
    page = (run / "report.html").read_text()
    assert "Pass rate by repository" in page
    assert "pass@1 by repository" in page
    ledger = Ledger.open(f"sqlite:///{run}/ledger.db")
    assert ledger.counts()["scored"] == len(episodes)
    ledger.close()


LIBRARY = {
    "pyproject.toml": '[project]\nname = "other"\nversion = "1.0"\n',
    "LICENSE": "MIT License\n",
    "other.py": """def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high
    return value


def grow(items, by):
    found = []
    for item in items:
        if item > 0:
            found.append(item + by)
    return found
""",
    "tests/test_other.py": """import other


def test_clamp():
    assert [other.clamp(n, 0, 5) for n in (-1, 2, 9)] == [0, 2, 5]


def test_clamp_edges():
    assert [other.clamp(n, 0, 5) for n in (0, 5)] == [0, 5]


def test_grow():
    assert other.grow([1, -1, 2], 3) == [4, 5]


def test_grow_nothing():
    assert other.grow([0, -1], 3) == []
""",
}


@pytest.mark.slow
def test_a_run_trains_on_while_a_source_is_built(tmp_path: Path) -> None:
    """Its groups come as soon as it is there; one that gives no tasks ends the run, which goes on once it is mended."""
    repository = tmp_path / "other"
    text = CONFIG.format(model=ROOT / "models/nano", tiny=TINY, other="").replace("deterministic = true", "")
    text = text.replace('dataset = ""', f'repository = "{repository}"\nheldout_fraction = 0\nkinds = ["mutation"]')
    text = text.replace("steps = 2", "steps = 400\nminutes = 3").replace("after", "before")
    (tmp_path / "run.toml").write_text(text)
    (repository / "tests").mkdir(parents=True)
    (repository / "other.py").write_text("VALUE = 1\n")

    def etude(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "etude.cli.main", "train", *words]
        return subprocess.Popen(
            command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"TERM": "dumb"},
        )  # fmt: skip

    said, _ = (first := etude("run.toml")).communicate(timeout=240)
    assert first.returncode == 2, said
    assert "tasks.sources" in said.splitlines()[-1]
    assert "gives no tasks" in said.splitlines()[-1]

    for path, content in LIBRARY.items():
        (repository / path).parent.mkdir(exist_ok=True)
        (repository / path).write_text(content)
    second = etude("--resume", "outputs/run")
    metrics, deadline = tmp_path / "outputs/run/metrics.jsonl", time.monotonic() + 200
    while "repository/other-1.0/groups" not in (metrics.read_text() if metrics.exists() else ""):
        assert second.poll() is None, second.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.5)
    second.send_signal(signal.SIGINT)
    said, _ = second.communicate(timeout=60)
    assert "training tasks of other-1.0 join the run" in said
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert "repository/other-1.0/groups" not in lines[0], "the run did not wait for it"
