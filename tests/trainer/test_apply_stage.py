"""The stage `apply` on a model of a few thousand parameters and a handful of edits."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models.make_nano import tokenizer as bpe

from etude.corpus.dialect import SPECIAL_IDS
from etude.edits import examples as tables
from etude.edits.merge import merge
from etude.edits.sketch import draw_sketch
from etude.errors import UserError
from etude.renderers import renderer_for
from etude.trainer.finetune import applied_edits, pretrain, rename_augmentation
from etude.trainer.finetune.config import FolderModelConfig, PhaseConfig
from tests.helpers.apply_edits import MODEL, config, example


def test_the_loss_falls_and_held_out_edits_are_measured(folder: Path) -> None:
    checkpoint = applied_edits.finetune(config(folder), folder / "run")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss/token"] for row in rows if "loss/token" in row]
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    last = rows[-1]
    assert last["eval/heldout/edits"] == 8
    assert 0 <= last["eval/heldout/exact"] <= 1
    assert 0.2 < last["eval/heldout/tokens_right"] <= 1
    assert last["eval/heldout/loss_changed"] > 0
    assert json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"] == 256


def test_only_the_answer_is_labelled(folder: Path) -> None:
    tokenizer, renderer = bpe.load(folder / "model"), renderer_for(folder / "model")
    ((ids, mask),) = applied_edits.encode([example(1)], renderer)
    said = tokenizer.decode(ids[mask > 0].tolist(), skip_special_tokens=False)
    assert said == example(1).result + "</updated-code><|end|>"
    asked = tokenizer.decode(ids[mask == 0].tolist(), skip_special_tokens=False)
    assert asked.startswith("<|user|><instruction>")
    assert asked.endswith("<|end|><|assistant|><updated-code>\n")


def test_short_examples_come_first_and_unseen_ones_before_the_others(folder: Path) -> None:
    tokenizer, renderer = bpe.load(folder / "model"), renderer_for(folder / "model")
    short, other, long = (replace(example(i), file=text, sketch=text, result=text) for i, text in enumerate(
        ("a = 1\n", "b = 2\n", "c = 3\n" * 12)))  # fmt: skip
    lengths = [len(ids) for ids, _ in applied_edits.encode([short, other, long], renderer)]
    assert max(lengths[:2]) < 90 < 110 < lengths[2] <= 256
    phases = (PhaseConfig(share=0.5, longest=90), PhaseConfig(share=0.5, longest=256))
    setting = config(folder, tokens=1600).model_copy(update={"phases": phases})
    rows = applied_edits.rows_of([short, other, long], renderer, 0, 1, setting)
    texts = ["".join(tokenizer.decode(row.tolist(), skip_special_tokens=False)) for row in rows.ids]
    told = "".join(texts)
    assert "c = 3" not in "".join(texts[: len(texts) // 2])
    assert "c = 3" in told
    counts = [told.count(f"<updated-code>\n{name} = ") for name in "abc"]
    # By turns until the budget is spent: in each phase no example is more than once ahead of another.
    assert abs(counts[0] - counts[1]) <= 1
    assert 0 < counts[2] < counts[0]
    setting = setting.model_copy(update={"phases": (PhaseConfig(share=1.0, longest=10),)})
    with pytest.raises(UserError, match="at most 10 tokens"):
        applied_edits.rows_of([short], renderer, 0, 1, setting)


def test_renamed_examples_are_never_the_same_twice_and_still_merge(folder: Path) -> None:
    tokenizer, renderer = bpe.load(folder / "model"), renderer_for(folder / "model")
    before = "import json\n\ndef load_table(path):\n    return json.load(path)\n"
    drawn = draw_sketch(before, before.replace("load(path)", "loads(path)"), "python", random.Random(0), kinds=0)
    assert drawn is not None
    edit = replace(example(0), file=before, sketch=drawn.text, result=before.replace("load(path)", "loads(path)"))
    others = [example(i) for i in range(300)]
    rare = rename_augmentation.rare([*others, edit])
    assert {"json", "load_table", "path"} <= set(rare)
    marked = [replace(e, sketch="# existing code\n" + e.sketch) for e in others]
    assert not {"existing", "code"} & set(rename_augmentation.rare(marked))
    words = (*rare, *(f"name{i}" for i in range(40)))
    seen = set()
    for seed in range(20):
        other = rename_augmentation.renamed(edit, words, random.Random(seed))
        assert merge(other.file, other.sketch).text == other.result
        assert "load_table" not in other.file + other.sketch + other.result
        assert rename_augmentation.WORD.sub("", other.file) == rename_augmentation.WORD.sub("", edit.file)
        seen.add(other.file)
    assert len(seen) == 20
    phases = (PhaseConfig(share=1.0, longest=256, renamed=0.5),)
    setting = config(folder, tokens=80_000).model_copy(update={"phases": phases})
    some = [replace(edit, id=str(i), file=f"{word} = 1\n", sketch=f"{word} = 2\n", result=f"{word} = 2\n")
            for i, word in enumerate(words[:20])]  # fmt: skip
    rows = applied_edits.rows_of([*some, *others], renderer, 0, 1, setting)
    told = "".join(tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in rows.ids)
    shown = re.findall(r"<code>\n(\w+) = 1", told)
    assert len(shown) > 10
    assert 0.2 < len(set(shown) - set(words[:20])) / len(set(shown)) < 0.9


@pytest.mark.slow
def test_exact_by_likelihood_is_exact_by_greedy_decoding(folder: Path) -> None:
    """A model taught a few edits: where all its likeliest tokens are the answer's, it says the answer."""
    renderer = renderer_for(folder / "model")
    examples = [example(i) for i in range(6)]
    tests = applied_edits.measured(examples, renderer, 6, 256, seed=0)
    model = pretrain.new_model(MODEL, 0).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(500):
        test = tests[step % 2]
        ids = torch.from_numpy(test.ids_T)[None]
        labels = torch.where(torch.from_numpy(test.label_T)[None], ids, -100)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    found = applied_edits.likelihoods(model, tests)
    said = []
    for test in tests:
        start = int(np.argmax(test.label_T))
        ids = torch.from_numpy(test.ids_T[:start])[None]
        out = model.generate(input_ids=ids, max_new_tokens=len(test.ids_T) - start, do_sample=False, pad_token_id=1)
        said.append(out[0].tolist() == test.ids_T.tolist())
    assert [r.exact for r in found] == said
    assert any(said)
    assert not all(said)
    assert all(test.ids_T[-1] == SPECIAL_IDS["<|end|>"] for test in tests)
    assert all(0 < test.changed_T.sum() < test.label_T.sum() for test in tests)


def test_a_killed_run_goes_on(folder: Path) -> None:
    setting = config(folder, tokens=6_000)
    applied_edits.finetune(setting, folder / "run", stop_after=2)
    applied_edits.finetune(setting, folder / "run", resume=True)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss/token" in row]
    assert steps == sorted(set(steps))
    assert steps[-1] > 2


def test_bad_input_is_one_sentence(folder: Path) -> None:
    tables.write_examples([example(1)], folder / "heldout.parquet")
    with pytest.raises(UserError, match="both trained on and held out"):
        applied_edits.finetune(config(folder), folder / "run")
    with pytest.raises(UserError, match="does not exist"):
        applied_edits.finetune(config(folder).model_copy(update={"data": folder / "none.parquet"}), folder / "run")
    with pytest.raises(UserError, match="not a model folder"):
        applied_edits.finetune(
            config(folder).model_copy(update={"model": FolderModelConfig(path=folder)}), folder / "run"
        )
    (folder / "broken.parquet").write_text("no table")
    with pytest.raises(UserError, match="not a table of edits"):
        applied_edits.finetune(config(folder).model_copy(update={"data": folder / "broken.parquet"}), folder / "run")
    assert not (folder / "run").exists()
