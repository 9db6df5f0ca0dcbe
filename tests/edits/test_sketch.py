"""Sketches determine their edit, show deletions, and carry noise that takes nothing away."""

import random
import re

import pytest

from etude.edits import sketch
from etude.edits.merge import merge
from etude.edits.sketch_blocks import NoPlace
from tests.helpers.libraries import module

BEFORE, AFTER = module(3, False), module(3, True)


def test_a_clean_sketch_gives_the_result_and_leaves_most_of_the_file_out():
    drawn = sketch.draw_sketch(BEFORE, AFTER, "python", random.Random(0), kinds=0)
    assert drawn is not None
    assert drawn.noise == ()
    assert drawn.merges
    assert merge(BEFORE, drawn.text).text == AFTER
    assert sketch.MARKER in drawn.text
    assert len(drawn.text) < len(AFTER)
    assert AFTER.splitlines()[6] not in drawn.text  # the first function


def test_a_deletion_is_visible():
    lines = BEFORE.splitlines(keepends=True)
    head = next(i for i, line in enumerate(lines) if line.startswith("def "))
    after = "".join(lines[: head + 1] + lines[head + 4 :])  # the loop goes
    for seed in range(20):
        drawn = sketch.draw_sketch(BEFORE, after, "python", random.Random(seed))
        assert drawn is not None
        # Its neighbours stand next to each other, whatever the noise.
        shown = [line.strip() for line in drawn.text.splitlines()]
        assert shown[shown.index(lines[head].strip()) + 1] == "return 3"


@pytest.mark.parametrize("kind", list(sketch.NOISE))
def test_every_kind_of_noise_occurs_and_leaves_one_place_for_each_block(kind, monkeypatch):
    monkeypatch.setattr(sketch, "NOISE", {kind: sketch.NOISE[kind]})
    before = "".join(module(i, False) for i in (3, 4, 5, 6))
    after = re.sub(r"( +)raise ValueError\('(\w+) is", r"\1print(1)\n\1raise ValueError('\2 was", before, count=3)
    clean = {sketch.draw_sketch(before, after, "python", random.Random(seed), kinds=0).text for seed in range(40)}
    noisy = [sketch.draw_sketch(before, after, "python", random.Random(seed), kinds=1) for seed in range(40)]
    seen = [s for s in noisy if s is not None and s.noise == (kind,)]
    if kind == "stale":  # needs a comment at the edge of a block
        return
    assert seen, f"{kind} never came about"
    assert any(s.text not in clean for s in seen)
    for s in seen:
        try:
            assert not merge(before, s.text).doubt
        except NoPlace:
            pytest.fail("a block has no place")


def test_a_stale_line_loses_its_comment():
    draft = sketch._SketchDraft((("a = 1  # one", "b = 2", "c = 3", "d = 4", "e = 5"),), ("",), "# ...", True, True)
    stale = sketch._stale(draft, [sketch.Region(0, 5, False)], (), "python", random.Random(0))
    assert stale.blocks[0][0] == "a = 1"
    assert stale.blocks[0][1:] == draft.blocks[0][1:]


def test_an_edit_that_nothing_determines_has_no_sketch():
    same = "x = 1\n" * 40
    assert sketch.draw_sketch(same, "x = 1\n" * 20 + "y = 2\n" + "x = 1\n" * 20, "python", random.Random(0)) is None
    assert sketch.draw_sketch(BEFORE, BEFORE, "python", random.Random(0)) is None


def test_no_op_sketches_change_nothing():
    drawn = sketch.draw_no_op(BEFORE, "python", random.Random(1))
    assert drawn is not None
    assert merge(BEFORE, drawn.text).text == BEFORE
