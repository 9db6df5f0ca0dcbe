"""vLLM as the engine of a run, by a fake that speaks its protocol (`tests/helpers/fake_vllm.py`).

`tests/run/test_vllm.py` has whole runs, and the real server.
"""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from etude.errors import UserError
from etude.models.files import expert_layers
from etude.models.loading import load_model, named_tensors
from etude.protocol.backends import EngineClient, EngineError
from etude.protocol.backends.client import EngineLost
from etude.protocol.backends.vllm import KeptKeys, VllmBackend, VllmServer, WeightsOf
from etude.protocol.backends.vllm_answers import body_of, spans_to_versions
from etude.protocol.wire import GenerateRequest
from etude.records import joined
from etude.run.state import Engines
from etude.store import open_store
from etude.weights.publisher import Publisher
from tests.helpers.cut_link import cut_link
from tests.helpers.fake_vllm import fake_vllm
from tests.helpers.faulty_link import linked

NANO = Path("models/nano").absolute()
SECONDS = 300.0
IDS = list(range(100, 150))


@pytest.fixture(scope="module")
def server():
    with fake_vllm(NANO) as (url, fake):
        yield url, fake


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The store of three versions, each a little different, and their digests."""
    store = open_store(str(tmp_path_factory.mktemp("store") / "weights"))
    publisher, tensors = Publisher(store), named_tensors(load_model(NANO, dtype=torch.bfloat16))
    digests = []
    for version in range(3):
        digests.append(publisher.publish(version, tensors, (), {}, last=version == 2).digest)
        tensors["model.norm.weight"] += 0.125
    return store, digests


def backend(store, **options) -> VllmBackend:
    return VllmBackend("run", WeightsOf(store.url), **{"context": 512, "expert_layers": expert_layers(NANO), **options})


def test_requests_swaps_versions_experts_and_scores(server, published):
    """Two versions come while eight requests run: none is dropped, versions are cut where the step trace says."""
    (url, fake), (store, digests) = server, published

    async def play():
        async with EngineClient([url], backend=backend(store)) as client:
            await client.check(url)
            await client.bring(url, 0)
            before = await client.health(url)
            requests = [
                GenerateRequest(ids=IDS, max_tokens=300, seed=n, session=f"s{n % 4}", routes_from=10 if n else None)
                for n in range(8)
            ]
            fake.token_seconds = 0.01  # 24 s for all of them, so that both versions come while they run
            running = [asyncio.create_task(client.generate(request, SECONDS)) for request in requests]
            for version in (1, 2):
                while (await client.health(url))["running"] < 8 and not any(task.done() for task in running):
                    await asyncio.sleep(0.01)
                await client.bring(url, version)
            fake.token_seconds = 0.0
            late = await client.generate(GenerateRequest(ids=IDS, max_tokens=2, session="late"), SECONDS)
            kept = await client.generate(GenerateRequest(ids=IDS, max_tokens=2, session="s1"), SECONDS)
            score = await client.score(url, [IDS, IDS[:9]], SECONDS)
            return before, await asyncio.gather(*running), late, kept, score, await client.health(url)

    before, generations, late, kept, score, health = asyncio.run(play())
    assert (before["version"], before["digest"]) == (0, digests[0])
    assert (health["version"], health["digest"]) == (2, digests[2])
    assert health["generated_tokens"] > 0
    assert health["busy_seconds"] > 0

    assert [version for version, _ in fake.trace] == [0, 1, 2]
    flips = [counts for _, counts in fake.trace[1:]]
    assert all(len(counts) == 8 for counts in flips), "the requests were to run while versions came"
    cut = sorted([flips[0][key], flips[1][key]] for key in flips[0])
    assert cut == sorted([g.versions.index(1), g.versions.index(2)] for g in generations)
    assert all(g.versions == sorted(g.versions) and len(g.ids) == 300 for g in generations)
    assert {g.kv_version for g in generations} == {0}

    assert generations[0].routes is None, "experts are for those who ask"
    routes = generations[1].routes
    assert (routes.first, routes.end, routes.layers, routes.slots, routes.wide) == (10, len(IDS) + 299, 3, 2, False)
    assert (np.diff(np.sort(routes.array())) > 0).all(), "a layer without experts is none of those that came"

    assert (late.kv_version, late.cached_tokens) == (2, 0), "a new session sees no older keys"
    assert kept.kv_version == 0
    assert kept.cached_tokens > 0, "an old one keeps its own"
    assert len(set(fake.salts) - {fake.salts[0]}) == 2, "the trial's, and those of sessions begun under 0 and 2"
    assert (score.version, score.digest) == (2, digests[2])
    assert [len(logprobs) for logprobs in score.logprobs] == [49, 8]


def test_probes_show_an_error_of_decoding(server, published, monkeypatch):
    (url, fake), (store, _) = server, published

    async def play():
        async with EngineClient([url], backend=backend(store)) as client:
            await client.bring(url, 2)
            passed = await client.score(url, [IDS, IDS[:9]], SECONDS)
            decoded = await client.score(url, [IDS, IDS[:9]], SECONDS, decoded=True)
            monkeypatch.setattr(fake, "off", -0.5)
            return passed, decoded, await client.score(url, [IDS, IDS[:9]], SECONDS, decoded=True)

    passed, decoded, wrong = (scores.logprobs for scores in asyncio.run(play()))
    for i, count in enumerate((25, 4)):  # half of each
        # Float32: decoding steps and a whole pass sum in another order.
        assert np.allclose(decoded[i], passed[i], atol=1e-4)
        error = np.subtract(wrong[i], passed[i])
        assert np.allclose(error[-count:], -0.5, atol=1e-4)
        assert not error[:-count].any()


def test_an_answer_in_parts_is_that_of_one_piece(server, published):
    url, _ = server

    async def play():
        async with EngineClient([url], backend=backend(published[0])) as client:
            await client.bring(url, 2)
            parts, request = [], GenerateRequest(ids=IDS, max_tokens=12, seed=3, session="a", routes_from=0)
            every = msgspec.structs.replace(request, part_seconds=0.0)
            return await client.generate(every, SECONDS, parts.append), parts, await client.generate(request, SECONDS)

    streamed, parts, whole = asyncio.run(play())
    assert len(parts) > 2
    assert joined(parts) == streamed
    assert streamed.ids == whole.ids
    assert streamed.versions == whole.versions == [2] * 12
    assert streamed.routes == whole.routes


def lost(server, published, request, *, cut_at: int, on_way=None):
    """The undisturbed turn; the turn whose server is lost after so many parts; its parts, the tokens that came before,
    and how often it went on elsewhere. `on_way(client, link, number)` is called after part `number`."""
    url, fake = server

    async def play():
        async with EngineClient([url], backend=backend(published[0])) as client:
            await client.bring(url, 2)
            whole = await client.generate(request, SECONDS)
        async with (
            cut_link(url) as link,
            EngineClient([link.url, url], backend=backend(published[0])) as client,
        ):
            for each in (link.url, url):
                await client.bring(each, 2)
            parts, there = [], 0

            def on_part(part):
                nonlocal there
                parts.append(part)
                there += len(part.ids) * (not client.resumed)
                if on_way is not None:
                    on_way(client, link, len(parts))
                elif len(parts) == cut_at:
                    link.cut()

            fake.token_seconds = 0.005
            turn = await client.generate(request, SECONDS, on_part)
            return whole, turn, parts, there, client.resumed

    try:
        return asyncio.run(play())
    finally:
        fake.token_seconds = 0.0


def test_a_turn_that_is_lost_in_the_middle_goes_on_from_its_tokens(server, published):
    """Greedy, as vLLM's draws depend on where a request begins. Experts come with the end alone: the server that goes
    on has computed them all."""
    request = GenerateRequest(
        ids=IDS, max_tokens=60, temperature=0.0, seed=3, session="m", routes_from=4, part_seconds=0.01
    )
    whole, turn, parts, there, resumed = lost(server, published, request, cut_at=3)
    assert (turn.ids, turn.versions, turn.finish_reason) == (whole.ids, [2] * 60, "length")
    # Float32: steps of decoding and passes over a prompt sum in another order.
    assert np.allclose(turn.logprobs, whole.logprobs, atol=1e-4)
    assert (turn.routes.first, turn.routes.end) == (4, len(IDS) + 60 - 1)
    assert all(part.routes is None for part in parts[:-1])
    assert joined(parts) == turn
    assert 3 <= there < 60
    assert resumed == 1


def test_a_process_that_does_not_update_the_server_believes_no_token_before_the_last(server, published):
    """A player: the swap that comes in the middle of its turn is another process's, so it cannot see it."""
    url, _ = server
    request = GenerateRequest(ids=IDS, max_tokens=40, temperature=0.0, session="n", part_seconds=0.0)

    async def play():
        async with (
            EngineClient([url], backend=backend(published[0])) as controller,
            EngineClient([], backend=backend(published[0])) as player,
        ):
            await controller.bring(url, 2)
            player.serve(url, 2)
            parts = []
            return await player.generate(request, SECONDS, parts.append), parts

    turn, parts = asyncio.run(play())
    assert parts == [turn]
    assert turn.versions == [2] * 40


