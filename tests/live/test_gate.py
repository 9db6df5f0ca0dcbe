"""The gate: every part on small tensors and given plays, and whole with the nano model, boxes and an engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
import torch
from benchmarks.live_gate import false_promotions
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from etude.config import RLConfig, ServerConfig, WeightSource, find_model, validate
from etude.errors import UserError
from etude.evals.paired import defended_margin
from etude.evals.stats import Estimate
from etude.evals.suite import EvalResult, TaskResult
from etude.live.log import journal, schema
from etude.live.log.accounts import Accounts, new_blob, open_blobs, seal
from etude.live.log.privacy import plant
from etude.live.log.records import Arm, Release, ReleaseStage, TurnContent, VersionSpan
from etude.live.release import gate, operations, player
from etude.live.release.gate import above_floor, compare_paired, integrity, play_gate
from etude.live.release.player import Answer, Player, compare_answers, prefixes
from etude.live.release.releases import StoreTarget
from etude.live.release.reports import GatePart, keep_report, read_report
from etude.live.release.stores import bring
from etude.protocol import GenerateRequest
from etude.records import StepRecord
from etude.renderers import renderer_for
from etude.run.engines import engine_url, spawn_engine
from etude.store import open_store
from etude.weights.content import load
from etude.weights.export import publish_folder
from etude.weights.manifest import newest_manifest
from etude.weights.publisher import Publisher
from etude.weights.signature import generate_key, read_private_key
from tests.helpers.followers import Site, site
from tests.helpers.http_apps import answering
from tests.helpers.live import live_config
from tests.helpers.live_story import new_session, new_turn
from tests.helpers.mixtures import widened
from tests.helpers.small_tensors import nudged, tensors
from tests.helpers.vllm_server import PYTHON, needs_vllm

TINY = Path(__file__).parents[1] / "tasks/data/tiny"
FIRST = tensors(1)


def results(passed: list[tuple[bool, ...]]) -> list[TaskResult]:
    return [TaskResult(id=f"t{n}", function=f"f{n // 2}", passed=p, lost=0) for n, p in enumerate(passed)]


def play(passed: list[tuple[bool, ...]], **figures: float) -> EvalResult:
    behaviour = {"turns": 3.0, "sampled_tokens": 100.0} | figures
    return EvalResult(
        split="heldout",
        seed=0,
        samples=1,
        seconds=behaviour.pop("seconds", 60.0),
        tasks=tuple(results(passed)),
        pass_1=Estimate(mean=0.5, low=0.4, high=0.6),
        pass_k={},
        outcomes={},
        retries=0,
        stops={},
        behaviour=behaviour,
    )


def replayed(*_: object) -> GatePart:
    return GatePart(name="replay", passed=True, reason="")


@pytest.fixture
def two(tmp_path: Path):
    key = tmp_path / "key"
    generate_key(key)
    gate = {"suites": [str(widened(tmp_path / "suite" / "tiny", 12))], "margin": 0.4, "samples": 4}
    with site(tmp_path, signing_key=str(key), gate=gate) as made:
        yield made


def out(made: Site) -> None:
    """What has passed is released to everybody, without stores."""
    passed = made.site.read().states[-1].release
    config = made.site.config.model_copy(update={"clusters": ()})
    operations.start(operations.ReleaseSite(config, made.site.engine), passed.manifest, passed.version)


def published(made: Site, version: int, of: dict[str, torch.Tensor], **about: object) -> operations.ReleaseCandidate:
    store = open_store(str(made.trained))
    key = made.options.get("signing_key")
    publisher = Publisher(store, key=read_private_key(Path(key)) if key else None)
    if (last := newest_manifest(store)) is not None:
        publisher.resume(last, made.tensors)
    publisher.publish(version, of, (), {}, **about)
    made.tensors = of
    return operations.candidate(made.site, str(made.trained), None)


def passes(*_: object) -> EvalResult:
    return play([(True,)] * 40)


def test_a_version_passes_and_its_signed_report_stays_with_it(two: Site) -> None:
    said: list[str] = []
    report = play_gate(two.site, published(two, 0, FIRST), passes, replayed, said.append)
    assert report.failed is None
    state = two.site.read().states[0]
    assert state.stage is ReleaseStage.GATE
    key = Path(two.options["signing_key"])
    assert read_report(state.release, key).signature
    assert said[0] == "integrity: passed, signed, 4 tensors with the published digest, all finite"
    (name,) = open_store(str(two.trained)).list("reports")
    data = open_store(str(two.trained)).get(name)
    open_store(str(two.trained)).put(name, data.replace(b"passed", b"Passed", 1))
    with pytest.raises(UserError, match="was altered"):
        read_report(state.release, key)


def test_nothing_is_released_without_the_report_of_its_gate(two: Site) -> None:
    """A changed report, one of other weights, of another key and none are refused; the version stays where it is."""
    first = published(two, 0, FIRST)
    play_gate(two.site, first, passes, replayed, print)
    (name,) = open_store(str(two.trained)).list("reports")
    store, release = open_store(str(two.trained)), two.site.read().states[0].release
    good = store.get(name)
    key, other = two.site.key, two.folder / "other"
    generate_key(other)
    forged = msgspec.structs.replace(read_report(release, key), manifest="0" * 32)
    wrong = {
        "was altered": (good.replace(b"passed", b"Passed", 1), release.report),
        "is of other weights": (None, keep_report(forged, key)),
        "is not signed by the key": (None, keep_report(read_report(release, key), other)),
        "is not in": (None, None),
    }
    for why, (data, report) in wrong.items():
        store.put(name, data or good)
        with two.site.engine.begin() as connection:
            connection.execute(sa.update(schema.releases).values(report=report))
        with pytest.raises(UserError, match=why):
            operations.start(two.site, first.manifest.digest, 0)
    assert two.held() == {}
    with two.site.engine.begin() as connection:
        connection.execute(sa.update(schema.releases).values(report=release.report))
    assert operations.start(two.site, first.manifest.digest, 0).stage is ReleaseStage.RELEASED


def test_the_first_release_needs_a_suite_and_has_to_clear_the_floor(two: Site) -> None:
    first = published(two, 0, FIRST)
    config = two.site.config.model_copy(update={"gate": two.site.config.gate.model_copy(update={"suites": ()})})
    with pytest.raises(UserError, match=r"nothing is released without a frozen suite.* gate.suites"):
        play_gate(operations.ReleaseSite(config, two.site.engine), first, passes, replayed, print)
    assert two.site.read().states == ()
    nothing = play_gate(two.site, first, lambda *_: play([(False,)] * 40), replayed, print)
    assert nothing.failed is not None
    assert nothing.failed.reason == "0.0% of 40 tasks pass, at least 5.0% must"
    assert not above_floor("", results([(True,)] + [()] * 39), 0.05).passed, "lost tasks do not pass"
    assert above_floor("", results([(True, False)] * 4 + [(False, False)] * 36), 0.05).passed
    with pytest.raises(UserError, match="has not passed the gate"):
        operations.start(two.site, first.manifest.digest, 0)


def test_a_worse_version_is_refused_and_cannot_be_released(two: Site) -> None:
    play_gate(two.site, published(two, 0, FIRST), passes, replayed, print)
    out(two)
    found = published(two, 1, nudged(FIRST, 2))
    plays = {1: play([(True,)] * 40), 2: play([(True,)] * 8 + [(False,)] * 32)}
    report = play_gate(two.site, found, lambda release, _: plays[release.number], replayed, print)
    assert report.failed is not None
    assert report.failed.name == f"suite {TINY.name}"
    assert two.site.read().states[1].stage is ReleaseStage.REFUSED
    assert "not shown to be no worse by 40.0 points" in two.site.read().states[1].events[-1].reason
    with pytest.raises(UserError, match="has not passed the gate"):
        operations.start(two.site, found.manifest.digest, 1)
    with pytest.raises(UserError, match="version 0 is release 1, the current one"):
        play_gate(two.site, operations.candidate(two.site, str(two.trained), 0), passes, replayed, print)


def test_versions_that_each_lose_less_than_the_margin_are_held_against_the_anchor(two: Site) -> None:
    shares, tasks, of = (1.0, 0.74, 0.48, 0.22), 200, FIRST
    plays = {n: play([(k < share * tasks,) for k in range(tasks)]) for n, share in enumerate(shares, 1)}
    failed = []
    for version in range(4):
        report = play_gate(two.site, published(two, version, of), lambda r, _: plays[r.number], replayed, print)
        failed.append(None if report.failed is None else report.failed.name)
        if report.failed is None:
            out(two)
        of = nudged(of, version)
    assert failed == [None, None, None, f"suite {TINY.name}, anchor"]
    assert report.anchor == 1
    assert report.incumbent == 3
    again = play_gate(two.site, published(two, 4, of), lambda r, _: plays[min(r.number, 4)], replayed, print, True)
    assert again.failed is None  # the incumbent is the anchor now
    assert again.anchor == 3


def test_a_margin_that_the_suite_cannot_defend_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    with site(tmp_path, gate={"suites": [str(TINY)], "margin": 0.05}) as made:
        play_gate(made.site, published(made, 0, FIRST), passes, replayed, print)
        out(made)
        found = published(made, 1, nudged(FIRST, 2))
        said: list[str] = []
        why = r"cannot defend gate.margin = 0.05: 1 tasks of 1 functions, 1 samples each, defend 1; take"
        with pytest.raises(UserError, match=why):
            play_gate(made.site, found, passes, replayed, said.append)
        assert said == ["tiny: 1 tasks of 1 functions, 1 samples each, defend a margin of 100.0 points"]
        assert len(made.site.read().states) == 1


def test_integrity_finds_what_is_wrong(two: Site, tmp_path: Path) -> None:
    key = Path(two.options["signing_key"])
    other = tmp_path / "other"
    generate_key(other)
    found = published(two, 0, FIRST)
    assert integrity(found, key).passed
    assert "not by the key that is trusted" in integrity(found, other).reason
    nan = {name: t.clone() for name, t in FIRST.items()}
    nan["b"][3, 4] = math.nan
    bad = open_store(str(tmp_path / "nan"))
    with pytest.MonkeyPatch.context() as patch:  # the publisher refuses NaN itself
        patch.setattr("etude.weights.publisher._refuse_non_finite", lambda *_: None)
        Publisher(bad).publish(0, nan, (), {})
    hole = operations.candidate(two.site, str(tmp_path / "nan"), 0)
    assert integrity(hole, None).reason == "b holds NaN or infinity"
    step = StepRecord(action="go", good=1, mismatch_k2=0.3)
    drifted = published(two, 1, nudged(FIRST, 2), step=step)
    assert integrity(drifted, key).reason == "mismatch_k2 is 0.3, above 0.005"
    part = next((Path(tmp_path / "trained/payloads")).glob("00000001*"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert "altered" in integrity(drifted, key).reason


def test_a_run_whose_versions_begin_with_its_model_folder_is_released(
    two: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate and the stores of the clusters read the folder; what the servers get is whole."""
    monkeypatch.setattr(operations.ReleaseSite, "base", lambda self, store: FIRST)
    publisher, after = Publisher(open_store(str(two.trained)), of_folder=True), nudged(FIRST, 2)
    publisher.publish(0, FIRST, (), {})
    publisher.publish(1, after, (), {}, last=True)
    found = operations.candidate(two.site, str(two.trained), 1)
    assert "not at hand here" in integrity(found, None).reason
    assert integrity(found, None, lambda: FIRST).passed
    release = Release(
        number=1, store=found.store, version=1, manifest=found.manifest.digest, parent=None, anchor=None, report=None,
        window=None, at=0,
    )  # fmt: skip
    target = StoreTarget("one", Arm.CONTROL, str(two.trained.parent / "cluster"), (), release, 0)
    assert bring([target], None, two.site.base) == {}
    held = load(open_store(target.store), 0)[1]
    assert all(torch.equal(held[name], after[name]) for name in after)


