import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from etude.cli import main, train
from etude.cli.overlays import read_toml
from etude.config import RLConfig, validate

ROOT = Path(__file__).parents[2]
TOML, TINY = str(ROOT / "recipes/demo.toml"), str(ROOT / "tests/tasks/data/tiny")
ON_POLICY = ["--rollout.staleness", "0"]  # --deterministic is on-policy


def test_help_imports_nothing_heavy():
    """The command line must answer in well under half a second: what costs that much is torch and its like."""
    code = (
        "import sys; from etude.cli import main\n"
        "try: main.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'sqlalchemy', 'pydantic', 'rich', 'numpy', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in main.COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["train", "--keys", "rl"], ["doctor"], ["train", "nosuch.toml"]])
def test_a_reader_that_goes_ends_a_command_in_silence(words, unbuffered):
    """As `etude train --keys rl | head -4`: no traceback, and the code of a program that SIGPIPE ended."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "etude.cli.main", *words]
    errors = subprocess.STDOUT if words[-1] == "nosuch.toml" else subprocess.PIPE  # its sentence, too, goes to the pipe
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writing, stderr=errors, text=True, timeout=120, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr or "") == (main.READER_GONE, "")


def test_a_closed_output_changes_no_exit_code():
    """As `etude train nosuch.toml >&-`."""
    command = f"exec {sys.executable} -m etude.cli.main train nosuch.toml >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_a_broken_pipe_that_is_not_the_reader_s_is_shown(monkeypatch):
    def breaks(*_):
        raise BrokenPipeError("a box died")

    monkeypatch.setattr(train, "run", breaks)
    with pytest.raises(BrokenPipeError, match="a box died"):
        main.main(["train", TOML])


def test_every_command_explains_itself_without_torch():
    code = (
        "import sys; from etude.cli import main\n"
        "for command in main.COMMANDS:\n"
        "    try: main.main([command, '--help'])\n"
        "    except SystemExit: pass\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, (command, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in main.COMMANDS:
        assert f"usage: etude {command}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "none.toml"], "none.toml does not exist"),
        (["train", TINY], "tiny is a folder: give a TOML file, or continue a run with --resume"),
        (["train", TOML, "@", TINY], "tiny is a folder: give a TOML file\n"),
        (["train", TOML, "--fleet", TINY], "tiny is a folder: give a TOML file\n"),
        (["tasks", "check", TINY, "--sandbox", TINY], "tiny is a folder: give a TOML file\n"),
        (["live", "status", TINY], "tiny is a folder: give a TOML file\n"),
        (["fleet", "files", TINY, TOML, "--for", "slurm", "-o", "out"], "tiny is a folder: give a TOML file\n"),
        (["eval", "none", "--suite", "also-none"], "none"),
        (["tasks", "build", "none", "-o", "out"], "none is not a folder"),
        (["tasks", "build", ".", "-o", "out", "--max-lines", "1"], "min_lines must not be above max_lines"),
        (["tasks", "fast-apply", "none", "-o", "out"], "none is not a folder"),
        (
            ["tasks", "fast-apply", ".", "-o", "out", "--max-lines", "1"],
            "max_lines: Input should be greater",
        ),
        (["eval", "nano", "--suite", "none.parquet"], "none.parquet does not exist"),
        (["tasks", "check", "none"], "none is not a task dataset"),
        (["doctor", "replay", "none"], "none holds no run (no config.json); name the folder of a run\n"),
        (["export", "none", "-o", "out"], "none holds no run (no config.json); name the folder of a run\n"),
        (["doctor", "--what"], "unexpected argument '--what'"),
        (["serve", "none"], "none is not a folder, nor the name of a model (nano, smollm2"),
        (["serve", "none@3"], "none@3 is not a folder"),
        (["serve", "n" * 300], "... is longer than a name may be"),
        (["serve", TOML], "demo.toml is not a folder"),
        (["eval", "nano", "--suite", TINY, "--device", "nonsense"], "device = 'nonsense' is not there"),
        (["eval", "nano", "--suite", TINY, "-o", TOML], "demo.toml/model-0 cannot be made: Not a directory"),
        (["eval", "nano", "--suite", TOML], "demo.toml has tasks that must be built"),
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("words", [["tasks", "build", "REPO", "-o", "LOCKED/a/b"], ["weights", "inspect", "LOCKED/a"]])
def test_a_path_below_a_folder_of_somebody_else_s(words, tmp_path, capsys):
    locked, repo = tmp_path / "locked", tmp_path / "repo"
    for folder in (locked, repo):
        folder.mkdir()
    (repo / "m.py").write_text("def f():\n    return 1\n")
    main.command_parser(words)  # imports what it needs while it may
    locked.chmod(0)
    os.seteuid(65534)
    try:
        with pytest.raises(SystemExit) as stop:
            main.main([word.replace("LOCKED", str(locked)).replace("REPO", str(repo)) for word in words])
    finally:
        os.seteuid(0)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert "is not yours to read or write (Permission denied)" in error
    assert error.count("\n") == 1


def test_an_unknown_stage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text('stage = "pretrain"')
    with pytest.raises(SystemExit):
        main.main(["train", "x.toml"])
    assert "unknown stage 'pretrain'; use midtrain, sft, apply or rl" in capsys.readouterr().err
    (tmp_path / "x.toml").write_text('stage = ["rl"]')
    with pytest.raises(SystemExit):
        main.main(["train", "x.toml"])
    assert "unknown stage ['rl']" in capsys.readouterr().err


def test_serve_takes_the_sizes_that_its_refusals_name(monkeypatch):
    from etude.inference.server import server

    asked = []
    monkeypatch.setattr(server, "run", lambda options, access: asked.append(options))
    with pytest.raises(SystemExit) as stop:
        main.main(["serve", "nano", "--cache-mb", "7", "--documents-mb", "9"])
    assert not stop.value.code
    assert [(options.cache_mb, options.documents_mb) for options in asked] == [(7, 9)]


def test_a_dry_run_prints_the_resolved_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text('[tasks]\nrepository = "here"\n[rollout]\ngroup = 4\n')
    (tmp_path / "b.toml").write_text("[rollout]\nturns = 3\n")
    with pytest.raises(SystemExit) as stop:
        main.main(
            ["train", "a.toml", "@", "b.toml", "--dry-run", "--rollout.group", "8", "--deterministic", *ON_POLICY]
        )
    assert not stop.value.code
    resolved = json.loads(capsys.readouterr().out)
    assert (resolved["rollout"]["group"], resolved["rollout"]["turns"], resolved["deterministic"]) == (8, 3, True)
    assert resolved["tasks"]["repository"] == str(tmp_path / "here")
    assert list(tmp_path.glob("outputs")) == []


def test_commands_of_the_repository_run_from_any_folder(tmp_path, monkeypatch, capsys):
    """The recipe of the demo, bundled models and benchmarks are found by name."""
    from etude.cli import bench
    from etude.run import launch

    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(launch, "train_rl", lambda config, folder, **options: started.append((config, folder, options)))
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            main.main(["demo", "--seed", "3", "--trainer.steps", "1"])
        assert not stop.value.code
        (tmp_path / "outputs/demo").mkdir(parents=True)
    config, folder, options = started[0]
    assert (config.seed, config.trainer.steps, config.model.name) == (3, 1, "nano")
    assert folder == Path("outputs/demo")
    assert "# --trainer.steps 1 --seed 3" in options["toml"]
    assert (tmp_path / "outputs/demo.1").is_dir(), "an earlier demo is kept"
    module = types.SimpleNamespace(run=lambda quick: {"rows": [], "checks": {"fast": True}})
    monkeypatch.setitem(sys.modules, "benchmarks", types.ModuleType("benchmarks"))
    monkeypatch.setitem(sys.modules, "benchmarks.engine", module)
    with pytest.raises(SystemExit) as stop:
        main.main(["bench", "engine", "--json"])
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["checks"] == {"fast": True}
    assert set(bench.BENCHMARKS) >= {"async", "engine", "weights"}


def test_resume_reaches_every_stage(tmp_path, monkeypatch):
    from etude.trainer.finetune import pretrain

    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(pretrain, "midtrain", lambda config, output, *, resume, show: asked.append((output, resume)))
    config = 'stage = "midtrain"\nname = "out"\nmodel.path = "nano"\ndata.files = ["a.jsonl"]\n'
    (tmp_path / "m.toml").write_text(config)
    with pytest.raises(SystemExit) as stop:
        main.main(["train", "m.toml", "--resume"])
    assert not stop.value.code
    assert asked == [(Path("outputs/out"), True)]


def test_keys_of_the_other_stages_are_printed_and_their_run_folders_resumed(tmp_path, monkeypatch, capsys):
    from etude.trainer.finetune import pretrain
    from etude.trainer.finetune.config import SftConfig
    from etude.trainer.world import World

    for stage, key in (("sft", "trainer.batch"), ("midtrain", "data.fim"), ("apply", "measured")):
        with pytest.raises(SystemExit) as stop:
            main.main(["train", "--keys", stage])
        assert not stop.value.code
        assert f"\n{key} = " in capsys.readouterr().out
    config = SftConfig(model={"path": tmp_path}, data={"files": ["chats.jsonl"]})
    pretrain.prepare(tmp_path / "run", config, False, World())
    asked = []
    monkeypatch.setattr(pretrain, "sft", lambda config, output, *, resume, show: asked.append((config, output, resume)))
    with pytest.raises(SystemExit) as stop:
        main.main(["train", "--resume", str(tmp_path / "run")])
    assert not stop.value.code
    assert asked == [(config, tmp_path / "run", True)]
    pretrain.refuse(tmp_path / "run", asked[0][0], True)  # the same one, to the letter


def test_keys_are_printed_with_defaults_and_meanings(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["train", "--keys"])
    assert not stop.value.code
    lines = capsys.readouterr().out.splitlines()
    assert "rollout.group = 16  # G: episodes per group" in lines
    known = [line.removeprefix("# ").partition(" = ")[0] for line in lines]
    assert len(set(known)) == len(known), "a key of several shapes stands once"
    assert {"sandbox.type", "sandbox.image", "guards.probes", "tasks.repository"} <= set(known)


CLUSTER = {"name": "a", "urls": ["http://a:1"], "store": "s"}
LEAST = {
    "rl": {"tasks": {"repository": "here"}},
    "midtrain": {"model": {"path": "nano"}, "data": {"files": ["a.jsonl"]}},
    "sft": {"model": {"path": "nano"}, "data": {"files": ["a.jsonl"]}},
    "apply": {"model": {"path": "nano"}, "data": "a", "held_out": "b", "phases": [{"share": 1, "longest": 99}]},
    "live": {"folder": "live", "clusters": [CLUSTER]},
}


def with_key(tables, key, value):
    """A copy of `tables` that has a key which it lacks."""
    first, _, rest = key.partition(".")
    return tables | {first: with_key(tables.get(first, {}), rest, value) if rest else value}


@pytest.mark.parametrize("stage", LEAST)
def test_a_printed_default_is_what_is_used_where_the_key_is_left_out(stage, capsys):
    """Every default may be given as printed and changes nothing; one that needs a table may not."""
    kind = train.stage_kinds()[stage]
    least = LEAST[stage]
    left_out = validate(kind, least, "least.toml")
    with pytest.raises(SystemExit):
        main.main(["train", "--keys", stage])
    lines = [line for line in capsys.readouterr().out.splitlines() if " = " in line and not line.startswith("#")]
    printed = dict(line.partition("  # ")[0].split(" = ", 1) for line in lines if " =  # needed" not in line)
    assert len(printed) > 20
    given = {key for key, value in least.items() if not isinstance(value, dict)}
    given |= {f"{table}.{key}" for table, value in least.items() if isinstance(value, dict) for key in value}
    for key, text in printed.items():
        if key not in given and key not in least and key.partition(".")[0] not in given:
            assert validate(kind, with_key(least, key, json.loads(text)), key) == left_out, key


@pytest.mark.parametrize(
    ("stage", "lines"),
    [
        ("fleet", ["engines = []", "# engines.name =", "# engines.count = 1"]),
        ("rl", ["tasks.sources = []", "# tasks.sources.weight = 1.0", "# sandbox.services.start ="]),
        ("live", ["# [[clusters]] ", "clusters.name ="]),
        ("apply", ["# [[phases]] ", "phases.share ="]),
    ],
)
def test_keys_of_lists_of_tables_are_printed(stage, lines, capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "--keys", stage])
    printed = [line.partition("  # ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line not in printed] == []


def test_the_defaults_that_were_not_told(capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "--keys"])
    lines = [line.partition("  # ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {'guards.lag.action = "halt"', "guards.probe_growth.stop = 10.0", "trainer.lora = null"} <= set(lines)
    assert {"# trainer.lora.rank = 16", "trainer.lr = 0.0001"} <= set(lines)
    assert "# [guards.lag] versions a trained token lags; stop: the staleness bound, unless given" in lines
    rates = {}
    for stage in ("midtrain", "sft"):
        with pytest.raises(SystemExit):
            main.main(["train", "--keys", stage])
        rates |= {stage: [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainer.lr = ")]}
    assert [line.partition("  #")[0] for line in rates["midtrain"] + rates["sft"]] == [
        "trainer.lr = 2e-05", "trainer.lr = 2e-05",
    ]  # fmt: skip
    values = LEAST["sft"] | {"trainer": {"lora": {}}}
    adapters = validate(train.stage_kinds()["sft"], values, "sft.toml")
    assert adapters.trainer.lr == 2e-4


def test_a_demo_is_resumed_by_its_name(tmp_path, monkeypatch, capsys):
    from etude import runfolder
    from etude.run import launch

    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(launch, "train_rl", lambda config, folder, **options: started.append((config, folder, options)))
    with pytest.raises(SystemExit):
        main.main(["demo", "--name", "mine", "--seed", "7"])
    config, folder, options = started[-1]
    for words, sentence in (
        (["--name", "mine"], "outputs/mine holds no run yet"),
        (["--seed", "2"], "a resumed run keeps its configuration"),
        (["--trainer.steps", "2"], "a resumed run keeps its configuration"),
    ):
        with pytest.raises(SystemExit) as stop:
            main.main(["demo", "--resume", *words])
        assert stop.value.code == 2
        assert sentence in capsys.readouterr().err
    runfolder.create(folder, config, options["toml"])
    with pytest.raises(SystemExit) as stop:
        main.main(["demo", "--resume", "--name", "mine"])
    assert not stop.value.code
    assert started[-1] == (config, folder, {"resume": True, "toml": None})


@pytest.mark.parametrize("words", [["demo"], ["train", "run.toml"]])
def test_an_interruption_says_how_to_go_on(words, tmp_path, monkeypatch, capsys):
    from etude.run import launch

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('name = "demo"\n[tasks]\nrepository = "here"\n')
    monkeypatch.setattr(launch, "train_rl", interrupted)
    with pytest.raises(SystemExit) as stop:
        main.main(words)
    assert stop.value.code == 130
    assert "`etude train --resume outputs/demo` continues the run" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--samples", "0"), ("--max-tasks", "-3")])
def test_counts_of_an_evaluation_are_positive(flag, value, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["eval", "nano", "--suite", str(tmp_path), flag, value])
    assert stop.value.code == 2
    assert "should be greater than or equal to" in capsys.readouterr().err


def test_a_resumed_run_may_have_other_ranks_and_nothing_else(tmp_path, monkeypatch, capsys):
    from etude import runfolder
    from etude.run import launch

    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(launch, "train_rl", lambda config, folder, **options: started.append(config.trainer))
    (tmp_path / "run.toml").write_text('name = "run"\n[tasks]\nrepository = "here"\n[trainer]\nsteps = 2\n')
    with pytest.raises(SystemExit):
        main.main(["train", "run.toml"])
    config = validate(RLConfig, read_toml(tmp_path / "run.toml"), "run.toml")
    runfolder.create(tmp_path / "outputs" / "run", config, None)
    stored = tmp_path / "outputs" / "run" / "config.json"
    before = stored.read_bytes()
    for words, sentence in (
        (["--trainer.steps", "3"], "but for trainer.mesh, trainer.launcher and trainer.collective_seconds"),
        (["--trainer.mesh.shard", "0"], "trainer.mesh.shard"),
        (["--trainer.mesh.shard", "2", "--trainer.mesh.expert", "3"], "must divide shard x context = 2"),
        (["--trainer.mesh.context", "3"], "trainer.mesh.context"),
    ):
        with pytest.raises(SystemExit) as stop:
            main.main(["train", "--resume", "outputs/run", *words])
        assert stop.value.code == 2
        assert sentence in capsys.readouterr().err
        assert stored.read_bytes() == before, "what is refused leaves the run as it was"
    for words, ranks in ((["outputs/run", "--trainer.mesh.shard", "2"], 2), (["run.toml"], 1)):
        with pytest.raises(SystemExit) as stop:
            main.main(["train", "--resume", *words])
        assert not stop.value.code, capsys.readouterr().err
        assert started[-1].mesh.ranks == runfolder.load_config(tmp_path / "outputs" / "run").trainer.mesh.ranks == ranks
