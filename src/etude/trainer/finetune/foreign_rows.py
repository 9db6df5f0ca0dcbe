"""Encodes training text of the corpus with the tokenizer of any Hugging Face folder.

code       begins as the tokenizer begins a text, names its file in a comment, and ends with the end of text
fim        has the tokenizer's own tokens for prefix, suffix and middle
repair     is a conversation in the model's chat template, with the built-in tools and their results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from etude.corpus import SPECIALS, Chat, Encoded, TextPiece, encode_chat, vocabulary
from etude.corpus.dialect import Document, read_prompt, text
from etude.corpus.vocabulary import Vocabulary
from etude.errors import UserError
from etude.harness import SYSTEM
from etude.renderers import COMPACT_PARAMETERS, ROLES, SCHEMAS, PlainEncoder, Renderer, load_tokenizer, read_json

FIM = (  # prefix, suffix, middle: Qwen and StarCoder 2; StarCoder; DeepSeek; GLM; Codestral and CodeLlama
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>")


class ForeignText:
    """Encodes documents of the corpus for a tokenizer without the compact dialect. `renderer` raises UserError if the
    folder cannot be used in conversations; `system` is the system message of a conversation."""

    def __init__(self, folder: Path, renderer: Callable[[], Renderer], system: str) -> None:
        self._folder, self._renderer, self._system = folder, renderer, system
        self._tokenizer = load_tokenizer(folder)
        self._plain = PlainEncoder(self._tokenizer)
        self.separator = text_end(self._tokenizer, folder)
        # Tokens that the tokenizer puts before a text.
        alone, begun = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        self._before = begun[: begun.index(alone[0])] if alone and alone[0] in begun else []

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Ids and masks of documents. Raises UserError if the tokenizer lacks the tokens for one of them."""
        return [self._one(document) for document in documents]

    def _one(self, document: Document) -> Encoded:
        if not document[0].special:
            return self._learned([*self._before, *self._plain.encode(text(document))])
        if document[0].text == "<|file|>":
            return self._learned([*self._before, *self._plain.encode(f"# {document[1].text}")])
        if document[0].text == "<|fim_prefix|>":
            parts = zip(self._fim(), document[1::2], strict=True)
            return self._learned([i for token, piece in parts for i in (token, *self._plain.encode(piece.text))])
        ids, mask = encode_chat(conversation(document, self._system), self._renderer())
        # If all of a document is learned, as in mid-training, the questions and the results are learned as well.
        return (ids, np.ones_like(mask)) if all(piece.labelled for piece in document) else (ids, mask)

    def _learned(self, ids: list[int]) -> Encoded:
        return np.array(ids, dtype=np.uint32), np.ones(len(ids), dtype=np.uint8)

    def _fim(self) -> tuple[int, ...]:
        for names in FIM:
            ids = [i for name in names if (i := self._tokenizer.token_to_id(name)) is not None]
            if len(ids) == len(names):
                return tuple(ids)
        raise UserError(f"the tokenizer of {self._folder} has no tokens for fill-in-the-middle: set mix.fim to 0")


def of_folder(folder: Path, renderer: Callable[[], Renderer], system: str, pad: int) -> Vocabulary:
    """The vocabulary of a Hugging Face folder; see `ForeignText`."""
    words = ForeignText(folder, renderer, system)
    return Vocabulary(words.encode, pad, words.separator, together=16)


def vocabulary_of(model: Path, pad: int, renderer: Callable[[], Renderer]) -> Vocabulary:
    """The vocabulary of a folder's tokenizer for the corpus. `renderer` is called for conversations only: a base model
    has none."""
    tokenizer = load_tokenizer(model)
    if all(tokenizer.token_to_id(token) is not None for token in SPECIALS[:13]):
        return vocabulary.compact(tokenizer)
    return of_folder(model, renderer, SYSTEM, pad)


def text_end(tokenizer: Tokenizer, folder: Path) -> int:
    """The token that ends a text, which may differ from the one that ends a turn. Raises UserError if there is none."""
    own = read_json(folder / "tokenizer_config.json").get("eos_token")
    names = (*_TEXT_ENDS, own["content"] if isinstance(own, dict) else own)
    ids = [tokenizer.token_to_id(name) for name in names if name]
    end = next((i for i in ids if i is not None), None)
    if end is None:
        raise UserError(f"the tokenizer of {folder} has no token that ends a text (`eos_token`)")
    return end


def conversation(document: Document, system: str) -> Chat:
    """A repair episode of the corpus with the built-in tools: the file is read first, and edits name the file. A turn
    with a wrong attempt is not labelled at all."""
    (_, request), *turns = _turns(document)
    path, source = read_prompt(request[0].text)
    lines = source.split("\n")
    task = request[0].text.partition("\n")[0]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"{task}\n\nOpen in the editor: {path}, lines 1 to {len(lines)}."},
        _assistant([("read", {"path": path})], 0, labelled=True),
        _result(0, "read", "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, 1))),
    ]
    calls: list[tuple[str, dict[str, str]]] = []
    first = 1  # number of the next call
    for role, pieces in turns:
        if role == "assistant":
            calls = _calls(pieces, path)
            messages.append(_assistant(calls, first, labelled=all(piece.labelled for piece in pieces)))
        else:
            results = enumerate(zip(calls, pieces[0].text.split("\n"), strict=True), first)
            messages += [_result(i, name, _shown(name, line, path)) for i, ((name, _), line) in results]
            first += len(calls)
    return Chat(task, tuple(messages), SCHEMAS)


def _turns(document: Document) -> list[tuple[str, list[TextPiece]]]:
    """Role and pieces of every message, without the tokens around the message."""
    turns: list[tuple[str, list[TextPiece]]] = []
    for piece in document:
        if piece.special and piece.text.strip("<|>") in ROLES:
            turns.append((piece.text.strip("<|>"), []))
        elif not (piece.special and piece.text == "<|end|>"):
            turns[-1][1].append(piece)
    return turns


def _calls(pieces: Sequence[TextPiece], path: str) -> list[tuple[str, dict[str, str]]]:
    """Names and arguments of the calls of a turn; an edit gets the path of the file."""
    parts: list[list[str]] = []
    for piece in pieces:
        if piece.special and piece.text == "<|call|>":
            parts.append([])
        elif not piece.special:
            parts[-1].append(piece.text)
    calls = [(name, dict(zip(COMPACT_PARAMETERS[name], values, strict=True))) for name, *values in parts]
    return [(name, {"path": path} | arguments if name == "edit" else arguments) for name, arguments in calls]


def _assistant(calls: Sequence[tuple[str, dict[str, str]]], first: int, *, labelled: bool) -> dict[str, Any]:
    made = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls, first)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, "weight": int(labelled)}


def _result(number: int, name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": content}


def _shown(name: str, line: str, path: str) -> str:
    """A result line of the compact dialect in the words of the built-in tool `name`."""
    if name == "undo":
        return f"undone: {path}"
    return line if name != "test" else "1 of 1 passed" if line == "passed" else f"0 of 1 passed\n{line}"
