"""The page is self-contained and inert whatever the agent wrote; the JSON has its schema."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import msgspec
import pytest

from etude.dashboard.page import write_report
from etude.dashboard.report import (
    ChangedTask,
    CheatingFigures,
    DamageFigures,
    HeldOutFigures,
    RunReport,
    RunSetup,
    TrainingFigures,
    WeightFigures,
    best_version,
    clock_advice,
    held_out_figures,
    silence_advice,
    training_figures,
)
from etude.dashboard.view import RunView, ShownEpisode
from etude.evals.stats import Estimate
from etude.evals.suite import TaskResult
from etude.ledger.flagged import FlaggedEpisode, ImpossibleCounts
from etude.ledger.ledger import GroupResult
from etude.records import Outcome, ToolCall
from etude.rollout.drift import Shift
from tests.helpers.sample_run import eval_result, make_episode, make_report, shown_episodes, write_run

REQUIRED = {
    "seed", "seconds", "pass_before", "pass_after", "paired_diff", "steps", "episodes", "versions", "bytes_published",
    "utilisation", "mismatch", "checks",
}  # fmt: skip
VOID = {"meta", "link", "br"}
LOADING_TAGS = {"img", "iframe", "object", "embed", "base", "form", "audio", "video", "source", "use", "image"}
LOADING = {"src", "srcset", "action", "formaction", "background", "xlink:href"}


class Page(HTMLParser):
    """Start tags with attributes, text, and whether every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def count(self, tag: str, word: str) -> int:
        return sum(t == tag and word in (a.get("class") or "").split() for t, a in self.tags)


def page_of(run_dir, report, view=None) -> Page:
    page = Page(write_report(run_dir, report, view).read_text())
    assert page.open == []
    return page


def assert_self_contained(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in LOADING_TAGS
        assert not LOADING & set(attributes), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        if "href" in attributes:
            assert (tag, attributes["href"]) == ("link", "data:,")
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]


