from __future__ import annotations

from pathlib import Path

import pytest
from models.make_nano.functions import standard_library

from etude.code.licence import is_permissive, metadata_licence
from etude.corpus import sources
from etude.errors import UserError


@pytest.mark.parametrize(
    ("metadata", "licence", "allowed"),
    [
        ("Name: a\nLicense-Expression: MIT\nClassifier: License :: OSI Approved :: BSD License\n", "MIT", True),
        ("Name: a\nClassifier: License :: OSI Approved :: Apache Software License\n", "Apache Software License", True),
        ("Name: a\nLicense: BSD-3-Clause\n", "BSD-3-Clause", True),
        ("Name: a\nLicense-Expression: MPL-2.0 AND MIT\n", "MPL-2.0 AND MIT", False),
        ("Name: a\nClassifier: License :: OSI Approved :: GNU General Public License (GPL)\n", None, False),
        ("Name: a\n", "", False),
    ],
)
def test_only_declared_permissive_licences_pass(metadata: str, licence: str | None, allowed: bool) -> None:
    found = metadata_licence(metadata)
    assert licence is None or found == licence
    assert is_permissive(found) is allowed


def test_unpinned_requirement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pinned"):
        sources.fetch_source("requests", tmp_path)
    with pytest.raises(UserError, match="pinned"):
        sources.fetch_source("--index-url=x==1", tmp_path)


def test_unpacked_wheel_is_not_fetched_again_and_its_licence_decides(tmp_path: Path) -> None:
    root = tmp_path / "thing-1.0"
    (root / "thing-1.0.dist-info").mkdir(parents=True)
    (root / "thing").mkdir()
    (root / "thing" / "b.py").write_text("x = 1\n")
    (root / "thing" / "a.py").write_text("y = 2\n")
    metadata = root / "thing-1.0.dist-info" / "METADATA"
    metadata.write_text("Name: thing\nLicense: ISC\n")
    source = sources.fetch_source("thing==1.0", tmp_path)
    assert [f.path for f in sources.files(source)] == ["thing/a.py", "thing/b.py"]
    assert (source.name, source.licence) == ("thing", "ISC")
    metadata.write_text("Name: thing\nLicense: GPL-3.0\n")
    with pytest.raises(UserError, match="not permissive"):
        sources.fetch_source("thing==1.0", tmp_path)


def test_standard_library_holds_modules() -> None:
    source = standard_library()
    assert source.licence.startswith("PSF")
    assert (source.root / "textwrap.py").is_file()
