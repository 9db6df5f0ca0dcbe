"""Logs on both databases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from etude.live.log import schema
from tests.helpers.postgres import INSTALLED, PostgresServer


@pytest.fixture(scope="session")
def live_postgres() -> Iterator[PostgresServer]:
    """A private PostgreSQL server."""
    if not INSTALLED:
        pytest.skip("no PostgreSQL server is installed")
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The `database` of a configuration: none, which is SQLite in its folder, and PostgreSQL with nothing in it."""
    if request.param == "sqlite":
        yield None
        return
    server: PostgresServer = request.getfixturevalue("live_postgres")
    yield server.url
    engine = sa.create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"))
    schema.metadata.drop_all(engine)
    engine.dispose()
