"""`etude doctor [CHECK]`: checks of this machine, of a run, of a model, of the sandbox, and of boxes' realism."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from etude.cli import doctor_reports as reports
from etude.cli.flags import add_flags, add_sandbox, sandbox_of
from etude.config import ModelConfig, NamespaceSandboxConfig, SandboxConfig
from etude.errors import UserError
from etude.weights import model_folder


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude doctor` and of its checks."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    checks = parser.add_subparsers(dest="check", metavar="CHECK")

    def check(name: str, text: str) -> argparse.ArgumentParser:
        sub = checks.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        return sub

    mismatch = check("mismatch", "why trainer and engine disagree in a run")
    mismatch.add_argument("folder", type=Path, help="run folder")
    replay = check("replay", "repeat the episodes of a run, and compare them token by token")
    replay.add_argument("folder", type=Path, help="run folder")
    replay.add_argument("episode", nargs="*", help="as GROUP-MEMBER-ATTEMPT, e.g. 3-1-0; default: all in the ledger")
    model = check("model", "what is wrong with a model folder, and how exactly it is computed")
    model.add_argument(
        "folder",
        nargs="?",
        help="HF folder, run folder, GGUF file, or the name of a model; default: a table of known families",
    )
    model.add_argument("--repair", type=Path, metavar="DIR", help="write a mended copy of the folder, and check that")
    model.add_argument("--quick", action="store_true", help="the files alone, without loading the model")
    add_flags(model, ModelConfig, ("chat_template",))
    model.add_argument("--docs", type=Path, metavar="FILE", help="write the table of families into this page")
    by_name = "folders with tokenizer and chat template, by the names of the families' templates"
    model.add_argument("--templates", type=Path, metavar="DIR", help=by_name)
    with_vllm = "a Python that has vLLM: the table's column is then measured, a minute a family; or $ETUDE_VLLM_PYTHON"
    model.add_argument("--vllm", metavar="PYTHON", help=with_vllm)
    _add_sandbox(check("sandbox", "run the attack suite on this machine"))
    _add_parity(check("parity", "whether boxes can be told from production machines"))


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Prints the report of a check; 0 if everything holds. Raises UserError."""
    match arguments.check:
        case "mismatch":
            return reports.show_mismatch(arguments.folder, as_json=arguments.json)
        case "replay":
            return reports.show_replay(arguments.folder, arguments.episode, as_json=arguments.json)
        case "model":
            return _model(arguments)
        case "sandbox":
            return _sandbox(arguments)
        case "parity":
            return _parity(arguments)
    return reports.show_machine(as_json=arguments.json)


def _model(arguments: argparse.Namespace) -> int:
    template = getattr(arguments, "chat_template", None)
    if arguments.folder is None:
        if template is not None or arguments.repair is not None or arguments.quick:
            raise UserError("--chat-template, --repair and --quick are for one model: name its folder, too")
        vllm = arguments.vllm or os.environ.get("ETUDE_VLLM_PYTHON")
        return reports.show_families(
            as_json=arguments.json, docs=arguments.docs, templates=arguments.templates, vllm=vllm
        )
    if (arguments.docs or arguments.templates or arguments.vllm) is not None:
        raise UserError("--docs, --templates and --vllm are for the table of known families: give no folder with them.")
    folder = model_folder(arguments.folder, template)
    return reports.show_model(folder, arguments.repair, as_json=arguments.json, quick=arguments.quick)


def _add_sandbox(attacks: argparse.ArgumentParser) -> None:
    attacks.add_argument("--quick", action="store_true", help="leave out repetitions and comparisons")
    packs = "folders of attacks of your own, played in place of the suite (docs/sandbox.md)"
    attacks.add_argument("--pack", type=Path, nargs="+", metavar="DIR", help=packs)
    add_sandbox(attacks)
    against = attacks.add_argument_group("comparison with production machines", "items E; see the check parity")
    against.add_argument("--against", type=Path, nargs="+", metavar="FILE", help="fingerprints of such machines")
    against.add_argument("--machine-profiles", type=Path, metavar="FILE", help="as rollout.machine_profiles")
    tasks = "tasks whose boxes are compared; else made-up ones"
    against.add_argument("--dataset", type=Path, metavar="DIR", help=tasks)
    against.add_argument("--boxes", type=int, default=200, help="boxes to compare with")


