"""Checks of the tokens that mean something to engines and trainers: end of a turn, padding, beginning of a text.

Two parties read a model folder: etude, which takes the end of a turn from the chat template, and stock engines and
trainers, which take it from generation_config.json, config.json and the tokenizer's configuration. Most findings here
are about the second, so they stop none of etude's stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jinja2

from etude.errors import UserError
from etude.renderers import ChatTemplate, Message, read_json
from etude.weights.preflight.findings import (
    CONFIG,
    GENERATION,
    SPECIAL_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ConfigEdit,
    Finding,
    ModelFiles,
    as_list,
    as_object,
    content,
    is_number,
    listed,
)

TURN = "Dummy turn."
USER: Message = {"role": "user", "content": "Dummy request."}
AGAIN: Message = {"role": "user", "content": "Dummy second request."}
_MARKER = re.compile(r"\s*(<[^\s<>]{1,40}>|\[/?[A-Z_]{2,20}\])")
_PADS = ("pad", "endoftext", "reserved", "extra", "unk")  # parts of the names of tokens that can pad, best first


@dataclass(frozen=True)
class TurnEnds:
    """The tokens behind an assistant's text in the chat template's conversations: at the end of a conversation
    (`last`) and before a further request (`inner`); "" for none. `text` is a marker there that is no token."""

    last: str = ""
    inner: str = ""
    text: str = ""


def turn_ends(files: ModelFiles) -> TurnEnds:
    """The ends of turns by the folder's template; none without a template, or if it fails."""
    names = sorted((token.content for token in files.added.values()), key=len, reverse=True)
    if files.template is None or not names:
        return TurnEnds()
    tokens = re.compile(r"\s*(" + "|".join(map(re.escape, names)) + ")")
    ends: list[str] = []
    text = ""
    turn: Message = {"role": "assistant", "content": TURN}
    for messages in ([USER, turn], [USER, turn, AGAIN]):
        try:
            behind = files.template.render(messages, generate=False).partition(TURN)[2]
        except jinja2.TemplateError:
            behind = ""
        match, marker = tokens.match(behind), _MARKER.match(behind)
        ends.append(match[1] if match else "")
        text = text or (marker[1] if marker and not match else "")
    return TurnEnds(ends[0], ends[1], text)


def findings(files: ModelFiles) -> Iterator[Finding]:
    """Faults and notes of the special tokens."""
    if files.tokenizer is None:
        return
    ends = turn_ends(files)
    yield from _named(files, ends)
    yield from _ids(files)
    yield from _end(files, ends)
    yield from _pad(files, ends)
    yield from _bos(files)
    yield from _flags(files, ends)


def _named(files: ModelFiles, ends: TurnEnds) -> Iterator[Finding]:
    """Tokens that a configuration names and the tokenizer lacks, or that two files name differently."""
    pad = _spare(files, ends)
    for kind, name in (("eos_token", "end-token"), ("bos_token", "bos-token"), ("pad_token", "pad-token")):
        token = files.token(kind)
        if token is not None and token not in files.vocabulary:
            right = {"eos_token": ends.last or None, "bos_token": None, "pad_token": pad}[kind]
            yield Finding(
                name,
                "fault",
                f"{TOKENIZER_CONFIG} names {kind} {token!r}, which the tokenizer lacks: stock trainers would add it "
                "with an id that has no embedding",
                _naming(files, kind, right) if kind != "eos_token" or right else (),
            )
        elif kind in files.special_map and (other := content(files.special_map[kind])) != token:
            yield Finding(
                name,
                "fault",
                f"{TOKENIZER_CONFIG} names {kind} {token!r} and {SPECIAL_MAP} {other!r}: engines read the one or the "
                "other",
                (ConfigEdit(SPECIAL_MAP, (kind,), token),),
            )


def _naming(files: ModelFiles, kind: str, token: str | None) -> tuple[ConfigEdit, ...]:
    """The edits that name a token in both configurations of the tokenizer."""
    also = (ConfigEdit(SPECIAL_MAP, (kind,), token),) if kind in files.special_map else ()
    return (ConfigEdit(TOKENIZER_CONFIG, (kind,), token), *also)


