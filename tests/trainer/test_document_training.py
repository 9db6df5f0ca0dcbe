"""Training on documents: its forward is the engine's, its loss and gradients those of a plain loop, and it learns.

Tolerance of logits 1e-5 (float32 on both sides, logits of size 2; what differs is the order of sums), of gradients
1e-5 relative L2.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models.make_nano import tokenizer as bpe
from models.make_nano.tokenizer import save as save_tokenizer
from models.make_nano.tokenizer import train as train_tokenizer
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from etude.corpus import RetrievalOptions, folder_functions, retrieval_samples
from etude.errors import UserError
from etude.inference.engine.cache import PagedCache
from etude.inference.engine.documents import Documents
from etude.inference.engine.forward import logits_of as engine_logits
from etude.inference.engine.requests import Request, RunningSequence
from etude.models import attention, experts
from etude.models.kernels import BLOCK
from etude.models.key_values import configured
from etude.renderers import renderer_for
from etude.renderers.base import document_text
from etude.trainer.finetune import document_masks, pretrain
from etude.trainer.finetune.config import DataConfig, DocumentsConfig, NewModelConfig, OptimConfig, SftConfig
from etude.trainer.finetune.config import load as load_stage
from etude.trainer.finetune.document_masks import (
    DocumentBatch,
    DocumentBatches,
    DocumentSample,
    graph_of,
    logits_of,
    predicting,
)
from tests.helpers.folders import state_of
from tests.helpers.tiny_models import random_model

TOLERANCE = 1e-5
MODEL = NewModelConfig(
    vocab_size=400, hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1, head_dim=64, expert_size=16,
    experts=4, max_positions=2048,
)  # fmt: skip
WORDS = ("chunk", "merge", "split", "count", "group")
CODE = {
    word: f"def {word}_items(items, size={n}):\n    return [item for item in items if item > size]\n\n\n"
    f"def {word}_all(first, key_{n}):\n    total = key_{n}(first)\n    return total\n"
    for n, word in enumerate(WORDS)
}


def ours(kind: str = "moe") -> PreTrainedModel:
    model = random_model(kind, 0, initializer_range=0.1)
    model.set_attn_implementation(attention.NAME)
    model.set_experts_implementation(experts.NAME)
    return model


def made(sizes: tuple[int, ...], tails: tuple[int, ...], seed: int) -> DocumentSample:
    """Random tokens; the last third of each tail is learned."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(32, 97, size).astype(np.uint16) for size in (*sizes, *tails)]
    learned = [(np.arange(n) >= n - max(1, n // 3)).astype(np.uint8) for n in tails]
    return DocumentSample(tuple(ids[: len(sizes)]), tuple(zip(ids[len(sizes) :], learned, strict=True)))


SAMPLES = [made((40, 5, 33), (12, 9), 1), made((), (20,), 2), made((17, 64), (7,), 3)]


@torch.inference_mode()
def from_the_engine(model: PreTrainedModel, sample: DocumentSample, tail: np.ndarray) -> Tensor:
    """Logits [T, V] of a tail on cached documents, assembled in another order before and then in the sample's."""
    cache = PagedCache(
        configured(model.config), num_bytes=2**22, max_length=512, dtype=torch.float32, device=torch.device("cpu")
    )
    store = Documents(model, cache, 2**26, routes=False)
    for order in (sample.documents[::-1], sample.documents):
        request = Request(ids=tail.tolist(), max_tokens=1, documents=tuple(ids.tolist() for ids in order))
        row = RunningSequence(request, None, None)
        while not store.gather(row, 0, 0):
            assert store.compute(50, 0, serial=False)
        row.pages = list(range(-(-len(request.prompt) // BLOCK)))
        store.assemble(row, 0)
    every = np.arange(len(tail))
    table = np.array([row.pages], dtype=np.int32)
    return engine_logits(model, cache, table, tail.astype(np.int64), 0 * every, request.document_tokens + every, every)


def places(tails: list[int], before: int) -> list[Tensor]:
    starts = list(accumulate(tails, initial=before))
    return [torch.arange(start, start + n) for start, n in zip(starts, tails, strict=False)]


def test_the_masked_forward_of_training_is_that_of_the_engine() -> None:
    model = ours()
    graph = graph_of(SAMPLES, [True] * 3, length=512)
    assert graph.length == 512
    at = 0
    for sample in SAMPLES:
        at += sum(map(len, sample.documents))
        for (tail, _), index in zip(sample.tails, places([len(ids) for ids, _ in sample.tails], at), strict=True):
            with torch.no_grad():
                trained = logits_of(model, graph, index)
            at += len(tail)
            if not sample.documents:
                continue
            served = from_the_engine(model, sample, tail)
            assert (trained - served).abs().max() <= TOLERANCE
            # The test can fail: the other mask is another function.
            with torch.no_grad():
                full = logits_of(model, graph_of(SAMPLES, [False] * 3, length=512), index)
            assert (full - served).abs().max() > 100 * TOLERANCE


def plain_logits(model: PreTrainedModel, sample: DocumentSample, tail: np.ndarray) -> Tensor:
    """Logits [T, V] of a tail in an ordinary row of all documents and itself, by the model alone."""
    ids = np.concatenate([*sample.documents, tail]).astype(np.int64)
    return model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, -len(tail) :]


def masked_logits(model: PreTrainedModel, sample: DocumentSample, tail: np.ndarray) -> Tensor:
    """The same with every document seeing itself only, as one row of its own."""
    one = DocumentSample(sample.documents, ((tail, np.ones(len(tail), np.uint8)),))
    before = sum(map(len, sample.documents))
    return logits_of(model, graph_of([one], [True]), torch.arange(before, before + len(tail)))


def test_under_the_full_mask_a_tail_is_an_ordinary_row() -> None:
    model = ours()
    with torch.no_grad():
        index_K, targets_K, of_K = predicting(SAMPLES)
        ours_KV = logits_of(model, graph_of(SAMPLES, [False] * 3, length=512), torch.from_numpy(index_K))
        expected = []
        for sample in SAMPLES:
            for tail, mask in sample.tails:
                expected.append(plain_logits(model, sample, tail)[np.flatnonzero(mask) - 1])
    assert (ours_KV - torch.cat(expected)).abs().max() <= TOLERANCE
    assert targets_K.tolist() == [int(t) for s in SAMPLES for ids, mask in s.tails for t in ids[mask > 0]]
    assert of_K.tolist() == [i for i, s in enumerate(SAMPLES) for _, mask in s.tails for _ in range(int(mask.sum()))]


def by_a_loop(model: PreTrainedModel, own: list[bool], kl: float, *, taught: bool) -> Tensor:
    """The loss of the module's docstring, one row per tail. `taught`: the teacher has a gradient, as it must not."""
    entropy, divergence, count = torch.zeros(()), torch.zeros(()), 0
    for sample, alone in zip(SAMPLES, own, strict=True):
        for tail, mask in sample.tails:
            learned = np.flatnonzero(mask)
            targets = torch.from_numpy(tail[learned].astype(np.int64))
            full = plain_logits(model, sample, tail)[learned - 1].log_softmax(-1)
            said = masked_logits(model, sample, tail)[learned - 1].log_softmax(-1) if alone else full
            entropy = entropy - said.gather(1, targets[:, None]).sum()
            if alone:
                full = full if taught else full.detach()
                divergence = divergence + (full.exp() * (full - said)).sum()
            count += len(learned)
    return (entropy + kl * divergence) / count


def gradients(model: PreTrainedModel, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("own", [[True, False, True], [True, False, False], [False, False, False]])
def test_loss_and_gradients_are_those_of_a_plain_loop(own: list[bool]) -> None:
    model, kl = ours(), 0.7
    loss, _, load_LE, parts = document_masks.loss_function(model, kl)(DocumentBatch.of(SAMPLES, own, 512))
    expected = by_a_loop(model, own, kl, taught=False)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (parts["loss/kl"].item() > 0.01) == any(own)
    assert load_LE.sum(-1) == pytest.approx([1.0] * len(load_LE))
    mine, theirs = gradients(model, loss), gradients(model, expected)
    assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    if any(own):  # The test can fail: a teacher that learns gives another gradient.
        taught = gradients(model, by_a_loop(model, own, kl, taught=True))
        assert (taught - theirs).norm() > 1e-2 * theirs.norm()


def test_the_divergence_has_the_slope_of_its_differences() -> None:
    """Along a random direction of the embeddings, in steps that float32 resolves; the teacher stands still. Dense: a
    router that changes its mind has no slope."""
    model = ours("qwen3")
    batch = DocumentBatch.of(SAMPLES, [True, False, True], 512)
    compute = [document_masks.loss_function(model, kl) for kl in (0.0, 1.0)]
    teacher_MV = logits_of(model, batch.teacher, batch.teacher_M).detach().log_softmax(-1)
    weight = model.get_input_embeddings().weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    slopes = []
    for one in compute:
        model.zero_grad()
        one(batch)[0].backward()
        slopes.append((weight.grad * direction).sum().item())

    @torch.no_grad()
    def divergence(step: float) -> float:
        weight.add_(step * direction)
        student_MV = logits_of(model, batch.graph, batch.index_K)[batch.own_M].log_softmax(-1)
        weight.sub_(step * direction)
        return (F.kl_div(student_MV, teacher_MV, reduction="sum", log_target=True) / len(batch.index_K)).item()

    step = 3e-4
    expected = (divergence(step) - divergence(-step)) / (2 * step)
    assert slopes[1] - slopes[0] == pytest.approx(expected, rel=0.02)


def test_half_of_the_samples_see_themselves_only_and_rows_repeat() -> None:
    many = [made((20, 20, 9), (8,), seed) for seed in range(400)] + [made((), (30,), seed) for seed in range(40)]
    batches = DocumentBatches.of(many, 256, 0.5, seed=3)
    assert sorted(i for row in batches.rows for i in row) == list(range(len(many))), "each sample once"
    drawn = [batches[i][0] for i in range(len(batches))]
    assert all(batch.graph.length == 256 for batch in drawn)
    own = sum(len(batch.own_M) for batch in drawn) / sum(int(s.tails[0][1].sum()) for s in many[:400])
    assert 0.4 < own < 0.6
    again = DocumentBatches.of(many, 256, 0.5, seed=3)[5][0]
    assert again.own_M.tolist() == drawn[5].own_M.tolist()
    assert again.graph.ids_T.tolist() == drawn[5].graph.ids_T.tolist()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "demo").mkdir()
    for word, code in CODE.items():
        (tmp_path / "demo" / f"{word}.py").write_text(code)
    assert len(folder_functions(tmp_path / "demo")) == 2 * len(WORDS)
    return tmp_path / "demo"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model = pretrain.new_model(MODEL, 0)
    model.save_pretrained(tmp_path / "base")
    text = [f"Complete the definition: Name the file that defines value {code}" for code in CODE.values()]
    save_tokenizer(train_tokenizer(text * 4, 400), tmp_path / "base", 2048)
    return tmp_path / "base"


def config(base: Path, tokens: int, repository: Path, **chosen: object) -> SftConfig:
    optim = OptimConfig(tokens=tokens, batch=2, length=512, lr=1e-2, compile=False, threads=1, log_every=1, warmup=0.05)
    documents = {"repositories": [repository], "held_out": [repository], **chosen}
    rows = repository.with_suffix(".jsonl")
    chat = {"messages": [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "value = 1"}]}
    rows.write_text("\n".join([json.dumps(chat)] * 40))
    data = {"files": [rows], "epochs": 100} if documents.get("share", 1) < 1 else None
    return SftConfig.model_validate({"model": {"path": base}, "trainer": optim, "documents": documents, "data": data})


def test_samples_are_encoded_as_the_engine_encodes_chats(base: Path, repository: Path) -> None:
    sample = next(retrieval_samples(folder_functions(repository), RetrievalOptions(), 0))
    tokenizer, renderer = bpe.load(base), renderer_for(base)
    [encoded] = document_masks.encode(renderer, [sample])
    tokenizer.encode_special_tokens = True
    texts = [document_text(title, text) for title, text in sample.documents]
    assert [ids.tolist() for ids in encoded.documents] == [tokenizer.encode(text).ids for text in texts]
    for (ids, mask), question in zip(encoded.tails, sample.questions, strict=True):
        prompt = renderer.prompt([{"role": "user", "content": question.text}])
        assert ids[: len(prompt)].tolist() == prompt
        assert not mask[: len(prompt)].any()
        assert mask[len(prompt) :].all()
        assert tokenizer.decode(ids[len(prompt) : -1].tolist()) == question.answer
        assert ids[-1] in renderer.stop_ids


@pytest.mark.slow
def test_fine_tuning_on_documents_learns_and_resumes_bit_for_bit(base: Path, repository: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    folder = pretrain.sft(config(base, 40_000, repository, share=0.8), whole)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss/token"] for row in rows if "loss/token" in row]
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
    assert {"eval/full/nll", "eval/full/exact", "eval/own/nll", "eval/own/exact"} <= rows[-1].keys()
    assert (folder / "tokenizer.json").is_file()
    pretrain.sft(config(base, 40_000, repository, share=0.8), parts, stop_after=7)
    pretrain.sft(config(base, 40_000, repository, share=0.8), parts, resume=True)
    one, two = state_of(whole), state_of(parts)
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"least": 9, "most": 8}, "more than documents.most"),
        ({"kinds": {"colour": 1.0}}, "unknown kind of question 'colour'; known: signature"),
        ({"kinds": {"file": 0.0, "call": 0.0}}, "above 0"),
        ({"own": 1.5}, "less than or equal to 1"),
    ],
)
def test_impossible_configurations_are_refused(chosen: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DocumentsConfig.model_validate({"repositories": ["a"], **chosen})


def test_combinations_that_cannot_work_are_refused(tmp_path: Path) -> None:
    documents = {"repositories": [tmp_path]}
    values = {"model": {"path": tmp_path}, "documents": documents}
    with pytest.raises(ValidationError, match="without compilation"):
        SftConfig.model_validate(values | {"trainer": {"compile": True, "packing": "crossing"}})
    for wrong in ({"data": {"files": ["a.jsonl"]}}, {"documents": documents | {"share": 0.5}}):
        with pytest.raises(ValidationError, match=r"with documents.share below 1"):
            SftConfig.model_validate(values | wrong)


def test_held_out_rows_beside_documents_are_refused(tmp_path: Path) -> None:
    values = {"model": {"path": tmp_path}, "documents": {"repositories": [tmp_path], "share": 0.5}}
    with pytest.raises(ValidationError, match=r"give documents\.held_out, not data\.held_out"):
        SftConfig.model_validate(values | {"data": {"files": ["a.jsonl"], "held_out": ["b.jsonl"]}})


def test_sources_beside_documents_are_mixed_recorded_and_may_not_change(
    base: Path, repository: Path, tmp_path: Path
) -> None:
    chosen = config(base, 3_000, repository, share=0.5)
    rows, more = repository.with_suffix(".jsonl"), tmp_path / "more.jsonl"
    more.write_text("{}\n" + rows.read_text())
    sources = [{"path": rows, "weight": 3, "epochs": 99}, {"path": more, "epochs": 99}]
    values = {"data": DataConfig.model_validate({"sources": sources})}
    chosen, run = chosen.model_copy(update=values), tmp_path / "run"
    pretrain.sft(chosen, run, stop_after=1)
    report = json.loads((run / "data.json").read_text())
    assert [report[str(path)]["rows"] for path in (rows, more)] == [
        40,
        29,
    ]  # a quarter of the tokens, and the first epoch
    assert report[str(more)]["refused"][0]["row"] == "more.jsonl:1"
    files = [one["path"] for one in json.loads((run / "files.json").read_text())]
    assert files == [str(path) for path in (repository, rows, more)]
    for path in (more, repository / "chunk.py"):
        before = path.read_text()
        path.write_text(before.replace("value", "other").replace("size", "most"))
        with pytest.raises(UserError, match=f"{path if path == more else repository} has changed since the run began"):
            pretrain.sft(chosen, run, resume=True)
        path.write_text(before)
    pretrain.sft(chosen, run, resume=True, stop_after=2)


def test_repositories_with_too_little_code_are_named(base: Path, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    with pytest.raises(UserError, match=r"documents\.repositories: no package has short functions in at least"):
        pretrain.sft(config(base, 4_000, tmp_path / "small"), tmp_path / "run")
    with pytest.raises(UserError, match=r"documents\.held_out: no package has"):
        pretrain.sft(config(base, 600, repository, held_out=[tmp_path / "small"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_repositories_and_data_that_end_early_are_named(base: Path, repository: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"documents.held_out: .*nowhere is not a folder"):
        pretrain.sft(config(base, 4_000, repository, held_out=[tmp_path / "nowhere"]), tmp_path / "run")
    with pytest.raises(UserError, match=r"documents.repositories: .*nowhere is not a folder"):
        pretrain.sft(config(base, 4_000, tmp_path / "nowhere"), tmp_path / "run")
    short = config(base, 40_000, repository, share=0.5)
    assert short.data is not None
    short = short.model_copy(update={"data": short.data.model_copy(update={"epochs": 1})})
    with pytest.raises(UserError, match=r"and 20,000 are needed: raise its epochs"):
        pretrain.sft(short, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_recipe_loads(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "models/nano/recipes/documents.toml"
    whole = tmp_path / "whole.toml"
    whole.write_text(recipe.read_text().replace("[documents]", '[documents]\nrepositories = ["a"]'))
    loaded = load_stage(whole)
    assert isinstance(loaded, SftConfig)
    assert loaded.documents is not None
    assert loaded.documents.own == 0.5
