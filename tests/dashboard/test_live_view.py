"""What a run says in a log and on a terminal. The clock is ours."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from etude.dashboard.terminal import LiveView, final_table, sparkline


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def log_of(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()


@pytest.fixture
def log(clock) -> Console:
    return Console(file=io.StringIO(), width=60)


def test_a_log_gets_one_plain_line_every_five_seconds(log, clock):
    with LiveView("demo", ["build tasks", "train"], log, clock) as live:
        live.stage("train", 100, "steps")
        for step in range(1, 21):
            clock.now += 1
            live.update(done=step, reward=0.25, pass_rate=0.5, staleness=0.6, tokens_per_s=1730, version=step)
    lines = log_of(log)
    assert lines[0] == "demo [2/2] 0.0 s: train …"
    assert lines[1] == (
        "demo [2/2] 5.0 s: train 5 of 100 steps, reward 0.250, pass rate 50.0 %, staleness 0.60 versions, "
        "tokens/s 1.73k, weights v5"
    ), "nothing is known of the rest yet"
    assert lines[2].endswith("weights v10, 1 min 30 s left")
    assert [line.split(": ")[0] for line in lines[1:5]] == [f"demo [2/2] {t} s" for t in ("5.0", "10", "15", "20")]
    assert lines[-1] == "demo [2/2] 20 s: train took 20 s"
    assert live.stages == {"train": 20.0}
    assert "\x1b" not in "".join(lines)


def test_the_clock_may_decide_what_is_left(log, clock):
    with LiveView("demo", ["train"], log, clock) as live:
        live.stage("train", 100, "steps")
        clock.now = 6
        live.update(done=1, seconds_left=90)
        clock.now = 12
        live.update(reward=0.5)  # says nothing about the time
    assert [line.rpartition(", ")[2] for line in log_of(log)[1:3]] == ["1 min 30 s left"] * 2


def test_hostile_names_stay_inert(log, clock):
    with LiveView("demo", ["train"], log, clock) as live:
        live.stage("\x1b[2Jtrain")
        clock.now = 6
        live.note("[red]\x1b]0;owned\x07[/red]")
    assert log_of(log)[1].endswith("[red]␛]0;owned␇[/red]")
    assert "\x1b" not in log.file.getvalue()


def test_an_evaluation_reports_its_progress(log, clock):
    with LiveView("demo", ["eval before"], log, clock) as live:
        live.stage("eval before")
        clock.now = 10
        live.evaluated(20, 80, 5)
    assert log_of(log)[1] == "demo [1/1] 10 s: eval before 20 of 80, pass rate 25.0 %, 30 s left"


def terminal() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)


def test_a_terminal_shows_stages_figures_and_processes(clock):
    console = terminal()
    with LiveView("demo", ["build tasks", "train", "report"], console, clock) as live:
        live.stage("build tasks")
        clock.now = 50
        live.stage("train", 120, "steps")
        for step in range(60):
            clock.now += 5
            live.update(done=step, reward=step / 60, pass_rate=0.5)
        live.process("engine", "decoding 43 rows")
        live.process("trainer", "[bold]stepping[/bold]")
        plain = Console(file=io.StringIO(), width=100)
        plain.print(live._screen())
    text = plain.file.getvalue()
    for needed in ("✓ build tasks", "● train", "○ report", "59 of 120 steps", "5 min 10 s left", "pass\u00a0rate",
                   "decoding 43 rows", "[bold]stepping[/bold]", "▁", "█"):  # fmt: skip
        assert needed in text
    assert console.file.getvalue()  # it was drawn


def test_an_error_leaves_the_terminal_in_order(clock):
    console = terminal()
    with pytest.raises(KeyError), LiveView("demo", ["train"], console, clock):
        raise KeyError("bug")
    assert "\x1b[?25h" in console.file.getvalue()  # the cursor is back


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1, 1]) == "▄▄"
    assert sparkline([0, 0.5, 1]) == "▁▅█"


def printed(report, where=None) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(final_table(report, where))
    return console.file.getvalue()


def test_the_final_table_says_it_all(report):
    text = printed(report, Path("outputs/demo/report.html"))
    for needed in ("22.2 %", "38.9 %", "95 %:", "+16.7 points", "90 tasks of 30 functions", "scored 15,230", "infra 1",
                   "trainer 82 %", "engine 90 %", "121, 130 MB shipped", "k2 3.2e−7", "✓ ledger conserved",
                   "outputs/demo/report.html", "13 min 11 s", "34.0 %, then 61.0 %", "120 tasks", "31.0 %, then 42.0 %",
                   "62 %, 71 % from step 10 on", "eval before 45 s"):  # fmt: skip
        assert needed in text


def test_the_final_table_of_nothing(report):
    bare = msgspec.structs.replace(
        report, pass_before=None, pass_after=None, paired_diff=None, episodes={}, checks={"ledger_conserved": False}
    )
    text = printed(bare)
    assert text.count("not measured") == 3
    assert "FAILED ledger conserved" in text
