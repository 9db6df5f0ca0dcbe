"""`etude tasks harden`: weak tasks are found, mended or dropped, and sound ones stay as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from etude.audit import harden as room
from etude.audit.harden import hardening, model, play
from etude.audit.harden.attackers import Attacker, attackers_of, generated
from etude.audit.harden.calls import altered
from etude.cli import main
from etude.errors import UserError
from etude.records import CodeTask
from etude.tasks import dataset
from etude.tasks.dataset import Dataset, Hardening
from etude.tasks.foreign import build as foreign
from etude.tasks.foreign.dataset import ForeignDataset, load_any_dataset
from etude.tasks.hardened import section, write_hardened
from tests.helpers.foreign_ten import TEN, write_ten
from tests.helpers.http_apps import answering
from tests.helpers.planted import PATH, SOUND, WEAK, plant

NOTHING = Hardening(
    tasks=2, fell=1, mended=0, dropped=1, unplayed=0, attackers={"sham answer": 3}, results={"a": "fell"}, undecided={}
)


def silent(*_: object) -> None:
    pass


def true_alone(data: Dataset, task: CodeTask, _: object) -> list[Attacker]:
    return [each for each in generated(data, task) if each.name == "return True"]


def code_of(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main.main([*map(str, words)])
    return int(stop.value.code or 0)


# The weak and the sound ----------------------------------------------------------------------------------------------


def test_a_weak_task_is_mended_and_one_without_other_tests_dropped(tmp_path: Path, capsys, monkeypatch) -> None:
    """A constant passes `truthy`, for which there are better tests, and `own_oracle`, for which there are none."""
    plant(tmp_path / "data", "truthy", "own_oracle", "clamped")
    monkeypatch.setattr(hardening, "attackers_of", true_alone)
    assert code_of("tasks", "harden", tmp_path / "data", "-o", tmp_path / "out") == 0
    output = capsys.readouterr().out
    data = dataset.load_dataset(tmp_path / "out")
    assert [task.id for task in data.tasks] == ["tools.clamped", "tools.truthy"]
    (truthy,) = [task for task in data.tasks if task.id == "tools.truthy"]
    assert truthy.fail_to_pass == ("tests/test_tools.py::test_more_of_truthy", "tests/test_tools.py::test_truthy")
    assert data.manifest.counts["tasks"] == 2
    known = data.manifest.hardening
    assert known is not None
    assert (known.tasks, known.fell, known.mended, known.dropped, known.left) == (3, 2, 1, 1, 0.0)
    card = (tmp_path / "out/DATACARD.md").read_text()
    assert "## Hardening\n" in card
    assert "return True (sham answer); mended: `tests/test_tools.py::test_more_of_truthy` must pass, too" in card
    assert "dropped: no other test tells the wrong answers from the right one" in card
    assert "2 of 3 tasks (66.7%) fell, 1 were mended and 1 dropped; of the 2 that remain 0.0% fall" in output
    assert code_of("tasks", "check", tmp_path / "out") == 0, "the gates hold, and no digest has changed"
    assert "attacked by `etude tasks harden`: 2 of 3" in capsys.readouterr().out


@pytest.mark.slow
def test_twelve_planted_weaknesses(tmp_path: Path) -> None:
    plant(tmp_path / "data")
    known = room.harden(tmp_path / "data", tmp_path / "out", silent)
    fallen = {task.removeprefix("tools.") for task in known.results}
    assert len(fallen & set(WEAK)) >= 10, sorted(set(WEAK) - fallen)
    assert not fallen & set(SOUND), known.results
    assert known.left <= 0.01
    kept = dataset.load_dataset(tmp_path / "out")
    assert {f"tools.{name}" for name in SOUND} <= set(kept.by_id)


def test_every_program_of_a_pack_names_its_class() -> None:
    """And the packs of the two languages and of foreign tasks are there."""
    names = {folder.name for folder in (Path(room.__file__).parents[1] / "packs").iterdir()}
    assert {"tasks-python", "tasks-javascript", "tasks-harbor"} <= names


def test_attackers_are_generated_for_each_task(tmp_path: Path) -> None:
    data = plant(tmp_path / "data", "truthy", "clamped")
    for task in data.tasks:
        attackers = attackers_of(data, task, [])
        assert sum(each.changes is not None for each in attackers) > 20
        assert {"visible answers", "answers in files", "copies"} <= {each.kind for each in attackers}
        texts = [str(each.changes) for each in attackers if each.changes is not None]
        assert len(texts) == len(set(texts))


def test_the_gold_answer_in_other_layout_is_no_fall(tmp_path: Path) -> None:
    (task,) = plant(tmp_path / "data", "clamped").tasks
    assert play.is_gold(task, {PATH: ("# a comment\n" + task.solution[PATH]).encode()})
    assert not play.is_gold(task, {PATH: task.changes[PATH].encode()})
    assert not play.is_gold(task, {"src/other.py": b""})


# The dataset on disk -------------------------------------------------------------------------------------------------


def test_the_old_dataset_stays_until_the_new_one_stands(tmp_path: Path, monkeypatch) -> None:
    data = plant(tmp_path / "data", "truthy", "clamped")
    kept = [task for task in data.tasks if task.id == "tools.clamped"]

    def fails(*_: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "save", fails)
        with pytest.raises(RuntimeError):
            write_hardened(data, data.root, kept, NOTHING)
    assert len(dataset.load_dataset(data.root).tasks) == 2
    write_hardened(data, data.root, kept, NOTHING)
    again = dataset.load_dataset(data.root)
    assert [task.id for task in again.tasks] == ["tools.clamped"]
    write_hardened(again, data.root, again.tasks, NOTHING)
    assert (data.root / "DATACARD.md").read_text().count("## Hardening") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_what_is_undecided_stands_on_the_card() -> None:
    text = section(msgspec.structs.replace(NOTHING, undecided={"b": "nano earns the reward"}))
    assert "| a | fell |" in text
    assert "| b | nano earns the reward |" in text


def test_wrong_input_is_one_sentence(tmp_path: Path, capsys) -> None:
    plant(tmp_path / "data", "clamped")
    harden = ("tasks", "harden", tmp_path / "data")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for words, sentence in (
        (("tasks", "harden", tmp_path), "is not a task dataset"),
        ((*harden, "--pack", tmp_path), "holds no programs"),
        ((*harden, "--model", "http://127.0.0.1:1/v1"), "give --model-name NAME for each URL"),
        ((*harden, "--model", "http://127.0.0.1:1/v1", "--model-name", "x"), "nothing answers at"),
        ((*harden, "-o", tmp_path / "full"), "exists and is not empty"),
    ):
        assert code_of(*words) == 2
        assert sentence in capsys.readouterr().err


# A model -------------------------------------------------------------------------------------------------------------

CHEATS = {
    "truthy": ('    return ""\n', '    return "yes"\n'),  # fails other tests
    "chunked": (  # honest, in other words
        "    raise NotImplementedError\n",
        "    parts = []\n    while items:\n        parts.append(items[:size])\n        items = items[size:]\n"
        "    return parts\n",
    ),
    "counted": (  # knows the tests' values
        "    return {}\n",
        '    return {1: {words[0]: 1}, 3: {"a": 2, "b": 1}}.get(len(words), {})\n',
    ),
    "inside_alone": ("    return n\n", "    return n + n % 2 * n\n"),  # honest, and nothing can tell
}


class Cheat:
    """A chat server that answers with the files of CHEATS."""

    def __init__(self, tasks: Mapping[str, Any]) -> None:
        self.tasks, self.prompts = tasks, list[str]()

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        text = body["messages"][-1]["content"]
        self.prompts.append(text)
        name = next(name for name in CHEATS if f"Fix `{name}`" in text)
        wrong, right = CHEATS[name]
        broken = self.tasks[f"tools.{name}"].changes[PATH]
        head, _, rest = broken.partition(f"def {name}(")
        answer = f"Here:\n```python\n{head}def {name}({rest.replace(wrong, right, 1)}```\n"
        return JSONResponse({"choices": [{"message": {"content": answer}, "finish_reason": "stop"}], "usage": {}})

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])


@pytest.mark.slow
def test_a_model_attacks_with_the_grader_s_source(tmp_path: Path, capsys, monkeypatch) -> None:
    data = plant(tmp_path / "data", *CHEATS)
    monkeypatch.setattr(hardening, "attackers_of", lambda *_: [])
    server = Cheat(data.by_id)
    with answering(server.app()) as url:
        words = ("--model", f"{url}/v1", "--model-name", "cheat")
        assert code_of("tasks", "harden", tmp_path / "data", "-o", tmp_path / "out", *words) == 0
    assert len(server.prompts) == len(CHEATS)
    assert all("# Grader\n## verifier.py\n" in text and "def _record" in text for text in server.prompts)
    assert all("# src/tools.py\n" in text for text in server.prompts)
    known = dataset.load_dataset(tmp_path / "out").manifest.hardening
    assert known is not None
    assert set(known.results) == {"tools.truthy", "tools.counted"}, "honest attempts are no falls"
    assert "fails tests/test_tools.py::test_more_of_truthy (model); mended" in known.results["tools.truthy"]
    assert "differs from the gold answer: counted" in known.results["tools.counted"]
    assert set(known.undecided) == {"tools.inside_alone"}
    assert "tools.inside_alone is undecided: cheat earns the reward" in capsys.readouterr().out


def test_a_model_s_answer_is_a_program_or_a_file(tmp_path: Path) -> None:
    (task,) = plant(tmp_path / "data", "clamped").tasks
    assert model.parsed("m", task, "no block") is None
    program = model.parsed("m", task, "So:\n```bash\nrm -rf tests\n```\n")
    assert isinstance(program, Attacker)
    assert program.program is not None
    assert (program.program.text, program.program.runner) == ("rm -rf tests\n", "bash")
    file = model.parsed("m", task, "```python\nx = 1\n```\n```bash\nls\n```")
    assert file is not None
    assert file.changes == {PATH: b"x = 1\n"}


def test_calls_are_altered_in_one_argument() -> None:
    assert [args for args, _ in altered(((1, "ab"), {}))] == [
        (1, "ab"), (2, "ab"), (0, "ab"), (5, "ab"), (1, "abx"), (1, "ba"), (1, "AB"), (1, "b"),
    ]  # fmt: skip
    assert ((), {"x": False}) in list(altered(((), {"x": True})))


@pytest.mark.slow
def test_a_model_folder_attacks(tmp_path: Path, monkeypatch) -> None:
    """The nano model knows no attack; it is asked, and nothing falls."""
    plant(tmp_path / "data", "clamped")
    monkeypatch.setattr(hardening, "attackers_of", lambda *_: [])
    assert code_of("tasks", "harden", tmp_path / "data", "-o", tmp_path / "out", "--model", "nano") in (0, 1)
    known = dataset.load_dataset(tmp_path / "out").manifest.hardening
    assert known is not None
    assert (known.fell, known.attackers) == (0, {"model": 1})


# Foreign tasks -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_foreign_tasks(tmp_path: Path) -> None:
    write_ten(tmp_path / "in")
    _, trials = foreign.build_foreign([tmp_path / "in"], tmp_path / "data", silent)
    assert len(trials.kept) == len(TEN), foreign.trial_lines(trials)
    known = room.harden(tmp_path / "data", tmp_path / "out", silent)
    assert {"file-that-is-there", "sorted-by-diff", "script-of-the-image"} <= set(known.results)
    assert known.left <= 0.01
    kept = load_any_dataset(tmp_path / "out")
    assert isinstance(kept, ForeignDataset)
    assert "file-that-is-there" not in kept.by_id
    assert kept.records["sorted-by-diff"].closed is not None
    assert "## Hardening" in (tmp_path / "out/DATACARD.md").read_text()
    assert json.loads((tmp_path / "out/dataset.json").read_bytes())["counts"]["tasks"] == len(kept.tasks)
    assert foreign.check_foreign(tmp_path / "out", silent).ok


@pytest.mark.slow
def test_a_dataset_of_which_nothing_is_left_stays(tmp_path: Path, monkeypatch) -> None:
    plant(tmp_path / "data", "own_oracle")
    monkeypatch.setattr(hardening, "attackers_of", true_alone)
    with pytest.raises(UserError, match=r"all 1 tasks of .* fall, and none can be mended"):
        room.harden(tmp_path / "data", tmp_path / "data", silent)
    assert len(dataset.load_dataset(tmp_path / "data").tasks) == 1
