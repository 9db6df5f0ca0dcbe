"""A whole run that trains adapters: every process is real."""

import json

import pytest
import torch

from etude.cli.main import main
from etude.models.loading import load_model, named_tensors
from etude.store import open_store
from etude.weights.manifest import manifests
from etude.weights.runs import model_folder
from etude.weights.ulpd.digest import weights_digest
from tests.run.test_run import CONFIG, ROOT, etude, finished, start

TARGETS = '["q_proj", "o_proj", "gate_up_proj", "down_proj"]'  # experts, too
TRAINED = f"steps = 2\nlr = 2e-2\nrouter_replay = true\nlora = {{ rank = 4, targets = {TARGETS} }}"
LORA = CONFIG.replace("steps = 3\nlr = 1e-3", TRAINED)


@pytest.mark.slow
@pytest.mark.smoke
def test_a_run_trains_adapters_engines_serve_the_sum_and_a_killed_one_continues_bit_for_bit(tmp_path, capsys):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    code, output = finished(start(whole, config=LORA))
    assert code == 0, output
    run = whole / "outputs/run"
    published = manifests(open_store(str(run / "weights")))
    assert [m.version for m in published] == [0, 1, 2]
    assert len({m.live for m in published}) > 1, "no step changed the weights: the comparisons are void"
    report = json.loads((run / "report.json").read_text())
    # Published = served digest, asked again and again while versions came: the controller stops the run otherwise.
    assert report["checks"]
    assert all(report["checks"].values()), report["checks"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    k2 = [line["mismatch/k2"] for line in lines if "mismatch/k2" in line]  # a step may have nothing to train on
    assert k2
    assert not any(k2), "deterministic: trainer and engine have the same bits"

    code, output = finished(start(killed, config=LORA, failpoint="trainer.published:2"))
    assert code != 0, output
    code, output = finished(etude(killed, "train", "run.toml", "--resume"))
    assert code == 0, output
    again = manifests(open_store(str(killed / "outputs/run/weights")))
    assert [(m.digest, m.live, m.adapted) for m in again] == [(m.digest, m.live, m.adapted) for m in published]

    store, out = str(run / "weights"), tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        main(["weights", "fetch", store, "--base", str(ROOT / "models/nano"), "-o", str(out)])
    assert not stop.value.code, capsys.readouterr()
    assert published[-1].live in capsys.readouterr().out
    # As the trainer and the engine hold it: the digest is that of the types that the run published.
    for folder in (out, model_folder(f"{run}@2")):  # as `weights fetch` writes it, and as `etude serve RUN` finds it
        assert weights_digest(named_tensors(load_model(folder)), torch.bfloat16) == published[-1].live
