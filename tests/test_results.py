"""docs/results.md is what its data make, and every figure of it says how it came about."""

from __future__ import annotations

import ast
import json
import re
from decimal import Decimal
from pathlib import Path

import pytest
from benchmarks import results

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in results.FOLDER.glob("*.json") if path.name != "results.json")
DIGIT = re.compile(r"\d")


def test_the_page_is_made_of_its_data() -> None:
    assert results.PAGE.read_text() == results.page(), "run python -m benchmarks.results"
    assert sorted(results.load(results.FOLDER / "results.json")["sections"]) == [path.stem for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_records_say_how_they_came_about(path: Path) -> None:
    data = results.load(path)
    assert results.dump(data) == path.read_text(), "figures keep their digits, and a row its line"
    assert not DIGIT.search(data["title"])
    assert len(data.get("text", "").split()) <= 30
    for made in data["records"]:
        assert made["command"] or made["reason"]
        assert made["hardware"]
        assert made["rows"]
        assert isinstance(made["conditions"], str)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
        assert re.fullmatch(r"[0-9a-f]{7,40}", made["commit"])
        assert len(made.get("text", "").split()) <= 60
        for row in made["rows"]:
            assert {"case", "value", "unit", "baseline"} <= {*row}
            assert {*row} <= {"case", "value", "unit", "baseline", "before", "interval"}
    names = [(made["bench"], "--quick" in (made["command"] or "")) for made in data["records"]]
    assert len({*names}) == len(names), "a new run would take the place of another's record"


def test_the_generator_holds_no_figure() -> None:
    tree = ast.parse(Path(results.__file__).read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    formats = {id(spec) for node in ast.walk(tree) if isinstance(node, ast.FormattedValue) for spec in _parts(node)}
    words = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [node.value for node in words if id(node) not in docs | formats and DIGIT.search(node.value)] == []


def _parts(node: ast.FormattedValue) -> list[ast.expr]:
    return node.format_spec.values if isinstance(node.format_spec, ast.JoinedStr) else []


def test_links_to_its_headings_lead_somewhere() -> None:
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)", results.PAGE.read_text(), re.M)
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[mr]*/**/*.md")]
    linked = {anchor for page in pages for anchor in re.findall(r"results\.md#([\w-]+)", page.read_text())}
    assert linked <= anchors
    assert len(linked) > 20


def test_figures_are_shown_as_they_were_written() -> None:
    def shown(value: object, unit: str = "", baseline: str = "", **more: object) -> str:
        row = {"case": "c", "value": value, "unit": unit, "baseline": baseline, **more}
        return results.figure(json.loads(json.dumps(row), parse_float=Decimal))

    assert shown(8319) == "8,319"
    assert shown(2.5, "x", "target 3") == "2.5x (target 3)"
    assert shown(4.3, before=[1.5, 2]) == "1.5, 2→4.3"
    assert shown(9.0, "points", interval=[-3.0, 15.6]) == "+9.0 points [-3.0, +15.6]"
    assert shown(None, "ms", interval=[11, 27]) == "11-27 ms"
    assert shown(0.003913890411395582, "share") == "0.391%"
    assert shown(3.112370186105948e-11) == "3.11e-11"
    assert shown(1390.7042, "MB") == "1,391 MB"
    assert shown("none dropped") == "none dropped"


def test_a_measurement_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    row = {"case": "speed", "value": 2.5, "unit": "x", "baseline": "plain"}
    result = {"bench": "new", "rows": [row], "checks": {"holds": True}}
    results.record(path, result, "etude bench new --json", "Idle.")
    results.record(path, result | {"bench": "other"}, "etude bench other --json", "Idle.")
    path.write_text(path.read_text().replace("2.5", "2.50"))
    data = results.load(path)
    data["records"][0]["title"] = "Kept"
    path.write_text(results.dump(data))
    results.record(path, result | {"rows": [row | {"value": 3}]}, "etude bench new --json", "Busy.")
    first, second = results.load(path)["records"]
    assert (first["title"], first["conditions"], first["rows"][0]["value"]) == ("Kept", "Busy.", 3)
    assert first["checks"] == {"holds": True}
    assert str(second["rows"][0]["value"]) == "2.50"
    assert {"command", "hardware", "date", "commit"} <= {*first}
    text = "\n".join(results.section(results.load(path), first["hardware"]))
    assert "**Kept.** `etude bench new --json`" in text
    assert "- speed: 3x (plain)" in text
