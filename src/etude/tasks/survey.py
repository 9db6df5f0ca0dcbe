"""Reads the facts of a repository that need none of its code to run: its files, code, tests, and pytest's settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from etude.code import functions as discover
from etude.code.functions import Unit
from etude.errors import UserError
from etude.tasks import environment, inventory, javascript, settings
from etude.tasks.inventory import Inventory
from etude.tasks.settings import PytestSettings


@dataclass(frozen=True)
class Survey:
    """The facts about a repository that are read without running its code: its files, the places of code and tests, the
    settings of pytest, the version, and the files that its build would write (path -> text)."""

    inventory: Inventory
    layout: discover.RepositoryLayout
    script: bool  # JavaScript or TypeScript
    pytest: PytestSettings
    version: str
    generated: Mapping[str, str]


def survey_repository(repo: Path, exclude: Sequence[str]) -> Survey:
    """Survey a repository. Raises UserError for a folder without code or without tests."""
    taken = inventory.take(repo, exclude)
    version = environment.version_of(repo)
    if javascript.is_repository(repo):
        layout = javascript.layout(repo, taken.files)
        layout = replace(layout, modules=tuple(javascript.test_modules(repo, layout.tests)))
        return Survey(taken, layout, True, PytestSettings(), version, {})
    generated = environment.version_files(repo, taken, version)
    pytest = settings.read(repo)
    layout = discover.layout(repo, (*taken.files, *generated), pytest.is_module, pytest.pythonpath)
    if not layout.modules and not pytest.python_files:
        pytest = replace(pytest, python_files=settings.UNITTEST_FILES)
        layout = discover.layout(repo, (*taken.files, *generated), pytest.is_module, pytest.pythonpath)
    if not layout.modules:
        where = f" in {', '.join(pytest.testpaths)} ({pytest.source})" if pytest.testpaths else ""
        above = repo.resolve().parent
        rooted = any((above / name).is_file() for name in ("pyproject.toml", "setup.py", "setup.cfg"))
        cure = f"go to the project's folder, {above}" if rooted else "add tests"
        raise UserError(f"{repo} has no test modules (test_*.py){where}, and doctests alone could be edited; {cure}.")
    return Survey(taken, layout, False, pytest, version, generated)


def read_functions(repo: Path, facts: Survey) -> tuple[dict[str, str], list[Unit]]:
    """The texts of the sources by path, and their functions. Raises UserError for a file that does not parse."""
    paths = sorted({*facts.layout.sources}.difference(facts.generated, facts.inventory.encoded))
    if facts.script:
        sources = {path: (repo / path).read_bytes().decode() for path in paths}
    else:
        sources = {path: discover.read_source(repo, path) for path in paths}
    parse = javascript.functions if facts.script else discover.functions
    return sources, [f for path, text in sources.items() for f in parse(path, text)]
