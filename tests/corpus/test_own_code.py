"""The measurements of training on own code (`benchmarks/own_code.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import own_code

from etude.models.loading import load_model
from tests.corpus.documents import sources
from tests.corpus.documents.test_suites import dataset, definition

NANO = Path(__file__).parents[2] / "models" / "nano"


def row(name: str, tokens: int, loss: float, *copied: bool) -> dict[str, object]:
    return {"id": name, "tokens": tokens, "loss": loss, "copied": list(copied)}


def test_a_comparison_is_paired_by_document():
    before = [row(f"d{n}", 10 * (n + 1), 20.0 * (n + 1), False, False) for n in range(30)]
    after = [row(f"d{n}", 10 * (n + 1), 18.0 * (n + 1), True, False) for n in range(30)]
    result = own_code.compare(before, after)
    assert result["loss"] == [2.0, 1.8]
    assert result["relative"] == [-0.1, -0.1, -0.1]  # all documents agree, so the interval has no width
    assert result["copied"] == [0.0, 0.5]
    assert result["copied_difference"] == [0.5, 0.5, 0.5]
    after[3]["loss"] = 90.0
    mean, low, high = own_code.compare(before, after)["relative"]
    assert low < mean < high
    with pytest.raises(ValueError, match="other documents"):
        own_code.compare(before, after[1:])


def test_losses_are_those_of_the_model_and_copies_those_of_edit_calls(tmp_path):
    messages = [
        {"role": "user", "content": "Fix `f` in a.py\ndef f(a):\n    return not a"},
        {"role": "assistant", "content": "", "tool_calls": [call("edit", path="a.py", old="return not a", new="x")]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
        {"role": "assistant", "content": "", "tool_calls": [call("finish")]},
    ]
    lines = [{"id": "one", "text": "def f(a):\n    return a\n"}, {"id": "two", "messages": messages}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {one["id"]: one for one in own_code.losses(NANO, [file], 10, 512)}
    assert result["one"]["copied"] == []
    assert len(result["two"]["copied"]) == 1
    model = load_model(NANO, dtype=torch.bfloat16)
    (document,) = [one for one in own_code.documents(NANO, [file], 10) if one.id == "one"]
    ids = torch.from_numpy(document.tokens[0].astype("int64"))
    with torch.inference_mode():
        whole = model(input_ids=ids[None], labels=ids[None])
    assert result["one"]["tokens"] == len(ids) - 1
    assert result["one"]["loss"] == pytest.approx(float(whole.loss) * (len(ids) - 1), rel=0.01)  # bfloat16
    assert [one["tokens"] for one in own_code.losses(NANO, [file], 1, 5)] in ([4], [])


def call(name: str, **arguments: str) -> dict[str, object]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def test_what_is_planted_is_in_no_part(tmp_path):
    dataset(tmp_path / "suite", [definition(n) for n in range(4)])
    own_code.write_planted(tmp_path / "suite", tmp_path / "planted", 4)
    texts, hunks = ((tmp_path / "planted" / f"{name}.txt").read_text().splitlines() for name in ("texts", "hunks"))
    planted = b"".join(path.read_bytes() for path in (tmp_path / "planted" / "own").iterdir())
    assert len(texts) == len(hunks) == 4
    assert all(text.encode() in planted for text in (*texts, *hunks))
    sources.build(tmp_path / "corpus", own=[tmp_path / "planted" / "own"], suites=[tmp_path / "suite"])
    parts = json.dumps(sources.rows(tmp_path / "corpus"))
    assert "part_0_0" in parts
    assert not any(json.dumps(text)[1:-1] in parts for text in (*texts, *hunks))


def test_general_texts_are_divided(tmp_path):
    own_code.write_general(tmp_path)
    train, held_out = ({path.name for path in (tmp_path / part).iterdir()} for part in ("train", "held_out"))
    assert "numpy.md" in train | held_out
    assert not train & held_out
    assert len(train) > 2 * len(held_out) > 10
