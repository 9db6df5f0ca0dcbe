"""`etude tasks`: makes and checks datasets of tasks, writes their gold answers as episodes (`traces`), and makes tables
of applied edits (`fast-apply`)."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from etude import runfolder
from etude.cli.flags import add_flags, add_sandbox, flag_values, from_flags, sandbox_of
from etude.cli.overlays import read_toml
from etude.config import BuildConfig, EditTableConfig, RLConfig, SandboxConfig, TaskSource, TracesConfig, validate
from etude.errors import UserError

if TYPE_CHECKING:
    from etude.run.evaluate import Remote

SHOWN_FAILURES = 20
MAX_FALLS = 0.01  # share of a hardened dataset's tasks


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of `etude tasks` and of its actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="make gated tasks from a repository", allow_abbrev=False)
    what = "folder of a Python or JavaScript repository with tests, or the TOML of a run on one"
    build.add_argument("repository", type=Path, help=what)
    build.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")
    add_sandbox(build, "that of the TOML, or namespaces")
    add_flags(build, BuildConfig)
    check = actions.add_parser("check", help="run the gates of a task dataset again", allow_abbrev=False)
    check.add_argument("dataset", type=Path, help="folder made by `etude tasks build`")
    add_sandbox(check)
    harden = actions.add_parser("harden", help="attack every task; mend or drop those that fall", allow_abbrev=False)
    harden.add_argument("dataset", type=Path, help="folder made by `etude tasks build` or `etude tasks harbor`")
    harden.add_argument("-o", "--output", type=Path, help="folder to write (default: the dataset is replaced)")
    harden.add_argument(
        "--pack", nargs="+", type=Path, default=[], metavar="DIR", help="further folders of attack programs"
    )
    add_sandbox(harden)
    models = harden.add_argument_group("models that attack, too")
    which = "HF folder, run folder, the name of a model such as nano, or the URL of a chat API (https://host/v1)"
    models.add_argument("--model", nargs="+", default=[], metavar="MODEL", help=which)
    models.add_argument("--model-name", nargs="+", default=[], metavar="NAME", help="the model there; one for each URL")
    models.add_argument("--api", choices=("openai", "anthropic"), default="openai", help="default: openai")
    harbor = actions.add_parser("harbor", help="take Harbor tasks that others wrote", allow_abbrev=False)
    harbor.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="Harbor task folders, or folders of them")
    harbor.add_argument("-o", "--output", type=Path, help="folder to write; without it the tasks are only tried")
    harbor.add_argument(
        "--base",
        nargs="+",
        default=[],
        metavar="IMAGE",
        help="base images besides python, ubuntu and debian that boxes stand in for",
    )
    add_sandbox(harbor)
    harbor.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    traces = actions.add_parser("traces", help="tell gold answers as episodes, to train on", allow_abbrev=False)
    sources = (
        "datasets made by `etude tasks build`, or the TOML of a run, whose tasks.sources are built beside the output"
    )
    traces.add_argument("datasets", nargs="+", type=Path, metavar="DIR", help=sources)
    rows = "file to write (.jsonl), for data.files of stage sft; must not exist; the same command goes on after a stop"
    traces.add_argument("-o", "--output", type=Path, required=True, help=rows)
    add_sandbox(traces, "that of the TOML, or namespaces")
    add_flags(traces, TracesConfig)
    edits = actions.add_parser("fast-apply", help="make tables of applied edits from repositories", allow_abbrev=False)
    edits.add_argument(
        "repositories", nargs="*", metavar="REPO", help="a git clone, a folder of files, or releases as OLD..NEW"
    )
    mine = "repositories that are yours: they need no open licence; trained on unless they are held out"
    edits.add_argument("--own", nargs="+", default=[], metavar="REPO", help=mine)
    edits.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")
    edits.add_argument("--held-out", nargs="+", default=[], metavar="REPO", help="repositories for evaluation alone")
    add_flags(edits, EditTableConfig)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    """Runs one action; the exit code is 1 if a gate does not hold. Raises UserError."""
    actions = {
        "build": _build,
        "check": _check,
        "harden": _harden,
        "harbor": _harbor,
        "traces": _traces,
        "fast-apply": _fast_apply,
    }
    return actions[arguments.action](arguments)


def _build(arguments: argparse.Namespace) -> int:
    from etude.cli.progress import bar
    from etude.run.inputs import build_source

    output, (source, boxes) = arguments.output, _source(arguments)
    with bar() as progress, tempfile.TemporaryDirectory(prefix="etude-library-") as library:
        part = build_source(source, Path(library), output, progress, boxes)
    for warning in part.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    train, heldout = len(part.split("train")), len(part.split("heldout"))
    print(f"{train} train and {heldout} held-out tasks in {output}; see {output / 'DATACARD.md'}")
    share = sum(task.decided for task in part.tasks) / len(part.tasks)
    print(f"{share:.0%} of their hidden tests are decided outside of the tested code")
    if low := sum(task.decided < source.min_decided for task in part.split("train")):
        print(f"{low} train tasks lie below tasks.min_decided = {source.min_decided}, and are not trained on")
    verdict = part.dataset.manifest.verdict if part.dataset is not None else ""
    print(f"verdict: {verdict}")
    return 1 if verdict.startswith("hollow") else 0


def _source(arguments: argparse.Namespace) -> tuple[TaskSource, SandboxConfig | None]:
    """The repository, or that of [tasks] in a TOML, with the flags over its options; and the boxes, of --sandbox or of
    the TOML. Raises UserError."""
    boxes = sandbox_of(arguments)
    path, flags = arguments.repository, flag_values(arguments, BuildConfig)
    if path.suffix != ".toml" or path.is_dir():
        return from_flags(arguments, TaskSource, repository=str(path)), boxes
    data = read_toml(path)
    tasks = data.get("tasks")
    source = tasks | flags if isinstance(tasks, dict) else None
    if source is None or "repository" not in source or source.keys() & {"sources", "dataset", "harbor"}:
        raise UserError(f"{path} does not say in [tasks] which repository its tasks are made from: give its folder")
    config = validate(RLConfig, data | {"tasks": source}, str(path))
    return config.tasks, boxes or config.sandbox


def _check(arguments: argparse.Namespace) -> int:
    from etude.cli.progress import bar
    from etude.tasks import check_dataset, read_dataset_manifest
    from etude.tasks.foreign import check_foreign

    boxes, manifest = sandbox_of(arguments), read_dataset_manifest(arguments.dataset)
    with bar() as progress:
        report = (check_foreign if manifest.kind else check_dataset)(arguments.dataset, progress, boxes)
    problems = [*report.problems, *(f"{task}: {why}" for task, why in sorted(report.failures.items()))]
    for line in problems[:SHOWN_FAILURES]:
        print(line)
    if len(problems) > SHOWN_FAILURES:
        print(f"and {len(problems) - SHOWN_FAILURES} more")
    print(f"{report.tasks} tasks checked: {'all gates hold' if report.ok else f'{len(problems)} problems'}")
    if manifest.hardening is not None:
        print(f"attacked by `etude tasks harden`: {manifest.hardening.figures}")
    return 0 if report.ok else 1


def _harden(arguments: argparse.Namespace) -> int:
    from etude.audit.harden import harden
    from etude.cli.progress import bar

    folder, boxes = arguments.dataset, sandbox_of(arguments)
    output = arguments.output or folder
    with bar() as progress:
        hardening = harden(folder, output, progress, boxes, arguments.pack, _attackers(arguments))
    for task, result in hardening.results.items():
        print(f"{task} {result}")
    for task, why in hardening.undecided.items():
        print(f"{task} is undecided: {why}")
    print(f"{hardening.figures}; see {output / 'DATACARD.md'}")
    return 1 if hardening.left > MAX_FALLS else 0


def _attackers(arguments: argparse.Namespace) -> list[Path | Remote]:
    """The models of --model. Raises UserError."""
    from etude.protocol.backends import ChatModel
    from etude.run.evaluate import remote
    from etude.weights import model_folder

    urls = [model for model in arguments.model if "://" in model]
    if len(urls) != len(arguments.model_name):
        raise UserError("give --model-name NAME for each URL, and for URLs alone")
    names = iter(arguments.model_name)
    return [
        remote(ChatModel(model, next(names), arguments.api), None) if model in urls else model_folder(model)
        for model in arguments.model
    ]


def _harbor(arguments: argparse.Namespace) -> int:
    from etude.cli.progress import bar
    from etude.rollout import foreign_refusal
    from etude.tasks.foreign import build_foreign, trial_lines, trials_as_json, try_folders

    boxes, bases = sandbox_of(arguments), arguments.base
    if boxes is not None and (why := foreign_refusal(False, boxes.type)):
        raise UserError(why)
    with bar() as progress:
        if arguments.output is None:
            trials = try_folders(arguments.folders, bases, progress, boxes)
        else:
            _, trials = build_foreign(arguments.folders, arguments.output, progress, bases=bases, boxes=boxes)
    for line in trial_lines(trials):
        print(line)
    if arguments.json:
        print(json.dumps(trials_as_json(trials)))
    return 0


def _traces(arguments: argparse.Namespace) -> int:
    from etude.cli.progress import bar
    from etude.run.traces import write_traces

    output, options = arguments.output, from_flags(arguments, TracesConfig)
    sources = [(path, _recipe(path)) for path in arguments.datasets]
    boxes, recipes = sandbox_of(arguments), [config for _, config in sources if config is not None]
    if boxes is None and recipes:
        boxes = recipes[0].sandbox
        if any(config.sandbox != boxes for config in recipes):
            raise UserError("the TOMLs have different tables [sandbox]: choose one with --sandbox FILE")
    with bar() as progress:
        datasets = [folder for path, config in sources for folder in _datasets(path, config, output, progress, boxes)]
        written, tried = write_traces(datasets, output, options, progress, boxes)
    print(f"{written} traces of {tried} in {arguments.output}: give the file as data.files to stage sft")
    return 0


def _recipe(path: Path) -> RLConfig | None:
    """The configuration in a TOML; None for a folder. Raises UserError."""
    return None if path.suffix != ".toml" or path.is_dir() else validate(RLConfig, read_toml(path), str(path))


def _datasets(
    path: Path,
    config: RLConfig | None,
    output: Path,
    progress: Callable[[str, int, int], None],
    boxes: SandboxConfig | None,
) -> list[Path]:
    """The folder itself, or the dataset folders of the sources of its configuration, built in `OUTPUT.sources` if
    missing. Raises UserError."""
    from etude.run.inputs import build_source
    from etude.run.parts import source_part

    if config is None:
        return [path]
    sources = config.tasks.sources
    if not sources:
        raise UserError(f"{path} has no tasks.sources, whose answers would be told: give the folder of a dataset")
    folder, roots = output.with_name(f"{output.name}.sources"), list[Path]()
    runfolder.make(folder)
    for source in sources:  # of other options: another folder
        built = folder / blake3(source.model_dump_json().encode()).hexdigest()[:12]
        if source_part(source, built) is None:
            build_source(source, folder, built, progress, boxes)
        roots.append(built if source.dataset is None else Path(source.dataset))
    return roots


def _fast_apply(arguments: argparse.Namespace) -> int:
    from etude.cli.progress import bar
    from etude.corpus.edits import build_edit_table

    options, output = from_flags(arguments, EditTableConfig), arguments.output
    with bar() as progress:
        train, heldout = build_edit_table(
            arguments.repositories, arguments.held_out, output, options, progress, arguments.own
        )
    print(f"{len(train)} edits to train on and {len(heldout)} held-out ones in {output}; see {output / 'DATACARD.md'}")
    return 0
