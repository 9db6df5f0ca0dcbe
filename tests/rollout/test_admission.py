from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.ledger.leaving_behind import leaves_in_time
from etude.rollout.admission import capacity, groups_to_admit


def test_the_published_formula():
    figures = {"version": 3, "staleness": 1, "prompts": 4, "group": 8, "accepted": 100, "reserved": 20}
    assert capacity(**figures) == (3 + 1 + 1) * 4 * 8 - 120
    assert groups_to_admit(**figures, in_flight=20, max_in_flight=1000) == 5
    assert groups_to_admit(**figures, in_flight=20, max_in_flight=37) == 2
    assert groups_to_admit(**figures, in_flight=50, max_in_flight=37) == 0


def test_on_policy_admits_one_batch_and_waits_for_its_version():
    def admit(version: int, accepted: int) -> int:
        return groups_to_admit(
            version=version, staleness=0, prompts=4, group=8, accepted=accepted, reserved=0, in_flight=0,
            max_in_flight=1000,
        )  # fmt: skip

    assert admit(0, 0) == 4
    assert admit(0, 32) == 0
    assert admit(1, 32) == 4


def test_a_cap_below_one_group_is_refused():
    with pytest.raises(ValueError, match=r"max_in_flight \(7\) is smaller than a group of 8"):
        groups_to_admit(
            version=0, staleness=0, prompts=1, group=8, accepted=0, reserved=0, in_flight=0, max_in_flight=7
        )


def test_what_a_batch_leaves_behind_must_be_in_time():
    step = {"version": 5, "staleness": 2, "prompts": 2}
    assert leaves_in_time([], **step)
    assert leaves_in_time([4, 4, 5, 5], **step)
    assert not leaves_in_time([3], **step), "admitted at 3, it could be trained on from version 6 at the earliest"
    assert not leaves_in_time([4, 4, 4], **step), "the third would have to wait for version 7"


class Simulation:
    """Groups are admitted by the formula, end in any order, and are trained on P at a time."""

    def __init__(self, random: Random, staleness: int, prompts: int, group: int, in_order: bool):
        self.random, self.staleness, self.prompts, self.group = random, staleness, prompts, group
        self.in_order = in_order
        self.version = self.served = self.admitted = self.most_stale = 0
        self.waiting: list[list[int]] = []  # [version at admission, members without a result] of what is not consumed

    def admit(self) -> None:
        reserved = self.group * sum(left > 0 for _, left in self.waiting)
        count = groups_to_admit(
            version=self.served,
            staleness=self.staleness,
            prompts=self.prompts,
            group=self.group,
            accepted=self.group * self.admitted - reserved,
            reserved=reserved,
            in_flight=sum(left for _, left in self.waiting),
            max_in_flight=10_000,
        )
        self.admitted += count
        self.waiting += [[self.served, self.group] for _ in range(count)]

    def train(self) -> None:
        ready = [w for w in self.waiting if w[1] == 0][: self.prompts]
        rest = [w for w in self.waiting if not any(w is r for r in ready)]
        behind = [admitted for admitted, _ in rest]
        in_time = leaves_in_time(behind, version=self.version, staleness=self.staleness, prompts=self.prompts)
        if len(ready) < self.prompts or not in_time or (self.in_order and ready != self.waiting[: self.prompts]):
            return
        self.most_stale = max(self.most_stale, *(self.version - admitted for admitted, _ in ready))
        self.waiting = rest
        self.version += 1

    def finish_one(self) -> None:
        # Mostly of the youngest group: old ones straggle for as long as the rules allow.
        if going := [w for w in self.waiting if w[1]]:
            (going[-1] if self.random.random() < 0.8 else self.random.choice(going))[1] -= 1


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.integers(0, 10**6))
def test_no_group_is_trained_on_more_than_o_versions_after_its_admission(staleness, prompts, group, in_order, seed):
    random = Random(seed)
    simulation = Simulation(random, staleness, prompts, group, in_order)
    for _ in range(40 * prompts * group):
        simulation.admit()
        simulation.finish_one()
        simulation.train()
        if random.random() < 0.5:  # engines follow the trainer with a delay of their own
            simulation.served = simulation.version
    assert simulation.version > 0, "and nothing ever waits for itself"
    assert simulation.most_stale <= staleness


def test_the_bound_is_used_not_only_kept():
    simulation = Simulation(Random(0), 2, 2, 2, in_order=False)
    for _ in range(500):
        simulation.admit()
        simulation.finish_one()
        simulation.train()
        simulation.served = simulation.version
    assert simulation.most_stale == 2
