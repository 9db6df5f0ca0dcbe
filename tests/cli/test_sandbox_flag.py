"""Every command that makes boxes takes the table [sandbox]: of --sandbox, or of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from etude.cli import main
from etude.config import SandboxConfig, validate_sandbox
from etude.errors import UserError
from etude.evals import tested_edits
from etude.grading import runner
from etude.run import evaluate
from etude.sandbox import BackendOptions
from etude.tasks import dataset
from tests.helpers.foreign import write as harbor_folder

TINY = Path(__file__).parents[1] / "tasks/data/tiny"
FILES = {
    "pyproject.toml": '[project]\nname = "lib"\nversion = "1.0"\nlicense = "MIT"\n',
    "lib/__init__.py": "def total(items):\n    count = 0\n    for i in items:\n        count += i\n    return count\n",
    "tests/test_lib.py": "from lib import total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n",
}
TABLE = {
    "egress": ["git.example:8443@127.0.0.1"],
    "index": "https://index.example/simple",
    "index_before": "2024-05-01",
}
TOML = """[sandbox]
egress = ["git.example:8443@127.0.0.1"]
index = "https://index.example/simple"
index_before = 2024-05-01
[other]
key = 1
"""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SandboxConfig, BackendOptions]]:
    """What backends were opened with; none is."""
    calls: list[tuple[SandboxConfig, BackendOptions]] = []

    def open_backend(config: SandboxConfig, options: BackendOptions) -> None:
        calls.append((config, options))
        raise UserError("opened")

    monkeypatch.setattr(runner, "open_backend", open_backend)
    return calls


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the commands take."""
    monkeypatch.chdir(tmp_path)
    for path, text in FILES.items():
        (tmp_path / "repo" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / path).write_text(text)
    harbor_folder(tmp_path / "harbor/one")
    (tmp_path / "boxes.toml").write_text(TOML)
    (tmp_path / "run.toml").write_text(f'{TOML.partition("[other]")[0]}[tasks]\nrepository = "repo"\n')
    probes = [{"format": 2, "machine": f"m{n}", "probes": {"umask": n % 2}} for n in range(60)]
    (tmp_path / "machines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in probes))
    return tmp_path


def run(words: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        main.main(list(words))
    assert isinstance(stop.value.code, int)
    return stop.value.code


COMMANDS = (
    ("tasks build repo -o out --sandbox boxes.toml", {"lib"}),
    ("tasks build run.toml -o out", {"lib"}),
    ("tasks build repo -o out --bootstrap rules --sandbox boxes.toml", {"lib"}),
    (f"tasks check {TINY} --sandbox boxes.toml", set()),
    ("tasks harbor harbor --sandbox boxes.toml", set()),
    ("tasks harbor harbor -o out --sandbox boxes.toml", set()),
    (f"tasks traces {TINY} -o out.jsonl --sandbox boxes.toml", {"tiny"}),
    (f"doctor parity --against machines.jsonl --boxes 60 --dataset {TINY} --sandbox boxes.toml", set()),
)


@pytest.mark.parametrize(("words", "without"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_a_command_opens_the_boxes_of_the_table(
    words: str, without: set[str], opened: list[tuple[SandboxConfig, BackendOptions]], folder: Path, capsys
) -> None:
    assert run(words.split()) == 2
    assert "opened" in capsys.readouterr().err
    ((config, options),) = opened
    assert config == validate_sandbox({**TABLE}, "")
    assert options.egress is not None
    assert [(host.name, host.ports) for host in options.egress.hosts] == [("git.example", (8443,))]
    assert options.egress.index is not None
    assert set(options.egress.index.without) == without


def test_the_attack_suite_closes_the_way_out(opened: list[tuple[SandboxConfig, BackendOptions]], folder: Path) -> None:
    """It tries that boxes reach nothing; the way out is attacked with hosts of its own."""
    assert run(["doctor", "sandbox", "--quick", "--sandbox", "boxes.toml"]) == 2
    assert opened[0][1].egress is None


def test_tests_of_edits_run_in_the_boxes_of_the_table(opened: list[tuple[SandboxConfig, BackendOptions]]) -> None:
    found, config = tested_edits.load(TINY, "train"), validate_sandbox({**TABLE}, "")
    with pytest.raises(UserError, match="opened"):
        tested_edits.passing(found, [(found.examples[0], "")], config)
    assert opened[0][0] == config


def test_an_evaluation_takes_the_boxes_of_its_suites_then_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, podman = validate_sandbox({**TABLE}, ""), validate_sandbox({"type": "podman", "image": "x"}, "")
    assert evaluate.sandbox_of_suites([TINY, "run.toml"], podman) == table
    assert evaluate.sandbox_of_suites([TINY], podman) == podman
    assert evaluate.sandbox_of_suites([TINY], None) is None
    (folder / "other.toml").write_text(f'[tasks]\ndataset = "{TINY}"\n')
    with pytest.raises(UserError, match=r"run\.toml and other\.toml have different tables \[sandbox\]: .* --sandbox"):
        evaluate.sandbox_of_suites(["run.toml", "other.toml"], None)
    asked: list[evaluate.Measurement] = []
    monkeypatch.setattr(evaluate, "evaluate_models", lambda models, measurement, engine, **_: asked.append(measurement))
    main_words = ["eval", "nano", "--suite", str(TINY)]
    for more in (["--sandbox", "boxes.toml"], []):
        with pytest.raises(SystemExit):
            main.main([*main_words, *more])
    assert [each.boxes for each in asked] == [table, None]
    assert run(["eval", "nano", "--suite", "retrieval", "--sandbox", "boxes.toml"]) == 2
    assert "--suite retrieval has none" in capsys.readouterr().err
    assert run(["eval", "nano", "--suite", "fast-apply", "--sandbox", "boxes.toml"]) == 2
    assert "give --tests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "boxes.toml"),
        ("[sandboxes]\n", "--sandbox boxes.toml has no table [sandbox]: write one into it, or drop the flag"),
        ("sandbox = 3\n", "--sandbox boxes.toml has no table [sandbox]"),
        ('[sandbox]\ntype = "firecracker"\n', "sandbox"),
        ("[sandbox]\nhosts = []\n", "sandbox.hosts"),
        ("[sandbox\n", "boxes.toml"),
    ],
)
def test_a_wrong_file_is_one_sentence(
    text: str | None, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "boxes.toml").unlink()
    if text is not None:
        (folder / "boxes.toml").write_text(text)
    assert run(["tasks", "check", str(TINY), "--sandbox", "boxes.toml"]) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("tasks harbor harbor --sandbox podman.toml", "foreign Harbor tasks cannot be played with boxes"),
        ("doctor parity --against machines.jsonl --sandbox podman.toml", "needs boxes with machine profiles"),
        ("doctor parity --script --sandbox boxes.toml", "give --against"),
    ],
)
def test_boxes_that_a_command_cannot_use_are_refused(
    words: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "podman.toml").write_text('[sandbox]\ntype = "podman"\nimage = "x"\n')
    assert run(words.split()) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--dry-run"], []], ids=["dry", "run"])