def _ids(files: ModelFiles) -> Iterator[Finding]:
    """Ids of ends and beginnings that no token has, and two files that give an id to different tokens."""
    known = {*files.vocabulary.values()}
    for file, values in ((CONFIG, {**files.config, **files.text}), (GENERATION, files.generation)):
        for key, kind in (("eos_token_id", "eos_token"), ("bos_token_id", "bos_token")):
            ids = files.ids(values.get(key))
            if not (wrong := [each for each in ids if not is_number(each) or each not in known]):
                continue
            own = files.vocabulary.get(files.token(kind) or "")
            kept = [each for each in ids if each not in wrong] or ([] if own is None else [own])
            value = None if not kept else kept if len(kept) > 1 else kept[0]
            edits = files.edits_of_config(key, value) if file == CONFIG else (ConfigEdit(file, (key,), value),)
            yield Finding(
                "token-ids",
                "fault",
                f"{file} has {key} = {listed(wrong)}, an id that no token of the tokenizer has",
                edits,
            )
    decoder = files.decoder
    shown = {number: content(token) or "" for number, token in decoder.items()}
    wrong = [number for number, name in shown.items() if files.vocabulary.get(name, int(number)) != int(number)]
    if wrong:
        right = {number: token for number, token in decoder.items() if number not in wrong}
        right |= {str(files.vocabulary[shown[number]]): decoder[number] for number in wrong}
        yield Finding(
            "token-ids",
            "fault",
            f"{TOKENIZER_CONFIG} gives {shown[wrong[0]]!r} the id {wrong[0]}, and {TOKENIZER} the id "
            f"{files.vocabulary[shown[wrong[0]]]}",
            (ConfigEdit(TOKENIZER_CONFIG, ("added_tokens_decoder",), right),),
        )


def _end(files: ModelFiles, ends: TurnEnds) -> Iterator[Finding]:
    """Whether stock engines stop where the template ends a turn."""
    by_file = {
        CONFIG: files.ids(files.of_config("eos_token_id")),
        GENERATION: files.ids(files.generation.get("eos_token_id")),
    }
    where = GENERATION if by_file[GENERATION] else CONFIG
    stops = [each for each in by_file[where] if is_number(each)]
    names = [files.names.get(each) for each in stops]
    ordinary = [name for each, name in zip(stops, names, strict=True) if name is not None and each not in files.added]
    wanted = [end for end in (ends.last, ends.inner) if end]
    if ends.text and not wanted:
        yield Finding(
            "end-token",
            "fault",
            f"the chat template ends a turn with {ends.text!r}, which is no token of the tokenizer, so that engines "
            "cannot stop there: use the tokenizer and the template of one model",
        )
    missed = bool(wanted) and not {*wanted} & {*names}
    if missed and not ends.last:  # only the next message ends a turn, so the end of the text may, too
        shown = ", ".join(map(repr, filter(None, names))) or "nothing"
        yield Finding(
            "end-token",
            "note",
            f"the chat template has no token at the end of a turn but {wanted[0]!r} of the next one, and {where} ends "
            f"at {shown}: stock engines run on if the model writes the former",
            _ending(files, wanted, stops),
        )
    elif missed:
        shown = ", ".join(repr(name) for name in names if name) or "nothing"
        yield Finding(
            "end-token",
            "fault",
            f"the chat template ends a turn with {ends.last!r}, and {where} ends it with {shown}: stock engines would "
            "not stop",
            _ending(files, wanted, stops),
        )
    elif ordinary:
        yield Finding(
            "end-token",
            "fault",
            f"{where} ends a text at {ordinary[0]!r}, an ordinary token: stock engines would stop inside of words",
            _ending(files, wanted or [files.token("eos_token") or ""], stops),
        )


def _ending(files: ModelFiles, wanted: list[str], stops: list[int]) -> tuple[ConfigEdit, ...]:
    """The edits by which every reader ends a turn at the wanted tokens; special tokens that ended it before stay."""
    ids = [files.vocabulary[name] for name in dict.fromkeys(wanted) if name in files.vocabulary]
    if not ids:
        return ()
    kept = [each for each in stops if each in files.added and each not in ids]
    both = [*ids, *kept]
    edits = (ConfigEdit(GENERATION, ("eos_token_id",), both if len(both) > 1 else both[0]),)
    if files.of_config("eos_token_id") is not None:
        edits += files.edits_of_config("eos_token_id", ids[0])
    return edits + _naming(files, "eos_token", wanted[0])


def _pad(files: ModelFiles, ends: TurnEnds) -> Iterator[Finding]:
    """Padding that has no embedding, or that stock trainers cannot tell from the end of a turn."""
    spare = _spare(files, ends)
    number = None if spare is None else files.vocabulary[spare]
    generated = (ConfigEdit(GENERATION, ("pad_token_id",), number),) if "pad_token_id" in files.generation else ()
    edits = (*files.edits_of_config("pad_token_id", number), *generated, *_naming(files, "pad_token", spare))
    rows = files.rows
    for file, value in ((CONFIG, files.of_config("pad_token_id")), (GENERATION, files.generation.get("pad_token_id"))):
        if value is not None and not (is_number(value) and value >= 0 and (rows is None or value < rows)):
            yield Finding(
                "pad-token",
                "fault",
                f"{file} has pad_token_id = {value!r}, and the embeddings have {rows} rows",
                edits,
                stops=file == CONFIG,
            )
            return
    named = files.token("pad_token")
    numbers = files.ids(files.of_config("pad_token_id"))
    pads = {named} | {files.names.get(each) for each in numbers if is_number(each)}
    if shared := ({ends.last, ends.inner} - {""}) & pads:
        yield Finding(
            "pad-token",
            "note",
            f"padding is {shared.pop()!r}, the end of a turn: stock trainers that leave padding out of the loss never "
            "teach the model to end one",
            () if spare is None else edits,
        )
    elif pads == {None}:
        yield Finding("pad-token", "note", "no token for padding is named: stock trainers ask for one")


