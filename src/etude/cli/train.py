"""`etude train BASE.toml @ OVERLAY.toml --table.key VALUE`: reads the stage from the configuration and runs it."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from etude import runfolder
from etude.cli.overlays import OF_RANKS, configuration_text, read_toml, split_overlays, with_ranks
from etude.cli.ranks import run_ranks, silent
from etude.config import (
    FleetConfig,
    LiveConfig,
    RLConfig,
    Section,
    check_fleet,
    check_ranks_apart,
    keys,
    load_toml,
    validate,
)
from etude.config.secrets import check_whole, without_secrets
from etude.errors import UserError
from etude.models import check_devices, check_present, has_weights
from etude.processes import own_rank
from etude.renderers import read_json
from etude.weights import with_models

OUTPUTS = Path("outputs")


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude train`; further words are overlays and overrides."""
    parser.usage = (
        "etude train [--resume] [--deterministic] [--dry-run] [--fleet FILE] CONFIG [@ OVERLAY ...] "
        "[--TABLE.KEY VALUE ...]"
    )
    parser.epilog = (
        "Values come from the defaults, then from the files, left to right, then from --TABLE.KEY VALUE. Tables are "
        "merged key by key; arrays and values are replaced. Relative paths start at the current folder."
    )
    parser.set_defaults(takes_overrides=True)
    parser.add_argument("config", type=Path, help="TOML configuration; with --resume also a run folder")
    parser.add_argument("--resume", action="store_true", help="continue the run of this configuration where it stopped")
    parser.add_argument("--deterministic", action="store_true", help="repeat bit for bit")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration as JSON, and on stderr what it needs of memory, and stop",
    )
    parser.add_argument(
        "--fleet",
        type=Path,
        metavar="FILE",
        help="TOML that says where the run's processes are placed (docs/fleet.md); a resumed run keeps its own",
    )
    parser.add_argument(
        "--keys",
        action=_PrintKeys,
        nargs="?",
        const="rl",
        choices=("midtrain", "sft", "apply", "rl", "live", "fleet"),
        metavar="STAGE",
        help="print the keys of a stage (midtrain, sft, apply, rl, live, fleet; default: rl), defaults and meanings",
    )


