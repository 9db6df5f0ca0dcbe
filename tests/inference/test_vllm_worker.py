"""A real vLLM server follows a store. Needs an environment with vLLM 0.32 (`make vllm`); takes minutes."""

import json
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import httpx2
import pytest
import torch

from etude.cli import main
from etude.models.loading import load_model, named_tensors
from etude.store import open_store
from etude.weights.export import export
from etude.weights.publisher import Publisher
from etude.weights.ulpd import digest_text
from tests.helpers.feeder import Feeder
from tests.helpers.vllm_server import MODEL, TWO_WORKERS, needs_vllm, serving

PROMPTS = ("def add(a, b):\n    return", "import os\n\n\nclass", "for i in range(")
OPTIONS = "--dtype bfloat16 --max-model-len 512 --max-num-seqs 4 --max-num-batched-tokens 512"

pytestmark = needs_vllm


def follower(model: Path, log: Path, workers: int = 1) -> AbstractContextManager[str]:
    """The URL of a vLLM server of `model` with etude's worker class."""
    options = [*OPTIONS.split(), "--worker-extension-cls", "etude.inference.vllm.worker.WorkerExtension"]
    options += ["--tensor-parallel-size", str(workers)]
    return serving(model, log, *options, VLLM_SERVER_DEV_MODE="1", **(TWO_WORKERS if workers == 2 else {}))


def completed(url: str, prompt: str, tokens: int) -> tuple[str, list[float]]:
    """Text and log-probabilities of a greedy completion of just so many tokens."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def streamed(url: str, tokens: int, begun: threading.Event) -> int:
    """How many tokens came; `begun` is set at the first."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"model": "m", "prompt": "x = ", "max_tokens": tokens, "temperature": 0, **options}
    came = -1
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=300, trust_env=False) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            begun.set()
            if usage := json.loads(line.removeprefix("data: ")).get("usage"):
                came = usage["completion_tokens"]
    return came


@torch.no_grad()
def step(tensors: dict[str, torch.Tensor]) -> None:
    """A twentieth of the elements move by a few units in the last place."""
    for tensor in tensors.values():
        tensor.mul_(torch.where(torch.rand(tensor.shape) < 0.05, 1.02, 1.0).to(tensor.dtype))


@pytest.mark.parametrize("workers", [1, 2])
def test_vllm_serves_what_a_fresh_server_of_the_version_would(tmp_path, capsys, workers):
    torch.manual_seed(0)
    store, tensors = open_store(str(tmp_path / "weights")), named_tensors(load_model(MODEL, dtype=torch.bfloat16))
    publisher = Publisher(store)

    def publish(version: int) -> str:
        step(tensors)
        return publisher.publish(version, tensors, (), {}, last=version == 3).digest

    digests = [publish(0)]
    with follower(MODEL, tmp_path / "followed.log", workers) as url:
        server = Feeder(url)
        assert server.follow(store.url) == -1
        base = [completed(url, prompt, 24) for prompt in PROMPTS]
        assert server.update(0).digest == digests[0]  # the anchor
        digests += [publish(1), publish(2)]
        assert server.update(1).digest == digests[1]
        came: list[int] = []
        begun = threading.Event()
        running = threading.Thread(target=lambda: came.append(streamed(url, 450, begun)))
        running.start()
        assert begun.wait(120)
        assert server.update(2).digest == digests[2]
        assert running.is_alive(), "the request was to be under way while a version went live"
        running.join(300)
        assert came == [450]
        digests.append(publish(3))
        with pytest.raises(SystemExit) as stop:
            main.main(["weights", "feed", str(tmp_path / "weights"), "--vllm", url, "--once"])
        assert stop.value.code == 0
        assert f"version 3 is live, digest {digests[3]}" in capsys.readouterr().out
        shares = server.ask("etude_digest")
        assert [(share["version"], share["digest"]) for share in shares] == [(3, digests[3])] * workers
        assert digest_text(sum(int(share["share"], 16) for share in shares)) == digests[3]
        assert server.send("GET", "/weight_info") == {"weight_version": "3"}
        followed = [completed(url, prompt, 24) for prompt in PROMPTS]
    assert [logprobs for _, logprobs in followed] != [logprobs for _, logprobs in base], "an update must change bits"
    export(store, 3, MODEL, tmp_path / "v3")
    with follower(tmp_path / "v3", tmp_path / "fresh.log", workers) as url:
        fresh = [completed(url, prompt, 24) for prompt in PROMPTS]
    assert followed == fresh  # one request at a time, the same kernels and the same bits: nothing may differ