def test_costs_are_bounded() -> None:
    from etude.live.release.gate import cost

    assert cost("cost", play([(True,)]), play([(True,)], turns=3.6), 1.25).passed
    dear = cost("cost", play([(True,)]), play([(True,)], sampled_tokens=140.0), 1.25)
    assert dear.reason == "of the incumbent's: sampled_tokens 1.40, turns 1.00, seconds 1.00; at most 1.25"
    assert not dear.passed
    assert not cost("cost", play([(True,)]), play([(True,)], seconds=90.0), 1.25).passed


def test_lost_tasks_are_no_pass() -> None:
    new = results([(True,)] * 15 + [()] * 5)
    assert compare_paired("suite", results([(True,)] * 20), new, 0.5, 0.05).reason == "5 of 20 tasks were lost"


def test_false_promotion_of_a_version_worse_by_the_margin() -> None:
    """At most 5 %: 16 or more of 200 have a probability below 1 in 20 at that rate."""
    assert false_promotions(np.random.default_rng(21), 200, samples=1) <= 15 / 200


@pytest.mark.slow
def test_false_promotion_with_several_samples() -> None:
    """As above; tasks of one function are alike."""
    assert false_promotions(np.random.default_rng(22), 400, samples=4) <= 28 / 400


def test_an_equal_version_passes_at_the_margin_that_the_suite_defends() -> None:
    """With probability 80 %: of 100, 68 or fewer have a probability below 1 in 200."""
    margin = defended_margin([2] * 125, 0.1)
    assert false_promotions(np.random.default_rng(23), 100, samples=1, margin=margin, worse=0.0) > 0.68


