"""Adapters: their sums with the base, their gradients against plain autograd, and a trainer that publishes them."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from etude.audit.architectures.families import FAMILIES, build
from etude.audit.mismatch import diagnose
from etude.config import LoraConfig, TrainerConfig
from etude.errors import UserError
from etude.inference.engine.engine import Engine
from etude.models import batch_invariant
from etude.models.loading import load_model, named_tensors
from etude.models.lora import DOWN, UP, adapted_layers, merged
from etude.trainer.activations import checkpoint_activations
from etude.trainer.lora import for_adapters
from etude.trainer.rl import execution
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.plan import TokenRows, plan, shape_of
from etude.trainer.rl.process import Trainer
from etude.trainer.rl.selfcheck import check
from etude.trainer.rl.step import Learner, train_step
from etude.weights.manifest import manifests
from etude.weights.receiver import Receiver
from etude.weights.ulpd.digest import weights_digest
from tests.helpers.tiny_models import save_random_model
from tests.helpers.trainer_runs import admit, new_run, play, step

LORA = LoraConfig(rank=4, alpha=8.0)
OF_EXPERTS = ("q_proj", "gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def of(kind, dtype=torch.float32):
        if (kind, dtype) not in made:
            path = tmp_path_factory.mktemp("lora") / kind
            made[kind, dtype] = save_random_model(path, kind, dtype=dtype)
        return made[kind, dtype]

    return of


def rows_of(count=4, length=40, common=16, vocabulary=97):
    """Rows that begin alike, so that executions share what they have in common."""
    ids = np.random.default_rng(3).integers(7, vocabulary, (count, length))
    ids[:, :common] = ids[0, :common]
    return TokenRows(tuple(ids), tuple(np.arange(common, length) for _ in range(count)))


def adapters_of(model, lora=LORA, *, scattered=True, **trainer):
    """The optimizer of a model with adapters; `scattered`: B is no longer zero."""
    types = dict.fromkeys(model.state_dict(), model.dtype)
    optimizer = for_adapters(model, TrainerConfig(**trainer), lora, types, seed=1)
    if scattered:
        noise = torch.Generator().manual_seed(7)
        state = optimizer.state()
        for name, tensor in state.items():
            if name.startswith("master/") and name.endswith(UP):
                tensor.copy_(0.02 * torch.randn(tensor.shape, generator=noise))
        optimizer.load(state)
    return optimizer


def gradients(model, leaves, tokens, kind="rows"):
    """Of a weighted sum of the tokens' log-probabilities."""
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(0))
    for leaf in leaves.values():
        leaf.grad = None
    parts = plan(tokens, kind, 60, shape_of(model)).parts
    found = execution.run(model, parts, tokens.count, lambda l_M, at_M: (weight_N[at_M] * l_M).sum())
    return {name: leaf.grad for name, leaf in leaves.items()}, found.logprobs_N


def plain(model, base, optimizer):
    """The same model by plain autograd on W + scale * B A; the leaves of its adapters."""
    leaves = {n: t.detach().to(model.dtype).requires_grad_() for n, t in optimizer.adapters.tensors.items()}
    for name in adapted_layers(model, "all-linear"):
        module, down, up = model.get_submodule(name), leaves[name + DOWN], leaves[name + UP]
        weight = base[f"{name}.weight"]

        def forward(x, module=module, weight=weight, down=down, up=up):
            return F.linear(x, weight + optimizer.adapters.scale * (up @ down), module.bias)

        module.forward = forward
    return leaves


