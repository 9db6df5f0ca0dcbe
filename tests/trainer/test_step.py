"""Whole steps on episodes that the engine sampled: every preset trains, however the tokens are packed."""

import pytest
import torch

from etude.audit.rescoring import set_weights
from etude.config import LossConfig, RLConfig
from etude.errors import UserError
from etude.models.loading import load_model
from etude.store import open_store
from etude.trainer.optimizer import for_policy
from etude.trainer.rl import value
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.presets import PRESETS, loss_preset
from etude.trainer.rl.process import make_learner
from etude.trainer.rl.reference import Reference
from etude.trainer.rl.step import Learner, train_step
from etude.trainer.rl.value import Critic
from etude.trainer.world import World
from etude.weights.content import load
from tests.helpers.trainer_runs import engine_of, new_run, play, publish_versions


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A configuration, the weights of version 1, and three groups, the last sampled by version 0."""
    run, config = new_run(tmp_path_factory.mktemp("steps"))
    publish_versions(run, config, 2, {})
    old, new = (load(open_store(str(run / "weights")), version)[1] for version in (0, 1))
    groups = [play(engine_of(config, new, 1), 1), play(engine_of(config, new, 1), 2)]
    return config, new, [*groups, play(engine_of(config, old, 0), 3)]


def with_loss(config: RLConfig, execution: str = "auto", **loss: object) -> RLConfig:
    """`execution` other than the default is cut into passes of at most 100 tokens."""
    cut = {} if execution == "auto" else {"execution": execution, "micro_tokens": 100}
    trainer = config.trainer.model_copy(update=cut)
    rollout = config.rollout.model_copy(update={"prompts": 3})
    return config.model_copy(update={"loss": LossConfig.model_validate(loss), "trainer": trainer, "rollout": rollout})


def stepped(played, config, **options):
    """Metrics of a step from version 1, the tensors after it, and the gradients as the judge saw them."""
    _, tensors, groups = played
    model = load_model(config.model.path)
    set_weights(model, tensors)
    optimizer = for_policy(model, config.trainer)
    chosen = loss_preset(config.loss)
    batch = make_batch((), groups, advantage=chosen.advantage)
    reference = Reference(load_model(config.model.path)) if chosen.kl_beta else None
    critic = Critic(model) if chosen.advantage == "value" else None
    result = train_step(Learner(model, optimizer, reference, critic), batch, config, 1, 0.0, **options)
    assert result.verdict.trains
    return result.metrics, optimizer, critic


def test_activation_checkpointing_changes_no_bit_of_a_step(played):
    """The trainer's own networks, with a reference, in streamed passes."""
    config, tensors, groups = played
    states = []
    for again in (False, True):
        chosen = with_loss(config, "streaming", kl="k2", kl_beta=0.1)
        trainer = chosen.trainer.model_copy(update={"activation_checkpointing": again})
        chosen = chosen.model_copy(update={"trainer": trainer})
        learner = make_learner(chosen, World())
        assert all(layer.gradient_checkpointing == again for layer in learner.model.model.layers)
        assert all(p.grad_dtype == torch.float32 for p in learner.model.parameters())
        learner.optimizer.follow(tensors)
        result = train_step(learner, make_batch((), groups), chosen, 1, 0.0)
        assert result.metrics["optim/grad_norm"] > 0
        states.append(learner.optimizer.state())
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_does_not_depend_on_how_it_was_packed(played, preset):
    """Tolerance 2e-4 of the norm: float32 sums in another order, through exponentials of the ratios."""
    config = played[0]
    whole, _, _ = stepped(played, with_loss(config, preset=preset))
    assert whole["optim/updates"] == whole["share/packed"] == 1.0
    for execution in ("rows", "streaming", "recompute"):
        parts, _, _ = stepped(played, with_loss(config, execution, preset=preset))
        assert parts[f"share/{execution}"] == 1.0
        assert parts.keys() - {f"share/{execution}"} == whole.keys() - {"share/packed"}
        for name in {"loss/policy", "loss/value", "loss/r_mean", "optim/grad_norm", "off_policy/k2"} & whole.keys():
            assert parts[name] == pytest.approx(whole[name], rel=2e-4, abs=2e-6), name
    assert whole["off_policy/tokens"] == 360
    assert whole["mismatch/tokens"] == 240, "the third group is of another version"
    assert whole["mismatch/k2"] < 1e-9 < whole["off_policy/k2"]


