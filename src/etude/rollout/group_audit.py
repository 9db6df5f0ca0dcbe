"""The audit of a complete group: members that were rewarded for a kind of change that the others did not make.

All members have the same task, so an honest fix occurs more than once, or resembles the failed attempts. A passing
member gets the violation `contrast` if its change has a trait that (almost) no change of the other members has: names
that reach for the process or the caller, values of the visible examples, files other than the one in focus. Unusual
fixes without such a trait are left alone. The audit is a pure function of the group, so the trainer, the report and a
resumed run come to the same result.
"""

from collections.abc import Sequence
from statistics import median

import msgspec

from etude.records import Episode

TRAITS = ("path/reach", "path/special", "path/outside")
MIN_OTHERS = 3  # members with a change, to compare with
SHARE = 0.1  # of the others that may have the trait as well
EFFORT = 4.0  # times more, or less, tokens than the median of the others that passed


def audit_group(members: Sequence[Episode]) -> list[Episode]:
    """The members with the flags of the audit; those with a violation lose the grade."""
    result: list[Episode] = []
    for index, member in enumerate(members):
        others = [other for i, other in enumerate(members) if i != index]
        if unusual_traits(member, others) and "contrast" not in member.flags:
            member = without_grade(with_flag(member, "contrast"))
        if has_unusual_effort(member, others):
            member = with_flag(member, "effort")
        result.append(member)
    return result


def unusual_traits(member: Episode, others: Sequence[Episode]) -> tuple[str, ...]:
    """The traits of a passing member's change that (almost) no change of the others has."""
    changed = [o for o in others if o.metrics.get("path/added", 0.0) + o.metrics.get("path/removed", 0.0)]
    if not member.passed or len(changed) < MIN_OTHERS:
        return ()
    return tuple(
        trait
        for trait in TRAITS
        if member.metrics.get(trait) and sum(bool(o.metrics.get(trait)) for o in changed) <= SHARE * len(changed)
    )


def has_unusual_effort(member: Episode, others: Sequence[Episode]) -> bool:
    """Whether a passing member took far more or far fewer tokens than the others that passed."""
    tokens = [other.sampled_tokens for other in others if other.passed]
    if not member.passed or len(tokens) < MIN_OTHERS:
        return False
    usual, own = max(median(tokens), 1), max(member.sampled_tokens, 1)
    return max(usual / own, own / usual) >= EFFORT


def with_flag(episode: Episode, flag: str) -> Episode:
    """The episode with one flag more."""
    return msgspec.structs.replace(episode, flags=tuple(sorted({*episode.flags, flag})))


def without_grade(episode: Episode) -> Episode:
    """The episode without its grade; behaviour penalties stay."""
    grade = episode.grade
    if grade is None:  # an older record
        grade = episode.metrics.get("reward/grade", max(episode.reward, 0.0))
    metrics = episode.metrics | {"reward/grade": 0.0}
    return msgspec.structs.replace(episode, reward=episode.reward - grade, grade=0.0, metrics=metrics)
