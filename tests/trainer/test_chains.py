"""Episodes of several segments in the loss, and a long one from the first token to the optimizer's step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from etude.audit.rescoring import set_weights
from etude.config import EngineConfig, LossConfig, RLConfig
from etude.grading.runner import open_sandbox
from etude.harness.loop import SUMMARISE, EngineModel, Sampling
from etude.harness.token_ledger import TokenLedger
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models.loading import load_model, named_tensors
from etude.protocol.wire import GenerateRequest
from etude.records import Budget, Episode, Focus, Generation, Outcome, StopReason, decode, encode
from etude.renderers import Renderer, renderer_for
from etude.rollout import Taskset, dataset_part
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.rollout.replay import RecordedPolicy, replay_episode
from etude.tasks.dataset import DATASET_FORMAT, Dataset, Manifest
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.step import Learner, train_step
from tests.helpers.speakers import PATH, Speaker, a_task
from tests.helpers.trainer_runs import engine_of, new_run, prompt, sampled

NANO = Path(__file__).parents[2] / "models" / "nano"
REWARDS = (1.0, 0.0, 0.5)
SEGMENTS = (3, 1, 2)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[RLConfig, list[Episode]]:
    """A group whose members are chains of three, one and two segments, of two sampled turns each."""
    _, config = new_run(tmp_path_factory.mktemp("chains"))
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group": 3, "tokens": 90})})
    engine = engine_of(config, published(config), 0)
    return config, [a_chain(engine, member, count) for member, count in enumerate(SEGMENTS)]


def published(config: RLConfig) -> dict[str, torch.Tensor]:
    """The weights that engines serve and the trainer computes with."""
    return {name: t.bfloat16() for name, t in named_tensors(load_model(config.model.path)).items()}


def a_chain(engine: Engine, member: int, count: int) -> Episode:
    ledger = TokenLedger()
    for number in range(count):
        ledger = ledger.restarted() if number else ledger
        ledger.add_environment(prompt(100 * member * bool(number) + number))
        for turn in range(2):
            ids = ledger.prompt()
            (said,) = sampled(engine, [Request(ids=ids, max_tokens=9 + turn, seed=100 * member + 2 * number + turn)])
            ledger.add_turn(ids, said)
            ledger.add_environment([7, 8, 9])
    return Episode(
        id=f"0-{member}-0", group_id=0, member=member, attempt=0, task_id="t", seed=member, outcome=Outcome.SCORED,
        stop_reason=StopReason.FINISHED, reward=REWARDS[member], passed=False, segments=ledger.segments(), turns=(),
        metrics={},
    )  # fmt: skip


def by_hand(config: RLConfig, episodes: list[Episode], scale: dict[int, float]) -> float:
    """Norm of the gradient of minus the sum of scale * log-probability: a plain pass for each segment."""
    model = load_model(config.model.path)
    set_weights(model, published(config))
    total = torch.zeros(())
    for episode in episodes:
        for segment in episode.segments:
            ids_T, mask_T, *_ = (torch.from_numpy(a.copy()).long() for a in segment.arrays()[:2])
            logits_TV = model(ids_T[None], use_cache=False).logits[0].float()
            logprobs_T = logits_TV[:-1].log_softmax(-1).gather(1, ids_T[1:, None]).squeeze(1)
            total = total - scale[episode.member] * logprobs_T[mask_T[1:] == 1].sum()
    total.backward()
    return float(torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]).norm())


@pytest.mark.parametrize("preset", ["composer2", "grpo"])
@pytest.mark.parametrize("execution", ["rows", "auto"])
def test_every_segment_of_a_chain_is_trained_on_with_its_episodes_advantage(played, preset, execution):
    """Against gradients by hand: reward minus mean over all tokens of the chain; "grpo" divides by the deviation and by
    the length of the whole chain, not of a segment. 2e-4 of the norm: float32 in another order (test_step)."""
    config, episodes = played
    trainer = config.trainer.model_copy(update={"execution": execution})
    config = config.model_copy(update={"loss": LossConfig.model_validate({"preset": preset}), "trainer": trainer})
    batch = make_batch((), [episodes], advantage="zscore" if preset == "grpo" else "mean")
    model = load_model(config.model.path)
    metrics = train_step(Learner(model, for_policy(model, config.trainer)), batch, config, 0, 0.0).metrics
    lengths = [e.sampled_tokens for e in episodes]
    assert lengths == [19 * n for n in SEGMENTS]
    centred = np.array(REWARDS) - 0.5
    if preset == "grpo":
        scale = centred / (np.std(REWARDS) + 1e-6) / lengths / 3
    else:
        scale = centred / (3 * config.rollout.tokens)
    expected = by_hand(config, episodes, dict(enumerate(scale)))
    assert metrics["optim/grad_norm"] == pytest.approx(expected, rel=2e-4)
    first_only = [msgspec.structs.replace(e, segments=e.segments[:1]) for e in episodes]
    assert abs(by_hand(config, first_only, dict(enumerate(scale))) / expected - 1) > 0.05, (
        "the test sees a lost segment"
    )


# --- fifty turns, a hundred thousand tokens ---------------------------------------------------------------------------

LINES = "\n".join(f"        total += amount * {i} - {i} * amount  # step {i} of the price" for i in range(24))
SOURCE = f'''"""Shop."""


class Shop:
    def price(self, amount):
        """The price.

        >>> Shop().price(2)
        6
        """
        total = amount - 3
{LINES}
        return total
'''
TASK = msgspec.structs.replace(
    a_task(),
    focus=Focus(path=PATH, first_line=5, last_line=SOURCE.count("\n")),
    changes={PATH: SOURCE},
    solution={PATH: SOURCE.replace("- 3\n", "* 3\n", 1)},
)
HIDDEN = "from shop import Shop\n\n\ndef test_price():\n    assert Shop().price(4) == 12\n"
BUDGET = Budget(turns=60, tokens=20_000, context=4096, seconds=3000.0)
SAMPLING = Sampling(summarise_at=2300, summary_tokens=24)
TURNS = 50


class Forced:
    """A policy whose calls are written here and whose summaries are the model's own; log-probabilities are real."""

    def __init__(self, engine: Engine, renderer: Renderer, turns: list[list[int]]):
        self._engine = engine
        self._ends = renderer.bridge([], "stop", [], SUMMARISE)[-20:]
        self._turns = iter(turns)
        self.summaries: list[tuple[list[int], int, Generation]] = []

    async def generate(self, request: GenerateRequest, *_: Any) -> Generation:
        ids, seed = request.ids, request.seed
        if ids[-20:] == self._ends:
            asked = Request(ids=ids, max_tokens=request.max_tokens, seed=seed, stop=request.stop)
            found = await asyncio.wrap_future(self._engine.submit(asked).future)
            self.summaries.append((ids, seed, found))
            return found
        said = next(self._turns)
        version, logprobs = await asyncio.wrap_future(self._engine.score([*ids, *said]))
        return Generation(
            ids=said, logprobs=logprobs[-len(said) :], versions=[version] * len(said), finish_reason="stop",
            kv_version=version,
        )  # fmt: skip


