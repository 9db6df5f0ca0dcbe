from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from etude.corpus import dialect, tries
from etude.corpus.build import repair_documents
from etude.corpus.dialect import IDS, Call, Piece, message, prompt, special, turn
from etude.corpus.episodes import Broken, Edit, break_function
from etude.corpus.filters import Function


def _broken(corpus: list[Function]) -> Broken:
    rng = random.Random(1)
    return next(broken for function in corpus * 5 if (broken := break_function(function, rng)))


def test_an_opening_and_what_follows_it_are_a_turn_of_the_dialect(corpus: list[Function], tokenizer: Tokenizer) -> None:
    broken = _broken(corpus)
    call = Call("edit", (broken.edit.old, broken.edit.new))
    whole = message("user", prompt(broken.function.name, broken.path, broken.source)) + turn([call, Call("test")])
    ((ids, _),) = dialect.encode(tokenizer, [whole])
    start = tries.opening(broken, tokenizer)
    assert ids[: len(start)].tolist() == start
    said = ids[len(start) :].tolist()
    said = said[: said.index(IDS["<|call|>"]) + 1]
    assert tries.edit_said(said, tokenizer) == broken.edit
    assert tries.edit_said([*said[:-1], IDS["<|end|>"]], tokenizer) == broken.edit


@pytest.mark.parametrize(
    "pieces",
    [
        (Piece("a"), special("<|arg|>"), Piece("b")),  # cut short
        (Piece("a"), special("<|end|>")),  # one argument
        (Piece("a"), special("<|arg|>"), Piece("b"), special("<|arg|>"), Piece("c"), special("<|end|>")),
        (Piece("a"), special("<|user|>"), Piece("a"), special("<|arg|>"), Piece("b"), special("<|end|>")),
        (),
    ],
)
def test_what_is_not_an_edit_is_none(pieces: tuple[Piece, ...], tokenizer: Tokenizer) -> None:
    ((ids, _),) = dialect.encode(tokenizer, [pieces])
    assert tries.edit_said(ids.tolist(), tokenizer) is None


def test_only_different_wrong_edits_are_kept_and_survive_the_file(corpus: list[Function], tmp_path: Path) -> None:
    broken = _broken(corpus)
    line = broken.edit.old.split("\n")[0]
    applied, missed = Edit(line, line + " "), Edit("not there", "x")
    found = tries.tried(broken, [None, broken.edit, missed, applied, missed])
    assert found == tries.Tried(broken, (missed, applied))
    tries.save([found], tmp_path / "tries.json")
    assert tries.load(tmp_path / "tries.json") == [found]


def test_episodes_with_wrong_edits_are_about_the_tries(corpus: list[Function]) -> None:
    broken = _broken(corpus)
    mine = tries.Tried(broken, (Edit("my own mistake", "x"),))
    stream = repair_documents(corpus, {"recovers": 0.5, "tested": 0.5}, {"op_flip": 1.0}, random.Random(0), [mine])
    texts = [dialect.text(next(stream)) for _ in range(60)]
    recovering = [text for text in texts if "failed: " in text]
    assert recovering
    assert len(recovering) < len(texts)
    assert all("my own mistake" in text and broken.edit.new in text for text in recovering)
