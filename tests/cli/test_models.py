"""`etude models`: the names, and where each model lies."""

import json
from pathlib import Path

import pytest

from etude.cli.main import main
from etude.config import PRETRAINED, bundled


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["models", *words])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_every_name_is_listed_with_its_licence_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    PRETRAINED[0].folder.mkdir(parents=True)
    listed = {row["name"]: row for row in json.loads(shown(capsys, "--json"))["models"]}
    assert list(listed) == ["nano", *(model.name for model in PRETRAINED)]
    assert listed["nano"]["where"] == str(bundled("models/nano"))
    assert listed["smollm2"]["where"] == str(PRETRAINED[0].folder)
    assert listed["gemma3-270m"]["where"] == "fetched on first use, 239 MB of the package index"
    text = shown(capsys)
    for row in listed.values():
        assert all(row[key] in text for key in ("name", "licence", "where"))
