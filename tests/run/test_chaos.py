"""A slice of `make chaos`: three disturbances of real runs."""

from functools import partial

import pytest

from tests.helpers.chaos import Chaos


@pytest.mark.slow
def test_a_disturbed_run_ends_in_one_sentence_or_as_if_undisturbed(tmp_path):
    chaos = Chaos(tmp_path, seed=3)
    chaos.case("kill", 0, chaos.kill)
    for kind in ("checkpoint", "blob"):
        chaos.case(f"flip-{kind}", 0, partial(chaos.flip, kind))
    assert [r.wrong for r in chaos.results] == ["", "", ""]
    said = ("etude: checkpoint", "etude: the episode 0000000")
    for result, text in zip(chaos.results[1:], said, strict=True):  # some flips hit what nobody reads again
        undamaged = ("ended as if nothing had been", "etude: the run goes on from checkpoint")
        assert result.ended.startswith((text, *undamaged)), result
    again = Chaos(tmp_path, seed=3)
    again.case("kill", 0, lambda *_: pytest.fail("it was played already"))