def test_the_page_loads_nothing(run_dir, report, view):
    path = write_report(run_dir, report, view)
    html = path.read_text()
    assert_self_contained(Page(html))
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|import\(|WebSocket|sendBeacon", html)
    assert path == run_dir / "report.html"
    assert path.stat().st_size < 6e6


def test_the_policy_admits_the_page_s_own_script(run_dir, report, view):
    html = write_report(run_dir, report, view).read_text()
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in html


def test_at_least_ten_episodes_are_readable(run_dir, report, view):
    page = page_of(run_dir, report, view)
    assert page.count("details", "episode") == len(view.episodes) >= 10
    turns = sum(len(shown.episode.turns) for shown in view.episodes)
    endings = len(view.episodes)
    assert page.count("section", "turn") == turns + 2 * endings  # plus a prompt and an outcome each
    sampled = sum(shown.episode.sampled_tokens for shown in view.episodes)
    assert page.count("span", "k") == sampled
    text = "".join(page.text)
    for needed in ("array[i * size : (i + 1) * size]", "error: no match", "unknown tool edt", "AssertionError"):
        assert needed in text
    stages = {a["data-stage"] for t, a in page.tags if t == "details" and "data-stage" in a}
    assert stages == {"before", "training", "after"}


def test_tokens_carry_tint_logprob_version_and_advantage(run_dir, report):
    episode, texts = make_episode(3, [([ToolCall(name="test", arguments={})], ["failed"])], passed=False)
    advantages = [0.0] * len(texts)
    first = episode.segments[0].turn_starts[0]
    advantages[first], advantages[first + 1] = -1.0, 0.5
    page = page_of(run_dir, report, RunView(episodes=(ShownEpisode("e", episode, advantages, texts),)))
    tokens = [a for t, a in page.tags if t == "span" and "k" in (a.get("class") or "").split()]
    assert "n5" in tokens[0]["class"].split()
    assert {"p2", "p3"} & set(tokens[1]["class"].split())
    assert tokens[1]["data-a"] == "+0.50"
    logprob = episode.segments[0].arrays()[2][first]
    assert float(tokens[0]["data-l"]) == pytest.approx(logprob, abs=5e-4)  # three decimals are written
    parent = next(a for t, a in page.tags if t == "pre" and "tokens" in (a.get("class") or ""))
    assert (parent["data-v"], parent["data-a"]) == ("0", "−1.00")


HOSTILE = (
    "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\"' onclick=x \x1b]52;c;eA==\x07\u202e\ud800 "
    "http://evil.example/"
)


def test_hostile_text_is_inert_everywhere(run_dir, report):
    calls = (
        ToolCall(name=HOSTILE, arguments={"old": HOSTILE, "new": HOSTILE}),
        ToolCall(name=HOSTILE, arguments={HOSTILE: HOSTILE}),
        ToolCall(name=HOSTILE, arguments=None, error=HOSTILE),
    )
    episode, texts = make_episode(1, [(list(calls), [HOSTILE] * 4)], passed=False, detail=HOSTILE)
    episode = msgspec.structs.replace(episode, task_id=HOSTILE, id=HOSTILE, metrics={HOSTILE: 1.0})
    shown = ShownEpisode(HOSTILE, episode, 0.5, [HOSTILE] * len(texts), HOSTILE)
    unseen = replace(shown, token_texts=[])
    name = HOSTILE.replace("\ud800", "")  # no JSON can hold a lone surrogate
    hostile = msgspec.structs.replace(
        report, setup=RunSetup(name, name, name, name), checks={name: False}, episodes={name: 1}, stages={name: 1.0},
        held_out=HeldOutFigures(before=msgspec.structs.replace(report.held_out.before, behaviour={name: 1.0})),
    )  # fmt: skip
    page = page_of(run_dir, hostile, RunView(episodes=(shown, unseen)))
    assert_self_contained(page)
    assert [tag for tag, _ in page.tags].count("script") == 1
    text = "".join(page.text)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "<img src=x onerror=alert(1)>" in text  # shown, as text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_runs_have_a_page(tmp_path, steps):
    page = page_of(write_run(tmp_path / "run", steps), make_report(steps))
    assert ("Nothing to draw" in "".join(page.text)) == (steps == 0)


def test_a_run_that_measured_nothing_has_a_page(tmp_path, report):
    bare = msgspec.structs.replace(
        report, pass_before=None, pass_after=None, paired_diff=None,
        held_out=HeldOutFigures(), episodes={}, checks={}, stages={}, setup=RunSetup(),
    )  # fmt: skip
    text = "".join(page_of(tmp_path, bare).text)
    assert "not measured" in text
    assert (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.01, 0.2, "got better"), (-0.2, -0.01, "got worse"), (-0.1, 0.2, "No difference is shown")],
)
def test_the_verdict_follows_the_interval(tmp_path, report, low, high, said):
    diff = Estimate(mean=(low + high) / 2, low=low, high=high)
    text = "".join(page_of(tmp_path, msgspec.structs.replace(report, paired_diff=diff)).text)
    assert said in text


def test_the_page_says_how_to_serve_and_what_to_change(tmp_path, report):
    note = silence_advice(0.75, 0.1, 0.5)
    page = page_of(tmp_path, msgspec.structs.replace(report, serve="etude serve outputs/<demo>", notes=(note,)))
    text = "".join(page.text)
    assert "Serve it: etude serve outputs/<demo>" in text
    assert note in text
    assert "Serve it" not in "".join(page_of(tmp_path, report).text)


@pytest.mark.parametrize(
    ("rate", "said"),
    [(0.1, "too hard: give easier ones"), (0.9, "too easy: give harder"), (0.5, "pass always or never")],
)
def test_a_run_that_learns_nothing_says_what_to_do(rate, said):
    note = silence_advice(0.75, rate, 0.5)
    assert note.startswith("75 % of the groups teach nothing: all their members got the same reward.")
    assert said in note
    assert silence_advice(0.5, rate, 0.5) is None


@pytest.mark.parametrize(("low", "high", "version"), [(-0.2, -0.1, 0), (-0.2, 0.1, 7), (0.1, 0.2, 7)])
def test_the_best_version_is_the_newest_unless_it_is_known_to_be_worse(low, high, version):
    assert best_version(7, Estimate(mean=(low + high) / 2, low=low, high=high)) == version
    assert best_version(7, None) == 7


