"""`etude eval --suite retrieval`, with a model that was taught the answers, through its real engine."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from models.make_nano.tokenizer import save as save_tokenizer
from models.make_nano.tokenizer import train

from etude.cli.main import main
from etude.corpus.retrieval import (
    RetrievalOptions,
    RetrievalQuestion,
    RetrievalSample,
    folder_functions,
    retrieval_samples,
)
from etude.errors import UserError
from etude.evals.document_suite import questions
from etude.evals.retrieval import summary
from etude.models.loading import load_model
from etude.renderers import renderer_for
from etude.trainer.finetune import document_masks, pretrain
from etude.trainer.finetune.config import NewModelConfig

MODEL = NewModelConfig(
    vocab_size=400, hidden_size=48, intermediate_size=96, layers=2, heads=2, kv_heads=1, head_dim=64, expert_size=48,
    experts=4, max_positions=2048,
)  # fmt: skip
WORDS = ("chunk", "merge", "split", "count")
COUNT = 3


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for n, word in enumerate(WORDS):
        body = f"    total = key_{n}(items)\n    return total\n"
        (folder / f"{word}.py").write_text(f"def {word}_items(items, key_{n}={n}):\n{body}")
    return folder


@pytest.fixture(scope="module")
def taught(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt the first samples of the repository by heart, under both masks."""
    folder = tmp_path_factory.mktemp("model")
    asked = list(islice(retrieval_samples(folder_functions(repository), RetrievalOptions(), 0), COUNT))
    text = [f"{q.text}\n{q.answer}\n<document>{t}\n{b}\n</document>\n" for s in asked for q in s.questions
            for t, b in s.documents]  # fmt: skip
    save_tokenizer(train(text, 400), folder, 2048)
    pretrain.new_model(MODEL, 0).save_pretrained(folder)
    model = load_model(folder, dtype=torch.float32).train()
    encoded = document_masks.encode(renderer_for(folder), asked)
    compute = document_masks.loss_function(model, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(100):
        batch = document_masks.DocumentBatch.of(encoded, [step % 2 == 0] * COUNT, sum(map(len, encoded)))
        compute(batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_engine_answers_as_the_training_pass_says(
    taught: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(taught), "--suite", "retrieval", "--repository", str(repository)]
    with pytest.raises(SystemExit) as e:
        main([*command, "--max-tasks", str(COUNT), "--orders", "3", "--json"])
    assert e.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    said = json.loads(lines[-1])
    assert [row["documents"] for row in said["results"]] == ["full", "own"]
    assert lines[0].startswith(f"{taught}, full: ")
    encoded = document_masks.encode(renderer_for(taught), questions([repository], COUNT, 0))
    model = load_model(taught)
    for row in said["results"]:
        expected = document_masks.measure(model, encoded, row["documents"] == "own", 1024)
        assert row["orders"][0] == pytest.approx(expected["exact"])
        assert row["orders"][0] > 0.5, "learnt by heart, or nearly"
        assert len(row["orders"]) == 3
        assert row["exact"]["mean"] == pytest.approx(sum(row["orders"]) / 3)
        assert sum(row["counts"].values()) == row["questions"]
    [difference] = said["second_minus_first"]
    assert difference["first"].endswith(", full")
    assert difference["second"].endswith(", own")


def test_an_untaught_model_knows_no_answer(
    repository: Path, taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in taught.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pretrain.new_model(MODEL, 1).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        main(["eval", str(tmp_path), "--suite", "retrieval", "--repository", str(repository), "--documents", "own",
              "--max-tasks", "2", "--json"])  # fmt: skip
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert row["documents"] == "own"
    assert row["exact"]["mean"] == 0.0


def test_rates_are_counted_by_kind_and_by_order() -> None:
    asked = [
        RetrievalSample("a", (), (RetrievalQuestion("file", "", "", ""), RetrievalQuestion("call", "", "", ""))),
        RetrievalSample("a", (), (RetrievalQuestion("file", "", "", ""),)),
    ]
    result = summary("own", asked, [[True, False], [False, False], [True, True]], seed=0)
    assert result.orders == pytest.approx((2 / 3, 1 / 3))
    assert result.spread == pytest.approx(1 / 3)
    assert result.exact.mean == pytest.approx(1 / 2)
    assert result.kinds["file"].mean == pytest.approx(3 / 4)
    assert result.kinds["call"].mean == 0.0
    assert result.counts == {"call": 1, "file": 2}
    with pytest.raises(ValueError, match="1 answers for 3 questions"):
        summary("own", asked, [[True]], seed=0)


def test_what_cannot_be_asked_is_said(tmp_path: Path, taught: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        questions([tmp_path / "nothing"], 1, 0)
    with pytest.raises(UserError, match="at least 4 files"):
        questions([tmp_path], 1, 0)
    for arguments, sentence in [
        (["--suite", "retrieval", "--orders", "0"], "at least one sample and one order"),
        (["--suite", str(tmp_path), "--orders", "2"], "belong to --suite retrieval"),
    ]:
        with pytest.raises(SystemExit) as e:
            main(["eval", str(taught), *arguments])
        assert e.value.code == 2
        assert sentence in capsys.readouterr().err
