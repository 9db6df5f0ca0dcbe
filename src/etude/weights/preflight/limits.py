"""Checks of numbers that bound or change what a model writes: its context, and the defaults of sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from etude.weights.preflight.findings import (
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    ConfigEdit,
    Finding,
    ModelFiles,
    as_object,
    is_number,
)

_SHORT = 4096  # tokens; a conversation of an agent is longer
_UNSET = 1e15  # of model_max_length: transformers writes 1e30 where nothing is known
_SAMPLING: dict[str, tuple[Callable[[float], bool], str, tuple[float, ...]]] = {
    "temperature": (lambda x: x > 0, "above 0", (1,)),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]", (1,)),
    "top_k": (lambda x: x >= 0 and x == int(x), "a whole number from 0", (0, 50)),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]", (0,)),
    "repetition_penalty": (lambda x: x > 0, "above 0", (1,)),
    "max_new_tokens": (lambda x: x > 0, "above 0", ()),
    "max_length": (lambda x: x > 0, "above 0", ()),
}
"""Values of generation_config.json: which are right, in words, and which change nothing."""
_GREEDY = ("temperature", "top_p", "top_k", "min_p")  # without effect where nothing is sampled


def findings(files: ModelFiles) -> Iterator[Finding]:
    """Faults and notes of the context and of the defaults of sampling."""
    yield from _context(files)
    yield from _scaling(files)
    yield from _sampling(files)


def _context(files: ModelFiles) -> Iterator[Finding]:
    most, length = files.of_config("max_position_embeddings"), files.tokenizer_config.get("model_max_length")
    known: Any = length if _number(length) and 0 < length < _UNSET else None
    if most is not None and not (is_number(most) and most > 0):
        yield Finding(
            "context",
            "fault",
            f"{CONFIG} has max_position_embeddings = {most!r}, no number of tokens",
            files.edits_of_config("max_position_embeddings", int(known)) if known else (),
            stops=True,
        )
    elif length is not None and not isinstance(length, int | float):
        yield Finding(
            "context",
            "fault",
            f"{TOKENIZER_CONFIG} has model_max_length = {length!r}, no number of tokens",
            (ConfigEdit(TOKENIZER_CONFIG, ("model_max_length",), most),),
        )
    elif most is not None and known is not None and known < most / 2:
        yield Finding(
            "context",
            "fault" if known < _SHORT else "note",  # DeepSeek-R1 has 16,384 of 163,840
            f"{TOKENIZER_CONFIG} has model_max_length = {known:,} and the model {most:,} positions: stock engines and "
            "trainers cut texts at the former",
            (ConfigEdit(TOKENIZER_CONFIG, ("model_max_length",), most),),
        )
    elif most is not None and known is not None and known > most:
        yield Finding(
            "context",
            "note",
            f"{TOKENIZER_CONFIG} has model_max_length = {known:,} and the model {most:,} positions: longer texts need "
            "a scaling of positions in config.json",
        )


def _scaling(files: ModelFiles) -> Iterator[Finding]:
    most = files.of_config("max_position_embeddings")
    for key in ("rope_scaling", "rope_parameters"):
        outer = as_object(files.of_config(key))
        for part in (outer, *map(as_object, outer.values())):
            kind = part.get("rope_type", part.get("type", "default"))
            first, factor = part.get("original_max_position_embeddings"), part.get("factor")
            if kind == "default":
                if factor is not None and not {"rope_type", "type"} & part.keys():
                    sentence = f"{CONFIG} has {key}.factor = {factor!r} without a rope_type: no position is scaled"
                    yield Finding("context", "fault", sentence)
                continue
            if factor is not None and not (_number(factor) and factor >= 1):
                yield Finding(
                    "context", "fault", f"{CONFIG} has {key}.factor = {factor!r}, and positions are scaled by 1 or more"
                )
            elif is_number(first) and is_number(most) and first > most:
                yield Finding(
                    "context",
                    "fault",
                    f"{CONFIG} scales positions of {first:,} tokens ({key}.original_max_position_embeddings) to fewer, "
                    f"max_position_embeddings = {most:,}: engines take one or the other as the context",
                    files.edits_of_config("max_position_embeddings", first),
                )


def _sampling(files: ModelFiles) -> Iterator[Finding]:
    held = {name: files.generation[name] for name in _SAMPLING if files.generation.get(name) is not None}
    right = {name: _number(value) and _SAMPLING[name][0](value) for name, value in held.items()}
    for name in (name for name, ok in right.items() if not ok):
        yield Finding(
            "generation-config",
            "fault",
            f"{GENERATION} has {name} = {held[name]!r}, which must be {_SAMPLING[name][1]}",
            (ConfigEdit(GENERATION, (name,), None),),
        )
    changing = {n: v for n, v in held.items() if right[n] and _SAMPLING[n][2] and v not in _SAMPLING[n][2]}
    if files.generation.get("do_sample") is False and (idle := [name for name in _GREEDY if name in changing]):
        yield Finding(
            "generation-config",
            "fault",
            f"{GENERATION} has do_sample = false beside {idle[0]} = {changing[idle[0]]}: engines differ in which they "
            "obey, and trainers refuse to save it",
            (ConfigEdit(GENERATION, ("do_sample",), True),),
        )
    elif changing:
        shown = ", ".join(f"{name} = {value}" for name, value in changing.items())
        yield Finding(
            "generation-config",
            "note",
            f"{GENERATION} has {shown}: stock engines sample so by default, and training samples from the "
            "distribution itself",
        )


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
