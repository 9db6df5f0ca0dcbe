"""Packages are verified and unpacked safely; dependencies and licences are read from where projects declare them."""

from __future__ import annotations

import hashlib
import io
import socket
import sys
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


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime = kind, link, mode, 86_400
    return info


def _aged(when: str) -> tarfile.TarInfo:
    info = _member("lib-1.0/aged")
    info.pax_headers = {"mtime": when}
    return info


def _unpacked(folder: Path, *members: tarfile.TarInfo) -> Path:
    """What becomes of a package that holds lib-1.0/a, three bytes long, and these members."""
    with tarfile.open(folder / "a.tar", "w") as tar:
        first = _member("lib-1.0/a")
        first.size = 3
        tar.addfile(first, io.BytesIO(b"abc"))
        for member in members:
            tar.addfile(member)
    return packages.unpack(folder / "a.tar", folder / "deep/out")


@pytest.mark.parametrize("member", [
    _member("lib-1.0/../../escaped"), _member("/lib-1.0/escaped"), _member("lib-1.0/pipe", tarfile.FIFOTYPE),
    _member("lib-1.0/null", tarfile.CHRTYPE), _member("lib-1.0/escaped", tarfile.SYMTYPE, "/etc/passwd"),
    _member("lib-1.0/escaped", tarfile.SYMTYPE, "../../escaped"), _member("lib-1.0/escaped", tarfile.LNKTYPE, "../x"),
    _member("lib-1.0/circle", tarfile.SYMTYPE, "circle"), _member("lib-1.0/a/b"),
], ids=lambda member: f"{member.name}-{member.linkname}")  # fmt: skip
def test_archives_cannot_escape(tmp_path: Path, member: tarfile.TarInfo) -> None:
    with pytest.raises(UserError, match="cannot be unpacked safely"):
        _unpacked(tmp_path, member)
    assert not list(tmp_path.rglob("escaped"))
    assert not list(tmp_path.rglob("null"))


def test_a_link_becomes_a_copy_and_nothing_is_written_through_it(tmp_path: Path) -> None:
    """Links to folders are left out: the file below `way` lies in a folder of its own."""
    members = [_member("lib-1.0/b", tarfile.SYMTYPE, "a"), _member("lib-1.0/sub/c", tarfile.SYMTYPE, "../b")]
    members += [_member("lib-1.0/d", tarfile.LNKTYPE, "lib-1.0/a"), _member("lib-1.0/gone", tarfile.SYMTYPE, "nothing")]
    members += [
        _member("lib-1.0/way", tarfile.SYMTYPE, "sub"),
        _member("lib-1.0/way/e"),
        _member("lib-1.0/run", mode=0o755),
    ]
    folder = _unpacked(tmp_path, *members, _member("lib-1.0/sub", tarfile.DIRTYPE))
    assert {name: (folder / name).read_bytes() for name in ("b", "sub/c", "d")} == dict.fromkeys(
        ("b", "sub/c", "d"), b"abc"
    )
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert not (folder / "gone").exists()
    assert sorted(path.name for path in (folder / "sub").iterdir()) == ["c"]
    assert (folder / "run").stat().st_mode & 0o777 == 0o755
    assert (folder / "b").stat().st_mtime == 86_400


@pytest.mark.parametrize("member", [_member("lib-1.0/" + "n" * 300), _aged("nan"), _aged("1e30")])
def test_what_cannot_be_written_is_one_sentence(tmp_path: Path, member: tarfile.TarInfo) -> None:
    with pytest.raises(UserError, match="cannot be unpacked safely"):
        _unpacked(tmp_path, member)


