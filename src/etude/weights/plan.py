"""Which payloads bring a holder of one version to another: the fewest bytes over deltas, skips and anchors."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass

from etude.records import PayloadPart, PolicyVersion


class NoPath(ValueError):
    """No whole chain of payloads leads to the version; why, in one clause."""


@dataclass(frozen=True)
class Payload:
    """One edge of a path: objects that bring the content of version `base` (None: any, or none) to `version`."""

    kind: str  # "delta" | "skip" | "anchor"
    base: int | None
    version: int
    parts: tuple[PayloadPart, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def plan(
    read: Callable[[int], PolicyVersion | None],
    held: int | None,
    target: int,
    broken: Collection[str] = (),
) -> list[Payload]:
    """The payloads to apply in this order, from the content of version `held` (None: nothing) to version `target`.

    The sum of their bytes is the least there is, the number of payloads the least among equals; empty if `target` is
    held. Of anchors, those that a manifest on the way names are looked at. `read` gives the manifest of a version, None
    or a ValueError where there is none that can be used: no path goes through that version. Payloads with an object
    whose key is in `broken` are not used. Never a partial chain: raises NoPath. Dijkstra's search from the target
    backward, so manifests are read only as far as they can matter.
    """
    best: dict[int, tuple[int, int, Payload | None]] = {target: (0, 0, None)}
    queue: list[tuple[int, int, int]] = [(0, 0, target)]
    anchors: dict[int, Payload] = {}
    whole: tuple[int, int, int] | None = None  # (bytes, payloads, version) of the cheapest path from an anchor
    done: set[int] = set()
    faults: list[str] = []

    def from_anchor(version: int) -> None:
        nonlocal whole
        if version in anchors and version in best:
            found = (best[version][0] + anchors[version].bytes, best[version][1] + 1, version)
            whole = found if whole is None else min(whole, found)

    while queue:
        spent, count, version = heapq.heappop(queue)
        if version in done:
            continue
        if whole is not None and (spent, count) >= whole[:2]:
            break
        if version == held:
            return _path(best, version)
        done.add(version)
        try:
            manifest = read(version)
        except ValueError as e:
            faults.append(str(e))
            continue
        if manifest is None:
            faults.append(f"the manifest of version {version} is gone")
            continue
        for payload in _payloads(manifest):
            if any(part.key in broken for part in payload.parts):
                faults.append(f"the {payload.kind} of version {payload.version} cannot be had")
            elif payload.base is None:
                if payload.version <= target:
                    anchors[payload.version] = payload
                    from_anchor(payload.version)
            else:
                found = (spent + payload.bytes, count + 1)
                if payload.base not in best or found < best[payload.base][:2]:
                    best[payload.base] = (*found, payload)
                    heapq.heappush(queue, (*found, payload.base))
                    from_anchor(payload.base)
    if whole is None:
        raise NoPath(f"no whole chain leads to version {target}: {faults[0] if faults else 'there is no anchor'}")
    return [anchors[whole[2]], *_path(best, whole[2])]


def _payloads(manifest: PolicyVersion) -> list[Payload]:
    """What a manifest offers; its anchor may be that of an earlier version."""
    found = [Payload("anchor", None, manifest.anchor.version, manifest.anchor.parts)]
    if manifest.parent is not None:
        found.append(Payload("delta", manifest.parent, manifest.version, manifest.delta))
    found += [Payload("skip", skip.base, manifest.version, skip.parts) for skip in manifest.skips]
    return found


def _path(best: dict[int, tuple[int, int, Payload | None]], start: int) -> list[Payload]:
    path: list[Payload] = []
    payload = best[start][2]
    while payload is not None:
        path.append(payload)
        payload = best[payload.version][2]
    return path
