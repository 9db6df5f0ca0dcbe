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
from etude.run.engines import check_python, server_config, vllm_arguments

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
    assert {"--enable-return-routed-experts", "--enable-scale-out", "--enforce-eager"} <= set(words)
    assert run.inference.count == 1
    assert RLConfig.model_validate(json.loads(run.model_dump_json())) == run, "a run that is resumed reads it again"


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