def test_the_rest_of_a_turn_draws_other_numbers_than_its_beginning():
    short = GenerateRequest(ids=[1, 2], max_tokens=9, seed=2**63 - 1)
    longer = msgspec.structs.replace(short, ids=[1, 2, 3])
    seeds = [body_of(request)["sampling_params"]["seed"] for request in (short, longer)]
    assert seeds == [1, 2]


def test_tokens_whose_version_is_uncertain_are_sampled_again(server, published, monkeypatch):
    """A server that names no version, as one that was started anew does; and tokens that come after a swap has begun,
    which leave with the last event only."""
    request = GenerateRequest(ids=IDS, max_tokens=40, temperature=0.0, session="u", part_seconds=0.0)

    def swapped(client, link, number):
        if number == 2:
            client.backend._at(link.url).swaps += 2
            asyncio.get_running_loop().call_later(0.1, link.cut)

    whole, turn, parts, there, resumed = lost(server, published, request, cut_at=0, on_way=swapped)
    assert (turn.ids, turn.versions, resumed) == (whole.ids, [2] * 40, 1)
    assert there == sum(len(part.ids) for part in parts[:2]) < 40

    async def play():
        async with EngineClient([server[0]], backend=backend(published[0])) as client:
            await client.bring(server[0], 2)
            parts = []
            monkeypatch.setattr(client.backend, "_is_fed", unfed)
            await client.generate(request, SECONDS, parts.append)
            return parts

    async def unfed(*_):
        return False

    assert len(asyncio.run(play())) == 1


