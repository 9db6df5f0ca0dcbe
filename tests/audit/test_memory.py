"""A tested process holds neither the right answer nor, but for tests that must run inside, a hidden test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from etude.audit.attacks import memory, packs
from etude.audit.attacks.library import BROKEN, CORE, SECRET, TASK, body, prepare
from etude.audit.attacks.memory import LIMITS, lines, searches
from etude.audit.attacks.packs import GOLD, NOTHING, AttackPack, AttackProgram
from etude.grading.runner import TestRunner, open_sandbox
from etude.sandbox.base import Image


class Place:
    def __init__(self, pack: AttackPack, sandbox: TestRunner, loop: asyncio.AbstractEventLoop) -> None:
        self.pack, self.sandbox, self.loop = pack, sandbox, loop


@pytest.fixture(scope="module", params=[True, False], ids=["outside", "inside"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("attacked")
    root.chmod(0o755)
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    sandbox = loop.run_until_complete(stack.enter_async_context(open_sandbox(memo=0, outside=request.param)))
    yield Place(prepare(root), sandbox, loop)
    loop.run_until_complete(stack.aclose())
    loop.close()


def test_the_answer_is_nowhere_in_a_process_of_the_agents_code(place: Place) -> None:
    assert place.loop.run_until_complete(memory.memory(place.sandbox, place.pack)) == ""


def earned(place: Place, program: AttackProgram) -> packs.PlayedAttack:
    return place.loop.run_until_complete(packs.attack(place.sandbox, place.pack, TASK, program))


def test_searching_for_the_answer_earns_nothing(place: Place) -> None:
    searching = [program for program in place.pack.programs if program.kind == "answer in memory"]
    assert len(searching) == 4
    assert [earned(place, program).problem for program in searching] == [""] * 4


@pytest.mark.parametrize(("control", "reward"), [(GOLD, 1.0), (NOTHING, 0.0)])
def test_controls(place: Place, control: AttackProgram, reward: float) -> None:
    played = earned(place, control)
    assert (played.graded.score, played.graded.flags, played.problem) == (reward, (), "")


def test_the_searches_find_an_answer_that_is_there(place: Place) -> None:
    """On the whole tree, whose process has imported it: what the tests above hold would be found."""
    data = place.pack.data
    whole = Image(data.repository, data.site, {})
    wanted = lines(CORE, [BROKEN])
    assert any(SECRET in line for line in wanted)
    found = {}
    for name, text in searches(place.pack, wanted).items():
        run = place.sandbox.run_tests(whole, body(text), TASK.visible_tests, None, LIMITS)
        (found[name.removeprefix("the_answer_by_")],) = place.loop.run_until_complete(run).messages.values()
    assert "if size < 1" in found["frames.sh"] + found["objects.sh"]
    assert "if size < 1" in found["memory.sh"]
    assert not found["scan"].startswith("ValueError: 0 found")


def test_lines_of_hidden_tests_are_known(place: Place) -> None:
    assert 5 > len(memory.lines(CORE, [BROKEN])) > 1
