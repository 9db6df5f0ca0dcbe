"""The byte-level BPE tokenizer of the nano model, and its Hugging Face folder."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from etude.corpus.dialect import SPECIALS

# Indentation and line ends are tokens of their own, so a line has the same tokens in a file and alone in an edit.
_PATTERN = r" {2,}|\n| ?_*\p{L}+| ?_+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] -%}{{- message['content'] -}}{%- endif -%}
{%- for call in message.get('tool_calls') or [] -%}
{%- set function = call.get('function') or call -%}
{{- '<|call|>' + function['name'] -}}
{%- for value in function['arguments'].values() -%}{{- '<|arg|>' -}}{{- value -}}{%- endfor -%}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer whose first ids are `SPECIALS`. Raises ValueError when the vocabulary cannot hold all bytes."""
    if vocab_size < len(SPECIALS) + 256:
        raise ValueError(f"vocab_size must be at least {len(SPECIALS) + 256} to hold the special tokens and all bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(directory: Path) -> Tokenizer:
    """The tokenizer of a model folder, to encode pieces of text."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes the tokenizer files of a Hugging Face model folder, with the chat template in chat_template.jinja."""
    # Texts for the saved tokenizer (a rendered chat template) may contain special tokens.
    tokenizer.encode_special_tokens = False
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=list(SPECIALS),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
