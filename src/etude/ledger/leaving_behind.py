"""The staleness bound as the trainer sees it: which groups a step may leave to later ones."""

from __future__ import annotations

from collections.abc import Sequence


def leaves_in_time(left_behind: Sequence[int], *, version: int, staleness: int, prompts: int) -> bool:
    """Whether the step from `version` may leave groups behind that were admitted at these versions, oldest first. The
    next steps take the groups `prompts` at a time, so group j is trained on by version + 1 + j // prompts at the
    latest, which must not be more than `staleness` above the version that the group was admitted at. Admission keeps
    this true of groups that join later: they fill up the last of those steps and no earlier one."""
    return all(version + 1 + j // prompts <= admitted + staleness for j, admitted in enumerate(left_behind))
