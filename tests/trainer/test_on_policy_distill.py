"""A teacher's log-ratios are the gradient of the reverse divergence, aligned to the right tokens, and bounded."""

import msgspec
import numpy as np
import pytest
import torch

from etude.audit.rescoring import set_weights
from etude.config import OnPolicyDistillConfig, RLConfig
from etude.errors import UserError
from etude.inference.engine.requests import Request
from etude.models.loading import load_model, named_tensors
from etude.records import Generation, GivenAdvantage, Hint
from etude.store import open_store
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.distill import LEAST_PAIRS, bound, judged_by_teacher, relevant
from etude.trainer.rl.execution import evaluate
from etude.trainer.rl.guards import GuardVerdict
from etude.trainer.rl.plan import plan, shape_of
from etude.trainer.rl.process import make_learner
from etude.trainer.rl.reference import Reference
from etude.trainer.rl.step import Learner, train_step
from etude.trainer.world import World
from etude.weights.content import load
from tests.helpers.tiny_models import random_model
from tests.helpers.trainer_runs import admit_alone, engine_of, episode, new_run, play, prompt, run_trainer, sampled

SELF = OnPolicyDistillConfig(share=1.0, clip=100.0, cap=1e9)


def hint_of(number, length=6, at=20):
    return Hint(ids=np.array(prompt(500 + number, length), "<i4").tobytes(), at=at)


def taught(episode, hint, advantage=0.0, weight=1.0):
    return msgspec.structs.replace(episode, hint=hint, given=GivenAdvantage(advantage=advantage, weight=weight))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A configuration, its model and eight episodes that it sampled, each alone in its group."""
    _, config = new_run(tmp_path_factory.mktemp("distill"), trainer={"baseline": "given", "lr": 1e-3})
    model = load_model(config.model.path)
    engine = engine_of(config, named_tensors(model), 0)
    return config, model, [play(engine, group, 1, tokens=12)[0] for group in range(8)]


def plain(model, ids, answer):
    """Log-probabilities of `answer` behind `ids`, by the model's own forward pass."""
    row = torch.tensor([[*ids, *answer]])
    with torch.no_grad():
        logprobs = model(input_ids=row).logits[0].float().log_softmax(-1)
    return logprobs[len(ids) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()


def test_the_expected_gradient_is_that_of_the_reverse_divergence(played):
    """One prompt, every token of the vocabulary as an answer of its own, weighted by its probability: the step's
    gradient is that of KL(student || teacher) by autograd. Tolerance 1e-4 of the largest element: float32 sums over 97
    rows instead of one, and a log-softmax of every row."""
    config, model, _ = played
    other = random_model("qwen3", seed=3, num_hidden_layers=2)
    ids = torch.tensor([prompt(1)])
    student_V = model(input_ids=ids).logits[0, -1].float().log_softmax(-1)
    with torch.no_grad():
        teacher_V = other(input_ids=ids).logits[0, -1].float().log_softmax(-1)
    divergence = (student_V.exp() * (student_V - teacher_V)).sum()
    divergence.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)

    answers = [Generation(ids=[v], logprobs=[student_V[v].item()], versions=[0], finish_reason="stop")
               for v in range(len(student_V))]  # fmt: skip
    weights = student_V.exp().tolist()
    groups = [[taught(episode(prompt(1), a, v, 0, v), None, 0.0, weights[v])] for v, a in enumerate(answers)]
    distill = OnPolicyDistillConfig(teacher="unused", share=1.0, clip=100.0, cap=1e9)
    # The loss is divided by 97 episodes of 40 tokens; a baseline of the other 96 rows takes a 97th of each row's own.
    config = config.model_copy(update={"distill": distill.model_copy(update={"weight": 96.0 * 40.0})})
    teacher = Reference(model, dict(other.named_parameters()))
    learner = Learner(model, for_policy(model, config.trainer), teacher=teacher)
    batch = make_batch((), groups, baseline="given", taught="all")
    found: dict[str, torch.Tensor] = {}

    def judge(_):
        found.update({name: grad.clone() for name, grad in learner.optimizer._grads.items()})
        return GuardVerdict("skip", ())

    train_step(learner, batch, config, 0, 0.0, judge=judge)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        scale = grad.abs().max().item()
        assert torch.allclose(found[name], grad, atol=1e-4 * scale, rtol=0), name


def judged(played, groups, options, **others):
    """The batch of these groups after the teacher, which is the model itself, and the figures."""
    model = played[1]

    def score(tokens):
        passes = plan(tokens, "auto", 8192, shape_of(model))
        return evaluate(model, passes.parts, tokens.count).logprobs_N

    batch = make_batch((), groups, baseline="given", taught="hinted")
    return judged_by_teacher(batch, options, score, score, **others)


