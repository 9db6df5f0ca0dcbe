"""The stage `apply` in the three formats of answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from etude.corpus.vocabulary import compact
from etude.edits import formats
from etude.renderers import renderer_for
from etude.trainer.finetune import applied_edits
from etude.trainer.finetune import tokenizer_training as bpe
from tests.helpers.apply_edits import config, example


@pytest.mark.parametrize("way", list(formats.FORMATS))
def test_the_answer_learned_means_the_result(folder: Path, way: str) -> None:
    tokenizer, renderer = bpe.load(folder / "model"), renderer_for(folder / "model")
    for number in range(20):
        edit = example(number)
        ((ids, mask),) = applied_edits.encode([edit], renderer, way)
        said = tokenizer.decode(ids[mask > 0].tolist(), skip_special_tokens=False)
        asked = tokenizer.decode(ids[mask == 0].tolist(), skip_special_tokens=False)
        tag, sentence = formats.FORMATS[way]
        assert sentence in asked
        assert asked.endswith(f"<|assistant|><{tag}>\n")
        answer, closed, rest = said.partition(f"</{tag}>")
        assert (closed, rest) == (f"</{tag}>", "<|end|>")
        assert formats.read_edit_answer(edit.file, answer, way) == edit.result


def test_every_format_is_taught_the_same_edits_in_the_same_order(folder: Path) -> None:
    tokenizer, renderer = bpe.load(folder / "model"), renderer_for(folder / "model")
    phases = ({"share": 1.0, "longest": 512, "renamed": 0.5},)
    shown = {}
    for way in formats.FORMATS:
        setting = config(folder, length=512, tokens=9000, format=way, phases=phases)
        rows = applied_edits.rows_of([example(i) for i in range(40)], renderer, compact(tokenizer), setting)
        told = "".join(tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in rows.ids)
        shown[way] = {part.partition("</code>")[0] for part in told.split("<code>\n")[1:]}
        assert f"<{formats.FORMATS[way][0]}>" in told
    assert min(map(len, shown.values())) > 15
    # Rows are packed and shuffled, so the order is seen in what the smaller part holds.
    fewest = min(shown.values(), key=len)
    assert all(fewest <= seen for seen in shown.values())


def test_an_edit_whose_file_holds_lines_of_the_format_is_not_learned_in_it(folder: Path) -> None:
    tokenizer, renderer = bpe.load(folder / "model"), renderer_for(folder / "model")
    title = "=======\nTitle\n"
    odd = dataclasses.replace(example(0), file=title, sketch="-------\nTitle\n", result="-------\nTitle\n")
    rest = [example(i) for i in range(1, 6)]
    for way, kept in (("rewrite", True), ("search-replace", False), ("udiff", True)):
        phases = ({"share": 1.0, "longest": 512},)
        setting = config(folder, length=512, tokens=9000, format=way, phases=phases)
        rows = applied_edits.rows_of([odd, *rest], renderer, compact(tokenizer), setting)
        told = "".join(tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in rows.ids)
        assert ("Title" in told) == kept


def test_a_format_is_trained_and_measured(folder: Path) -> None:
    phases = ({"share": 1.0, "longest": 512},)
    applied_edits.finetune(
        config(folder, length=512, tokens=20_000, format="search-replace", phases=phases), folder / "run"
    )
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss/token"] for row in rows if "loss/token" in row]
    assert losses[-1] < 0.8 * losses[0]
    assert rows[-1]["eval/heldout/edits"] == 8
