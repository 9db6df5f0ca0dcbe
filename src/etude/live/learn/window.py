"""One window of the live loop: labels, exits and a batch from the log's rows before a cut, written in one transaction.

    result = cut_window(engine, contents, config)        a new window of all rows before now
    samples(engine, contents, config, number)            its batch, for the trainer
    replay(engine, contents, config, number)             whether the same window results from the log again

A window has the turns since the last window, and the turns that the last window held. It is a pure function of the log,
its cut and its settings, except for the accounts that were forgotten or withdrew, which are those at the later time
`at`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import blake3
import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from etude.config.live import LabelsConfig
from etude.errors import UserError
from etude.failpoints import failpoint
from etude.live.learn.attribution import slow_signals
from etude.live.learn.content import RequestFeatures, request_features
from etude.live.learn.filters import WindowDecision, WindowRows, decide, unwanted
from etude.live.learn.rewards import rules_version
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, unseal
from etude.live.log.records import (
    ExitKind,
    Label,
    LabelState,
    LiveSample,
    ServedTurn,
    Session,
    Signal,
    Suggestion,
    TurnContent,
    TurnExit,
)
from etude.live.log.withdrawals import WITHDRAWN, withdraw_by_policies
from etude.store import ObjectMissing, Store

MAX_TURNS = 200_000
"""The most turns of one window."""
MAX_SIGNALS = 1000
"""The most signals of one edit, turn or session that are read, the earliest first."""
_REFUSALS = ("stale", "temperature", "too_long", "tokens")  # of the trainer, which replace the window's exits
_PAGE = 500
_ATTEMPTS = 5


@dataclass(frozen=True)
class WindowResult:
    """A computed window. `batch`: digest of its samples in their order."""

    number: int
    cut: int
    at: int
    rules: str
    labels: tuple[Label, ...]
    exits: tuple[TurnExit, ...]
    batch: str
    turns: tuple[ServedTurn, ...]  # that have an exit


class LiveContents:
    """Contents of turns and texts of signals, decrypted with the keys of their accounts."""

    def __init__(self, engine: sa.Engine, accounts: Accounts, store: Store) -> None:
        self._engine, self._accounts, self._store = engine, accounts, store

    def keys(self, names: Iterable[str]) -> dict[str, bytes | None]:
        """The keys of accounts; None for a destroyed key."""
        with journal.reading(self._engine) as connection:
            return {name: self._accounts.key(connection, name) for name in sorted(set(names))}

    def read(self, key: bytes, blob: str) -> bytes | None:
        """A blob, decrypted; None for a missing blob. Raises UserError if the store is away or the blob is damaged."""
        try:
            return unseal(key, self._store.get(blob), blob)
        except ObjectMissing:
            return None
        except ValueError as e:
            raise UserError(f"a content of the live loop is damaged: {e}; restore the folder's blobs") from None

    def withdraw(self) -> int:
        """Deletes what the policies of the tenants no longer allow; returns the number of contents."""
        return withdraw_by_policies(self._engine, self._store)

    def turn(self, key: bytes, turn: ServedTurn) -> TurnContent | str:
        """The content of a turn, or the reason why it cannot be trained on."""
        data = None if turn.blob is None else self.read(key, turn.blob)
        if data is None:
            return "expired"
        content = msgspec.msgpack.decode(data, type=TurnContent)
        sampled = len(content.ids)
        covered = sorted((span.low, span.high) for span in turn.spans)
        whole = covered and covered[0][0] == 0 and covered[-1][1] * 4 == sampled
        whole = whole and all(a[1] == b[0] for a, b in pairwise(covered))
        if not sampled or len(content.logprobs) != sampled or not content.prompt_ids or not whole:
            return "no_tokens"
        return content


def cut_window(engine: sa.Engine, contents: LiveContents, config: LabelsConfig, cut: int | None = None) -> WindowResult:
    """Computes and writes the next window, from the log's rows before `cut` (nanoseconds since the epoch; by default
    now), in one transaction, after what the tenants' policies no longer allow was withdrawn. Raises UserError for a cut
    in the future or before the last cut, and if another window is written meanwhile."""
    contents.withdraw()
    with engine.begin() as connection:
        now = journal.stamp(connection)
    cut = now if cut is None else cut
    if cut > now:
        raise UserError("a window cannot be cut in the future: give an earlier --cut")
    with journal.reading(engine) as connection:
        last = connection.execute(sa.select(schema.windows).order_by(schema.windows.c.number.desc()).limit(1)).first()
    number = 1 if last is None else last.number + 1
    if last is not None and cut <= last.cut:
        raise UserError(f"window {last.number} was cut at {last.cut}: give a later --cut than that")
    for _ in range(_ATTEMPTS):
        result, _ = _compute(engine, contents, config, number, cut, now)
        with engine.begin() as connection:
            now = journal.stamp(connection)
            if not _forgotten_since(connection, result.at):
                _write(connection, result)
                return result
    raise UserError("accounts are forgotten or withdraw faster than a window is computed; try again in a minute")


def window_samples(engine: sa.Engine, contents: LiveContents, config: LabelsConfig, number: int) -> list[LiveSample]:
    """The batch of a window, in its order. If an account was forgotten or withdrew since, and the window has not been
    trained on, the window is computed and written again without the account. Raises UserError for a missing window, and
    for a batch that has changed or can no longer be computed."""
    row = _window(engine, number)
    with journal.reading(engine) as connection:
        late = _forgotten_since(connection, row.at)
    at = row.at
    if late:
        if row.version is not None or _exists(engine, number + 1):
            raise UserError(
                f"accounts were forgotten or withdrew since window {number}, which is past: train on the last window"
            )
        with engine.begin() as connection:
            at = journal.stamp(connection)
    result, batch = _compute(engine, contents, config, number, row.cut, at)
    if late:
        with engine.begin() as connection:
            connection.execute(sa.delete(schema.windows).where(schema.windows.c.number == number))
            connection.execute(sa.delete(schema.labels).where(schema.labels.c.cut == row.cut))
            connection.execute(sa.delete(schema.exits).where(schema.exits.c.window == number))
            _write(connection, result, run=row.run, base_version=row.base_version)
    elif result.batch != row.batch:
        raise UserError(f"the batch of window {number} is not what it was: `etude live window --replay {number}`")
    return batch


@dataclass(frozen=True)
class WindowReplay:
    """Whether the parts of a window are the same, bit for bit, when it is computed again from the log."""

    labels: bool
    exits: bool
    batch: bool

    @property
    def same(self) -> bool:
        """Whether all three parts are the same."""
        return self.labels and self.exits and self.batch


def replay_window(engine: sa.Engine, contents: LiveContents, config: LabelsConfig, number: int) -> WindowReplay:
    """Computes a window again and compares. Raises UserError for a missing window, a window by other rules, or missing
    contents."""
    row = _window(engine, number)
    if row.rules != rules_version(config):
        raise UserError(
            f"window {number} was computed by the rules {row.rules}, these are {rules_version(config)}: give the "
            "configuration and the etude of that time"
        )
    result, _ = _compute(engine, contents, config, number, row.cut, row.at)
    with journal.reading(engine) as connection:
        table = schema.labels
        chosen = sa.select(table).where(table.c.cut == row.cut).order_by(table.c.turn)
        labels = tuple(_label(x) for x in connection.execute(chosen).mappings())
        exits = _exits(connection, number)
    then, now = (
        {e.turn for e in some if e.reason in ("expired", "forgotten", WITHDRAWN)} for some in (exits, result.exits)
    )
    if now - then:
        raise UserError(
            f"window {number} cannot be replayed: contents of {len(now - then)} of its turns are gone, as "
            "retention, `etude live forget` and consent that was taken back ask for"
        )
    trained = {e.turn: e for e in result.exits if e.kind == ExitKind.TRAINED}
    exits = tuple(trained.get(e.turn, e) if e.reason in _REFUSALS else e for e in exits)
    return WindowReplay(labels == result.labels, exits == result.exits, row.batch == result.batch)


def signal_calibration(engine: sa.Engine, config: LabelsConfig, number: int) -> dict[str, tuple[int, float | None]]:
    """The prediction of late signals by rewards. For each kind of slow signal that arrived between the previous cut and
    the window's: the number of signals on turns with a matured label, and the correlation of their values with the
    labels' rewards (None if either is constant)."""
    row = _window(engine, number)
    pairs: dict[str, list[tuple[float, float]]] = {}
    with journal.reading(engine) as connection:
        chosen = sa.select(schema.windows.c.cut).where(schema.windows.c.number == number - 1)
        since = connection.execute(chosen).scalar() or 0
        slow = slow_signals(journal.signals(connection, row.cut, since), row.cut, config)
        edits = journal.of_ids(connection, Suggestion, sorted({s.subject for s in slow}))
        turn_of = {s.event: edits[s.subject].turn if s.subject in edits else s.subject for s in slow}
        table, rewards = schema.labels, dict[str, float]()
        matured = table.c.state == LabelState.MATURED.value
        names = sorted(set(turn_of.values()))
        for low in range(0, len(names), _PAGE):
            here = sa.select(table.c.turn, table.c.reward).where(matured, table.c.turn.in_(names[low : low + _PAGE]))
            rewards |= {label.turn: label.reward for label in connection.execute(here.order_by(table.c.cut))}
    for signal in slow:
        if turn_of[signal.event] in rewards:
            pairs.setdefault(str(signal.kind), []).append((signal.value, rewards[turn_of[signal.event]]))
    return {kind: (len(rows), _correlation(rows)) for kind, rows in sorted(pairs.items())}


