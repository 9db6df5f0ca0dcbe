"""Texts and fill-in-the-middle in the tokens of a folder's tokenizer."""

from __future__ import annotations

from pathlib import Path

from etude.trainer.finetune.texts import TextEncoder
from tests.helpers.folders import big_tokenizer
from tests.helpers.speakers import write_model


def test_texts_and_fim_use_the_tokenizers_own_tokens(tmp_path: Path) -> None:
    tokenizer = big_tokenizer(1300)
    words = TextEncoder(write_model(tmp_path / "base", tokenizer, None))
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    assert words.has_middle
    code_ids, mask = words.text("# a.py\nx = 1\n")
    assert tokenizer.decode(code_ids.tolist(), skip_special_tokens=False) == "# a.py\nx = 1\n"
    assert mask.all()
    fim_ids, mask = words.middle("a", "c", "b")
    assert fim_ids[::2].tolist() == [tokenizer.token_to_id(name) for name in names]
    assert [tokenizer.decode([i]) for i in fim_ids[1::2].tolist()] == ["a", "c", "b"]
    assert mask.all()
    assert tokenizer.token_to_id("<|endoftext|>") == words.separator
    assert words.separator not in words.text("<|endoftext|> as text")[0]
