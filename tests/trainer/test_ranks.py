"""Ranks against one process: log-probabilities, gradients, experts, whole steps, states; worlds of two and of four.

Each world is started once and computes all cases. Limits: 5e-6 nats and a relative L2 of 1e-6 in float32, where sums
over tokens are taken in another order.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from etude.audit.architectures.families import FAMILIES, build
from etude.config import MeshConfig, RLConfig
from etude.inference.engine.engine import Engine
from etude.models.loading import load_model
from etude.trainer.rl.balance import divided
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.execution import run
from etude.trainer.rl.guards import GuardVerdict
from etude.trainer.rl.plan import TokenRows, passes_of, shape_of
from etude.trainer.rl.presets import loss_preset
from etude.trainer.rl.process import make_learner
from etude.trainer.rl.step import train_step
from etude.trainer.sharding import load_sharded, local, world_of
from etude.trainer.world import World
from tests.helpers import forked_ranks
from tests.helpers.tiny_models import save_random_model
from tests.helpers.trainer_runs import edited, new_run, play

LOGPROBS, GRADIENTS, METRICS = 5e-6, 1e-6, 1e-5
_SMALL = {"num_hidden_layers": 2, "initializer_range": 0.05}
_MOE = {"decoder_sparse_step": 1, **_SMALL}
MODELS = {
    "moe": ("moe", _MOE),
    "moe, a head of its own": ("moe", {"tie_word_embeddings": False, **_MOE}),
    "glm": ("glm", _SMALL),
    "deepseek": ("deepseek", _SMALL),
    "llama": ("llama", {"tie_word_embeddings": False, "num_attention_heads": 4, "num_key_value_heads": 2, **_SMALL}),
    "qwen3": ("qwen3", _SMALL),
}
FEW_ROWS = {family.model_type: family for family in FAMILIES if family.model_type in ("qwen2_moe", "gpt_oss")}
"""Models of which some tensor has fewer rows than there are ranks: the gate of a shared expert 1, sinks 2."""
ROUTED = {"moe": (2, 2, 8)}  # layers, experts of a token, experts
MESHES = {  # replicate, shard, expert, context
    2: {
        "shard": (1, 2, 1, 1),
        "experts": (1, 2, 2, 1),
        "context": (1, 1, 1, 2),
        "context and experts": (1, 1, 2, 2),
        "replicate": (2, 1, 1, 1),
    },
    4: {
        "shard": (1, 4, 1, 1),
        "experts, each on two": (1, 4, 2, 1),
        "experts": (1, 4, 4, 1),
        "context": (1, 2, 1, 2),
        "context and experts": (1, 2, 2, 2),
        "replicate": (4, 1, 1, 1),
        "replicate and shard": (2, 2, 1, 1),
        "replicate, shard and experts": (2, 2, 2, 1),
    },
}


@dataclass(frozen=True)
class Gradients:
    """Gradients of `rows` on a mesh."""

    model: str
    mesh: str
    execution: str = "packed"
    aux: float = 0.0
    replays: bool = False


def gradient_cases(world):
    """Every mesh with the mixture of experts; separate rows, replay and each model where ranks divide its experts, or
    its tensors."""
    meshes = MESHES[world]
    cases = [Gradients("moe", mesh, "packed", 0.01) for mesh in meshes]
    apart = [mesh for mesh in ("experts", "context and experts") if mesh in meshes]
    cases += [Gradients("moe", mesh, "rows") for mesh in (*apart, "shard")]
    cases += [Gradients("moe", mesh, replays=True) for mesh in apart]
    cases += [Gradients(model, mesh) for mesh in apart for model in ("glm", "deepseek")]
    cases += [Gradients(model, "shard") for model in (*FEW_ROWS, "qwen3", "llama")]
    if world == 2:
        return [*cases, Gradients("llama", "context"), Gradients("moe, a head of its own", "experts")]
    return [*cases, Gradients("glm", "experts, each on two"), Gradients("qwen3", "replicate and shard")]


def rows(routed=None):
    """Nine rows of three prompts, of different lengths; `routed` as in ROUTED."""
    noise = np.random.default_rng(5)
    ids, sampled, routes = [], [], []
    for prompt in (18, 33, 21):
        head = noise.integers(0, 97, prompt)
        chosen = None if routed is None else some_experts(noise, prompt, routed)
        for length in noise.integers(2, 40, 3):
            ids.append(np.concatenate([head, noise.integers(0, 97, length)]))
            sampled.append(np.arange(prompt, prompt + length))
            if routed is not None:
                routes.append(np.concatenate([chosen, some_experts(noise, length, routed)]))
    return TokenRows(tuple(ids), tuple(sampled), tuple(routes) or None)


def some_experts(noise, tokens, routed):
    layers, slots, count = routed
    return np.argsort(noise.random((tokens, layers, count)))[..., :slots].astype(np.int16)


# --- on the ranks -----------------------------------------------------------------------------------------------------


def world_with(sizes):
    """A world of this mesh in the default group."""
    mesh = MeshConfig(**dict(zip(("replicate", "shard", "expert", "context"), sizes, strict=True)))
    rank, context = dist.get_rank(), None
    for first in range(0, mesh.ranks, mesh.context) if mesh.context > 1 else ():
        ranks = list(range(first, first + mesh.context))
        group = dist.new_group(ranks)
        context = group if rank in ranks else context
    return World(rank, mesh, "cpu", context, dist.group.WORLD)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model, case):
    """Log-probabilities, statistics and whole gradients of a case."""
    world, tokens = world_of(model), rows(ROUTED[case.model] if case.replays else None)
    shape = shape_of(model)
    division = divided(tokens, case.execution, 200, shape, world.mesh.data_ranks)
    passes = passes_of(tokens, case.execution, division.passes[world.data_rank], shape)
    weight_N = torch.randn(tokens.count, generator=torch.Generator().manual_seed(5))

    def loss(logprobs_M, item_M):
        return (weight_N[item_M] * logprobs_M).sum() / tokens.count

    result = run(model, passes.parts, tokens.count, loss, aux=case.aux, divided=True)
    every = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        if not isinstance(parameter, DTensor):
            world.total((parameter.grad,))
        every.append(whole(parameter.grad).flatten().double())
        parameter.grad = None
    return result, torch.cat(every)


def compute(count, folders, steps):
    """The figures of all cases, by case; those of rank 0 compare with one process."""
    figures, truths, alone, first = {}, {}, {}, dist.get_rank() == 0
    worlds = {name: world_with(sizes) for name, sizes in MESHES[count].items()}
    cases = gradient_cases(count)
    for model, mesh in dict.fromkeys((case.model, case.mesh) for case in cases):
        divided_model = load_sharded(folders[model], torch.float32, worlds[mesh])
        for case in cases:
            if (case.model, case.mesh) != (model, mesh):
                continue
            result, ours = gradients(divided_model, case)
            if not first:
                continue
            key = model, case.execution, case.aux, case.replays
            if key not in truths:
                if model not in alone:
                    alone[model] = load_sharded(folders[model], torch.float32, World())
                truths[key] = gradients(alone[model], case)
            true, theirs = truths[key]
            figures[case] = {
                "logprobs": float((result.logprobs_N - true.logprobs_N).abs().max()),
                "gradients": float((ours - theirs).norm() / theirs.norm()),
                "counts": torch.equal(result.counts_LE, true.counts_LE),
                "replayed": (vars(result.replayed), vars(true.replayed)),
                "loss": max(abs(result.loss - true.loss), abs(result.aux - true.aux)),
            }
    for (name, mesh), (config, batch) in steps.items():
        metrics, weights, sizes = one_step(config, batch, worlds[mesh])
        figures[name, mesh] = compared(metrics, weights, sizes, one_step(config, batch, World())) if first else sizes
    return figures


def one_step(config, batch, world):
    """Metrics and weights after a step, and the bytes of what this rank holds."""
    learner, sizes = make_learner(config, world), []

    def judge(_):
        sizes.append(sizes_of(learner))
        return GuardVerdict("go", ())

    result = train_step(learner, batch, config, 0, 0.0, judge=judge)
    after = {name: whole(p.detach()) for name, p in learner.model.named_parameters()}
    return result.metrics, after, sizes[0]


def sizes_of(learner):
    """Bytes of master weights and moments, of parameters, and of gradients."""
    optimizer = learner.optimizer
    states = [t for part in optimizer._states for t in part.values()]
    parameters = [local(p) for p in learner.model.parameters()]
    return [sum(t.nbytes for t in some) for some in (states, parameters, optimizer._grads.values())]


def compared(metrics, weights, sizes, true):
    """The metrics, the elements that differ after rounding and by how many ulp, and the sizes, beside the true ones."""
    true_metrics, true_weights, true_sizes = true
    ulp = torch.cat([(bits(weights[name]) - bits(t)).abs().flatten() for name, t in true_weights.items()])
    return {
        "metrics": (metrics, true_metrics),
        "weights": (float((ulp > 0).float().mean()), int(ulp.max())),
        "sizes": (sizes, true_sizes),
    }


def bits(tensor):
    return tensor.bfloat16().view(torch.int16).int()


def doubled_advantage(t):
    """A loss of the user's."""
    return -2 * t.advantage * (t.current - t.rollout).exp()


