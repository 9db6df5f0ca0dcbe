"""The cut of a row, and the models whose rows are not cut. Ranks compute in `tests.trainer.test_context_parallel`."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from etude.models import context_parallel, support
from etude.models.batch_invariant import batch_invariant
from etude.models.context_parallel import Heads, RowSlice


def test_slices_are_the_row_and_its_padding():
    for tokens, ranks in ((8, 2), (7, 2), (9, 4), (3, 4), (1, 4)):
        slices = [RowSlice(tokens, -(-tokens // ranks), index, ranks) for index in range(ranks)]
        row = np.arange(tokens)
        cuts = [one.cut(row, -1) for one in slices]
        assert {len(cut) for cut in cuts} == {slices[0].length}
        whole = np.concatenate(cuts)
        assert whole[:tokens].tolist() == row.tolist()
        assert (whole[tokens:] == -1).all()
        assert [cut[: one.here.stop - one.here.start].tolist() for cut, one in zip(cuts, slices, strict=True)] == [
            row[one.here].tolist() for one in slices
        ]


def test_a_rank_alone_has_the_whole_row_and_no_collective():
    """One process takes no other path, and copies nothing."""
    one, row = context_parallel.row_slice(5), np.arange(5)
    assert (one.length, one.ranks, one.here) == (5, 1, slice(0, 5))
    assert one.cut(row).base is row
    with context_parallel.computing(one):
        assert context_parallel.current() is None
    assert context_parallel.alone()
    assert context_parallel.leads()
    number_N = torch.ones(2)
    assert context_parallel.total(number_N) is number_N
    with batch_invariant():
        assert context_parallel.row_slice(5).length == 16


def test_heads_that_ranks_do_not_divide_and_several_rows_are_no_row():
    for shape in ((1, 3, 4, 8), (2, 4, 4, 8)):
        x_BHTD = torch.zeros(shape)
        with pytest.raises(ValueError, match="2 ranks compute one row"):
            RowSlice(8, 4, 0, 2).gathered(Heads(x_BHTD, x_BHTD, x_BHTD, None))


CONFIGS = {
    "qwen3": {},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "gemma3_text": {},
    "mistral": {"sliding_window": 64},
}
REFUSED = {
    "qwen3_next": "linear_attention, which carry a state",
    "falcon_h1": "which carry a state",
    "mamba2": "which carry a state",
    "lfm2": "conv, which carry a state",
    "rwkv": "no one number of attention heads",
    "jamba": "which carry a state",
    "glm_moe_dsa": "indexed_attention, which choose the keys",
    "llama4_text": "chunked_attention, which see by chunks",
}


def test_what_mixes_tokens_outside_of_attention_is_refused():
    for name, options in CONFIGS.items():
        assert support.context_refusal(AutoConfig.for_model(name, **options), 2) == "", name
    for name, why in REFUSED.items():
        options = {"layer_types": ["conv", "full_attention"] * 16} if name == "lfm2" else {}
        config = AutoConfig.for_model(name, **options)
        assert why in (message := support.context_refusal(config, 2)), (name, message)
        assert message.endswith("set trainer.mesh.context to 1")
        assert support.context_refusal(config, 1) == ""


def test_ranks_divide_the_heads():
    config = AutoConfig.for_model("qwen3", num_attention_heads=12, num_key_value_heads=4)
    assert [n for n in range(1, 13) if not support.context_refusal(config, n)] == [1, 2, 3, 4, 6, 12]
    message = support.context_refusal(config, 8)
    assert message == "qwen3 has 12 attention heads, which 8 ranks do not divide: set trainer.mesh.context to 6"


def test_frequencies_by_the_longest_row_are_refused():
    config = AutoConfig.for_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert "from the longest row of a pass (dynamic)" in support.context_refusal(config, 2)
