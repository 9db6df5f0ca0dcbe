"""What a vLLM server needs of etude, as far as it needs no vLLM: its layout, its worker's methods, and who calls them.

The routes below are those of vLLM 0.32's development mode; behind them are the worker's real methods, a real receiver
and real versions. `test_vllm.py` has the real server.
"""

import threading
import time
from contextlib import suppress

import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from etude.errors import UserError
from etude.inference.vllm.feed import feed
from etude.inference.vllm.layout import check_plain, live_tensors
from etude.inference.vllm.worker import Following, WorkerExtension
from etude.inference.vllm.workers import Workers
from etude.models.loading import load_model, named_tensors
from etude.protocol.backends.vllm import NotLive
from etude.store import open_store
from etude.weights.adapters import base_schema
from etude.weights.manifest import newest_manifest
from etude.weights.payloads import DamagedVersion, PayloadSource
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver, WeightsMismatch
from etude.weights.slabs import Sliced, counted, counted_elements, patterns
from etude.weights.ulpd.chunk_grid import schema_of
from etude.weights.ulpd.digest import digest_text, weights_digest
from tests.helpers.feeder import Feeder
from tests.helpers.http_apps import answering
from tests.helpers.small_tensors import nudged
from tests.helpers.stacked_model import EXPERTS, WORDS, Stacked, checkpoint, files
from tests.helpers.tiny_models import save_random_model
from tests.weights.test_adapters import OF_EXPERTS, Publishing

PUBLISHED = schema_of(checkpoint(0))


# --- layout ---------------------------------------------------------------------------------------------------------


def held(live: dict[str, Sliced]) -> dict[str, torch.Tensor]:
    """Whole tensors in their memory."""
    assert all(part.is_whole for part in live.values())
    return {name: part.slabs[0].memory.view(part.shape) for name, part in live.items()}


def watched(models: list[Stacked]) -> list[dict[str, Sliced]]:
    """What each of the workers with these models holds and counts."""
    lives = [live_tensors(model, PUBLISHED) for model in models]
    return [counted(live, [patterns(one) for one in lives], rank) for rank, live in enumerate(lives)]


def assert_loaded(model: Stacked, tensors: dict[str, torch.Tensor]) -> None:
    """The parameters are those that the model's loader makes of the tensors."""
    loaded = type(model)(rank=model.rank, count=model.count)
    loaded.load_weights(tensors.items())
    parameters = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameters[name], parameter), name


def test_stacked_weights_are_found_under_their_published_names():
    model = Stacked(seed=3)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    live = held(live_tensors(model, PUBLISHED))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert weights_digest(live) == weights_digest(checkpoint(3))
    assert live["experts.gate_up"].data_ptr() == model.w13.data_ptr()
    live["v"].fill_(7)
    assert (model.qkv[9:] == 7).all()
    assert torch.equal(model.qkv[:9], before["qkv"][:9])


def test_a_parameter_that_no_version_fills_is_refused():
    rest = {name: tensor for name, tensor in checkpoint(0).items() if name != "norm"}
    with pytest.raises(UserError, match=r"no published tensor fills norm; serve the model"):
        live_tensors(Stacked(), schema_of(rest))


