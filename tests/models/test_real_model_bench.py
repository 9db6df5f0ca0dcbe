"""The benchmark of the real model: the GGUF file that llama.cpp gets, and what figures are made of."""

from pathlib import Path

import numpy as np
import torch
from benchmarks.llama_cpp import interleaved, write_gguf
from benchmarks.real_model import joined
from benchmarks.real_model_speed import copied_share, forced_answer
from benchmarks.real_model_start import memory
from benchmarks.table import Table
from transformers import AutoModelForCausalLM

from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models import attention
from tests.helpers.speakers import hermes_tokenizer
from tests.helpers.tiny_models import random_model


def test_the_gguf_file_holds_the_folder_s_weights(tmp_path: Path) -> None:
    """transformers reads it back by its own rules."""
    tokenizer = hermes_tokenizer()
    model = random_model("llama", tie_word_embeddings=True, vocab_size=tokenizer.get_vocab_size(True))
    model.config.bos_token_id, model.config.eos_token_id = 1, 2
    model.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_gguf(tmp_path, tmp_path / "m.gguf", "F32")
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    assert back.config.rope_parameters["rope_theta"] == model.config.rope_parameters["rope_theta"]
    ours, theirs = model.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_pairs_of_a_head_become_neighbours() -> None:
    rows = np.arange(12, dtype=np.float32)[:, None]
    assert interleaved(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_a_forced_answer_comes_with_the_model_s_own_passes() -> None:
    model = random_model("llama")
    model.set_attn_implementation(attention.NAME)
    engine, answer = Engine(model), [7, 3, 3, 9, 11]
    with forced_answer([5, 6, 8, *answer]):
        row = engine.submit(Request(ids=[5, 6, 8], max_tokens=len(answer), temperature=0.0))
        while not row.future.done():
            engine.step()
    assert row.future.result().ids == answer
    assert engine.counters.sampled_tokens == len(answer)


def test_copied_tokens_are_those_in_long_runs() -> None:
    file = list(range(100))
    assert copied_share(file, file) == 1.0
    assert copied_share([*range(20, 40), *range(500, 520)], file) == 0.5
    assert copied_share([3, 1, 50, 2, 77], file) == 0.0, "short runs are chance"
    assert copied_share([], file) == 0.0


def test_memory_is_read_in_megabytes() -> None:
    assert memory("Name:\tx\nVmHWM:\t  2000 kB\nVmRSS:\t  1500 kB\n") == {"VmRSS": 1.5, "VmHWM": 2.0}


def test_parts_are_joined_under_their_names() -> None:
    table = Table("a")
    table.add("speed", 2.0, "x")
    table.checks["holds"] = True
    found = joined({"one": table.result() | {"absent": {"other": "why"}}, "two": table.result()})
    assert [row["case"] for row in found["rows"]] == ["one/speed", "two/speed"]
    assert found["checks"] == {"one: holds": True, "two: holds": True}
    assert found["absent"] == {"other": "why"}
