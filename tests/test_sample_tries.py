"""A model's own wrong edits, sampled by the real engine and trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.corpus import build, tries
from etude.corpus.filters import Function, functions
from etude.corpus.sources import File
from etude.sample_tries import sample_tries
from etude.trainer import pretrain
from etude.trainer.pretrain_config import (
    CorpusConfig,
    MidtrainConfig,
    MixConfig,
    ModelConfig,
    OptimConfig,
    SftConfig,
    ShapesConfig,
    TriesConfig,
)

CODE = "\n\n\n".join(f"def f{i}(a):\n    b = a + {i}\n    return b" for i in range(12))
MODEL = ModelConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1, head_dim=16, expert_size=16,
    experts=4, max_positions=256,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found: tuple[Function, ...] = tuple(functions(File("demo", "demo/sums.py", CODE)))
    corpus = build.Corpus(found, (), {"functions": {"kept": len(found)}})
    monkeypatch.setattr(build, "build_corpus", lambda *args, **kwargs: corpus)


def _optim(tokens: int) -> OptimConfig:
    return OptimConfig(tokens=tokens, batch=4, length=256, lr=5e-3, compile=False, threads=1)


def test_wrong_edits_of_a_model_are_sampled_and_trained_after(tmp_path: Path) -> None:
    midtrain = MidtrainConfig(
        output=tmp_path / "mid", model=MODEL, optim=_optim(50_000), mix=MixConfig(code=0, fim=0, repair=1)
    )
    model = pretrain.midtrain(midtrain)
    config = SftConfig(
        output=tmp_path / "sft",
        model=model,
        shapes=ShapesConfig(blind=0, tested=0.2, recovers=0.7, no_match=0, gives_up=0.1),
        corpus=CorpusConfig(),
        optim=_optim(5_000),
        tries=TriesConfig(functions=12, samples=8),
    )
    with pytest.raises(ValueError, match="is missing"):
        pretrain.sft(config)
    assert not (tmp_path / "sft").exists()
    found = tries.load(sample_tries(config))
    assert found, "a model of so little training makes no mistakes"
    for one in found:
        assert len(set(one.wrong)) == len(one.wrong)
        for edit in one.wrong:
            applied = None if edit.refusal(one.broken.source) else edit.apply(one.broken.source)
            assert applied != one.broken.function.source
    pretrain.sft(config)
    assert (tmp_path / "sft" / "checkpoint" / "model.safetensors").is_file()
