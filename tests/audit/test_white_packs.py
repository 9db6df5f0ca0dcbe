"""Attack packs by authors who had read the grader: nothing earns a reward.

`packs/README.md` says how they came to be. Every third program runs with the slow tests, all of them for a release.
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
OPTIONS = BuildConfig(seed=36, max_tasks=14, kinds=("mutation", "removal"), per_function=1, heldout_fraction=0.5)


@pytest.fixture(scope="module", params=["white-javascript", "white-python"])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> packs.AttackPack:
    if request.param == "white-javascript":
        pytest.importorskip("tree_sitter_javascript")
        if shutil.which("node") is None:
            pytest.skip("needs Node.js")
    folder = tmp_path_factory.mktemp("packs") / request.param
    shutil.copytree(PACKS / request.param, folder, ignore=shutil.ignore_patterns("library"))
    build_dataset(PACKS / request.param / "library", folder / "dataset", OPTIONS, lambda *_: None)
    return packs.load_pack(folder)


@pytest.mark.slow
def test_a_third_of_the_programs_earns_nothing(pack: packs.AttackPack) -> None:
    report = asyncio.run(packs.play_pack(replace(pack, tasks=pack.tasks[:2], programs=pack.programs[::3])))
    assert report.passed, packs.pack_table([report])


@pytest.mark.slow
@pytest.mark.release
def test_no_program_earns_anything(pack: packs.AttackPack) -> None:
    report = asyncio.run(packs.play_pack(pack))
    assert report.passed, packs.pack_table([report])
