"""RunTables on a run's ledger, repeated while its database server is away."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, ProgrammingError

from etude.errors import UserError
from etude.ledger.database import Outage, is_outage, persist, reason, unreadable

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="RunTables")


class RunTables:
    """The base of what reads and writes the tables of a ledger. A transaction raises UserError when the database cannot
    be reached, is full or is damaged."""

    def __init__(self, engine: sa.Engine):
        self._engine = engine
        # Several statements of a reader see one moment: SQLite's BEGIN does that by itself, PostgreSQL's does not.
        snapshot = {"isolation_level": "REPEATABLE READ"} if engine.dialect.name == "postgresql" else {}
        self._reader = engine.execution_options(read_only=True, **snapshot)

    @contextmanager
    def _write(self) -> Generator[sa.Connection]:
        with self._errors(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _read(self) -> Generator[sa.Connection]:
        with self._errors(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except (IntegrityError, ProgrammingError) as e:
            if str(e.orig).startswith("CHECK constraint failed"):  # SQLite's: a byte of its schema is another one
                raise unreadable("ledger", self._engine) from e
            raise
        except DBAPIError as e:
            kind = Outage if is_outage(e) else UserError
            why = f"the ledger {self._engine.url} failed: {reason(e)}; check the disk or the server, then --resume"
            raise kind(why) from e
        except UnicodeDecodeError as e:
            raise unreadable("ledger", self._engine) from e


def persistent(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """The method, repeated while the database server is away. For methods whose repetition after a commit changes
    nothing."""

    @wraps(method)
    def tried(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return persist(lambda _: method(self, *args, **kwargs))

    return tried
