"""Rows and folders of a user that are not as they should be: what is refused, and that nothing breaks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etude.corpus import chat_files
from etude.corpus.streams import scan
from etude.corpus.windows import RowWindow, WindowMaker
from etude.errors import UserError
from etude.renderers import renderer_for
from etude.trainer.finetune import reading
from etude.trainer.finetune.config import MidtrainConfig
from etude.trainer.finetune.data import StreamData
from tests.helpers.folders import big_tokenizer
from tests.helpers.speakers import TEMPLATE, write_model

GOOD = b'{"text": "a good row"}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model") / "model", big_tokenizer(1300), TEMPLATE)
    (folder / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 1400}')
    return folder


def read(model: Path, file: Path, lines: bytes) -> tuple[list[RowWindow], list[str]]:
    """The windows of these lines, as they are sent, and the reasons for refused ones."""
    file.write_bytes(lines)
    values = {"model": {"path": model}, "data": {"files": [file]}, "trainer": {"length": 64}}
    stream = StreamData.of(MidtrainConfig.model_validate(values))
    readers = stream.readers()
    maker = WindowMaker(readers, 64, 0, stream.separator, 0, True)
    windows: list[RowWindow] = []
    while (window := maker.window()) is not None:
        windows.append(msgspec.msgpack.decode(msgspec.msgpack.encode(window), type=RowWindow))
    report = json.loads(msgspec.json.encode(reading.report_of(readers, [])))
    return windows, [row["why"] for row in report["files"]["refused"]]


def episode(model: Path, *metrics: dict[str, Any]) -> bytes:
    """A line with an exported episode of these turns."""
    steps = [{"step_id": n, "source": "agent", "metrics": one} for n, one in enumerate(metrics, 1)]
    extra = {"renderer": renderer_for(model, tools=False).digest}
    return json.dumps({"schema_version": "ATIF-v1.8", "extra": extra, "steps": steps}).encode() + b"\n"


@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDfFf", b"\xed\xa0\x80"], ids=["escape", "second", "bytes"])
def test_halves_of_surrogate_pairs_anywhere_in_a_row_become_question_marks(
    model: Path, tmp_path: Path, half: bytes
) -> None:
    lines = b'{"text": "a %s b", "id": "i%s", "source": "s%s"}\n{"k%s": 1}\n'.replace(b"%s", half)
    (window,), refused = read(model, tmp_path / "rows.jsonl", lines + GOOD)
    trace = json.loads(window.trace)
    assert sorted(one[:2] for one in trace["documents"]) == [["i?", "s?"], ["rows.jsonl:3", ""]]
    learned = big_tokenizer(1300).decode(window.packed.rows().ids[0].tolist())
    assert "a ? b" in learned
    assert len(refused) == 1
    assert refused[0].endswith("this one k?")


def test_token_ids_that_are_none_are_refused(model: Path, tmp_path: Path) -> None:
    wrong = ([10**12], [-1], [1400], ["a"], [1.5], [True], [[1, 2]], "12", None)
    lines = b"".join(episode(model, {"prompt_token_ids": ids, "completion_token_ids": [1]}) for ids in wrong)
    (window,), refused = read(model, tmp_path / "rows.jsonl", lines + GOOD)
    assert refused == ["its token ids are no lists of numbers below 1,400, the model's vocabulary"] * len(wrong)
    assert len(json.loads(window.trace)["documents"]) == 1
    right = episode(model, {"prompt_token_ids": [1399], "completion_token_ids": [7]})
    (window,), refused = read(model, tmp_path / "rows.jsonl", right)
    assert window.packed.rows().ids[0, :2].tolist() == [1399, 7]
    assert not refused


def test_rows_in_which_nothing_can_be_learned_are_refused(model: Path, tmp_path: Path) -> None:
    lines = [
        b'{"text": ""}\n',
        b'{"prefix": "", "suffix": "", "middle": ""}\n',
        episode(model, {"prompt_token_ids": [], "completion_token_ids": [1]}),
        episode(model, {"prompt_token_ids": [5], "completion_token_ids": []}),
        episode(model, {"completion_token_ids": [1], "extra": {"added_token_ids": [2]}}),
    ]
    _, refused = read(model, tmp_path / "rows.jsonl", b"".join(lines) + GOOD)
    assert refused == [
        "its `text` is empty",
        "its `prefix`, `suffix` and `middle` are empty",
        "step 1 has an empty prompt",
        "there is no token to learn in it",
        "step 1 goes on from a prompt that is not there",
    ]


def test_deep_rows_and_long_reasons_stop_no_reader(model: Path, tmp_path: Path) -> None:
    deep = b"[" * 5000 + b"]" * 5000
    lines = b'{"text": "x", "a": %s}\n{"middle": 1, "source": %s}\n{"%s": 1}\n' % (deep, deep, b"k" * 9000)
    _, refused = read(model, tmp_path / "rows.jsonl", lines + GOOD)
    assert [len(why) <= 500 for why in refused] == [True] * 3
    (stretch,) = scan(tmp_path / "rows.jsonl", by_source=True)
    assert stretch.sizes == {"": len(lines + GOOD)}


def test_folders_around_a_corpus_and_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    corpus, building = tmp_path / "all/corpus", tmp_path / "work/corpus.building"
    for folder in (corpus / "train", corpus / "held_out", building / "rows"):
        folder.mkdir(parents=True)
        (folder / "00000.jsonl").write_bytes(GOOD)
    (corpus / "corpus.json").write_text("{}")
    (building / "plan.json").write_text("{}")
    assert chat_files(corpus) == [corpus / "train/00000.jsonl"]
    with pytest.raises(UserError, match="all/corpus: name the corpus folder itself"):
        chat_files(tmp_path / "all")
    for folder in (building, tmp_path / "work"):
        with pytest.raises(UserError, match="is being built"):
            chat_files(folder)
    odd = tmp_path / "odd"
    odd.mkdir()
    Path(os.fsdecode(bytes(odd) + b"/r\xff.jsonl")).write_bytes(GOOD)
    with pytest.raises(UserError, match=r"r\\xff\.jsonl is no text"):
        chat_files(odd)
