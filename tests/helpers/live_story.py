"""A live log told in seconds: sessions, turns, edits and signals as records."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from etude.config.live import LabelsConfig
from etude.live.learn.attribution import labels
from etude.live.learn.window import LiveContents
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, open_log, seal
from etude.live.log.records import (
    Arm,
    Consent,
    Label,
    ServedTurn,
    Session,
    Signal,
    SignalKind,
    Suggestion,
    TurnContent,
    TurnKind,
    VersionSpan,
    ulid,
)
from etude.store import open_store

BASE = 1_767_225_600_000_000_000  # 1 January 2026
SECOND = 1_000_000_000


def new_session(**fields: Any) -> Session:
    """A session with consent; `fields` has its account."""
    values: dict[str, Any] = {
        "id": ulid(),
        "tenant": "acme",
        "consent": Consent(granted=True, scope="train"),
        "arm": Arm.CONTROL,
        "release": 1,
        "propensity": 1.0,
        "opened": 0,
    }
    return Session(**{"voucher": fields["account"]} | values | fields)


def new_turn(session: str, **fields: Any) -> ServedTurn:
    """A turn of 4 tokens by version 3, without content."""
    values: dict[str, Any] = {
        "id": ulid(),
        "session": session,
        "sequence": 0,
        "kind": TurnKind.MAIN,
        "release": 1,
        "manifest": "m3",
        "prompt_tokens": 8,
        "sampled_tokens": 4,
        "spans": (VersionSpan(low=0, high=4, version=3),),
        "blob": None,
        "scrubbed": {},
        "rules": "r",
        "stop": "stop",
        "seconds": 0.0,
        "cluster": "main",
        "at": 0,
    }
    return ServedTurn(**values | fields)


class Story:
    """Records by the second. Identifiers are given, so that a story reads the same in every test."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.turns: list[ServedTurn] = []
        self.suggestions: list[Suggestion] = []
        self.signals: list[Signal] = []

    def session(self, name: str, at: float = 0.0, **fields: Any) -> str:
        """A session with consent, of an account of its own unless `account` is given."""
        values = {"account": f"account of {name}", "opened": time(at)} | fields
        self.sessions.append(new_session(id=name, **values))
        return name

    def turn(self, session: str, name: str, at: float, **fields: Any) -> str:
        """A turn of 4 tokens by version 3; of a session that is opened with it if it is not there yet."""
        if all(s.id != session for s in self.sessions):
            self.session(session, at)
        number = 1 + sum(t.session == session for t in self.turns)
        values = {"blob": f"{session}/{name}", "sequence": number, "at": time(at)} | fields
        self.turns.append(new_turn(session, id=name, **values))
        return name

    def edit(self, turn: str, name: str, at: float, characters: int = 100, path: str = "a.py") -> str:
        """An edit of a turn."""
        self.suggestions.append(
            Suggestion(
                id=name,
                turn=turn,
                path=path,
                base="base",
                old_lines=(0, 1),
                new="new",
                characters=characters,
                shown=time(at),
            )
        )
        return name

    def signal(self, subject: str, kind: SignalKind, at: float, value: float = 1.0, **fields: Any) -> Signal:
        """A signal that arrives at `at`; its event is its number."""
        values: dict[str, Any] = {"tenant": "acme", "source": "client", "observed_at": time(at)} | fields
        made = Signal(
            **(
                {
                    "event": f"{len(self.signals)}",
                    "subject": subject,
                    "kind": kind,
                    "value": value,
                    "arrived_at": time(at),
                }
                | values
            )
        )
        self.signals.append(made)
        return made

    def survived(self, subject: str, share: float, at: float, horizon: float = 1800.0, **fields: Any) -> Signal:
        """The share of an edit that is alive `horizon` seconds after it was shown, told at `at`."""
        return self.signal(subject, SignalKind.SURVIVED, at, share, horizon=horizon, **fields)

    def labels(
        self,
        cut: float = 100_000.0,
        config: LabelsConfig | None = None,
        rated: Iterable[str] = (),
        of: Iterable[str] | None = None,
    ) -> dict[str, Label]:
        """The labels at a cut, by turn."""
        made = labels(
            self.sessions,
            self.turns,
            self.suggestions,
            self.signals,
            time(cut),
            config or LabelsConfig(),
            rated=list(rated),
            of=None if of is None else list(of),
        )
        return {label.turn: label for label in made}


def time(at: float) -> int:
    """Nanoseconds of the server's clock."""
    return BASE + round(at * SECOND)


def content(request: str, answer: bytes = b"\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0") -> TurnContent:
    """The content of a turn whose last message is `request`; four tokens are sampled."""
    body = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": request}]}
    prompt = [ord(c) for c in request]
    return TurnContent(
        dialect="chat",
        request=json.dumps(body).encode(),
        response=b"{}",
        ids=answer,
        temperature=1.0,
        top_p=1.0,
        prompt_ids=np.array(prompt, "<i4").tobytes(),
        logprobs=np.full(len(answer) // 4, -0.5, "<f4").tobytes(),
    )


class StoryLog:
    """A live loop's folder with the log at `url`, into which stories are written with the times that they tell."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.engine = open_log(folder, url)
        self.accounts, self.store = Accounts(folder), open_store(str(folder / "blobs"))
        self.contents = LiveContents(self.engine, self.accounts, self.store)

    def write(self, story: Story, requests: dict[str, str] | None = None) -> None:
        """Appends what of a story is not there yet. `requests`: last messages by turn; by default all differ."""
        owner = {s.id: s for s in story.sessions}
        with self.engine.begin() as connection:
            keys = self.accounts.keys(connection, {s.account: s.tenant for s in story.sessions}, BASE)
            for table, rows, column in (
                (schema.sessions, story.sessions, "id"),
                (schema.turns, story.turns, "id"),
                (schema.suggestions, story.suggestions, "id"),
                (schema.signals, story.signals, "event"),
            ):
                there = set(connection.execute(sa.select(table.c[column])).scalars())
                fresh = [row for row in rows if getattr(row, column) not in there]
                journal.add(connection, fresh)
                for row in fresh:
                    if isinstance(row, ServedTurn) and row.blob is not None:
                        made = content((requests or {}).get(row.id, f"fix the {row.id} of {row.id} in {row.id}"))
                        key = keys[owner[row.session].account]
                        self.store.put(row.blob, seal(key, msgspec.msgpack.encode(made), row.blob))

    def close(self) -> None:
        """Ends its connections."""
        self.engine.dispose()
