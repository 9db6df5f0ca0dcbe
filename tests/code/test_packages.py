"""Packages are verified and unpacked safely; dependencies and licences are read from where projects declare them."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from etude.code import licence, packages
from etude.errors import UserError


def _archive(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_unpack(tmp_path: Path) -> None:
    digest = _archive(tmp_path / "a.tar.gz", {"lib-1.0/lib.py": b"x = 1\n"})
    packages.verify(tmp_path / "a.tar.gz", digest)
    repository = packages.unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert (repository / "lib.py").read_bytes() == b"x = 1\n"
    with pytest.raises(UserError, match="not 000"):
        packages.verify(tmp_path / "a.tar.gz", "0" * 64)


def test_archives_cannot_escape(tmp_path: Path) -> None:
    _archive(tmp_path / "a.tar.gz", {"lib-1.0/a": b"", "lib-1.0/../../escaped": b"x"})
    with pytest.raises(UserError, match="cannot be unpacked safely"):
        packages.unpack(tmp_path / "a.tar.gz", tmp_path / "deep/out")
    assert not list(tmp_path.rglob("escaped"))


def test_a_member_of_a_wheel_cannot_leave_its_folder(tmp_path: Path) -> None:
    wheel = tmp_path / "bad-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../evil.py", "x = 1\n")
    with pytest.raises(UserError, match="outside"):
        packages.unpack_wheel(wheel, tmp_path / "out")
    assert not (tmp_path / "evil.py").exists()


def test_requests_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="64 hex digits"):
        packages.fetch_library("lib", "1.0", "abc", tmp_path)
    with pytest.raises(UserError, match="plain name"):
        packages.fetch_library("--index-url=x", "1.0", "0" * 64, tmp_path)


def test_a_fetched_library_is_used_again(tmp_path: Path) -> None:
    (tmp_path / f"lib-1.0-{'a' * 12}" / "lib-1.0").mkdir(parents=True)
    assert packages.fetch_library("lib", "1.0", "a" * 64, tmp_path).name == "lib-1.0"


def test_dependencies(tmp_path: Path) -> None:
    assert packages.install_dependencies(tmp_path, tmp_path / "site") == []
    assert list((tmp_path / "site").iterdir()) == []
    (tmp_path / "setup.cfg").write_text("[options]\ninstall_requires =\n    attrs>=20\n    six\n")
    assert packages.dependencies(tmp_path) == ["attrs>=20", "six"]
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "lib"\nversion = "2"\ndependencies = ["attrs"]\n')
    assert packages.dependencies(tmp_path) == ["attrs"]
    assert packages.find_name(tmp_path) == "lib-2"
    (tmp_path / "pyproject.toml").write_text("=")
    with pytest.raises(UserError, match="cannot be read"):
        packages.dependencies(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Permission is hereby granted, free of charge, to any person", "MIT"),
        ("Apache License\n   Version 2.0, January 2004", "Apache-2.0"),
        ("Redistribution and use in source and binary forms\n Neither the name of X", "BSD-3-Clause"),
        ("All rights reserved", "unknown"),
    ],
)
def test_licence(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "LICENSE.txt").write_text(text)
    assert licence.find_licence(tmp_path)[0] == expected
    (tmp_path / "pyproject.toml").write_text('[project]\nlicense = "0BSD"\n')
    assert licence.find_licence(tmp_path) == ("0BSD", "pyproject.toml")
