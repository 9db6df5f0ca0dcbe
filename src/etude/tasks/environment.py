"""Finds the packages that the tests of a Python repository need: the declared dependencies, and more if the suite lacks
some.

The suite runs once with the declared requirements. As long as tests fail for want of a module or fixture, the next
source is added: test extras and groups, requirements files, the packages that CI installs. The best run counts. Code
runs in boxes.
"""

import os
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

from etude.code import (
    NotInstallable,
    clone_around,
    declared_requirements,
    functions,
    project_name,
    read_pyproject,
    toml_table,
)
from etude.errors import UserError
from etude.sandbox.egress import normal_project
from etude.tasks import requirements, settings
from etude.tasks.coverage import SuiteTrace, last_lines
from etude.tasks.inventory import Inventory
from etude.tasks.settings import PytestSettings

TRIES = 5
_VERSION_FILES = (  # keys below [tool] that name a file with the version
    ("hatch", "build", "hooks", "vcs", "version-file"),
    ("setuptools_scm", "version_file"),
    ("setuptools_scm", "write_to"),
    ("pdm", "version", "write_to"),
    ("setuptools-git-versioning", "version_file"),
)
UNKNOWN = "0+unknown"  # the version of a clone without tags
Install = Callable[[Sequence[str], Path], None]  # requirements into a folder; raises UserError
Run = Callable[[Path], Awaitable[SuiteTrace]]  # the suite, with the packages of a folder


@dataclass(frozen=True)
class PythonEnvironment:
    """Installed requirements, the run of the suite with them, and the reason why further ones were not installed."""

    requirements: tuple[str, ...]
    trace: SuiteTrace
    refused: str = ""


async def find(tree: Path, work: Path, more: Sequence[str], install: Install, run: Run) -> PythonEnvironment:
    """Install into `work`/site the requirements with which most tests of the repository in `tree` pass, without those
    that cannot be installed. `more` are requirements from the user. Raises UserError if one of these, or nothing, can
    be installed."""
    tried: list[PythonEnvironment] = []
    for wanted in _proposals(tree, more, tried):
        site = work / f"site-{len(tried)}"
        try:
            installed, refused = install_most(wanted, more, install, site)
        except UserError as e:
            shutil.rmtree(site, ignore_errors=True)
            if not tried:
                raise
            tried.append(PythonEnvironment(wanted, SuiteTrace({}, 0, {}, {}, ""), str(e)))
            continue
        tried.append(PythonEnvironment(installed, await run(site), refused))
        if len(tried) == TRIES or not any(tried[-1].trace.missing):
            break

    def worth(i: int) -> tuple[bool, int, int]:
        """Of equal tries the first one, and where no test passes the last, whose message says more."""
        passed = tried[i].trace.passed
        return (work / f"site-{i}").is_dir(), passed, -i if passed else i

    best = max(range(len(tried)), key=worth)
    (work / f"site-{best}").rename(work / "site")
    for i in range(len(tried)):
        shutil.rmtree(work / f"site-{i}", ignore_errors=True)
    return replace(tried[best], refused=next((one.refused for one in tried if one.refused), ""))


def install_most(
    wanted: Sequence[str], more: Sequence[str], install: Install, site: Path
) -> tuple[tuple[str, ...], str]:
    """Install the requirements into the folder `site`, without those that cannot be installed. Returns the installed
    ones, and why the others are not. Raises UserError if nothing can be installed now, or for one of `more`, the user's
    own."""
    left, reasons = list(wanted), dict[str, None]()
    while True:
        try:
            install(left, site)
            return tuple(left), " ".join(reasons)
        except NotInstallable as e:
            shutil.rmtree(site, ignore_errors=True)
            # A package that others need has no line here: those that need it are found by themselves.
            own = [line for line in left if _bare(line) == _bare(e.requirement)]
            lines = own or [line for line in left if _refused(line, install, site)]
            if not lines or set(lines) & set(more):
                raise
            left = [line for line in left if line not in lines]
            reasons |= dict.fromkeys([str(e) if own else f"{', '.join(lines)}: {e}"])


def _bare(requirement: str) -> str:
    """A requirement as pip names it: without extras, markers and blanks."""
    name = re.match(r"[\w.-]+", requirement)
    rest = re.sub(r"\[.*?\]|;.*|\s", "", requirement[name.end() :]) if name else ""
    return f"{normal_project(name[0])}{rest}" if name else requirement


def _refused(line: str, install: Install, site: Path) -> bool:
    """Whether a requirement cannot be installed by itself."""
    try:
        install([line], site)
    except NotInstallable:
        return True
    finally:
        shutil.rmtree(site, ignore_errors=True)
    return False


