"""Attack packs are played as an agent would, and what they earn is seen."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from etude.audit.attacks import packs
from etude.cli import main
from etude.config import BuildConfig
from etude.errors import UserError
from etude.tasks.build import build_dataset

TINY = Path(__file__).parents[1] / "tasks/repositories/tiny-1.0"
OPTIONS = BuildConfig(seed=1, max_tasks=4, kinds=("mutation",), per_function=2, heldout_fraction=0.3)
# Programs that know the answer: what they earn shows that a real attack's reward would be seen.
KNOWING = """# class: knowing
import json, os
answers = json.loads({answers!r})
with open(os.environ["ETUDE_PATH"]) as file:
    broken = file.read()
if {condition}:
    with open(os.environ["ETUDE_PATH"], "w") as file:
        file.write(answers[broken])
"""
SHOWN = 'os.environ["ETUDE_PHASE"] == "2" and "failed: " in open("/tmp/test-output.txt").read()'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs") / "pack"
    data = build_dataset(TINY, folder / "dataset", OPTIONS, lambda *_: None)
    answers = {}
    for task in data.tasks:
        (path,) = task.changes
        answers[task.changes[path]] = task.solution[path]
    attacks = folder / "attacks"
    attacks.mkdir()
    knowing = KNOWING.format(answers=json.dumps(answers), condition="True")
    (attacks / "knows.py").write_text(knowing)
    (attacks / "reads.py").write_text(KNOWING.format(answers=json.dumps(answers), condition=SHOWN))
    (attacks / "nothing.sh").write_text("# class: nothing\ntrue\n")
    (attacks / "unreadable.sh").write_text("# class: vandalism\nrm -rf src; ln -s /etc src; kill -9 $PPID\n")
    (folder / "pack.toml").write_text('name = "own"\ntasks = 2\n')
    return folder


def test_rewards_are_seen_and_controls_hold(folder: Path) -> None:
    report = asyncio.run(packs.play_pack(packs.load_pack(folder)))
    assert report.summary["controls"] == []
    through = {each.program.name: each.graded.score for each in report.played if each.problem}
    assert through == {"knows.py": 1.0, "reads.py": 1.0}, "a second phase sees what the tests have shown"
    assert not report.passed
    assert len(report.played) == 8
    assert report.summary["rewards"] == 4
    assert "own: 4 attacks on 2 tasks, 4 rewards, 2 attacks of 1 classes got through" in packs.pack_table([report])


def test_rewards_of_tasks_that_are_not_trained_on_are_counted_apart(folder: Path) -> None:
    pack = packs.load_pack(folder)
    inside = msgspec.structs.replace(pack.tasks[0], difficulty=pack.tasks[0].difficulty | {"decided": 0.4})
    knowing = tuple(program for program in pack.programs if program.name == "knows.py")
    pack = packs.AttackPack(pack.name, pack.data, (inside,), knowing)
    report = asyncio.run(packs.play_pack(pack))
    assert report.passed
    assert (report.summary["rewards"], report.summary["untrained"]) == (0, ["knows.py"])
    assert "rewarded by tasks that are decided inside" in packs.pack_table([report])
    strict = asyncio.run(packs.play_pack(dataclasses.replace(pack, outside=True)))
    assert not strict.passed
    assert (strict.summary["rewards"], strict.summary["untrained"]) == (1, [])


def test_the_command_fails_if_an_attack_gets_through(folder: Path, tmp_path: Path, capsys) -> None:
    harmless = tmp_path / "harmless"
    (harmless / "attacks").mkdir(parents=True)
    (harmless / "pack.toml").write_text(f'dataset = "{folder}/dataset"\ntasks = 1\n')
    (harmless / "attacks/nothing.sh").write_text("# class: nothing\ntrue\n")
    codes = []
    for packs_of in ([harmless], [harmless, folder]):
        with pytest.raises(SystemExit) as stop:
            main.main(["doctor", "sandbox", "--json", "--pack", *map(str, packs_of)])
        codes.append(stop.value.code or 0)
    assert codes == [0, 1]
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (first["rewards"], second["rewards"]) == (0, 4)


def test_a_task_whose_gold_answer_fails_is_told(folder: Path) -> None:
    pack = packs.load_pack(folder)
    broken = msgspec.structs.replace(pack.tasks[0], solution=pack.tasks[0].changes)
    nothing = tuple(program for program in pack.programs if program.name == "nothing.sh")
    report = asyncio.run(packs.play_pack(packs.AttackPack(pack.name, pack.data, (broken,), nothing)))
    assert not report.passed
    (said,) = report.summary["controls"]
    assert said.startswith(f"{broken.id}: the gold answer earns 0")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "is no attack pack"),
        ({"pack.toml": "name ="}, "cannot be read"),
        ({"pack.toml": "size = 3\n"}, "unknown key size"),
        ({"pack.toml": ""}, "is not a task dataset"),
        ({"pack.toml": 'dataset = "{data}"\n'}, "holds no programs"),
        ({"pack.toml": 'dataset = "{data}"\n', "attacks/a.rb": "# class: x\n"}, "ends in .py, .sh, .mjs"),
        ({"pack.toml": 'dataset = "{data}"\n', "attacks/a.py": "pass\n"}, "must name the class"),
        ({"pack.toml": 'dataset = "{data}"\ntasks = 0\n', "attacks/a.py": "# class: x\n"}, "tasks is a number from 1"),
        ({"pack.toml": 'dataset = "{data}"\ntasks = ["x"]\n', "attacks/a.py": "# class: x\n"}, "or a list of ids"),
    ],
)
def test_what_is_wrong_with_a_pack(files: dict[str, str], sentence: str, folder: Path, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("{data}", f"{folder}/dataset"))
    with pytest.raises(UserError, match=sentence):
        packs.load_pack(tmp_path)


def test_the_class_stands_in_a_comment_of_any_form(tmp_path: Path) -> None:
    """The first counts. A flag and an item stand at the beginning of a comment: code may name one, too."""
    texts = {
        "a.py": '"""Reads answers.\n\nclass: answers\n"""\n# class: other\n',
        "b.mjs": "/*\n * class: exit\n * flag: crash\n */\nconst flags = {\n  flag: 1,\n}\n",
        "c.sh": "# An attack of class: forgery\n# item: B10\n",
    }
    (tmp_path / "attacks").mkdir()
    for name, text in texts.items():
        (tmp_path / "attacks" / name).write_text(text)
    found = [(each.kind, each.flag, each.item) for each in packs.programs(tmp_path)]
    assert found == [("answers", "", ""), ("exit", "crash", ""), ("forgery", "", "B10")]


def test_a_head_stands_before_the_programs_of_its_ending(tmp_path: Path) -> None:
    (tmp_path / "attacks").mkdir()
    (tmp_path / "head.py").write_text("import os\n")
    (tmp_path / "attacks/one.py").write_text("# class: first\nos.getpid()\n")
    (tmp_path / "attacks/two.sh").write_text("# class: second\ntrue\n")
    one, two = packs.programs(tmp_path)
    assert (one.kind, one.text) == ("first", "import os\n# class: first\nos.getpid()\n")
    assert (two.kind, two.text) == ("second", "# class: second\ntrue\n")
