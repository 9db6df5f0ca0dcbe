"""Gold answers told as episodes: what is said is what the tools did, and what passes."""

import json
from pathlib import Path

import msgspec
import pytest

from etude.cli.main import main
from etude.config import TracesConfig
from etude.corpus import chats
from etude.errors import UserError
from etude.renderers import renderer_for
from etude.rollout.traces import gold_edit
from etude.run.traces import write_traces
from etude.tasks.dataset import load_dataset
from tests.helpers.rows import chat_rows
from tests.helpers.speakers import TEMPLATE, hermes_tokenizer, write_model

TINY = Path(__file__).parents[1] / "tasks/data/tiny"
MANY = TracesConfig(per_task=6)


def quiet(stage: str, done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    output = tmp_path_factory.mktemp("traces") / "rows.jsonl"
    told, tried = write_traces([TINY], output, MANY, quiet)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert told == len(found) > 0.7 * tried
    assert not output.with_name("rows.jsonl.partial").exists()
    return found


def calls(row: dict) -> list[tuple[str, dict, str, int]]:
    """Name, arguments, result and weight of each call."""
    results = {m["tool_call_id"]: m["content"] for m in row["messages"] if m["role"] == "tool"}
    return [
        (c["function"]["name"], json.loads(c["function"]["arguments"]), results.get(c["id"], ""), m.get("weight", 1))
        for m in row["messages"] for c in m.get("tool_calls", ())
    ]  # fmt: skip


def test_a_trace_ends_with_the_answer_and_its_tests(rows: list[dict]) -> None:
    tasks = load_dataset(TINY).by_id
    for row in rows:
        task = tasks[row["name"].split(":")[1]]
        assert task.split == "train", "held-out tasks are never told"
        done = calls(row)
        edits = [call for call in done if call[0] == "edit"]
        name, arguments, result, weight = edits[-1]
        assert (name, result, weight) == ("edit", "ok", 1)
        path, edit = arguments["path"], gold_edit(task)
        assert edit is not None
        assert task.changes[path].replace(arguments["old"], arguments["new"]) == task.solution[path]
        total = len(task.visible_tests)
        assert [call[0] for call in done[-2:]] == ["test", "finish"]
        assert done[-2][2] == f"{total} of {total} passed"


def test_wrong_tries_fail_are_taken_back_and_are_not_learned(rows: list[dict]) -> None:
    tried = 0
    for row in rows:
        done = calls(row)
        wrong = [n for n, call in enumerate(done) if call[0] == "edit"][:-1]
        tried += bool(wrong)
        assert [call[3] for call in done].count(0) >= 2 * len(wrong)
        for n in wrong:
            assert done[n][3] == done[n + 1][3] == 0
            assert (done[n + 1][0], done[n + 2][0]) == ("test", "undo")
            assert done[n + 1][2].splitlines()[1].startswith("failed: ")
        assert sum(call[0] == "undo" for call in done) == len(wrong)
    assert 0 < tried < len(rows)


def test_the_agent_reads_the_lines_that_it_needs(rows: list[dict]) -> None:
    ways = set()
    for row in rows:
        done = calls(row)
        (read,) = (call for call in done if call[0] == "read")
        edit = next(call for call in reversed(done) if call[0] == "edit")
        assert edit[1]["old"].splitlines()[0] in read[2], "it has seen what it changes"
        assert read[1]["limit"] in (40, 80)
        ways.add(done[0][0])
    assert ways == {"read", "grep", "test"}


def test_a_trace_is_learned_in_the_dialect_of_the_model(rows: list[dict], tmp_path: Path) -> None:
    renderer = renderer_for(write_model(tmp_path / "model", hermes_tokenizer(), TEMPLATE))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for found, row in zip(chat_rows([tmp_path / "rows.jsonl"], lambda: renderer), rows, strict=True):
        assert isinstance(found, chats.LearnedRow), found
        ids, mask = found.tokens
        learned = renderer.text([int(i) for i, m in zip(ids, mask, strict=True) if m])
        assert learned.count("<tool_call>") == sum(weight for *_, weight in calls(row))


def test_the_tools_can_be_fewer(tmp_path: Path) -> None:
    names = ("read", "edit", "undo", "test", "finish")
    write_traces([TINY], tmp_path / "few.jsonl", TracesConfig(per_task=3, tools=names), quiet)
    for row in map(json.loads, (tmp_path / "few.jsonl").read_text().splitlines()):
        assert {tool["function"]["name"] for tool in row["tools"]} == {*names}
        assert {call[0] for call in calls(row)} <= {*names}
    for tools, why in ((("read", "finish"), "needs the tool 'edit'"), (("dance",), "there is no tool 'dance'"),
                       (("read", "edit"), "ends its work by the tool `finish`")):  # fmt: skip
        with pytest.raises(UserError, match=why):
            write_traces([TINY], tmp_path / "x.jsonl", TracesConfig(tools=tools), quiet)


def test_the_same_seed_tells_the_same_and_a_stopped_command_goes_on(rows: list[dict], tmp_path: Path, capsys) -> None:
    output = tmp_path / "rows.jsonl"
    partial = tmp_path / "rows.jsonl.partial"
    kept = json.loads(json.dumps(rows[0]))
    kept["messages"][0]["content"] = "Told before the stop."
    head = {"name": "", "options": MANY.model_dump(mode="json", exclude={"workers"})}
    head |= {"datasets": [load_dataset(TINY).manifest.digests["dataset.json"]]}
    partial.write_text(f'{json.dumps(head)}\n{json.dumps(kept)}\n{{"name": "cut sho')
    words = ["tasks", "traces", str(TINY), "-o", str(output), "--per-task", "6"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--seed", "2"])
    assert (ended.value.code, output.exists()) == (2, False)
    assert "is of other options or datasets: remove it" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "traces", str(TINY), *words[2:]])  # the same dataset twice
    assert ended.value.code == 0
    assert output.read_text().count("Told before the stop.") == 1, "what was told is not told again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]
    assert f"{len(rows)} traces of " in capsys.readouterr().out
    assert {row["name"]: calls(row) for row in map(json.loads, output.read_text().splitlines())} == {
        row["name"]: calls(row) for row in rows
    }
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "exists: name another file, or remove it" in capsys.readouterr().err


