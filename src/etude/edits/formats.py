"""Prompts for an apply model, and three formats of its answer: whole file, search/replace blocks, unified diff.

    <instruction>...</instruction><code> FILE </code><update> SKETCH </update>  ->  <updated-code> FILE </updated-code>

The prompt is the same for every format; the tag that opens the answer selects it. In prompt and answer a file follows
its tag and a line end, so both tokenise alike, and the closing tag ends the answer. All tags get a suffix if the texts
themselves hold one of the tags.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import unified_diff

from etude.code import lines_of
from etude.edits.sketch import edit_hunks

FORMATS = {
    "rewrite": ("updated-code", ""),
    "search-replace": (
        "edits",
        "Answer with blocks of <<<<<<< SEARCH, lines of the file that stand in it once, =======, what replaces them, "
        ">>>>>>> REPLACE.\n",
    ),
    "udiff": ("diff", "Answer with the hunks of a unified diff.\n"),
}
_BLOCK = re.compile(r"^<{7} SEARCH\n(.*?)^={7}\n(.*?)^>{7} REPLACE$", re.M | re.S)
_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
_NO_NEWLINE = "\\ No newline at end of file"


@dataclass(frozen=True)
class EditPrompt:
    """The prompt for an edit. `content` is the user's message; the answer begins with `opening`, which the model gets,
    and ends with `close`."""

    content: str
    opening: str
    close: str


def edit_prompt(file: str, sketch: str, instruction: str = "", way: str = "rewrite") -> EditPrompt:
    """The prompt for an edit. `way` is one of FORMATS."""
    suffix = _suffix(file + sketch + instruction)
    tag, sentence = FORMATS[way]
    content = (
        f"<instruction{suffix}>{instruction}</instruction{suffix}>\n"
        f"<code{suffix}>\n{file}</code{suffix}>\n<update{suffix}>\n{sketch}</update{suffix}>\n{sentence}"
    )
    return EditPrompt(content, f"<{tag}{suffix}>\n", f"</{tag}{suffix}>")


def edit_answer(file: str, result: str, way: str = "rewrite") -> str:
    """The right answer in a format of FORMATS, without its tags."""
    if way == "rewrite":
        return result
    if way == "search-replace":
        return _blocks(lines_of(file, ends=True), lines_of(result, ends=True))
    lines = unified_diff(lines_of(file, ends=True), lines_of(result, ends=True), n=3)
    shown = [line for line in lines if not line.startswith(("--- ", "+++ "))]
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}\n" for line in shown)


def read_edit_answer(file: str, text: str, way: str = "rewrite") -> str | None:
    """The whole file after an answer; None unless the answer can be applied to `file` in exactly one way."""
    if way == "rewrite":
        return text
    return _replaced(file, text) if way == "search-replace" else _patched(file, text)


def _suffix(texts: str) -> str:
    """A suffix that makes the tags differ from those in the texts; empty if the texts hold none."""
    names = ("instruction", "code", "update", *(tag for tag, _ in FORMATS.values()))
    suffix, tries = "", 0
    while any(f"<{name}{suffix}>" in texts or f"</{name}{suffix}>" in texts for name in names):
        suffix = "-" + hashlib.blake2b(f"{tries}{texts}".encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
        tries += 1
    return suffix


# --- search and replace ---------------------------------------------------------------------------------------------


def _blocks(file: Sequence[str], result: Sequence[str]) -> str:
    """One block per hunk, with enough lines around it that its text occurs once in the file."""
    whole, blocks = "".join(file), list[str]()
    done = 0  # lines of the file that an earlier block has changed
    for hunk in edit_hunks(file, result):
        size = 0
        while True:
            top, bottom = max(done, hunk.start - size), min(len(file), hunk.end + size)
            old = "".join(file[top:bottom])
            if _once(whole, old) or (top == done and bottom == len(file)):
                break
            size += 1
        new = "".join([*file[top : hunk.start], *result[hunk.low : hunk.high], *file[hunk.end : bottom]])
        blocks.append(f"<<<<<<< SEARCH\n{_ended(old)}=======\n{_ended(new)}>>>>>>> REPLACE\n")
        whole = whole.replace(old, new, 1) if old else new
        done = hunk.end
    return "".join(blocks)


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _once(text: str, old: str) -> bool:
    first = text.find(old) if old else -1
    return first >= 0 and text.find(old, first + 1) < 0 and (first == 0 or text[first - 1] == "\n")


def _replaced(file: str, text: str) -> str | None:
    blocks = _BLOCK.findall(text)
    if not blocks and text.strip():
        return None
    for old, new in blocks:
        if not old and not file:
            file = new
        elif _once(file, old):
            file = file.replace(old, new)
        elif not file.endswith("\n") and _once(file + "\n", old):
            file = (file + "\n").replace(old, new).removesuffix("\n")
        else:
            return None
    return file


# --- unified diffs --------------------------------------------------------------------------------------------------


def _patched(file: str, text: str) -> str | None:
    """Apply each hunk at the line that it names if its old lines are there, else at the one match after the last
    hunk."""
    lines, out, at = lines_of(file, ends=True), list[str](), 0
    for start, old, new in _parsed(text) or ():
        places = [i for i in range(at, len(lines) - len(old) + 1) if lines[i : i + len(old)] == old]
        named = start - 1 if old else start
        place = named if named in places else places[0] if len(places) == 1 else None
        if place is None:
            return None
        out += lines[at:place] + new
        at = place + len(old)
    if _parsed(text) is None:
        return None
    return "".join(out + lines[at:])


def _parsed(text: str) -> list[tuple[int, list[str], list[str]]] | None:
    """(first old line, old lines, new lines) of every hunk; None for a text that is not a diff."""
    parsed: list[tuple[int, list[str], list[str]]] = []
    last: list[list[str]] = []  # the sides to which the previous line belongs
    for line in lines_of(text, ends=True):
        if head := _HUNK.match(line):
            parsed.append((int(head[1]), [], []))
            continue
        if not parsed:
            return None
        _, old, new = parsed[-1]
        if line.startswith("\\"):
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
            continue
        sides = {" ": [old, new], "\n": [old, new], "-": [old], "+": [new]}.get(line[0])
        if sides is None:
            return None
        body = line if line == "\n" else line[1:]
        for side in sides:
            side.append(body)
        last = sides
    return parsed
