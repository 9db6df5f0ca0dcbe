import pytest

from etude.rollout.stall import StallSnapshot, StallWatchdog, diagnose_stall


def standing(**given) -> StallSnapshot:
    usual = {
        "served": 3, "published": 3, "prompts": 4, "ready": 1, "takeable": 0, "live": 9, "at_engine": 0,
        "oldest": "member 2 of group 17 (task clamp)", "oldest_seconds": 301.4,
    }  # fmt: skip
    return StallSnapshot(**(usual | given))


def test_it_speaks_once_per_stall_and_again_after_the_next():
    stall = StallWatchdog(10.0, now=100.0)
    warnings = []
    for now, marks in ((101.0, 0), (110.9, 0), (111.0, 0), (112.0, 0), (113.0, 1), (122.0, 1), (123.5, 1)):
        still = stall.observe((marks,), now)
        if stall.warns(still):
            warnings.append((now, still))
    assert warnings == [(111.0, 10.0), (123.5, 10.5)]


@pytest.mark.parametrize(
    ("given", "clause"),
    [
        (
            {"published": 5, "takeable": 4, "ready": 4},
            "admission waits for the engines, which serve version 3 although 5 is published",
        ),
        ({"takeable": 4, "ready": 4}, "everything waits for the trainer, which has its 4 groups for version 4"),
        (
            {"at_engine": 7},
            "7 of 9 live episodes wait for the engines, which sample nothing; the trainer has 1 of 4 groups and waits "
            "for the rest",
        ),
        (
            {},
            "9 live episodes wait for their tools, member 2 of group 17 (task clamp) for 301 s; the trainer has 1 of 4 "
            "groups and waits for the rest",
        ),
        (
            {"ready": 4},
            "9 live episodes wait for their tools, member 2 of group 17 (task clamp) for 301 s; the trainer has 4 of 4 "
            "groups and may not leave that group behind",
        ),
        (
            {"live": 0, "oldest": ""},
            "the trainer has 1 of 4 groups, no episode is live, and admission waits for version 4",
        ),
    ],
)
def test_the_first_party_in_the_order_of_causes_is_named(given, clause):
    assert diagnose_stall(standing(**given)) == clause
