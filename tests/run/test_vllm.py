"""Whole runs whose engine is vLLM: on the fake that speaks its protocol, and on the real one (docs/serving.md).

The real ones need an environment with vLLM 0.32 and take minutes: `make vllm`.
"""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
import torch

from etude.models.files import expert_layers
from etude.models.loading import load_model, named_tensors
from etude.protocol.backends.client import EngineClient
from etude.protocol.backends.vllm import VllmBackend, VllmServer, WeightsOf
from etude.protocol.backends.vllm_answers import StreamedAnswer
from etude.protocol.wire import GenerateRequest
from etude.records import Generation, joined
from etude.store import open_store
from etude.weights.publisher import Publisher
from tests.helpers.fake_vllm import fake_vllm
from tests.helpers.faulty_link import linked
from tests.helpers.vllm_server import TWO_WORKERS, on_vllm, serving
from tests.run.test_run import CONFIG, ROOT, start, versions

NANO = ROOT / "models/nano"
ASYNCHRONOUS = CONFIG.replace("deterministic = true\n", "").replace("staleness = 0", "staleness = 1\nseconds = 900")
VLLM = "\n[inference]\nengine = 'vllm'\nmax_batch = 16\n"
ON_CPU = Path(__file__).parents[1] / "helpers/triton_on_cpu"
SECONDS = 3000.0
TOKENS = 60


