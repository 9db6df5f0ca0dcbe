"""Reading a run folder, and token texts from a real tokenizer."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.dashboard.view import RunView, load_view, show_run, token_texts
from etude.errors import UserError
from tests.helpers.sample_run import SOLVED, make_episode


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges, so that every non-ASCII character is split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens([AddedToken("<|call|>", special=True)])
    return tokenizer


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "<|call|>edit", "naïve 漢字 🎉!", ""])
def test_token_texts_join_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text).ids
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)


def test_broken_bytes_still_give_one_text_per_token(tokenizer):
    ids = tokenizer.encode("🎉").ids[:2] + tokenizer.encode("abcdef").ids
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts).endswith("f")
    assert len(token_texts(tokenizer, tokenizer.encode("🎉").ids[:3])) == 3


def test_show_takes_the_tokens_of_all_segments(tokenizer):
    episode, texts = make_episode(1, SOLVED, passed=True)
    shown = show_run("a", episode, tokenizer, advantage=0.5, stage="after")
    assert len(shown.token_texts) == len(texts)


def test_series_and_histogram(run_dir):
    view = load_view(run_dir)
    rates = view.series("rollout/pass_rate")
    assert len(rates) == 120
    assert rates[0].minutes == pytest.approx(view.steps[0]["time/step"] / 60)
    assert view.series("no/such/metric") == []
    assert sum(view.histogram("off_policy/histogram").values()) == sum(
        sum(step["off_policy/histogram"].values()) for step in view.steps
    )


def test_memory_by_process(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"time":60,"time/step":60}\n')
    (tmp_path / "memory.jsonl").write_text(
        '{"step":0,"time":0,"memory/trainer":5,"memory/inference-0":7}\n'
        '{"step":1,"time":90,"memory/trainer":6,"memory/inference-0":null}\n'
    )
    held = load_view(tmp_path).held()
    assert [(p.step, p.minutes, p.value) for p in held["trainer"]] == [(0, 0.0, 5.0), (1, 1.5, 6.0)]
    assert [p.value for p in held["inference-0"]] == [7.0]


def test_values_that_are_not_numbers_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step":1,"time":1,"a":NaN}\n{"step":2,"time":2,"a":"x"}\n{"step":3,"time":3,"a":1}\n{"step":4,"time":4,"a":true}\n'
    )
    assert [p.step for p in load_view(tmp_path).series("a")] == [3]


def test_a_cut_last_line_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"time":1}\n{"step":2,"ti')
    assert len(load_view(tmp_path).steps) == 1


@pytest.mark.parametrize("lines", ['{"step":1,"ti\n{"step":2,"time":2}\n', "[1]\n", '{"step":1}\n'])
def test_a_damaged_folder_is_named(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text(lines)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1: not"):
        load_view(tmp_path)


def test_an_empty_folder_is_an_empty_view(tmp_path):
    assert load_view(tmp_path) == RunView()