@pytest.mark.parametrize("fault", ["lose", "refuse", "cut"])
def test_turns_of_a_lost_server_are_played_by_another(server, published, fault):
    url, _ = server

    async def play(broken: str, link) -> tuple:
        link.fault = lambda method, path: fault if path.endswith("/generate") else ""
        async with EngineClient([broken, url], backend=backend(published[0])) as client:
            for each in (broken, url):
                await client.bring(each, 2)
            request = GenerateRequest(ids=IDS, max_tokens=8, seed=3, session="x")
            first = await client.generate(request, SECONDS)
            seen = len(link.seen)
            return first, await client.generate(request, SECONDS), len(link.seen) - seen

    with linked(url) as (broken, link):
        first, second, more = asyncio.run(play(broken, link))
    assert first.ids == second.ids
    assert len(first.ids) == 8
    assert more == 0, "the session stays where it is served"


def test_turns_at_a_silent_server_are_taken_from_it(server, published):
    url, _ = server

    async def play(silent: str, link) -> list:
        link.fault = lambda method, path: "stall" if path.endswith("/generate") else ""
        async with EngineClient([silent, url], backend=backend(published[0])) as client:
            await client.bring(silent, 2)
            await client.bring(url, 2)
            requests = [GenerateRequest(ids=IDS, max_tokens=4, seed=n, session=f"{n}") for n in range(4)]
            running = [asyncio.create_task(client.generate(request, SECONDS)) for request in requests]
            while not any(path.endswith("/generate") for _, path, _ in link.seen):
                await asyncio.sleep(0.01)
            client.lose(silent)
            return await asyncio.gather(*running)

    with linked(url) as (silent, link):
        answers = asyncio.run(play(silent, link))
    assert [len(answer.ids) for answer in answers] == [4] * 4


