from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.make_nano import tokenizer as bpe
from models.make_nano.tokenizer import save as save_tokenizer
from tokenizers import Tokenizer

from etude.corpus.dialect import SPECIAL_IDS, SPECIALS
from etude.renderers import PlainEncoder
from etude.renderers.compact import CompactRenderer
from tests.corpus.conftest import SOURCE


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return bpe.train([SOURCE] * 3, 320)


def test_specials_have_the_first_ids(tokenizer: Tokenizer) -> None:
    assert len(SPECIALS) == 32
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == list(range(32))


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_any_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(PlainEncoder(tokenizer).encode(text), skip_special_tokens=False) == text


def test_text_cannot_forge_a_special_token(tokenizer: Tokenizer) -> None:
    ids = PlainEncoder(tokenizer).encode("".join(SPECIALS))
    assert min(ids) >= len(SPECIALS)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(SPECIALS)


def test_a_line_has_the_same_tokens_in_a_file_and_alone(tokenizer: Tokenizer) -> None:
    lines = ["def f(x):", "    if x:", "        return x", "    return None"]
    plain = PlainEncoder(tokenizer)
    joined = plain.encode(lines[0])
    for line in lines[1:]:
        joined += plain.encode("\n") + plain.encode(line)
    assert plain.encode("\n".join(lines)) == joined


def test_saved_folder_loads_and_its_template_writes_the_dialect(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path, 512)
    assert (tmp_path / "chat_template.jinja").is_file()
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (SPECIAL_IDS["<|end|>"], SPECIAL_IDS["<|pad|>"])
    call = {"type": "function", "function": {"name": "edit", "arguments": {"old": "a\n", "new": "b"}}}
    test = {"type": "function", "function": {"name": "test", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Fix `f` in a.py\ndef f():\n    return a"},
        {"role": "assistant", "content": "", "tool_calls": [call, test]},
        {"role": "tool", "content": "ok\npassed"},
    ]
    rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|user|>Fix `f` in a.py\ndef f():\n    return a<|end|>"
        "<|assistant|><|call|>edit<|arg|>a\n<|arg|>b<|call|>test<|end|><|tool|>ok\npassed<|end|><|assistant|>"
    )
    ids = CompactRenderer(bpe.load(tmp_path)).prompt(messages)
    assert loaded(rendered, add_special_tokens=False)["input_ids"] == ids


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        bpe.train(["x"], 100)