def test_bytes_ratio_and_pause_are_shown_per_version(tmp_path, report):
    steps = [{"step": n, "time": float(n), "weights/version": n, "weights/bytes": 250_000 * n} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    measured = msgspec.structs.replace(report, weights=WeightFigures(1_000_000, {1: 3.25}))
    page = write_report(tmp_path, measured).read_text()
    first, second = (page.split(f'<th scope="row">v{n}</th>')[1].split("</tr>")[0] for n in (1, 2))
    assert "4.0x" in first
    assert "3.2 ms" in first
    assert "2.0x" in second
    assert " ms" not in second, "nobody saw that version live"


def test_a_failed_check_is_seen(tmp_path, report):
    page = page_of(tmp_path, msgspec.structs.replace(report, checks={"ledger_conserved": False}))
    assert "FAILED" in "".join(page.text)


def test_outcomes_that_are_not_scored_are_marked(tmp_path, report):
    episode, texts = make_episode(1, [([], ["x"])], passed=False, outcome=Outcome.TAMPERED)
    page = page_of(tmp_path, report, RunView(episodes=(ShownEpisode("t", episode, None, texts),)))
    assert page.count("span", "warn") == 2


def test_report_json_has_its_schema(run_dir, report):
    write_report(run_dir, report)
    data = msgspec.json.decode((run_dir / "report.json").read_bytes())
    assert set(data) >= REQUIRED
    assert set(data["paired_diff"]) == {"mean", "low", "high"}
    assert set(data["utilisation"]) == {"trainer", "engine"}
    assert set(data["mismatch"]) == {"k2", "k3", "max_abs"}
    assert {"ledger_conserved", "weights_digest_served", "tokens_prefix_property"} <= set(data["checks"])
    assert msgspec.json.decode((run_dir / "report.json").read_bytes(), type=RunReport) == report


def test_held_out_figures_come_from_the_evaluations():
    before, after = eval_result(0.2), eval_result(0.5)
    figures, difference = held_out_figures(before, after)
    assert figures.before.interval == before.pass_1
    assert difference.mean == pytest.approx(after.pass_1.mean - before.pass_1.mean)
    assert figures.functions == 30
    assert held_out_figures(None, None) == (HeldOutFigures(), None)
    only, difference = held_out_figures(None, after)
    assert (only.before, only.tasks, difference) == (None, 90, None)


@pytest.mark.parametrize(
    ("early", "late", "said"),
    [(185, 47, "33 % before training, 8 % after training"), (0, 12, "2 % after"), (5, 5, None), (0, 0, None)],
)
def test_a_clock_that_decides_is_said(early, late, said):
    def stopped(count):
        stops = {"finished": 556 - count, "seconds": count}
        return msgspec.structs.replace(eval_result(0.2), stops=stops)

    note = clock_advice(stopped(early), stopped(late), 60.0)
    assert note is None if said is None else said in note
    if note:
        assert "Raise rollout.seconds, it is 60" in note
    assert clock_advice(None, None, 60.0) is None


def test_what_was_unlearned_is_told_by_task_and_by_damage():
    def measured(**rates: list[bool]):
        tasks = [TaskResult(id=n, function=n, passed=tuple(p), lost=0, damage=n[0]) for n, p in rates.items()]
        return msgspec.structs.replace(eval_result(0.2), tasks=tuple(tasks))

    before = measured(a1=[True, True], a2=[False, False], b1=[True, False], b2=[True, True])
    after = measured(a1=[False, True], a2=[True, True], b1=[False, False], b2=[False, False])
    figures, _ = held_out_figures(before, after)
    assert figures.damage == {"a": DamageFigures(2, 0.5, 0.75), "b": DamageFigures(2, 0.75, 0.0)}
    assert figures.unlearned == (ChangedTask("b2", 1, 0), ChangedTask("a1", 1, 0.5), ChangedTask("b1", 0.5, 0))
    assert held_out_figures(None, after)[0].unlearned == ()


def test_new_training_tasks_and_those_that_were_played_again():
    """Silent groups are counted by the steps, of which the first nine are left out once."""
    groups = [GroupResult(i, task, n, 4, i) for i, (task, n) in enumerate([("a", 1), ("b", 2), ("a", 2), ("a", 4)])]
    steps = [
        {"step": step, "rollout/groups": 4.0, "rollout/zero_variance": float(step < 10), "entropy/mean": 1 / step}
        for step in range(1, 21)
    ]
    figures = training_figures(groups, steps, {})
    assert figures == TrainingFigures(
        tasks=2,
        groups=4,
        new=None,
        again=1,
        first=0.25,
        last=1.0,
        teach=1 - 9 / 80,
        teach_later=1.0,
        entropy=(1.0, 0.05),
    )
    more = [*groups, *(GroupResult(i, f"c{i}", i % 5, 4, i) for i in range(4, 10))]
    assert training_figures(more, steps, {}).new == (0.375, 0.875), "of eight tasks, the first two and the last two"
    easy = [GroupResult(i, f"e{i}", 4, 4, i) for i in range(10, 18)]
    late = training_figures([*more, *easy], steps, {f"e{i}": "easy" for i in range(10, 18)})
    assert late.new == ((0.375 + 1) / 2, (0.875 + 1) / 2), "an easier repository that joins is no progress"
    assert training_figures(groups, steps[:9], {}).teach_later is None
    assert training_figures([], steps, {}) is None


def test_the_gap_between_training_and_held_out_tasks_is_said_first(tmp_path, report):
    text = write_report(tmp_path, report).read_text("utf-8")
    assert "170 training tasks, as they were met: 31.0 % in the first quarter, 42.0 % in the last, +11.0 points" in text
    assert "120 of them were played again: 34.0 % at their first group, 61.0 % at their last, +27.0 points" in text
    assert "The gap to the held-out gain is +10.3 points" in text
    assert text.index("The gap to") < text.index('id="heldout"')
    slight = msgspec.structs.replace(report.training, last=0.35)
    text = write_report(tmp_path, msgspec.structs.replace(report, training=slight)).read_text("utf-8")
    assert "The gap to" not in text
    assert "the intervals of some 19 hold the true difference" in text


def test_long_episodes_stay_small(tmp_path, report):
    call = ToolCall(name="run", arguments={"command": "x" * 100_000})
    episode, texts = make_episode(1, [([call], ["y" * 500_000])], passed=False)
    shown = ShownEpisode("long", episode, 1.0, texts)
    assert write_report(tmp_path, report, RunView(episodes=(shown,) * 3)).stat().st_size < 1e6


def test_the_page_is_the_same_every_time(tmp_path, run_dir, report, view):
    first = write_report(run_dir, report, view).read_bytes()
    assert write_report(tmp_path, report, replace(view, episodes=tuple(shown_episodes()))).read_bytes() == first


def test_what_the_detectors_found_is_shown_and_inert(tmp_path, report):
    flagged = FlaggedEpisode(
        group=3, member=1, task="<b>t</b>", flags=("decoy", "gap"), reward=-0.2, passed=False, blob="3/1.msgpack"
    )
    shift = Shift(metric="rollout/edits", step=40, window=10, before=1.25, after=2.5, t=9.1)
    figures = CheatingFigures(
        flags={"decoy": 1, "gap": 1234}, violations=1, rewarded=0, flagged=(flagged,),
        impossible=ImpossibleCounts(played=60, passed=0, tampered=0), impossible_bound=0.0487, shifts=(shift,),
    )  # fmt: skip
    page = write_report(tmp_path, msgspec.structs.replace(report, cheating=figures)).read_text()
    section = page[page.index('id="cheating"') :]
    assert "<b>t</b>" not in page
    assert "&lt;b&gt;t&lt;/b&gt; #1" in section
    assert "1,234" in section
    assert "60 impossible tasks were played: 0 passed" in section
    assert "4.9" in section
    assert '<table class="explained">' in section
    assert ".explained tr > :last-child { text-align: left; white-space: normal;" in page
    assert "edits per episode: 1.25 in the 10 versions before 31, 2.5 since" in section
    saved = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=RunReport)
    assert saved.cheating == figures
    assert 'id="cheating"' not in write_report(tmp_path, report).read_text()