def answers(count: int, shows: set[str], every: int = 1, tokens: int = 10, text: str = "done") -> list[Answer]:
    return [
        Answer([1] * tokens, [0.0] * tokens, text, frozenset(shows if number % every == 0 else ()))
        for number in range(count)
    ]


def test_replay_bands_are_two_sided() -> None:
    same = answers(200, {"edit"})
    assert compare_answers(same, same, 0.01, ()).passed
    asks = compare_answers(answers(200, {"question"}, every=4), answers(200, set()), 0.01, ())
    assert asks.reason == "the rate of question changed by +25.0 points"
    fewer = compare_answers(answers(200, {"edit"}, every=2), same, 0.01, ())
    assert fewer.reason == "the rate of edit changed by -50.0 points"
    short = compare_answers(answers(200, {"edit"}, tokens=5), same, 0.01, ())
    assert short.reason == "answers have 5 tokens instead of 10"
    assert "2.00 nats per token" in compare_answers(same, same, 2.0, ()).reason
    leak = compare_answers(answers(3, set(), text="the word is xyzzy-7"), None, math.nan, ("xyzzy-7", "other"))
    assert leak.reason == "1 of 2 planted strings were said"
    assert not leak.passed


def consented(made: Site, request: str, number: int, reason: str = "") -> None:
    """A turn of a consenting account, in the log as the gateway writes it."""
    folder = Path(made.options["folder"])
    keys, store = Accounts(folder), open_blobs(folder)
    account = keys.name("acme", f"user {number}")
    messages = [{"role": "user", "content": request}]
    prompt = np.array(renderer_for(find_model("nano"), "auto", {}).prompt(messages), "<i4")
    content = TurnContent(
        dialect="chat",
        request=msgspec.json.encode({"messages": messages}),
        response=b"{}",
        prompt_ids=prompt.tobytes(),
        ids=np.array([5, 6], "<i4").tobytes(),
        logprobs=np.zeros(2, "<f4").tobytes(),
        temperature=1.0,
        top_p=1.0,
    )
    with made.site.engine.begin() as connection:
        at = journal.stamp(connection, 2)
        secret = keys.keys(connection, {account: "acme"}, at)[account]
        blob = new_blob(account)
        store.put(blob, seal(secret, msgspec.msgpack.encode(content), blob))
        session = new_session(account=account, opened=at)
        spans = (VersionSpan(low=0, high=2, version=0),)
        turn = new_turn(session.id, spans=spans, sampled_tokens=2, blob=blob, at=at + 1, reason=reason)
        journal.add(connection, [session, turn])