def checked(folder: Path, output: str, steps: int) -> None:
    """A run that has lost nothing, whose tokens are its engine's, and whose experts were replayed."""
    report = json.loads((folder / "outputs/run/report.json").read_text())
    assert (report["steps"], report["episodes"]["scored"]) == (steps, 6 * steps), output
    assert all(report["checks"].values()), (report["checks"], output)
    assert [group for _, _, group in versions(folder)] == [0] + [2] * steps
    lines = [json.loads(line) for line in (folder / "outputs/run/metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "router/missing" in line]
    assert trained, "no step trained on anything: the comparison is void"
    # bfloat16 against bfloat16: of 1,000 tokens, a few differ in the third digit.
    assert all(line["mismatch/k2"] < 5e-4 for line in trained if "mismatch/k2" in line), lines
    assert all(line["router/missing"] == 0 and line["router/refused"] < 0.01 for line in trained), lines
    assert all(line["off_policy/max"] <= 1 for line in lines), lines


@pytest.mark.slow
def test_a_run_on_vllms_protocol_outlives_one_of_its_servers(tmp_path):
    with fake_vllm(NANO) as (url, one), fake_vllm(NANO) as (behind, two), linked(behind) as (broken, link):
        link.fault = lambda method, path: "lose" if len(two.answers) >= 3 else ""
        urls = f"--inference.urls={json.dumps([url, broken])}"
        process = start(tmp_path, urls, "--trainer.router_replay", "true", config=ASYNCHRONOUS + VLLM)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    checked(tmp_path, output, 3)
    assert f"the engine at {broken} is lost, the others play its turns" in output
    brought = [version for version, _ in one.trace]
    assert (brought[0], brought[-1], brought) == (0, 3, sorted(set(brought))), "one that came late may be passed over"
    assert len({span["version"] for spans in one.answers.values() for span in spans}) > 1


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live, in order."""
    try:
        tasks = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return sorted(int(word) for words in tasks for word in words)


def is_vllm(pid: int) -> bool:
    return b"vllm.entrypoints.cli.main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@on_vllm
def test_a_run_on_vllm_outlives_the_killing_of_a_server(tmp_path, monkeypatch):
    """Three steps, O = 1, two servers, one of which is killed in the middle of its turns."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ON_CPU)]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    args = '\ncache_mb = 1024\nargs = ["--enforce-eager", "--max-num-batched-tokens", "512"]\nservers = 2\n'
    options = ["--trainer.router_replay", "true", "--trainer.dtype", "bfloat16"]
    process = start(tmp_path, *options, config=ASYNCHRONOUS + VLLM + args)
    logs = tmp_path / "outputs/run/logs/latest"
    deadline = time.monotonic() + SECONDS
    while True:  # until the second server has at least one turn
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        log = logs / "inference-1.log"
        if log.exists() and log.read_text().count("POST /inference/v1/generate") >= 2:  # the trial is the first
            break
        time.sleep(0.5)
    _, victim = [pid for pid in children(process.pid) if is_vllm(pid)]
    engines = children(victim)
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert "is lost, the others play its turns: the inference server was killed by SIGKILL" in output
    checked(tmp_path, output, 3)
    assert engines
    assert not any(map(lives, engines)), "an engine has outlived its server"


@on_vllm
def test_a_run_on_a_vllm_of_two_workers(tmp_path, monkeypatch):
    """Three steps, O = 1; each worker writes its slices of every version."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ON_CPU)]))
    for name, value in {"TRITON_INTERPRET": "1", **TWO_WORKERS}.items():
        monkeypatch.setenv(name, value)
    args = '\ncache_mb = 1024\nargs = ["--enforce-eager", "--max-num-batched-tokens", "512", "-tp", "2"]\n'
    options = ["--trainer.router_replay", "true", "--trainer.dtype", "bfloat16"]
    process = start(tmp_path, *options, config=ASYNCHRONOUS + VLLM + args)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    checked(tmp_path, output, 3)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A store of two versions, and their digests."""
    store = open_store(str(tmp_path_factory.mktemp("store") / "weights"))
    publisher, tensors = Publisher(store), named_tensors(load_model(NANO, dtype=torch.bfloat16))
    digests = []
    for version in range(2):
        digests.append(publisher.publish(version, tensors, (), {}, last=version == 1).digest)
        tensors["model.norm.weight"] += 0.125
    return store, digests


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """The URL of a vLLM server."""
    flags = (
        "--dtype bfloat16 --max-model-len 512 --max-num-seqs 8 --max-num-batched-tokens 512 --enable-scale-out "
        "--logprobs-mode processed_logprobs --generation-config vllm --enable-return-routed-experts "
        "--enable-prompt-tokens-details --worker-extension-cls etude.inference.vllm.worker.WorkerExtension"
    )
    environment = {"VLLM_SERVER_DEV_MODE": "1", "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    path = os.pathsep.join([str(ROOT / "src"), str(ON_CPU)])
    log = tmp_path_factory.mktemp("vllm") / "log"
    with serving(NANO, log, *flags.split(), PYTHONPATH=path, **environment) as url:
        yield url


def backend(store) -> VllmBackend:
    return VllmBackend("run", WeightsOf(store.url), context=512, expert_layers=expert_layers(NANO))


def request(n: int, tokens: int = TOKENS) -> GenerateRequest:
    return GenerateRequest(ids=list(range(100, 150)), max_tokens=tokens, seed=n, session=f"{n}", routes_from=0)


@on_vllm
def test_versions_are_cut_where_vllm_stood_still(vllm, published, monkeypatch):
    """A version comes while eight requests run. None is dropped; a request's tokens that had come while the scheduler
    stood still are the old version's, all others the new one's."""
    store, digests = published
    came, parts = [0] * 8, []

    class Counted(StreamedAnswer):
        def add(self, event) -> None:
            super().add(event)
            if self._request.max_tokens == TOKENS:
                came[self._request.seed] = len(self.ids)

    monkeypatch.setattr("etude.protocol.backends.vllm.StreamedAnswer", Counted)

    async def play() -> tuple:
        async with EngineClient([vllm], backend=backend(store)) as client:
            await client.check(vllm)
            await client.bring(vllm, 0)
            server = VllmServer(client._http, vllm)
            await server.ask("etude_stage", "1")
            while (await server.ask("etude_status"))[0]["staging"]:
                await asyncio.sleep(0.05)

            requests = [msgspec.structs.replace(request(n), part_seconds=0.0) for n in range(8)]
            running = [asyncio.create_task(client.generate(each, SECONDS, parts.append)) for each in requests]
            while min(came) < 5:
                await asyncio.sleep(0.05)
            client.backend._at(vllm).swaps += 1
            assert parts
            assert all(part.versions == [0] * len(part.ids) for part in parts)
            await server.send("POST", "/pause", mode="keep")
            await asyncio.sleep(3)  # what had been sampled arrives
            stood = list(came)
            (swapped,) = await server.ask("etude_swap", "1")
            await server.ask("etude_commit")
            await server._resume(1, keep=True)
            return stood, swapped, await asyncio.gather(*running)

    stood, swapped, answers = asyncio.run(play())
    assert all(5 <= n < TOKENS for n in stood), f"every request was to be under way: {stood}"
    assert [answer.versions for answer in answers] == [[0] * n + [1] * (TOKENS - n) for n in stood]
    assert [answer.finish_reason for answer in answers] == ["length"] * 8
    assert all(answer.routes.end == 50 + TOKENS - 1 for answer in answers)
    assert swapped["digest"] == swapped["share"] == digests[1]


@on_vllm
def test_turns_of_a_vllm_server_that_is_killed_are_played_by_another(vllm, published):
    """kill -9 in the middle of four turns; the other server is the fake, which has the same weights."""
    store, digests = published
    (victim,) = [pid for pid in children(os.getpid()) if is_vllm(pid)]
    engines = children(victim)

    async def play(other: str) -> tuple:
        async with EngineClient([vllm, other], backend=backend(store)) as client:
            for url in (vllm, other):
                await client.bring(url, 1)
            digest, score = (await client.health(vllm))["digest"], []
            for url in (vllm, other):
                score.append((await client.score(url, [list(range(100, 140))], SECONDS)).logprobs[0])
            client._servers |= {str(n): vllm for n in range(4)}
            parts: list[list[Generation]] = [[] for _ in range(4)]
            running = [
                asyncio.create_task(client.generate(request(n, 400), SECONDS, parts[n].append)) for n in range(4)
            ]
            while not all(parts):
                await asyncio.sleep(0.02)
            os.kill(victim, signal.SIGKILL)
            while client.resumed < 4:
                await asyncio.sleep(0.02)
            there = [joined(each).ids for each in parts]
            return digest, score, there, await asyncio.gather(*running)

    with fake_vllm(NANO) as (other, fake):
        digest, (of_vllm, of_fake), there, answers = asyncio.run(play(other))
    assert digest == digests[1]
    assert len(fake.answers) == 4
    assert all(0 < len(ids) < 400 for ids in there)
    assert [answer.ids[: len(ids)] for ids, answer in zip(there, answers, strict=True)] == there
    assert all(answer.routes.end == 50 + 400 - 1 for answer in answers)
    assert [answer.versions for answer in answers] == [[1] * 400] * 4
    assert max(abs(a - b) for a, b in zip(of_vllm, of_fake, strict=True)) < 0.3, "bfloat16 against float32"
    assert engines
    end = time.monotonic() + 60
    while any(map(lives, engines)):
        assert time.monotonic() < end, "an engine has outlived its server"
        time.sleep(0.5)
