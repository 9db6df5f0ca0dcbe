"""The proof that a ledger is complete: every admitted episode is accounted for, and no group was trained on twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from etude.ledger.schema import counters, episodes, groups
from etude.records import Outcome, PolicyVersion

_e, _g = episodes.c, groups.c


@dataclass(frozen=True)
class Conservation:
    """The result of the proof: whether it holds (`ok`), the counts, and a `sentence` for people."""

    ok: bool
    sentence: str
    admitted: int
    done: dict[str, int]
    leased: int
    pending: int
    late: int
    retried: int


def check(c: sa.Connection, manifests: Sequence[PolicyVersion]) -> Conservation:
    """Compares the counts of rows with each other and with the manifests of published versions."""
    totals = dict(c.execute(sa.select(counters.c.name, counters.c.value)).all())
    states = dict(c.execute(sa.select(_e.state, sa.func.count()).group_by(_e.state)).all())
    consumed = dict(c.execute(sa.select(_g.id, _g.consumed_version).where(_g.state == "consumed")).all())
    done = count_outcomes(c)
    wrong = _inconsistent_group(c)
    admitted, held, outcomes = totals["admitted"], sum(states.values()), sum(done.values())
    if admitted != held:
        problem = f"{admitted} episodes were admitted but the ledger holds {held}"
    elif outcomes != states.get("done", 0):
        problem = f"{states.get('done', 0)} episodes are done but only {outcomes} have an outcome"
    elif wrong is not None:
        problem = f"the state of group {wrong} does not match its members"
    else:
        problem = _manifest_problem(consumed, manifests)
    ended = ", ".join(f"{count} {outcome}" for outcome, count in done.items())
    leased, pending = states.get("leased", 0), states.get("pending", 0)
    sentence = (
        f"{admitted} episodes admitted: {ended}, {leased} in flight, {pending} pending; "
        f"{len(consumed)} groups trained on, each by one version"
    )
    late, retried = totals["late"], totals["retried"]
    return Conservation(problem is None, problem or sentence, admitted, done, leased, pending, late, retried)


def count_outcomes(c: sa.Connection) -> dict[str, int]:
    """Number of finished episodes by outcome."""
    query = sa.select(_e.outcome, sa.func.count()).where(_e.state == "done").group_by(_e.outcome)
    counts = dict(c.execute(query).all())
    return {outcome.value: counts.get(outcome.value, 0) for outcome in Outcome}


def _inconsistent_group(c: sa.Connection) -> int | None:
    """The id of a group whose state does not follow from its members' states, or None."""
    unfinished = sa.func.sum(sa.case((_e.state != "done", 1), else_=0))
    query = (
        sa.select(_g.id)
        .join_from(groups, episodes, _g.id == _e.group_id)
        .group_by(_g.id, _g.size, _g.unfinished, _g.state)
        .having(
            sa.or_(sa.func.count() != _g.size, unfinished != _g.unfinished, (unfinished > 0) != (_g.state == "open"))
        )
        .limit(1)
    )
    return c.execute(query).scalar()


def _manifest_problem(consumed: Mapping[int, int | None], manifests: Sequence[PolicyVersion]) -> str | None:
    """The first difference between the consumed groups and those that the manifests name, or None."""
    named: dict[int, int] = {}
    for manifest in manifests:
        for group in manifest.groups:
            if group in named:
                return f"group {group} was trained on twice, by versions {named[group]} and {manifest.version}"
            named[group] = manifest.version
    for group in sorted(named.keys() | consumed.keys()):
        by, says = (f"version {v}" if v is not None else "no version" for v in (named.get(group), consumed.get(group)))
        if by != says:
            return f"group {group} is named by {by} but the ledger says that {says} consumed it"
    return None