def gradients_in_float64(folder, optimizer, tokens):
    """Those of `gradients`, by transformers' own forward pass of each row on W + scale * B A, and plain autograd."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    leaves = {n: t.detach().double().requires_grad_() for n, t in optimizer.adapters.tensors.items()}
    for layer in {name.removesuffix(DOWN).removesuffix(UP) for name in leaves}:
        holder, _, own = (layer if layer in named_tensors(model) else f"{layer}.weight").rpartition(".")
        module = model.get_submodule(holder)
        base = module._parameters.pop(own).detach()
        setattr(module, own, base + optimizer.adapters.scale * (leaves[layer + UP] @ leaves[layer + DOWN]))
    logprobs = []
    for ids, at in zip(tokens.rows, tokens.sampled, strict=True):
        logits_TV = model(input_ids=torch.from_numpy(ids)[None]).logits[0]
        logprobs.append(logits_TV.log_softmax(-1)[at - 1, ids[at]])
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(0)).double()
    (weight_N * (logprobs_N := torch.cat(logprobs))).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}, logprobs_N.detach()


def distance(ours, truth):
    apart = sum((ours[n].double() - truth[n].double()).square().sum() for n in truth)
    return float((apart / sum(t.double().square().sum() for t in truth.values())).sqrt())


def test_a_sum_has_the_same_bits_however_it_is_cut_and_is_that_of_its_formula():
    noise = torch.Generator().manual_seed(0)
    base = torch.randn(700, 600, generator=noise).to(torch.bfloat16)
    base[3, 5] = -0.0
    down, up = torch.randn(8, 600, generator=noise) / 25, torch.randn(700, 8, generator=noise) / 100
    wide = merged(base, down, up, 2.0, torch.float32)
    exact = base.double() + 2.0 * (up.double() @ down.double())
    # 8 products and 8 sums of at most 0.1, each rounded to 24 bits: less than 16 * 2^-24 * 0.1 * 2, and one rounding of
    # the result, of at most 5.
    assert float((wide.double() - exact).abs().max()) < 16 * 2**-24 * 0.2 + 5 * 2**-24
    parts = [merged(base[rows], down, up[rows], 2.0, torch.float32) for rows in (slice(0, 1), slice(1, 700))]
    assert torch.equal(torch.cat(parts), wide)
    assert torch.equal(merged(base, down, up, 2.0, torch.bfloat16), wide.to(torch.bfloat16))
    nothing = merged(base, down, torch.zeros_like(up), 2.0, torch.bfloat16)
    assert torch.equal(nothing.view(torch.int16), base.view(torch.int16)), "-0 stays -0"


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_before_the_first_step_a_model_with_adapters_is_its_base_bit_for_bit(kind, folder):
    model, tokens = load_model(folder(kind)).train(), rows_of()
    parts = plan(tokens, "rows", 60, shape_of(model)).parts
    before = {name: t.clone() for name, t in named_tensors(model).items()}
    expected = execution.evaluate(model, parts, tokens.count).logprobs_N
    adapters_of(model, scattered=False)
    assert torch.equal(execution.evaluate(model, parts, tokens.count).logprobs_N, expected)
    assert all(torch.equal(t, before[name]) for name, t in named_tensors(model).items())


@pytest.mark.parametrize(
    ("kind", "way", "again"),
    [("qwen3", "rows", True), ("qwen3", "packed", False), ("qwen3", "streaming", True), ("moe", "recompute", False)],
)
def test_gradients_are_those_of_plain_autograd_on_the_sum(kind, way, again, folder):
    """In float32, for tied embeddings (both kinds), shared prompts and activation checkpointing."""
    model, other, tokens = load_model(folder(kind)).train(), load_model(folder(kind)).train(), rows_of()
    base = {name: t.clone() for name, t in named_tensors(other).items()}
    optimizer = adapters_of(model)
    if again:
        checkpoint_activations(model)
    ours, own_N = gradients(model, optimizer.live, tokens, way)
    truth, true_N = gradients(other, plain(other, base, optimizer), tokens)
    assert all(p.grad is None for p in model.parameters())
    assert float((own_N - true_N).abs().max()) < 2e-5  # float32, sums in another order
    assert distance(ours, truth) < 1e-5  # as the self-check's limit; 1e-6 is typical
    assert all(grad is not None and bool(grad.any()) for grad in ours.values())
    if way != "rows":
        assert 0 < check(model, tokens, way, optimizer.live.values()) < 1e-5


@pytest.mark.parametrize(
    ("kind", "way", "again"), [("moe", "rows", True), ("moe", "packed", False), ("glm", "packed", True)]
)
def test_gradients_of_adapters_of_experts_are_those_of_float64(kind, way, again, folder):
    """Sums in float32 against float64: the limits above. The experts' choice is the same (a score that is equal to
    1e-6 would show)."""
    model, tokens = load_model(folder(kind)).train(), rows_of()
    optimizer = adapters_of(model, LoraConfig(rank=4, alpha=8.0, targets=OF_EXPERTS))
    assert {t.ndim for t in optimizer.live.values()} == {2, 3}
    if again:
        checkpoint_activations(model)
    ours, own_N = gradients(model, optimizer.live, tokens, way)
    truth, true_N = gradients_in_float64(folder(kind), optimizer, tokens)
    assert all(p.grad is None for p in model.parameters())
    assert float((own_N - true_N).abs().max()) < 2e-5
    assert distance(ours, truth) < 1e-5
    assert all(grad is not None and bool(grad.any()) for grad in ours.values())
    with batch_invariant.batch_invariant():
        exact, again_too = (gradients(model, optimizer.live, tokens)[0] for _ in range(2))
    assert distance(exact, truth) < 1e-5
    assert all(torch.equal(grad, again_too[name]) for name, grad in exact.items())


def test_in_bfloat16_gradients_are_no_further_from_float32_than_those_of_plain_autograd(folder):
    """Both round the same weights and activations; plain autograd computes a gradient of every weight besides."""
    folder, tokens = folder("qwen3", torch.bfloat16), rows_of()
    model, other, truth = (load_model(folder, dtype=torch.bfloat16).train() for _ in range(3))
    base = {name: t.clone() for name, t in named_tensors(other).items()}
    optimizer = adapters_of(model)
    ours, _ = gradients(model, optimizer.live, tokens)
    plainly, _ = gradients(other, plain(other, base, optimizer), tokens)
    truth.float()
    wide = {name: t.float() for name, t in base.items()}
    exact, _ = gradients(truth, plain(truth, wide, optimizer), tokens)
    assert distance(ours, exact) < 1.5 * distance(plainly, exact)  # as the self-check's limit


def test_updates_move_the_adapters_alone_and_a_state_continues_bit_for_bit(folder):
    folder, tokens = folder("qwen3", torch.bfloat16), rows_of(2)
    models = [load_model(folder).train() for _ in range(2)]
    types = dict.fromkeys(models[0].state_dict(), torch.bfloat16)
    begin = {name: t.clone() for name, t in named_tensors(models[0]).items()}
    first, again = (
        for_adapters(model, TrainerConfig(offload_optimizer=off, device="cuda" if off else "cpu"), LORA, types)
        for model, off in zip(models, (False, True), strict=True)
    )

    def step(model, optimizer):
        gradients(model, optimizer.live, tokens)
        optimizer.collect()
        optimizer.apply(1e-2)

    step(models[0], first)
    saved = {name: t.clone() for name, t in first.state().items()}
    step(models[0], first)
    again.load(saved)
    step(models[1], again)
    ours, theirs = first.published(), again.published()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert first.adapted() == again.adapted()
    assert (
        first.adapted().live
        == weights_digest(named_tensors(models[1]), types)
        != first.adapted().base
        == weights_digest(begin, types)
    )
    assert {t.dtype for t in ours.values()} == {torch.float32}
    moved = {name for name, t in named_tensors(models[0]).items() if not torch.equal(t, begin[name])}
    assert moved == {f"{name}.weight" for name in adapted_layers(models[0], "all-linear")}
    for name in moved:
        at = name.removesuffix(".weight")
        total = merged(begin[name].bfloat16(), ours[at + DOWN], ours[at + UP], 2.0, torch.bfloat16)
        assert torch.equal(named_tensors(models[0])[name], total.float())
    with pytest.raises(UserError, match="holds other tensors"):
        again.load({"master/other": torch.zeros(1)})


def test_targets_that_cannot_have_adapters_are_refused_by_name(folder):
    dense, sparse = load_model(folder("qwen3")), load_model(folder("moe"))
    own = build(next(family for family in FAMILIES if family.model_type == "llama4_text"))
    some = adapted_layers(dense, ["q_proj", "mlp.down_proj"])
    assert some == sorted(
        [f"model.layers.{i}.self_attn.q_proj" for i in range(3)] + [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    )
    assert not any("lm_head" in name or "experts" in name for name in adapted_layers(sparse, "all-linear"))
    assert adapted_layers(sparse, ["experts.down_proj"]) == [f"model.layers.{i}.mlp.experts.down_proj" for i in (1, 3)]
    assert len(adapted_layers(sparse, ["down_proj"])) == 4, "those of dense layers, too"
    for model, target, why in (
        (dense, "q_prj", "no layer q_prj; choose among down_proj"),
        (dense, "lm_head", "is the head"),
        (dense, "embed_tokens", "not a plain linear layer"),
        (sparse, "gate", "not a plain linear layer .Qwen3MoeTopKRouter."),
        (own, "gate_up_proj", "gate_up_proj is a weight of Llama4TextExperts .*, whose products are its own; choose"),
        (own, "down_proj", "whose products are its own; name layers in full, such as .*shared_expert.down_proj"),
    ):
        with pytest.raises(UserError, match=why):
            adapted_layers(model, [target])


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """A run of two steps on adapters, those of experts among them, with replayed experts, shared prompts and layers
    that are computed again; its episodes come from an engine that follows the run's versions. The run, its
    configuration, the trainer and the digests that the engine had."""
    trained = {"lr": 3e-2, "warmup_steps": 0, "router_replay": True, "activation_checkpointing": True}
    run, config = new_run(
        tmp_path_factory.mktemp("adapters"), "moe", trainer=trained | {"lora": {"rank": 4, "targets": OF_EXPERTS}}
    )
    trainer, model = Trainer(run), load_model(config.model.path)
    receiver, digests = Receiver(trainer.weights, named_tensors(model)), []
    for version in range(2):
        receiver.apply(receiver.poll())
        digests.append(weights_digest(named_tensors(model), receiver.types))
        engine = Engine(model, version=version, routes=True)
        admit(run, config, version, version, play(engine, version + 1, routes=True))
        step(trainer)
    receiver.apply(receiver.poll())
    digests.append(weights_digest(named_tensors(model), receiver.types))
    return run, config, trainer, digests


def test_a_trainer_and_an_engine_that_follows_it_have_the_same_bits_version_by_version(stepped):
    run, _, trainer, digests = stepped
    published = manifests(trainer.weights)
    assert digests == [m.live for m in published]
    assert len(set(digests)) == 3
    assert digests[2] == trainer.learner.optimizer.adapted().live
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The same weights on both sides leave the rounding of float32, as with whole weights (test_replay.py).
    assert [line["mismatch/k2"] < 1e-9 for line in lines] == [True, True]
    assert all(line["router/replayed"] == 1.0 for line in lines)


def test_the_doctor_computes_versions_of_adapters_on_their_base(stepped):
    run, *_ = stepped
    assert diagnose(run, pieces=8).k2_tagged < 1e-9  # float32, as above


def test_a_resumed_trainer_stands_where_the_first_one_did_and_refuses_another_base(stepped, tmp_path):
    run, config, trainer, _ = stepped
    again = Trainer(run)
    before, after = trainer.learner.optimizer.state(), again.learner.optimizer.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    ours, theirs = (named_tensors(one.learner.model) for one in (trainer, again))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    wrong = save_random_model(tmp_path / "other", "moe", seed=9, num_hidden_layers=4)
    for change, why in (
        ({"model": config.model.model_copy(update={"path": str(wrong)})}, "are not those that the run began with"),
        ({"trainer": config.trainer.model_copy(update={"lora": None})}, "set it as when the run began"),
        (
            {"trainer": config.trainer.model_copy(update={"lora": LoraConfig(rank=2, alpha=16, targets=OF_EXPERTS)})},
            "other tensors than lora",
        ),
        (
            {"trainer": config.trainer.model_copy(update={"lora": LoraConfig(rank=4, alpha=9, targets=OF_EXPERTS)})},
            "another trainer.lora.alpha",
        ),
    ):
        (copy / "config.json").write_text(config.model_copy(update=change).model_dump_json())
        with pytest.raises(UserError, match=why):
            Trainer(copy)


def test_a_step_in_deterministic_mode_has_the_same_bits_again_and_those_of_the_engine(tmp_path):
    trained = {"router_replay": True, "lr": 1e-2, "warmup_steps": 0, "lora": {"rank": 4, "targets": OF_EXPERTS}}
    _, config = new_run(tmp_path, "moe", deterministic=True, trainer=trained, rollout={"group": 4, "staleness": 0})
    served = load_model(config.model.path)
    before = adapters_of(served, config.trainer.lora).state()
    groups = [play(Engine(served, routes=True, deterministic=True), 1, routes=True)]
    batch, states = make_batch((), groups, routes=(2, 2)), []
    for where in ({}, {"offload_optimizer": True, "device": "cuda"}):
        model = load_model(config.model.path)
        learner = Learner(model, adapters_of(model, config.trainer.lora, **where))
        assert train_step(learner, batch, config, 0, 0.0).metrics["mismatch/max_abs"] == 0.0
        states.append(learner.optimizer.state() | named_tensors(model))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    masters = [name for name in before if name.startswith("master/")]
    assert all(not torch.equal(states[0][name], before[name]) for name in masters)
    assert {before[name].ndim for name in masters} == {2, 3}