class _PrintKeys(argparse.Action):
    """The action of `--keys`, which needs no configuration, like `--help`."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, stage: Any, __: object = None) -> None:
        print("# what is left out has these values; lines that begin with # need a table that is not there by default")
        for key in keys(stage_kinds()[stage]):
            meaning = f"  # {key.meaning}" if key.meaning else ""
            if key.heading:
                print(f"# [{key.name}] {key.meaning}")
            elif key.needed:
                print(f"{'# ' if key.off else ''}{key.name} =  # needed{key.meaning and f': {key.meaning}'}")
            else:
                print(f"{'# ' if key.off else ''}{key.name} = {json.dumps(key.default, default=_plain)}{meaning}")
        parser.exit()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value)


def run(arguments: argparse.Namespace, rest: list[str]) -> int | None:
    """Runs the configured stage. Returns the exit code of a stage's rank 0. Raises UserError or RunFailed."""
    files, overrides = split_overlays(rest)
    files.insert(0, arguments.config)
    if arguments.deterministic:
        overrides += ["--deterministic", "true"]
    if arguments.resume and arguments.config.is_dir():
        if len(files) > 1 or arguments.deterministic:
            raise UserError("a resumed run keeps its configuration; drop the overlays and --deterministic")
        folder, toml = arguments.config, None
        stored = with_ranks(read_json(folder / "config.json"), overrides)
        if stored.get("stage", "rl") != "rl":
            return _finetune(arguments, stored["stage"], stored, f"{folder}/config.json", folder)
        config = runfolder.load_config(folder)
        if overrides:
            config = validate(RLConfig, stored, f"{folder}/config.json")
            if not arguments.dry_run:
                _keep(with_models(config), folder)
        config = with_models(config)
        check_whole(config)
    else:
        if arguments.config.is_dir():
            where = arguments.config
            raise UserError(f"{where} is a folder: give a TOML file, or continue a run with --resume {where}")
        if arguments.resume and not arguments.config.exists():
            raise UserError(f"there is no run folder or configuration {arguments.config}; runs lie in {OUTPUTS}/")
        data, where = read_toml(files[0], overrides, files[1:]), " @ ".join(map(str, files))
        stage = data.get("stage", "rl")
        if stage != "rl":
            return _finetune(arguments, stage, data, where)
        config = with_models(validate(RLConfig, data, where))
        folder, toml = OUTPUTS / config.name, configuration_text(files, overrides)
        if arguments.resume and not arguments.dry_run:
            if not folder.exists():
                raise UserError(f"{folder} holds no run yet; start it without --resume")
            kept, new = runfolder.load_config(folder), without_secrets(config)
            if _without_ranks(kept) != _without_ranks(new):
                raise UserError(f"{where} differs from the configuration of {folder}; resume the folder itself")
            if kept != new:
                _keep(config, folder)
    fleet = _fleet(arguments, config, folder)
    check_ranks_apart(config, fleet)
    if arguments.dry_run:
        print(without_secrets(config).model_dump_json(indent=2), flush=True)
        from etude.sandbox.backends.choose import check_sandbox

        check_sandbox(config.sandbox)
        if not config.tasks.of_repositories:
            from etude.run.parts import part_of

            part_of(config.tasks, None, config.rollout.budget())
        _check_models(config)
        return _print_memory(config, fleet)
    if own_rank() is not None:
        raise UserError(
            "WORLD_SIZE names several ranks, and this command is one run: give it alone, with trainer.launcher = "
            '"external", and start the ranks by the command that it prints'
        )
    from etude.run.launch import train_rl

    arguments.interrupted = f"`etude train --resume {folder}` continues the run"
    train_rl(config, folder, resume=arguments.resume, toml=toml, fleet=fleet)


def _fleet(arguments: argparse.Namespace, config: RLConfig, folder: Path) -> FleetConfig | None:
    """The fleet behind --fleet, which a resumed run keeps from then on, else that of the resumed run. Raises
    UserError."""
    if (path := arguments.fleet) is None:
        fleet, where = (runfolder.load_fleet(folder), f"{folder}/fleet.json") if arguments.resume else (None, "")
    else:
        fleet, where = validate(FleetConfig, load_toml(path), str(path)), str(path)
    if fleet is not None:
        check_fleet(fleet, config, where)
        if path is not None and arguments.resume and not arguments.dry_run:
            with runfolder.lock(folder):
                runfolder.keep_fleet(folder, fleet)
    return fleet


def _without_ranks(config: RLConfig) -> dict[str, Any]:
    """A configuration, but for the keys that a resumed run may change."""
    values = config.model_dump()
    values["trainer"] = {key: value for key, value in values["trainer"].items() if key not in OF_RANKS}
    return values


def _keep(config: RLConfig, folder: Path) -> None:
    """Stores a configuration with other ranks in a run's folder. Raises UserError if the model cannot be divided so, or
    while the run goes on."""
    _check_models(config)
    with runfolder.lock(folder):
        kept = without_secrets(config).model_dump_json(indent=2) + "\n"
        runfolder.write(folder / "config.json", kept.encode(), runfolder.PRIVATE)


def _check_models(config: Any) -> None:
    """Raises UserError for a damaged folder of a model or teacher, and after the preflight. Weights may be missing: a
    run may be planned here for another machine."""
    named = getattr(config.model, "path", None), getattr(getattr(config, "distill", None), "teacher", None)
    for path in named:
        if path in (None, "self"):
            continue
        check_present(Path(path))
        try:
            from etude.models.loading import check_tensors, read_config
            from etude.models.lora import adapted_layers
            from etude.models.support import mesh_refusal
            from etude.weights.preflight import check_before_training

            model = read_config(Path(path))
            if path == named[0]:
                if why := mesh_refusal(model, config.trainer.mesh):
                    raise UserError(f"{path}: {why}")
                check_before_training(Path(path))
            if has_weights(Path(path)):
                empty = check_tensors(path)
                if path == named[0] and config.trainer.lora is not None:
                    adapted_layers(empty, config.trainer.lora.targets)
        except ModuleNotFoundError as e:
            print(f"no preflight: this installation has no {e.name}", file=sys.stderr)