def _correlation(rows: Sequence[tuple[float, float]]) -> float | None:
    one, other = np.array(rows).T
    return float(np.corrcoef(one, other)[0, 1]) if one.std() > 0 and other.std() > 0 else None


def exits_of(engine: sa.Engine, number: int) -> tuple[TurnExit, ...]:
    """The exits of a window, sorted by turn."""
    with journal.reading(engine) as connection:
        return _exits(connection, number)


def _compute(
    engine: sa.Engine, contents: LiveContents, config: LabelsConfig, number: int, cut: int, at: int
) -> tuple[WindowResult, list[LiveSample]]:
    with journal.reading(engine) as connection:
        rows = _rows(connection, number, cut, at)
    wanted = [t for t in rows.turns if t.id in rows.pending and not unwanted(t, rows.sessions[t.session], rows)]
    keys = contents.keys(rows.sessions[t.session].account for t in wanted)
    features: dict[str, RequestFeatures | str] = {}
    for turn in wanted:
        key = keys[rows.sessions[turn.session].account]
        content = "forgotten" if key is None else contents.turn(key, turn)
        features[turn.id] = content if isinstance(content, str) else request_features(content)
    decision = decide(rows, features, config)
    voted = {name for name, each in features.items() if not isinstance(each, str) and each.votes}
    batch = list(_samples(decision, rows, contents, keys, voted))
    digest = blake3.blake3()
    for sample in batch:
        digest.update(msgspec.msgpack.encode(sample))
    pending = tuple(sorted((t for t in rows.turns if t.id in rows.pending), key=lambda t: t.id))
    result = WindowResult(
        number, cut, at, rules_version(config), decision.labels, decision.exits, digest.hexdigest(), pending
    )
    return result, batch


