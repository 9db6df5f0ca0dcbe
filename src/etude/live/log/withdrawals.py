"""Consent that is taken back: by a request that refuses, for its account, or by the policy of a tenant.

What was given before is deleted: contents and texts of signals at once, with a row that says so, and tokens that wait
for a trainer by the next `etude live train` or `expire`. Later windows leave the turns out (`filters.py`). Counters,
and kinds and times of signals, stay, as for turns without consent. A new consent counts from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from etude.live.log import journal, schema
from etude.live.log.records import Withdrawal
from etude.live.log.tenants import policies
from etude.store import Store

WITHDRAWN = "withdrawn"
"""The reason of a turn whose content was deleted because consent was taken back."""
_PAGE = 500


def withdraw(connection: sa.Connection, store: Store, owners: Mapping[str, str], at: int, policy: str = "") -> int:
    """Withdraws the consent of accounts (`owners`: account -> tenant) as of the time `at`, which the transaction has
    stamped: contents first, rows after. `policy` "tenant": only what the tenant's policy had granted. Returns the
    number of contents. Accounts that gave nothing get no row. Raises UserError if the store is away."""
    count = 0
    for account, tenant in sorted(owners.items()):
        turns = _contents(connection, account, policy)
        if not turns:
            continue
        names = [turn for turn, _ in turns]
        texts = _texts(connection, account, names)
        for blob in [*(blob for _, blob in turns), *texts]:
            store.delete(blob)
        t, g, b = schema.turns, schema.signals, schema.labels
        for page in _pages(names):
            connection.execute(sa.update(t).where(t.c.id.in_(page)).values(blob=None, reason=WITHDRAWN, scrubbed="{}"))
        for page in _pages(texts):
            connection.execute(sa.update(g).where(g.c.text.in_(page)).values(text=None))
            connection.execute(sa.update(b).where(b.c.correction.in_(page)).values(correction=None))
        journal.add(connection, [Withdrawal(tenant=tenant, account=account, policy=policy, at=at)])
        count += len(turns) + len(texts)
    return count


def withdrawn_at(connection: sa.Connection, accounts: Iterable[str]) -> dict[str, int]:
    """When each of the accounts last refused; those that never did are left out."""
    table, times = schema.withdrawals, dict[str, int]()
    for page in _pages(sorted(accounts)):
        last = sa.select(table.c.account, sa.func.max(table.c.at)).where(
            table.c.account.in_(page), table.c.policy == ""
        )
        times |= {row[0]: row[1] for row in connection.execute(last.group_by(table.c.account))}
    return times


def withdraw_by_policies(engine: sa.Engine, store: Store) -> int:
    """Withdraws what the present policies of the tenants no longer allow: consents of the tenant itself where it gives
    none, and those of clients where they may not grant, either. Returns the number of contents. Raises UserError."""
    count, s, t = 0, schema.sessions, schema.turns
    with engine.begin() as connection:
        at = journal.stamp(connection)
        for tenant, policy in policies(connection).items():
            if policy.consent:
                continue
            chosen = sa.select(s.c.account).join(t, t.c.session == s.c.id).where(s.c.tenant == tenant)
            owners = dict.fromkeys(connection.scalars(chosen.where(t.c.blob.is_not(None)).distinct()), tenant)
            count += withdraw(connection, store, owners, at, "tenant" if policy.may_grant else "")
    return count


def _contents(connection: sa.Connection, account: str, policy: str) -> Sequence[tuple[str, str]]:
    """The turns of an account with content, and their blobs."""
    s, t = schema.sessions, schema.turns
    chosen = sa.select(t.c.id, t.c.blob).join(s, s.c.id == t.c.session)
    chosen = chosen.where(s.c.account == account, t.c.blob.is_not(None))
    if policy:
        chosen = chosen.where(s.c.consent.like(f'%"policy":"{policy}"%'))
    return [(turn, blob) for turn, blob in connection.execute(chosen.order_by(t.c.id))]


def _texts(connection: sa.Connection, account: str, turns: Sequence[str]) -> list[str]:
    """The blobs of texts of signals on these turns, on their edits, or, if they are all of it, on their sessions."""
    g, e, t, texts = schema.signals, schema.suggestions, schema.turns, list[str]()
    for page in _pages(turns):
        edits = sa.select(e.c.id).where(e.c.turn.in_(page))
        sessions = sa.select(t.c.session).where(t.c.id.in_(page))
        mine = g.c.subject.in_(page) | g.c.subject.in_(edits) | g.c.subject.in_(sessions)
        texts += connection.scalars(sa.select(g.c.text).where(g.c.text.is_not(None), mine))
    return sorted(set(texts))


def _pages(names: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (names[low : low + _PAGE] for low in range(0, len(names), _PAGE))


def withdrawn_turns(engine: sa.Engine) -> list[str]:
    """The turns whose contents were deleted because consent was taken back."""
    with journal.reading(engine) as connection:
        return list(connection.scalars(sa.select(schema.turns.c.id).where(schema.turns.c.reason == WITHDRAWN)))