def test_one_server_that_is_lost_is_an_error_at_the_deadline(published):
    async def play() -> None:
        async with EngineClient(["http://127.0.0.1:9"], backend=backend(published[0])) as client:
            await client.generate(GenerateRequest(ids=IDS, max_tokens=4), 0.5)

    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9 could not be reached for 0\.5 seconds: ConnectError"):
        asyncio.run(play())


@pytest.mark.parametrize(
    ("table", "values", "why"),
    [
        ("model_config", {"logprobs_mode": "raw_logprobs"}, "start vLLM with --logprobs-mode processed_logprobs"),
        ("model_config", {"max_model_len": 256}, r"takes 256 tokens, rollout\.context is 512: start .*len 512"),
        ("model_config", {"quantization": "fp8"}, "serves quantised weights"),
        (
            "parallel_config",
            {"pipeline_parallel_size": 2},
            "has pipeline parallelism, which etude does not feed: start",
        ),
        ("parallel_config", {"data_parallel_size": 2}, "has data parallelism"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "has context parallelism"),
        ("parallel_config", {"enable_expert_parallel": True}, "has expert parallelism"),
        ("parallel_config", {"worker_extension_cls": ""}, "cannot be updated: start vLLM with --worker-extension-cls"),
        ("speculative_config", {"method": "ngram"}, "speculates, which is not tried in a run"),
    ],
)
def test_a_server_that_cannot_play_is_refused_by_name(server, published, table, values, why):
    url, fake = server

    async def check() -> None:
        async with EngineClient([url], backend=backend(published[0])) as client:
            await client.check(url)

    fake.configuration = {table: values}
    try:
        with pytest.raises(UserError, match=why):
            asyncio.run(check())
    finally:
        fake.configuration = {}


def test_answers_that_etude_cannot_believe_are_errors(server, published):
    """Experts that do not come, a version per token that is not told, other log-probabilities than tokens."""
    url, fake = server
    answer = fake._answer

    def ask(change, **options) -> None:
        def changed(*arguments):
            whole = answer(*arguments)
            change(whole["choices"][0])
            return whole

        async def once() -> None:
            async with EngineClient([url], backend=backend(published[0], **options)) as client:
                await client.generate(GenerateRequest(ids=IDS, max_tokens=2, routes_from=0), SECONDS)

        fake._answer = changed
        try:
            asyncio.run(once())
        finally:
            del fake._answer

    with pytest.raises(EngineError, match="returns no experts: start it with --enable-return-routed-experts"):
        ask(lambda choice: choice.update(routed_experts=None))
    with pytest.raises(EngineError, match="are no array of this model's"):
        ask(lambda choice: None, expert_layers=[7])
    with pytest.raises(EngineError, match="does not say which weights sampled each of 2 tokens"):
        ask(lambda choice: choice.update(weight_versions=None))
    with pytest.raises(EngineError, match="log-probabilities of other tokens than it sampled"):
        ask(lambda choice: choice["logprobs"]["content"].pop())
    with pytest.raises(EngineError, match="ended a turn for 'error'"):
        ask(lambda choice: choice.update(finish_reason="error"))


