"""Benchmarks run, and what they compute is right; their speeds are nobody's to assert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.cli.main import main

ROOT = Path(__file__).parents[2]


def bench(name: str) -> tuple[dict[str, Any], dict[str, float]]:
    """What a benchmark prints as its last line, and the values of its rows by case."""
    command = [sys.executable, "-m", "etude.cli.main", "bench", name, "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stderr  # 1: a check failed, maybe one of speed
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == name
    assert {"case", "value", "unit", "baseline"} == set(result["rows"][0])
    return result, {row["case"]: row["value"] for row in result["rows"]}


def test_a_record_without_a_folder_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "weights", "--record", "/nowhere/weights.json"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("etude: --record /nowhere/weights.json: there is no folder /nowhere")


def test_a_record_that_is_a_folder_is_refused_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "weights", "--record", str(tmp_path)])
    assert ended.value.code == 2
    assert "is a folder: give a file in it" in capsys.readouterr().err


@pytest.mark.slow
def test_weights() -> None:
    result, values = bench("weights")
    assert result["checks"]["every decoded bit equals the encoded one"]
    assert {"ratio/real-1pct", "ratio/real-2.6pct", "ratio/iid-1pct", "ratio/iid-0.3pct", "ratio/iid-2pct"} <= set(
        values
    )
    assert {"encode-A/xor-zstd", "decode-A/memcpy", "encode-B/memcpy", "decode-B/xor-zstd"} <= set(values)
    assert {"vs-xor-zstd/real-1pct", "threads-2/threads-1"} <= set(values)
    assert values["ratio/iid-1pct"] > 0.95 * 174, "the size does not depend on the machine"


@pytest.mark.slow
def test_corpus() -> None:
    result, values = bench("corpus")
    assert all(result["checks"].values()), result["checks"]
    assert values.keys() == {"documents/vs-plain-pipeline", "dedup/recall-at-0.8", "memory/share"}


@pytest.mark.slow
def test_documents() -> None:
    result, values = bench("documents")
    assert {name: ok for name, ok in result["checks"].items() if "ttft" not in name} == {
        "logits are those of one masked pass": True,
        "the first token is that of one masked pass": True,
        "a new order computes no document again": True,
    }
    assert {"ttft/10", "ttft/20", "ttft/30", "tail/10", "reorder/hit-rate", "logits/max-abs"} <= set(values)
    assert values["reorder/hit-rate"] == 1.0


@pytest.mark.slow
def test_mismatch() -> None:
    result, values = bench("mismatch")
    assert result["checks"]["deterministic: trainer and engine agree in every bit"]
    assert result["checks"]["replay: every token ran the experts that the engine recorded"]
    assert values["deterministic/max-abs-dlogp"] == 0.0
    assert values["replay/k3-gain"] > 1
    assert values["replay/flips"] == 0.0
    assert values["replay/flips-without"] > 0, "nothing flips: the gain is of nothing"
    assert {"deterministic/cost", "replay/cost", "record/cost"} <= set(values)


@pytest.mark.slow
def test_shared_prompt() -> None:
    result, values = bench("shared-prompt")
    assert {name: ok for name, ok in result["checks"].items() if "gradients" in name} == {
        "gradients of packed execution are those of rows": True,
        "gradients of streaming execution are those of rows": True,
    }
    assert {"P1024-C64-G8/of-ideal", "P1024-C64-G16/speedup", "turns-12/speedup-per-turn-rows"} <= set(values)


@pytest.mark.slow
def test_async() -> None:
    result, values = bench("async")
    assert {name: ok for name, ok in result["checks"].items() if "speed" not in name and "busy" not in name} == {
        "long-tail: no token is staler than 4 versions": True,
        "long-tail: the synchronous run is on-policy": True,
        "long-tail: every episode is trained on once": True,
    }
    assert {"long-tail/speedup", "long-tail/engine-busy", "long-tail/early-tools"} <= set(values)
    assert 1 <= values["long-tail/max-staleness"] <= 4, "episodes of later versions are played meanwhile"


@pytest.mark.slow
def test_models() -> None:
    result, values = bench("models")
    assert {name: ok for name, ok in result["checks"].items() if "overhead" not in name} == {
        "the head's peak is at most 1.2 x chunk/S of before": True,
        "checkpointing keeps at most 0.2 of the activations": True,
        "states of adapters are at most 0.05 of all": True,
        "gradients, chunked, are those of plain rows": True,
        "gradients, checkpointed, are those of plain rows": True,
    }
    assert 0 < values["activations/share"] < values["head-peak/share"] < 1
    assert 0 < values["lora/states-share"] < 0.05
    assert "world-1/overhead" in values
    assert ("vllm-run/vs-etude" in values) != ("vllm-run/vs-etude" in result["not_run"])


@pytest.mark.slow
def test_live() -> None:
    result, values = bench("live")
    timed = ("gateway adds 2 ms, or half of a pass-through", "rollback within 5 seconds")
    assert {name: ok for name, ok in result["checks"].items() if name not in timed} == {
        "no acknowledged signal is lost": True,
        "oracle-share": True,
        "false promotion at most 5 %": True,
        "false rollback at most 1 %": True,
        "harm stopped within 400 pairs": True,
        "no request failed": True,
    }
    assert values["gateway/dropped-records"] == 0
    assert values["bandit/oracle-share"] < 1.2, "an oracle is worse than what it judges"