def test_a_name_that_the_model_does_not_know_is_refused():
    more = checkpoint(0) | {"bias": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(UserError, match=r"does not load these weights \(KeyError: 'bias'\)"):
        live_tensors(Stacked(), schema_of(more))


class Halved(Stacked):
    """One of two GPUs: it has half of the words."""

    def _places(self, name, tensor):
        if name == "words":
            yield self.words.data[: WORDS // 2], tensor[: WORDS // 2]
        else:
            yield from super()._places(name, tensor)


class Turned(Stacked):
    """It keeps queries, keys and values transposed."""

    def _places(self, name, tensor):
        for there, part in super()._places(name, tensor):
            if name in ("q", "k", "v"):
                there = there.view(-1).view(part.shape[1], part.shape[0]).T
            yield there, part


class Swapped(Stacked):
    """Ups before gates, as some kernels want them."""

    def _places(self, name, tensor):
        if name == "experts.gate_up":
            for e in range(EXPERTS):
                gates, ups = (self._own(part, 0) for part in tensor[e].chunk(2))
                yield self.w13.data[e, len(ups) :], gates
                yield self.w13.data[e, : len(ups)], ups
        else:
            yield from super()._places(name, tensor)


@pytest.mark.parametrize("model", [Stacked, Turned, Swapped])
@pytest.mark.parametrize("count", [1, 2])
def test_single_elements_are_written_wherever_the_loader_puts_them(tmp_path, model, count):
    models = [model(1, rank, count) for rank in range(count)]
    store, current, lives = open_store(str(tmp_path / "weights")), checkpoint(2), watched(models)
    receivers, publisher = [Receiver(store, live) for live in lives], Publisher(store)
    for version in range(4):
        manifest = publisher.publish(version, current, (), {})
        shares = []
        for receiver in receivers:
            update = receiver.poll()
            assert update is not None
            receiver.write(update)
            shares.append(receiver.digest(update.staged))
            receiver.commit(update)
        assert digest_text(sum(shares)) == manifest.digest
        for one in models:
            assert_loaded(one, current)
        current = nudged(current, version)


class Cast(Stacked):
    """Its loader makes another tensor first, so that nobody can say where an element came from."""

    def load_weights(self, weights):
        return super().load_weights((name, tensor * 1) for name, tensor in weights)


class Twice(Stacked):
    """It keeps the norm a second time, where words are padded."""

    def _places(self, name, tensor):
        yield from super()._places(name, tensor)
        if name == "norm":
            yield self.words.data[-1], tensor


class Spread(Stacked):
    """It keeps each element of the norm at two places."""

    def _places(self, name, tensor):
        if name == "norm":
            yield self.words.data[-2:], tensor.expand(2, -1)
        else:
            yield from super()._places(name, tensor)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Halved, "has 30 of 60 elements of words"),
        (Twice, "has some elements of norm in several places"),
        (Spread, "norm lies in several places"),
        (Cast, "does not copy weights as they are"),
    ],
)
def test_a_layout_that_does_not_hold_each_element_once_is_refused(model, why):
    served = model()
    with pytest.raises(UserError, match=why):
        Workers(0, 1).counted(lambda: live_tensors(served, PUBLISHED))
    assert not any(parameter.any() for parameter in served.parameters())


def test_weights_that_a_kernel_rearranged_are_noticed():
    model = Stacked(seed=5)
    check_plain(model, files(5).items())
    model.w13.data.copy_(model.w13.data.flip(1))
    with pytest.raises(UserError, match="rearranged its weights"):
        check_plain(model, files(5).items())


# --- the worker's methods behind vLLM's routes ----------------------------------------------------------------------


class Vllm:
    """The routes, and what was asked for in order."""

    def __init__(self, store, count: int = 1, seed: int = 1):
        self.models = [Stacked(seed, rank, count) for rank in range(count)]
        lives = watched(self.models)
        whole = {n: sum(counted_elements(live[n]) for live in lives) for n in lives[0]}
        self.workers = [WorkerExtension() for _ in range(count)]
        for worker, model, live in zip(self.workers, self.models, lives, strict=True):
            receiver = Receiver(store, live, PayloadSource(store, folder=lambda: whole))
            worker._etude = Following((store.url, "", ""), model, receiver)
        self.calls: list[str] = []
        self.paused = False
        self.weight_version = "default"
        self.holding = 0  # tries of a reset for which keys are still held

    async def rpc(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.calls.append(body["method"])
        return JSONResponse({"results": [getattr(worker, body["method"])(*body["args"]) for worker in self.workers]})

    async def pause(self, request: Request) -> JSONResponse:
        assert request.query_params["mode"] == "keep"
        self.paused = True
        return self._done("pause")

    async def resume(self, request: Request) -> JSONResponse:
        self.paused = False
        return self._done("resume")

    async def reset(self, request: Request) -> JSONResponse:
        assert request.query_params["reset_running_requests"] == "true"
        self.calls.append("reset")
        self.holding -= 1
        return JSONResponse({"success": self.holding < 0})

    async def named(self, request: Request) -> JSONResponse:
        self.weight_version = (await request.json())["new_version"]
        return self._done("named")

    async def is_paused(self, request: Request) -> JSONResponse:
        return JSONResponse({"is_paused": self.paused})

    async def weight_info(self, request: Request) -> JSONResponse:
        return JSONResponse({"weight_version": self.weight_version})

    def _done(self, what: str) -> JSONResponse:
        self.calls.append(what)
        return JSONResponse({})

    def app(self) -> Starlette:
        posts = {
            "/collective_rpc": self.rpc,
            "/pause": self.pause,
            "/resume": self.resume,
            "/reset_prefix_cache": self.reset,
            "/update_weight_version": self.named,
        }
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
        return Starlette(routes=[*routes, Route("/is_paused", self.is_paused), Route("/weight_info", self.weight_info)])


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "weights"))


