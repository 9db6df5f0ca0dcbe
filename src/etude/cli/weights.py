"""`etude weights ACTION`: inspects, verifies, moves and tidies the versions of a weight store.

Results go to stdout; progress is shown on a terminal.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etude.cli.progress import bar
from etude.errors import UserError
from etude.inference.vllm import feed as following
from etude.models import check_folder
from etude.records import PolicyVersion
from etude.store import Store, open_store
from etude.weights import (
    Trust,
    generate_key,
    manifests,
    model_folder,
    published_versions,
    read_private_key,
    read_public_key,
    rl_config,
    with_models,
)
from etude.weights.retention import collect_garbage

SHOWN_PROBLEMS = 10


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude weights`, one sub-command per action."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str, *, store: bool = True, json: bool = False) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        if store:
            sub.add_argument("store", help="folder or file://, s3://, gs://, az:// URL, e.g. outputs/RUN/weights")
        if json:
            sub.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        return sub

    began = "model that the run began with: HF folder, run folder, GGUF file, or the name of a model"

    def based(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("--base", help=f"{began}; default: that of the run folder around the store")
        return sub

    def trusting(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("--public-key", type=Path, help="refuse manifests that this key did not sign")
        return sub

    keygen = action("keygen", "make an Ed25519 key to sign manifests with", store=False)
    keygen.add_argument("path", type=Path, help="file for the private key; the public one gets the ending .pub")
    inspect = action("inspect", "list versions, their sizes and how they hang together", json=True)
    inspect.add_argument("version", type=int, nargs="?", help="list this version alone")
    text = "read every byte of every version and compare it with the manifests"
    verify = based(trusting(action("verify", text, json=True)))
    verify.add_argument("--version", type=int, help="verify this version alone")
    diff = based(action("diff", "show what changed between two versions, tensor by tensor", json=True))
    diff.add_argument("a", type=int, help="version to compare")
    diff.add_argument("b", type=int, help="version to compare it with")
    text = "bring a model folder that holds one version to another by the fewest bytes"
    apply = based(trusting(action("apply", text)))
    apply.add_argument("folder", help="HF folder, run folder, GGUF file, or the name of a model")
    apply.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")
    apply.add_argument("--version", type=int, help="default: the newest")
    publish = based(action("publish", "publish the weights of a model folder as the next version", json=True))
    publish.add_argument("folder", help="HF folder, run folder, GGUF file, or the name of a model")
    publish.add_argument("--key", type=Path, help="private key to sign with")
    fetch = trusting(action("fetch", "write a version as a model folder"))
    fetch.add_argument("--base", required=True, help=began)
    fetch.add_argument("-o", "--output", type=Path, required=True, help="folder to write; must not exist")
    fetch.add_argument("--version", type=int, help="default: the newest")
    fetch.add_argument("--adapters", action="store_true", help="of a run with trainer.lora the adapters, for PEFT")
    feed = action("feed", "bring a vLLM server to every version that is published, until it is interrupted")
    feed.add_argument("--vllm", required=True, metavar="URL", help="e.g. http://127.0.0.1:8000; see docs/weights.md")
    feed.add_argument("--relay", help="URL of a relay that the server fetches weights from")
    feed.add_argument("--public-key", type=Path, help="refuse manifests not signed by this key; read by the server")
    feed.add_argument("--once", action="store_true", help="stop when the newest version is live")
    feed.add_argument("--deadline", type=float, default=600.0, help="seconds that a version may take to go live")
    gc = action("gc", "remove objects that no version names", json=True)
    gc.add_argument("--prune", action="store_true", help="also all objects older than the two newest anchors need")
    gc.add_argument("--in-use", type=int, nargs="+", default=[], metavar="V", help="versions that somebody holds")
    gc.add_argument("--grace", type=float, default=3600.0, help="seconds that objects are safe after they are written")
    gc.add_argument("--dry-run", action="store_true", help="tell what would be removed, and how many bytes")


def run(arguments: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Runs the action; returns the exit code. Raises UserError."""
    command: Callable[[argparse.Namespace], int] = ACTIONS[arguments.action]
    return command(arguments)


