"""Pretrained models of the package index, by name: one case of each part that depends on the model. The other tests
take small random models, which have few layers, small logits and flat distributions.

smollm2 runs in the gate, gemma3-270m (windows, norms around each block, a head of 262,144 tokens) with the slow tests.
A model that is not in the cache is fetched; where it cannot be, its tests skip.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from etude.audit.architectures.table import Examined
from etude.config import LoraConfig, TrainerConfig
from etude.errors import UserError
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models import support
from etude.models.batch_invariant import batch_invariant
from etude.models.dtypes import published_dtypes
from etude.models.head import head_of
from etude.models.loading import load_model, model_id, named_tensors
from etude.models.lora import DOWN, UP, merged
from etude.renderers import renderer_for
from etude.renderers.base import load_tokenizer
from etude.renderers.template import with_chat_template
from etude.store import open_store
from etude.trainer.lora import for_adapters
from etude.trainer.optimizer import for_policy
from etude.trainer.rl import execution, trial
from etude.trainer.rl.plan import TokenRows, plan, shape_of
from etude.trainer.rl.plan import rows as plan_rows
from etude.weights.publisher import Publisher
from etude.weights.receiver import Receiver
from etude.weights.runs import model_folder
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.engines import CONFIG, serving
from tests.inference.test_documents import masked
from tests.inference.test_engine import run

pytestmark = [pytest.mark.real_model, pytest.mark.slow]
SMOLLM2 = pytest.param("smollm2", marks=pytest.mark.smoke)
smollm2 = pytest.mark.parametrize("name", [SMOLLM2])
rarely = pytest.mark.parametrize("name", ["smollm2"])  # the gate has a minute for a real model
both = pytest.mark.parametrize("name", [SMOLLM2, "gemma3-270m"])

CODE = "def add(a, b):\n    return a + b\n\n\ndef mean(values):\n    total = 0\n    for value in values:\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 12}, "line": {"type": "integer"}},
            "required": ["path", "line"],
            "additionalProperties": False,
        },
    },
}


class Real(Examined):
    """What `etude doctor model` measures a model with, and a text in its tokens."""

    def ids(self, text: str) -> list[int]:
        return load_tokenizer(self.folder).encode(text, add_special_tokens=False).ids

    def off(self, given: list[np.ndarray], rows: list[np.ndarray]) -> float:
        """How far log-probabilities are from transformers', in bounds."""
        return support.distance(given, self.truth(rows)) / self.limit

    def execution(self, kind: str, rows: list[np.ndarray]) -> list[np.ndarray]:
        return trial.log_probs(self.ours, kind, rows)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Callable[[str], Real]]:
    """Models by name, each loaded once; what could not be fetched is not tried again."""
    models: dict[str, Real] = {}
    missing: dict[str, str] = {}

    def load(name: str) -> Real:
        if name not in models and name not in missing:
            try:
                models[name] = Real(model_folder(name))
            except UserError as e:
                if "cannot be fetched, " not in str(e):  # what was fetched and is wrong fails
                    raise
                missing[name] = str(e)
        return models[name] if name in models else pytest.skip(missing[name])

    yield load
    models.clear()


@pytest.fixture
def real(loaded: Callable[[str], Real], name: str) -> Real:
    return loaded(name)


@both
def test_rows_and_shared_prompts_are_exact(real: Real) -> None:
    assert real.cell("rows").state == "exact"
    assert real.cell("shared prompts").state == "exact"


@both
def test_the_engine_is_exact(real: Real) -> None:
    """As doctor says it, sampled, in an engine loaded with its trial."""
    assert real.cell("engine").state == "exact"


@both
def test_a_greedy_and_a_sampled_answer_have_the_log_probabilities_of_the_trainer(real: Real) -> None:
    ids = real.ids(CODE)
    asked = [
        Request(ids=ids[:end], max_tokens=10, temperature=temperature, seed=end)
        for end, temperature in ((len(ids), 0.0), (len(ids), 1.0), (11, 0.7))
    ]
    made = run(Engine(real.ours, CONFIG), *asked)
    rows = [np.array(r.ids + g.ids) for r, g in zip(asked, made, strict=True)]
    assert not np.array_equal(rows[0], rows[1])
    at = tuple(np.arange(len(r.ids), len(row)) for r, row in zip(asked, rows, strict=True))
    for temperature, chosen in ((1.0, (0, 1)), (0.7, (2,))):
        tokens = TokenRows(tuple(rows[i] for i in chosen), tuple(at[i] for i in chosen))
        parts = plan(tokens, "packed", 200, shape_of(real.ours)).parts
        ours_N = execution.evaluate(real.ours, parts, tokens.count, temperature=temperature).logprobs_N.numpy()
        given_N = np.concatenate([made[i].logprobs for i in chosen])
        assert support.distance([given_N], [ours_N]) <= real.limit / min(temperature, 1.0)
    assert real.off(real.execution("packed", rows), rows) <= 1.0


