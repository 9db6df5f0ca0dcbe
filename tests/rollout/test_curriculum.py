from collections import Counter
from collections.abc import Iterable

from etude.rollout.curriculum import Curriculum


def alike(tasks: Iterable[str]) -> dict[str, str]:
    """Tasks of one kind."""
    return dict.fromkeys(tasks, "any")


def test_draws_depend_on_seed_index_and_results_only():
    a, b = (Curriculum(alike("abcdefgh"), 8, 3) for _ in range(2))
    assert [a.draw(i) for i in range(20)] == [b.draw(i) for i in range(20)]
    assert [a.draw(i) for i in range(20)] != [Curriculum(alike("abcdefgh"), 8, 4).draw(i) for i in range(20)]


def test_tasks_that_divide_their_group_are_met_more_often_than_solved_or_hopeless_ones():
    curriculum = Curriculum(alike(["solved", "hopeless", "divided"]), 8, 0)
    for _ in range(3):
        curriculum.observe("solved", 8, 8)
        curriculum.observe("hopeless", 0, 8)
        curriculum.observe("divided", 4, 8)
    drawn = Counter(curriculum.draw(i) for i in range(600))
    assert drawn["divided"] > 3 * max(drawn["solved"], drawn["hopeless"])
    assert min(drawn["solved"], drawn["hopeless"]) > 0, "nothing is given up for good"


def test_every_task_is_met_early():
    tasks = [f"t{i}" for i in range(50)]
    curriculum = Curriculum(alike(tasks), 8, 0)
    met = set()
    for i in range(150):
        task = curriculum.draw(i)
        met.add(task)
        curriculum.observe(task, 4, 8)
    assert len(met) >= 48


def test_a_task_in_flight_is_not_drawn_twice_while_others_are_left():
    curriculum = Curriculum(alike(["a", "b"]), 4, 0)
    assert {curriculum.draw(i, frozenset({"a"})) for i in range(20)} == {"b"}
    assert curriculum.draw(0, frozenset({"a", "b"})) in {"a", "b"}


def test_unseen_tasks_of_a_promising_kind_come_first():
    kinds = {f"{kind}{i}": kind for kind in ("mendable", "hopeless") for i in range(20)}
    curriculum = Curriculum(kinds, 16, 0)
    for i in range(4):
        curriculum.observe(f"mendable{i}", 6, 16)
        curriculum.observe(f"hopeless{i}", 0, 16)
    drawn = Counter(kinds[curriculum.draw(i, frozenset(f"{k}{j}" for k in ("mendable", "hopeless") for j in range(4)))]
                    for i in range(300))  # fmt: skip
    assert drawn["mendable"] > 3 * drawn["hopeless"] > 0
