"""`etude live plan`: figures of a release, and bad input."""

from __future__ import annotations

import json

import pytest

from etude.cli.main import main


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["live", "plan", *words])
    output = capsys.readouterr()
    return int(str(ended.value.code)), output.out, output.err


def test_a_plan_tells_accounts_looks_and_margin(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = printed(capsys, "--base", "0.5", "--lift", "0.05", "--tasks", "250", "--json")
    figures = json.loads(text.splitlines()[-1])
    assert code == 0
    assert figures["accounts_per_arm"] == 1593
    assert [look["accounts"] for look in figures["looks"]] == [398, 796, 1195, 1593]
    assert "defends a margin of 5.0 points" in text


def test_accounts_tell_the_lift_that_they_show(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--base", "0.2", "--looks", "1", "--json"
    lift = json.loads(printed(capsys, *words, "--accounts", "500")[1].splitlines()[-1])["lift"]
    needed = json.loads(printed(capsys, *words, "--lift", str(lift))[1].splitlines()[-1])["accounts_per_arm"]
    assert needed <= 500
    less = json.loads(printed(capsys, *words, "--lift", str(lift - 1e-4))[1].splitlines()[-1])["accounts_per_arm"]
    assert less > 500


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--base 0.5 --accounts 3", "3 accounts in each arm show no lift"),
        ("--base 0.5 --accounts 0", "an arm has accounts"),
        ("--base 1.5 --lift 0.1", "shares lie between 0 and 1"),
        ("--base 0.5 --lift 0.1 --looks 0.5 0.2", "rise to 1"),
        ("--base 0.5 --lift 0.1 --power 1", "alpha and power are probabilities"),
        ("--base 0.5 --lift 0.1 --tasks 0", "a suite has tasks"),
    ],
)
def test_what_is_no_plan_is_refused(capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    code, text, error = printed(capsys, *words.split())
    assert (code, text) == (2, "")
    assert error.startswith("etude: ")
    assert sentence in error
    assert error.count("\n") == 1
