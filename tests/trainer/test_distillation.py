"""Distillation: the loss against one computed by hand, agreement, and a student that comes closer to its teacher."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from models.make_nano import tokenizer as bpe
from models.make_nano.tokenizer import save as save_tokenizer

from etude.errors import UserError
from etude.trainer.finetune import applied_edits, distillation, pretrain
from etude.trainer.finetune.packed import PackedPass
from tests.helpers.apply_edits import MODEL, config, example

PHASES = ({"share": 1.0, "longest": 256},)


def test_the_loss_is_the_one_computed_by_hand() -> None:
    # Teacher (3/4, 1/4) and (1/2, 1/2), student (1/2, 1/2) and (1/4, 3/4), labels 0 and 1; the third has weight 0.
    teacher_KV = torch.tensor([[3.0, 1.0], [1.0, 1.0], [9.0, 1.0]], dtype=torch.float64).log()
    student_KV = torch.tensor([[2.0, 2.0], [1.0, 3.0], [1.0, 9.0]], dtype=torch.float64).log()
    targets_K, weights_K = torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    loss, kl = distillation.mixed(student_KV, teacher_KV, targets_K, weights_K, 0.25)
    labels = (math.log(2) + math.log(4 / 3)) / 2
    first = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    second = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert float(kl) == pytest.approx((first + second) / 2, abs=1e-12)  # float64
    assert float(loss) == pytest.approx(0.75 * labels + 0.25 * (first + second) / 2, abs=1e-12)


def test_a_student_that_equals_its_teacher_has_no_divergence_and_no_gradient() -> None:
    model, teacher = pretrain.new_model(MODEL, 0).float(), pretrain.new_model(MODEL, 0).float().requires_grad_(False)
    other = pretrain.new_model(MODEL, 1).float().requires_grad_(False)
    torch.manual_seed(0)
    ids_BT, targets_K = torch.randint(0, 360, (2, 24)), torch.randint(0, 360, (36,))
    batch = PackedPass(ids_BT, torch.arange(4, 40), targets_K, torch.ones(36), torch.tensor(36.0))

    def gradient(of: torch.nn.Module) -> tuple[float, float]:
        model.zero_grad()
        loss, *_, parts = distillation.loss_function(model, of, 1.0)(batch)
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        return float(parts["loss/kl"]), norm

    kl, norm = gradient(teacher)
    far, much = gradient(other)
    # Float32: the same passes, so the same logits; what is left is softmax rounding (1e-7) times the backward pass.
    assert abs(kl) < 1e-6
    assert norm < 1e-4 * much
    assert far > 1e-3
    assert all(p.grad is None for p in (*teacher.parameters(), *other.parameters()))


@pytest.mark.slow
def test_a_smaller_student_learns_from_a_folder_and_takes_its_tokenizer(folder: Path) -> None:
    applied_edits.finetune(config(folder, tokens=20_000, phases=PHASES), folder / "run")
    small = {"vocab_size": 360, "hidden_size": 24, "intermediate_size": 32, "layers": 2, "heads": 2, "kv_heads": 1,
             "head_dim": 12, "expert_size": 16, "experts": 4, "max_positions": 512}  # fmt: skip
    distill = {"teacher": folder / "run" / "checkpoint", "share": 0.5}
    setting = config(folder, model=small, distill=distill, tokens=20_000, phases=PHASES)
    checkpoint = applied_edits.finetune(setting, folder / "small")
    rows = [json.loads(line) for line in (folder / "small" / "metrics.jsonl").read_text().splitlines()]
    divergence = [row["loss/kl"] for row in rows if "loss/kl" in row]
    assert sum(divergence[-3:]) / 3 < 0.5 * divergence[0]
    assert bpe.load(checkpoint).to_str() == bpe.load(folder / "model").to_str()
    assert json.loads((checkpoint / "config.json").read_text())["hidden_size"] == 24


def test_bad_teachers_are_one_sentence(folder: Path) -> None:
    def run(**changes: object) -> None:
        applied_edits.finetune(config(folder, phases=PHASES, **changes), folder / "run")

    shape = {**MODEL.model_dump(), "vocab_size": 400}
    with pytest.raises(UserError, match="not a model folder"):
        run(distill={"teacher": folder / "none"})
    with pytest.raises(UserError, match="vocab_size = 400"):
        run(model=shape, distill={"teacher": folder / "model"})
    save_tokenizer(bpe.train([example(1).file * 9], 300), folder / "other", 512)
    pretrain.new_model(MODEL, 0).save_pretrained(folder / "other")
    with pytest.raises(UserError, match="different tokenizers"):
        run(distill={"teacher": folder / "other"})
    with pytest.raises(ValueError, match="takes its tokenizer from a teacher"):
        config(folder, model=MODEL.model_dump())
    with pytest.raises(UserError, match=r"lower trainer\.length"):
        run(length=1024, distill={"teacher": folder / "model"})
    assert not (folder / "run").exists()
