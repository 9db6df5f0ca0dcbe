"""Commands. This module starts fast: nothing heavy is imported until a command needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from etude.errors import RunFailed, UserError


def main(argv: list[str] | None = None) -> None:
    """Runs a command; an error becomes one sentence: exit code 2 if the user can fix it, else 1; Ctrl-C 130."""
    words = sys.argv[1:] if argv is None else argv
    arguments, rest = _parser(words).parse_known_args(words)
    if rest and not arguments.overrides:
        _fail(f"unexpected argument {rest[0]!r}; see `etude {arguments.command} --help`")
    try:
        code = arguments.run(arguments, rest)
    except UserError as e:
        _fail(str(e))
    except RunFailed as e:
        print(f"etude: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\netude: interrupted; a run folder is kept and can be resumed", file=sys.stderr)
        sys.exit(130)
    sys.exit(code or 0)


def _fail(sentence: str) -> None:
    print(f"etude: {sentence}", file=sys.stderr)
    sys.exit(2)


def _parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="etude", description="Train your own coding agent on your own product.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str, *, overrides: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run, overrides=overrides)
        return sub

    demo = command("demo", _demo, "train the bundled nano model on a real library, on two CPU cores", overrides=True)
    demo.add_argument("--seed", type=int, default=1)

    tasks_parser = command("tasks", _tasks, "make and check tasks from a repository")
    if "tasks" in words[:1]:
        from etude.cli import tasks

        tasks.add(tasks_parser)

    train = command("train", _train, "run a training stage: midtrain, sft, apply or rl", overrides=True)
    train.add_argument("config", type=Path, help="TOML configuration; with --resume also a run folder")
    train.add_argument("--resume", action="store_true", help="continue the run of this configuration where it stopped")
    train.add_argument("--deterministic", action="store_true", help="repeat bit for bit")
    train.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")

    evaluate = command("eval", _eval, "measure a model on a task dataset")
    evaluate.add_argument("model", type=Path, help="HF folder")
    suites = "task dataset made by `etude tasks build`, or `retrieval`, or `fast-apply`, or a table of edits"
    evaluate.add_argument("--suite", type=Path, required=True, help=suites)
    evaluate.add_argument("--split", choices=("heldout", "train"), default="heldout")
    evaluate.add_argument("--samples", type=int, default=4, help="episodes per task")
    evaluate.add_argument("--max-tasks", type=int)
    evaluate.add_argument("--format", choices=("rewrite", "search-replace", "udiff"), default="rewrite",
                          help="how edits are answered")  # fmt: skip
    tested = "for fast-apply: a task dataset; the edits undo its mutations, and answers that differ are tested"
    evaluate.add_argument("--tests", type=Path, metavar="DIR", help=tested)
    evaluate.add_argument("--judge", metavar="URL", help="OpenAI API of a model that is asked about failed edits")
    evaluate.add_argument("--judge-model", metavar="NAME", help="its name there")
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--against", type=Path, help="a second model: paired difference, second minus first")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    files = evaluate.add_argument_group("retrieval", "questions about files of a repository (docs/documents.md)")
    files.add_argument("--documents", choices=("full", "own", "both"), help="which see each other; default: both")
    files.add_argument("--repository", type=Path, nargs="+", help="folders; default: libraries kept out of training")
    files.add_argument("--orders", type=int, help="random orders of the documents, the first included; default: 1")

    serve = command("serve", _serve, "serve a model over an OpenAI-compatible HTTP API")
    serve.add_argument("model", type=Path, help="HF folder")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--threads", type=int, default=2)
    serve.add_argument("--cache-mb", type=int, default=512, help="memory for keys and values")
    serve.add_argument("--documents-mb", type=int, default=256, help="memory for keys and values of documents")
    serve.add_argument("--weights", help="store URL to take new versions from")
    serve.add_argument("--public-key", type=Path, help="serve only versions whose manifests this key has signed")
    serve.add_argument("--accepted", type=Path, help="file that remembers, for --public-key, what was served last")

    _weights_arguments(command("weights", _weights, "look at, check, move and tidy the versions of a weight store"))

    apply = command("apply", _apply, "lay the sketch of an edit into a file")
    apply.add_argument("file", type=Path, help="UTF-8 text file; replaced at once or not at all")
    apply.add_argument("--edit", metavar="TEXT", help="the lines that change; `# ... existing code ...` for the rest")
    apply.add_argument("--edit-file", type=Path, metavar="FILE", help="the same from a file")
    apply.add_argument("--instruction", default="", help="what the edit is about, for the model")
    which = apply.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="HF folder of an apply model, e.g. models/nano-apply")
    which.add_argument("--no-model", action="store_true", help="only the deterministic merge (the default)")
    apply.add_argument("--check", action="store_true", help="print the difference and write nothing")

    export = command("export", _export, "write the episodes of a run as ATIF trajectories, tokens included")
    export.add_argument("folder", type=Path, help="run folder")
    export.add_argument("episode", nargs="*", help="as GROUP-MEMBER-ATTEMPT, e.g. 3-1-0; default: all in the ledger")
    export.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")

    _doctor_arguments(command("doctor", _doctor, "what this machine can do, and what it refuses"))

    bench = command("bench", _bench, "run a benchmark")
    names = ("async", "documents", "edits", "engine", "mismatch", "sandbox", "shared-prompt", "weights")
    bench.add_argument("name", choices=names)
    bench.add_argument("--quick", action="store_true")
    bench.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def _doctor_arguments(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("--json", action="store_true")
    checks = doctor.add_subparsers(dest="check", metavar="CHECK")
    mismatch = checks.add_parser("mismatch", help="why trainer and engine disagree in a run", allow_abbrev=False)
    mismatch.add_argument("folder", type=Path, help="run folder")
    mismatch.add_argument("--json", action="store_true")
    replay = checks.add_parser("replay", help="play the episodes of a run again, token by token", allow_abbrev=False)
    replay.add_argument("folder", type=Path, help="run folder")
    replay.add_argument("episode", nargs="*", help="as GROUP-MEMBER-ATTEMPT, e.g. 3-1-0; default: all in the ledger")
    replay.add_argument("--json", action="store_true")
    attacks = checks.add_parser("sandbox", help="run the attack suite on this machine", allow_abbrev=False)
    attacks.add_argument("--json", action="store_true")
    attacks.add_argument("--quick", action="store_true", help="leave out repetitions and comparisons")
    attacks.add_argument("--backend", default="namespace", help="who makes the boxes, as in [sandbox]")
    attacks.add_argument("--image", default="", help="what [sandbox] calls image")
    attacks.add_argument("--runtime", help="what [sandbox] calls runtime")
    production = "fingerprints of production machines, to play items E (see the check parity)"
    attacks.add_argument("--against", type=Path, nargs="+", metavar="FILE", help=production)
    attacks.add_argument("--personas", type=Path, metavar="FILE", help="as rollout.personas; else the default's")
    attacks.add_argument("--dataset", type=Path, metavar="DIR", help="tasks whose boxes these are; else made-up ones")
    attacks.add_argument("--boxes", type=int, default=200, help="boxes to compare with")
    parity = checks.add_parser("parity", help="whether boxes can be told from production machines", allow_abbrev=False)
    parity.add_argument("--json", action="store_true")
    what = parity.add_mutually_exclusive_group(required=True)
    what.add_argument("--against", type=Path, nargs="+", metavar="FILE", help="fingerprints of production machines")
    what.add_argument("--record", type=Path, metavar="FILE", help="append fingerprints of this machine")
    what.add_argument(
        "--episodes", type=Path, nargs=2, metavar="RUN", help="two runs of the same tasks, to be compared"
    )
    what.add_argument("--script", action="store_true", help="print the script that takes them, for other machines")
    parity.add_argument("--samples", type=int, default=20, help="fingerprints to record")
    parity.add_argument("--boxes", type=int, default=200, help="boxes to compare with")
    parity.add_argument("--of", default="eval-before", metavar="PREFIX", help="which episodes of the runs")
    parity.add_argument("--dataset", type=Path, metavar="DIR", help="tasks whose boxes these are; else a made-up one's")
    parity.add_argument("--personas", type=Path, metavar="FILE", help="as rollout.personas; else half of the machines")


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


def _version() -> str:
    from importlib.metadata import version

    return version("etude")


def _demo(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from etude.run.launch import demo

    demo(arguments.seed, overrides)


def _tasks(arguments: argparse.Namespace, rest: list[str]) -> int:
    from etude.cli import tasks

    return tasks.run(arguments, rest)


def _train(arguments: argparse.Namespace, overrides: list[str]) -> None:
    from etude.cli.train import train

    if arguments.deterministic:
        overrides = [*overrides, "--deterministic", "true"]
    train(arguments.config, overrides, resume=arguments.resume, dry_run=arguments.dry_run)


def _eval(arguments: argparse.Namespace, _: list[str]) -> None:
    models = [arguments.model, *([arguments.against] if arguments.against else [])]
    if arguments.suite == Path("retrieval"):
        from etude.evals.documents import MASKS, evaluate_retrieval

        return evaluate_retrieval(
            models,
            masks=[mask for mask in MASKS if arguments.documents in (None, "both", mask)],
            repositories=arguments.repository or (),
            samples=100 if arguments.max_tasks is None else arguments.max_tasks,
            orders=1 if arguments.orders is None else arguments.orders,
            seed=arguments.seed,
            as_json=arguments.json,
        )
    if arguments.documents or arguments.repository or arguments.orders is not None:
        raise UserError("--documents, --repository and --orders belong to --suite retrieval")
    if arguments.suite == Path("fast-apply") or arguments.suite.suffix == ".parquet":
        from etude.edits.judge import Judge
        from etude.evals.fast_apply import evaluate_edits

        if (arguments.judge is None) != (arguments.judge_model is None):
            raise UserError("--judge and --judge-model belong together: give both")
        if arguments.tests is not None and arguments.suite != Path("fast-apply"):
            raise UserError("--tests brings edits of its own: give it with --suite fast-apply")
        return evaluate_edits(
            models,
            arguments.suite,
            way=arguments.format,
            max_edits=arguments.max_tasks,
            as_json=arguments.json,
            tests=arguments.tests,
            split=arguments.split,
            judge=Judge(arguments.judge, arguments.judge_model) if arguments.judge else None,
        )
    if arguments.tests or arguments.judge or arguments.judge_model:
        raise UserError("--tests, --judge and --judge-model belong to --suite fast-apply")
    from etude.run.evaluate import evaluate_models

    evaluate_models(
        models,
        arguments.suite,
        split=arguments.split,
        samples=arguments.samples,
        max_tasks=arguments.max_tasks,
        seed=arguments.seed,
        as_json=arguments.json,
    )


def _serve(arguments: argparse.Namespace, _: list[str]) -> None:
    from etude.inference.server.server import serve
    from etude.inference.server.weights import WeightSource

    url, key, accepted = arguments.weights, arguments.public_key, arguments.accepted
    if (key and not url) or (accepted and not key):
        raise UserError("--accepted needs --public-key, which needs --weights: give all that are needed")
    weights = WeightSource(store=url, public_key=key, accepted=accepted) if url else None
    serve(
        arguments.model,
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


def _apply(arguments: argparse.Namespace, _: list[str]) -> int:
    from etude.cli.apply import apply

    return apply(
        arguments.file,
        arguments.edit,
        arguments.edit_file,
        instruction=arguments.instruction,
        model=arguments.model,
        check=arguments.check,
    )


def _export(arguments: argparse.Namespace, _: list[str]) -> None:
    from etude.cli.export import export

    export(arguments.folder, arguments.episode, arguments.output)


def _doctor(arguments: argparse.Namespace, _: list[str]) -> int:
    if arguments.check == "mismatch":
        from etude.audit import mismatch

        return mismatch.show(arguments.folder, as_json=arguments.json)
    if arguments.check == "replay":
        from etude.audit import replay

        return replay.show(arguments.folder, arguments.episode, as_json=arguments.json)
    if arguments.check == "sandbox":
        from etude.audit.attacks import fingerprints, suite
        from etude.config import SandboxConfig, validate
        from etude.sandbox.backends.choose import opened

        given = {"backend": arguments.backend, "image": arguments.image, "runtime": arguments.runtime}
        boxes = opened(validate(SandboxConfig, given, "etude doctor"))
        against = None
        if arguments.against is not None:
            if arguments.backend != "namespace":
                raise UserError("--against needs boxes with personas, which only the namespace backend makes.")
            against = fingerprints.against(
                arguments.against, arguments.boxes, dataset=arguments.dataset, personas=arguments.personas
            )
        elif arguments.dataset is not None or arguments.personas is not None:
            raise UserError("--dataset and --personas say what boxes are compared with: give --against, too.")
        return suite.show(as_json=arguments.json, quick=arguments.quick, boxes=boxes, against=against)
    if arguments.check == "parity":
        from etude.audit.parity import audit

        if arguments.script:
            print(audit.SCRIPT.read_text("utf-8"), end="")
            return 0
        if arguments.episodes is not None:
            from etude.audit.parity import pairs

            return pairs.show(arguments.episodes, arguments.of, arguments.json)
        if arguments.record is not None:
            return audit.record(arguments.record, arguments.samples)
        return audit.show(
            arguments.against,
            arguments.boxes,
            arguments.json,
            dataset=arguments.dataset,
            personas=arguments.personas,
        )
    from etude.sandbox.doctor import show

    return show(as_json=arguments.json)


def _bench(arguments: argparse.Namespace, _: list[str]) -> int:
    import importlib
    import json

    name = "asynchrony" if arguments.name == "async" else arguments.name.replace("-", "_")  # `async` is a keyword
    path = Path("benchmarks") / f"{name}.py"
    if not path.exists():
        raise UserError(f"{path} does not exist; run `etude bench` from the root of the etude repository")
    sys.path.insert(0, str(Path.cwd()))  # benchmarks are no part of the package
    module = importlib.import_module(f"benchmarks.{name}")
    result = module.run(quick=arguments.quick)
    if not arguments.json:
        for row in result["rows"]:
            print(f"{row['case']:40} {row['value']:>12.4g} {row['unit']:10} {row['baseline']}")
    print(json.dumps(result))
    return 0 if all(result["checks"].values()) else 1


if __name__ == "__main__":
    main()
