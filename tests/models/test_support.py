"""Refusals by configuration, and the trial at load: every mistake that is planted must be said."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.config import MeshConfig
from etude.errors import UserError
from etude.models import block_attention, check_devices, support
from etude.models.attention import SegmentLayout
from etude.models.head import head_of
from etude.models.loading import load_model
from etude.models.segments import trie
from tests.helpers.tiny_models import save_random_model


def rows_of(model, change=lambda logits_TV: logits_TV):
    """The log-probabilities of rows as decoder, attention and head of ours give them."""

    def ours(rows):
        out = []
        for row in rows:
            ids_T = torch.from_numpy(row)
            hidden_TD = model.get_decoder()(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
            logprobs_TV = change(head_of(model).logits(hidden_TD)).log_softmax(-1)
            out.append(logprobs_TV[:-1].gather(1, ids_T[1:, None]).squeeze(1).numpy())
        return out

    return ours


def packed(model):
    def ours(rows):
        tree = trie(rows)
        ids_T, positions_T = torch.from_numpy(tree.graph.ids_T), torch.from_numpy(tree.graph.positions_T)
        hidden_TD = model.get_decoder()(
            input_ids=ids_T[None], position_ids=positions_T[None], layout=SegmentLayout(tree.graph), use_cache=False
        ).last_hidden_state[0]
        logprobs_TV = head_of(model).logits(hidden_TD).log_softmax(-1)
        wheres = [(torch.from_numpy(tree.where(i)), torch.from_numpy(row)) for i, row in enumerate(rows)]
        return [logprobs_TV[at[:-1]].gather(1, row[1:, None]).squeeze(1).numpy() for at, row in wheres]

    return ours


@pytest.mark.parametrize("kind", ["moe", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_model_passes_its_trial(tmp_path, kind, dtype):
    model = load_model(save_random_model(tmp_path / "m", kind), dtype=dtype)
    before = model.config._attn_implementation, model.config._experts_implementation
    for ours in (rows_of(model), packed(model)):
        assert support.trial(model, "rows", ours) == ""
    assert (model.config._attn_implementation, model.config._experts_implementation) == before == ("etude", "etude")


def test_what_is_wrong_is_said(tmp_path):
    model = load_model(save_random_model(tmp_path / "m", "llama"))
    right = rows_of(model)

    def failing(rows):
        raise ValueError("no such kernel")

    wrong = {
        "shifted by a token": lambda rows: [np.roll(row, 1) for row in right(rows)],
        "scaled": rows_of(model, lambda logits_TV: 1.01 * logits_TV),
        "not a number": rows_of(model, lambda logits_TV: logits_TV * torch.nan),
        "a row too few": lambda rows: right(rows)[:2],
        "an error": failing,
    }
    for what, ours in wrong.items():
        said = support.trial(model, "engine", ours)
        assert said.startswith("llama "), what
        assert said.endswith('use inference.engine = "vllm"'), what


def test_a_layer_that_ignores_the_layout_is_found(tmp_path):
    """Some classes do not hand keyword arguments on to their attention: a packed pass then is one causal row."""
    model = load_model(save_random_model(tmp_path / "m", "llama"))
    layer = model.get_decoder().layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, layout=None, **options: forward(*args, **options)
    assert support.trial(model, "rows", rows_of(model)) == ""
    assert "differs from transformers" in support.trial(model, "shared prompts", packed(model))


def small(model_type, **options):
    """A small random model, whose attention matters, with our attention."""
    config = AutoConfig.for_model(
        model_type, vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="etude").eval()


@pytest.mark.parametrize("least", [0, 65], ids=["any window", "beyond 64 tokens"])
@pytest.mark.parametrize("window", [200, 4096])
def test_windows_longer_than_the_trial_are_tried(window, least, monkeypatch):
    model = small("mistral", sliding_window=window)
    assert support.trial(model, "shared prompts", packed(model)) == ""
    right = block_attention.tiles

    def off_by_one(graph, above, window=None):
        return right(graph, above, window + 1 if window and window >= least else window)

    monkeypatch.setattr(block_attention, "tiles", off_by_one)
    assert "differs from transformers" in support.trial(model, "shared prompts", packed(model))
    assert model.config.sliding_window == window


def test_rotary_frequencies_of_long_rows_are_tried():
    """LongRoPE: other frequencies in rows beyond the original length."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 100,
        "short_factor": [1.0] * 8, "long_factor": [3.0] * 8,
    }  # fmt: skip
    model = small("phi3", rope_parameters=rope, original_max_position_embeddings=100, max_position_embeddings=400)
    right, table = rows_of(model), model.config.rope_parameters

    def short_frequencies_alone(rows):
        kept, table["original_max_position_embeddings"] = table["original_max_position_embeddings"], 400
        try:
            return right(rows)
        finally:
            table["original_max_position_embeddings"] = kept

    assert support.trial(model, "rows", right) == ""
    assert "differs from transformers" in support.trial(model, "rows", short_frequencies_alone)
    assert table["original_max_position_embeddings"] == 100
    assert not hasattr(model.model.rotary_emb, "long_inv_freq")  # nothing of the shorter lengths is kept


