"""Grades of an applied edit, without a judge: exact, equal up to white space, equal syntax, by its tests, or wrong."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from enum import StrEnum

from etude.code import lines_of, same_syntax, shown_lines


class EditGrade(StrEnum):
    """Grades in the order in which they are tried; the first that applies counts."""

    EXACT = "exact"  # every byte
    WHITESPACE = "whitespace"  # up to blanks at line ends and final newlines
    SYNTAX = "syntax"  # equal syntax trees and comments
    TESTS = "tests"  # the edit's tests pass, and nothing outside its hunks changed; see evals/tested_edits.py
    FAIL = "fail"


def grade_edit(result: str, answer: str | None, language: str) -> EditGrade:
    """The grade of `answer` (None: unusable) against the right `result`; no tests are run."""
    if answer is None:
        return EditGrade.FAIL
    if answer == result:
        return EditGrade.EXACT
    if _trimmed(answer) == _trimmed(result):
        return EditGrade.WHITESPACE
    return EditGrade.SYNTAX if same_syntax(answer, result, language) else EditGrade.FAIL


def lines_changed_outside(file: str, result: str, answer: str) -> int:
    """The number of changes in `answer` outside the edit's hunks: lines lost or changed, and runs of inserted lines."""
    before = shown_lines(file)
    wanted, made = _touched(before, shown_lines(result)), _touched(before, shown_lines(answer))
    allowed = {line for start, end in wanted for line in range(start - 1, end + 1)}
    lines = {line for start, end in made for line in range(start, end)}
    inserted = {start for start, end in made if start == end}
    # Lines inserted beside a hunk count as part of it, since a diff may assign equal lines to either.
    return len(lines - allowed) + len({at for at in inserted if at not in allowed and at - 1 not in allowed})


def _touched(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    codes = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(start, end) for tag, start, end, _, _ in codes if tag != "equal"]


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in lines_of(text.rstrip())]
