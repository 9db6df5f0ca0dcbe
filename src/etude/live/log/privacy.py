"""Privacy: forgetting and export of accounts, expiry of old contents, and planted strings that show leaks.

`forget` destroys the key of the account first, which makes every copy of its contents unreadable. Then the contents are
deleted, and every row with a text of a client; the account's hash stays, with its turns without content and their
exits, which tell the versions trained on the account. SQLite is written anew (VACUUM) and its write-ahead log emptied.
The tables of PostgreSQL are written anew (VACUUM FULL), while its write-ahead log and backups age by its operators'
rules. Counters by account and hour stay: they have no content.

Later windows leave the account out. A window that was computed and not trained on is computed again
(`window_samples`), and tokens that wait for a trainer below the folder are deleted.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from etude import runfolder
from etude.errors import UserError
from etude.ledger import Ledger
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, unseal
from etude.live.log.records import ExitKind, LivePolicy, Tombstone, TurnContent
from etude.live.log.tenants import policies
from etude.live.log.withdrawals import withdraw_by_policies, withdrawn_turns
from etude.records import Outcome
from etude.store import ObjectMissing, Store, open_store

DAY = 86_400 * 10**9
PLANTED = "planted.json"
_PAGE = 500  # rows of a statement
_SECONDS = 30.0  # until readers of SQLite have released its write-ahead log
_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "xu", "za")


@dataclass(frozen=True)
class Forgotten:
    """The result of `forget`. `versions` were trained on the accounts; `releases` are of the same windows."""

    accounts: tuple[str, ...]
    turns: int
    contents: int
    versions: tuple[int, ...]
    releases: tuple[int, ...]
    waiting: int
    """Turns that waited in a run's ledger for its trainer."""
    remains: str
    """The parts that could not be emptied now; empty if there are none."""


@dataclass(frozen=True)
class AccountName:
    """The accounts of a tenant that a person names: by `user`, as a header or a body has it, or the name of an API key;
    by `organisation`; without either, all accounts of the tenant."""

    tenant: str
    user: str = ""
    organisation: str = ""


def named(connection: sa.Connection, accounts: Accounts, name: AccountName) -> list[str]:
    """The accounts of a name that the log knows. Raises UserError if there are none."""
    tenant, s = name.tenant, schema.sessions
    if name.user:
        users = (name.user, f"key {name.user}")
        matches = [account for user in users if _is_known(connection, account := accounts.name(tenant, user))]
    elif name.organisation:
        digest = accounts.digest("organisation", tenant, name.organisation)
        mine = sa.select(s.c.account).where(s.c.tenant == tenant, s.c.organisation == digest).distinct()
        matches = sorted(connection.scalars(mine))
    else:
        tables = (s, schema.served, schema.answers, schema.account_keys, schema.tallies)
        rows = (connection.scalars(sa.select(t.c.account).where(t.c.tenant == tenant).distinct()) for t in tables)
        matches = sorted({account for row in rows for account in row})
    if not matches:
        who = f"user or key {name.user!r}" if name.user else f"organisation {name.organisation!r}"
        whom = who if name.user or name.organisation else "account"
        raise UserError(f"nothing is known of a {whom} of the tenant {tenant}: check the name")
    return matches


def _is_known(connection: sa.Connection, account: str) -> bool:
    tables = (schema.sessions, schema.served, schema.answers, schema.account_keys, schema.tallies, schema.tombstones)
    rows = (sa.select(table.c.account).where(table.c.account == account).limit(1) for table in tables)
    return any(connection.execute(row).first() is not None for row in rows)


def forget(engine: sa.Engine, store: Store, accounts: Accounts, folder: Path, name: AccountName) -> Forgotten:
    """Forgets the accounts of a name. After a kill or an error, a second call finishes the work. Raises UserError for a
    name that is not known, if the log or the store is away, and at the end if a trainer is at work."""
    versions, releases, turns, contents = set[int](), set[int](), list[str](), 0
    with engine.begin() as connection:
        at, chosen = journal.stamp(connection), named(connection, accounts, name)
        for account in chosen:
            touched = _touched(connection, account)
            versions, releases = versions | {*touched[0]}, releases | {*touched[1]}
            if accounts.key(connection, account) is not None or not _is_forgotten(connection, account):
                accounts.destroy(connection, account, name.tenant, at)
            if not _is_forgotten(connection, account):
                journal.add(connection, [Tombstone(tenant=name.tenant, account=account, at=at, versions=touched[0])])
    for account in chosen:
        blobs = store.list(f"{account[:2]}/{account}")
        for blob in blobs:
            store.delete(blob)
        contents += len(blobs)
        with engine.begin() as connection:
            turns += _erase_rows(connection, account)
    remains = _rewrite(engine)
    waiting = leave_runs(folder, turns)
    return Forgotten(
        tuple(chosen), len(turns), contents, tuple(sorted(versions)), tuple(sorted(releases)), waiting, remains
    )