def test_an_archive_that_was_cut_off_is_one_sentence(tmp_path: Path) -> None:
    _archive(tmp_path / "a.tar.gz", {"lib-1.0/lib.py": b"x = 1\n"})
    (tmp_path / "a.tar.gz").write_bytes((tmp_path / "a.tar.gz").read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot be unpacked safely"):
        packages.unpack(tmp_path / "a.tar.gz", tmp_path / "out")


def test_copies_of_links_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_MAX_BYTES", 8)
    with pytest.raises(UserError, match="unpacks to more than"):
        _unpacked(tmp_path, *(_member(f"lib-1.0/{n}", tarfile.SYMTYPE, "a") for n in range(2)))


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


def _evil_sdist(folder: Path, mark: Path) -> str:
    """A source package that writes `mark` when it is built, installed, or asked for its metadata."""
    code = f"open({str(mark)!r}, 'w').write('ran')\nfrom setuptools import setup\nsetup(name='evil', version='1.0')\n"
    folder.mkdir()
    about = b"Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n"
    return _archive(folder / "evil-1.0.tar.gz", {"evil-1.0/setup.py": code.encode(), "evil-1.0/PKG-INFO": about})


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """(the file that must not appear, digest of the only package of the index)."""
    mark = tmp_path / "ran"
    digest = _evil_sdist(tmp_path / "index", mark)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return mark, digest


def test_a_dependency_without_a_wheel_is_refused_and_not_built(evil: tuple[Path, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evil has no wheel for Python 3\.\d+ .*PIP_FIND_LINKS"):
        packages.install_wheels(["evil"], tmp_path / "site")
    assert not evil[0].exists()


@pytest.mark.parametrize(
    ("python", "installed"), [("3.11.2", {"old"}), ("3.11.9", set()), ("3.13.5", {"new"}), (None, None)]
)
def test_requirements_are_those_of_the_python_that_imports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str | None, installed: set[str] | None
) -> None:
    """pip's own --python-version takes other wheels, and reads markers for the Python that runs pip."""
    needs = {
        "top": 'Requires-Dist: old; python_full_version < "3.11.3"\nRequires-Dist: new; python_version >= "3.13"\n'
    }
    for name in ("top", "old", "new"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs.get(name, '')}"
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", about)
            kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", kind)
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
            wheel.writestr(f"{name}.py", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    packages.install_wheels(["top"], tmp_path / "site", python=python)
    present = {path.stem for path in (tmp_path / "site").glob("*.py")}
    own = sys.version_info
    if installed is None:
        installed = ({"old"} if own < (3, 11, 3) else set()) | ({"new"} if own >= (3, 13) else set())
    assert present == installed | {"top"}


def test_a_fetched_source_package_is_not_run(evil: tuple[Path, str], tmp_path: Path) -> None:
    folder = packages.fetch_library("evil", "1.0", evil[1], tmp_path / "libraries")
    assert (folder / "setup.py").is_file()
    assert not evil[0].exists()
    with pytest.raises(UserError, match=r"evil==2\.0 has no source package"):
        packages.fetch_library("evil", "2.0", evil[1], tmp_path / "libraries")


def test_an_index_that_cannot_be_reached_is_not_said_to_lack_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_RETRIES", "1")
    said = r"^pip download a==1 failed: the package index cannot be reached; check the network\.$"
    with socket.socket() as nobody:  # bound, and does not listen
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}/simple")
        with pytest.raises(UserError, match=said):
            packages.download_wheel("a==1", tmp_path / "into")


def test_a_module_of_the_current_folder_does_not_take_the_place_of_pip(
    evil: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text(f"open({str(evil[0])!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="has no wheel"):
        packages.install_wheels(["evil"], tmp_path / "site")
    assert not evil[0].exists()


def test_start_up_files_of_wheels_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "lib-1.0-py3-none-any.whl", "w") as wheel:
        for name in ("lib.py", "lib.pth", "sitecustomize.py"):
            wheel.writestr(name, "import os\n")
        wheel.writestr("lib-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: lib\nVersion: 1.0\n")
        wheel.writestr("lib-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("lib-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    packages.install_wheels(["lib>=1"], tmp_path / "site")
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["lib-1.0.dist-info", "lib.py"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--log=/tmp/x", "is an option of pip"), ("-e .", "is an option of pip"), ("-rother.txt", "is an option"),
        ("x @ git+https://host/x", "is an address"), ("git+https://host/x", "is an address"),
        ("file:///tmp/x", "is an address"), ("x @ file:///tmp/x", "is an address"), ("./x", "a folder"),
        ("../x", "a folder"), ("/tmp/x.whl", "a folder"), ("https://host/x.whl", "is an address"), ("a b", "be read"),
    ],
)  # fmt: skip
def test_requirements_that_are_more_than_names_are_refused(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        packages.install_wheels(["attrs>=20; python_version > '3'", line], tmp_path / "site")
    assert not (tmp_path / "site").exists()


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


@pytest.mark.parametrize("name", [
    "evil.tar.gz", "evil.zip", "evil.tgz[x]", "evil.TAR.XZ ; python_version > '3'", "evil===1.zip", "evil==1+a.zip",
    "evil===/sub", "evil.tar.lzma", "evil[x]===a.whl",
])  # fmt: skip
def test_a_requirement_is_never_a_file_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """pip builds a file or folder of that name, and so runs it; `etude train` begins in the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "_pip", lambda *_: pytest.fail("pip was asked"))
    with pytest.raises(UserError, match=r"may be a file of the current folder|cannot be read"):
        packages.install_wheels([name], tmp_path / "site")
    assert packages.plain("lib.tar >=1.0") == "lib.tar >=1.0"
    assert packages.plain("ruamel.yaml[zip]==0.18.*") == "ruamel.yaml[zip]==0.18.*"