@pytest.fixture(params=[1, 2])
def vllm(store, request):
    """A server of one worker, and of two."""
    return Vllm(store, request.param)


@pytest.fixture
def two(store):
    """A server of two workers."""
    return Vllm(store, 2)


def publish(store, count: int, of_folder: bool = False):
    """Manifests and tensors of versions 0 to count - 1; `of_folder`: the first is what a server loads."""
    publisher, made, manifests = Publisher(store, of_folder=of_folder), [checkpoint(1 if of_folder else 2)], []
    for version in range(count):
        manifests.append(publisher.publish(version, made[-1], (), {}))
        made.append(nudged(made[-1], version))
    return manifests, made


def assert_serves(vllm: Vllm, tensors: dict[str, torch.Tensor]) -> None:
    for model in vllm.models:
        assert_loaded(model, tensors)


@pytest.mark.parametrize("of_folder", [False, True])
def test_feed_brings_a_server_to_the_newest_version(store, vllm, of_folder):
    lines = []
    manifests, made = publish(store, 3, of_folder)
    with answering(vllm.app()) as url:
        assert feed(url, store, once=True, deadline=60, say=lines.append) == 2
    assert_serves(vllm, made[2])
    assert lines[0] == f"{url} serves no version of this store yet"
    assert f"version 2 is live, digest {manifests[2].digest}, pause" in lines[1]
    assert [call for call in vllm.calls if call != "etude_status"] == [
        "etude_open", "etude_stage", "pause", "etude_swap", "etude_commit", "reset", "named", "resume"
    ]  # fmt: skip
    assert (vllm.paused, vllm.weight_version) == (False, "2")


def test_a_server_that_was_started_anew_is_fed_again(store):
    """It serves its checkpoint, and an empty store of the worker: nobody else would notice until the next version."""
    _, made = publish(store, 2)
    lines, vllm, ended = list[str](), Vllm(store), threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if ended.is_set():
            raise KeyboardInterrupt

    with answering(vllm.app()) as url:
        thread = threading.Thread(target=_quietly, args=(url, store, say), daemon=True)
        thread.start()
        wait_until(lambda: len(lines) == 2)
        fresh = Vllm(store)
        vllm.models, vllm.workers, vllm.weight_version = fresh.models, fresh.workers, "default"
        wait_until(lambda: len(lines) >= 5)
        ended.set()
        vllm.weight_version = "default"
        thread.join(20)
    assert not thread.is_alive()
    assert lines[2] == f"{url} has been started anew, without version 1; it is fed again once it answers"
    assert "version 1 is live" in lines[4]
    assert_serves(vllm, made[1])


def _quietly(url: str, store: object, say: object) -> None:
    with suppress(KeyboardInterrupt):
        feed(url, store, every=0.01, say=say)


def test_no_key_of_the_weights_before_is_used_with_new_ones(store):
    """vLLM answers that it could not give up its blocks yet."""
    publish(store, 1)
    vllm = Vllm(store)
    vllm.holding = 2
    with answering(vllm.app()) as url:
        assert feed(url, store, once=True, say=lambda _: None) == 0
    assert vllm.calls[-5:] == ["reset", "reset", "reset", "named", "resume"]


def test_a_version_that_another_feed_brought_is_live(store):
    publish(store, 1)
    lines, vllm = list[str](), Vllm(store)

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            other = threading.Thread(target=Feeder(url).update, args=(0,))
            other.start()
            other.join()

    with answering(vllm.app()) as url:
        assert feed(url, store, once=True, deadline=60, say=say) == 0
    assert lines[1:] == ["not live yet: the server does not find version 0 in the store"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (JSONResponse({}, 401), "needs another token: set ETUDE_API_KEY"),
        (PlainTextResponse("<html>"), "is no vLLM server"),
        (JSONResponse([]), "is no vLLM server"),
        (JSONResponse({}), "is no vLLM server"),
    ],
)
def test_what_no_waiting_mends_ends_the_feed_at_once(store, answer, why):
    app = Starlette(routes=[Route("/collective_rpc", lambda _: answer, methods=["POST"])])
    with answering(app) as url, pytest.raises(UserError, match=why):
        feed(url, store, say=lambda _: None)


