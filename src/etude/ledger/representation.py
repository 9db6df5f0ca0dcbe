"""Comparison of the episodes trained on with all that were played: are long ones passed over because they end late?

Groups finish out of order, so at any moment the quicker ones have been trained on. No group is dropped, though: the
staleness bound makes the trainer wait for those it left behind, so a difference lasts for at most O versions. This
module counts episodes by length in sampled tokens and by outcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import accumulate

import msgspec
import sqlalchemy as sa

from etude.ledger.schema import episodes, groups
from etude.records import LOST, Population

_e, _g = episodes.c, groups.c


def compare(c: sa.Connection) -> tuple[Population, Population]:
    """The episodes that were trained on, and all finished ones. A full scan; the query yields a row per distinct
    length."""
    query = (
        sa.select(_g.state, _e.outcome, _e.tokens, _e.passed, sa.func.count().label("count"))
        .join_from(episodes, groups, _g.id == _e.group_id)
        .where(_e.state == "done", _e.outcome.not_in(LOST))
        .group_by(_g.state, _e.outcome, _e.tokens, _e.passed)
    )
    trained: Counter[tuple[str, int, bool]] = Counter()
    ended: Counter[tuple[str, int, bool]] = Counter()
    for state, outcome, tokens, passed, count in c.execute(query):
        kind = (str(outcome), int(tokens or 0), bool(passed))
        ended[kind] += count
        if state == "consumed":
            trained[kind] += count
    return population(trained), population(ended)


def population(counts: Mapping[tuple[str, int, bool], int]) -> Population:
    """A Population from the number of episodes of each (outcome, sampled tokens, passed)."""
    total = sum(counts.values())
    lengths: Counter[int] = Counter()
    outcomes: Counter[str] = Counter()
    for (outcome, tokens, _), count in counts.items():
        lengths[tokens] += count
        outcomes[outcome] += count
    return Population(
        episodes=total,
        length=sum(tokens * n for tokens, n in lengths.items()) / max(total, 1),
        length_p50=_quantile(lengths, 0.5),
        length_p90=_quantile(lengths, 0.9),
        length_max=max(lengths, default=0),
        pass_rate=sum(n for (_, _, passed), n in counts.items() if passed) / max(total, 1),
        outcomes=dict(sorted(outcomes.items())),
    )


def left_behind(c: sa.Connection, without: Collection[int]) -> dict[str, float]:
    """Means over the finished episodes that wait to be trained on, without those of the groups `without`. Admission
    bounds their number by (O + 1) * P * G."""
    query = (
        sa.select(_e.group_id, _e.tokens, _e.passed, _e.metrics)
        .join_from(episodes, groups, _g.id == _e.group_id)
        .where(_g.state != "consumed", _e.state == "done", _e.outcome.not_in(LOST))
    )
    rows = [row for row in c.execute(query) if row.group_id not in without]
    metrics = [msgspec.json.decode(row.metrics, type=dict[str, float]) for row in rows]
    count = max(len(rows), 1)
    return {
        "left/episodes": float(len(rows)),
        "left/length": sum(row.tokens for row in rows) / count,
        "left/pass_rate": sum(bool(row.passed) for row in rows) / count,
        "left/seconds_tools": sum(m.get("seconds_tools", 0.0) for m in metrics) / count,
    }


def _quantile(lengths: Mapping[int, int], share: float) -> int:
    """The least length that at least the share `share` of the episodes do not exceed; 0 without episodes."""
    ordered = sorted(lengths)
    needed = share * sum(lengths.values())
    reached = accumulate(lengths[tokens] for tokens in ordered)
    return next((tokens for tokens, sofar in zip(ordered, reached, strict=True) if sofar >= needed), 0)
