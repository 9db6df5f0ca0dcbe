"""The sample run as fixtures."""

from pathlib import Path

import pytest

from etude.dashboard.report import RunReport
from etude.dashboard.view import RunView, load_view
from tests.helpers.sample_run import make_report, shown_episodes, write_run


@pytest.fixture
def report() -> RunReport:
    return make_report()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def view(run_dir: Path) -> RunView:
    return load_view(run_dir, shown_episodes())