def wait_until(holds) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_worker_without_a_store_has_no_version():
    assert WorkerExtension().etude_status() == {"version": -1, "digest": ""}


def test_staging_touches_no_live_weight_and_needs_no_pause(store, two):
    publish(store, 1)
    with answering(two.app()) as url:
        server = Feeder(url)
        server.ask("etude_stage", "0")
        end = time.monotonic() + 30
        while any(worker["staging"] for worker in server.ask("etude_status")):
            assert time.monotonic() < end
        assert {worker["staged"] for worker in server.ask("etude_status")} == {0}
    assert_serves(two, checkpoint(1))
    assert "pause" not in two.calls


def test_live_weights_that_are_not_the_manifests_are_an_error_and_the_old_ones_come_back(store, vllm):
    manifests, made = publish(store, 2)
    with answering(vllm.app()) as url:
        server = Feeder(url)
        server.follow(store.url)
        server.update(0)
        touched = vllm.models[-1].w2.data[0, 0]
        here = made[0]["experts.down"][0, 0, -len(touched) :].clone()
        assert torch.equal(here, made[1]["experts.down"][0, 0, -len(touched) :])  # version 1 does not write there
        touched += 1
        live = "the digest of the live tensors is [0-9a-f]*, that of version 1 is"
        with pytest.raises(NotLive, match=f"{live} {manifests[1].digest}"):
            server.update(1)
        assert {worker._etude.receiver.version for worker in vllm.workers} == {0}
        assert (vllm.paused, vllm.weight_version) == (False, "0")
        touched.copy_(here)
        assert_serves(vllm, made[0])
        assert server.update(1).digest == manifests[1].digest
    assert_serves(vllm, made[1])


def test_a_copy_that_another_worker_counts_is_compared_too(store, two):
    _, made = publish(store, 2)
    with answering(two.app()) as url:
        server = Feeder(url)
        server.update(0)
        two.models[1].norm.data[0] += 1  # the next version does not write there
        with pytest.raises(NotLive, match="norm has other values in one of several copies"):
            server.update(1)
        two.models[1].norm.data[0] = made[0]["norm"][0]
        assert_serves(two, made[0])


def test_a_worker_that_refuses_a_version_keeps_the_others_from_it(store, two, monkeypatch):
    manifests, made = publish(store, 2)
    last = two.workers[-1]._etude.receiver
    with answering(two.app()) as url:
        server = Feeder(url)
        server.update(0)

        def refuse(update):
            raise WeightsMismatch("words does not hold the written values")

        monkeypatch.setattr(last, "write", refuse)
        with pytest.raises(NotLive, match="words does not hold the written values"):
            server.update(1)
        assert_serves(two, made[0])
        assert (two.paused, two.weight_version) == (False, "0")
        monkeypatch.undo()
        assert server.update(1).digest == manifests[1].digest
    assert_serves(two, made[1])


def test_a_worker_that_cannot_read_a_version_keeps_the_others_from_it(store, two, monkeypatch):
    _, made = publish(store, 2)
    with answering(two.app()) as url:
        server = Feeder(url)
        server.update(0)

        def lost(limit):
            raise DamagedVersion("version 1: its payload is gone")

        monkeypatch.setattr(two.workers[-1]._etude.receiver, "poll", lost)
        with pytest.raises(NotLive, match="version 1: its payload is gone"):
            server.update(1)
        assert_serves(two, made[0])
        assert two.calls.count("pause") == 1
        monkeypatch.undo()
        server.update(1)
    assert_serves(two, made[1])


@pytest.mark.parametrize("cut", ["before the swap", "swapped", "half swapped", "committed"])
def test_a_swap_that_was_cut_off_is_settled(store, vllm, cut):
    """The caller was killed after so much of an update from version 0 to 1."""
    manifests, made = publish(store, 2)
    with answering(vllm.app()) as url:
        server = Feeder(url)
        server.update(0)
        if cut != "before the swap":
            for worker in vllm.workers:
                worker.etude_stage("1")
                worker._etude.thread.join(60)
            for worker in vllm.workers[1:] if cut == "half swapped" else vllm.workers:
                worker.etude_swap("1")
        if cut == "committed":
            for worker in vllm.workers:
                worker.etude_commit()
        reached = int(cut in ("swapped", "committed"))
        vllm.paused, vllm.weight_version = True, "default"
        assert server.follow(store.url) == reached
        assert (vllm.paused, vllm.weight_version) == (False, str(reached))
        assert_serves(vllm, made[reached])
        if not reached:
            assert server.update(1).digest == manifests[1].digest
    assert_serves(vllm, made[1])


