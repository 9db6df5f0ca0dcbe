"""Finds the file and the sketch of an edit in the text of a prompt, for engines that pass only the prompt to a drafter.

It recognises the tags of `etude.edits.formats` (also without an instruction, as others use them) and fenced code
blocks: the longest is the file, the last other block with a marker for omitted code is the sketch. No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from etude.code import lines_of, shown_lines
from etude.edits import is_marker

_UPDATE = re.compile(r"<update((?:-[0-9a-f]{6})?)>")
_TAGS = 8  # number of last tags that are tried; each takes a scan
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})([^`]*)")


@dataclass(frozen=True)
class ApplyPrompt:
    """`code` is to be rewritten with `update` (may be empty) applied, between `opening` and `close`."""

    code: str
    update: str
    opening: str
    close: str


def parse_prompt(prompt: str) -> ApplyPrompt | None:
    """The last edit in the prompt, or None without an edit of a known form."""
    return _tagged(prompt) or _fenced(prompt)


def _tagged(prompt: str) -> ApplyPrompt | None:
    for tag in reversed(list(_UPDATE.finditer(prompt))[-_TAGS:]):
        suffix = tag.group(1)
        opening, code_close, close = f"<code{suffix}>", f"</code{suffix}>", f"</update{suffix}>"
        before = prompt[max(0, tag.start() - 64) : tag.start()]
        if not before.rstrip().endswith(code_close):
            continue
        code_end = tag.start() - len(before) + len(before.rstrip()) - len(code_close)
        # The file itself has no such tag; otherwise `formats` would have added a suffix to all tags.
        start, update_end = prompt.rfind(opening, 0, code_end), prompt.find(close, tag.end())
        if start >= 0 and update_end >= 0:
            code = prompt[start + len(opening) : code_end].removeprefix("\n")
            update = prompt[tag.end() : update_end].removeprefix("\n")
            return ApplyPrompt(code, update, f"<updated-code{suffix}>\n", f"</updated-code{suffix}>")
    return None


def _fenced(prompt: str) -> ApplyPrompt | None:
    blocks = _blocks(prompt)
    if not blocks:
        return None
    file = max(blocks, key=lambda block: len(block[2]))
    fence, language, code = file
    sketches = [text for _, _, text in blocks if text != code and any(map(is_marker, shown_lines(text)))]
    return ApplyPrompt(code, sketches[-1] if sketches else "", f"{fence}{language}\n", fence)


def _blocks(prompt: str) -> list[tuple[str, str, str]]:
    """Fence, language and text of every closed block."""
    blocks: list[tuple[str, str, str]] = []
    opened: tuple[str, str] | None = None
    lines: list[str] = []
    for line in lines_of(prompt, ends=True):
        if opened is None:
            if match := _FENCE.fullmatch(line.rstrip("\r\n")):
                opened, lines = (match.group(1), match.group(2)), []
        elif line.strip() == opened[0]:
            blocks.append((*opened, "".join(lines)))
            opened = None
        else:
            lines.append(line)
    return blocks
