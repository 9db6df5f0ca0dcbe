"""How much work is admitted ahead of the trainer: the one formula that bounds staleness.

    capacity = (version + O + 1) * P * G - (accepted + reserved)

The trainer consumes whole groups, P per version, in the order they were admitted or became ready. Work is admitted a
whole group at a time while capacity >= G, so at version v at most (v + O + 1) * P groups were ever admitted, and the
groups that make version n + 1 were all admitted at version n - O or later: no trained token lags more than O versions.
"""

from __future__ import annotations


def capacity(*, version: int, staleness: int, prompts: int, group: int, accepted: int, reserved: int) -> int:
    """Episodes that may still be admitted; `accepted` are done, `reserved` are admitted and not done."""
    return (version + staleness + 1) * prompts * group - (accepted + reserved)


def groups_to_admit(
    *,
    version: int,
    staleness: int,
    prompts: int,
    group: int,
    accepted: int,
    reserved: int,
    in_flight: int,
    max_in_flight: int,
) -> int:
    """Whole groups to admit now. `in_flight` counts episodes admitted and not done, bounded by `max_in_flight`."""
    room = capacity(
        version=version, staleness=staleness, prompts=prompts, group=group, accepted=accepted, reserved=reserved
    )
    return max(0, min(room, max_in_flight - in_flight) // group)
