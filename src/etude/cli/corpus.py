"""`etude corpus`: makes documents to train on of own code, packages and replay data (`build`), and conversations of
agents' sessions and pull requests (`corpus_rows.py`) and of a model's rollouts (`corpus_rollouts.py`); names the
documents that a step was trained on (`trace`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from etude.cli import corpus_rollouts, corpus_rows, corpus_trace
from etude.cli.flags import add_flags, from_flags
from etude.config import DocumentBuildConfig


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of `etude corpus` and of its actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="make documents to train on", allow_abbrev=False)
    build.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="git clone, folder or NAME==VERSION of a package, each under a permissive licence",
    )
    what = "folder to write; must not exist; the same command goes on after a stop"
    build.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help=what)
    build.add_argument("--own", nargs="+", default=[], metavar="REPO", help="clones and folders that are yours")
    build.add_argument("--own-licence", default="own code", metavar="WORD", help="their licence, for the card")
    rows = "conversations: files of `etude corpus sessions`, `pull-requests`, `rollouts`, `etude tasks traces`"
    build.add_argument("--conversations", nargs="+", default=[], metavar="FILE", help=rows)
    replay = "general data against forgetting: .jsonl of texts or conversations, .txt, .md, or folders of these"
    build.add_argument("--replay", nargs="+", default=[], metavar="PATH", help=replay)
    suites = "datasets of tasks and tables of edits whose answers and tests must not be learned"
    build.add_argument("--suite", nargs="+", default=[], metavar="DATASET", help=suites)
    add_flags(build, DocumentBuildConfig)
    corpus_rows.add_sessions(actions)
    corpus_rows.add_pull_requests(actions)
    corpus_rollouts.add_to(actions)
    corpus_trace.add_to(actions)


def run(arguments: argparse.Namespace, _: list[str]) -> None:
    """Runs an action. Raises UserError."""
    match arguments.action:
        case "sessions":
            corpus_rows.run_sessions(arguments)
        case "pull-requests":
            corpus_rows.run_pull_requests(arguments)
        case "rollouts":
            corpus_rollouts.run_rollouts(arguments)
        case "trace":
            corpus_trace.trace(arguments)
        case _:
            _build(arguments)


def _build(arguments: argparse.Namespace) -> None:
    from etude.cli.progress import bar
    from etude.corpus.documents import build_documents

    output = arguments.output
    with bar() as progress:
        made = build_documents(
            arguments.sources,
            output,
            from_flags(arguments, DocumentBuildConfig),
            own=arguments.own,
            own_licence=arguments.own_licence,
            conversations=arguments.conversations,
            replay=arguments.replay,
            suites=arguments.suite,
            progress=progress,
        )
    held = sum(source["held_out_documents"] for source in made["sources"])
    total = sum(source["documents"] for source in made["sources"])
    print(f"{total - held} documents to train on and {held} held-out ones in {output}; see {output / 'card.md'}")
