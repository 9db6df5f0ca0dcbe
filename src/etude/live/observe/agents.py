"""Reports of agents: the times at which the actions of answers ran, by which edits of the tree are assigned to turns.

Files of two kinds, written on this machine, are read:

- trajectories of mini-swe-agent (format "mini-swe-agent-1.1", as of version 2.4.6): one JSON document that the agent
  writes anew after each step. A message of the model has the whole response, with its identifier, and its time; the
  observations after it have the times at which their commands ended.
- JSON lines (`*.jsonl`), for any other agent, editor or CI job:
      {"turn": ID, "started": SECONDS, "ended": SECONDS, "model": NAME}      the time of an answer's actions
      {"turn": ID, "signal": KIND, "value": NUMBER}                          a signal that only the client can know
  A turn is the generation's identifier from the gateway's response; seconds are of this machine's clock.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import UserError
from etude.live.log.records import SignalKind

MAX_BYTES = 256 << 20
_ULID = re.compile(r"(?<![0-9A-Za-z])[0-7][0-9A-HJKMNP-TV-Z]{25}$")
CLIENT_SIGNALS = frozenset({
    SignalKind.TESTS, SignalKind.LINT, SignalKind.RATING, SignalKind.REJECTED, SignalKind.RESTORED,
    SignalKind.ANSWERED, SignalKind.STOPPED, SignalKind.ENDED, SignalKind.LATENCY,
})  # fmt: skip
"""The signals that a client may report by a line. Others are observed here, or derived by the gateway."""


@dataclass(frozen=True)
class AgentStep:
    """The time of one answer's actions, from `started` to `ended`, seconds of this machine's clock."""

    turn: str
    started: float
    ended: float
    model: str = ""


@dataclass(frozen=True)
class AgentSignal:
    """A signal from a client's line; `line` makes its event unique."""

    turn: str
    kind: SignalKind
    value: float
    line: str


@dataclass
class AgentFile:
    """A file that an agent writes during its work. The file need not exist yet."""

    path: Path
    steps: dict[str, AgentStep] = field(default_factory=dict[str, AgentStep])
    ended: float | None = None
    """The end of the agent; None for a running agent, and for JSON lines."""
    refused: int = 0
    """The number of malformed lines."""
    _stamp: tuple[int, int, int] = (0, 0, 0)
    _offset: int = 0

    def read(self) -> list[AgentSignal]:
        """Reads new steps and signals; returns the signals. An incomplete document is read the next time. Raises
        UserError for a file of another format."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return []
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if stamp == self._stamp:
            return []
        if status.st_size > MAX_BYTES:
            raise UserError(f"{self.path} has more than {MAX_BYTES >> 20} MiB; give another --agent")
        if self.path.suffix == ".jsonl":
            if stamp[2] != self._stamp[2] or stamp[1] < self._offset:
                self._offset = 0
            signals = self._read_lines()
        else:
            signals = []
            if not self._read_trajectory():
                return signals
        self._stamp = stamp
        return signals

    def _read_lines(self) -> list[AgentSignal]:
        signals: list[AgentSignal] = []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                signal = self._line(line)
                if signal is not None:
                    signals.append(signal)
        return signals

    def _line(self, line: bytes) -> AgentSignal | None:
        try:
            entry = json.loads(line)
            turn = str(entry["turn"])
            if "signal" not in entry:
                step = AgentStep(turn, float(entry["started"]), float(entry["ended"]), str(entry.get("model", "")))
                self.steps[turn] = step
                return None
            kind = SignalKind(entry["signal"])
            if kind not in CLIENT_SIGNALS:
                raise ValueError(kind)
            name = hashlib.blake2b(f"{os.fspath(self.path)}:{self._offset}:".encode() + line, digest_size=16)
            return AgentSignal(turn, kind, float(entry["value"]), name.hexdigest())
        except (ValueError, KeyError, TypeError):
            self.refused += 1
            return None

    def _read_trajectory(self) -> bool:
        """Reads the steps of a trajectory. False for an incomplete document."""
        try:
            document = json.loads(self.path.read_bytes())
        except (ValueError, OSError):
            return False
        form = document.get("trajectory_format") if isinstance(document, dict) else None
        if not str(form).startswith("mini-swe-agent-1"):
            raise UserError(
                f"{self.path} is no trajectory of mini-swe-agent (its format is {form}); name JSON lines FILE.jsonl"
            )
        messages = [each for each in document.get("messages") or () if isinstance(each, dict)]
        self.steps |= {step.turn: step for step in mini_steps(messages)}
        last = messages[-1] if messages else {}
        self.ended = self.path.stat().st_mtime if last.get("role") == "exit" else None
        return True


def mini_steps(messages: list[dict[str, Any]]) -> list[AgentStep]:
    """The steps of a trajectory of mini-swe-agent."""
    steps: list[AgentStep] = []
    for place, message in enumerate(messages):
        extra = message.get("extra") or {}
        response, started = extra.get("response"), extra.get("timestamp")
        turn = turn_of(response) if isinstance(response, Mapping) else ""
        if not isinstance(response, Mapping) or not turn or not isinstance(started, (int, float)):
            continue
        ended = started
        for later in messages[place + 1 :]:
            after = later.get("extra") or {}
            if "response" in after:
                break
            ended = max(ended, after.get("timestamp") or ended)
        if ended == started and extra.get("actions"):  # the agent's last command, without an observation
            ended = started + 60.0
        steps.append(AgentStep(turn, float(started), float(ended), str(response.get("model") or "")))
    return steps


def turn_of(response: Mapping[str, Any]) -> str:
    """The gateway's identifier of an answer: the ULID in its `id`, as in "chatcmpl-01J..."; "" for an unrecorded turn,
    or a server with other ids."""
    match = _ULID.search(str(response.get("id") or ""))
    return match.group() if match else ""