def _sandbox(arguments: argparse.Namespace) -> int:
    from etude.audit.attacks import fingerprints_against

    config = sandbox_of(arguments) or NamespaceSandboxConfig()
    if arguments.pack is not None:
        if arguments.against is not None or arguments.dataset is not None or arguments.machine_profiles is not None:
            raise UserError("--pack plays attacks of your own: drop --against, --dataset and --machine-profiles.")
        return reports.show_packs(arguments.pack, config, as_json=arguments.json)
    against = None
    if arguments.against is not None:
        _check_profiles(config)
        against = fingerprints_against(
            arguments.against,
            arguments.boxes,
            dataset=arguments.dataset,
            machine_profiles=arguments.machine_profiles,
            config=config,
        )
    elif arguments.dataset is not None or arguments.machine_profiles is not None:
        raise UserError("--dataset and --machine-profiles describe boxes that are compared: give --against, too.")
    return reports.show_attacks(as_json=arguments.json, quick=arguments.quick, config=config, against=against)


def _check_profiles(config: SandboxConfig) -> None:
    """Raises UserError for boxes that cannot imitate a machine."""
    if config.type != "namespace":
        raise UserError(f'--against needs boxes with machine profiles, which sandbox.type = "{config.type}" lacks.')


def _add_parity(parity: argparse.ArgumentParser) -> None:
    task = parity.add_mutually_exclusive_group(required=True)
    task.add_argument("--against", type=Path, nargs="+", metavar="FILE", help="fingerprints of production machines")
    own = "archive or root folder of an image; its boxes are compared with containers that podman makes of it"
    task.add_argument("--image", type=Path, metavar="PATH", help=own)
    task.add_argument("--record", type=Path, metavar="FILE", help="append fingerprints of this machine")
    task.add_argument("--episodes", type=Path, nargs=2, metavar="RUN", help="two runs of the same tasks, compared")
    task.add_argument("--script", action="store_true", help="print the script that takes fingerprints elsewhere")
    parity.add_argument("--samples", type=int, default=20, help="fingerprints to record")
    parity.add_argument("--boxes", type=int, help="boxes to compare with (200; with --image 40)")
    parity.add_argument("--of", default="eval-before", metavar="PREFIX", help="which episodes of the runs")
    tasks, profiles = "tasks whose boxes are compared; else a made-up one", "as rollout.machine_profiles; else half"
    parity.add_argument("--dataset", type=Path, metavar="DIR", help=tasks)
    parity.add_argument("--machine-profiles", type=Path, metavar="FILE", help=f"{profiles} of the machines")
    add_sandbox(parity)


def _parity(arguments: argparse.Namespace) -> int:
    if arguments.image is not None:
        if arguments.sandbox is not None or arguments.dataset is not None or arguments.machine_profiles is not None:
            raise UserError("--image compares boxes that look like containers: drop --sandbox, --dataset and profiles.")
        return reports.show_image_parity(arguments.image, arguments.boxes or 40, as_json=arguments.json)
    if (config := sandbox_of(arguments)) is not None:
        if arguments.against is None:
            raise UserError("--sandbox describes boxes that are compared: give --against, too.")
        _check_profiles(config)
    if arguments.script:
        from etude.audit.parity import FINGERPRINT_SCRIPT

        print(FINGERPRINT_SCRIPT.read_text("utf-8"), end="")
        return 0
    if arguments.episodes is not None:
        return reports.show_pairs(arguments.episodes, arguments.of, as_json=arguments.json)
    if arguments.record is not None:
        return reports.show_record(arguments.record, arguments.samples)
    return reports.show_parity(
        arguments.against,
        arguments.boxes or 200,
        as_json=arguments.json,
        dataset=arguments.dataset,
        machine_profiles=arguments.machine_profiles,
        config=config,
    )
