"""What a project declares is read from its files, whatever tool they are for; nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.code import declared, packages
from etude.errors import UserError


def test_dependencies(tmp_path: Path) -> None:
    assert packages.install_dependencies(tmp_path, tmp_path / "site") == []
    assert list((tmp_path / "site").iterdir()) == []
    (tmp_path / "setup.py").write_text("needs = ['six']\nsetup(install_requires=needs, extras_require={'test': ['a']})")
    assert declared.declared_requirements(tmp_path) == ["six"]
    assert declared.dependency_groups(tmp_path) == {"test": ["a"]}
    (tmp_path / "setup.cfg").write_text("[options]\ninstall_requires =\n    attrs>=20\n    six\n")
    assert declared.declared_requirements(tmp_path) == ["attrs>=20", "six"]
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "lib"\nversion = "2"\ndependencies = ["attrs"]\n')
    assert declared.declared_requirements(tmp_path) == ["attrs"]
    assert declared.project_name(tmp_path) == "lib-2"
    (tmp_path / "pyproject.toml").write_text("=")
    with pytest.raises(UserError, match="cannot be read"):
        declared.declared_requirements(tmp_path)


def test_files_of_requirements(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").write_text("[options]\ninstall_requires = file: needs.txt\n")
    (tmp_path / "needs.txt").write_text("# words\n-r more.txt\n-r needs.txt\nsix>=1  # why\n--log=/tmp/x\n")
    (tmp_path / "more.txt").write_text("-r ../outside.txt\nattrs\n")
    (tmp_path.parent / "outside.txt").write_text("evil\n")
    assert declared.declared_requirements(tmp_path) == ["six>=1", "attrs"]
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "lib"\n[tool.setuptools.dynamic]\ndependencies = {file = ["more.txt"]}\n'
    )
    assert declared.declared_requirements(tmp_path) == ["attrs"]


def test_groups(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        """
        [project]
        dependencies = []
        optional-dependencies = {Dev_Tools = ["ruff"]}
        [dependency-groups]
        tests = ["freezegun", {include-group = "shared"}, {include-group = "tests"}]
        shared = ["pytz"]
        [tool.poetry.group.test.dependencies]
        pytest-mock = "^3.1"
        mine = {path = "../mine"}
        python = "^3.11"
        """
    )
    assert declared.dependency_groups(tmp_path) == {
        "dev-tools": ["ruff"], "tests": ["freezegun", "pytz"], "shared": ["pytz"], "test": ["pytest-mock>=3.1"],
    }  # fmt: skip


def test_what_poetry_declares(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.poetry.dependencies]\npython = '>=3.11'\nsix = '*'\nattrs = '~20.1'\nx = '1.2'\ny = '>=1,<2'\n"
    )
    assert declared.declared_requirements(tmp_path) == ["six", "attrs>=20.1", "x==1.2", "y>=1,<2"]


def test_a_release_says_it_in_pkg_info(tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: lib\nVersion: 1.0\nRequires-Dist: six (>=1)\n"
        'Requires-Dist: mock; python_version < "3.8" and extra == "test"\nRequires-Dist: pytz; extra == "test"\n'
    )
    assert declared.declared_requirements(tmp_path) == ["six (>=1)"]
    assert declared.dependency_groups(tmp_path) == {"test": ['mock; python_version < "3.8"', "pytz"]}
    assert declared.project_name(tmp_path) == "lib-1.0"
