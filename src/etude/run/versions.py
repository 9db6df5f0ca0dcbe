"""The versions that engines serve, proved by digests of their tensors, and the coming and going of engines.

A task per engine requests its report, so that a silent engine delays no other. An engine is lost if it is silent for
`SILENT_SECONDS`, if its process has ended or if it fails: the others play its turns. An engine that lags behind the
others gets no new turns, so that admission does not wait for it. It serves again once it answers and has caught up.
Engines that join (`ledger/membership.py`) serve once they are as new as the others; those that leave are drained first.
The run ends with the last engine, unless others may join. Servers that do not follow the store by themselves (vLLM) are
updated from here.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from pathlib import Path
from typing import Any

from etude.config import RLConfig
from etude.errors import RunFailed, UserError
from etude.ledger import MemberState
from etude.models import size_of
from etude.protocol.backends import EngineError
from etude.rollout import EngineConfiguration, engine_differences, precision_warnings
from etude.run.engines import start_seconds
from etude.run.state import EngineState, Run, check_processes
from etude.weights import published_versions, read_manifest

SWAP_SECONDS = {"etude": 120.0, "vllm": 1800.0}  # from a version's manifest to its first token
SWAP_SECONDS_A_GB = 30.0  # more of it for each GB of the model
SILENT_SECONDS = 30.0  # after which an engine is lost
REFUSED = 3  # failed updates in a row, after which an engine is lost
MEMBERS_SECONDS = 1.0  # between two looks at the ledger's table of engines
FORGET_SECONDS = 600.0  # of silence, after which an engine that is gone is not asked any more
ASK_SECONDS = 0.002  # between two requests for an engine's report, for each engine of the run
REPORTS_AT_ONCE = 64  # asked for, of the engines that were not asked for longest: many engines take several ticks
_JOINED: tuple[MemberState, str, int] = ("joining", "", -1)  # state, why and version of an engine that has just joined
CHECK_SECONDS = 300.0
DYING_SECONDS = 10.0  # that a server takes to end after a failure; its log says more than its answer
_PATIENCE = 1.0  # seconds that `observe_versions` waits for reports
SUMMED = ("running", "waiting", "generated_tokens")  # figures of all engines together


async def observe_versions(run: Run) -> None:
    """Reads every engine's version and load, compares the served digest with the published digest, and has new versions
    scored by logprob probes. Prints, once each, the differences of the engines' configurations, and engines with a head
    below float32. Raises RunFailed if no engine is left or an engine serves other tensors."""
    await _read_members(run)
    await _ask(run)
    if not run.engines.client.backend.follows:
        await _bring(run)
    await _write_members(run)
    serving = run.engines.serving
    healths = {state.url: state.health for state in serving if state.health is not None}
    if not healths:
        return
    for url, health in healths.items():
        _check_digest(run, url, health)
    configurations: dict[str, EngineConfiguration] = {url: health["configuration"] for url, health in healths.items()}
    different = engine_differences(configurations)
    run.record.complaints.update(different)
    for sentence in (*precision_warnings(configurations), *different):
        if sentence not in run.record.warned:
            print(f"guard engines, warn: {sentence}", file=sys.stderr)
            run.record.warned.add(sentence)
    if len(healths) == len(serving):
        run.progress.served = min(state.version for state in serving)
    sums = {name: float(sum(health[name] for health in healths.values())) for name in SUMMED}
    busy = sum(health["busy_seconds"] for health in healths.values()) / len(healths)
    run.progress.engine = sums | {"busy_seconds": busy}


async def _read_members(run: Run) -> None:
    """Takes in the engines that have joined the ledger, and notes those that leave or have left."""
    now, engines = time.monotonic(), run.engines
    if now < engines.looked + MEMBERS_SECONDS:
        return
    engines.looked = now
    await asyncio.to_thread(run.ledger.members.beat)  # evaluations and the trainer's start may last longer than a grace
    known = {state.url: state for state in engines.states}
    for row in await asyncio.to_thread(run.ledger.members.engines):
        state = known.get(row.url)
        written: tuple[MemberState, str, int] = (row.state, row.why, row.version)
        if state is None or (written == _JOINED and state.noted not in (None, _JOINED)):
            if row.state != "gone":
                engines.add(row.url, row.name).noted = written
        elif row.state == "gone" and state.noted is not None and state.noted[0] != "gone":
            if row.leaving and state.serves:  # it has left between two looks
                engines.drain(state, row.leaving)
            engines.lose(state, row.why or "it has left")
            state.noted, state.leaving, state.health = written, row.leaving, None  # its last report says nothing now
        elif state.noted is not None:  # else the row is of an earlier attempt
            state.leaving = row.leaving


async def _write_members(run: Run) -> None:
    """Writes what has changed in the engines' states into the ledger, from which players read it."""
    engines = run.engines
    for state in engines.states:
        if state.noted is None:
            await asyncio.to_thread(run.ledger.members.join, state.url, state.name)
    changed = [state for state in engines.states if state.noted != state.member]
    for state in changed:
        state.noted = state.member
    if changed:
        await asyncio.to_thread(run.ledger.members.set, [(state.url, *state.member) for state in changed])
    for state in list(engines.states):
        if engines.elastic and state.state == "gone" and _silent(state) > FORGET_SECONDS:
            engines.forget(state)