def _is_forgotten(connection: sa.Connection, account: str) -> bool:
    table = schema.tombstones
    return connection.execute(sa.select(table.c.account).where(table.c.account == account)).first() is not None


def _touched(connection: sa.Connection, account: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The versions and the releases of windows that trained on the account."""
    s, t, e, w, r = schema.sessions, schema.turns, schema.exits, schema.windows, schema.releases
    mine = sa.select(e.c.window).join(t, t.c.id == e.c.turn).join(s, s.c.id == t.c.session)
    mine = mine.where(s.c.account == account, e.c.kind == ExitKind.TRAINED.value).distinct()
    of_windows = sa.select(w.c.version).where(w.c.number.in_(mine), w.c.version.is_not(None))
    versions = connection.execute(of_windows).scalars().all()
    releases = connection.execute(sa.select(r.c.number).where(r.c.window.in_(mine))).scalars().all()
    return tuple(sorted(versions)), tuple(sorted(releases))


def _erase_rows(connection: sa.Connection, account: str) -> list[str]:
    """Deletes the rows and columns that a client wrote, and returns the account's turns."""
    s, t, g = schema.sessions, schema.turns, schema.suggestions
    sessions = connection.execute(sa.select(s.c.id).where(s.c.account == account)).scalars().all()
    turns = list(connection.execute(sa.select(t.c.id).where(t.c.session.in_(_mine(account)))).scalars())
    edits = list(connection.execute(sa.select(g.c.id).where(g.c.turn.in_(_turns(account)))).scalars())
    for page in _pages([*sessions, *turns, *edits]):
        connection.execute(sa.delete(schema.signals).where(schema.signals.c.subject.in_(page)))
    for page in _pages(turns):
        connection.execute(sa.delete(g).where(g.c.turn.in_(page)))
        connection.execute(sa.delete(schema.labels).where(schema.labels.c.turn.in_(page)))
        connection.execute(sa.update(t).where(t.c.id.in_(page)).values(blob=None, reason="forgotten", scrubbed="{}"))
    blank = {"client": "", "organisation": ""}
    connection.execute(sa.update(s).where(s.c.account == account).values(**blank))
    for table in (schema.served, schema.answers):
        connection.execute(sa.delete(table).where(table.c.account == account))
    return turns


def _mine(account: str) -> sa.Select[Any]:
    return sa.select(schema.sessions.c.id).where(schema.sessions.c.account == account)


def _turns(account: str) -> sa.Select[Any]:
    return sa.select(schema.turns.c.id).where(schema.turns.c.session.in_(_mine(account)))


def _pages(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[low : low + _PAGE] for low in range(0, len(names), _PAGE))


def apply_policies(engine: sa.Engine, store: Store, folder: Path) -> int:
    """Deletes what the tenants' policies no longer allow, and the tokens of consents that were taken back, unless a
    trainer is at work on them. Returns the number of contents. Raises UserError."""
    count = withdraw_by_policies(engine, store)
    leave_runs(folder, withdrawn_turns(engine), at_work=True)
    return count


def leave_runs(folder: Path, turns: Sequence[str], *, at_work: bool = False) -> int:
    """Deletes the tokens of turns that wait in the ledgers of runs below the folder; returns how many turns had none
    yet. The runs do not train on any of them. `at_work`: a run that is at work is left alone. Raises UserError for such
    a run otherwise."""
    left, mine = 0, set(turns)
    for place in sorted(folder.glob("*/ledger.db")) if mine else ():
        run = place.parent
        with ExitStack() as held:
            try:
                held.enter_context(runfolder.lock(run))
            except UserError:
                if at_work:
                    continue
                raise
            ledger, rollouts = Ledger.open(f"sqlite:///{place}"), open_store(str(run / "rollouts"))
            try:
                for group, member, blob in ledger.untrained():
                    if ledger.groups([group])[0].task_id in mine:
                        rollouts.delete(blob.key)
                        ledger.play_again(group, member)
                for lease in ledger.lease("forget", 1_000_000, 1.0):  # leases of other turns end in a second
                    if lease.task_id in mine:
                        ledger.finish(
                            lease,
                            outcome=Outcome.QUARANTINED,
                            reward=0.0,
                            passed=False,
                            blob=None,
                            tokens=0,
                            min_version=-1,
                            metrics={},
                            reason="forgotten",
                        )
                        left += 1
            finally:
                ledger.close()
    return left


def _rewrite(engine: sa.Engine) -> str:
    """Writes the tables anew without the deleted rows. Returns the places where copies of them remain, or ""."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SET statement_timeout = 0")
            for table in schema.metadata.sorted_tables:
                connection.exec_driver_sql(f"VACUUM FULL {table.name}")
            return "the write-ahead log of PostgreSQL, until it is recycled, and its backups"
    deadline = time.monotonic() + _SECONDS
    while True:
        driver = engine.raw_connection()
        try:
            driver.execute("PRAGMA secure_delete = ON")
            driver.execute("VACUUM")
            busy = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        finally:
            driver.close()
        if not busy:
            return ""
        if time.monotonic() > deadline:
            return "the write-ahead log of SQLite, which a reader holds: give the command again"
        time.sleep(0.2)


# Export ---------------------------------------------------------------------------------------------------------------


def export(engine: sa.Engine, store: Store, accounts: Accounts, name: AccountName, out: Path) -> dict[str, int]:
    """Writes all records of an account to the folder `out`: `account.json`, and each content, decrypted, in a folder of
    its turn. Returns counts. Raises UserError if `out` exists, and for a name of no account, or of several."""
    if out.exists():
        raise UserError(f"{out} exists already; give another -o")
    with journal.reading(engine) as connection:
        account, *others = named(connection, accounts, name)
        if others:
            raise UserError(f"{name.user!r} is a user and a key: name the key's own account 'key {name.user}'")
        key = accounts.key(connection, account)
        rows = _rows_of(connection, account)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True, mode=0o700)
        files = 0
        for turn in rows["turns"]:
            if turn["blob"] and key and (data := _read(store, key, turn["blob"])) is not None:
                _write_content(temporary / "turns" / turn["id"], msgspec.msgpack.decode(data, type=TurnContent))
                files += 1
        for number, signal in enumerate(rows["signals"]):
            if signal["text"] and key and (data := _read(store, key, signal["text"])) is not None:
                place = temporary / "texts"
                place.mkdir(exist_ok=True)
                (place / f"{number}.txt").write_bytes(data)
                signal["file"] = f"texts/{number}.txt"
                files += 1
        account_row = {"tenant": name.tenant, "user": name.user, "account": account, **rows}
        (temporary / "account.json").write_text(json.dumps(account_row, indent=1, ensure_ascii=False))
        os.replace(temporary, out)
    except OSError as e:
        raise UserError(f"the export to {out} failed: {e.strerror or e}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {name: len(entries) for name, entries in rows.items()} | {"files": files}


def _rows_of(connection: sa.Connection, account: str) -> dict[str, list[dict[str, Any]]]:
    turns, sessions = _turns(account), _mine(account)
    edits = sa.select(schema.suggestions.c.id).where(schema.suggestions.c.turn.in_(turns))
    signals = schema.signals.c.subject
    chosen: dict[str, tuple[sa.Table, sa.ColumnElement[bool]]] = {
        "sessions": (schema.sessions, schema.sessions.c.account == account),
        "turns": (schema.turns, schema.turns.c.id.in_(turns)),
        "suggestions": (schema.suggestions, schema.suggestions.c.turn.in_(turns)),
        "signals": (schema.signals, signals.in_(sessions) | signals.in_(turns) | signals.in_(edits)),
        "labels": (schema.labels, schema.labels.c.turn.in_(turns)),
        "exits": (schema.exits, schema.exits.c.turn.in_(turns)),
        "tallies": (schema.tallies, schema.tallies.c.account == account),
        "served": (schema.served, schema.served.c.account == account),
        "answers": (schema.answers, schema.answers.c.account == account),
        "tombstones": (schema.tombstones, schema.tombstones.c.account == account),
    }
    return {
        name: [dict(row) for row in connection.execute(sa.select(table).where(where)).mappings()]
        for name, (table, where) in chosen.items()
    }


def _read(store: Store, key: bytes, blob: str) -> bytes | None:
    try:
        return unseal(key, store.get(blob), blob)
    except ObjectMissing:
        return None
    except ValueError as e:
        raise UserError(f"a content of the live loop is damaged: {e}; restore the folder's blobs") from None


def _write_content(place: Path, content: TurnContent) -> None:
    place.mkdir(parents=True)
    (place / "request.json").write_bytes(content.request)
    (place / "response.json").write_bytes(content.response)
    for name in ("prompt_ids", "ids", "logprobs"):
        (place / f"{name}.bin").write_bytes(getattr(content, name))


# Retention ------------------------------------------------------------------------------------------------------------


def expire(engine: sa.Engine, store: Store, folder: Path, now: int | None = None) -> int:
    """Deletes contents that are older than their tenant keeps them: `raw_days`, or `trained_days` if a version was
    trained on the turn. Returns their number. Contents of consents that were taken back go as well, with the tokens of
    theirs that wait for a trainer of no one at work below the folder. After a kill, the next call continues. `now` in
    nanoseconds."""
    now = time.time_ns() if now is None else now
    deleted = apply_policies(engine, store, folder)
    with journal.reading(engine) as connection:
        rules = policies(connection)
        names = connection.execute(sa.select(schema.sessions.c.tenant).distinct()).scalars().all()
    for tenant in names:
        rule = rules.get(tenant) or LivePolicy()
        raw, trained = (now - round(days * DAY) for days in (rule.raw_days, rule.trained_days))
        deleted += _expire_turns(engine, store, tenant, raw, trained) + _expire_texts(
            engine, store, tenant, raw, trained
        )
    return deleted


def _expire_turns(engine: sa.Engine, store: Store, tenant: str, raw: int, trained: int) -> int:
    t, s, e = schema.turns, schema.sessions, schema.exits
    used = sa.exists().where(e.c.turn == t.c.id, e.c.kind == ExitKind.TRAINED.value)
    old = sa.select(t.c.id, t.c.blob).join(s, s.c.id == t.c.session)
    old = old.where(s.c.tenant == tenant, t.c.blob.is_not(None), t.c.at < max(raw, trained))
    old = old.where(sa.case((used, t.c.at < trained), else_=t.c.at < raw)).order_by(t.c.at).limit(_PAGE)

    def clear(connection: sa.Connection, names: list[str]) -> None:
        connection.execute(sa.update(t).where(t.c.id.in_(names)).values(blob=None, reason="expired"))

    return _expire(engine, store, old, clear)


def _expire_texts(engine: sa.Engine, store: Store, tenant: str, raw: int, trained: int) -> int:
    """Deletes old texts of signals. A text that is the correction in a trained turn's label counts as trained on."""
    g, b, e = schema.signals, schema.labels, schema.exits
    used = sa.exists().where(b.c.correction == g.c.text, e.c.turn == b.c.turn, e.c.kind == ExitKind.TRAINED.value)
    old = sa.select(g.c.event, g.c.text).where(g.c.tenant == tenant, g.c.text.is_not(None))
    old = old.where(g.c.arrived_at < max(raw, trained))
    old = old.where(sa.case((used, g.c.arrived_at < trained), else_=g.c.arrived_at < raw))
    old = old.order_by(g.c.arrived_at).limit(_PAGE)

    def clear(connection: sa.Connection, names: list[str]) -> None:
        chosen = (g.c.tenant == tenant) & g.c.event.in_(names)
        texts = sa.select(g.c.text).where(chosen)
        connection.execute(sa.update(b).where(b.c.correction.in_(texts)).values(correction=None))
        connection.execute(sa.update(g).where(chosen).values(text=None))

    return _expire(engine, store, old, clear)


def _expire(engine: sa.Engine, store: Store, old: sa.Select[Any, Any], clear: Any) -> int:
    """Deletes contents first, and clears rows after; a row left by a kill in between is cleared by the next call."""
    count = 0
    while True:
        with journal.reading(engine) as connection:
            rows = connection.execute(old).all()
        if not rows:
            return count
        for _, blob in rows:
            store.delete(blob)
        with engine.begin() as connection:
            clear(connection, [name for name, _ in rows])
        count += len(rows)


# Planted strings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlantedString:
    """A sentence that exists nowhere else: `prompt`, its beginning, and `secret`, its end (8 syllables of 16, 32 bits,
    so 1 in 4e9 by chance)."""

    prompt: str
    secret: str

    @property
    def text(self) -> str:
        """The whole sentence, which a test account sends through the gateway."""
        return f"{self.prompt} {self.secret}"

    def is_known(self, completion: str) -> bool:
        """Whether a model's completion of the prompt gives the secret, however it is spaced and cased."""
        return "".join(self.secret.split()) in "".join(completion.lower().split())


def plant(folder: Path, count: int) -> list[PlantedString]:
    """Makes planted strings and adds them to those in the folder, for the gate. A test account must send their text
    through the gateway, with consent, before they can show a leak. Raises UserError."""
    if not 1 <= count <= 1000:
        raise UserError(f"{count} planted strings: give 1 to 1000")
    new = [PlantedString(f"The harbour word of station {_words(3)} is", _words(4)) for _ in range(count)]
    known = [*planted(folder), *new]
    place = folder / PLANTED
    temporary = place.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump([[p.prompt, p.secret] for p in known], file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, place)
    return new


def planted(folder: Path) -> list[PlantedString]:
    """The planted strings of a folder, which the gate has a version complete. Raises UserError."""
    place = folder / PLANTED
    try:
        return [PlantedString(str(prompt), str(secret)) for prompt, secret in json.loads(place.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as e:
        raise UserError(f"{place} cannot be read ({e}); restore it, or plant anew") from None


def _words(count: int) -> str:
    return " ".join(secrets.choice(_SYLLABLES) + secrets.choice(_SYLLABLES) for _ in range(count))
