"""`etude eval --suite` on tables of edits: the merge and a model that knows nothing, and the suite that is shipped."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from models.make_nano import tokenizer as bpe
from models.make_nano.tokenizer import save as save_tokenizer

from etude.cli import main
from etude.edits import examples as tables
from etude.edits.examples import Example
from etude.edits.grades import EditGrade
from etude.edits.merge import merge
from etude.edits.sketch import draw_sketch
from etude.evals.fast_apply import SUITE, merged, run, summary
from etude.trainer.finetune import pretrain
from etude.trainer.finetune.config import NewModelConfig

FILE = "import os\n\n\ndef pop(items):\n    value = items[-1]\n    del items[-1]\n    return value\n"
MODEL = NewModelConfig(
    vocab_size=320, hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1, head_dim=16, expert_size=16,
    experts=4, max_positions=512,
)  # fmt: skip


def example(number: int, file: str = FILE) -> Example:
    result = file.replace("value = items[-1]", f"value = items[-{number + 2}]")
    drawn = draw_sketch(file, result, "python", random.Random(number), kinds=0)
    assert drawn is not None
    return Example(
        id=str(number), repository="lib-1.0", licence="MIT", origin="files", path=f"{number}.py", language="python",
        kind="synthetic", noise=(), merges=True, instruction="", file=file, sketch=drawn.text, result=result, lines=7,
        fraction=0.2,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that knows nothing and a table of three edits, one too long for it and one that misleads the merge."""
    save_tokenizer(bpe.train([FILE] * 3, 320), tmp_path / "model", 512)
    pretrain.new_model(MODEL, 0).save_pretrained(tmp_path / "model")
    long = FILE + "".join(f"\n\ndef f{i}(a):\n    return a + {i}\n" for i in range(40))
    wrong = replace(example(2), result=FILE.replace("import os", "import sys"))
    tables.write_examples([example(0), example(1, long), wrong], tmp_path / "edits.parquet")
    return tmp_path


def test_grades_of_the_merge_and_of_a_model_that_knows_nothing(folder, capsys):
    with pytest.raises(SystemExit) as end:
        main.main(["eval", str(folder / "model"), "--suite", str(folder / "edits.parquet"), "--json"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    report = json.loads(told.splitlines()[-1])
    baseline, model = report["results"]
    assert report["edits"] == 3
    assert baseline["model"] == "merge"
    assert baseline["exact"]["mean"] == pytest.approx(2 / 3)
    assert baseline["changed_outside"] == pytest.approx(1 / 3)  # it did another edit than the table says
    assert model["grades"]["fail"] == 1
    assert model["fits"] == pytest.approx(2 / 3)
    assert set(model["by"]) == {"language", "lines", "share changed", "kind", "noise"}
    assert "changes outside the hunks" in told


def test_a_table_that_is_none_is_refused(folder, capsys):
    with pytest.raises(SystemExit) as end:
        main.main(["eval", str(folder / "model"), "--suite", str(folder / "nothing.parquet")])
    assert end.value.code == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_the_shipped_suite_is_what_its_card_says():
    examples = tables.load_examples(SUITE)
    assert len(examples) == 450
    assert len({(e.file, e.result) for e in examples}) == 450
    assert all(e.file.count("\n") <= 400 for e in examples)
    assert all(e.merges == (merged(e).grade == EditGrade.EXACT) for e in examples)
    assert all(e.noise == ("no-op",) for e in examples if e.file == e.result)
    assert sum(e.file == e.result for e in examples) <= 9
    assert all(merge(e.file, e.sketch).text is not None for e in examples if e.merges)
    shares = summary([merged(e) for e in examples])["grades"]
    assert sum(shares.values()) == pytest.approx(1)
    licences = (SUITE.parent / "LICENCES.md").read_text()
    assert all(e.repository in licences for e in examples)


def test_a_model_is_asked_for_every_edit_that_fits(folder):
    examples = tables.load_examples(folder / "edits.parquet")
    found, seconds = run(folder / "model", examples)
    assert [a.fits for a in found] == [True, False, True]
    assert all(a.tokens > 0 for a in found if a.fits)
    assert seconds > 0
