"""A rollback with real servers under streaming load, one cluster stopped meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.live_rollback import drive


@pytest.mark.release
def test_a_rollback_under_load_fails_no_request(tmp_path: Path) -> None:
    """The last answer of the bad version ends within five seconds of the decision, and of the return of the server that
    was stopped for 30 seconds."""
    done = drive(tmp_path, 30.0)
    assert done.failed == []
    assert done.seconds("east", done.decided) <= 5.0
    assert done.seconds("west", done.returned) <= 5.0
    assert {answer.version for answer in done.answers} == {done.bad, done.good}
    assert done.good > done.bad
    for cluster in ("east", "west"):
        assert sum(answer.cluster == cluster and answer.version == done.good for answer in done.answers) > 0
