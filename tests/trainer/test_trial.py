"""What the trainer asks of a model before its first step."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from etude.audit.architectures.families import FAMILIES, make
from etude.errors import UserError
from etude.models import attention
from etude.models.loading import load_model
from etude.models.support import distance, plain, plain_log_probs, trial_rows
from etude.trainer.rl.execution import run
from etude.trainer.rl.plan import TokenRows
from etude.trainer.rl.plan import rows as plan_rows
from etude.trainer.rl.selfcheck import check
from etude.trainer.rl.trial import allowed, log_probs, refusal
from tests.helpers.tiny_models import save_random_model

BY_TYPE = {family.model_type: family for family in FAMILIES}


def test_a_plain_model_is_computed_as_it_is_asked_for(tmp_path):
    model = load_model(save_random_model(tmp_path / "m"))
    for wanted in ("auto", "rows", "streaming"):
        assert allowed(model, wanted) == wanted


def test_layers_with_a_state_are_trained_row_by_row(tmp_path, capsys):
    """Measured where their rows shared a pass: 1.5 to 8.7 nats off, and nothing said."""
    model = load_model(make(BY_TYPE["qwen3_5_text"], tmp_path / "m"))
    assert allowed(model, "auto") == allowed(model, "rows") == "rows"
    assert (
        "every row is a pass of its own: qwen3_5_text has layers of the kind linear_attention"
        in capsys.readouterr().err
    )
    with pytest.raises(UserError, match="prompts cannot be shared exactly"):
        allowed(model, "packed")
    rows = trial_rows(AutoConfig.for_model("llama", vocab_size=97), seed=3)
    # 1e-4: a state is carried along the row, in another order of sums
    assert distance(log_probs(model, "rows", rows), [plain_log_probs(model, row) for row in rows]) <= 1e-4


def test_a_class_that_drops_the_layout_is_trained_row_by_row(tmp_path):
    """Nemotron hands no keyword arguments on to its attention: a packed pass would be one causal row."""
    model = load_model(make(BY_TYPE["nemotron"], tmp_path / "m"))
    assert refusal(model, "rows") == ""
    assert "differs from transformers' own forward pass" in refusal(model, "shared prompts")
    assert allowed(model, "auto") == "rows"


def test_a_model_whose_rows_are_wrong_is_refused(tmp_path, monkeypatch):
    model = load_model(save_random_model(tmp_path / "m"))
    right = attention.causal
    monkeypatch.setattr(attention, "causal", lambda q, k, v, scale, *form: right(q, k, v, 1.1 * scale, *form))
    with pytest.raises(UserError, match="qwen3_moe differs from transformers"):
        allowed(model, "auto")


def gradients(model, loss):
    model.zero_grad()
    loss()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3"])
def test_gradients_of_windows_sinks_and_latent_attention(tmp_path, model_type):
    """Every execution has those of rows, and rows those of transformers' eager attention. 1e-5 of the largest entry:
    float32, other orders of sums; measured up to 2e-6."""
    model = load_model(make(BY_TYPE[model_type], tmp_path / "m"))
    tokens = TokenRows(
        *zip(
            *(
                (row, np.arange(1, len(row)))
                for row in trial_rows(AutoConfig.for_model("llama", vocab_size=97), seed=4)
            ),
            strict=True,
        )
    )
    for execution in ("packed", "streaming", "recompute"):
        check(model, tokens, execution)  # raises beyond 1e-5

    def ours():
        run(model, plan_rows(tokens), tokens.count, lambda logprobs_M, _: logprobs_M.sum())

    def theirs():
        with plain(model):
            for row in tokens.rows:
                ids_1T = torch.from_numpy(row)[None]
                logprobs_TV = model(input_ids=ids_1T, use_cache=False).logits[0].log_softmax(-1)
                logprobs_TV[:-1].gather(1, ids_1T[0, 1:, None]).sum().backward()

    made, right = gradients(model, ours), gradients(model, theirs)
    assert made.keys() == right.keys()
    assert any("sinks" in name or "kv_b_proj" in name for name in made)
    for name, gradient in right.items():
        assert (made[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
