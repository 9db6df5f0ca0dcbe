"""The simulated users as clients of the gateway: what the policy learns from went through the processes that serve.

    users  --HTTP-->  etude live serve  -->  server.py        chats, edits and signals, in the order of their times
    the gateway's log  -->  cut_window, window_samples  -->  bandit.learn

Requests and reactions are those of `traffic`; what a user thinks of an answer is said in words (`conversations`), which
the gateway reads. Times are those of a clock that moves in steps; all accounts are new in the first window.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from benchmarks.live_clock import SetClock
from benchmarks.live_gateway import gateway_process, live_folder, process
from benchmarks.live_simulation import bandit
from benchmarks.live_simulation.conversations import (
    ClientSignal,
    UserChat,
    client_signals,
    first_chat,
    next_chat,
    next_requests,
)
from benchmarks.live_simulation.server import drawn, seed_of
from benchmarks.live_simulation.texts import ASKED, read_answer
from benchmarks.live_simulation.traffic import COLLECT, HORIZON, Signals, Turns, nanoseconds, outcomes, react, serve
from benchmarks.live_simulation.windows import RATE, LearningRun
from etude.config.live import LabelsConfig
from etude.live.gateway.upstream import Server
from etude.live.learn.window import LiveContents, cut_window, window_samples
from etude.live.log import schema
from etude.live.log.accounts import Accounts, open_blobs, open_log
from etude.live.log.records import ExitKind, LivePolicy, ulid
from etude.live.log.tenants import create_key, digest_of, set_policy
from etude.live.log.users import signature_of
from etude.live.simulate.users import ACTIONS, EDIT, SimulatedAccounts, draw_population, utility

_FIRM = "firm"
_AT_ONCE = 16  # requests in a step of the clock
_EVENTS = 256  # of one request
_SECONDS = 60.0  # of one request, and of the log after the last


@dataclass
class ServedRun:
    """A run through the gateway: `answers` and `signals` of its clients, turns that were `trained` on, and other
    exits by kind and reason."""

    learning: LearningRun
    answers: int = 0
    signals: int = 0
    trained: int = 0
    exits: dict[str, int] = field(default_factory=dict[str, int])


def run_served(folder: Path, seed: int, versions: int, turns: int, first_CVA: np.ndarray) -> ServedRun:
    """`windows.run` without a fault, through the gateway. Raises UserError if a process does not start, RuntimeError if
    the gateway refuses a request or loses a turn."""
    clock = SetClock(folder / "clock")
    clock.set(nanoseconds(0, 0.0) / 1e9)
    with clock.here(), process(folder, "policy", "benchmarks.live_simulation.server") as upstream:
        config, _ = live_folder(folder, upstream)
        engine, accounts = open_log(folder / "live", None), Accounts(folder / "live")
        key = create_key(engine, _FIRM, "proxy", proxy=True)
        set_policy(engine, _FIRM, LivePolicy(requests_per_minute=10**7))
        contents = LiveContents(engine, accounts, open_blobs(folder / "live"))
        rng = np.random.default_rng((seed, 5))
        population = draw_population(rng)
        with gateway_process(folder, config, folder / "clock") as url:
            clients = _Clients(Server(url, "users", key), accounts.proxy_secret(digest_of(key)), population)
            loop = _Loop(clients, clock, engine, contents, first_CVA)
            asyncio.run(loop.run(rng, versions, turns))
        engine.dispose()
    done, hidden_VA = loop.done, utility(population)
    done.learning.utility.extend(bandit.mean_of(theta, hidden_VA) for theta in done.learning.logits)
    done.signals = clients.signals
    return done


class _Loop:
    """Windows, one after the other. `done` grows."""

    def __init__(
        self, clients: _Clients, clock: SetClock, engine: sa.Engine, contents: LiveContents, first_CVA: np.ndarray
    ) -> None:
        self.done = ServedRun(LearningRun([first_CVA], []))
        self._clients, self._clock, self._engine, self._contents = clients, clock, engine, contents
        self._windows: list[_WindowUse] = []

    async def run(self, rng: np.random.Generator, versions: int, count: int) -> None:
        """`versions` windows of `count` requests."""
        logits, population = self.done.learning.logits, self._clients.population
        late: list[tuple[int, dict[str, Any]]] = []
        for number in range(versions):
            turns = serve(rng, population, bandit.probabilities(logits[-1]), count)
            use = _WindowUse(number, turns, react(rng, population, turns), self._clients, self.done.answers)
            late = await use.run(self._clock, late)
            self._windows.append(use)
            self.done.answers += len(turns.account_N)
            await self._wait_for_log()
            logits.append(bandit.learn(logits[-1], joined([w.turns for w in self._windows]), self._gains(), RATE))
        self._clients.close()

    def _gains(self) -> np.ndarray:
        """Weight times advantage of all turns so far, by the window that is cut now: float64 [N]."""
        config, done = LabelsConfig(), self.done
        result = cut_window(self._engine, self._contents, config)
        for left in result.exits:
            if left.kind != ExitKind.TRAINED:
                name = f"{left.kind} {left.reason}"
                done.exits[name] = done.exits.get(name, 0) + 1
        number_of = {turn: use.first + n for use in self._windows for n, turn in enumerate(use.turn_ids)}
        seeds = [seed for use in self._windows for seed in use.seeds]
        gain_N = np.zeros(done.answers)
        for sample in window_samples(self._engine, self._contents, config, result.number):
            at = number_of[sample.turn]
            assert sample.ids == drawn(seeds[at]).ids, "what is learned from is what was answered"
            gain_N[at] = sample.weight * sample.advantage
            done.trained += 1
        return gain_N

    async def _wait_for_log(self) -> None:
        """Until every turn with consent is in the log."""
        deadline, count = time.monotonic() + _SECONDS, 0
        while count < self._clients.consented:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._clients.consented - count} turns never came to the log")
            await asyncio.sleep(0.02)
            with self._engine.connect() as connection:
                count = connection.execute(sa.select(sa.func.count()).select_from(schema.turns)).scalar_one()


def joined(all_turns: Sequence[Turns]) -> Turns:
    """The turns of several windows, one after the other."""
    return Turns(**{n: np.concatenate([getattr(turns, n) for turns in all_turns]) for n in Turns.__dataclass_fields__})


class _WindowUse:
    """The requests of a window and what becomes of them. `first`: answers before; `turn_ids` are the gateway's."""

    def __init__(self, number: int, turns: Turns, signals: Signals, clients: _Clients, first: int) -> None:
        self.turns, self.first = turns, first
        self.turn_ids, self._edits = [""] * len(turns.account_N), [""] * len(turns.account_N)
        drawn_N = zip(turns.action_N.tolist(), turns.cell_N.tolist(), strict=True)
        self.seeds = [seed_of(action, cell % len(ASKED)) for action, cell in drawn_N]
        self._number, self._clients, self._signals = number, clients, client_signals(signals)
        self._shows_edit = outcomes(turns) == EDIT
        self._next = next_requests(turns, signals)
        self._answered = {request.before for request in self._next.values()}
        self._chats: dict[int, UserChat] = {}  # that go on, by their last turn

    async def run(self, clock: SetClock, late: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
        """Sends all of it until the window is cut, with the signals of earlier windows that are `late`. Returns those
        that are late now, by time."""
        turns, step = self.turns, COLLECT * _AT_ONCE / len(self.turn_ids)
        order, n, s = np.argsort(turns.at_N, kind="stable").tolist(), 0, 0
        for until in np.arange(step, COLLECT + 2 * HORIZON + step, step).tolist():
            now = nanoseconds(self._number, until)
            clock.set(now / 1e9)
            chains: dict[int, list[int]] = defaultdict(list)
            while n < len(order) and turns.at_N[order[n]] <= until:
                chains[int(turns.session_N[order[n]])].append(order[n])
                n += 1
            await asyncio.gather(*map(self._ask_all, chains.values()))
            events = [event for at, event in late if at <= now]
            late = [each for each in late if each[0] > now]
            while s < len(self._signals) and self._signals[s].arrives <= until:
                events.append(self._event(self._signals[s]))
                s += 1
            await self._clients.tell(events)
        after = [(nanoseconds(self._number, each.arrives), self._event(each)) for each in self._signals[s:]]
        return sorted([*late, *after], key=lambda each: each[0])

    def _event(self, signal: ClientSignal) -> dict[str, Any]:
        return signal.body(self._number, self.turn_ids[signal.turn], self._edits[signal.turn])

    async def _ask_all(self, chain: Sequence[int]) -> None:
        """Turns of one session, each after the one before is recorded."""
        for n in chain:
            await self._ask(n)

    async def _ask(self, n: int) -> None:
        account, cell, case = int(self.turns.account_N[n]), int(self.turns.cell_N[n]), self.first + n
        if (after := self._next.get(n)) is None:
            chat = first_chat(f"{account} {case}", cell, case)
        else:
            chat = next_chat(self._chats.pop(after.before), after, cell, case)
        body = {"model": "policy", "messages": chat.messages, "seed": self.seeds[n]}
        turn, message = await self._clients.ask(account, chat.session, body)
        self.turn_ids[n] = self._edits[n] = turn
        if n in self._answered:
            self._chats[n] = chat.after(message)
        if self._shows_edit[n]:
            action, number = divmod(self.seeds[n], len(ASKED))
            self._edits[n] = await self._clients.show(account, turn, read_answer(ACTIONS[action], number).characters)
        elif n in self._answered:  # acknowledged once the answer is recorded
            await self._clients.tell([{"response_id": turn, "name": "shown", "event_id": ulid()}])


class _Clients:
    """The clients of all accounts, behind their firm's proxy. `consented`: answers with consent; `signals` that were
    acknowledged."""

    def __init__(self, gateway: Server, secret: str, population: SimulatedAccounts) -> None:
        self.population, self.consented, self.signals = population, 0, 0
        self._gateway, self._secret = gateway, secret

    def close(self) -> None:
        """Closes the connections."""
        self._gateway.close()

    async def ask(self, account: int, session: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The id and message of an answer."""
        name, grants = f"user-{account}", bool(self.population.consent_A[account])
        head = {
            "user": name,
            "user-signature": signature_of(self._secret, name),
            "session": session,
            "organisation": f"o{self.population.organisation_A[account]}",
            **({"consent": "train"} if grants else {}),
        }
        headers = [(f"x-etude-{field}".encode(), value.encode()) for field, value in head.items()]
        turn, answer = await self._post("/v1/chat/completions", body, headers)
        self.consented += grants
        return turn, answer["choices"][0]["message"]

    async def show(self, account: int, turn: str, characters: int) -> str:
        """Registers the edit of an answer. The subject of signals on it: the edit, or without consent the turn."""
        grants, name = bool(self.population.consent_A[account]), ulid()
        edit = {"id": name, "path": "src/module.py", "base": "0", "old_lines": [1, 4], "new": "1"}
        edits = [edit | {"characters": characters}]
        _, answer = await self._post("/v1/suggestions", {"turn": turn, "suggestions": edits})
        self._check(answer, "recorded" if grants else "unrecorded")
        return name if grants else turn

    async def tell(self, events: Sequence[dict[str, Any]]) -> None:
        """Sends signals."""
        for low in range(0, len(events), _EVENTS):
            page = events[low : low + _EVENTS]
            _, answer = await self._post("/v1/feedback", page)
            self._check(answer, "recorded")
            self.signals += len(page)

    def _check(self, answer: Any, status: str) -> None:
        if wrong := [result for result in answer["results"] if result["status"] != status]:
            raise RuntimeError(f"the gateway answered {wrong[0]}, not {status}")

    async def _post(self, path: str, body: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> tuple[str, Any]:
        """The turn's id, and the body of an answer, which must be 200."""
        head = [(b"content-type", b"application/json"), *headers]
        answer = await self._gateway.ask("POST", path, head, msgspec.json.encode(body), _SECONDS)
        try:
            whole = b"".join([part async for part in answer.parts()])
        finally:
            answer.close()
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered {answer.status}: {whole[:300]!r}")
        return answer.header(b"x-etude-generation") or "", msgspec.json.decode(whole)
