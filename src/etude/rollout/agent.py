"""An episode of an unmodified outside agent: a command in the box, whose model is behind the interception endpoint."""

import asyncio
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from etude.config import AgentConfig
from etude.config.secrets import with_environment
from etude.errors import UserError
from etude.harness import GRACE_SECONDS, EpisodeSpec, UngradedEpisode
from etude.harness.endpoint import Endpoint, Recording, open_endpoint
from etude.records import StopReason, Task
from etude.sandbox import HOST_SOCKET_PORT, TOOLS, Box, BoxError, ExecResult, Image, Limits

_SHOWN = 300  # characters of an agent's last output


@dataclass(frozen=True)
class Agent:
    """An outside agent: its command, and the endpoint of its model."""

    config: AgentConfig
    endpoint: Endpoint

    def image(self, image: Image) -> Image:
        """The image of its box: with the agent's program, and a way to the endpoint."""
        own = {} if self.config.folder is None else {TOOLS: Path(self.config.folder).resolve()}
        return replace(image, mounts={**image.mounts, **own}, host_socket=self.endpoint.socket)

    @property
    def limits(self) -> Limits:
        """The limits of its box."""
        return Limits(memory_mb=self.config.memory_mb, processes=self.config.processes)


@asynccontextmanager
async def open_agent(config: AgentConfig | None) -> AsyncGenerator[Agent | None]:
    """The configured agent with an endpoint of its own; None without one. Raises UserError."""
    if config is None:
        yield None
        return
    check_agent(config)
    async with open_endpoint() as endpoint:
        yield Agent(config, endpoint)


def check_agent(config: AgentConfig) -> None:
    """Raises UserError if the agent's program, or a variable of its environment, is missing."""
    with_environment(config.environment)
    if config.folder is not None and not Path(config.folder).is_dir():
        raise UserError(f"rollout.agent.folder: {config.folder} is not a folder; give that of the agent's program")


async def run_agent(spec: EpisodeSpec, agent: Agent, box: Box) -> UngradedEpisode:
    """Runs the agent's command in `box` until it ends, its budget is spent or its time is up. Raises BoxError with
    payer "infra", EngineError or Aborted if the infrastructure failed, and UserError if the command fails before its
    first request, since no model is to blame then."""
    recording = Recording(spec)
    key = agent.endpoint.open(recording)
    timed_out = False
    done: ExecResult | None = None
    refused = ""
    try:
        variables = _environment(spec.task, key) | with_environment(agent.config.environment)
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        line = f"(\n{exports}{agent.config.command}\n)"
        async with asyncio.timeout(spec.budget.seconds + GRACE_SECONDS):
            done = await _run(line, box, recording, spec.budget.seconds)
    except TimeoutError:
        timed_out = True
    except BoxError as e:
        if e.payer == "infra":
            raise
        refused = f"the agent's command was ended: {e}"
    finally:
        agent.endpoint.close(key)
        await recording.close()
    if recording.failure is not None:
        raise recording.failure
    late = not refused and (done is None or done.timed_out)
    note = refused or _note(done)
    if note and not late and not recording.requests:
        raise UserError(f"rollout.agent.command failed before its first request: {note}; try it in a box")
    reason = recording.stop_reason or (StopReason.SECONDS if late else StopReason.FINISHED)
    return replace(recording.ungraded(reason, timed_out), note=note)


def _note(done: ExecResult | None) -> str:
    """A sentence on a failed command: its exit, and the end of its output."""
    if done is None or done.rc == 0:
        return ""
    how = "was ended" if done.timed_out or done.rc is None else f"ended with exit code {done.rc}"
    return f"the agent's command {how}; its output ends with: {' '.join(done.output[-_SHOWN:].split()) or 'nothing'}"


async def _run(line: str, box: Box, recording: Recording, seconds: float) -> ExecResult:
    """The command's result; the command is interrupted when the recording ends."""
    work = asyncio.create_task(box.exec(line, seconds))
    ended = asyncio.create_task(recording.ended.wait())
    try:
        await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await box.interrupt()
        return await work
    finally:
        ended.cancel()
        work.cancel()


def _environment(task: Task, key: str) -> dict[str, str]:
    """The task and the endpoint as variables. OpenAI's clients want the version in the URL, Anthropic's do not."""
    url = f"http://127.0.0.1:{HOST_SOCKET_PORT}"
    focus = task.focus
    shown = f"\n\nSee {focus.path}, lines {focus.first_line} to {focus.last_line}." if focus.path else ""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "TASK": task.prompt + shown,
    }
