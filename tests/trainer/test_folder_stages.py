"""The stages on folders of real architectures, with tokenizers of 72,000 and 151,936 tokens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from etude.corpus import packing
from etude.errors import UserError
from etude.models.loading import load_model
from etude.trainer import checkpoint
from etude.trainer.activations import checkpoint_activations
from etude.trainer.finetune import folder as folders
from etude.trainer.finetune import packed, pretrain
from etude.trainer.finetune.config import ApplyConfig, MidtrainConfig, OptimConfig, SftConfig
from tests.helpers.folders import big_tokenizer, random_weights, state_of, write_folder
from tests.helpers.speakers import write_model

ANSWERS = ("four", "nine", "seven")


def chat(number: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": f"{number}.py"}}}
    return {
        "messages": [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c", **call}]},
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
            {"role": "assistant", "content": f"It is {ANSWERS[number % 3]}."},
        ]
    }


def config(root: Path, model: Path, **changes: Any) -> SftConfig:
    """A short run; `changes` are keys of the stage, or of its tables as dicts."""
    file = root / "chats.jsonl"
    if not file.exists():
        long = {"messages": [{"role": "user", "content": "x " * 400}, {"role": "assistant", "content": "y"}]}
        rows = [json.dumps(chat(i)) for i in range(24)]
        file.write_text("\n".join([*rows, "{", json.dumps(long)]))
    trainer = {"batch": 2, "length": 256, "lr": 2e-2, "warmup": 0.0, "threads": 1, "log_every": 1}
    values = {"model": {"path": model}, "data": {"files": [file], "epochs": 2}}
    values |= {"trainer": trainer | changes.pop("trainer", {})} | changes
    return SftConfig.model_validate(values)


def metrics(run: Path, name: str = "loss/token") -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.parametrize(
    ("kind", "size", "dtype", "epochs"),
    [
        ("llama", 72_000, torch.float32, 1),
        pytest.param("llama", 72_000, torch.float32, 12, marks=pytest.mark.slow),
        pytest.param("glm", 151_936, torch.bfloat16, 12, marks=pytest.mark.slow),
    ],
)
def test_sft_of_a_folder_gives_a_folder_that_plain_transformers_loads(
    tmp_path: Path, kind: str, size: int, dtype: torch.dtype, epochs: int
) -> None:
    model = write_folder(tmp_path / "model", kind, size, dtype)
    files = {"files": [tmp_path / "chats.jsonl"], "epochs": epochs}
    result = pretrain.sft(config(tmp_path, model, data=files, trainer={"batch": 1}), tmp_path / "run")
    losses = metrics(tmp_path / "run")
    assert losses[-1] < (0.1 if epochs > 1 else 0.9) * losses[0]
    report = json.loads((tmp_path / "run" / "data.json").read_text())["files"]
    assert report["rows"] == 24
    assert [one["row"] for one in report["refused"]] == ["chats.jsonl:25", "chats.jsonl:26"]
    assert "not JSON" in report["refused"][0]["why"]
    assert "more than trainer.length = 256" in report["refused"][1]["why"]
    before, after = (load_file(root / "model.safetensors") for root in (model, result))
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {
        name: (t.dtype, t.shape) for name, t in after.items()
    }
    for name, tensor in before.items():  # a router's bias is not trained, and keeps its float32
        assert torch.equal(tensor, after[name]) == ("e_score_correction" in name)
    assert AutoConfig.from_pretrained(result).dtype == dtype
    assert AutoConfig.from_pretrained(result).max_position_embeddings == 512
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (result / name).read_bytes() == (model / name).read_bytes()
    if epochs == 1:
        return  # nothing to hear yet
    loaded = AutoModelForCausalLM.from_pretrained(result)
    tokenizer = AutoTokenizer.from_pretrained(result)
    asked = tokenizer.apply_chat_template(chat(1)["messages"][:1], add_generation_prompt=True, return_tensors="pt")
    ids = asked["input_ids"]
    out = loaded.generate(ids, max_new_tokens=60, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]).startswith('\n<tool_call>\n{"name": "look"')


SHARED = 18  # tokens


def _rows(rng: np.random.Generator, vocabulary: int) -> packing.Rows:
    """Examples of which two begin with the same `SHARED` tokens, some of them learned."""
    documents = []
    common = rng.integers(vocabulary // 2, vocabulary, SHARED)
    for size in (9, 30, 17, 44, 12):
        mask = rng.integers(0, 2, size).astype(np.uint8)
        mask[-1] = 1
        ids = rng.integers(vocabulary // 2, vocabulary, size)
        if size >= 30:
            ids[:SHARED] = common
        documents.append((ids.astype(np.uint32), mask))
    return packing.pack_rows(documents, 64, pad=0, separator=None)


@pytest.mark.parametrize("kind", ["qwen3", "glm"])
def test_packed_examples_have_the_loss_and_the_gradients_that_they_have_alone(kind: str) -> None:
    """However rows are packed and cut into passes, and what they begin with is computed once; crossing rows, which see
    each other, differ."""
    rows = _rows(np.random.default_rng(0), 1_000)
    assert len(rows.ids) == 2
    found = {}
    for how, at_once, again in (
        ("none", None, False), ("isolated", None, False), ("isolated", 1, False), ("isolated", None, True),
        ("crossing", None, False),
    ):  # fmt: skip
        model = random_weights(kind, 1_000, torch.float32, initializer_range=0.2)
        assert folders.packing_of(model, how) == how
        setting = OptimConfig(batch=2, micro_batch=at_once, length=64, packing=how)
        compute = packed.loss_function(model.train())
        if again:
            checkpoint_activations(model)
        (step,) = list(packed.PackedSteps.of(rows, setting, how, 0))
        assert len(step) == {"none": 5, "isolated": 1, "crossing": 1}[how] * (2 if at_once else 1)
        if (how, at_once) == ("isolated", None):
            assert step[0].graph is not None
            assert sum(len(node) for node in step[0].graph.nodes if node.ids_n.any()) == 9 + 30 + 17 + 44 + 12 - SHARED
        total = torch.zeros(())
        for part in step:
            loss = compute(part)[0]
            loss.backward()
            total += loss.detach()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found[how, at_once, again] = total, torch.cat(gradients)
    loss, gradient = found.pop(("none", None, False))
    crossing = found.pop(("crossing", None, False))
    for other, others in found.values():
        assert float(other) == pytest.approx(float(loss), rel=1e-5)  # float32 sums in another order
        assert float((others - gradient).norm() / gradient.norm()) < 1e-5
    assert abs(float(crossing[0] - loss)) > 1e-3  # far beyond the order of sums


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    """With labels where the mask has them."""
    rows = _rows(np.random.default_rng(1), 140_000)
    model = random_weights("llama", 140_000, torch.float32, initializer_range=0.2)
    folders.packing_of(model, "isolated")
    (step,) = list(packed.PackedSteps.of(rows, OptimConfig(batch=2, length=64), "isolated", 0))
    ours = float(packed.loss_function(model)(step[0])[0].detach())
    model.set_attn_implementation("eager")
    total = count = 0.0
    for row in range(len(rows.ids)):
        starts = [*np.flatnonzero(rows.starts[row]).tolist(), 64]
        for a, b in pairwise(starts):
            ids_1T = torch.from_numpy(rows.ids[row, a:b].astype(np.int64))[None]
            labels_1T = torch.where(torch.from_numpy(rows.mask[row, a:b])[None] > 0, ids_1T, -100)
            if rows.starts[row, a] == 1:
                some = int((labels_1T[:, 1:] >= 0).sum())
                total += some * float(model(ids_1T, labels=labels_1T).loss.detach())
                count += some
    assert ours == pytest.approx(total / count, rel=1e-5)  # float32


def test_an_architecture_that_cannot_share_rows_computes_them_one_by_one() -> None:
    model = random_weights("qwen3_next", 300, torch.float32)
    assert folders.packing_of(model, "auto") == "none"
    with pytest.raises(UserError, match=r'set trainer.packing to "none"'):
        folders.packing_of(model, "isolated")


def test_a_bfloat16_folder_computed_in_float32_is_saved_in_bfloat16_and_the_other_way_round(tmp_path: Path) -> None:
    for stored, computed in ((torch.bfloat16, "float32"), (torch.float32, "bfloat16")):
        root = tmp_path / computed
        root.mkdir()
        model = write_folder(root / "model", "qwen3", 1300, stored)
        result = pretrain.sft(config(root, model, trainer={"dtype": computed, "tokens": 512, "lr": 1e-5}), root / "run")
        before, after = (load_file(one / "model.safetensors") for one in (model, result))
        assert {t.dtype for t in after.values()} == {stored}
        if stored == torch.float32:  # a step of 1e-5 is lost in bfloat16, and the masters did not begin from a rounding
            moved = torch.cat([(after[n] - t).abs().flatten() for n, t in before.items() if t.ndim > 1])
            assert 0 < float(moved.max()) < 1e-4


def test_a_resumed_run_of_a_folder_equals_a_whole_one_bit_for_bit(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", "glm", 1300, torch.bfloat16)
    setting = config(tmp_path, model, trainer={"micro_batch": 1})
    first, second = pretrain.sft(setting, tmp_path / "whole"), tmp_path / "parts"
    pretrain.sft(setting, second, stop_after=3)
    with (second / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss/token": 1.0}\n{"step": 5, "lo')  # killed here
    with pytest.raises(UserError, match="differs from that of"):
        pretrain.sft(setting.model_copy(update={"seed": 1}), second, resume=True)
    chats = tmp_path / "chats.jsonl"
    rows = chats.read_text()
    chats.write_text(rows.replace("Question 7?", "Question 9?"))
    with pytest.raises(UserError, match=r"chats\.jsonl has changed since the run began"):
        pretrain.sft(setting, second, resume=True)
    chats.write_text(rows)  # at another time, but the same bytes
    pretrain.sft(setting, second, resume=True)
    of_models = [load_file(output / "checkpoint/model.safetensors") for output in (tmp_path / "whole", second)]
    for one, two in ([state_of(tmp_path / "whole"), state_of(second)], of_models):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert metrics(tmp_path / "whole") == metrics(second)
    assert first.name == "checkpoint"


def test_sft_of_adapters_leaves_the_other_weights_and_a_resumed_run_equals_a_whole_one(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", "qwen3", 1300, torch.bfloat16)
    lora = {"lora": {"rank": 4, "targets": ["q_proj", "up_proj"]}, "lr": 5e-2, "activation_checkpointing": True}
    setting, outputs = config(tmp_path, model, trainer=lora), (tmp_path / "whole", tmp_path / "parts")
    pretrain.sft(setting, outputs[0])
    pretrain.sft(setting, outputs[1], stop_after=2)
    pretrain.sft(setting, outputs[1], resume=True)
    of_models = [load_file(output / "checkpoint/model.safetensors") for output in outputs]
    for one, two in (list(map(state_of, outputs)), of_models):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
    before, after = (load_file(one / "model.safetensors") for one in (model, tmp_path / "whole/checkpoint"))
    moved = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"q_proj", "up_proj"}
    assert {t.dtype for t in after.values()} == {torch.bfloat16}
    losses = metrics(tmp_path / "whole")
    assert losses[-1] < losses[0] - 0.1
    assert all(".lora_" in name for name in state_of(outputs[0]))
    wide = write_folder(tmp_path / "wide", "qwen3", 1300, torch.float32)
    with pytest.raises(UserError, match='"bfloat16" would round them'):
        pretrain.sft(config(tmp_path, wide, trainer=lora | {"dtype": "bfloat16"}), tmp_path / "other")
    with pytest.raises(ValueError, match="what a model has learned"):
        ApplyConfig.model_validate(
            {"model": {}, "data": "a", "held_out": "b", "distill": {"teacher": wide}, "trainer": {"lora": {}}}
            | {"phases": [{"share": 1, "longest": 99}]}
        )


def test_sft_of_adapters_of_experts_under_transformers_own_attention(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", "glm", 1300, torch.bfloat16)
    lora = {"rank": 4, "targets": ["experts.gate_up_proj", "experts.down_proj"]}
    setting = config(tmp_path, model, trainer={"lora": lora, "lr": 5e-2, "packing": "none"})
    pretrain.sft(setting, tmp_path / "run")
    before, after = (load_model(one) for one in (model, tmp_path / "run/checkpoint"))
    theirs = dict(after.named_parameters())
    moved = {name for name, tensor in before.named_parameters() if not torch.equal(tensor, theirs[name])}
    assert moved == {name for name in theirs if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    losses = metrics(tmp_path / "run")
    assert losses[-1] < losses[0] - 0.1


def test_bad_input_is_one_sentence_and_leaves_no_run(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", "llama", 1300)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    bare = write_model(tmp_path / "bare", big_tokenizer(1300), None)
    for changes, why in (
        ({"data": {"files": [tmp_path / "none.jsonl"]}}, "neither a file nor a folder"),
        ({"data": {"files": [tmp_path / "bad.jsonl"]}}, "no row of data.files can be learned from"),
        ({"trainer": {"length": 1024}}, "context of 512 tokens: lower trainer.length"),
        ({"trainer": {"device": "cuda:9"}}, "trainer.device = 'cuda:9'"),
        ({"model": bare}, "not a model folder"),
        ({"distill": {"teacher": bare}}, "not a model folder"),
    ):
        with pytest.raises(UserError, match=why):
            pretrain.sft(config(tmp_path, changes.pop("model", model), **changes), tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()


def test_sft_learns_from_a_teacher_with_wider_embeddings(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", "llama", 1300)
    teacher = write_folder(tmp_path / "teacher", "qwen3", 1300, seed=1)
    random_weights("qwen3", 1344, torch.float32, seed=1).save_pretrained(teacher)
    pretrain.sft(config(tmp_path, teacher), tmp_path / "first")
    checkpoint = tmp_path / "first" / "checkpoint"
    pretrain.sft(config(tmp_path, model, distill={"teacher": checkpoint, "share": 0.9}), tmp_path / "run")
    divergence = metrics(tmp_path / "run", "loss/kl")
    assert divergence[-1] < 0.5 * divergence[0]


@pytest.mark.slow
@pytest.mark.smoke
def test_midtraining_goes_on_from_a_folder(tmp_path: Path) -> None:
    """Code, fill-in-the-middle and conversations; a base model without a template learns texts alone."""
    code = [f"def f{i}(items):\n    return [item * {i} for item in items]\n" for i in range(30)]
    middles = [{"prefix": text[:9], "middle": text[9:20], "suffix": text[20:]} for text in code]
    rows = [*({"text": text * 20} for text in code), *middles, *map(chat, range(30))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = write_folder(tmp_path / "model", "qwen3", 1300, torch.bfloat16, max_position_embeddings=8192)
    trainer = {"tokens": 120_000, "batch": 1, "length": 8192, "lr": 2e-2, "threads": 1, "log_every": 1}
    values = {"model": {"path": model}, "trainer": trainer, "data": {"files": [tmp_path / "rows.jsonl"], "epochs": 9}}
    result = pretrain.midtrain(MidtrainConfig.model_validate(values), tmp_path / "mid")
    losses = metrics(tmp_path / "mid")
    assert np.mean(losses[-3:]) < 0.85 * losses[0]
    assert json.loads((tmp_path / "mid" / "data.json").read_text())["files"]["refused_rows"] == 0
    assert AutoTokenizer.from_pretrained(result).get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()
    assert load_model(result, dtype=torch.bfloat16).config.vocab_size == 1300
    base = write_folder(tmp_path / "base", "qwen3", 1300, template=None, max_position_embeddings=8192)
    texts = values | {"model": {"path": base}}
    with pytest.raises(UserError, match=r"no chat template"):
        pretrain.midtrain(MidtrainConfig.model_validate(texts), tmp_path / "no")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:60]))
    pretrain.midtrain(MidtrainConfig.model_validate(texts), tmp_path / "text")
    assert metrics(tmp_path / "text")[-1] < metrics(tmp_path / "text")[0]


@pytest.mark.slow
@pytest.mark.smoke
def test_a_killed_command_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """kill -9 of `etude train` at any time: before the first state is saved, and after."""
    model = write_folder(tmp_path / "model", "llama", 1300)
    config(tmp_path, model)
    text = (
        f'stage = "sft"\nmodel.path = "{model}"\n[data]\nfiles = ["{tmp_path}/chats.jsonl"]\nepochs = 20\n[trainer]\n'
    )
    text += "batch = 1\nlength = 256\nlog_every = 1\nthreads = 1\ncheckpoint_minutes = 0.001\n"
    outputs = [tmp_path / "outputs" / name for name in ("whole", "killed")]
    for output in outputs:
        (tmp_path / f"{output.name}.toml").write_text(f'name = "{output.name}"\n' + text)

    def train(name: str, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "etude.cli.main", "train", str(tmp_path / f"{name}.toml"), *more]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert train("whole").wait(300) == 0
    states = outputs[1] / "checkpoints"
    for saved in (False, True, True):
        seen = checkpoint.versions(states)
        child = train("killed", *(["--resume"] if (outputs[1] / "config.json").exists() else []))
        until = time.monotonic() + 120
        while checkpoint.versions(states) == seen if saved else not (outputs[1] / "config.json").exists():
            assert time.monotonic() < until
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert train("killed", "--resume").wait(300) == 0
    one, two = map(state_of, outputs)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert metrics(outputs[0]) == metrics(outputs[1])