def keygen(arguments: argparse.Namespace) -> int:
    """Writes a new pair of keys to sign manifests with."""
    public = generate_key(arguments.path)
    print(f"private key {arguments.path}, public key {public}")
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    """Prints every version, one line each."""
    store = _store(arguments.store)
    published = _manifests(store)
    if arguments.version is not None:
        published = [m for m in published if m.version == arguments.version]
        if not published:
            raise UserError(f"{store.url} has no version {arguments.version}; `etude weights inspect` lists them")
    rows = [_row(manifest) for manifest in published]
    if arguments.json:
        print(json.dumps({"store": store.url, "run": published[-1].run if published else None, "versions": rows}))
        return 0
    print(f"{'version':>8} {'kind':7} {'bytes':>12} {'changed':>9} {'skips':12} {'anchor':>7} {'signed':6} digest")
    for row in rows:
        skips = ",".join(map(str, row["skips"])) or "-"
        print(
            f"{row['version']:>8} {row['kind']:7} {row['bytes']:>12,} {row['changed']:>9.3%} {skips:12} "
            f"{row['anchor']:>7} {'yes' if row['signed'] else 'no':6} {row['digest']}"
        )
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Reads every byte that the manifests name and compares it with their digests. Raises UserError for damage."""
    from etude.weights.audit import audit

    store = _store(arguments.store)
    with bar() as progress:
        report = audit(store, _trust(arguments), arguments.version, _base(arguments), progress)
    if arguments.json:
        figures = {name: getattr(report, name) for name in ("versions", "objects", "bytes", "pruned", "rebuilt")}
        print(json.dumps({"ok": not report.problems, **figures, "problems": report.problems}))
    if report.problems:
        if not arguments.json:
            for problem in report.problems[:SHOWN_PROBLEMS]:
                print(problem)
        raise UserError(
            f"{store.url} is damaged in {len(report.problems)} places, the first: {report.problems[0]}; restore the "
            "damaged objects from a copy, or publish an anchor anew"
        )
    if not arguments.json:
        pruned = f", {report.pruned} pruned" if report.pruned else ""
        print(f"{report.versions} versions, {report.objects} objects, {report.bytes:,} bytes: all whole{pruned}")
        if not report.rebuilt:
            print("the newest was not rebuilt, since its chain begins with the run's model folder: give --base")
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Prints the number of changed elements between two versions, tensor by tensor."""
    from etude.weights.content import load_content

    store = _store(arguments.store)
    with bar() as progress:
        progress("load", 0, 2)
        folder = _base(arguments)
        (_, a), (_, b) = (load_content(store, version, folder=folder) for version in (arguments.a, arguments.b))
    if a.schema != b.schema:
        raise UserError(f"versions {arguments.a} and {arguments.b} are of different models and cannot be compared")
    rows: list[dict[str, Any]] = []
    for spec in a.schema.tensors:
        changed = int(np.count_nonzero(a.bits[spec.name] != b.bits[spec.name]))
        if changed:
            rows.append({"tensor": spec.name, "changed": changed, "elements": spec.elements})
    total, elements = sum(row["changed"] for row in rows), sum(spec.elements for spec in a.schema.tensors)
    if arguments.json:
        print(json.dumps({"a": arguments.a, "b": arguments.b, "changed": total, "elements": elements, "tensors": rows}))
        return 0
    for row in sorted(rows, key=lambda row: -row["changed"]):
        print(f"{row['changed']:>12,} of {row['elements']:>12,}  {row['tensor']}")
    print(f"{total:,} of {elements:,} elements differ ({total / max(elements, 1):.3%})")
    return 0


def _base(arguments: argparse.Namespace) -> Callable[[], dict[str, Any]] | None:
    """Reads the tensors of --base, or of the model of the run folder around the store; None without both."""
    from etude.weights.export import folder_tensors

    base, config = arguments.base, None
    if base is None and "://" not in arguments.store:
        config = rl_config(Path(arguments.store).absolute().parent)
    if base is None and config is None:
        return None
    return lambda: folder_tensors(model_folder(base or with_models(config).model.path))


def apply(arguments: argparse.Namespace) -> int:
    """Writes a model folder of a version from the folder of another version."""
    from etude.weights import export

    store = _store(arguments.store)
    version = _version(store, arguments.version)
    folder = model_folder(arguments.folder)
    trust = _trust(arguments, folder)
    with bar() as progress:
        held = export.advance(store, folder, version, arguments.output, trust, progress, _base(arguments))
    print(f"{arguments.folder} holds version {held}; {arguments.output} holds version {version}")
    return 0


