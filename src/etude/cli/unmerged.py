"""The commands `tasks`, `serve` and `weights`, until their own modules have `add` and `run`. Then this file goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

from etude.config import find_model
from etude.errors import UserError


def _tasks_arguments(tasks: argparse.ArgumentParser) -> None:
    actions = tasks.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="make gated tasks from a repository", allow_abbrev=False)
    build.add_argument("repository", type=Path, help="folder of a Python or JavaScript repository with tests")
    build.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")
    build.add_argument("--seed", type=int, default=1)
    build.add_argument("--max-tasks", type=int, default=600)
    build.add_argument("--min-lines", type=int, default=3, help="shortest function that is broken")
    build.add_argument("--max-lines", type=int, default=30, help="longest function that is broken")
    kinds = ("mutation", "removal", "combined", "class", "feature", "commit")
    build.add_argument("--kinds", nargs="+", choices=kinds, default=["mutation", "removal"])
    build.add_argument("--bootstrap", default="declared", metavar="HOW",
                       help="dependencies: declared, rules, or the URL of a model that proposes them")  # fmt: skip
    build.add_argument("--write-tests", metavar="COMMAND", help="writes tests for functions that have none")
    build.add_argument("--max-functions", type=int, help="functions to try; default: all of them")
    build.add_argument("--max-test-files", type=int, help="JavaScript test files to use; default: all of them")
    build.add_argument("--heldout-fraction", type=float, default=0.25, help="share of functions kept for evaluation")
    check = actions.add_parser("check", help="run the gates of a task dataset again", allow_abbrev=False)
    check.add_argument("dataset", type=Path)

    edits = actions.add_parser("fast-apply", help="make tables of applied edits from repositories", allow_abbrev=False)
    edits.add_argument("repositories", nargs="+", metavar="REPO",
                       help="a git clone, a folder of files, or releases as OLD..NEW")  # fmt: skip
    edits.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")
    edits.add_argument("--held-out", nargs="+", default=[], metavar="REPO", help="repositories for evaluation alone")
    edits.add_argument("--held-out-edits", type=int, default=450, help="edits made of them")
    edits.add_argument("--seed", type=int, default=1)
    edits.add_argument("--max-lines", type=int, default=400, help="longest file to train on; longer ones give parts")
    edits.add_argument("--per-path", type=int, default=4, help="real edits of one file at most")
    edits.add_argument("--per-repository", type=int, default=50, help="real edits of one repository at most")
    edits.add_argument("--synthetic", type=float, default=4.0, help="invented edits for each real one")


def _serve_arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("model", help="HF folder, or the name of a bundled model such as nano")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--threads", type=int, default=2)
    serve.add_argument("--cache-mb", type=int, default=512, help="memory for keys and values")
    serve.add_argument("--documents-mb", type=int, default=256, help="memory for keys and values of documents")
    serve.add_argument("--weights", help="store URL to take new versions from")
    serve.add_argument("--public-key", type=Path, help="serve only versions whose manifests this key has signed")
    serve.add_argument("--accepted", type=Path, help="file that remembers, for --public-key, what was served last")


def _weights_arguments(weights: argparse.ArgumentParser) -> None:
    actions = weights.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str, *, store: bool = True) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        if store:
            sub.add_argument("store", help="folder or file://, s3://, gs://, az:// URL, e.g. outputs/RUN/weights")
        return sub

    def trusting(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("--public-key", type=Path, help="refuse manifests that this key did not sign")
        return sub

    keygen = action("keygen", "make an Ed25519 key to sign manifests with", store=False)
    keygen.add_argument("path", type=Path, help="file for the private key; the public one gets the ending .pub")
    inspect = action("inspect", "list versions, their sizes and how they hang together")
    inspect.add_argument("version", type=int, nargs="?")
    inspect.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    verify = trusting(action("verify", "read every byte of every version and compare it with the manifests"))
    verify.add_argument("--version", type=int, help="this one alone")
    verify.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    diff = action("diff", "what changed between two versions, tensor by tensor")
    diff.add_argument("a", type=int)
    diff.add_argument("b", type=int)
    diff.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    apply = trusting(action("apply", "bring a model folder that holds one version to another by the fewest bytes"))
    apply.add_argument("folder", type=Path, help="HF folder")
    apply.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")
    apply.add_argument("--version", type=int, help="default: the newest")
    publish = action("publish", "publish the weights of a model folder as the next version")
    publish.add_argument("folder", type=Path, help="HF folder")
    publish.add_argument("--key", type=Path, help="private key to sign with")
    publish.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    fetch = trusting(action("fetch", "write a version as a model folder"))
    fetch.add_argument("--base", type=Path, required=True, help="HF folder of the model that the run began with")
    fetch.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")
    fetch.add_argument("--version", type=int, help="default: the newest")
    feed = action("feed", "bring a vLLM server to every version that is published, until it is interrupted")
    feed.add_argument("--vllm", required=True, metavar="URL", help="e.g. http://127.0.0.1:8000; see docs/weights.md")
    feed.add_argument("--relay", help="URL of a relay that the server takes payloads from")
    feed.add_argument("--public-key", type=Path, help="refuse manifests not signed by this key; read by the server")
    feed.add_argument("--once", action="store_true", help="stop when the newest version is live")
    feed.add_argument("--deadline", type=float, default=600.0, help="seconds that a version may take to go live")
    gc = action("gc", "remove objects that no version names")
    gc.add_argument("--prune", action="store_true", help="also all older than the two newest anchors need")
    gc.add_argument("--in-use", type=int, nargs="+", default=[], metavar="V", help="versions that somebody holds")
    gc.add_argument("--grace", type=float, default=3600.0, help="seconds that objects are safe after they are written")
    gc.add_argument("--dry-run", action="store_true", help="say what would be removed, and how many bytes")
    gc.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def _tasks(arguments: argparse.Namespace, _: list[str]) -> int:
    if arguments.action == "fast-apply":
        from etude.cli.fast_apply import make

        return make(
            arguments.repositories,
            arguments.held_out,
            arguments.output,
            seed=arguments.seed,
            max_lines=arguments.max_lines,
            per_path=arguments.per_path,
            per_repository=arguments.per_repository,
            synthetic=arguments.synthetic,
            held_out=arguments.held_out_edits,
        )
    from etude.cli import tasks as commands

    if arguments.action == "check":
        return commands.check(arguments.dataset)
    return commands.build(
        arguments.repository,
        arguments.output,
        seed=arguments.seed,
        max_tasks=arguments.max_tasks,
        min_lines=arguments.min_lines,
        max_lines=arguments.max_lines,
        write_tests=arguments.write_tests,
        max_functions=arguments.max_functions,
        max_test_files=arguments.max_test_files,
        bootstrap=arguments.bootstrap,
        kinds=tuple(arguments.kinds),
        heldout_fraction=arguments.heldout_fraction,
    )


def _serve(arguments: argparse.Namespace, _: list[str]) -> None:
    from etude.inference.server.server import serve
    from etude.inference.server.weights import WeightSource

    url, key, accepted = arguments.weights, arguments.public_key, arguments.accepted
    if (key and not url) or (accepted and not key):
        raise UserError("--accepted needs --public-key, which needs --weights: give all that are needed")
    weights = WeightSource(store=url, public_key=key, accepted=accepted) if url else None
    serve(
        find_model(arguments.model),
        host=arguments.host,
        port=arguments.port,
        threads=arguments.threads,
        weights=weights,
        cache_mb=arguments.cache_mb,
        documents_mb=arguments.documents_mb,
    )


def _weights(arguments: argparse.Namespace, _: list[str]) -> int:
    from etude.cli.weights import run

    return run(arguments)


COMMANDS = {
    "tasks": SimpleNamespace(add=_tasks_arguments, run=_tasks),
    "serve": SimpleNamespace(add=_serve_arguments, run=_serve),
    "weights": SimpleNamespace(add=_weights_arguments, run=_weights),
}