@pytest.mark.parametrize("preset", ["composer2", "tis", "gspo", "ppo"])
def test_several_updates_per_batch(played, preset):
    """The second update sees ratios other than 1 to the policy at the start of the step."""
    metrics, _, _ = stepped(played, with_loss(played[0], preset=preset, updates=3))
    assert metrics["optim/updates"] == 3.0
    assert metrics["off_policy/tokens"] == 360
    if preset != "composer2":
        once, _, _ = stepped(played, with_loss(played[0], preset=preset))
        assert once["loss/r_mean"] == pytest.approx(1.0, abs=1e-6)
        assert abs(metrics["loss/r_mean"] - 1) > 1e-5


def test_corrections_and_masks_are_counted(played):
    metrics, _, _ = stepped(played, with_loss(played[0], preset="tis", cap_high=1.05, masks=["ipo", "veto", "opsm"]))
    assert 0 < metrics["loss/W_cut"] < 1
    assert metrics["loss/W_mean"] <= 1.05
    assert metrics["drop/tokens/ipo"] > 0, "the stale group's"
    assert metrics["drop/tokens/all_masks"] >= metrics["drop/tokens/ipo"]


def reinforce(tokens):
    """The loss of the preset composer2, as a user would write it."""
    return -tokens.advantage * tokens.current


def shapeless(tokens):
    return tokens.current.sum()


NOT_CALLABLE = 3


@pytest.mark.parametrize("execution", ["auto", "rows"])
def test_a_custom_loss_trains_as_the_preset_that_it_repeats(played, execution):
    """Bit for bit: the same products in the same order. KL term, masks and divisor are the preset's."""
    options = {"kl": "k3", "kl_beta": 0.1, "masks": ["ipo"]}
    own, optimizer, _ = stepped(played, with_loss(played[0], execution, custom=f"{__name__}:reinforce", **options))
    preset, expected, _ = stepped(played, with_loss(played[0], execution, **options))
    assert own["loss/policy"] == preset["loss/policy"]
    assert own["loss/kl_ref"] == preset["loss/kl_ref"] > 0
    assert all(torch.equal(t, expected.state()[name]) for name, t in optimizer.state().items())
    other, _, _ = stepped(played, with_loss(played[0], execution, custom=f"{__name__}:reinforce", preset="dapo"))
    assert other["optim/grad_norm"] != own["optim/grad_norm"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_module:loss", "no_such_module"),
        (f"{__name__}:no_such_loss", "has no no_such_loss"),
        (f"{__name__}:NOT_CALLABLE", "is not callable"),
        (f"{__name__}:shapeless", r"must return a tensor of shape \(\d+,\), one loss per token, not a tensor of shape"),
    ],
)
def test_a_custom_loss_that_cannot_be_used_is_refused_in_a_sentence(played, path, why):
    with pytest.raises(UserError, match=rf"loss\.custom.*{why}") as error:
        stepped(played, with_loss(played[0], custom=path))
    assert "\n" not in str(error.value)


def test_the_value_head_learns_the_returns(played, monkeypatch):
    """Thirty steps on one batch, lambda 1: the error falls towards the variance of the returns, 1.25 of 3.5.

    The head survives a checkpoint."""
    monkeypatch.setattr(value, "LEARNING_RATE", 2e-2)
    config = with_loss(played[0], preset="ppo", lam=1.0)
    _, tensors, groups = played
    model = load_model(config.model.path)
    set_weights(model, tensors)
    critic, optimizer = Critic(model), for_policy(model, config.trainer.model_copy(update={"lr": 1e-5}))
    learner, batch = Learner(model, optimizer, critic=critic), make_batch((), groups, advantage="value")
    assert batch.zero_variance == 0
    errors = [train_step(learner, batch, config, n, 0.0).metrics["loss/value"] for n in range(1, 31)]
    assert errors[-1] < 0.6 * errors[0]
    other = Critic(model)
    other.load(critic.state())
    assert all(torch.equal(other.state()[name], t) for name, t in critic.state().items())


def test_a_batch_without_rows_changes_nothing(played):
    config = with_loss(played[0])
    model = load_model(config.model.path)
    optimizer = for_policy(model, config.trainer)
    before = {name: t.clone() for name, t in optimizer.state().items()}
    equal = [list(played[2][0][:1])]
    result = train_step(Learner(model, optimizer), make_batch((), equal), config, 1, 0.0)
    assert result.verdict.trains
    assert "optim/grad_norm" not in result.metrics
    assert all(torch.equal(t, before[name]) for name, t in optimizer.state().items())
