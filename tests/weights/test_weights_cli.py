"""`etude weights`, as a user types it. The commands of docs/weights.md are among them."""

import json
import shlex
from pathlib import Path

import msgspec
import pytest

from etude.cli import main
from etude.store import open_store
from etude.weights import manifest
from etude.weights.signature import read_private_key, sign
from tests.helpers.small_model import files, model, step, write

VERSIONS = 14
LAST = VERSIONS - 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """m0, m1, ...: what the trainer wrote itself, and `weights`: the store with them all, signed."""
    root = tmp_path_factory.mktemp("cli")
    trained = model()
    for version in range(VERSIONS):
        write(trained, root / f"m{version}")
        step(trained)
    cli_runs(root, "keygen run.key")
    for version in range(VERSIONS):
        cli_runs(root, f"publish weights m{version} --key run.key")
    return root


def cli_runs(root: Path, command: str, code: int = 0) -> None:
    """Paths in the command are below `root`."""
    words = shlex.split(command)
    names = {path.name for path in root.iterdir()} | {"out", "elsewhere", "weights", "run.key", "other.key", "nowhere"}
    with pytest.raises(SystemExit) as stop:
        main.main(["weights", *(str(root / word) if word in names else word for word in words)])
    assert stop.value.code == code


@pytest.fixture
def copy(folders, tmp_path) -> Path:
    """The same, to be damaged."""
    for path in folders.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "weights").unlink()
    source, target = open_store(str(folders / "weights")), open_store(str(tmp_path / "weights"))
    for key in source.list():
        target.put(key, source.get(key))
    return tmp_path


def refused(capsys, root: Path, command: str) -> str:
    """The one sentence with which the command stops."""
    capsys.readouterr()
    before = sorted(path.name for path in root.iterdir())
    cli_runs(root, command, 2)
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert "Traceback" not in sentence
    assert sorted(path.name for path in root.iterdir()) == before, "nothing is left half-written"
    return sentence


@pytest.mark.parametrize("version", [0, 5, LAST])
def test_what_is_fetched_is_what_the_trainer_would_write_byte_for_byte(copy, version, capsys):
    cli_runs(copy, f"fetch weights --base m0 --version {version} --public-key run.key.pub -o out")
    assert files(copy / "out") == files(copy / f"m{version}")
    assert "exists already" in refused(capsys, copy, "fetch weights --base m0 -o out")


def test_a_folder_is_brought_from_one_version_to_another_without_the_anchor(copy, capsys):
    store = open_store(str(copy / "weights"))
    for key in store.list("payloads"):
        if "-anchor-" in key:
            store.delete(key)
    cli_runs(copy, "apply weights m2 --version 8 -o out")
    assert files(copy / "out") == files(copy / "m8")
    assert "m2 holds version 2" in capsys.readouterr().out
    cli_runs(copy, "fetch weights --base m0 --version 8 -o elsewhere", 2)


def test_a_folder_that_is_no_version_cannot_be_brought_anywhere(copy, capsys):
    write(model(7), copy / "stranger")
    assert "the folder holds no version" in refused(capsys, copy, "apply weights stranger -o out")


def test_inspect_lists_versions_as_they_are(folders, capsys):
    cli_runs(folders, "inspect weights --json")
    found = json.loads(capsys.readouterr().out)
    assert [row["version"] for row in found["versions"]] == list(range(VERSIONS))
    assert [row["kind"] for row in found["versions"]] == ["anchor"] + ["delta"] * LAST
    assert all(row["signed"] for row in found["versions"])
    assert 0 < found["versions"][3]["changed"] < 0.1
    cli_runs(folders, "inspect weights 4")
    assert "delta" in capsys.readouterr().out
    assert found["versions"][-1]["anchor"] > 0, "also a chain of single commands gets its anchors"
    assert "has no version 99" in refused(capsys, folders, "inspect weights 99")


def test_diff_counts_what_changed(folders, capsys):
    cli_runs(folders, "diff weights 3 4 --json")
    one = json.loads(capsys.readouterr().out)
    published = manifest.read_manifest(open_store(str(folders / "weights")), 4)
    assert one["changed"] == published.changed == sum(row["changed"] for row in one["tensors"])
    cli_runs(folders, "diff weights 3 3")
    assert capsys.readouterr().out.startswith("0 of ")
    assert "has no version 99" in refused(capsys, folders, "diff weights 3 99")