def a_dataset(root: Path) -> Dataset:
    texts = {f"repository/{PATH}": TASK.solution[PATH], "hidden/tests/test_shop.py": HIDDEN, "site/.keep": ""}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    manifest = Manifest(
        format=DATASET_FORMAT, name="shop-1.0", licence="MIT", licence_source="pyproject.toml", seed=0,
        python_path=("src",),
        source_roots=("src",), visible="doctests", options={}, counts={}, digests={},
    )  # fmt: skip
    return Dataset(root, "shop-1.0", root / "repository", root / "site", root / "hidden", (TASK,), manifest)


@pytest.mark.release
@pytest.mark.slow
def test_fifty_turns_and_a_hundred_thousand_tokens(tmp_path: Path) -> None:
    """In real boxes, scored and summarised by the bundled model, graded, replayed and trained on."""
    renderer, say = renderer_for(NANO), Speaker(NANO)
    read, grep = ("read", {}), ("grep", {"pattern": "amount"})
    short, long = say.turn(read, text=" Look."), say.turn(read, grep, read)
    edit, finish = ("edit", {"old": "amount - 3\n", "new": "amount * 3\n"}), say.turn(("finish", {}))
    turns = [*([short, long, long, long, long] * 10)[: TURNS - 2], say.turn(edit, ("test", {})), finish]
    engine = Engine(load_model(NANO), EngineConfig(cache_mb=64), deterministic=True)
    engine.start()
    forced = Forced(engine, renderer, turns)
    taskset = Taskset((dataset_part(a_dataset(tmp_path)),))
    other = Forced(engine, renderer, [finish])

    async def group() -> list[Episode]:
        async with open_sandbox(workers=1) as sandbox:
            setting = RolloutContext(taskset, sandbox, EngineModel(forced, renderer, SAMPLING), BUDGET)
            last = RolloutContext(taskset, sandbox, EngineModel(other, renderer, SAMPLING), BUDGET)
            slots = [EpisodeId(group_id=0, member=m, attempt=0, seed=11 + m) for m in range(2)]
            first = await run_episode(setting, TASK, slots[0])
            return [first, await run_episode(last, TASK, slots[1])]

    async def again(episode: Episode) -> str:
        async with open_sandbox(workers=1) as sandbox:
            return await replay_episode(
                RolloutContext(taskset, sandbox, EngineModel(forced, renderer, SAMPLING), BUDGET), TASK, episode
            )

    episodes = [decode(encode(e), Episode) for e in asyncio.run(group())]
    right, _ = episodes
    assert [(e.outcome, e.reward) for e in episodes] == [(Outcome.SCORED, r) for r in (1.0, 0.0)], [
        e.detail for e in episodes
    ]
    assert right.metrics["turns"] == TURNS
    assert sum(len(s.ids) // 4 for s in right.segments) >= 100_000
    assert max(len(s.ids) // 4 for s in right.segments) <= BUDGET.context
    assert len(right.segments) == right.metrics["summaries"] + 1 > 25
    # Played again in a new box from nothing but the blob, every token is the same.
    assert RecordedPolicy(right.segments).turns == len(right.turns)
    assert asyncio.run(again(right)) == ""
    # The model's own tokens are those that the engine samples from the ledger's prompt under the turn's seed.
    for ids, seed, found in forced.summaries[:: len(forced.summaries) // 3]:
        asked = Request(ids=ids, max_tokens=SAMPLING.summary_tokens, seed=seed, stop=renderer.stop_ids)
        repeated = engine.generate(asked)
        assert (repeated.ids, repeated.logprobs) == (found.ids, found.logprobs)
    engine.close()
    trains(episodes)


def trains(episodes: list[Episode]) -> None:
    """Rewards 1 and 0: the tokens of all segments have their episode's advantage."""
    values = {
        "tasks": {"repository": "unused"},
        "model": {"path": str(NANO)},
        "rollout": {"prompts": 1, "group": 2, "tokens": BUDGET.tokens, "context": BUDGET.context},
        "trainer": {"lr": 1e-4, "warmup_steps": 0},
    }
    config = RLConfig.model_validate(values)
    batch = make_batch((), [episodes])
    total = sum(e.sampled_tokens for e in episodes)
    assert sum(int(c.mask_C.sum()) for row in batch.rows for c in row.completions) == total
    for row in batch.rows:
        for c in row.completions:
            assert np.allclose(c.advantages_C[c.mask_C == 1], (1 / 2, -1 / 2)[c.episode])
    model = load_model(NANO)
    before = [p.detach().clone() for p in model.parameters()]
    result = train_step(Learner(model, for_policy(model, config.trainer)), batch, config, 0, 0.0)
    assert result.verdict.trains
    metrics = result.metrics
    assert metrics["mismatch/tokens"] == total
    assert metrics["mismatch/max_abs"] < 1e-2, "float32 on both sides; calls that no model would make are improbable"
    assert metrics["mismatch/k2"] < 1e-7
    assert 0 < metrics["optim/grad_norm"] < float("inf")
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
