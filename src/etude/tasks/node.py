"""The environment of a JavaScript repository: packages by npm without scripts, and which tests call which function."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.environments import scripts
from etude.environments.base import Image
from etude.environments.namespace import NamespaceSandbox, open_sandbox
from etude.errors import UserError
from etude.tasks import discover, fetch
from etude.tasks.bootstrap import SHARE, Goal, Recipe
from etude.tasks.discover import Layout
from etude.tasks.javascript import JsFunction

NPM_SECONDS = 300.0
LINK = ("node_modules", "/site/node_modules")  # in the repository: where Node looks for packages, and where they are
_FRAMEWORKS = ("mocha", "tape")


def is_link(path: Path) -> bool:
    """Whether it is the one link that a repository of a dataset may hold."""
    return path.name == LINK[0] and path.is_symlink() and str(path.readlink()) == LINK[1]


async def prepare(
    repository: Path, layout: Layout, work: Path, functions: Sequence[JsFunction]
) -> tuple[Recipe, dict[str, set[str]]]:
    """(how it was installed into `work`/site, function id -> tests that call it).

    Two tries: with the development packages that the tests import, then with all of them. Raises UserError with the
    reason if fewer than SHARE of the tests pass.
    """
    whole = work / "whole"
    discover.copy(repository, whole, layout.files)
    (whole / LINK[0]).symlink_to(LINK[1])
    modules = [path for path in layout.tests if scripts.is_test_file(path)]
    reason = "it has no test files"
    for number, wanted in enumerate(_proposals(repository, layout)):
        site = work / f"site-{number}"
        try:
            _install(wanted, site)
        except UserError as e:
            reason = str(e).rstrip(".")
            shutil.rmtree(site)
            continue
        async with open_sandbox(workers=1, memo=0) as sandbox:
            passed, ran, callers = await _trace(sandbox, Image(whole, site, {}), modules, functions)
        if ran and passed >= SHARE * ran:
            site.rename(work / "site")
            goal = Goal(
                f"{len(modules)} test files under {', '.join(sorted(_used_frameworks(whole, modules)))}", share=SHARE
            )
            return Recipe(tuple(f"{name}@{version}" for name, version in wanted.items()), (goal,), number + 1), callers
        reason = f"{passed} of {ran} tests pass"
        shutil.rmtree(site)
    raise UserError(f"{repository} is left out: {reason}; node:test, mocha and tape are understood.")


def _used_frameworks(whole: Path, modules: Sequence[str]) -> set[str]:
    return {scripts.framework((whole / path).read_text("utf-8", "replace")) for path in modules}


def _proposals(repository: Path, layout: Layout) -> Iterator[dict[str, str]]:
    package: dict[str, Any] = json.loads((repository / "package.json").read_text("utf-8"))
    needed = {**package.get("dependencies", {}), **package.get("peerDependencies", {})}
    development: dict[str, str] = package.get("devDependencies", {})
    text = "\n".join(
        (repository / path).read_text("utf-8", "replace") for path in layout.tests if path.endswith(scripts.SUFFIXES)
    )
    imported = set(re.findall(r"(?:require\(|from\s+|import\s+|import\()\s*['\"]((?:@[\w.-]+/)?[\w.-]+)", text))
    used = {name: version for name, version in development.items() if name in imported or name in _FRAMEWORKS}
    yield needed | used
    if set(development) - set(used):
        yield needed | development


def _install(wanted: Mapping[str, str], site: Path) -> None:
    """Packages of the registry below `site`/node_modules; their scripts do not run."""
    (site / "node_modules").mkdir(parents=True)
    plain = {name: version for name, version in wanted.items() if not re.search(r"[:/]", version)}
    (site / "package.json").write_text(json.dumps({"private": True, "dependencies": plain}))
    if not plain:
        return
    fetch.npm(["install", "--ignore-scripts", "--omit=optional", "--legacy-peer-deps"], site, NPM_SECONDS)
    shutil.rmtree(site / "node_modules/.bin", ignore_errors=True)  # links; nothing in a box calls them


async def _trace(
    sandbox: NamespaceSandbox, image: Image, modules: Sequence[str], functions: Sequence[JsFunction]
) -> tuple[int, int, dict[str, set[str]]]:
    """(tests that passed, tests that ran, function id -> tests): V8 counts the calls of each test file."""
    passed = ran = 0
    callers: dict[str, set[str]] = {}
    by_path: dict[str, list[JsFunction]] = {}
    for function in functions:
        by_path.setdefault(function.path, []).append(function)
    for path in modules:
        said, covered = await scripts.listed(sandbox, image, path, coverage=True)
        good = {f"{path}::{name}" for name in single(said.tests) if said.tests[name][0] == "passed"}
        ran += max(1, sum(outcome != "skipped" for outcome, _ in said.tests.values()))
        passed += sum(outcome == "passed" for outcome, _ in said.tests.values())
        for script in covered:
            for function in by_path.get(script["url"].removeprefix("file:///workspace/"), ()):
                if _called(image.repository, function, script["functions"]):
                    callers.setdefault(function.id, set()).update(good)
    return passed, ran, {function: tests for function, tests in callers.items() if tests}


def single(names: Iterable[str]) -> set[str]:
    """Tests that can be shown or hidden by themselves: none that holds others, and none that shares its name."""
    names = set(names)
    parents = {" > ".join(parts[:i]) for name in names for parts in [name.split(" > ")] for i in range(1, len(parts))}
    doubled = {name for name in names if f"{name} #2" in names}
    return {name for name in names if name not in parents | doubled and re.sub(r" #\d+$", "", name) not in doubled}


def _called(repository: Path, function: JsFunction, covered: Sequence[Mapping[str, Any]]) -> bool:
    """Whether V8 counted a call of the function, or of one inside it. Its offsets are UTF-16 units."""
    data = (repository / function.path).read_bytes()
    start, end = (
        len(data[:at].decode("utf-8", "replace").encode("utf-16-le")) // 2 for at in (function.start, function.end)
    )
    outer = (entry["ranges"][0] for entry in covered)
    return any(start <= r["startOffset"] and r["endOffset"] <= end and r["count"] > 0 for r in outer)