# --- the cases --------------------------------------------------------------------------------------------------------

STEPS = {  # tables of the configuration
    "plain": {},
    "a balance loss, in separate rows": {"trainer": {"router_aux": 0.05, "execution": "rows"}},
    "recorded experts": {"trainer": {"router_replay": True}},
    "a user's loss": {"loss": {"custom": "tests.trainer.test_ranks:doubled_advantage"}},
    "ratios of whole episodes": {"loss": {"preset": "gspo", "updates": 2, "clip_low": 0.5, "clip_high": 1.5}},
    "a value head": {"loss": {"preset": "ppo"}},
    "a reference": {"loss": {"preset": "grpo", "updates": 2}},
    "masks": {"loss": {"preset": "icepop", "masks": ["geo_rs", "dppo"]}},
    "a teacher": {"distill": {"teacher": "teacher", "share": 1.0}},
    "one row": {},
    "no row": {},
    "deterministic mode": {"deterministic": True},
}
STEPPED = {2: ("experts", "context and experts"), 4: ("context and experts", "replicate, shard and experts")}


def steps_of(count):
    """Each step with a mesh of `count` ranks."""
    return [(name, STEPPED[count][i % 2]) for i, name in enumerate(STEPS)]


def step_of(name, root, episodes):
    """The configuration and the batch of a step."""
    values = {"tasks": {"repository": "unused"}, "model": {"path": str(root / "model")}}
    rollout = {"prompts": 3, "group": 4, "tokens": 40, "context": 128, "staleness": 0, "max_in_flight": 8}
    values |= {"rollout": rollout}
    tables = dict(STEPS[name])
    if "distill" in tables:
        tables["distill"] = tables["distill"] | {"teacher": str(root / "teacher")}
    trainer = {"lr": 1e-3, "warmup_steps": 0, "micro_tokens": 200} | tables.get("trainer", {})
    config = RLConfig.model_validate(values | tables | {"trainer": trainer})
    routes = (2, 2) if config.trainer.router_replay else None
    taught, advantage = "all" if config.distill else "none", loss_preset(config.loss).advantage
    batch = make_batch((), episodes, advantage=advantage, routes=routes, taught=taught)
    if name in ("one row", "no row"):
        row = replace(batch.rows[0], completions=batch.rows[0].completions[:1])
        batch = replace(batch, rows=(row,) if name == "one row" else ())
    return config, batch


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, family in FEW_ROWS.items():
        build(family).save_pretrained(root / name)
    made = {n: save_random_model(root / n.replace(" ", "-"), kind, **sizes) for n, (kind, sizes) in MODELS.items()}
    return {name: str(folder) for name, folder in ({name: root / name for name in FEW_ROWS} | made).items()}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A folder of a mixture of experts, and three groups that an engine sampled, some with other log-probabilities."""
    root = tmp_path_factory.mktemp("played")
    _, config = new_run(root, "moe")
    save_random_model(root / "teacher", seed=1)
    engine = Engine(load_model(config.model.path), version=0, routes=True)
    groups = [play(engine, number, routes=True) for number in range(3)]
    noise = np.random.default_rng(3)
    for group in groups[:2]:
        for at, drift in ((0, 0.05), (2, -0.02)):
            _, mask_T, logprobs_T, _ = group[at].segments[0].arrays()
            moved_T = logprobs_T + mask_T * (drift + 0.3 * noise.standard_normal(len(mask_T)).astype(np.float32))
            group[at] = edited(group[at], logprobs=moved_T.astype(np.float32))
    return root, groups


@pytest.fixture(scope="module")
def of_world(folders, played):
    """The figures of the cases of a world, by rank."""
    root, groups = played
    made = {}

    def figures(count):
        if count not in made:
            steps = {(name, mesh): step_of(name, root, groups) for name, mesh in steps_of(count)}
            try:
                made[count] = forked_ranks.run(compute, count, count, folders, steps)
            except AssertionError as e:
                made[count] = e
        if isinstance(made[count], AssertionError):
            raise made[count]
        return made[count]

    return figures


PACKED = ("share/", "entropy/", "router/split", "memory/")  # depend on how rows are packed, or the machine is


def marked(count: int, *values: object) -> object:
    """Parameters of a test, all of which take too long for the fast suite; two ranks are its smoke."""
    return pytest.param(
        count, *values, marks=[pytest.mark.slow] if count > 2 else [pytest.mark.slow, pytest.mark.smoke]
    )


@pytest.mark.parametrize(("count", "case"), [marked(n, case) for n in MESHES for case in gradient_cases(n)])
def test_ranks_agree_with_one_process(of_world, count, case):
    x = of_world(count)[0][case]
    assert max(x["logprobs"], x["loss"]) <= LOGPROBS
    assert x["gradients"] <= GRADIENTS
    assert x["counts"], "each token is counted once"
    assert x["replayed"][0] == x["replayed"][1]
    assert (x["replayed"][1]["flipped"] > 0) == case.replays


@pytest.mark.parametrize(("count", "name"), [marked(n, step) for n in MESHES for step in steps_of(n)])
def test_a_step_of_ranks_is_that_of_one_process(of_world, count, name):
    """Weights: AdamW divides a gradient by its size, so rounding moves elements that have almost none."""
    x = of_world(count)[0][name]
    ours, theirs = x["metrics"]
    assert ours.keys() == theirs.keys()
    for key in (key for key in theirs if not key.startswith(PACKED)):
        assert ours[key] == pytest.approx(theirs[key], rel=METRICS, abs=METRICS), key
    differ, ulp = x["weights"]
    assert differ <= 1e-4
    assert ulp <= 1


@pytest.mark.parametrize("count", [marked(n) for n in MESHES])
def test_a_rank_holds_its_share_of_the_states(of_world, count):
    """1.1 / N of master weights and moments, of parameters and of gradients; experts and tied embeddings, too."""
    figures = of_world(count)
    for name in steps_of(count):
        if "replicate" in name[1]:
            continue
        first, true = figures[0][name]["sizes"]
        for sizes in (first, *(figures[rank][name] for rank in range(1, count))):
            assert all(own <= 1.1 / count * of_one for own, of_one in zip(sizes, true, strict=True))
