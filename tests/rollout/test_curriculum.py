from collections import Counter

from etude.rollout.curriculum import NEW, Curriculum, MixedCurriculum


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


def test_the_last_group_counts_and_not_those_before():
    curriculum = Curriculum(["was solved", "is solved"], 16, 0)
    for first, last in ((16, 5), (5, 16)):
        for task, passed in zip(curriculum.tasks, (first, last), strict=True):
            curriculum.observe(task, passed, 16)
    drawn = Counter(curriculum.draw(i) for i in range(300))
    assert drawn["was solved"] > 5 * drawn["is solved"], "5 of 16 came last there, and 16 of 16 here"


def test_of_equal_variance_the_task_with_more_left_to_gain_is_met_more_often():
    curriculum = Curriculum(["few", "most"], 16, 0)
    curriculum.observe("few", 3, 16)
    curriculum.observe("most", 13, 16)
    drawn = Counter(curriculum.draw(i) for i in range(300))
    assert drawn["few"] > 2 * drawn["most"]


def test_a_share_of_the_groups_meets_new_tasks_and_the_others_return_to_those_that_divided():
    curriculum = Curriculum([f"t{i}" for i in range(200)], 16, 0)
    passed = {task: (0, 5, 16)[i % 3] for i, task in enumerate(curriculum.tasks)}
    new, again = [], []
    for index in range(200):
        task = curriculum.draw(index)
        (again if task in new else new).append(task)
        curriculum.observe(task, passed[task], 16)
    spread = (200 * NEW * (1 - NEW)) ** 0.5
    assert abs(len(new) - 200 * NEW) <= 3 * spread, "three standard deviations of as many throws of a coin"
    assert sum(passed[task] == 5 for task in again) > 0.9 * len(again), "a third of the tasks divides"


def test_before_a_task_has_divided_its_group_all_groups_meet_new_tasks():
    curriculum = Curriculum([f"t{i}" for i in range(20)], 8, 0)
    for index, passed in enumerate((0, 8) * 10):
        curriculum.observe(curriculum.draw(index), passed, 8)
    assert len(curriculum._last) == 20
    curriculum.draw(20)  # nothing is new, and nothing has divided


def test_a_task_in_flight_is_not_drawn_twice_while_others_are_left():
    curriculum = Curriculum(["a", "b"], 4, 0)
    assert {curriculum.draw(i, frozenset({"a"})) for i in range(20)} == {"b"}
    assert curriculum.draw(0, frozenset({"a", "b"})) in {"a", "b"}


def mixed(weights: dict[str, float]) -> MixedCurriculum:
    return MixedCurriculum({name: Curriculum([f"{name}{i}" for i in range(5)], 8, 1) for name in weights}, weights)


def test_repositories_have_their_shares_at_every_moment():
    """Largest deficit first keeps the count of each within one of its share, after any number of groups."""
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    curriculum = mixed(weights)
    drawn = Counter()
    for index in range(200):
        drawn[curriculum.draw(index)[0]] += 1
        for name, weight in weights.items():
            assert abs(drawn[name] - weight * (index + 1)) <= 1, (index, drawn)
    assert drawn == {"a": 100, "b": 60, "c": 40}


def test_a_repository_that_joins_has_its_share_from_then_on():
    """It does not catch up, and what was drawn before stays."""
    curriculum = mixed({"a": 1.0})
    before = [curriculum.draw(index) for index in range(40)]
    late = Curriculum([f"b{i}" for i in range(5)], 8, 1)
    curriculum.join({"b": late}, {"a": 0.75, "b": 0.25})
    drawn = Counter(curriculum.draw(index)[0] for index in range(40, 60))
    assert drawn == {"a": 15, "b": 5}
    assert [curriculum.draw(index) for index in range(40)] == before


def test_the_repository_of_a_group_depends_on_the_weights_alone():
    first, resumed = mixed({"a": 0.75, "b": 0.25}), mixed({"a": 0.75, "b": 0.25})
    order = [first.repository(i) for i in range(12)]
    for task in first.parts["b"].tasks:
        resumed.observe(task, 8, 8)
    assert [resumed.repository(i) for i in reversed(range(12))] == order[::-1], "a resumed run starts anywhere"


def test_results_move_the_tasks_of_their_own_repository():
    curriculum = mixed({"a": 0.5, "b": 0.5})
    for task in curriculum.parts["a"].tasks[1:]:
        curriculum.observe(task, 8, 8)
    curriculum.observe("a0", 3, 8)
    drawn = Counter(curriculum.draw(i) for i in range(400))
    assert drawn["a0"] > 150, "of a, only one task has something left to teach"
    assert max(drawn[task] for task in curriculum.parts["b"].tasks) < 80, "of b nothing is known"
