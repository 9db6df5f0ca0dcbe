"""Paths over random chains, against trying every path there is."""

import random
from itertools import pairwise

import pytest

from etude.records import Anchor, PayloadPart, PolicyVersion, Skip
from etude.weights.payloads import NoPath, plan


def parts(kind: str, version: int, nbytes: int) -> tuple[PayloadPart, ...]:
    return (PayloadPart(key=f"{kind}-{version}-{nbytes}", bytes=nbytes, digest="", first=0, stop=1),)


def manifest(version: int, delta: int | None, anchor: tuple[int, int], skips: dict[int, int] | None = None):
    """Sizes in bytes: of the delta (None: there is none), of the anchor (version, bytes), of skips by their base."""
    return PolicyVersion(
        run="r",
        writer="w",
        version=version,
        parent=None if delta is None else version - 1,
        delta=() if delta is None else parts("delta", version, delta),
        skips=tuple(Skip(base=b, parts=parts(f"skip-{b}", version, size)) for b, size in (skips or {}).items()),
        anchor=Anchor(version=anchor[0], parts=parts("anchor", *anchor)),
        schema="s",
        digest=f"{version:016x}",
        changed=0,
        elements=1,
        groups=(),
        created=0.0,
        metrics={},
    )


def chain(generator: random.Random, length: int) -> dict[int, PolicyVersion]:
    made, anchor = {}, (0, 0)
    for version in range(length):
        begins = version == 0 or generator.random() < 0.05
        if begins:
            anchor = (version, generator.randint(5, 60))
        elif generator.random() < 0.2 and anchor[0] < version - 1:
            anchor = (generator.randrange(anchor[0] + 1, version), generator.randint(5, 60))
        bases = [b for b in (version - 3, version - 8) if b >= 0 and generator.random() < 0.5]
        skips = {b: generator.randint(1, 30) for b in bases}
        made[version] = manifest(version, None if begins else generator.randint(0, 20), anchor, skips)
    return made


def costs(manifests: dict[int, PolicyVersion], start: int, target: int) -> dict[int, int]:
    """Bytes from `start` to every version that deltas and skips reach; one pass, since they all lead upward."""
    cost = {start: 0}
    for m in manifests.values():
        edges = [] if m.parent is None else [(m.parent, m.delta)]
        for base, objects in edges + [(s.base, s.parts) for s in m.skips]:
            if base in cost and m.version <= target:
                cost[m.version] = min(cost.get(m.version, 10**9), cost[base] + sum(p.bytes for p in objects))
    return cost


def bounds(manifests: dict[int, PolicyVersion], held: int | None, target: int) -> tuple[int, int]:
    """The least bytes over all paths, and over those on which the manifest of a version names the anchor."""
    never = 10**9
    least = most = never if held is None else costs(manifests, held, target).get(target, never)
    for m in manifests.values():
        if m.version <= target and m.anchor.version <= target:
            size = sum(p.bytes for p in m.anchor.parts)
            there = costs(manifests, m.anchor.version, target)
            least = min(least, size + there.get(target, never))
            on = there.get(m.version, never) + costs(manifests, m.version, target).get(target, never)
            most = min(most, size + on)
    return least, most


@pytest.mark.parametrize("seed", range(40))
def test_the_path_is_whole_and_no_other_is_cheaper(seed):
    generator = random.Random(seed)
    manifests = chain(generator, 30)
    for gone in generator.sample(sorted(manifests), seed % 4):
        del manifests[gone]
    for target in manifests:
        held = generator.choice([None, *range(target + 1)])
        least, most = bounds(manifests, held, target)
        if most >= 10**9:
            with pytest.raises(NoPath):
                plan(manifests.get, held, target)
            continue
        path = plan(manifests.get, held, target)
        assert least <= sum(payload.bytes for payload in path) <= most
        assert all(a.version == b.base for a, b in pairwise(path))
        if path:
            assert path[-1].version == target
            assert path[0].base in (held, None)
        else:
            assert held == target


def test_what_cannot_be_had_is_gone_around_and_named_when_nothing_is_left():
    manifests = {v: manifest(v, None if v == 0 else 10, (0, 100), {0: 25} if v == 4 else {}) for v in range(5)}
    assert [p.kind for p in plan(manifests.get, 0, 4)] == ["skip"]
    assert [p.kind for p in plan(manifests.get, 2, 4)] == ["delta", "delta"]
    skip = manifests[4].skips[0].parts[0].key
    assert [p.version for p in plan(manifests.get, 0, 4, {skip})] == [1, 2, 3, 4]
    assert [p.kind for p in plan(manifests.get, 2, 4, {manifests[3].delta[0].key})] == ["anchor", "skip"]
    with pytest.raises(NoPath, match="to version 3: the delta of version 2 is missing or damaged"):
        plan(manifests.get, 1, 3, {manifests[2].delta[0].key})
    with pytest.raises(NoPath, match="to version 3: the manifest of version 2 is gone"):
        plan({k: v for k, v in manifests.items() if k != 2}.get, 1, 3)
    with pytest.raises(NoPath, match="the manifest of version 9 is gone"):
        plan(manifests.get, None, 9)


def test_manifests_are_read_only_as_far_as_they_can_matter():
    manifests = {v: manifest(v, None if v == 0 else 10, (v // 50 * 50, 100)) for v in range(1000)}
    seen = []
    path = plan(lambda v: seen.append(v) or manifests[v], 3, 999)
    assert path[0].kind == "anchor"
    assert len(path) == 50
    assert len(seen) < 70
