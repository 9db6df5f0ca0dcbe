"""Fill-in-the-middle in the tokens and the order of every family that has them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from etude.renderers import middle_prompt, tokens_before

FAMILIES = {
    "qwen": "<|fim_prefix|> P <|fim_suffix|> S <|fim_middle|>",
    "starcoder": "<fim_prefix> P <fim_suffix> S <fim_middle>",
    "deepseek": "<｜fim▁begin｜> P <｜fim▁hole｜> S <｜fim▁end｜>",
    "glm": "<|code_suffix|> S <|code_prefix|> P <|code_middle|>",
    "codestral": "[SUFFIX] S [PREFIX] P",
    "codellama": "▁<PRE> P ▁<SUF> S ▁<MID>",
}


def tokenizer(*names: str, begins: bool) -> Tokenizer:
    made = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(("a", "P", "S", "<s>", *names))}, unk_token="a")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", *names])
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    return made


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "with a first token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_the_tokens_and_the_order_of_the_family(family: str, begins: bool) -> None:
    words = FAMILIES[family].split()
    made = tokenizer(*(word for word in words if word not in "PS"), begins=begins)
    prompt = middle_prompt(made)
    assert prompt is not None
    assert [made.id_to_token(i) for i in prompt.ids([1], [2])] == words
    assert list(prompt.before) == tokens_before(made) == ([3] if begins else [])


def test_a_tokenizer_with_some_of_the_tokens_has_none() -> None:
    assert middle_prompt(tokenizer("<|fim_prefix|>", "<|fim_middle|>", "[PREFIX]", begins=False)) is None