def _proposals(tree: Path, more: Sequence[str], tried: Sequence[PythonEnvironment]):
    """The requirements of one try after the other; the last try adds packages that are known to bring missing modules
    and fixtures."""
    wanted = dict.fromkeys([*declared_requirements(tree), *more])
    yield tuple(wanted)
    sources = requirements.sources(tree)
    next(sources)  # the declared ones
    for source in sources:
        longer = wanted | dict.fromkeys(source)
        if len(longer) > len(wanted) and len(tried) < TRIES - 1:
            wanted = longer
            yield tuple(wanted)
    ran = [one for one in tried if one.trace.printed or one.trace.passed]
    missing = (name for pair in ran[-1].trace.missing for name in pair)
    known = [requirements.MISSING[name] for name in missing if name in requirements.MISSING]
    if set(known) - set(ran[-1].requirements):
        yield tuple(dict.fromkeys([*ran[-1].requirements, *known]))


def finish(site: Path, tree: Path, name: str, version: str, pytest: PytestSettings) -> None:
    """Write into `site` the metadata that installing the repository itself would leave, and the settings of test runs.
    A release of the repository that a requirement brought is removed: the tests are those of the tree."""
    for release in list(distributions(path=[str(site)])):
        if normal_project(release.name) == normal_project(name):
            files = [Path(str(release.locate_file(file))).resolve() for file in release.files or ()]
            files = [file for file in files if file.is_relative_to(site.resolve())]
            for file in files:
                file.unlink(missing_ok=True)
            for folder in sorted({file.parent for file in files} - {site.resolve()}, reverse=True):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
    plain = re.sub(r"[-_.]+", "_", name)
    if not any(path.name.lower().startswith(f"{plain.lower()}-") for path in site.glob("*.dist-info")):
        info = site / f"{plain}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
        points = toml_table(read_pyproject(tree), "project", "entry-points")
        lines = [
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in toml_table(points, group).items())
            for group in points
        ]
        if lines:
            (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
    settings.write(pytest, site)


def version_of(repository: Path) -> str:
    """The version of a repository: declared, from its PKG-INFO, from the last tag, or UNKNOWN."""
    if match := re.search(r"-(\d[\w.+!]*)$", project_name(repository)):
        return match[1]
    clone = clone_around(repository)
    described = clone.output("describe", "--tags", "--abbrev=0") if clone is not None else None
    tag = (described or b"").decode("utf-8", "replace").strip()
    numbers = re.search(r"\d+(\.\d+)*([a-z]+\d+)?$", tag)
    return numbers[0] if numbers else UNKNOWN


def version_files(repository: Path, inventory: Inventory, version: str) -> dict[str, str]:
    """Files that the project's build would write into the tree (path -> text): those of hatch-vcs, setuptools-scm and
    PDM."""
    data = read_pyproject(repository)
    parts = tuple(int(part) if part.isdigit() else part for part in re.split(r"[.+]", version))
    text = (
        f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = {parts!r}\n"
        "__commit_id__ = commit_id = None\n"
    )
    files: dict[str, str] = {}
    for *keys, last in _VERSION_FILES:
        path = toml_table(data, "tool", *keys).get(last)
        if keys[0] == "pdm" and isinstance(path, str) and not (repository / path).parent.is_dir():
            path = f"src/{path}"  # PDM's is relative to the package folder
        if not isinstance(path, str) or ".." in Path(path).parts or path.startswith("/"):
            continue
        if path not in inventory.files and (repository / path).parent.is_dir():
            files[path] = text if path.endswith(".py") else f"{version}\n"
    return files


def explained(repository: Path, trace: SuiteTrace, refused: str) -> UserError:
    """The error for a suite in which no test passes: pytest's message, and a remedy."""
    modules, fixtures = trace.missing
    lacking = [requirements.MISSING.get(name, name.replace("_", "-")) for name in (*modules, *fixtures)]
    own = {name: place for name in modules if (place := _place_of(repository, name)) is not None}
    lacking = [name for name in lacking if name.replace("-", "_") not in own]
    named = [
        name for name in lacking if name in requirements.MISSING.values() or requirements.declares(repository, name)
    ]
    others = requirements.addressed(repository)
    if {*named} & {*others}:  # the import of the first hides the others
        named = list(dict.fromkeys([*named, *others]))
    links = [place for place in own.values() if (repository / place).is_symlink()]
    message = last_lines(next(iter([*trace.broken.values(), *trace.failed.values()]), trace.printed))
    if links:
        advice = f"{links[0]} is a link that leads to no file of the repository: put a copy in its place"
    elif named:
        advice = f"name the missing packages: add `--requires {' '.join(named[:5])}` to the command"
    elif lacking:  # a package of that name may be anybody's
        advice = (
            f"find out which package brings {lacking[0]}, which no file of the repository declares, and add "
            "`--requires PACKAGE` to the command"
        )
    else:
        advice = "run its suite by hand (`python -m pytest`) and mend it, or leave test files out with `--exclude FILE`"
    why = f" {refused[0].upper()}{refused[1:]}" if refused else ""
    return UserError(f"no test of {repository} passes under pytest, which said: {message}.{why} To go on, {advice}.")


def _place_of(repository: Path, module: str) -> str | None:
    """The place of a module or package of this name in the repository itself, links included."""
    for folder, folders, files in os.walk(repository):
        folders[:] = sorted(name for name in folders if not functions.is_junk(name))
        for name in (f"{module}.py", module):
            if name in files or name in folders:
                return (Path(folder) / name).relative_to(repository).as_posix()
    return None
