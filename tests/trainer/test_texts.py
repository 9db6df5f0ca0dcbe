"""Texts and fill-in-the-middle in the tokens of a folder's tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, processors

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


def test_texts_and_fim_begin_with_the_tokens_that_the_tokenizer_puts_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(big_tokenizer(1300).to_str())
    first = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", first)]
    )
    words = TextEncoder(write_model(tmp_path / "base", tokenizer, None))
    prefix = tokenizer.token_to_id("<|fim_prefix|>")
    assert words.text("a")[0].tolist() == tokenizer.encode("a").ids
    assert words.middle("a", "c", "b")[0].tolist()[:2] == [first, prefix]