def _samples(
    decision: WindowDecision,
    rows: WindowRows,
    contents: LiveContents,
    keys: dict[str, bytes | None],
    voted: Collection[str],
) -> Iterator[LiveSample]:
    """The batch, in its order. `voted`: turns whose requests dictate an answer, which no correction may teach."""
    turns = {turn.id: turn for turn in rows.turns}
    made = {label.turn: label for label in decision.labels}
    for each in decision.trained():
        turn, label = turns[each.turn], made[each.turn]
        account = rows.sessions[turn.session].account
        key = keys[account]
        assert key is not None, "a turn whose content cannot be read is dropped"
        content = contents.turn(key, turn)
        if isinstance(content, str):
            raise UserError(f"the content of turn {turn.id} went away while its window was computed; try again")
        text = None if label.correction is None or turn.id in voted else contents.read(key, label.correction)
        yield LiveSample(
            turn=turn.id,
            account=account,
            cluster=turn.cluster,
            manifest=turn.manifest,
            prompt_ids=content.prompt_ids,
            ids=content.ids,
            logprobs=content.logprobs,
            temperature=content.temperature,
            top_p=content.top_p,
            spans=turn.spans,
            reward=label.reward,
            advantage=each.advantage,
            weight=each.weight,
            correction=None if text is None else text.decode(),
        )


def _rows(connection: sa.Connection, number: int, cut: int, at: int) -> WindowRows:
    """The rows of the window `number`: turns since the previous cut, and turns that the previous window held."""
    before = connection.execute(sa.select(schema.windows.c.cut).where(schema.windows.c.number == number - 1)).scalar()
    held = [e.turn for e in _exits(connection, number - 1) if e.kind == ExitKind.HELD]
    pending = journal.of_ids(connection, ServedTurn, held)
    for turn in journal.turns(connection, cut, since=before or 0):
        pending[turn.id] = turn
        if len(pending) > MAX_TURNS:
            raise UserError(f"more than {MAX_TURNS:,} turns wait for a window: give an earlier --cut")
    named = sorted({turn.session for turn in pending.values()})
    sessions = journal.of_ids(connection, Session, named)
    turns = list(_of(connection, ServedTurn, schema.turns, "session", named, schema.turns.c.at < cut))
    names = [t.id for t in turns]
    edits = list(_of(connection, Suggestion, schema.suggestions, "turn", names, schema.suggestions.c.shown < cut))
    subjects = [*named, *names, *(s.id for s in edits)]
    table = schema.signals
    rank = sa.func.row_number().over(partition_by=table.c.subject, order_by=(table.c.arrived_at, table.c.event))
    signals: list[Signal] = []
    for low in range(0, len(subjects), _PAGE):
        here = table.c.subject.in_(subjects[low : low + _PAGE]) & (table.c.arrived_at < cut)
        ranked = sa.select(table, rank.label("place")).where(here).subquery()
        first = sa.select(*(ranked.c[c.name] for c in table.c)).where(ranked.c.place <= MAX_SIGNALS)
        signals += [journal.record(Signal, row) for row in connection.execute(first).mappings()]
    accounts = {s.account for s in sessions.values()}
    forgotten = frozenset(t.account for t in journal.tombstones(connection, at) if t.account in accounts)
    return WindowRows(
        number=number,
        cut=cut,
        at=at,
        sessions=sessions,
        turns=turns,
        pending=frozenset(pending),
        suggestions=edits,
        signals=signals,
        forgotten=forgotten,
        since=_first_seen(connection, sorted({s.voucher for s in sessions.values()}), cut),
    )


