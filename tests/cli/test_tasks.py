"""The flags of `etude tasks` are the options of the library, with the same defaults."""

from __future__ import annotations

import argparse

import pytest

from etude.cli import tasks
from etude.cli.flags import from_flags
from etude.config import BuildConfig, EditTableConfig
from etude.errors import UserError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.set_defaults(command="tasks")
    tasks.add(parser)
    return parser.parse_args(words)


def test_flags_are_the_options() -> None:
    assert from_flags(parsed("build", "repo", "-o", "out"), BuildConfig) == BuildConfig()
    words = (
        "--kinds",
        "class",
        "commit",
        "--max-functions",
        "3",
        "--visible-failure",
        "--write-tests",
        "writer",
    )
    options = from_flags(parsed("build", "repo", "-o", "out", *words), BuildConfig)
    changed = {
        "kinds": ("class", "commit"),
        "max_functions": 3,
        "visible_failure": True,
        "write_tests": "writer",
    }
    assert options == BuildConfig(**changed)
    assert from_flags(parsed("fast-apply", "repo", "-o", "out"), EditTableConfig) == EditTableConfig()


def test_wrong_values_are_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="heldout_fraction"):
        from_flags(parsed("build", "repo", "-o", "out", "--heldout-fraction", "1"), BuildConfig)
