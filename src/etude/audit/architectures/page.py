"""The table of architectures as docs/models.md shows it, written between two marks of that page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from etude.audit.architectures.table import Cell, ModelRow
from etude.code import lines_of
from etude.errors import UserError

BEGIN, END = "<!-- table: etude doctor model --docs docs/models.md --templates DIR -->", "<!-- end of the table -->"
COLUMNS = {
    "rows": "trainer rows",
    "shared prompts": "shared prompts",
    "engine": "engine",
    "vLLM": "vLLM",
    "replay": "replay",
    "tools": "tools",
}
# Figures of a trial, which differ between machines.
_NUMBERS = re.compile(r" by \S+ nats in its trial, where \S+ are allowed")
_TEMPLATE = re.compile(r"^The chat template of \S+ ")
_WORDS = {"exact": "exact", "silent": "**WRONG**", "none": "-", "not run": "-"}


def markdown(table: Sequence[ModelRow]) -> str:
    """The table, and below it each sentence of refusal once, numbered."""
    lines = [f"| family | {' | '.join(COLUMNS.values())} |", f"|---{'|---' * len(COLUMNS)}|"]
    sentences: dict[str, int] = {}
    for row in table:
        shown = []
        for use in COLUMNS:
            cell = row.cells[use]
            if cell.state == "refused":
                sentence = _TEMPLATE.sub("has a chat template that ", cell.said).rpartition(f"{row.model_type} ")[2]
                sentence = _NUMBERS.sub("", sentence)
                shown.append(f"no ({sentences.setdefault(sentence, len(sentences) + 1)})")
            elif use == "tools":
                shown.append(f"`{cell.said}`" if cell.state == "exact" else _WORDS[cell.state])
            else:
                shown.append(_WORDS[cell.state])
        lines.append(f"| {row.name} (`{row.model_type}`) | {' | '.join(shown)} |")
    fill = textwrap.TextWrapper(118, subsequent_indent="   ", break_on_hyphens=False).fill
    notes = (fill(f"{n}. {sentence}") for sentence, n in sentences.items())
    return "\n".join([*lines, "", *notes])


def with_known(table: Sequence[ModelRow], text: str) -> list[ModelRow]:
    """The rows with the cells of vLLM that `text`, an older table, has, in place of those that were not measured: they
    take a server and a minute each."""
    lines = [line.strip(" |").split(" | ") for line in lines_of(text) if line.startswith("| ")]
    place = lines[0].index(COLUMNS["vLLM"]) if lines and COLUMNS["vLLM"] in lines[0] else None
    known = {} if place is None else {line[0]: line[place] for line in lines[1:]}
    notes = {n: " ".join(note.split()) for n, note in re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", text, re.M)}

    def cell(row: ModelRow) -> Cell:
        shown = known.get(f"{row.name} (`{row.model_type}`)", "")
        if row.cells["vLLM"].state != "not run" or shown in ("", _WORDS["not run"]):
            return row.cells["vLLM"]
        note = notes.get(shown.removeprefix("no (").removesuffix(")"))
        return Cell("exact") if note is None else Cell("refused", None, f"{row.model_type} {note}")

    return [replace(row, cells=row.cells | {"vLLM": cell(row)}) for row in table]


def write(page: Path, table: Sequence[ModelRow]) -> None:
    """Puts the table in place of the one in the page. Raises UserError for a page without the marks."""
    text = page.read_text("utf-8") if page.is_file() else ""
    head, begin, rest = text.partition(BEGIN)
    older, end, tail = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{page} has no place for the table: it stands between {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n{markdown(with_known(table, older))}\n{END}{tail}", "utf-8")