def planted_head(real: Real, patch: pytest.MonkeyPatch) -> None:
    def wrong(model):
        head = head_of(model)
        return replace(head, weight_VD=halved(head.weight_VD.detach().clone()))

    patch.setattr(execution, "head_of", wrong)


def halved(tensor: torch.Tensor) -> torch.Tensor:
    """A relative mistake of 1e-3 in the first half of a tensor. Norms behind a matrix take out one of the whole."""
    tensor[: len(tensor) // 2].mul_(1.001)
    return tensor


def planted(find: Callable[[torch.nn.Module], list[torch.Tensor]]) -> Callable[[Real, pytest.MonkeyPatch], None]:
    def plant(real: Real, patch: pytest.MonkeyPatch) -> None:
        for tensor in find(real.ours.model):
            patch.setattr(tensor, "data", halved(tensor.detach().clone()))

    return plant


PLANTED = {
    "a norm": planted(lambda m: [m.layers[len(m.layers) // 2].input_layernorm.weight]),
    "a projection of attention": planted(lambda m: [m.layers[len(m.layers) // 2].self_attn.o_proj.weight]),
    "positions": planted(lambda m: [b for n, b in m.rotary_emb.named_buffers() if not n.startswith("original")]),
    "an mlp": planted(lambda m: [m.layers[len(m.layers) // 2].mlp.down_proj.weight]),
    "the head": planted_head,
}


@both
@pytest.mark.parametrize("where", PLANTED)
def test_a_mistake_of_a_thousandth_is_found(real: Real, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[where](real, monkeypatch)
    assert real.judged(real.execution("rows", real.rows), real.right).state == "silent"
    monkeypatch.undo()
    assert real.judged(real.execution("rows", real.rows[:1]), real.right[:1]).state == "exact"


@smollm2
def test_the_trial_at_load_finds_a_mistake_of_a_thousandth_in_the_head(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_head(real, monkeypatch)
    cell = real.cell("rows")
    assert cell.state == "refused"
    assert "llama differs from transformers' own forward pass by" in cell.said


@smollm2
def test_documents_are_those_of_one_masked_pass_in_any_order(real: Real) -> None:
    engine = Engine(real.ours, CONFIG)
    documents = [real.ids(f"{title}\n{text}") for title, text in (("a.py", CODE), ("b.py", 3 * "x = [1, 2]\n"))]
    tail = real.ids("The file a.py defines")
    size = sum(map(len, documents))
    for order, cached in ((documents, 0), (documents[::-1], size)):
        request = Request(ids=tail, documents=tuple(order), max_tokens=6, temperature=0.0)
        (made,) = run(engine, request)
        assert made.cached_document_tokens == cached
        _, logits_TV = masked(real.ours, order, tail + made.ids)
        right_TV = logits_TV.log_softmax(-1)[len(tail) - 1 : -1]
        assert right_TV.argmax(-1).tolist() == made.ids
        right = right_TV.gather(1, torch.tensor(made.ids)[:, None]).squeeze(1).numpy()
        assert support.distance([np.array(made.logprobs)], [right]) <= real.limit


@smollm2
def test_deterministic_mode_has_no_bit_of_difference(real: Real) -> None:
    """Between an answer alone and one beside others, and between the engine and the trainer."""
    ids = real.ids(CODE)
    asked = [Request(ids=ids[i:], max_tokens=8, temperature=1.0, seed=i) for i in range(3)]
    (alone,) = run(Engine(real.ours, CONFIG, deterministic=True), asked[0])
    in_pieces = CONFIG.model_copy(update={"prefill_tokens": 16})
    beside = run(Engine(real.ours, in_pieces, deterministic=True), *asked)
    assert (alone.ids, alone.logprobs) == (beside[0].ids, beside[0].logprobs)
    rows = tuple(np.array(r.ids + g.ids) for r, g in zip(asked, beside, strict=True))
    tokens = TokenRows(rows, tuple(np.arange(len(r.ids), len(row)) for r, row in zip(asked, rows, strict=True)))
    with batch_invariant():
        exact_N = execution.evaluate(real.ours, plan_rows(tokens), tokens.count).logprobs_N.numpy()
    assert np.array_equal(exact_N, np.concatenate([np.array(g.logprobs, np.float32) for g in beside]))


def learn(model, ids: list[int], optimizer, rate: float) -> None:
    """One update for a text's log-probability."""
    tokens = TokenRows((np.array(ids),), (np.arange(1, len(ids)),))
    parts = plan(tokens, "rows", 200, shape_of(model)).parts
    execution.run(model, parts, tokens.count, lambda logprobs_M, _: -logprobs_M.mean())
    assert optimizer.collect() > 0
    optimizer.apply(rate)


@rarely
def test_versions_at_a_real_learning_rate_arrive_bit_for_bit(real: Real, tmp_path: Path) -> None:
    """The checkpoint's type is bfloat16: an update of 2e-6 moves few weights, and a delta holds those alone."""
    model, live = load_model(real.folder).train(), named_tensors(load_model(real.folder, dtype=torch.bfloat16))
    types = published_dtypes(real.folder, model, torch.float32)
    assert set(types.values()) == {torch.bfloat16}
    optimizer = for_policy(model, TrainerConfig(), types)
    store = open_store(str(tmp_path / "weights"))
    publisher, receiver = Publisher(store, model=model_id(real.folder)), Receiver(store, live)
    for version in range(2):
        if version:
            learn(model, real.ids(CODE), optimizer, 2e-6)
        published = publisher.publish(version, optimizer.published(), (), {})
        receiver.apply(receiver.poll())
        trained = named_tensors(model)
        assert weights_digest(live, receiver.types) == published.digest
        assert all(torch.equal(tensor.float(), trained[name]) for name, tensor in live.items())
        if version:
            assert published.kind == "delta"
            assert 0 < published.changed < published.elements / 4
            assert published.payload_bytes < published.elements * 2 / 4
    publisher.finish_anchor()


@rarely
def test_merged_adapters_are_base_and_product_and_arrive_bit_for_bit(real: Real, tmp_path: Path) -> None:
    model, live = load_model(real.folder).train(), named_tensors(load_model(real.folder, dtype=torch.bfloat16))
    base = {name: tensor.clone() for name, tensor in live.items()}
    types = published_dtypes(real.folder, model, torch.float32)
    optimizer = for_adapters(model, TrainerConfig(), LoraConfig(rank=4, alpha=8.0), types)
    store = open_store(str(tmp_path / "weights"))
    publisher = Publisher(store, model=model_id(real.folder), base=optimizer.base_schema)
    receiver = Receiver(store, live)
    digests = []
    for version in range(2):
        if version:
            learn(model, real.ids(CODE), optimizer, 1e-3)
        published = publisher.publish(version, optimizer.published(), (), {}, adapted=optimizer.adapted())
        receiver.apply(receiver.poll())
        digests.append(weights_digest(live, receiver.types))
        assert digests[-1] == published.live == weights_digest(named_tensors(model), types)
    publisher.finish_anchor()
    assert digests[0] == weights_digest(base, types) != digests[1]
    ours = optimizer.published()
    layers = [name.removesuffix(DOWN) for name in ours if name.endswith(DOWN)]
    assert len(layers) == 30 * 7
    for at in (layer for layer in layers if ".layers.15." in layer):
        weight, down, up = base[f"{at}.weight"], ours[at + DOWN], ours[at + UP]
        assert torch.equal(live[f"{at}.weight"], merged(weight, down, up, 2.0, torch.bfloat16))
        exact = weight.double() + 2.0 * (up.double() @ down.double())
        # Half a unit of bfloat16, and float32's sums before it.
        assert bool(((live[f"{at}.weight"].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-7).all())


@pytest.fixture
def calling(real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model with the bundled template; its own is refused, and the refusal names that one."""
    with pytest.raises(UserError, match=r"drops .* tool calls; give another with --chat-template chatml-hermes"):
        renderer_for(real.folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return with_chat_template(real.folder, "chatml-hermes")


@smollm2
def test_calls_make_the_round_trip_with_the_bundled_template(calling: Path) -> None:
    renderer = renderer_for(calling)
    assert renderer.dialect == "hermes"
    given = [{"path": 'ä/"b".py\n', "line": 7, "deep": {"é": [None, True, "<|im_end|>"]}}, {}]
    calls = [{"type": "function", "function": {"name": "read", "arguments": each}} for each in given]
    turn = renderer.turn({"role": "assistant", "content": "", "tool_calls": calls})
    assert turn[-1] in renderer.stop_ids
    assert [call.arguments for call in renderer.parse(turn, "stop", [TOOL]).calls] == given
    request = {"role": "user", "content": "Read it."}
    whole = [request, {"role": "assistant", "content": "", "tool_calls": calls}]
    whole += [{"role": "tool", "content": text} for text in ("one", "two")]
    together = [*renderer.prompt([request], [TOOL]), *turn, *renderer.bridge(turn, "stop", ["one", "two"])]
    assert renderer.text(together) == renderer.text(renderer.prompt(whole, [TOOL]))


@smollm2
def test_a_served_chat_answers_and_calls(real: Real, calling: Path) -> None:
    question = {"role": "user", "content": "What is the capital of France? Answer with one word."}
    with serving(Engine(real.ours, CONFIG), calling) as url, httpx2.Client(base_url=url, timeout=120) as client:
        asked = {"model": calling.name, "messages": [question], "temperature": 0, "max_tokens": 16}
        said = client.post("/v1/chat/completions", json=asked).raise_for_status().json()["choices"][0]
        assert "Paris" in said["message"]["content"]
        question = {"role": "user", "content": "Read line 7 of the file a.py."}
        asked |= {"messages": [question], "tools": [TOOL], "tool_choice": "required", "max_tokens": 64}
        told = client.post("/v1/chat/completions", json=asked).raise_for_status().json()["choices"][0]
    (call,) = told["message"]["tool_calls"]
    assert told["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "read"
    assert '"line"' in call["function"]["arguments"]