def _check_digest(run: Run, url: str, health: dict[str, Any]) -> None:
    record, version = run.record, int(health["version"])
    if version not in record.digests and (manifest := read_manifest(run.weights, version)) is not None:
        record.digests[version] = manifest.live
    record.pauses[version] = max(record.pauses.get(version, 0.0), float(health["last_pause_ms"]))
    digest = record.digests.get(version)
    if digest is None:
        return
    if health["digest"] != digest:
        raise RunFailed(
            f"{url} serves other tensors than version {version} has (digest {health['digest']}, published "
            f"{digest}); admission stopped"
        )
    record.checked += 1
    run.engines.probes.served(url, version)


async def _ask(run: Run) -> None:
    """Requests engines' reports, waits up to `_PATIENCE` for them, and decides which engines serve."""
    engines, now = run.engines, time.monotonic()
    new, every = list[asyncio.Task[None]](), ASK_SECONDS * len(engines.states)
    idle = [state for state in engines.states if state.asking is None or state.asking.done()]
    due = sorted((state for state in idle if now - state.looked >= every), key=lambda state: state.looked)
    for state in due[:REPORTS_AT_ONCE]:
        state.asking = asyncio.create_task(_health(run, state))
        if state.unanswered is None:  # one that was silent before delays nothing
            new.append(state.asking)
        state.looked, state.unanswered = now, state.unanswered or now
    if new:
        await asyncio.wait(new, timeout=_PATIENCE)
    if any(state.serves and _leaves(state) for state in engines.states):
        engines.looked = -math.inf  # its member has read in the ledger why it leaves, before this process has
        await _read_members(run)
    limit, newest = swap_seconds(run.config), max((state.version for state in engines.serving), default=-1)
    for state in engines.states:
        if why := _fault(state):
            if state.state != "gone" and not engines.lose(state, why):
                raise RunFailed(f"the engine at {state.url} is lost: {why}; continue with --resume {run.folder}")
        elif state.health is None:
            continue
        elif why := state.leaving or _leaves(state) or _lags(run, state, newest, limit):
            if state.serves:
                engines.drain(state, why)
            elif state.state == "joining":
                state.why = why
        elif not state.serves and state.version >= run.progress.served:
            engines.serve(state)
    _check_served(run, limit)


def _check_served(run: Run, swap: float) -> None:
    """Raises RunFailed if no engine has served for as long as a new one may take to start and to fetch its weights."""
    engines, now = run.engines, time.monotonic()
    engines.unserved = None if engines.serving else engines.unserved or now
    if engines.unserved is None:
        return
    limit = swap + start_seconds(run.config.inference, run.config.model.path)
    if now - engines.unserved > limit:
        raise RunFailed(f"no engine has served for {limit:.0f} s{_absence(run)}; continue with --resume {run.folder}")


def _absence(run: Run) -> str:
    """The reason why no engine serves, as the end of a sentence; "" if none is known."""
    states = (f"{state.url}: {state.why}" for state in reversed(run.engines.states) if state.why)
    why = run.fleet.trouble or next(states, "")
    return f": {why}" if why else ""


def _leaves(state: EngineState) -> str:
    return "it is about to end" if state.health is not None and state.health["status"] == "draining" else ""


def _lags(run: Run, state: EngineState, newest: int, swap: float) -> str:
    """Why an engine lags: another one, of version `newest`, is more than the staleness bound ahead of it, or has been
    ahead for longer than the seconds that a swap may take."""
    if state.version >= newest:
        state.behind = None
        return ""
    state.behind = state.behind or time.monotonic()
    late = time.monotonic() - state.behind > swap
    if late or (state.version >= 0 and newest - state.version > max(1, run.config.rollout.staleness)):
        return f"it serves version {state.version}, others version {newest}"
    return ""