def _spare(files: ModelFiles, ends: TurnEnds) -> str | None:
    """A special token that can pad: the template does not write it, and nothing ends or begins with it."""
    taken = {ends.last, ends.inner, files.token("eos_token"), files.token("bos_token")}
    source = "" if files.template is None else files.template.source
    free = [t.content for t in files.added.values() if t.special and t.content not in taken and t.content not in source]
    ranks = {name: next((i for i, part in enumerate(_PADS) if part in name.lower()), len(_PADS)) for name in free}
    return min(free, key=lambda name: (ranks[name], name != files.token("pad_token")), default=None)


def _bos(files: ModelFiles) -> Iterator[Finding]:
    """A beginning of the text that is there twice."""
    bos, tokenizer = files.token("bos_token"), files.tokenizer
    number = files.vocabulary.get(bos or "")
    if bos is None or number is None or tokenizer is None:
        return
    encoded = tokenizer.encode("a", add_special_tokens=True).ids
    if encoded[:2] == [number, number]:
        yield Finding(
            "doubled-bos",
            "fault",
            f"the tokenizer puts {bos!r} before a text twice ({TOKENIZER}, post_processor)",
            (ConfigEdit(TOKENIZER, ("post_processor",), _once(files, bos)),),
        )
    try:
        text = "" if files.template is None else files.template.render([USER], generate=True)
    except jinja2.TemplateError:
        return
    if re.match(rf"\s*{re.escape(bos)}\s*{re.escape(bos)}", text):
        yield Finding(
            "doubled-bos",
            "fault",
            f"the chat template begins with {bos!r} twice",
            _template_once(files, bos),
            stops=True,
        )
    elif text.startswith(bos) and encoded[:1] == [number]:
        yield Finding(
            "doubled-bos",
            "note",
            f"the chat template writes {bos!r} and the tokenizer adds it, too: texts that the template has rendered "
            "must be encoded with add_special_tokens=False",
        )


def _once(files: ModelFiles, bos: str) -> Any:
    """The tokenizer's post-processor, with the first of equal beginnings alone."""

    def begins(part: Any) -> bool:
        return as_object(as_object(part).get("SpecialToken")).get("id") == bos

    def without_doubles(part: Any) -> Any:
        parts = as_list(part)
        kept = [each for i, each in enumerate(parts) if not (i and begins(each) and begins(parts[i - 1]))]
        if isinstance(part, list):
            return [without_doubles(each) for each in kept]
        return (
            {key: without_doubles(each) for key, each in as_object(part).items()} if part == as_object(part) else part
        )

    made = without_doubles(read_json(files.folder / TOKENIZER).get("post_processor"))
    parts = as_list(as_object(made).get("processors"))
    if adding := [i for i, part in enumerate(parts) if bos in as_object(as_object(part).get("special_tokens"))]:
        made["processors"] = [part for i, part in enumerate(parts) if i not in adding[1:]]
    return made


def _template_once(files: ModelFiles, bos: str) -> tuple[ConfigEdit, ...]:
    """The edits that take one of two beginnings out of the template; none if its conversations would change else."""
    assert files.template is not None
    source, right = files.template.source, files.template.render([USER], generate=True).replace(bos, "", 1)
    variables = {"bos_token": bos, "eos_token": files.token("eos_token"), "pad_token": files.token("pad_token")}
    for match in re.finditer(rf"\{{\{{-?\s*bos_token\s*-?\}}\}}|bos_token\s*\+|{re.escape(bos)}", source):
        shorter = source[: match.start()] + source[match.end() :]
        try:
            same = ChatTemplate(shorter, variables, "").render([USER], generate=True) == right
        except (UserError, jinja2.TemplateError):
            continue
        if same:
            return files.edits_of_template(shorter)
    return ()


def _flags(files: ModelFiles, ends: TurnEnds) -> Iterator[Finding]:
    """Ends of turns that the tokenizer does not mark as special."""
    named = {content(value) for key, value in files.tokenizer_config.items() if key.endswith("_token")}
    plain = {
        number: token.content
        for number, token in files.added.items()
        if not token.special and token.content in {ends.last, ends.inner} - named
    }
    if not plain:
        return
    rows = read_json(files.folder / TOKENIZER).get("added_tokens", [])
    edits = [
        ConfigEdit(TOKENIZER, ("added_tokens", i, "special"), True) for i, row in enumerate(rows) if row["id"] in plain
    ]
    decoder = files.decoder
    edits += [
        ConfigEdit(TOKENIZER_CONFIG, ("added_tokens_decoder", key, "special"), True)
        for key in decoder
        if int(key) in plain
    ]
    yield Finding(
        "special-tokens",
        "fault",
        f"{listed(map(repr, plain.values()))} ends a turn and is not marked as special: engines leave it in texts",
        tuple(edits),
    )