def advantages(batch):
    return [c.advantages_C[c.mask_C == 1] for row in batch.rows for c in row.completions]


def test_a_hint_is_read_where_it_belongs(played, monkeypatch):
    """The advantage of a token is its weight times (scalar + log-ratio - mean of the others'), by the model's own
    passes. Tolerance 4e-4: float32 log-probabilities of rows that were computed together, twice."""
    _, model, episodes = played
    monkeypatch.setattr("etude.trainer.rl.distill.PERCENTILE", 0.0)  # farther off than the least
    groups = [[taught(e, hint_of(i, length=3 + i), 0.5, 2.0)] for i, e in enumerate(episodes)]
    batch, figures = judged(played, groups, SELF)
    found = advantages(batch)
    assert figures["distill/relevant"] >= 4
    assert figures["distill/length_ratio"] == 1.0
    ratios = {}
    for i, e in enumerate(episodes):
        ids_T, mask_T, _, _ = e.segments[0].arrays()
        answer, ids = ids_T[mask_T == 1].tolist(), ids_T[:24].tolist()
        told = [*ids[:20], *prompt(500 + i, 3 + i), *ids[20:]]
        if np.any(found[i] != 1.0):
            ratios[i] = plain(model, told, answer) - plain(model, ids, answer)
    assert len(ratios) == figures["distill/relevant"], "elsewhere the scalar alone"
    for i, ratio in ratios.items():
        others = np.concatenate([r for j, r in ratios.items() if j != i])
        assert np.allclose(found[i], 2.0 * (0.5 + ratio - others.mean()), atol=4e-4)


def test_hints_that_say_nothing_are_left_out():
    """Own and shuffled hints alike, and rows of different levels: at most 5 of 100 pass, fewer since the mean of a
    row's other pairs has one pair less (2,000 batches, seed 1, within four standard errors). Hints whose effect is ten
    standard deviations off pass."""
    draw = np.random.default_rng(1)
    level_E1 = 10 * draw.normal(size=(10, 1))
    alike = [(level_E1[:, 0] + draw.normal(size=10), level_E1 + draw.normal(size=(10, 4))) for _ in range(2000)]
    passed = np.array([relevant(own_E, others_EK).mean() for own_E, others_EK in alike])
    assert 0.03 < passed.mean() < 0.05 + 4 * passed.std() / 2000**0.5
    assert relevant(np.full(5, -10.0), draw.normal(size=(5, 4))).all()
    assert not relevant(np.full(4, 100.0), draw.normal(size=(4, 3))).any(), f"fewer than {LEAST_PAIRS} pairs"


def test_the_same_hint_for_all_teaches_nothing(played):
    _, _, episodes = played
    groups = [[taught(e, hint_of(0), 0.5)] for e in episodes]
    batch, figures = judged(played, groups, SELF)
    assert figures["distill/relevant"] <= 2, "of the 32 pairs with another's hint, two lie above the 95th percentile"
    assert sum(not np.all(a == 0.5) for a in advantages(batch)) == figures["distill/relevant"]
    few, figures = judged(played, groups[:4], SELF)
    assert figures["distill/relevant"] == 0
    assert all(np.all(a == 0.5) for a in advantages(few))


def test_log_ratios_are_bounded():
    """By token, against the others' mean, then in sum."""
    assert bound({4: np.array([-3.0, 0.5, 2.0])}, 1.0, 20.0)[4].tolist() == [-1.0, 0.5, 1.0]
    two = bound({0: np.array([-3.0, 0.5]), 1: np.array([-0.5])}, 1.0, 20.0)
    assert [a.tolist() for a in two.values()] == [[-0.5, 1.0], [-0.25]]
    long = bound({0: np.full(100, 0.8)}, 1.0, 20.0)[0]
    assert np.abs(long).sum() == pytest.approx(20.0)
    assert long[0] == pytest.approx(0.2)


def test_a_share_of_the_batch_is_judged_and_no_row_that_is_too_long(played):
    _, _, episodes = played
    groups = [[taught(e, hint_of(i, length=4 + 2 * i), 0.5)] for i, e in enumerate(episodes)]
    assert judged(played, groups, SELF.model_copy(update={"share": 0.25}))[1]["distill/rows"] == 2
    _, figures = judged(played, groups, SELF, longest=24 + 12 + 10)
    assert (figures["distill/rows"], figures["distill/left_out"]) == (4, 4)