def test_turns_without_tokens_take_no_place_among_the_prefixes(two: Site) -> None:
    """Of other servers' answers the text is kept, and they may be most turns."""
    for number in range(2):
        consented(two, f"Fix {number}.", number)
    for number in range(2, 6):
        consented(two, f"Fix {number}.", number, reason=("no_tokens", "scrubbed")[number % 2])
    assert [prefix.messages[-1].text for prefix in prefixes(two.site, 2)] == ["Fix 1.", "Fix 0."]


@pytest.mark.parametrize(
    ("served", "why"),
    [
        (0, r"a server of the gate failed, EngineError .*: look at its log"),
        (7, r"of the gate does not follow .*/of-the-gate: it serves version 7"),  # the same content of another store
    ],
)
def test_a_server_of_the_gate_that_fails_is_named(
    two: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: int, why: str
) -> None:
    """The loop tries the gate again."""
    monkeypatch.setattr(player, "_FOLLOW_SECONDS", 0.5)
    play_gate(two.site, published(two, 0, FIRST), passes, replayed, print)
    release = two.site.read().states[-1].release
    told = {"version": served, "digest": release.manifest}
    app = Starlette(routes=[Route("/health", lambda _: JSONResponse(told))])  # and no other route
    with answering(app) as url:
        gate = two.site.config.gate.model_copy(update={"urls": (url,), "store": str(tmp_path / "of-the-gate")})
        config = two.site.config.model_copy(update={"gate": gate})

        async def play(of: Player) -> None:
            async with of._served(release) as client:
                await client.generate(GenerateRequest(ids=[1], max_tokens=1), 5.0)

        with Player(operations.ReleaseSite(config, two.site.engine)) as made, pytest.raises(UserError, match=why):
            asyncio.run(play(made))


