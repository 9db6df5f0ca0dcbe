"""Rows of the corpus in the tokens of another model: repair episodes as conversations, code and FIM as text."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from etude.corpus import chats, dialect
from etude.corpus.dialect import TextPiece, special_piece
from etude.corpus.filters import function_texts
from etude.corpus.repair_episodes import SHAPES, break_function, episode
from etude.corpus.sources import File
from etude.errors import UserError
from etude.renderers import Renderer, renderer_for
from etude.trainer.finetune import foreign_rows
from tests.corpus.test_chats import spans
from tests.helpers.folders import big_tokenizer
from tests.helpers.speakers import TEMPLATE, write_model


@pytest.fixture(scope="module", params=[72_000, pytest.param(151_936, marks=pytest.mark.slow)])
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return renderer_for(write_model(tmp_path_factory.mktemp("model"), big_tokenizer(request.param), TEMPLATE))


def test_repair_episodes_become_conversations_with_the_built_in_tools(renderer: Renderer) -> None:
    """What is learned is what the assistant says; edits name the file, and a turn with a wrong one is only seen."""
    rng = random.Random(0)
    source = "def f(items, low):\n    total = 0\n    for item in items:\n        if item > low:\n"
    source += "            total += item\n    return total"
    (function,) = function_texts(File("demo", "demo/sums.py", source))
    seen = set()
    for shape in SHAPES * 3:
        broken = break_function(function, rng)
        document = episode(broken, shape, rng) if broken else None
        if broken is None or document is None:
            continue
        seen.add(shape)
        chat = foreign_rows.conversation(document, "Work.")
        ids, mask = chats.encode_chat(chat, renderer)
        shown = "".join(text for learned, text in spans(ids, mask, renderer) if not learned)
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        turns = [ids[a:b].tolist() for a, b in pairwise(edges) if mask[a]]
        calls = [call for turn in turns for call in renderer.parse(turn).calls]
        assert calls[0].name == "read"
        assert calls[-1].name == "finish"
        edits = [call.arguments for call in calls if call.name == "edit"]
        right = {"path": broken.path, "old": broken.edit.old, "new": broken.edit.new}
        assert edits == ([] if shape == "gives_up" else [right])
        assert ("0 of 1 passed\nfailed: " in shown) == (shape in ("recovers", "no_match", "no_change", "gives_up"))
    assert seen == set(SHAPES)


def test_code_and_fim_use_the_tokenizers_own_tokens(tmp_path: Path) -> None:
    tokenizer = big_tokenizer(1300)
    folder = write_model(tmp_path / "base", tokenizer, None)
    words = foreign_rows.of_folder(folder, lambda: renderer_for(folder), "", pad=1)
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    code = special_piece("<|file|>"), TextPiece("a.py\nx = 1\n")
    parts = zip(names, ("a", "c", "b"), strict=True)
    fim = tuple(piece for name, text in parts for piece in (special_piece(name), TextPiece(text)))
    (code_ids, _), (fim_ids, mask), (text_ids, _) = words.encode([code, fim, (TextPiece("<|endoftext|> as text"),)])
    assert tokenizer.decode(code_ids.tolist(), skip_special_tokens=False) == "# a.py\nx = 1\n"
    assert fim_ids[::2].tolist() == [tokenizer.token_to_id(name) for name in names]
    assert mask.all()
    assert tokenizer.token_to_id("<|endoftext|>") == words.separator
    assert words.separator not in text_ids
    with pytest.raises(UserError, match="no chat template"):
        words.encode([dialect.message("user", "x")])
