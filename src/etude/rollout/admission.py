"""Admission: the number of groups that may start now, such that no token is trained on more than O versions after its
sampling.

    capacity = (version + O + 1) * P * G - (accepted + reserved)

P groups of G episodes make a step, `version` is the served version, O is the staleness bound; accepted episodes
belong to finished groups (trained on or not yet), reserved ones to groups still open. Work is admitted a whole group
at a time, so group i (counted from 0) starts only once i < (version + O + 1) * P. If the trainer takes groups in that
order, group i is trained on by the step that starts from version i // P <= version + O: the bound holds by
admission, and nothing has to be dropped. It also holds where younger groups overtake stragglers, if every batch
leaves behind only groups that later batches can still take in time (`ledger.leaving_behind`). O = 0 is on-policy: each
batch waits for its version.
"""


def capacity(*, version: int, staleness: int, prompts: int, group: int, accepted: int, reserved: int) -> int:
    """Episodes that may be admitted now; negative when the served version went back, e.g. after a rollback."""
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
    """Whole groups to admit now: within the staleness bound, and with at most `max_in_flight` episodes unfinished.
    Raises ValueError where no group could ever start."""
    if max_in_flight < group:
        raise ValueError(f"max_in_flight ({max_in_flight}) is smaller than a group of {group} episodes")
    bound = capacity(
        version=version, staleness=staleness, prompts=prompts, group=group, accepted=accepted, reserved=reserved
    )
    return max(0, min(bound, max_in_flight - in_flight) // group)
