"""Queries of the log before a signal or suggestion is written: its subject, earlier events, and earlier counts for the
same turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import sqlalchemy as sa

from etude.live.gateway.answer_ids import ULID, turn_in
from etude.live.gateway.entries import Key
from etude.live.log import schema
from etude.live.log.records import Arm, Signal, SignalKind

_PAGE = 500  # values of one IN
_OUTCOMES = (
    SignalKind.REJECTED,
    SignalKind.UNDONE,
    SignalKind.SURVIVED,
    SignalKind.REVERTED,
    SignalKind.OVERWRITTEN,
)
"""The fates of an edit. The first of them counts the edit as "labelled"."""


class Subject(NamedTuple):
    """The turn or session that a signal refers to, the account of its user, and the key of its counters."""

    key: Key
    account: str
    turn: str
    at: int
    recorded: bool  # with content
    edited: bool = False  # of an unrecorded turn


def turns_of(
    connection: sa.Connection, names: set[tuple[str, str]], digest: Callable[[str, str], str]
) -> dict[tuple[str, str], str]:
    """The turns of tenants and ids of subjects that are no turns' own: the ids in bodies of answers, of which the log
    has the `digest` of tenant and id. "" for an id that several answers of the tenant have."""
    turns = {(tenant, name): turn_in(name) for tenant, name in names if not ULID.fullmatch(name)}
    table = schema.answers.c
    for tenant in {tenant for tenant, _ in turns}:
        digests = {digest(tenant, name): name for of, name in turns if of == tenant}
        for page in _pages(digests):
            rows = sa.select(table.name, table.turn).where((table.tenant == tenant) & table.name.in_(page))
            turns |= {(tenant, digests[name]): turn for name, turn in connection.execute(rows)}
    return turns


def subjects_of(connection: sa.Connection, names: set[str]) -> dict[str, Subject]:
    """Suggestions, turns, sessions and unrecorded turns by identifier, without those of a forgotten account."""
    subjects = dict[str, Subject]()
    s, t, g, u = schema.sessions, schema.turns, schema.suggestions, schema.served
    for page in _pages(names):
        of_turns = t.join(s, s.c.id == t.c.session)
        of_edits = g.join(of_turns, t.c.id == g.c.turn)
        by_turn = (t.c.release, s.c.arm, s.c.voucher, s.c.tenant, s.c.account, t.c.id, t.c.at)
        by_session = (s.c.release, s.c.arm, s.c.voucher, s.c.tenant, s.c.account, s.c.id, s.c.opened)
        unrecorded = (u.c.release, u.c.arm, u.c.voucher, u.c.tenant, u.c.account, u.c.turn, u.c.at)
        queries = (
            sa.select(t.c.id, *by_turn, sa.true(), sa.false()).select_from(of_turns).where(t.c.id.in_(page)),
            sa.select(g.c.id, *by_turn, sa.true(), sa.false()).select_from(of_edits).where(g.c.id.in_(page)),
            sa.select(s.c.id, *by_session, sa.true(), sa.false()).where(s.c.id.in_(page)),
            sa.select(u.c.turn, *unrecorded, sa.false(), u.c.edited == 1).where(u.c.turn.in_(page)),
        )
        for query in queries:
            for name, release, arm, voucher, tenant, account, turn, at, recorded, edited in connection.execute(query):
                key = Key(release, Arm(arm), voucher, tenant)
                subjects[name] = Subject(key, account, turn, at, bool(recorded), bool(edited))
    stones, forgotten = schema.tombstones.c.account, set[str]()
    for page in _pages({subject.account for subject in subjects.values()}):
        forgotten |= set(connection.scalars(sa.select(stones).where(stones.in_(page))))
    return {name: subject for name, subject in subjects.items() if subject.account not in forgotten}


def edited_turns(connection: sa.Connection, turns: set[str]) -> set[str]:
    """The turns of `turns` that have edits."""
    edited, column = set[str](), schema.suggestions.c.turn
    for page in _pages(turns):
        edited |= set(connection.scalars(sa.select(column).where(column.in_(page)).distinct()))
    return edited


def known_events(connection: sa.Connection, signals: list[Signal]) -> dict[tuple[str, str], tuple[str, str]]:
    """Tenant and event of the signals of `signals` that are in the log, with their subjects and kinds."""
    table, known = schema.signals, dict[tuple[str, str], tuple[str, str]]()
    for tenant in {signal.tenant for signal in signals}:
        for page in _pages(signal.event for signal in signals if signal.tenant == tenant):
            chosen = (table.c.tenant == tenant) & table.c.event.in_(page)
            rows = connection.execute(sa.select(table.c.event, table.c.subject, table.c.kind).where(chosen))
            known |= {(tenant, event): (subject, kind) for event, subject, kind in rows}
    return known


def counter_names(kind: SignalKind, horizon: float | None, window_seconds: float) -> list[str]:
    """The names of the counters of a signal. Survival counts from the end of the window on."""
    names = ["labelled"] if kind in _OUTCOMES else []
    return names if kind == SignalKind.SURVIVED and (horizon or 0.0) < window_seconds else [*names, kind.value]


def counted_names(connection: sa.Connection, turns: set[str], window_seconds: float) -> set[tuple[str, str]]:
    """Turn and counter of the earlier signals on the turns, or on their edits."""
    s, g, counted = schema.signals.c, schema.suggestions.c, set[tuple[str, str]]()
    for page in _pages(turns):
        on_turns = sa.select(s.subject, s.kind, s.horizon).where(s.subject.in_(page))
        joined = schema.signals.join(schema.suggestions, g.id == s.subject)
        on_edits = sa.select(g.turn, s.kind, s.horizon).select_from(joined).where(g.turn.in_(page))
        for query in (on_turns, on_edits):
            for turn, kind, horizon in connection.execute(query.distinct()):
                counted |= {(turn, name) for name in counter_names(SignalKind(kind), horizon, window_seconds)}
    return counted


def _pages(values: Iterable[str]) -> Iterator[list[str]]:
    ordered = sorted(values)
    for low in range(0, len(ordered), _PAGE):
        yield ordered[low : low + _PAGE]