def _silent(state: EngineState) -> float:
    """Seconds since the engine was asked for the report that it has not given yet."""
    return time.monotonic() - state.unanswered if state.unanswered else 0.0


def _fault(state: EngineState) -> str:
    if state.child is not None and state.child.exit_code is not None:
        return f"{state.child.end()}; see {state.child.log}"
    if state.refusal:
        return state.refusal
    if (silent := _silent(state)) > SILENT_SECONDS:
        return f"has not answered for {silent:.0f} s ({state.trouble or 'no answer yet'})"
    if state.health is not None and state.health["status"] == "failed":
        return f"failed: {state.health['error']}"
    if state.fallen:
        return "has gone back to older weights: it was started anew"
    if state.refused >= REFUSED:
        return f"does not take the newest version: {state.trouble}"
    return ""


async def _health(run: Run, state: EngineState) -> None:
    client = run.engines.client
    try:
        if not state.checked:
            async with asyncio.timeout(CHECK_SECONDS):
                await client.check(state.url)
            state.checked = True
        health = await client.health(state.url)
        before, state.health, state.unanswered = state.version, health, None
        state.fallen = (state.fallen or state.version < before) and state.version < run.progress.served
    except (EngineError, TimeoutError) as e:
        state.trouble = str(e) or "no answer"
    except UserError as e:
        state.refusal = str(e)


async def _bring(run: Run) -> None:
    """Starts the update of every engine that is behind the newest version, a task each."""
    for state in run.engines.states:
        if state.bringing is not None and state.bringing.done():
            task, state.bringing = state.bringing, None
            try:
                task.result()
            except UserError as e:
                if not any(other is not state for other in run.engines.serving):
                    raise
                state.refusal = str(e)  # of one that has joined; the others play on
    waiting = [state for state in run.engines.states if state.bringing is None and state.health is not None]
    if not waiting:
        return
    least = min(state.version for state in waiting)
    newest = max(await asyncio.to_thread(lambda: list(published_versions(run.weights, after=least))), default=least)
    for state in waiting:
        if state.version < newest:
            state.bringing = asyncio.create_task(_bring_one(run, state, newest))


async def _bring_one(run: Run, state: EngineState, version: int) -> None:
    try:
        await run.engines.client.bring(state.url, version)
        state.refused = 0
    except EngineError as e:
        state.trouble, state.refused = str(e), state.refused + 1
        print(f"{state.url} is not brought to version {version} yet: {e}", file=sys.stderr)
        await asyncio.sleep(1.0)


def swap_seconds(config: RLConfig) -> float:
    """The deadline of a version's arrival at all engines."""
    by_size = SWAP_SECONDS[config.inference.engine] + SWAP_SECONDS_A_GB * size_of(Path(config.model.path)) / 1e9
    return config.weights.seconds or by_size


async def wait_for_version(run: Run, version: int, *, seconds: float | None = None) -> None:
    """Waits until every serving engine has at least `version`, digest proven. Raises RunFailed after `seconds`, by
    default `swap_seconds`."""
    seconds = seconds or swap_seconds(run.config)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check_processes(run)
        await observe_versions(run)
        serving = run.engines.serving
        if serving and all(state.version >= version for state in serving):
            return
        await asyncio.sleep(0.1)
    if not run.engines.serving:
        raise RunFailed(f"no engine serves after {seconds:.0f} s{_absence(run)}; continue with --resume {run.folder}")
    raise RunFailed(
        f"the engines did not reach version {version} within {seconds:.0f} seconds; raise weights.seconds, and "
        f"continue with --resume {run.folder}"
    )


async def check_engines(run: Run) -> None:
    """Raises UserError for a server that the run cannot use, or that refuses documents of this model."""

    async def check(state: EngineState) -> None:
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await run.engines.client.check(state.url)
                health = await run.engines.client.health(state.url) if run.config.rollout.documents else {}
        except (EngineError, TimeoutError, UserError) as e:
            if state.child is not None and await asyncio.to_thread(state.child.ends, DYING_SECONDS):
                raise UserError(f"{state.child.end()}; see {state.child.log}") from None
            if isinstance(e, UserError):
                raise
            raise UserError(f"{state.url} cannot be used: {e or 'it does not answer'}") from None
        if refusal := health.get("documents", {}).get("refusal"):
            raise UserError(f"{refusal}: set rollout.documents to false")

    await asyncio.gather(*map(check, run.engines.states))
