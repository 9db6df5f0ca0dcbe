"""Dropout and noise of routers: training computes the model that is served, without them."""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from etude.audit.architectures.families import _LOCAL, Family, make
from etude.models import support
from etude.models.loading import load_model
from etude.trainer.activations import checkpoint_activations
from etude.trainer.rl import trial

NOISY = (
    Family("jitter of the router", "mixtral", {**_LOCAL, "router_jitter_noise": 0.1}),
    Family("jitter of both", "phimoe", {
        **_LOCAL, "router_jitter_noise": 0.01, "input_jitter_noise": 0.1, "hidden_dropout": 0.1,
    }),
    Family("dropout", "gpt2", {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0, "n_embd": 128, "n_head": 2}),
    Family("dropout of attention", "llama", {"attention_dropout": 0.3}),
)  # fmt: skip


@pytest.mark.parametrize("family", NOISY, ids=lambda family: family.name)
def test_a_model_with_noise_is_trained_without(family, tmp_path, capsys):
    model = load_model(make(family, tmp_path / "m"))
    capsys.readouterr()
    support.say_noise(model)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for key, value in family.options.items():
        if "drop" in key or "jitter" in key:
            assert (key in said) == (value > 0)
    assert trial.refusal(model, "shared prompts") == ""
    checkpoint_activations(model)
    assert trial.allowed(model, "streaming") == "streaming"
    ids = torch.randint(3, 97, (1, 20))
    first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert first.requires_grad
    assert torch.equal(first, second)
    assert trial.refusal(model.train(), "rows") != ""  # with noise no execution would be exact


@pytest.mark.parametrize("offload", [False, True])
def test_a_layer_that_drops_hidden_states_itself_drops_none_when_it_is_computed_again(offload):
    config = OPTConfig(
        vocab_size=50, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, dropout=0.3,
    )  # fmt: skip
    model, ids = OPTForCausalLM(config).eval(), torch.arange(20)[None]

    def gradients() -> list[torch.Tensor]:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients()
    checkpoint_activations(model, offload=offload)
    assert all(map(torch.equal, gradients(), expected))


def test_a_model_without_noise_has_no_note(tmp_path, capsys):
    support.say_noise(load_model(make(Family("plain", "llama"), tmp_path / "m")))
    assert capsys.readouterr().err == ""