def publish(arguments: argparse.Namespace) -> int:
    """Publishes the weights of a folder as the next version."""
    from etude.weights import export

    key = read_private_key(arguments.key) if arguments.key else None
    folder = model_folder(arguments.folder)
    check_folder(folder)  # before the store is made
    with bar() as progress:
        progress("publish", 0, 1)
        manifest = export.publish_folder(open_store(arguments.store, durable=True), folder, key, _base(arguments))
    if arguments.json:
        print(json.dumps(_row(manifest)))
    else:
        print(f"version {manifest.version}: {manifest.kind} of {manifest.payload_bytes:,} bytes, {manifest.digest}")
    return 0


def fetch(arguments: argparse.Namespace) -> int:
    """Writes a version as a Hugging Face folder."""
    from etude.weights import export

    store = _store(arguments.store)
    version = _version(store, arguments.version)
    base = model_folder(arguments.base)
    trust = _trust(arguments, base)
    with bar() as progress:
        progress("fetch", 0, 1)
        write = export.export_adapters if arguments.adapters else export.export
        manifest = write(store, version, base, arguments.output, trust)
    held = manifest.digest if arguments.adapters else manifest.live
    print(f"{arguments.output} holds version {version}, {held}")
    return 0


def gc(arguments: argparse.Namespace) -> int:
    """Removes objects that no version needs."""
    store = _store(arguments.store)
    with bar() as progress:
        done = collect_garbage(
            store,
            prune=arguments.prune,
            in_use=arguments.in_use,
            grace=arguments.grace,
            dry_run=arguments.dry_run,
            progress=progress,
        )
    if arguments.json:
        figures = {"objects": len(done.keys), "bytes": done.bytes, "kept": done.kept, "kept_bytes": done.kept_bytes}
        print(json.dumps({"dry_run": arguments.dry_run, **figures}))
        return 0
    verb = "would remove" if arguments.dry_run else "removed"
    young = f"; objects younger than --grace {arguments.grace:g} seconds stay" if arguments.grace else ""
    print(f"{verb} {len(done.keys)} objects, {done.bytes:,} bytes; {done.kept} stay, {done.kept_bytes:,} bytes{young}")
    return 0


def feed(arguments: argparse.Namespace) -> int:
    """Brings a vLLM server to every version of the store."""
    if not arguments.vllm.startswith(("http://", "https://")):
        raise UserError(f"--vllm {arguments.vllm} is no URL: give one like http://127.0.0.1:8000")
    store = _store(arguments.store)
    key = str(arguments.public_key.resolve()) if arguments.public_key else None
    following.feed(
        arguments.vllm,
        store,
        arguments.relay,
        key,
        once=arguments.once,
        deadline=arguments.deadline,
        say=lambda text: print(text, flush=True),
    )
    return 0


ACTIONS = {f.__name__: f for f in (keygen, inspect, verify, diff, apply, publish, fetch, feed, gc)}


def _store(url: str) -> Store:
    """The store at `url`. Raises UserError for a missing folder, which a reader must not make."""
    if "://" not in url and not Path(url).is_dir():
        raise UserError(f"{url} is not a folder; give the store of a run, e.g. outputs/RUN/weights")
    return open_store(url)


def _manifests(store: Store) -> list[PolicyVersion]:
    try:
        published = manifests(store)
    except ValueError as e:
        raise UserError(f"{e}; `etude weights verify` lists all damage") from None
    if not published:
        raise UserError(f"{store.url} has no version at all; publish one first")
    return published


def _version(store: Store, wanted: int | None) -> int:
    numbers = [wanted] if wanted is not None else published_versions(store)
    if not numbers:
        raise UserError(f"{store.url} has no version at all; publish one first")
    return numbers[-1]


def _trust(arguments: argparse.Namespace, folder: Path | None = None) -> Trust:
    from etude.models.loading import model_id

    key = read_public_key(arguments.public_key) if arguments.public_key else None
    return Trust(key, model=model_id(folder) if folder else "")


def _row(manifest: PolicyVersion) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "kind": manifest.kind,
        "parent": manifest.parent,
        "bytes": manifest.payload_bytes,
        "changed": manifest.changed / max(manifest.elements, 1),
        "skips": [skip.base for skip in manifest.skips],
        "anchor": manifest.anchor.version,
        "signed": bool(manifest.signature),
        "digest": manifest.digest,
        "groups": len(manifest.groups),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(manifest.created)),
    }
