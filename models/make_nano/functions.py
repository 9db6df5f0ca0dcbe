"""The functions that nano is made of: those of the running standard library and of pinned, permissive packages."""

from __future__ import annotations

import platform
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.corpus import FunctionText, package_functions
from etude.corpus.dedup import contamination, exact, near
from etude.corpus.sources import PackageSource, fetch_source, files
from etude.errors import UserError


@dataclass(frozen=True)
class Functions:
    """Functions to train on and functions to evaluate on, with a report of the functions that were kept or dropped
    (JSON-ready)."""

    train: tuple[FunctionText, ...]
    evaluation: tuple[FunctionText, ...]
    report: dict[str, object]


def collect_functions(
    packages: Sequence[str],
    held_out: Sequence[str],
    evaluation: Sequence[str],
    cache: Path,
    *,
    per_package: int,
    seed: int,
) -> Functions:
    """Fetch, filter and deduplicate the functions, and drop those that overlap the held-out and evaluation packages.
    Packages are unpacked below `cache`. Raises UserError when a package is both trained on and held
    out."""
    name = {requirement.split("==")[0].lower().replace("-", "_") for requirement in packages}
    clash = name & {requirement.split("==")[0].lower().replace("-", "_") for requirement in [*held_out, *evaluation]}
    if clash:
        raise UserError(f"{', '.join(sorted(clash))} is both trained on and held out")
    sources = [standard_library(), *(fetch_source(requirement, cache) for requirement in packages)]
    rng = random.Random(seed)
    extracted: list[FunctionText] = []
    counts: dict[str, int] = {}
    for source in sources:
        every = exact(package_functions(source), lambda f: f.source)
        rng.shuffle(every)
        counts[source.name] = min(len(every), per_package)
        extracted += every[:per_package]
    unique = near(exact(extracted, lambda f: f.source), lambda f: f.source)
    tested: list[FunctionText] = []
    excluded: dict[str, dict[str, float]] = {}
    flagged: set[int] = set()
    for requirement in dict.fromkeys([*held_out, *evaluation]):
        source = fetch_source(requirement, cache)
        result = contamination((f.source for f in unique), (file.text for file in files(source)))
        flagged |= set(result.flagged)
        excluded[requirement] = {
            "overlapping": result.overlapping,
            "worst": result.worst,
            "dropped": len(result.flagged),
        }
        if requirement in evaluation:
            tested += exact(package_functions(source), lambda f: f.source)
    kept = [function for index, function in enumerate(unique) if index not in flagged]
    for requirement in excluded:
        source = fetch_source(requirement, cache)
        after = contamination((f.source for f in kept), (file.text for file in files(source)))
        excluded[requirement] |= {"worst_after": after.worst, "overlapping_after": after.overlapping}
    report: dict[str, object] = {
        "functions": {"extracted": len(extracted), "unique": len(unique), "kept": len(kept), "evaluation": len(tested)},
        "per_source": counts,
        "held_out": excluded,
        "sources": [{"name": s.name, "version": s.version, "licence": s.licence} for s in sources],
    }
    return Functions(tuple(kept), tuple(tested), report)


def standard_library() -> PackageSource:
    """The standard library of the running interpreter (PSF licence)."""
    return PackageSource("python", platform.python_version(), "PSF-2.0", Path(sysconfig.get_paths()["stdlib"]))