def test_a_server_that_was_started_anew_is_not_believed(server, published):
    """Its tokens are those of the checkpoint that it was started with."""
    url, fake = server
    names: dict[int, str] = {}

    async def play() -> int:
        async with EngineClient([url], backend=backend(published[0])) as client:
            await client.bring(url, 2)
            names.update(fake._names)
            fake._names = dict.fromkeys(names, "default")
            with pytest.raises(EngineError, match="has been started anew, without the weights of the run"):
                await client.generate(GenerateRequest(ids=IDS, max_tokens=2), 2.0)
            return int((await client.health(url))["version"])

    try:
        assert asyncio.run(play()) == -1
    finally:
        fake._names = names


@pytest.mark.parametrize("how", ["forget", "close", "follow", "lost"])
def test_an_update_that_is_cancelled_leaves_no_server_paused(published, monkeypatch, how):
    """In the middle of a swap, of the settling of an earlier one, and where an answer of the server is lost."""
    real, begun = VllmServer.ask, asyncio.Event()
    stopped = "etude_digest" if how == "follow" else "etude_swap"

    async def ask(self, method, *arguments):
        answers = await real(self, method, *arguments)
        if method == stopped and not begun.is_set():
            begun.set()
            if how == "lost":
                raise EngineLost("the answer was lost")
            await asyncio.sleep(0.1)
        return answers

    async def play(url: str, fake) -> None:
        store = published[0]
        async with EngineClient([url], backend=backend(store)) as client:
            await client.bring(url, 0)
            if how == "follow":
                fake.engine.pause("keep", clear_cache=False)
                client.backend = backend(store)
            monkeypatch.setattr(VllmServer, "ask", ask)
            if how == "lost":
                with pytest.raises(EngineLost):
                    await client.bring(url, 2)
                await client.bring(url, 2)
            else:
                engines = Engines([], client, None)
                state = engines.add(url, "us-0")
                state.bringing = asyncio.create_task(client.bring(url, 2))
                await begun.wait()
                if how == "forget":
                    engines.forget(state)
                await engines.aclose()
                client.serve(url)
            assert not fake.engine.is_paused
            assert fake.engine.version == (0 if how == "follow" else 2)
            assert len((await client.generate(GenerateRequest(ids=IDS, max_tokens=2), SECONDS)).ids) == 2

    with fake_vllm(NANO) as (url, fake):
        asyncio.run(play(url, fake))


def test_spans_cover_every_token_once():
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    assert spans_to_versions(spans, 3, "u") == [4, 4, 5]
    assert spans_to_versions([{"version": "default", "start": 0, "end": 1}], 1, "u") == [-1]
    for wrong, count in ((spans, 4), (spans[1:], 1), (None, 1)):
        with pytest.raises(EngineError, match="does not say which weights"):
            spans_to_versions(wrong, count, "u")


def test_salts_are_of_the_version_under_which_a_session_began():
    kept = KeptKeys("run-1")
    assert [kept.began(session, version) for session, version in (("a", 3), ("a", 5), ("b", 5), (None, 6))] == [
        3,
        3,
        5,
        6,
    ]
    assert kept.salt(3) == "run-1-3"
    assert not set(kept.salt(3)) & set("@/\\\0"), "vLLM refuses these"


def test_a_dead_engine_is_lost_not_healthy(published):
    async def look(link_url: str) -> None:
        async with EngineClient([link_url], backend=backend(published[0])) as client:
            await client.health(link_url)

    with linked("http://127.0.0.1:9") as (url, link):
        link.fault = lambda method, path: "refuse"
        with pytest.raises(EngineError, match=r"EngineLost .*vLLM's engine is dead"):
            asyncio.run(look(url))
    assert issubclass(EngineLost, EngineError)