def test_a_run_without_its_image_is_refused_before_anything_is_built(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text('[tasks]\nrepository = "here"\n[sandbox]\nimage = "none.tar"\n')
    with pytest.raises(SystemExit) as stop:
        main.main(["train", "a.toml", *flags])
    assert stop.value.code == 2
    assert f"sandbox.image: {tmp_path}/none.tar cannot be read (No such file" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.toml"]


BUILT_ELSEWHERE = (
    (
        {"image": "shop.tar sha256-1"},
        "was built in boxes of the image shop.tar, and these have the minimal one: give the",
    ),
    ({"services": ("prices",)}, "was built in boxes with the service prices, which these lack: give the table"),
)
WITH_A_DATASET = (
    "tasks check data",
    "tasks traces data -o out.jsonl",
    "eval nano --suite data",
    "eval nano --suite tests.toml",
    "eval http://127.0.0.1:9/v1 --model m --suite data",
    "train tests.toml",
    "doctor sandbox --pack pack",
)


@pytest.mark.parametrize("words", WITH_A_DATASET)
@pytest.mark.parametrize(("facts", "said"), BUILT_ELSEWHERE, ids=["image", "service"])
def test_a_dataset_is_not_played_in_other_boxes(
    words: str, facts: dict[str, Any], said: str, opened: list[Any], folder: Path, capsys
) -> None:
    """Its tests would fail there, whatever the answer, and a model would be measured at nothing."""
    shutil.copytree(TINY, "data")
    built = dataset.load_dataset(folder / "data")
    shutil.rmtree("data/tasks")
    dataset.save(built.root, structs.replace(built.manifest, **facts), built.tasks)
    (folder / "tests.toml").write_text('[tasks]\ndataset = "data"\n[model]\npath = "nano"\n')
    (folder / "pack/attacks").mkdir(parents=True)
    (folder / "pack/pack.toml").write_text('name = "p"\ndataset = "../data"\n')
    (folder / "pack/attacks/a.sh").write_text("# class: nothing\ntrue\n")
    assert run(words.split()) == 2
    assert said in capsys.readouterr().err
    assert opened == []