def test_a_server_that_holds_a_mixture_stays_paused(store, two):
    publish(store, 1)
    with answering(two.app()) as url:
        server = Feeder(url)
        server.update(0)
        two.models[0].norm.data[0] += 1
        two.paused = True
        with pytest.raises(
            UserError, match=r"cannot follow .*: the digest of the live tensors is .*; start this server again"
        ):
            server.follow(store.url)
    assert two.paused


def test_a_damaged_version_leaves_the_server_where_it_is(store, two):
    manifests, _ = publish(store, 1)
    key = manifests[0].payload[0].key
    store.put(key, store.get(key)[:-1])
    with answering(two.app()) as url:
        with pytest.raises(NotLive, match="version 0: its payload"):
            Feeder(url).update(0)
        with pytest.raises(UserError, match="stays at version -1: version 0"):
            feed(url, store, once=True, deadline=0.0)
    assert "pause" not in two.calls


def test_a_server_that_loaded_its_weights_anew_is_not_written_to(store, two):
    publish(store, 1)
    with answering(two.app()) as url:
        two.models[-1].qkv = torch.nn.Parameter(two.models[-1].qkv.data.clone(), False)
        with pytest.raises(NotLive, match="loaded its weights anew"):
            Feeder(url).update(0)
    assert not two.paused


def test_a_server_that_follows_another_store_says_so(store):
    with answering(Vllm(store).app()) as url, pytest.raises(UserError, match=r"follows .* already; start it again"):
        Feeder(url).follow("s3://elsewhere/weights")


def test_a_server_without_development_mode_says_what_to_do(store):
    with answering(Starlette()) as url, pytest.raises(UserError, match="start vLLM with VLLM_SERVER_DEV_MODE=1"):
        Feeder(url).follow(store.url)


def test_no_server_is_one_sentence(store):
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 does not answer.*start it, or look at its log"):
        feed("http://127.0.0.1:9", store, once=True)


# --- adapters -------------------------------------------------------------------------------------------------------


class StackedAttention(torch.nn.Module):
    """The weights of a checkpoint with each layer's queries, keys and values in one tensor, as vLLM keeps them."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        self.held, self.rows = {}, {}
        for name, tensor in tensors.items():
            kind = next((k for k in ("q_proj", "k_proj", "v_proj") if f"{k}.weight" in name), None)
            key = name if kind is None else name.replace(kind, "qkv_proj")
            start = 0 if key not in self.held else len(self.held[key])
            self.rows[name] = key, slice(start, start + len(tensor))
            self.held[key] = torch.cat([self.held[key], tensor]) if key in self.held else tensor.clone()
        for key, tensor in self.held.items():
            self.register_parameter(key.replace(".", "_"), torch.nn.Parameter(tensor, False))

    def load_weights(self, weights):
        for name, tensor in weights:
            key, rows = self.rows[name]
            getattr(self, key.replace(".", "_")).data[rows].copy_(tensor)


@pytest.mark.parametrize(("kind", "targets"), [("qwen3", "all-linear"), ("moe", OF_EXPERTS)])
def test_a_vllm_worker_adds_adapters_to_its_stacked_weights(tmp_path, kind, targets):
    base, store = save_random_model(tmp_path / "base", kind), open_store(str(tmp_path / "weights"))
    trainer = Publishing(base, store, targets=targets)
    trainer.publish(0)
    model = StackedAttention(named_tensors(load_model(base, dtype=torch.bfloat16)))
    live = live_tensors(model, base_schema(store, newest_manifest(store)))
    worker = WorkerExtension()
    worker._etude = Following((store.url, "", ""), model, Receiver(store, live))
    for version in (0, 2):
        while newest_manifest(store).version < version:
            trainer.publish(newest_manifest(store).version + 1)
        worker.etude_stage(str(version))
        worker._etude.thread.join(60)
        published = newest_manifest(store)
        whole = {"version": version, "digest": published.live, "share": published.live}
        assert worker.etude_swap(str(version)) == worker.etude_digest() == whole
        assert worker.etude_commit() == {"version": version}
    for name, tensor in named_tensors(trainer.model).items():
        key, rows = model.rows[name]
        assert torch.equal(getattr(model, key.replace(".", "_"))[rows].float(), tensor), name
