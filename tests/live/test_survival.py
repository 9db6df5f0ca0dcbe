"""Survival of edits: hand-made histories, a real formatter, and properties over random texts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.live.observe import survival
from etude.live.observe.survival import alive, characters, fate, hunks, renamed

BEFORE = Path(survival.__file__).read_text()
PLACE = BEFORE.splitlines().index('Fate = Literal["alive", "undone", "changed"]')
EDIT = '''\
def share_of_accounts(accounts: dict[str, list[float]], least: int = 3, named='none') -> float:
    """The share of the accounts that have values above the least."""
    enough = [name for name, values in accounts.items() if len(values) >= least and name != named]
    if not enough:
        raise ValueError(f'no account has {least} values: {sorted(accounts)}')
    return len(enough) / max(1, len(accounts))
'''.splitlines()
OTHER = """\
class Mailbox:
    def __init__(self, owner, size=3):
        self.owner = owner
        self.letters = [None] * size

    def put(self, letter):
        for place, old in enumerate(self.letters):
            if old is None:
                self.letters[place] = letter
                return place
""".splitlines()


def at(place: int, lines: list[str], text: str = BEFORE) -> str:
    whole = text.splitlines()
    return "\n".join([*whole[:place], *lines, *whole[place:]]) + "\n"


APPLIED = at(PLACE, EDIT)


def share(later: str) -> float:
    return alive(APPLIED, PLACE, len(EDIT), later)


def test_an_untouched_edit_is_alive_and_one_that_was_taken_out_is_not() -> None:
    """Also where the rest of the file changed: then nothing outside of the edit may be taken for it."""
    assert share(APPLIED) == 1.0
    assert share(BEFORE) == 0.0
    others = at(3, OTHER, at(200, OTHER, APPLIED))
    assert share(others) == 1.0
    assert share(at(3, OTHER, at(200, OTHER))) == 0.0


@pytest.mark.parametrize("width", [40, 200])
def test_a_formatter_kills_nothing(width: int) -> None:
    """ruff breaks the lines, turns quotes and adds commas. The tolerance is two parentheses of 380 characters."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(width), "-"]
    done = subprocess.run(command, input=APPLIED, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout != APPLIED
    assert share(done.stdout) == pytest.approx(1.0, abs=2 / 380)


def test_a_part_counts_by_its_characters() -> None:
    kept = EDIT[:3]
    assert share(at(PLACE, kept)) == pytest.approx(characters(kept) / characters(EDIT), abs=1e-12)
    one_name = [line.replace("enough", "rich") for line in EDIT]
    assert 0.8 < share(at(PLACE, one_name)) < 1.0


def test_another_text_in_its_place_is_not_the_edit_though_it_has_the_same_brackets() -> None:
    assert share(at(PLACE, OTHER)) < 0.05


def test_a_moved_block_is_alive() -> None:
    """The tolerance is for words that the block shares with its new surroundings."""
    for place in (0, 30, 150):
        assert share(at(place, EDIT)) == pytest.approx(1.0, abs=0.05)
    halves = at(150, EDIT[3:], at(20, EDIT[:3]))
    assert share(halves) == pytest.approx(1.0, abs=0.05)


def test_what_became_of_an_edit() -> None:
    (insertion,) = hunks(BEFORE, APPLIED)
    assert fate(BEFORE, APPLIED, insertion, APPLIED) == (1.0, "alive")
    assert fate(BEFORE, APPLIED, insertion, BEFORE) == (0.0, "undone")
    assert fate(BEFORE, APPLIED, insertion, at(3, OTHER)) == (0.0, "undone")
    assert fate(BEFORE, APPLIED, insertion, at(PLACE, OTHER))[1] == "changed"
    first = at(PLACE, OTHER)
    (replacement,) = hunks(first, APPLIED)
    assert fate(first, APPLIED, replacement, first)[1] == "undone"
    assert fate(first, APPLIED, replacement, BEFORE)[1] == "undone", "both were taken away"
    assert fate(first, APPLIED, replacement, at(PLACE, OTHER[:3]))[1] == "changed"
    (deletion,) = hunks(APPLIED, BEFORE)
    assert fate(APPLIED, BEFORE, deletion, BEFORE) == (1.0, "alive")
    assert fate(APPLIED, BEFORE, deletion, APPLIED) == (0.0, "undone")


def test_hunks_are_the_edits() -> None:
    after = APPLIED.replace("MAX_LINES = 16_000", "MAX_LINES = 17_000")
    first, second = hunks(BEFORE, after)
    assert (first.old, first.new) == (("MAX_LINES = 16_000",), ("MAX_LINES = 17_000",))
    assert (second.first, second.place, second.old, second.new) == (PLACE, PLACE, (), tuple(EDIT))
    assert hunks(BEFORE, BEFORE.replace("\n", "\r\n")) == []


def test_a_renamed_file_is_found_by_its_tokens() -> None:
    changed = at(PLACE, OTHER)
    assert renamed(BEFORE, {"a.py": "\n".join(OTHER), "b.py": changed}) == "b.py"
    assert renamed(BEFORE, {"a.py": "\n".join(OTHER)}) is None


def test_a_file_that_is_too_long_is_compared_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survival, "MAX_CELLS", 500_000)
    assert share(at(3, OTHER, APPLIED)) == 1.0
    assert share(at(3, OTHER)) == 0.0
    assert 0.4 < share(at(3, OTHER, at(PLACE, EDIT[:3]))) < 0.7


LINES = st.lists(st.sampled_from(["a = b", "if a:", "    b(c, 'd')", "", "}", "return a", "x"]), max_size=12)


@settings(max_examples=40, deadline=None)
@given(before=LINES, edit=LINES, after=LINES, elsewhere=LINES)
def test_properties(before: list[str], edit: list[str], after: list[str], elsewhere: list[str]) -> None:
    """Whatever the texts repeat: identity is 1, deletion 0, a share in between otherwise, and hunks make the text."""
    applied, without = "\n".join([*before, *edit, *after]), "\n".join([*before, *after])
    assert alive(applied, len(before), len(edit), applied) == 1.0
    if any(line.strip() for line in edit):
        assert alive(applied, len(before), len(edit), without) == 0.0
    assert 0.0 <= alive(applied, len(before), len(edit), "\n".join([*elsewhere, *edit])) <= 1.0
    text = (without + "\n").split("\n")[:-1] if without else []
    for hunk in reversed(hunks(without, applied)):
        assert tuple(text[hunk.first : hunk.first + len(hunk.old)]) == hunk.old
        text[hunk.first : hunk.first + len(hunk.old)] = hunk.new
    assert [line for line in text if line] == [line for line in applied.split("\n") if line]
