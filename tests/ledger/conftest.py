"""Ledgers on both databases."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from etude.ledger import schema
from etude.ledger.ledger import Ledger
from tests.harness.conftest import compact, compact_folder, dataset, hermes, hermes_folder  # noqa: F401

POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a private PostgreSQL server on a unix socket. It refuses to run as root, so root lends it a user."""
    if not POSTGRES:
        pytest.skip("no PostgreSQL server is installed")
    tools = POSTGRES[-1].parent
    home = Path(tempfile.mkdtemp(prefix="etude-pg-"))  # short: a socket's path has at most 107 characters
    user: dict[str, int] = {}
    if os.getuid() == 0:
        names = {account.pw_name for account in pwd.getpwall()}
        account = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
        user = {"user": account.pw_uid, "group": account.pw_gid}
        os.chown(home, account.pw_uid, account.pw_gid)

    def tool(name: str, *arguments: str) -> None:
        subprocess.run([tools / name, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=home, timeout=120, **user)

    try:
        tool("initdb", "-D", f"{home}/data", "-A", "trust", "-U", "etude", "--no-sync", "--no-locale", "-E", "UTF8")
        options = f"-c listen_addresses= -c unix_socket_directories={home} -c fsync=off -c shared_buffers=16MB"
        tool("pg_ctl", "-D", f"{home}/data", "-w", "-t", "60", "-o", options, "-l", f"{home}/log", "start")
        yield f"postgresql://etude@/postgres?host={home}"
        tool("pg_ctl", "-D", f"{home}/data", "-w", "-t", "60", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A ledger URL with nothing in it, once per database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/ledger.db"
        return
    server: str = request.getfixturevalue("postgres")
    yield server
    engine = sa.create_engine(server.replace("postgresql:", "postgresql+psycopg:"))
    schema.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    ledger = Ledger.open(url)
    yield ledger
    ledger.close()
