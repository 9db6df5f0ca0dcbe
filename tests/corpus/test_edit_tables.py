"""Tables of edits from clones and releases: labels, limits, splits, refusals; and a build that repeats."""

import pytest

from etude.cli import main
from etude.config import EditTableConfig
from etude.corpus.edits.build import build_edit_table
from etude.corpus.edits.repositories import read
from etude.edits import examples as tables
from etude.edits.merge import merge
from etude.errors import UserError
from tests.helpers.libraries import write


def test_a_build_splits_by_repository_and_repeats(releases, clone, tmp_path):
    options = EditTableConfig(seed=3, max_lines=60, held_out_edits=30)
    train, tested = build_edit_table([releases], [str(clone)], tmp_path / "one", options)
    again, _ = build_edit_table([releases], [str(clone)], tmp_path / "two", options)
    assert train == again
    assert tables.load_examples(tmp_path / "one" / "train.parquet") == train
    assert tables.load_examples(tmp_path / "one" / "heldout.parquet") == tested
    assert (tmp_path / "one" / "DATACARD.md").read_text() == (tmp_path / "two" / "DATACARD.md").read_text()
    assert {e.repository for e in train} == {"lib-2.0"}
    assert {e.repository for e in tested} == {"other"}
    assert {e.origin for e in tested} == {"commits"}
    assert len({e.id for e in train}) == len(train)
    assert {e.language for e in train} >= {"python", "markdown"}
    reals = [e for e in train if e.kind == "real"]
    assert reals
    assert sum(e.kind == "synthetic" for e in train) <= 4 * len(reals)
    assert sum(e.kind == "no-op" for e in train) <= 0.02 * len(train) + 1
    assert all(e.file != e.result for e in train if e.kind != "no-op")
    assert all(e.merges == (merged(e) == e.result) for e in [*train, *tested])
    assert sum(e.weight for e in train) == pytest.approx(len(train))
    card = (tmp_path / "one" / "DATACARD.md").read_text()
    assert "| lib-2.0 | MIT | LICENSE | releases |" in card
    assert "evaluation" in card


def merged(example):
    try:
        return merge(example.file, example.sketch).text
    except ValueError:
        return None


def test_commits_and_releases_are_read_as_edits(releases, clone):
    library, other = read(releases), read(str(clone))
    assert {c.path for c in library.changes} == {f"lib/part{i}.py" for i in range(6)} | {"README.md"}
    assert {c.path for c in other.changes} == {f"lib/part{i}.py" for i in range(100, 106)}
    assert {c.subject for c in other.changes} == {"Double the items"}
    assert all(c.after.count("def ") == c.before.count("def ") + 1 for c in other.changes)


def test_a_chain_of_releases_holds_what_each_changed(releases, tmp_path):
    newest = write(tmp_path, "lib-3.0", True)
    (newest / "lib" / "part0.py").write_text("ONE = 1\n")
    library = read(f"{releases}..{newest}")
    assert library.name == "lib-3.0"
    assert next(c.after for c in library.changes if c.path == "lib/part0.py") == "ONE = 1\n"  # the newest first
    earlier, last = read(releases), read(f"{tmp_path / 'lib-2.0'}..{newest}")
    assert library.changes == last.changes + earlier.changes
    assert library.texts == last.texts


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda root: str(root / "nowhere"), "is not a folder"),
        (lambda root: _without_licence(root), "not permissive"),
    ],
)
def test_bad_repositories_are_refused_and_nothing_is_left(tmp_path, capsys, prepare, sentence):
    argument = prepare(tmp_path)
    with pytest.raises(SystemExit) as end:
        main.main(["tasks", "fast-apply", argument, "-o", str(tmp_path / "out")])
    assert end.value.code == 2
    told = capsys.readouterr()
    assert sentence in told.err
    assert told.err.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def _without_licence(root):
    folder = write(root, "closed", False)
    (folder / "LICENSE").write_text("All rights reserved.")
    return str(folder)


def test_an_own_repository_needs_no_open_licence(tmp_path, capsys):
    closed = _without_licence(tmp_path)
    with pytest.raises(SystemExit) as end:
        main.main(["tasks", "fast-apply", "--own", closed, "-o", str(tmp_path / "out"), "--max-lines", "40"])
    assert end.value.code == 0
    card = (tmp_path / "out" / "DATACARD.md").read_text()
    assert "| closed | own code | the word of whoever built the table | files |" in card
    with pytest.raises(UserError, match="no repository to train on"):
        build_edit_table([], [closed], tmp_path / "none", EditTableConfig(), own=[closed])
    assert not (tmp_path / "none").exists()


def test_one_repository_on_both_sides_is_refused(releases, tmp_path):
    with pytest.raises(UserError, match="both trained on and held out"):
        build_edit_table([releases], [str(tmp_path / "lib-1.0")], tmp_path / "out", EditTableConfig())


def test_the_command_says_what_came_of_it(clone, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main.main(["tasks", "fast-apply", str(clone), "-o", str(tmp_path / "out"), "--max-lines", "40"])
    assert end.value.code == 0
    assert "edits to train on and 0 held-out ones" in capsys.readouterr().out
    assert not (tmp_path / "out" / "heldout.parquet").exists()


def test_training_edits_that_repeat_a_held_out_repository_are_dropped(releases, tmp_path):
    twin = write(tmp_path, "twin", True)
    alone, _ = build_edit_table([releases], [], tmp_path / "alone", EditTableConfig())
    beside, _ = build_edit_table([releases], [str(twin)], tmp_path / "beside", EditTableConfig(held_out_edits=10))
    assert "python" in {e.language for e in alone}
    assert "python" not in {e.language for e in beside}


def test_no_version_with_a_secret_is_read(releases, tmp_path, caplog):
    newest = write(tmp_path, "lib-3.0", True)
    (newest / "lib" / "part0.py").write_text("TOKEN = 'ghp_" + "aB3dE5gH7" * 4 + "'\n")
    library = read(f"{releases}..{newest}")
    assert "aB3dE5gH7" not in repr(library)
    assert "a likely secret (github-pat): lib/part0.py" in caplog.text
