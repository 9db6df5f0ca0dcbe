"""Checks of the weights: what the headers of their files tell, and, with `whole`, the numbers themselves."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from etude.models import INDEX
from etude.weights.preflight.findings import CONFIG, ConfigEdit, Finding, HeaderEntry, ModelFiles, is_number, listed

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)\.|^(?:output|head)\.")
_MEDIUM = re.compile(r"^<.*(image|audio|video|vision).*>$")  # a token that stands for what is no text
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
}
_BLOCK = 1 << 24  # numbers read at a time
_SAMPLED = 128  # rows of two matrices that are compared where not all are


def findings(files: ModelFiles, *, whole: bool) -> Iterator[Finding]:
    """Faults of the stored tensors. With `whole` all numbers are read, else some hundred rows at most."""
    if not files.tensors:
        return
    yield from _index(files)
    yield from _layers(files)
    yield from _experts(files)
    yield from _embedding(files)
    yield from _tied(files, whole)
    if whole:
        yield from _finite(files)


def _index(files: ModelFiles) -> Iterator[Finding]:
    path = files.folder / INDEX
    if files.doubled:
        yield Finding(
            "index",
            "fault",
            f"{listed(files.doubled)} is stored in two files, and engines take the one or the other: fetch the model "
            "again",
            stops=True,
        )
        return
    if not path.is_file():
        return
    named = json.loads(path.read_text())["weight_map"]
    right = {name: stored.file.name for name, stored in files.tensors.items()}
    if wrong := sorted(name for name in {*named, *right} if named.get(name) != right.get(name)):
        yield Finding(
            "index",
            "fault",
            f"{INDEX} does not name the tensors that are in the files ({listed(wrong)})",
            (ConfigEdit(INDEX, ("weight_map",), right),),
            stops=True,
        )


def _layers(files: ModelFiles) -> Iterator[Finding]:
    count = files.of_config("num_hidden_layers")
    present = {int(match[1]) for name in files.tensors if (match := _LAYER.search(name))}
    if is_number(count) and present and (missing := sorted(set(range(count)) - present)):
        yield Finding(
            "tensors",
            "fault",
            f"{CONFIG} says {count} layers, and the files have no tensor of layer {listed(missing)}: fetch the model "
            "again",
            stops=True,
        )


def _experts(files: ModelFiles) -> Iterator[Finding]:
    """Tensors of single experts that other experts of the layer have."""
    held = defaultdict[tuple[str, str], set[int]](set)
    for match in filter(None, map(_EXPERT.match, files.tensors)):
        held[match[1], match[3]].add(int(match[2]))
    count = max((max(numbers) + 1 for numbers in held.values()), default=0)
    lost = [f"{a}{n}{b}" for (a, b), numbers in sorted(held.items()) for n in sorted(set(range(count)) - numbers)]
    if lost:
        yield Finding(
            "tensors", "fault", f"the files lack tensors of experts ({listed(lost)}): fetch the model again", stops=True
        )


def _embedding(files: ModelFiles) -> Iterator[Finding]:
    stored, size = files.embedding, files.of_config("vocab_size")
    if stored is None:
        return
    if is_number(size) and size != stored.shape[0]:
        yield Finding(
            "vocabulary",
            "fault",
            f"{CONFIG} says vocab_size = {size}, and the embeddings have {stored.shape[0]} rows",
            files.edits_of_config("vocab_size", stored.shape[0]),
            stops=True,
        )
    most = max(files.vocabulary.values(), default=-1)
    if most >= stored.shape[0]:
        beyond = [name for name, number in files.vocabulary.items() if number >= stored.shape[0]]
        if all(_MEDIUM.search(name) for name in beyond) and not any(
            name in (files.template.source if files.template else "") for name in beyond
        ):
            yield Finding(
                "vocabulary",
                "note",
                f"{listed(beyond)} of the tokenizer has no embedding: this model of text shares its tokenizer with one "
                "of other media",
            )
            return
        yield Finding(
            "vocabulary",
            "fault",
            f"the tokenizer has ids up to {most}, and the embeddings have {stored.shape[0]} rows ({listed(beyond)} "
            "have none): use the tokenizer that belongs to these weights, or enlarge and train the embeddings",
            stops=True,
        )


def _tied(files: ModelFiles, whole: bool) -> Iterator[Finding]:
    key, embedding = "tie_word_embeddings", files.embedding
    tied = files.config.get(key, files.text.get(key))
    heads = sorted((name for name in files.tensors if _HEAD.search(name)), key=len)
    if embedding is None or not isinstance(tied, bool):
        return
    if not tied and not heads:
        yield Finding(
            "tied",
            "fault",
            f"{CONFIG} says {key} = false, and no output embeddings (lm_head) are stored: engines would invent them",
            files.edits_of_config(key, True),
            stops=True,
        )
    head = files.tensors.get(heads[0]) if heads else None
    if tied and head is not None and heads[0].endswith(".weight") and not _same(embedding, head, whole):
        yield Finding(
            "tied",
            "fault",
            f"{CONFIG} says {key} = true, and {heads[0]} is stored with other values than the embeddings: some engines "
            "take it and others do not",
            files.edits_of_config(key, False),
            stops=True,
        )


def _same(one: HeaderEntry, other: HeaderEntry, whole: bool) -> bool:
    """Whether two matrices have the same values, by all rows or by some of each part."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows, width = one.shape[0], (one.stop - one.start) // one.shape[0]
    step = max(1, _BLOCK // width) if whole else 1
    starts = range(0, rows, step) if whole else np.unique(np.linspace(0, rows - 1, _SAMPLED).astype(int)).tolist()
    return all(
        np.array_equal(_bytes(one, start * width, step * width), _bytes(other, start * width, step * width))
        for start in starts
    )


def _finite(files: ModelFiles) -> Iterator[Finding]:
    broken = [name for name, stored in sorted(files.tensors.items()) if not _all_finite(stored)]
    if broken:
        yield Finding(
            "numbers",
            "fault",
            f"{len(broken)} tensors have weights that are no numbers (NaN or infinite), e.g. {listed(broken)}: fetch "
            "the model again, or take an earlier checkpoint",
            stops=True,
        )


def _all_finite(stored: HeaderEntry) -> bool:
    if stored.dtype not in _EXPONENTS:  # integers, and FP8, whose scales are checked
        return True
    kind, exponent = _EXPONENTS[stored.dtype]
    step = _BLOCK * np.dtype(kind).itemsize
    for start in range(0, stored.stop - stored.start, step):
        bits = _bytes(stored, start, step).view(kind)
        if bool(((bits & exponent) == exponent).any()):
            return False
    return True


def _bytes(stored: HeaderEntry, start: int, size: int) -> np.ndarray:
    """Bytes of a tensor from `start` on, at most `size`."""
    with stored.file.open("rb") as f:
        f.seek(stored.start + start)
        return np.frombuffer(f.read(min(size, stored.stop - stored.start - start)), np.uint8)
