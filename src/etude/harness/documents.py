"""The open file, and the files and matches that an agent reads, as documents before the conversation.

docs/documents.md has the idea and its figures.

A document is computed once for all episodes that show the same text, so a file is cut where its top-level statements
end: a task that breaks one function leaves all other pieces of its file equal to those of every other task.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.code import first_line_of, parse, parsed_lines
from etude.harness.chunks import DEFINITIONS
from etude.records import Focus, ToolCall
from etude.renderers import TITLE, one_line

MIN_RESULT = 64  # tokens; a shorter result costs less as text than as a new segment
_CHARACTERS = 12  # of a token at most, as a rule: pieces that cannot fit are not encoded

Encode = Callable[[str, str], list[int]]  # title, text -> ids of the document


@dataclass(frozen=True)
class FilePiece:
    """Lines of a file, 1-based and inclusive; `first` is the line of the statement itself, below its comments."""

    first: int
    last: int
    text: str


def pieces(text: str) -> list[FilePiece]:
    """A file cut into its top-level functions and classes, and the runs of other statements between them. Together they
    are all its lines but blank ones at the ends. One piece if it does not parse as Python."""
    lines = parsed_lines(text)
    cuts = [(first, last) for first, last in _statements(text) if last <= len(lines)] or [(1, len(lines))]
    cuts[-1] = cuts[-1][0], len(lines)
    parts, begin = [], 1
    for first, last in cuts:
        body = "".join(lines[begin - 1 : last]).strip("\r\n")
        if body.strip():
            parts.append(FilePiece(first, last, body))
        begin = last + 1
    return parts


def _statements(text: str) -> list[tuple[int, int]]:
    """First and last line of every definition, and of every run of other statements."""
    tree = parse(text.removeprefix("\ufeff"))
    spans: list[tuple[int, int]] = []
    joins = False
    for node in tree.body if tree is not None else ():
        first = first_line_of(node)
        last = node.end_lineno or node.lineno
        if spans and (first <= spans[-1][1] or (joins and not isinstance(node, DEFINITIONS))):
            spans[-1] = spans[-1][0], max(spans[-1][1], last)
        else:
            spans.append((first, last))
        joins = not isinstance(node, DEFINITIONS)
    return spans


def open_file(text: str, focus: Focus, encode: Encode, room: int, *, shown: bool) -> list[list[int]]:
    """The file in focus as documents of at most `room` tokens, in its order; the pieces nearest to the focus first get
    a place. `shown`: the prompt shows the focus itself."""
    inside = [p for p in pieces(text) if not (shown and focus.first_line <= p.first and p.last <= focus.last_line)]
    near = sorted(inside, key=lambda p: max(p.first - focus.last_line, focus.first_line - p.last, 0))
    chosen: dict[int, list[int]] = {}
    for piece in near:
        if len(piece.text) > _CHARACTERS * room:
            continue
        ids = encode(focus.path, piece.text)
        if len(ids) <= room:
            chosen[piece.first] = ids
            room -= len(ids)
    return [chosen[first] for first in sorted(chosen)]


def results_as_documents(
    calls: Sequence[ToolCall], results: Sequence[str], focus: Focus, encode: Encode, known: Sequence[list[int]]
) -> tuple[list[str], list[list[int]]]:
    """The results with pointers in place of the long ones, and the documents for those that are not `known` yet."""
    shown, new = list(results), list[list[int]]()
    for number, (call, result) in enumerate(zip(calls, results, strict=True)):
        title = title_of(call, focus)
        if not title or result.startswith("error: "):
            continue
        document = encode(title, result)
        if len(document) >= MIN_RESULT:
            shown[number] = f"[see document {title}]"
            if document not in (*known, *new):
                new.append(document)
    return shown, new


def title_of(call: ToolCall, focus: Focus) -> str | None:
    """The title of a call's result as a document; None if the result is always text."""
    arguments = call.arguments
    if arguments is None or call.name not in ("read", "grep"):
        return None
    path = arguments.get("path", focus.path if call.name == "read" else "")
    if call.name == "read":
        offset = arguments.get("offset", 1)
        return one_line(f"{path}" if offset == 1 else f"{path} from line {offset}", TITLE)
    return one_line(f"search for {arguments.get('pattern')}" + (f" in {path}" if path else ""), TITLE)