def test_answers_that_cannot_be_told_are_left_out(tmp_path: Path) -> None:
    task = load_dataset(TINY).split("train")[0]
    ((path, text),) = task.changes.items()
    assert (
        gold_edit(msgspec.structs.replace(task, changes={path: text, "b.py": ""}, solution={path: "", "b.py": ""}))
        is None
    )
    long = "".join(f"x = {n}\n" for n in range(20))
    assert (
        gold_edit(msgspec.structs.replace(task, changes={path: long}, solution={path: long.replace("=", "+=")})) is None
    )
    with pytest.raises(UserError, match="is not a task dataset"):
        write_traces([tmp_path], tmp_path / "x.jsonl", MANY, quiet)
    assert not (tmp_path / "x.jsonl").exists()


def test_the_sources_of_a_run_are_built_beside_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, output = tmp_path / "libraries.toml", tmp_path / "rows.jsonl"
    config.write_text(f'stage = "rl"\n[[tasks.sources]]\ndataset = "{TINY}"\n')
    with pytest.raises(SystemExit, match="0"):
        main(["tasks", "traces", str(config), "-o", str(output)])
    assert " traces of " in capsys.readouterr().out
    config.write_text(f'stage = "rl"\n[tasks]\ndataset = "{TINY}"\n')
    with pytest.raises(SystemExit, match="2"):
        main(["tasks", "traces", str(config), "-o", str(tmp_path / "others.jsonl")])
    assert "libraries.toml has no tasks.sources" in capsys.readouterr().err