def test_rows_fit_short_contexts_and_the_memory_of_large_models(tmp_path):
    model = small("mistral", sliding_window=200, max_position_embeddings=24)
    lengths = []

    def counted(rows):
        lengths.extend(map(len, rows))
        return rows_of(model)(rows)

    assert support.trial(model, "rows", counted) == ""
    assert lengths == [24, 20, 24]  # and no row that would cross 200
    assert support.long_rows(small("mistral", sliding_window=4096))[0] == 256
    assert support.long_rows(small("llama")) == (0, [])


def test_what_sees_behind_itself_is_no_causal_model(tmp_path):
    model = small("gemma3_text", use_bidirectional_attention=True, head_dim=16, layer_types=["full_attention"] * 2)
    said = "gemma3_text is an encoder, whose tokens see those behind them: give a causal language model"
    assert support.refusal(model.config, "rows") == support.trial(model, "rows", rows_of(model)) == said


def test_logits_of_an_unknown_form_are_refused(tmp_path):
    model = load_model(save_random_model(tmp_path / "m", "llama"))
    forward = model.forward

    def changed(*args, **options):
        out = forward(*args, **options)
        out.logits = out.logits.sinh()
        return out

    model.forward = changed
    assert "changes its logits in a way that is not known" in support.trial(model, "rows", rows_of(model))


CONFIGS = {
    "qwen3": {},
    "qwen3_next": {},
    "mistral": {"sliding_window": 64},
    "gemma2": {},
    "gpt_oss": {},
    "glm_moe_dsa": {},
    "deepseek_v3": {},
    "llama4_text": {},
    "t5": {},
}
REFUSED = {
    "rows": {
        "gemma2": "attn_logit_softcapping", "glm_moe_dsa": "indexed_attention", "llama4_text": "chunked", "t5": "t5",
    },
    "shared prompts": {"qwen3_next": "linear_attention, which carry a state"},
    "engine": {"qwen3_next": "linear_attention"},
}  # fmt: skip


@pytest.mark.parametrize("use", support.USES)
def test_what_a_configuration_tells(use):
    expected = REFUSED["rows"] | REFUSED[use]
    for name, options in CONFIGS.items():
        said = support.refusal(AutoConfig.for_model(name, **options), use)
        assert (expected[name] in said) if name in expected else said == "", (name, said)


def test_a_layer_of_a_kind_that_nobody_knows_is_refused_where_rows_share_a_pass():
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2)
    config.layer_types = ["full_attention", "tidal_attention"]
    assert support.refusal(config, "rows") == ""  # one row at a time is left to the trial
    assert "tidal_attention, which are not known here" in support.refusal(config, "engine")


def head_models():
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    yield "granite", sizes | {"logits_scaling": 4.0}
    yield "cohere", sizes | {"logit_scale": 0.25}
    yield "phi", sizes
    yield "gemma3_text", sizes | {"final_logit_softcapping": 3.0, "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(("name", "options"), list(head_models()))
def test_scale_bias_and_cap_of_logits(name, options):
    """Measured without them: log-probabilities off by 0.7 (Phi) to 7.7 (Granite). Exact to the order of sums."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **options)).eval()
    head = head_of(model)
    assert not head.plain
    if head.bias_V is not None:
        torch.nn.init.normal_(head.bias_V)
    ids = torch.randint(0, 97, (1, 20))
    with torch.no_grad():
        hidden_TD = model.get_decoder()(input_ids=ids).last_hidden_state[0]
        assert (head.logits(hidden_TD) - model(input_ids=ids).logits[0]).abs().max() <= 1e-5


@pytest.mark.parametrize(("kind", "options", "mesh", "sentence"), [
    ("qwen3_moe", {}, {"shard": 4, "expert": 4}, ""),
    ("glm4_moe", {}, {"shard": 4, "expert": 2}, ""),
    ("deepseek_v3", {}, {"shard": 8, "expert": 8}, ""),
    ("qwen3", {}, {"shard": 8}, ""),
    ("qwen3", {}, {"shard": 4, "expert": 2}, "qwen3 has no experts: drop trainer.mesh.expert = 2"),
    ("qwen3_moe", {"num_experts": 6}, {"shard": 4, "expert": 4},
     "trainer.mesh.expert = 4 must divide the 6 experts of qwen3_moe"),
    ("gpt2", {}, {"shard": 2}, "transformers has no plan for dividing the layers of gpt2: drop trainer.mesh"),
    ("doge", {}, {"shard": 2, "expert": 2},
     "transformers has no plan for dividing the experts of doge: drop trainer.mesh.expert = 2"),
])  # fmt: skip
def test_a_mesh_that_does_not_fit_the_architecture_is_refused(kind, options, mesh, sentence):
    config = AutoConfig.for_model(kind, num_hidden_layers=4, **options)
    assert support.mesh_refusal(config, MeshConfig(**mesh)) == sentence
    assert support.mesh_refusal(config, MeshConfig()) == ""


def test_ranks_need_a_device_each(monkeypatch):
    check_devices("cpu", 8)
    monkeypatch.setattr("etude.models.devices.check_device", lambda name, option: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices("cuda", 2)
    with pytest.raises(
        UserError, match=r"trainer\.mesh has 4 ranks with a device each, and 2 of trainer\.device = 'cuda'"
    ):
        check_devices("cuda", 4)
