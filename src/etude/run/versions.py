"""Which version the engines serve, proved by digests of their tensors."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from etude.errors import RunFailed, UserError
from etude.protocol.client import EngineError
from etude.rollout.engines import complaints
from etude.run.state import Run, check_processes
from etude.weights.manifest import read

SWAP_SECONDS = 120.0
SUMMED = ("running", "waiting", "generated_tokens")  # figures of all engines together


async def observe_versions(run: Run) -> None:
    """Asks every engine for its version and load, compares the digest that it serves with the published one, and has
    new versions scored by logprob probes. Raises RunFailed for an engine that is gone or serves other tensors."""
    record = run.record
    answers: dict[str, dict[str, Any]] = {}
    for url in run.engines.urls:
        health = answers[url] = await _health(run, url)
        version = int(health["version"])
        if version not in record.digests and (manifest := read(run.weights, version)) is not None:
            record.digests[version] = manifest.digest
        record.pauses[version] = max(record.pauses.get(version, 0.0), float(health["last_pause_ms"]))
        digest = record.digests.get(version)
        if digest is None:
            continue
        if health["digest"] != digest:
            raise RunFailed(
                f"{url} serves other tensors than version {version} has (digest {health['digest'][:12]}, published "
                f"{digest[:12]}); admission stopped"
            )
        record.checked += 1
        run.engines.probes.served(url, version)
    for complaint in complaints({url: health["configuration"] for url, health in answers.items()}):
        if complaint not in record.complaints:
            print(f"guard engines, warn: {complaint}", file=sys.stderr, flush=True)
            record.complaints.add(complaint)
    healths = list(answers.values())
    run.progress.served = min(int(health["version"]) for health in healths)
    sums = {name: float(sum(health[name] for health in healths)) for name in SUMMED}
    busy = sum(health["busy_seconds"] for health in healths) / len(healths)
    run.progress.engine = sums | {"busy_seconds": busy}


async def _health(run: Run, url: str) -> dict[str, Any]:
    try:
        health = await run.engines.client.health(url)
    except EngineError as e:
        check_processes(run)
        raise RunFailed(f"the engine at {url} does not answer ({e}); continue with --resume {run.folder}") from e
    if health["status"] == "failed":
        raise RunFailed(f"the engine at {url} failed: {health['error']}; continue with --resume {run.folder}")
    return health


async def wait_for_version(run: Run, version: int) -> None:
    """Until every engine serves at least `version`, digest proven. Raises RunFailed after two minutes."""
    deadline = time.monotonic() + SWAP_SECONDS
    while time.monotonic() < deadline:
        check_processes(run)
        await observe_versions(run)
        if run.progress.served >= version:
            return
        await asyncio.sleep(0.1)
    raise RunFailed(f"the engines did not reach version {version} within {SWAP_SECONDS:.0f} seconds")


async def check_documents(run: Run) -> None:
    """Raises UserError if episodes are to send documents and an engine refuses them for this model."""
    for url in run.engines.urls if run.config.rollout.documents else ():
        health: dict[str, Any] = await run.engines.client.health(url)
        if refusal := health["documents"]["refusal"]:
            raise UserError(f"{refusal}: set rollout.documents to false")
