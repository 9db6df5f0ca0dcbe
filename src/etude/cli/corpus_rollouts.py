"""`etude corpus rollouts`: a model's rollouts on repositories without tests, kept where two of them agree."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.corpus_rows import new_rows_file, reasons
from etude.cli.eval import BUDGET, ENGINE, api_key
from etude.cli.flags import add_flags, add_sandbox, flag_values, from_flags, sandbox_of
from etude.config import AgreedRolloutsConfig, InferenceConfig, ModelConfig, RolloutConfig, validate
from etude.errors import UserError
from etude.weights import model_folder

if TYPE_CHECKING:
    from etude.run.evaluate import Remote


def add_to(actions: Any) -> None:
    """Adds the action and its arguments."""
    what = "keep a model's rollouts on a repository without tests, where two agree"
    parser = actions.add_parser("rollouts", help=what, description=what, allow_abbrev=False)
    sources = "git clone, folder or NAME==VERSION of a package, each under a permissive licence"
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=sources)
    parser.add_argument("--own", nargs="+", default=[], metavar="REPO", help="clones and folders that are yours")
    parser.add_argument("--own-licence", default="own code", metavar="WORD", help="their licence, for the rows")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=".jsonl to write; must be new")
    add_flags(parser, AgreedRolloutsConfig)
    add_sandbox(parser)
    played = parser.add_argument_group("model")
    model = "chat model: HF folder, run folder, GGUF file or name, or the URL of a chat API, https://host/v1"
    played.add_argument("--model", required=True, metavar="MODEL", help=model)
    played.add_argument("--name", metavar="NAME", help="the model at the URL")
    played.add_argument("--api", choices=("openai", "anthropic"), help="of the URL (default: openai)")
    key = "file with the key (default: the variable OPENAI_API_KEY or ANTHROPIC_API_KEY)"
    played.add_argument("--key-file", type=Path, metavar="FILE", help=key)
    played.add_argument("--temperature", type=float, metavar="X", help="of a chat API (default: its own)")
    add_flags(played, InferenceConfig, ENGINE)
    add_flags(played, ModelConfig, ("chat_template",))
    what = "budget of a rollout, by default that of a run; with a chat API 50, 32000, 131072, 900"
    add_flags(parser.add_argument_group(what), RolloutConfig, BUDGET)


def run_rollouts(arguments: argparse.Namespace) -> None:
    """Writes the rows, and prints how many tries are kept and why others are not. Raises UserError."""
    from etude.cli.progress import bar
    from etude.run.evaluate import CHAT_BUDGET
    from etude.run.traces import RolloutPlayer, RolloutSources, write_agreed_rollouts

    output = new_rows_file(arguments.output)
    options = from_flags(arguments, AgreedRolloutsConfig)
    engine = from_flags(arguments, InferenceConfig, **({} if hasattr(arguments, "threads") else {"threads": 2}))
    model = _model(arguments)
    budget: dict[str, Any] = dict(CHAT_BUDGET) if not isinstance(model, Path) else {}
    budget |= {name: value for name, value in flag_values(arguments, RolloutConfig).items() if name in BUDGET}
    player = RolloutPlayer(
        model, validate(RolloutConfig, budget, "etude corpus rollouts").budget(), engine, sandbox_of(arguments)
    )
    sources = RolloutSources(arguments.sources, arguments.own, arguments.own_licence)
    with bar() as progress:
        report = write_agreed_rollouts(sources, output, options, player, progress)
    print(f"{report.rows:,} rows in {output}: {report.kept:,} of {report.tries:,} pairs of rollouts agree")
    if report.left_out:
        print(f"left out: {reasons(report.left_out, {})}")


def _model(arguments: argparse.Namespace) -> Path | Remote:
    """The folder of the model, or the model behind an URL. Raises UserError."""
    from etude.protocol.backends import ChatModel
    from etude.run.evaluate import remote

    if "://" not in arguments.model:
        flags = {"--name": "name", "--api": "api", "--key-file": "key_file", "--temperature": "temperature"}
        for flag in (flag for flag, name in flags.items() if getattr(arguments, name) is not None):
            raise UserError(f"{flag} belongs to the URL of a chat API, and {arguments.model} is none: drop it")
        return model_folder(arguments.model, getattr(arguments, "chat_template", None))
    if names := [name.replace("_", "-") for name in (*ENGINE, "chat_template") if hasattr(arguments, name)]:
        raise UserError(f"--{names[0]} belongs to a model folder, which an engine of this machine serves: drop it")
    if arguments.name is None:
        raise UserError(f"{arguments.model} is the URL of an API: say which model there by --name NAME")
    chat = ChatModel(arguments.model, arguments.name, arguments.api or "openai", arguments.temperature)
    return remote(chat, api_key(arguments))
