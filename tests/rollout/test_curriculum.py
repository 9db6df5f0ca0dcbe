from collections import Counter

from etude.rollout.curriculum import Curriculum


def test_draws_depend_on_seed_index_and_results_only():
    a, b = (Curriculum(list("abcdefgh"), 8, 3) for _ in range(2))
    assert [a.draw(i) for i in range(20)] == [b.draw(i) for i in range(20)]
    assert [a.draw(i) for i in range(20)] != [Curriculum(list("abcdefgh"), 8, 4).draw(i) for i in range(20)]


def test_tasks_that_divide_their_group_are_met_more_often_than_solved_or_hopeless_ones():
    curriculum = Curriculum(["solved", "hopeless", "divided"], 8, 0)
    for _ in range(3):
        curriculum.observe("solved", 8, 8)
        curriculum.observe("hopeless", 0, 8)
        curriculum.observe("divided", 4, 8)
    drawn = Counter(curriculum.draw(i) for i in range(600))
    assert drawn["divided"] > 3 * max(drawn["solved"], drawn["hopeless"])
    assert min(drawn["solved"], drawn["hopeless"]) > 0, "nothing is given up for good"


def test_every_task_is_met_early():
    tasks = [f"t{i}" for i in range(50)]
    curriculum = Curriculum(tasks, 8, 0)
    met = set()
    for i in range(150):
        task = curriculum.draw(i)
        met.add(task)
        curriculum.observe(task, 4, 8)
    assert len(met) >= 48


def test_a_task_in_flight_is_not_drawn_twice_while_others_are_left():
    curriculum = Curriculum(["a", "b"], 4, 0)
    assert {curriculum.draw(i, frozenset({"a"})) for i in range(20)} == {"b"}
    assert curriculum.draw(0, frozenset({"a", "b"})) in {"a", "b"}
