"""`etude live plan`: what a configuration can show in what time, and bad input."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from etude.cli.main import main
from etude.live.log import schema
from etude.live.log.accounts import open_log

SUITE = Path(__file__).parents[1] / "tasks/data/tiny"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["live", "plan", *words])
    output = capsys.readouterr()
    return int(str(ended.value.code)), output.out, output.err


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A loop whose log has 240 accounts, five of which came in each hour of the last two days."""
    path = tmp_path / "live.toml"
    path.write_text(
        f"folder = '{tmp_path}/live'\n[gate]\nsuites = ['{SUITE}']\n[canary]\nstages = [0.1, 0.5, 1.0]\nleast = 20\n"
        "hours = 30.0\n[[clusters]]\nname = 'one'\nurls = ['http://127.0.0.1:1']\nstore = 'unused'\n"
    )
    engine, slot = open_log(tmp_path / "live", None), 600
    now = time.time() // slot
    rows = [
        {"release": 1, "arm": "control", "account": f"a{n}", "slot": int(now - 6 * (48 - n // 5)), "name": name,
         "tenant": "acme" if n % 2 else "other", "count": count, "total": total}
        for n in range(240) for name, count, total in (("requests", 4, 0.0), ("edits", 2, 0.0), ("survived", 2, 1.0))
    ]  # fmt: skip
    with engine.begin() as connection:
        connection.execute(sa.insert(schema.tallies), rows)
    engine.dispose()
    return str(path)


def test_a_plan_reads_the_log_the_suites_and_the_canary(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = printed(capsys, config, "--json")
    told = json.loads(text.splitlines()[-1])
    assert code == 0
    assert told["tenants"] == {"acme": 120, "other": 120}
    assert told["kept"] == 0.5
    assert told["margins"] == [["tiny", 1, 1.0]]
    ripe = 2400 / 3600
    hours = [stage["hours"] for stage in told["stages"]]
    assert hours == [pytest.approx(1 / 3), pytest.approx(39 // 5 + ripe), pytest.approx(19 // 5 + ripe)]
    assert "| 10% | 0 | 0.3 |" in text, "a small firm's early stage waits for its minutes alone"
    assert "| 50% | 20 | 7.7 |" in text
    one, seven, month = (told["lifts"][days] for days in ("1", "7", "28"))
    assert one > seven == month > 0.1, "no account is seen after the second day"
    less = json.loads(printed(capsys, config, "--power", "0.5", "--json")[1].splitlines()[-1])
    assert less["lifts"]["7"] < seven


def test_without_a_log_or_a_suite_it_says_so(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(config)
    path.write_text(path.read_text().replace(f"'{SUITE}'", "").replace("/live'", "/empty'"))
    code, text, _ = printed(capsys, config)
    assert code == 0
    assert "none: nothing is released; name one in `gate.suites`" in text
    assert "| 10% | 20 | more than a week: rolled back after 30 |" in text
    assert "No edit was seen in the last week" in text
    assert "| 28 | none |" in printed(capsys, config, "--base", "0.5")[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("--base 1.5", "a share of edits lies between 0 and 1"), ("--power 1", "a probability lies between 0 and 1")],
)
def test_what_is_no_plan_is_refused(config: str, capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    code, text, error = printed(capsys, config, *words.split())
    assert (code, text) == (2, "")
    assert error.startswith("etude: ")
    assert sentence in error
    assert error.count("\n") == 1
