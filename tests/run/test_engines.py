"""What the inference servers of a run are started with follows from the run's configuration."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from etude.config import RLConfig, ServerConfig, WeightSource, validate
from etude.errors import UserError
from etude.inference.vllm.guard import TokenGuard
from etude.run import engines
from etude.run.engines import server_config, start_engines, vllm_arguments
from etude.run.vllm_environment import check_python, described, reason_of
from tests.helpers.vllm_environment import python_with

FOLDER = Path("outputs/run")


def config(**tables: object) -> RLConfig:
    return RLConfig.model_validate({"tasks": {"repository": "unused"}, **tables})


def test_a_server_gets_every_option_of_the_table_inference() -> None:
    inference = {"servers": 2, "port": 9000, "cache_mb": 4096, "prefill_tokens": 77, "device": "cuda", "max_batch": 9}
    server = server_config(FOLDER, config(inference=inference, rollout={"context": 2048}), 1)
    assert (server.port, server.cache_mb, server.prefill_tokens) == (9001, 4096, 77)
    assert (server.device, server.max_batch, server.max_model_len) == ("cuda", 9, 2048)
    assert (server.deterministic, server.routes, server.threads) == (False, False, 1)
    assert server.source == WeightSource(weights="outputs/run/weights")


def test_what_follows_from_other_tables() -> None:
    weights = {"signing_key": "key", "relay": "http://127.0.0.1:1"}
    run = config(weights=weights, trainer={"router_replay": True}, store="s3://bucket/run")
    server = server_config(FOLDER, run, 0)
    assert (server.port, server.routes) == (0, True)
    assert server.source == WeightSource(
        weights="s3://bucket/run/weights", relay="http://127.0.0.1:1", public_key=Path("key.pub").absolute(),
        accepted=FOLDER / "accepted-0.json",
    )  # fmt: skip


def test_a_server_reads_what_was_written_for_it() -> None:
    server = server_config(FOLDER, config(), 0)
    assert validate(ServerConfig, json.loads(server.model_dump_json()), "file") == server


def test_vllm_is_told_what_follows_from_the_run() -> None:
    inference = {"engine": "vllm", "max_batch": 9, "args": ["--enforce-eager"]}
    run = config(inference=inference, rollout={"context": 2048}, trainer={"router_replay": True})
    module, serve, _, *words = vllm_arguments(run, 8000)
    assert (module, serve) == ("vllm.entrypoints.cli.main", "serve")
    told = dict(pairwise(words))
    assert (told["--max-model-len"], told["--max-num-seqs"], told["--port"]) == ("2048", "9", "8000")
    assert (told["--dtype"], told["--logprobs-mode"]) == ("bfloat16", "processed_logprobs")
    assert told["--kv-cache-memory-bytes"] == str(4096 * 2**20)
    assert told["--middleware"] == f"{TokenGuard.__module__}.{TokenGuard.__qualname__}"
    assert "--gpu-memory-utilization" not in told, "on a CPU it would be a share of the whole machine"
    assert {"--enable-return-routed-experts", "--enable-scale-out", "--enforce-eager"} <= set(words)
    assert run.inference.count == 1
    assert RLConfig.model_validate(json.loads(run.model_dump_json())) == run, "a run that is resumed reads it again"


def test_vllm_takes_its_share_of_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    inference = {"engine": "vllm", "device": "cuda:1", "gpu_memory_utilization": 0.4, "servers": 2}
    run = config(inference=inference)
    told = dict(pairwise(vllm_arguments(run, 8000)))
    assert told["--gpu-memory-utilization"] == "0.4"
    assert "--kv-cache-memory-bytes" not in told
    assert run.inference.devices == ("cuda:1", "cuda:2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engines._visible("cuda:2") == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5e,7")
    assert [engines._visible(device) for device in ("cuda", *run.inference.devices)] == ["3", "GPU-5e", "7"]
    with pytest.raises(UserError, match="needs cuda:3, and CUDA_VISIBLE_DEVICES = 3,GPU-5e,7 has 3"):
        engines._visible("cuda:3")


@pytest.mark.parametrize(
    "args", [["-tp", "2"], ["--tensor-parallel-size=2"], ["--enforce-eager", "--tensor_parallel_size", "2"]]
)
def test_each_worker_of_vllm_has_a_gpu(monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    run = config(inference={"engine": "vllm", "device": "cuda:1", "servers": 2, "args": args})
    assert (run.inference.workers, run.inference.count) == (2, 2)
    assert run.inference.devices == ("cuda:1", "cuda:2", "cuda:3", "cuda:4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3")
    assert [engines.visible_devices(run.inference, number) for number in range(2)] == ["6,5", "4,3"]
    with pytest.raises(UserError, match="needs cuda:5, and CUDA_VISIBLE_DEVICES"):
        engines.visible_devices(config(inference=run.inference.model_dump() | {"servers": 3}).inference, 2)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["-pp", "2"], "args has -pp: servers with pipeline parallelism are not updated, use --tensor-parallel-size"),
        (["--data-parallel-size=2"], "servers with data parallelism are not updated"),
        (["-tp", "2", "--decode_context_parallel_size", "2"], "servers with context parallelism are not updated"),
        (["-tp", "2", "--enable-expert-parallel"], "servers with expert parallelism are not updated"),
        (["-tp", "two"], "args has --tensor-parallel-size without a number of workers"),
        (["-tp"], "args has --tensor-parallel-size without a number of workers"),
    ],
)
def test_workers_that_are_not_updated_are_refused_by_name(args: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(inference={"engine": "vllm", "args": args})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpu_memory_utilization": 0.5}, 'with device = "cpu", cache_mb sets'),
        ({"device": "cuda", "cache_mb": 512}, "cache_mb is what gpu_memory_utilization leaves"),
        ({"device": "cuda", "gpu_memory_utilization": 1.2}, "less than or equal to 1"),
        ({"device": "cuda", "args": ["--gpu_memory_utilization=0.5"]}, r"set inference\.gpu_memory_utilization"),
        ({"args": ["--enforce-eager", "--max-model-len", "9"]}, r"--max-model-len, which the run gives: set rollout"),
        ({"urls": ["http://a:1"], "gpu_memory_utilization": 0.5}, "others have started: drop gpu_memory"),
        ({"engine": "etude", "device": "cuda", "gpu_memory_utilization": 0.5}, "not an option of etude's engine"),
    ],
)
def test_memory_of_vllm_is_set_in_one_place(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(inference={"engine": "vllm", **options})


AT = "(EngineCore pid=7) ERROR 11-28 04:07:24 [core.py:1510]"
FULL = "ValueError: Free memory on device cuda:0 (20.1/79.6 GiB) on startup is less than desired GPU memory utilization"
LOG = f"""(APIServer pid=5) WARNING 11-28 04:00:00 [x.py:1] this can cause errors like `OSError: too many open files`
{AT} EngineCore failed to start.
{AT} Traceback (most recent call last):
{AT}   File "/env/vllm/v1/worker/utils.py", line 762, in request_memory
{AT} {FULL}
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
/usr/lib/python3.11/resource_tracker.py:254: UserWarning: 1 leaked shared_memory objects
  warnings.warn("resource_tracker")"""


def test_a_server_of_vllm_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    run = config(inference={"engine": "vllm", "python": python_with(tmp_path / "env", "0.32.0+cpu", LOG)})
    with pytest.raises(UserError) as raised:
        start_engines(tmp_path, run, tmp_path / "logs", "token")
    said = f"the inference server exited with code 1: {FULL}; see {tmp_path}/logs/inference-0.log"
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("usage: main.py\nmain.py: error: unrecognized arguments: --x", "main.py: error: unrecognized arguments: --x"),
        (
            f"{AT} Worker proc VllmWorker-0 died unexpectedly (exit code: None)\n{AT} RuntimeError: Executor failed.\n"
            "nanobind: leaked 4 instances!",
            "Worker proc VllmWorker-0 died unexpectedly (exit code: None)",
        ),
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: out of memory\n",
            "what():  CUDA error: out of memory",
        ),
        (
            "x.ValidationError: 1 validation error for ModelConfig\n  Value error, an unknown type\n    For more",
            "x.ValidationError: 1 validation error for ModelConfig Value error, an unknown type",
        ),
        ("Loading\nKilled", "Killed"),
    ],
)
def test_the_reason_is_that_of_the_process_that_failed_first(log: str, reason: str) -> None:
    assert reason_of(log) == reason


def test_a_dry_run_names_the_engine_or_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETUDE_VLLM_PYTHON", raising=False)
    on_gpu = {"engine": "vllm", "device": "cuda"}
    assert described(config(inference={}).inference) == f"engine: etude, in {sys.executable}"
    assert described(config(inference=on_gpu).inference).startswith("engine: vLLM; missing here: inference.engine = ")
    python = python_with(tmp_path, "0.33.1")
    assert described(config(inference=on_gpu | {"python": python}).inference) == f"engine: vLLM 0.33.1, in {python}"
    on_cpu = config(inference={"engine": "vllm", "python": python}).inference
    assert described(on_cpu).endswith("has vLLM 0.33.1 for GPUs: inference.device = 'cpu' needs another build")
    urls = config(inference={"engine": "vllm", "urls": ["http://a:1"]}).inference
    assert described(urls) == "engine: vllm, at http://a:1 (inference.urls)"


def test_an_engine_needs_a_python_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETUDE_VLLM_PYTHON", raising=False)
    with pytest.raises(UserError, match=r"needs a Python that has it: set inference\.python or \$ETUDE_VLLM_PYTHON"):
        check_python(config(inference={"engine": "vllm"}).inference)
    monkeypatch.setenv("ETUDE_VLLM_PYTHON", "/nowhere/python")
    with pytest.raises(UserError, match=r"/nowhere/python has no vllm .*: name another with inference\.python"):
        check_python(config(inference={"engine": "vllm"}).inference)
    check_python(config(inference={"engine": "vllm", "urls": ["http://127.0.0.1:1"]}).inference)
    check_python(config().inference)


def test_the_folder_of_the_run_has_no_part_in_the_check_of_a_python(tmp_path, monkeypatch) -> None:
    for name in ("csv", "email", "textwrap"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with suppress(UserError):  # this Python has vLLM or not
        check_python(config(inference={"engine": "vllm", "python": sys.executable}).inference)
    assert not (tmp_path / "marker").exists()
