import subprocess
import sys

import pytest

from etude.cli import main


def test_help_imports_nothing_heavy():
    """The command line must answer in well under half a second: what costs that much is torch and its like."""
    code = (
        "import sys; from etude import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'sqlalchemy', 'pydantic', 'rich', 'numpy', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "tasks", "train", "eval", "serve", "doctor", "bench"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "none.toml"], "none.toml does not exist"),
        (["eval", "none", "--suite", "also-none"], "none"),
        (["tasks", "build", "none", "-o", "out"], "none is not a folder"),
        (["tasks", "build", ".", "-o", "out", "--max-lines", "1"], "min_lines must not be above max_lines"),
        (["tasks", "fast-apply", "none", "-o", "out"], "none is not a folder"),
        (
            ["tasks", "fast-apply", ".", "-o", "out", "--max-lines", "1"],
            "max_lines: Input should be greater",
        ),
        (["eval", "none", "--suite", "none.parquet"], "none.parquet does not exist"),
        (["tasks", "check", "none"], "none is not a task dataset"),
        (["doctor", "replay", "none"], "none holds no run (no config.json); name the folder of a run\n"),
        (["export", "none", "-o", "out"], "none holds no run (no config.json); name the folder of a run\n"),
        (["doctor", "--what"], "unexpected argument '--what'"),
        (["bench", "engine"], "run `etude bench` from the root"),
        (["serve", "none"], "none"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert sentence in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_stage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text('stage = "pretrain"')
    with pytest.raises(SystemExit):
        main.main(["train", "x.toml"])
    assert "unknown stage 'pretrain'; use midtrain, sft, apply or rl" in capsys.readouterr().err


def test_serve_takes_the_sizes_that_its_refusals_name(monkeypatch):
    from etude.inference.server import server

    asked = []
    monkeypatch.setattr(server, "run", asked.append)
    with pytest.raises(SystemExit) as stop:
        main.main(["serve", "folder", "--cache-mb", "7", "--documents-mb", "9"])
    assert not stop.value.code
    assert [(options.cache_mb, options.documents_mb) for options in asked] == [(7, 9)]