def test_the_servers_of_the_gate_are_no_clusters(tmp_path: Path) -> None:
    more = {"gate": {"urls": ["http://b:1/"], "store": str(tmp_path / "gate")}}
    with pytest.raises(UserError, match=r"gate\.urls are the gate's alone, and http://b:1 is a cluster's"):
        live_config(tmp_path, "http://a:1", "http://b:1", **more)


@pytest.fixture(params=["started", "urls", pytest.param("vllm", marks=needs_vllm)])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RLConfig, dict[str, Any]]]:
    """A recipe, and options of the gate: an engine is started for each version, or servers follow the gate's store."""
    options = {"turns": 3, "tokens": 256, "context": 1024, "seconds": 60}
    inference = (
        {"engine": "vllm", "python": PYTHON, "max_batch": 8, "args": ["--enforce-eager"]}
        if request.param == "vllm"
        else {"threads": 1}
    )
    table = {"stage": "rl", "model": {"path": "nano"}, "rollout": options, "inference": inference}
    recipe = validate(RLConfig, table | {"tasks": {"dataset": str(tmp_path / "suite")}}, "test")
    if request.param != "urls":
        yield recipe, {}
        return
    store = tmp_path / "of-the-gate"
    publish_folder(open_store(str(store)), find_model("nano"))
    source = WeightSource(weights=str(store))
    child = spawn_engine(
        ServerConfig(model=str(find_model("nano")), port=0, threads=1, cache_mb=64, source=source), tmp_path
    )
    try:
        yield recipe, {"urls": [engine_url(child, tmp_path)], "store": str(store)}
    finally:
        child.stop(10)


@pytest.mark.release
def test_the_whole_gate_with_boxes_and_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: tuple[RLConfig, dict[str, Any]]
) -> None:
    """Weights that moved by about a unit in the last place pass; weights with noise are refused by what they answer.
    The model solves none of these tasks, so the floor is taken away."""
    recipe, options = engines
    lowered = GatePart(name="floor on tiny", passed=True, reason="")
    monkeypatch.setattr(gate, "above_floor", lambda name, tasks, floor: lowered)
    with site(
        tmp_path,
        gate={"suites": [str(widened(tmp_path / "suite" / "tiny", 12))], "margin": 0.8, "cost": 3.0, "replay": 8}
        | options,
    ) as made:
        nano = find_model("nano")
        store = open_store(str(made.trained))
        publish_folder(store, nano)
        play_gate(made.site, operations.candidate(made.site, str(made.trained), 0), passes, replayed, print)
        out(made)
        for number in range(8):
            consented(made, f"Fix the function that adds {number} to a list.", number)
        plant(Path(made.options["folder"]), 3)
        with Player(made.site, recipe) as player:
            tensors_ = load(store, 0)[1]
            moved = {name: tensor * 1.005 for name, tensor in tensors_.items()}
            generator = torch.Generator().manual_seed(1)
            noisy = {
                name: t + 1.5 * t.float().std().to(t.dtype) * torch.randn(t.shape, generator=generator).to(t.dtype)
                if t.dim() > 1
                else t
                for name, t in tensors_.items()
            }
            reports = []
            for version, weights in ((1, moved), (2, noisy)):
                publisher = Publisher(store, model=newest_manifest(store).model)
                publisher.resume(newest_manifest(store), load(store, version - 1)[1])
                publisher.publish(version, weights, (), {}, last=True)
                found = operations.candidate(made.site, str(made.trained), version)
                reports.append(play_gate(made.site, found, player.measure, player.replay, print))
    near, far = reports
    assert near.failed is None
    assert {part.name for part in near.parts} == {"integrity", "floor on tiny", "suite tiny", "cost on tiny", "replay"}
    replay = near.parts[-1]
    assert replay.figures["prefixes"] == 8
    assert abs(replay.figures["kl_to_parent"]) < 0.1  # nearly the same weights
    assert far.failed is not None
    assert not far.parts[-1].passed
    assert far.parts[-1].figures["kl_to_parent"] > 0.5
