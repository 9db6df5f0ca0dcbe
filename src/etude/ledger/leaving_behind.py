"""The staleness bound for the trainer: which groups a step may leave to later steps."""

from __future__ import annotations

from collections.abc import Sequence


def leaves_in_time(left_behind: Sequence[int], *, version: int, staleness: int, prompts: int) -> bool:
    """Whether the step from `version` may leave these groups behind, given by the versions they were admitted at,
    oldest first. The next steps take `prompts` groups each, so group j is trained on by version + 1 + j // prompts at
    the latest. That must be at most `staleness` above the version of its admission. Groups that are admitted later keep
    this true: they fill up the last of those steps and no earlier one."""
    return all(version + 1 + j // prompts <= admitted + staleness for j, admitted in enumerate(left_behind))