def _print_data(config: Any) -> None:
    """The sources of a stage's data and the tokens of the run, on stderr. Raises UserError for data that cannot be
    trained on."""
    if getattr(config, "data", None) is None or config.stage == "apply":
        return
    try:
        from etude.trainer.finetune import data
    except ModuleNotFoundError as e:
        return print(f"no estimate of the data: this installation has no {e.name}", file=sys.stderr)
    for line in data.described(data.estimates(data.StreamData.of(config)), config.trainer.tokens):
        print(line, file=sys.stderr)


def _print_memory(config: RLConfig, fleet: FleetConfig | None) -> None:
    """The engine of the run and the memory table, on stderr. Raises UserError for a run that does not fit its devices.
    What the engine lacks is told: another machine may have it."""
    from etude.run.vllm_environment import described

    print(described(config.inference), file=sys.stderr)
    try:
        from etude.trainer.rl.memory_table import memory_table
    except ModuleNotFoundError as e:
        return print(f"no memory table: this installation has no {e.name}", file=sys.stderr)
    table = memory_table(config, fleet)
    print(table.text(), file=sys.stderr)
    if refusal := table.refusal():
        raise UserError(refusal)


class _PrintedLog(logging.Handler):
    """Prints log lines, so that they appear above the terminal view."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a line."""
        print(self.format(record), file=sys.stderr, flush=True)


def stage_kinds() -> dict[str, type[Section]]:
    """The configuration of every stage."""
    from etude.trainer.finetune.config import ApplyConfig, MidtrainConfig, SftConfig

    finetune: dict[str, type[Section]] = {"midtrain": MidtrainConfig, "sft": SftConfig, "apply": ApplyConfig}
    return {**finetune, "rl": RLConfig, "live": LiveConfig, "fleet": FleetConfig}


def _finetune(
    arguments: argparse.Namespace, stage: str, data: dict[str, Any], where: str, folder: Path | None = None
) -> int | None:
    kinds = stage_kinds()
    if stage in ("live", "fleet"):
        raise UserError(f"{where} is of stage {stage}: see `etude {stage} --help`")
    if arguments.fleet is not None:
        raise UserError(f"--fleet is for stage rl, and {where} is of stage {stage}: drop it")
    if not isinstance(stage, str) or stage not in kinds:
        raise UserError(f"{where}: unknown stage {stage!r}; use midtrain, sft, apply or rl")
    config: Any = with_models(validate(kinds[stage], data, where))
    output = folder or OUTPUTS / config.name
    if arguments.dry_run:
        print(config.model_dump_json(indent=2), flush=True)
        _check_models(config)
        return _print_data(config)
    arguments.interrupted = f"`etude train --resume {output}` continues the run"
    mesh, rank = config.trainer.mesh, own_rank()
    if mesh.ranks > 1 and rank is None:
        check_devices(config.trainer.device, mesh.ranks)
        _check_models(config)
        return run_ranks(mesh.ranks, stage, arguments.words, f"continue with `etude train --resume {output}`")
    with silent() if rank else nullcontext():
        _run_stage(config, stage, output, resume=arguments.resume)


def _run_stage(config: Any, stage: str, folder: Path, *, resume: bool) -> None:
    from etude.dashboard import LiveView
    from etude.trainer.finetune import applied_edits, pretrain

    logging.basicConfig(level=logging.INFO, format="etude: %(message)s", handlers=[_PrintedLog()])
    stages: dict[str, Any] = {"midtrain": pretrain.midtrain, "sft": pretrain.sft, "apply": applied_edits.finetune}
    with LiveView(config.name, ("train",)) as view:
        view.stage("train", unit="steps")
        stages[stage](config, folder, resume=resume, show=view.update)
    print(f"Serve it: etude serve {shlex.quote(str(folder))}", flush=True)
