"""`etude demo --real`: its commands are valid, what is made is not made again, and a rung counts if it is better."""

from pathlib import Path

import msgspec
import pytest

from etude.cli import demo_real
from etude.cli.demo_real import RL, SFT, TRACES
from etude.cli.main import main
from etude.cli.overlays import read_toml
from etude.config import RLConfig, bundled, validate
from etude.evals.stats import pass_rate
from etude.evals.suite import EvalResult, TaskResult


def measured(passed: list[int]) -> EvalResult:
    tasks = tuple(TaskResult(f"t{n}", f"f{n // 2}", (n in passed,), 0) for n in range(40))
    rate = pass_rate([task.passed for task in tasks], [task.function for task in tasks], 0)
    return EvalResult("heldout", 1, 1, 1.0, tasks, rate, {1: rate.mean}, {}, 0, {}, {})


def write(folder: Path, **results: EvalResult) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        (folder / f"eval-{name}.json").write_bytes(msgspec.json.encode(result))


def test_a_rung_counts_if_its_interval_is_above_the_best_before_it(tmp_path: Path) -> None:
    few, many = measured(list(range(0, 40, 4))), measured(list(range(30)))
    write(tmp_path, base=measured([]), before=few, after=many)
    base, tuned, after, tasks = demo_real._ladder(tmp_path, tmp_path / "eval-base.json")
    assert base.startswith("pretrained   0.0 % [")
    assert "25.0 %" in tuned
    assert "+25.0 points" in tuned
    assert "] above the best before it" in tuned
    assert "+50.0 points" in after
    assert tasks.startswith("40 held-out tasks of 20 functions; ")
    write(tmp_path, before=measured([]), after=few)
    _, tuned, after, _ = demo_real._ladder(tmp_path, tmp_path / "eval-base.json")
    assert "+0.0 points [+0.0, +0.0] not above" in tuned
    assert "+25.0 points" in after, "against the best before it, which is the first"


def test_nothing_that_is_there_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = tmp_path / "outputs"
    (outputs / "smollm2-sft/checkpoint").mkdir(parents=True)
    (outputs / "smollm2-traces.jsonl").touch()
    write(outputs / "other", base=measured([]), before=measured([1]), after=measured([1]))
    (outputs / "other/report.html").touch()
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--real", "--name", "other"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.endswith(")") and "done before" in line for line in printed[:4]] == [True] * 4
    assert printed[4].startswith("pretrained")


def test_the_commands_are_those_of_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = [str(bundled(path)) for path in (TRACES, SFT, RL)]
    config = validate(RLConfig, read_toml(Path(recipes[2]), []), RL)
    steps = demo_real._steps(config, Path("outputs/smollm2-rl"), [])
    assert [step.words[:2] for step in steps] == [
        ("tasks", "traces"), ("train", recipes[1]), ("train", recipes[2]), ("eval", "smollm2")
    ]  # fmt: skip
    validate(RLConfig, read_toml(Path(recipes[0]), []), TRACES)
    Path("outputs/smollm2-rl").mkdir(parents=True)
    Path("outputs/smollm2-sft").mkdir()
    _, tuned, learned, _ = demo_real._steps(config, Path("outputs/smollm2-rl"), [])
    assert (tuned.words[-1], learned.words) == ("--resume", ("train", recipes[2], "--resume"))


def test_the_agent_has_the_tools_that_it_was_told_about() -> None:
    """Traces, RL and evaluation: the same tools, and tasks of the same kind."""
    told, learned = (read_toml(bundled(path) or Path(), []) for path in (TRACES, RL))
    same = ("kinds", "min_lines", "max_lines", "visible_failure", "symptoms", "operators")
    assert {key: told["tasks"][key] for key in same} == {key: learned["tasks"][key] for key in same}
    tuned = read_toml(bundled(SFT) or Path(), [])
    assert tuned["data"]["files"] == ["outputs/smollm2-traces.jsonl"]
    assert learned["model"]["path"] == f"outputs/{tuned['name']}"


@pytest.mark.parametrize("words", [["--resume"], ["--no.such_key", "1"]])
def test_bad_input_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--real", *words])
    assert capsys.readouterr().err.count("etude: ") == 1