def test_a_folder_teaches_in_a_step_of_the_trainer(played, tmp_path):
    """All tokens are judged without a hint, and the weights of both models are where they belong afterwards."""
    config, _, episodes = played
    teacher = tmp_path / "teacher"
    random_model("qwen3", seed=3, num_hidden_layers=2).save_pretrained(teacher)
    (teacher / "tokenizer.json").write_text("{}")
    config = RLConfig.model_validate(
        config.model_dump() | {"distill": {"teacher": str(teacher), "share": 1.0, "cap": 1e9, "clip": 20.0}}
    )
    learner = make_learner(config, World())
    assert learner.teacher is not None
    groups = [[msgspec.structs.replace(e, given=GivenAdvantage(advantage=0.0))] for e in episodes]
    batch = make_batch((), groups, baseline="given", taught="all")
    metrics = train_step(learner, batch, config, 0, 0.0).metrics
    assert metrics["distill/log_ratio"] < -0.5, "the negative divergence"
    assert (metrics["distill/tokens"], metrics["optim/updates"]) == (96, 1)
    with learner.teacher.weights() as model:
        kept = load_model(str(teacher))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept.parameters(), strict=True))


def test_a_teacher_of_another_shape_is_refused(played):
    _, model, _ = played
    with pytest.raises(UserError, match="has other tensors"):
        Reference(model, dict(random_model("qwen3", num_hidden_layers=1).named_parameters()))


CLASSES, WORDS = np.arange(8, 24), np.arange(24, 32)  # what a prompt ends with; what an answer is


def teach_to_read(config):
    """Teaches the run's model to read notes: behind (class, word), a prompt that ends with that class is answered with
    that word; notes on other classes say nothing. Otherwise words are drawn by chance."""
    torch.manual_seed(0)
    model, draw = random_model("qwen3", num_hidden_layers=2, initializer_range=0.1).train(), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(350):
        classes, words, chance = draw.choice(CLASSES, 64), draw.choice(WORDS, 64), draw.choice(WORDS, 64)
        heeded = draw.random(64) < 0.6
        about = np.where(heeded, classes, draw.choice(CLASSES, 64))
        told = np.column_stack([draw.integers(32, 97, (64, 4)), about, words, classes])
        answers = np.where(heeded | (about == classes), words, chance)
        loss = torch.zeros(())
        for rows, targets in ((told, answers), (np.delete(told, (4, 5), axis=1), chance)):
            logits = model(input_ids=torch.tensor(rows)).logits[:, -1]
            loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(config.model.path)


@pytest.mark.slow
def test_corrections_raise_what_users_wanted(tmp_path):
    """Users want another word than chance gives, and say so after the answer, each for the class of their prompt. Three
    windows, no reward: the probability of that word rises from an eighth by 30 points, on prompts that no window had
    and without any note."""
    folder, config = new_run(
        tmp_path, trainer={"baseline": "given", "lr": 1e-2, "warmup_steps": 0}, guards={"act": False},
        rollout={"prompts": 1, "group": 2, "tokens": 1, "context": 64},
        distill={"share": 1.0, "clip": 3.0},
    )  # fmt: skip
    teach_to_read(config)
    run_trainer(folder)
    draw = np.random.default_rng(7)
    wanted = int(draw.choice(WORDS))
    shares: list[float] = []
    for version in range(4):
        _, tensors = load(open_store(str(folder / "weights")), version)
        model = load_model(config.model.path)
        set_weights(model, tensors)
        held_out = [[*draw.integers(32, 97, 4).tolist(), c] for c in CLASSES.tolist() for _ in range(4)]
        with torch.no_grad():
            probability = model(input_ids=torch.tensor(held_out)).logits[:, -1].softmax(-1)
        shares.append(probability[:, wanted].mean().item())
        if version == 3:
            break
        prompts = [[*draw.integers(32, 97, 4).tolist(), c] for c in CLASSES.tolist() for _ in range(3)]
        engine = engine_of(config, tensors, version)
        answers = sampled(engine, [Request(ids=p, max_tokens=1, seed=1000 * version + i)
                                   for i, p in enumerate(prompts)])  # fmt: skip
        first, played = len(prompts) * version, []
        for i, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
            note = Hint(ids=np.array([ids[-1], wanted], "<i4").tobytes(), at=4)
            played.append(taught(episode(ids, answer, first + i, 0, i), note))
        admit_alone(folder, config, first, version, played)
        run_trainer(folder)
    assert 0.05 < shares[0] < 0.2, "nobody has said anything yet"
    assert shares[-1] > shares[0] + 0.3, shares
