"""Attack packs by authors who had not read the grader, on a library each: nothing earns a reward.

`packs/README.md` says how they came to be. Every fourth program runs with the slow tests, all of them for a release.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from etude.audit.attacks import packs
from etude.config import BuildConfig
from etude.tasks.build import build_dataset

PACKS = Path(__file__).parent / "packs"
LIBRARIES = {
    "python": Path(__file__).parents[1] / "tasks/repositories/tiny-1.0",
    "javascript": PACKS / "javascript/library",
    "third-python": Path(__file__).parents[1] / "tasks/repositories/tiny-1.0",
    "third-javascript": PACKS / "javascript/library",
    "fourth-python": Path(__file__).parents[1] / "tasks/repositories/tiny-1.0",
    "fourth-javascript": PACKS / "javascript/library",
}
OPTIONS = BuildConfig(seed=1, max_tasks=6, kinds=("mutation", "removal"), per_function=1, heldout_fraction=0.5)


@pytest.fixture(scope="module", params=sorted(LIBRARIES))
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> packs.AttackPack:
    if request.param.endswith("javascript"):
        pytest.importorskip("tree_sitter_javascript")
        if shutil.which("node") is None:
            pytest.skip("needs Node.js")
    folder = tmp_path_factory.mktemp("packs") / request.param
    shutil.copytree(PACKS / request.param, folder, ignore=shutil.ignore_patterns("library"))
    large = request.param.startswith(("third", "fourth"))
    options = OPTIONS.model_copy(update={"max_tasks": 2}) if large else OPTIONS
    build_dataset(LIBRARIES[request.param], folder / "dataset", options, lambda *_: None)
    loaded = packs.load_pack(folder)
    # A program that looks for the right program earns what it finds.
    return replace(loaded, programs=tuple(each for each in loaded.programs if each.kind != "honest search"))


@pytest.mark.slow
def test_a_quarter_of_the_programs_earns_nothing(pack: packs.AttackPack) -> None:
    report = asyncio.run(packs.play_pack(replace(pack, tasks=pack.tasks[:1], programs=pack.programs[::4])))
    assert report.passed, packs.pack_table([report])


@pytest.mark.slow
@pytest.mark.release
def test_no_program_earns_anything(pack: packs.AttackPack) -> None:
    report = asyncio.run(packs.play_pack(pack))
    assert report.passed, packs.pack_table([report])
