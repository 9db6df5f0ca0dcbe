"""Asynchronous reinforcement learning in one file, to be read from top to bottom.

    admit -> play -> group -> batch -> step -> publish -> swap -> admit ...

    python recipes/loop.py recipes/demo.toml --tasks.dataset DIR    # made by `etude tasks build`
    python recipes/loop.py recipes/environments/reverse_text.toml --model.path FOLDER

The configuration and the modules are those of `etude train`, which has what this file leaves out: engines and trainer
as processes of their own, a ledger that survives their crash, evaluations, guards, checkpoints, a report. Here all is
one process: the engine samples in a thread, episodes are asyncio tasks, and the optimizer step runs in another thread,
while the episodes of later groups go on. That they go on is what is asynchronous: the tokens of a batch may be older
than the weights that train on them. How much older is decided by `admit`, and by nothing else.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel

from etude.cli.overlays import read_toml
from etude.config import RLConfig, validate
from etude.grading.runner import open_sandbox
from etude.inference.engine.engine import Engine
from etude.inference.engine.requests import Request
from etude.models.loading import load_model, named_tensors
from etude.protocol.wire import GenerateRequest
from etude.records import Episode, Generation, Group, Outcome
from etude.rollout.admission import capacity
from etude.rollout.curriculum import Curriculum
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.run.parts import context_of, taskset_of
from etude.store import open_store
from etude.trainer.optimizer import for_policy
from etude.trainer.rl.batch import make_batch
from etude.trainer.rl.step import Learner, train_step
from etude.weights.publisher import Publisher
from etude.weights.ranks import held_rows
from etude.weights.runs import with_models

RETRIES = 2  # of an episode that infrastructure lost


async def train(config: RLConfig, folder: Path) -> list[dict[str, float]]:
    """Runs `trainer.steps` steps and returns the metrics of each. Versions are published in `folder`."""
    rollout, steps = config.rollout, config.trainer.steps
    torch.set_num_threads(config.trainer.threads)
    trainer = Trainer(config, folder)
    async with open_context(config, folder) as (context, engine):
        curriculum = Curriculum([task.id for task in context.taskset.split("train")], rollout.group, config.seed)
        groups: list[asyncio.Task[list[Episode]]] = []  # by index: played, or being played
        history: list[dict[str, float]] = []
        trainer.publish(0, ())
        for version in range(steps):
            # Admit. Step i trains on groups i P to (i + 1) P - 1, in this order.
            for _ in range(admit(config, version, admitted=len(groups))):
                index = len(groups)
                task_id = curriculum.draw(index)
                groups.append(asyncio.create_task(play_group(context, config, index, task_id)))

            # Wait for the next P groups. Admission bounds how old their tokens are; nothing is filtered here.
            started = time.monotonic()
            indices = range(version * rollout.prompts, (version + 1) * rollout.prompts)
            members = await asyncio.gather(*(groups[index] for index in indices))
            waited = time.monotonic() - started
            for episodes in members:
                if episodes:
                    curriculum.observe(episodes[0].task_id, sum(e.passed for e in episodes), len(episodes))
            lag = max((version - e.min_version for es in members for e in es if e.min_version >= 0), default=0)
            assert lag <= rollout.staleness, "admission has let a group start too early"

            # Batch and step, in a thread: all other groups are played on meanwhile.
            metrics = await asyncio.to_thread(trainer.step, version, indices, members)

            # Publish the next version, and swap it in between two tokens. Running episodes keep their caches, and
            # every token carries the version that it was sampled from.
            tensors = await asyncio.to_thread(trainer.publish, version + 1, tuple(indices))
            pause = await asyncio.wrap_future(engine.swap(version + 1, lambda t=tensors: write(engine.model, t)))

            rewards = [e.reward for episodes in members for e in episodes]
            metrics |= {"reward": sum(rewards) / max(1, len(rewards)), "lag": lag, "waited": waited, "pause": pause}
            history.append(metrics)
            print(
                f"step {version + 1}: reward {metrics['reward']:.3f}, {len(rewards)} episodes, at most {lag} versions "
                f"old; waited {waited:.1f} s, paused {1000 * pause:.0f} ms",
                flush=True,
            )
        return history


def admit(config: RLConfig, version: int, admitted: int) -> int:
    """How many groups may start now, while the engine serves `version`.

    (version + O + 1) P groups in all: then the last one of them is trained on by the step that starts from version
    + O, so no token is ever more than O versions older than the weights that train on it. O = 0 is on-policy: the
    engine waits for the trainer, and the trainer for the engine.
    """
    rollout = config.rollout
    left = capacity(
        version=version,
        staleness=rollout.staleness,
        prompts=rollout.prompts,
        group=rollout.group,
        accepted=admitted * rollout.group,
        reserved=0,
    )
    return min(left // rollout.group, config.trainer.steps * rollout.prompts - admitted)


async def play_group(context: RolloutContext, config: RLConfig, index: int, task_id: str) -> list[Episode]:
    """G episodes of one task: their rewards are compared with each other, so a group is trained on as a whole.

    An episode lost to infrastructure is played again; one that is lost for good leaves the group.
    """
    task = context.taskset.by_id[task_id]

    async def play_member(member: int) -> Episode | None:
        for attempt in range(RETRIES + 1):
            seed = (config.seed * 1_000_003 + index) * 1_000_003 + member  # the same for every attempt
            episode = await run_episode(context, task, EpisodeId(index, member, attempt, seed % 2**62))
            if episode.outcome is not Outcome.INFRA:
                return None if episode.outcome.lost else episode
        return None

    episodes = await asyncio.gather(*(play_member(member) for member in range(config.rollout.group)))
    return [episode for episode in episodes if episode is not None]


class Trainer:
    """The trainer: a copy of the model, its optimizer, and the chain of published versions."""

    def __init__(self, config: RLConfig, folder: Path) -> None:
        self.config = config
        self.model = load_model(config.model.path).train()
        self.optimizer = for_policy(self.model, config.trainer)
        self.publisher = Publisher(open_store(str(folder / "weights")))

    def step(self, version: int, indices: Sequence[int], members: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """One optimizer step from `version` on whole groups; returns its metrics."""
        groups = [
            Group(id=index, index=index, task_id=es[0].task_id if es else "", admitted_version=version, episodes=())
            for index, es in zip(indices, members, strict=True)
        ]
        # The advantage of an episode is its reward less the mean of its group.
        batch = make_batch(groups, members, baseline=self.config.trainer.baseline)
        progress = version / self.config.trainer.steps
        # The loss corrects for tokens that an older version sampled; which loss that is, [loss] says.
        return train_step(Learner(self.model, self.optimizer), batch, self.config, version, progress).metrics

    def publish(self, version: int, groups: tuple[int, ...]) -> Mapping[str, torch.Tensor]:
        """Writes a version, as the difference to the one before, and returns its tensors in bfloat16.

        Other engines would follow the folder (`etude serve --weights`); the one in this process is given the tensors.
        """
        tensors = self.optimizer.published()
        self.publisher.publish(version, tensors, groups, {})
        return {name: held_rows(tensor) for name, tensor in tensors.items()}


class EnginePolicy:
    """The policy that episodes sample from: the engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def generate(
        self,
        request: GenerateRequest,
        timeout: float,
        on_part: Callable[[Generation], None] | None = None,
        begun: Generation | None = None,
    ) -> Generation:
        """See `etude.harness.loop.Policy`."""
        sequence = self.engine.submit(Request(**msgspec.structs.asdict(request)))
        return await asyncio.wait_for(asyncio.wrap_future(sequence.future), timeout)


@torch.no_grad()
def write(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes published tensors into the engine's model, between two of its steps."""
    live = named_tensors(model)
    for name, tensor in tensors.items():
        live[name].copy_(tensor)


@asynccontextmanager
async def open_context(config: RLConfig, folder: Path) -> AsyncIterator[tuple[RolloutContext, Engine]]:
    """What episodes are played with, and the engine: tasks, boxes if there are any, and the policy."""
    taskset = taskset_of(config, folder)
    if taskset is None or taskset.mixed:
        sys.exit("this file takes tasks.environment, tasks.edits or tasks.dataset; `etude tasks build` makes a dataset")
    engine = Engine(load_model(config.model.path))
    engine.start()
    try:
        async with open_sandbox() as sandbox:
            yield context_of(config, taskset, sandbox, EnginePolicy(engine), training=True), engine
    finally:
        engine.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    path = Path(sys.argv[1])
    rl_config = with_models(validate(RLConfig, read_toml(path, sys.argv[2:]), str(path)))
    with tempfile.TemporaryDirectory(prefix="etude-loop-") as root:
        asyncio.run(train(rl_config, Path(root)))
