"""Reads the test requirements of a Python repository from its files, source by source, without running any of it."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from etude.code import DEPENDENCY_GROUPS, declared_requirements, dependency_groups, requirement_lines, shown_lines

_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[\w, -]+\])?\s*([<>=!~][^;#]*)?(;.*)?")
# Tools that check, build or publish a project. No test imports them, and every box has pytest.
_TOOLS = frozenset((
    "pytest", "pytest-cov", "coverage", "tox", "nox", "black", "ruff", "flake8", "pylint", "isort", "mypy", "pyright",
    "pre-commit", "twine", "build", "wheel", "setuptools", "pip", "sphinx", "furo", "mkdocs", "codecov", "coveralls",
    "check-manifest", "bandit", "bump2version", "towncrier", "pyroma", "pytest-xdist", "pytest-randomly", "uv", "hatch",
))  # fmt: skip
_FILES = (
    "requirements-test.txt", "requirements-dev.txt", "requirements_test.txt", "requirements_dev.txt",
          "test-requirements.txt", "dev-requirements.txt", "requirements.txt", "requirements/test.txt",
          "requirements/tests.txt", "requirements/testing.txt", "requirements/dev.txt", "tests/requirements.txt",
)  # fmt: skip
_TALK = (".github/workflows/*.yml", ".github/workflows/*.yaml", ".gitlab-ci.yml", ".travis.yml", "appveyor.yml",
         "tox.ini", "Makefile", "README*", "CONTRIBUTING*")  # fmt: skip
_MANIFESTS = (
    "pyproject.toml", "setup.cfg", "setup.py", "noxfile.py", "Pipfile*", "*.lock", "environment*.y*ml", "Dockerfile*",
    "*requirements*", "requirements/*", "*/*requirements*.txt",
)  # fmt: skip
# Names of fixtures and modules that pytest or Python names when a distribution of another name is missing.
MISSING = {
    "mocker": "pytest-mock", "benchmark": "pytest-benchmark", "httpx_mock": "pytest-httpx", "snapshot": "syrupy",
    "requests_mock": "requests-mock", "freezer": "pytest-freezer", "subtests": "pytest-subtests",
    "yaml": "pyyaml", "dateutil": "python-dateutil", "attr": "attrs", "PIL": "pillow", "bs4": "beautifulsoup4",
    "freezegun": "freezegun", "hypothesis": "hypothesis", "pytest_asyncio": "pytest-asyncio",
    "pytest_django": "pytest-django",
    "rest_framework": "djangorestframework", "jwt": "pyjwt", "dotenv": "python-dotenv", "sklearn": "scikit-learn",
    "Crypto": "pycryptodome", "OpenSSL": "pyopenssl", "psycopg2": "psycopg2-binary", "pkg_resources": "setuptools",
}  # fmt: skip


def sources(repository: Path) -> Iterator[list[str]]:
    """Requirements by source: declared, extras and groups for tests, tox and requirements files, packages that CI
    installs."""
    yield usable(declared_requirements(repository))
    listed = dependency_groups(repository)
    named = [name for name in listed if re.search(r"(^|-)(unit)?test(s|ing)?(-|$)", name)]
    named = named or [name for name in DEPENDENCY_GROUPS if name in listed]
    yield usable([line for name in named for line in listed[name]])
    yield usable([line for name in _FILES for line in requirement_lines(repository, name)] + _of_tox(repository))
    yield usable([line for name in DEPENDENCY_GROUPS for line in listed.get(name, ())])
    yield usable(_installed_by_ci(repository))


def declares(repository: Path, name: str) -> bool:
    """Whether a file in which projects name the packages that they need has this name."""
    word = re.sub(r"[-_.]+", "[-_.]+", re.escape(name).replace(r"\-", "-"))
    search = re.compile(rf"(?<![\w.-]){word}(?![\w-])", re.IGNORECASE).search
    paths = sorted({path for pattern in (*_MANIFESTS, *_TALK) for path in repository.glob(pattern) if path.is_file()})
    return any(search(path.read_text("utf-8", "replace")) for path in paths)


def addressed(repository: Path) -> list[str]:
    """The projects that requirements files name by an address, which is not installed: `git+https://.../NAME`."""
    lines = [line for name in _FILES for line in requirement_lines(repository, name)] + _of_tox(repository)
    ends = [re.fullmatch(r"(?:git|hg)\+\w+://\S*?/([\w.-]+?)(?:\.git)?(?:@[^/]*)?(?:#\S*)?", line) for line in lines]
    return list(dict.fromkeys(match[1] for match in ends if match))


def usable(lines: list[str]) -> list[str]:
    """Requirements that name packages of the index, without tools, addresses and options of pip."""
    plain = []
    for line in lines:
        line = line.split(" #")[0].strip()
        line = line.strip(line[0]) if line.startswith(("'", '"')) else line
        match = _LINE.fullmatch(line)
        if match and match[1].lower().replace("_", "-") not in _TOOLS:
            plain.append(line)
    return list(dict.fromkeys(plain))


def _of_tox(repository: Path) -> list[str]:
    path = repository / "tox.ini"
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    block = re.search(r"^\[testenv\]$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    listed = re.search(r"^deps\s*=((?:.*\n)(?:[ \t]+.*\n)*)", block[1], re.MULTILINE) if block else None
    required: list[str] = []
    for line in shown_lines(listed[1]) if listed else ():
        line = line.strip()
        required += requirement_lines(repository, line[2:].strip()) if line.startswith("-r") else [line]
    return required


def _installed_by_ci(repository: Path) -> list[str]:
    """Arguments of every `pip install` in CI files, the Makefile and the README."""
    required: list[str] = []
    for path in sorted(path for pattern in _TALK for path in repository.glob(pattern) if path.is_file()):
        for arguments in re.findall(r"\bpip3? install ([^\n&|;`]+)", path.read_text("utf-8", "replace")):
            try:
                words = iter(shlex.split(arguments))
            except ValueError:
                continue
            for word in words:
                if word in ("-r", "--requirement"):
                    required += requirement_lines(repository, next(words, ""))
                elif not word.startswith(("-", ".", "$")):
                    required.append(word)
    return required