def _of(
    connection: sa.Connection,
    kind: type[journal.R],
    table: sa.Table,
    column: str,
    values: Sequence[str],
    where: sa.ColumnElement[bool],
) -> Iterator[journal.R]:
    for low in range(0, len(values), _PAGE):
        chosen = sa.select(table).where(table.c[column].in_(values[low : low + _PAGE]), where)
        for row in connection.execute(chosen).mappings().all():
            yield journal.record(kind, row)


def _first_seen(connection: sa.Connection, accounts: Sequence[str], cut: int) -> dict[str, int]:
    table, out = schema.sessions, dict[str, int]()
    for low in range(0, len(accounts), _PAGE):
        chosen = sa.select(table.c.voucher, sa.func.min(table.c.opened)).group_by(table.c.voucher)
        here = table.c.voucher.in_(accounts[low : low + _PAGE]) & (table.c.opened < cut)
        out |= {row[0]: row[1] for row in connection.execute(chosen.where(here))}
    return out


def _forgotten_since(connection: sa.Connection, at: int) -> bool:
    """Whether an account was forgotten, or withdrew, since."""
    tables = schema.tombstones, schema.withdrawals
    rows = (connection.execute(sa.select(table.c.account).where(table.c.at >= at).limit(1)) for table in tables)
    return any(row.first() is not None for row in rows)


def _write(connection: sa.Connection, result: WindowResult, run: str = "", base_version: int = -1) -> None:
    row = {
        "number": result.number,
        "cut": result.cut,
        "rules": result.rules,
        "batch": result.batch,
        "run": run,
        "base_version": base_version,
        "version": None,
        "at": result.at,
    }
    try:
        connection.execute(sa.insert(schema.windows).values(**row))
    except IntegrityError:
        raise UserError(f"another window {result.number} was written meanwhile; nothing is lost, try again") from None
    labels: list[dict[str, Any]] = []
    for label in result.labels:
        values = msgspec.to_builtins(label)
        labels.append(values | {"components": msgspec.json.encode(values["components"]).decode()})
    exits = [msgspec.to_builtins(each) for each in result.exits]
    for low in range(0, len(labels), 1000):
        connection.execute(sa.insert(schema.labels), labels[low : low + 1000])
    failpoint("live.window")
    for low in range(0, len(exits), 1000):
        connection.execute(sa.insert(schema.exits), exits[low : low + 1000])


def _exists(engine: sa.Engine, number: int) -> bool:
    with journal.reading(engine) as connection:
        chosen = sa.select(schema.windows.c.number).where(schema.windows.c.number == number)
        return connection.execute(chosen).first() is not None


def _window(engine: sa.Engine, number: int) -> Any:
    with journal.reading(engine) as connection:
        row = connection.execute(sa.select(schema.windows).where(schema.windows.c.number == number)).first()
    if row is None:
        raise UserError(f"there is no window {number}")
    return row


def _label(row: sa.RowMapping) -> Label:
    values: dict[str, Any] = _plain(row) | {"components": msgspec.json.decode(row["components"], type=dict[str, float])}
    return msgspec.convert(values, Label)


def _exits(connection: sa.Connection, number: int) -> tuple[TurnExit, ...]:
    chosen = sa.select(schema.exits).where(schema.exits.c.window == number).order_by(schema.exits.c.turn)
    return tuple(msgspec.convert(_plain(row), TurnExit) for row in connection.execute(chosen).mappings())


def _plain(row: sa.RowMapping) -> dict[str, Any]:
    return {f"{name}": value for name, value in row.items()}  # SQLAlchemy's names are no plain str
