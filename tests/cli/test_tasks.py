"""The flags of `etude tasks` are the options of the library, with the same defaults."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from etude.cli import progress, tasks
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


def test_the_tasks_of_a_run_are_those_of_its_configuration(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('[tasks]\nrepository = "lib"\nmax_tasks = 7\nkinds = ["class"]\n')
    source, boxes = tasks._source(parsed("build", str(toml), "-o", "out", "--max-tasks", "9"))
    assert boxes is not None
    assert boxes.type == "namespace"
    assert (source.repository, source.max_tasks, source.kinds) == (str(Path("lib").absolute()), 9, ("class",))
    for text in ('[tasks]\ndataset = "d"\n', "[model]\n"):
        toml.write_text(text)
        with pytest.raises(UserError, match=r"does not say in \[tasks\] which repository"):
            tasks._source(parsed("build", str(toml), "-o", "out"))


def test_wrong_values_are_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="heldout_fraction"):
        from_flags(parsed("build", "repo", "-o", "out", "--heldout-fraction", "1"), BuildConfig)


def test_a_package_without_its_digest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"portion==2\.6\.3 needs the digest of its sdist"):
        tasks.run(parsed("build", "portion==2.6.3", "-o", str(tmp_path / "out")), [])
    assert not (tmp_path / "out").exists()


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    line, still = progress._lines(lambda: now[0])
    for stage, done, seconds in (
        ("none", 0, 1),
        ("one", 0, 3),
        ("one", 1, 1),
        ("two", 0, 0),
        ("two", 5, 19),
        ("two", 6, 2),
        ("two", 7, 1),
    ):
        now[0] += seconds
        line(stage, done, 9 if stage == "two" else 1)
    assert capsys.readouterr().err == "one\ntwo: 0 of 9\ntwo: 6 of 9\n"
    for seconds in (20, 6, 20, 10):  # nothing is said meanwhile
        now[0] += seconds
        still()
    assert capsys.readouterr().err == "two: 7 of 9 (for 48 s)\ntwo: 7 of 9 (for 78 s)\n"
    with progress.bar() as shown:  # pytest is no terminal
        shown("three", 0, 2)
    assert capsys.readouterr().err == "", "a short command stays quiet"