def test_verify_finds_a_flip_in_every_block_of_every_object(copy, capsys):
    store = open_store(str(copy / "weights"))
    cli_runs(copy, "verify weights --public-key run.key.pub --json")
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["versions"] == VERSIONS
    keys = [*store.list("payloads"), *store.list("schemas"), manifest.key(5)]
    assert report["objects"] == len(store.list("payloads"))
    flips = [(key, at) for key in keys for at in range(0, len(store.get(key)), 4096)]
    assert len(flips) > len(keys), "no object is larger than a block: the test shows nothing"
    for key, at in flips:
        data = store.get(key)
        store.put(key, data[:at] + bytes([data[at] ^ 1 << at % 7]) + data[at + 1 :])
        sentence = refused(capsys, copy, "verify weights --public-key run.key.pub")
        assert "is damaged in" in sentence
        store.put(key, data)


@pytest.mark.parametrize("damage", ["cut", "gone", "swapped"])
def test_verify_and_fetch_of_a_broken_version(copy, damage, capsys):
    store = open_store(str(copy / "weights"))
    key, other = (manifest.read_manifest(store, v).delta[0].key for v in (5, 6))
    if damage == "gone":
        store.delete(key)
    else:
        store.put(key, {"cut": store.get(key)[:-9], "swapped": store.get(other)}[damage])
    sentence = refused(capsys, copy, "verify weights")
    assert f"version 5: {key}" in sentence
    assert "version 5: its payload" in refused(capsys, copy, "fetch weights --base m0 --version 5 -o out")
    cli_runs(copy, f"fetch weights --base m0 --version {LAST} -o out")  # past the hole, from a later anchor
    assert files(copy / "out") == files(copy / f"m{LAST}")


def test_a_stranger_s_manifests_are_refused(copy, capsys):
    store = open_store(str(copy / "weights"))
    honest = manifest.read_manifest(store, LAST)
    cli_runs(copy, "keygen other.key")
    capsys.readouterr()
    forged = {
        "is not signed": msgspec.structs.replace(honest, signature=""),
        "is not by the key": sign(honest, read_private_key(copy / "other.key")),
        f"signature of version {LAST}": msgspec.structs.replace(
            honest, digest=manifest.read_manifest(store, LAST - 1).digest
        ),
    }
    for why, lie in forged.items():
        store.put(manifest.key(LAST), manifest.encode(lie))
        assert why in refused(capsys, copy, "fetch weights --base m0 --public-key run.key.pub -o out")
        assert why in refused(capsys, copy, "verify weights --public-key run.key.pub")
    store.put(manifest.key(LAST), store.get(manifest.key(LAST - 1)))
    sentence = refused(capsys, copy, "fetch weights --base m0 --public-key run.key.pub -o out")
    assert f"is that of version {LAST - 1}" in sentence


def test_gc_says_and_takes_what_nobody_needs(copy, capsys):
    store = open_store(str(copy / "weights"))
    store.put("payloads/00000099-delta-of-a-killed-attempt", bytes(1000))
    cli_runs(copy, "gc weights --dry-run --grace 0")
    assert "would remove 1 objects, 1,000 bytes" in capsys.readouterr().out
    cli_runs(copy, "gc weights --json")
    assert json.loads(capsys.readouterr().out)["objects"] == 0, "it is younger than an hour"
    cli_runs(copy, "gc weights --grace 0")
    assert "removed 1 objects" in capsys.readouterr().out
    cli_runs(copy, "verify weights")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("inspect nowhere", "is not a folder; give the store of a run"),
        ("verify m0", "has no version at all"),
        ("fetch weights --base nowhere -o out", "is not a folder"),
        ("fetch weights --base m0 --version 77 -o out", "has no version 77; the newest is 13"),
        ("fetch weights --base m0 --public-key run.key -o out", "is not an Ed25519 public key"),
        ("publish weights nowhere", "is not a folder"),
        ("publish weights m0 --key m0", "is not an Ed25519 private key"),
        ("publish weights m0 --key gone.key", "there is no key"),
        ("fetch weights --base m0 --public-key gone.pub -o out", "there is no key"),
        ("keygen run.key", "exists already"),
    ],
)
def test_mistakes(folders, command, sentence, capsys):
    assert sentence in refused(capsys, folders, command)


def test_a_folder_that_is_no_model_leaves_no_store(folders, capsys):
    (folders / "empty").mkdir()
    assert "has no config.json" in refused(capsys, folders, "publish new-store empty")
    assert not (folders / "new-store").exists()


def test_the_documented_commands_are_the_ones_there_are():
    text = (Path(__file__).parents[2] / "docs/weights.md").read_text()
    shown = {line.split()[2]: line for line in text.splitlines() if line.startswith("etude weights ")}
    weights = next(a for a in main.command_parser(["weights"])._actions if a.choices).choices["weights"]
    actions = next(a for a in weights._actions if isinstance(a.choices, dict)).choices
    assert shown.keys() == actions.keys()
    for name, line in shown.items():
        flags = {word.strip("[]") for word in line.split() if word.strip("[").startswith("-")}
        known = {flag for a in actions[name]._actions for flag in a.option_strings}
        assert flags <= known, name
