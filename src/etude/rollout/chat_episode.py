"""An episode of a model behind a chat API: for evaluations; there are no tokens to train on."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import RewardConfig
from etude.harness import run_chat_loop
from etude.protocol.backends import ChatClient
from etude.records import Budget, Episode, Task
from etude.rollout.episode import EpisodeId, changes_of, grade_of, lost, open_box, record
from etude.sandbox import Sandbox
from etude.tasks import Dataset


@dataclass(frozen=True)
class ChatContext:
    """The common settings of an evaluation's episodes; a task may have a budget of its own."""

    dataset: Dataset
    sandbox: Sandbox
    client: ChatClient
    budget: Budget
    reward: RewardConfig | None = None
    tools: tuple[str, ...] = ()  # names of the agent's tools; (): all

    def budget_of(self, task: Task) -> Budget:
        """The budget of an episode of `task`."""
        return task.budget or self.budget


async def run_chat_episode(context: ChatContext, task: Task, id: EpisodeId) -> Episode:
    """Plays and grades one attempt at `task`. Raises UserError if the API refuses."""
    try:
        box = await open_box(context, task)
        try:
            ungraded = await run_chat_loop(
                task, box, context.client, context.budget_of(task), id.seed, names=context.tools
            )
            changes, fault = await changes_of(box, ungraded, task)
        finally:
            await box.close()
        grade, signals = await grade_of(context, task, ungraded, changes, fault, None, box.requests())
        return record(context, task, id, ungraded, grade, signals.figures, signals.flags)
    except Exception as e:
        return lost(context, task, id, e)
