"""`etude weights ...`: the versions of a store, for people. Progress and tables go to a terminal, results to stdout."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from etude.cli.progress import bar
from etude.errors import UserError
from etude.inference.vllm import feed as following
from etude.models.loading import model_id
from etude.records import PolicyVersion
from etude.store import Store, open_store
from etude.weights import export, retention, signature
from etude.weights.audit import audit
from etude.weights.content import load_content
from etude.weights.manifest import manifests, versions
from etude.weights.signature import Trust

SHOWN_PROBLEMS = 10


def run(arguments: argparse.Namespace) -> int:
    """One of the commands below, by its name."""
    command: Callable[[argparse.Namespace], int] = COMMANDS[arguments.action]
    return command(arguments)


def keygen(arguments: argparse.Namespace) -> int:
    public = signature.keygen(arguments.path)
    print(f"private key {arguments.path}, public key {public}")
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    """Every version, one line each."""
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
    """Reads every byte that the manifests name."""
    store = _store(arguments.store)
    with bar() as progress:
        found = audit(store, _trust(arguments), arguments.version, progress)
    if arguments.json:
        figures = {"versions": found.versions, "objects": found.objects, "bytes": found.bytes, "pruned": found.pruned}
        print(json.dumps({"ok": not found.problems, **figures, "problems": found.problems}))
    if found.problems:
        if not arguments.json:
            for problem in found.problems[:SHOWN_PROBLEMS]:
                print(problem)
        raise UserError(
            f"{store.url} is damaged in {len(found.problems)} places, the first: {found.problems[0]}; restore what is "
            "named from a copy, or publish an anchor anew"
        )
    if not arguments.json:
        pruned = f", {found.pruned} pruned" if found.pruned else ""
        print(f"{found.versions} versions, {found.objects} objects, {found.bytes:,} bytes: all whole{pruned}")
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """What changed between two versions, tensor by tensor."""
    store = _store(arguments.store)
    with bar() as progress:
        progress("load", 0, 2)
        (_, a), (_, b) = load_content(store, arguments.a), load_content(store, arguments.b)
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


def apply(arguments: argparse.Namespace) -> int:
    """A folder that holds one version becomes a folder that holds another."""
    store = _store(arguments.store)
    version = _version(store, arguments.version)
    trust = _trust(arguments, arguments.folder)
    with bar() as progress:
        held = export.advance(store, arguments.folder, version, arguments.output, trust, progress)
    print(f"{arguments.folder} holds version {held}; {arguments.output} holds version {version}")
    return 0


def publish(arguments: argparse.Namespace) -> int:
    """The weights of a folder as the next version."""
    key = signature.private_key(arguments.key) if arguments.key else None
    with bar() as progress:
        progress("publish", 0, 1)
        manifest = export.publish_folder(open_store(arguments.store), arguments.folder, key)
    if arguments.json:
        print(json.dumps(_row(manifest)))
    else:
        print(f"version {manifest.version}: {manifest.kind} of {manifest.payload_bytes:,} bytes, {manifest.digest}")
    return 0


def fetch(arguments: argparse.Namespace) -> int:
    """A version as a Hugging Face folder."""
    store = _store(arguments.store)
    version = _version(store, arguments.version)
    trust = _trust(arguments, arguments.base)
    with bar() as progress:
        progress("fetch", 0, 1)
        manifest = export.export(store, version, arguments.base, arguments.output, trust)
    print(f"{arguments.output} holds version {version}, {manifest.digest}")
    return 0


def gc(arguments: argparse.Namespace) -> int:
    """Takes away what no version needs."""
    store = _store(arguments.store)
    with bar() as progress:
        done = retention.collect(
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
    print(f"{verb} {len(done.keys)} objects, {done.bytes:,} bytes; {done.kept} stay, {done.kept_bytes:,} bytes")
    return 0


def feed(arguments: argparse.Namespace) -> int:
    """A vLLM server follows the store."""
    store = _store(arguments.store)
    key = str(arguments.public_key.resolve()) if arguments.public_key else None
    server = following.VllmServer(arguments.vllm)
    following.feed(
        server,
        store,
        arguments.relay,
        key,
        once=arguments.once,
        deadline=arguments.deadline,
        say=lambda text: print(text, flush=True),
    )
    return 0


COMMANDS = {f.__name__: f for f in (keygen, inspect, verify, diff, apply, publish, fetch, feed, gc)}


def _store(url: str) -> Store:
    """A store that is there. A folder is not made by looking at it."""
    if "://" not in url and not Path(url).is_dir():
        raise UserError(f"{url} is not a folder; give the store of a run, e.g. outputs/RUN/weights")
    return open_store(url)


def _manifests(store: Store) -> list[PolicyVersion]:
    try:
        found = manifests(store)
    except ValueError as e:
        raise UserError(f"{e}; `etude weights verify` says what else is") from None
    if not found:
        raise UserError(f"{store.url} has no version at all; publish one first")
    return found


def _version(store: Store, wanted: int | None) -> int:
    numbers = [wanted] if wanted is not None else versions(store)
    if not numbers:
        raise UserError(f"{store.url} has no version at all; publish one first")
    return numbers[-1]


def _trust(arguments: argparse.Namespace, folder: Path | None = None) -> Trust:
    key = signature.public_key(arguments.public_key) if arguments.public_key else None
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
