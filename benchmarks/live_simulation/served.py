"""The simulated users as clients of the gateway: what the policy learns from went through the processes that serve.

    users  --HTTP-->  etude live serve  -->  server.py        chats, edits and signals, in the order of their times
    etude's log  -->  cut_window, window_samples  -->  bandit.learn

Requests and reactions are those of `traffic`; what a user thinks of an answer is said in words, which the gateway
reads. Times are those of a clock that moves in steps; all accounts are new in the first window.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa

from benchmarks.live_clock import SetClock
from benchmarks.live_gateway import gateway_process, live_folder, process
from benchmarks.live_simulation import bandit
from benchmarks.live_simulation.server import drawn, seed_of
from benchmarks.live_simulation.texts import ASKED, read_answer
from benchmarks.live_simulation.traffic import (
    COLLECT,
    HORIZON,
    KINDS,
    OF_AN_EDIT,
    PERIOD,
    Signals,
    Turns,
    nanoseconds,
    outcomes,
    react,
    serve,
)
from benchmarks.live_simulation.windows import RATE, LearningRun
from etude.config.live import LabelsConfig
from etude.live.gateway.upstream import Server
from etude.live.learn.window import LiveContents, cut_window, window_samples
from etude.live.log import schema
from etude.live.log.accounts import Accounts, open_blobs, open_log
from etude.live.log.derive import dissatisfied
from etude.live.log.records import ExitKind, LivePolicy, SignalKind, ulid
from etude.live.log.tenants import create_key, digest_of, set_policy
from etude.live.log.users import signature_of
from etude.live.simulate.users import ACTIONS, EDIT, SimulatedAccounts, draw_population, utility

FIRM = "firm"
_AT_ONCE = 16  # requests in a step of the clock
_EVENTS = 256  # of one request
_SECONDS = 60.0
_MODULES = ("arrays", "parsers", "reports", "sockets")  # by cell
_SAYS = (
    "Perfect, thanks.",
    "Thanks.",
    "Well.",
    "Hm, still open.",
    "This is wrong.",
    "That's not what I wanted: wrong.",
)
"""Words that go on after an answer, from content to unhappy."""
_POSTED = (SignalKind.APPLIED, SignalKind.REJECTED, SignalKind.UNDONE, SignalKind.SURVIVED, SignalKind.GONE,
           SignalKind.RATING)  # fmt: skip
"""What clients tell; the gateway finds the other kinds in answers and requests."""
_GOES_ON = (SignalKind.FOLLOWUP, SignalKind.RETRY, SignalKind.ANSWERED)


@dataclass
class ServedRun:
    """A run through the gateway. `turns` of all windows, of which `trained` were learned from; `dropped` by reason."""

    learned: LearningRun
    turns: int = 0
    signals: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict[str, int])


def run_served(folder: Path, seed: int, versions: int, turns: int, first_CVA: np.ndarray) -> ServedRun:
    """As `windows.run` without a fault. Raises UserError if a process does not start, RuntimeError for a wrong
    answer."""
    clock = SetClock(folder / "clock")
    clock.set(nanoseconds(0, -60.0) / 1e9)
    with clock.here(), process(folder, "policy", "benchmarks.live_simulation.server") as upstream:
        config, _ = live_folder(folder, upstream)
        engine, accounts = open_log(folder / "live", None), Accounts(folder / "live")
        key = create_key(engine, FIRM, "proxy", proxy=True)
        set_policy(engine, FIRM, LivePolicy(requests_per_minute=10**7))
        contents = LiveContents(engine, accounts, open_blobs(folder / "live"))
        with gateway_process(folder, config, folder / "clock") as url:
            rng = np.random.default_rng((seed, 5))
            population = draw_population(rng)
            users = _Clients(Server(url, "users", key), accounts.proxy_secret(digest_of(key)), population, clock)
            loop = _Loop(users, engine, contents, first_CVA, turns)
            asyncio.run(loop.run(rng, versions))
        engine.dispose()
    hidden_VA = utility(population)
    loop.done.learned.utility.extend(bandit.mean_of(theta, hidden_VA) for theta in loop.done.learned.logits)
    return loop.done


class _Loop:
    """Windows, one after the other. `done` grows."""

    def __init__(
        self, users: _Clients, engine: sa.Engine, contents: LiveContents, first_CVA: np.ndarray, turns: int
    ) -> None:
        self.done = ServedRun(LearningRun([first_CVA], []))
        self._users, self._engine, self._contents, self._count = users, engine, contents, turns
        self._served: list[Turns] = []

    async def run(self, rng: np.random.Generator, versions: int) -> None:
        logits, users = self.done.learned.logits, self._users
        for number in range(versions):
            turns = serve(rng, users.population, bandit.probabilities(logits[-1]), self._count)
            signals = react(rng, users.population, turns)
            await users.use(number, turns, signals)
            self._served.append(turns)
            await self._wait_for_log()
            logits.append(bandit.learn(logits[-1], joined(self._served), self._gains(number), RATE))

    def _gains(self, number: int) -> np.ndarray:
        """Weight times advantage of all turns so far, by the window that is cut now: float64 [N]."""
        config, users, done = LabelsConfig(), self._users, self.done
        result = cut_window(self._engine, self._contents, config)
        for exit_ in result.exits:
            if exit_.kind != ExitKind.TRAINED:
                name = f"{exit_.kind} {exit_.reason}"
                done.dropped[name] = done.dropped.get(name, 0) + 1
        batch = window_samples(self._engine, self._contents, config, result.number)
        gain_N = np.zeros(sum(len(turns.account_N) for turns in self._served))
        for sample in batch:
            at = users.turns[sample.turn]
            assert sample.ids == drawn(users.seeds[at]).ids, "what is learned from is what was answered"
            gain_N[at] = sample.weight * sample.advantage
        done.trained += len(batch)
        done.turns, done.signals = len(gain_N), users.told
        return gain_N

    async def _wait_for_log(self) -> None:
        """Until every turn with consent is in the log."""
        deadline, count = time.monotonic() + _SECONDS, 0
        while count < self._users.consented:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._users.consented - count} turns never came to the log")
            await asyncio.sleep(0.02)
            with self._engine.connect() as connection:
                count = connection.execute(sa.select(sa.func.count()).select_from(schema.turns)).scalar_one()


@dataclass
class _Chat:
    """A conversation: the name of its session, and its messages."""

    session: str
    messages: list[dict[str, Any]]


class _Clients:
    """The clients of all accounts, behind their firm's proxy. `turns`: number of each turn by its id; `seeds` by
    number."""

    def __init__(self, gateway: Server, secret: str, population: SimulatedAccounts, clock: SetClock) -> None:
        self.population = population
        self.turns: dict[str, int] = {}
        self.seeds: list[int] = []
        self.consented = 0
        self.told = 0
        self._gateway, self._secret, self._clock = gateway, secret, clock
        self._late: list[tuple[int, dict[str, Any]]] = []  # signals that arrive after their window, by time

    async def use(self, number: int, turns: Turns, signals: Signals) -> None:
        """The requests of a window and what becomes of them, until its cut."""
        first, count = len(self.seeds), len(turns.account_N)
        ids_N, subjects_N = [""] * count, [""] * count
        outcome_N, after = outcomes(turns), _continued(turns, signals)
        chats: dict[int, _Chat] = {}
        continued = {before for before, _, _ in after.values()}
        self.seeds += [
            seed_of(a, c % len(ASKED)) for a, c in zip(turns.action_N.tolist(), turns.cell_N.tolist(), strict=True)
        ]

        async def ask(n: int) -> None:
            account, before = int(turns.account_N[n]), after.get(n)
            case = f"{_MODULES[turns.cell_N[n]]}.py, case {first + n}"
            if before is None:
                chat = _Chat(f"{number} {n}", [{"role": "user", "content": _asked(int(turns.cell_N[n]), case)}])
            else:
                chat = _next(chats.pop(before[0]), before[1], before[2], _asked(int(turns.cell_N[n]), case), case)
            body = {"model": "policy", "messages": chat.messages, "seed": self.seeds[first + n]}
            ids_N[n], message = await self._ask(account, chat.session, body)
            self.turns[ids_N[n]] = first + n
            if n in continued:
                chats[n] = _Chat(chat.session, [*chat.messages, message, *_results(message)])
            granted = bool(self.population.consent_A[account])
            self.consented += granted
            subjects_N[n] = ids_N[n]
            if outcome_N[n] == EDIT:
                subjects_N[n] = await self._show(ids_N[n], self.seeds[first + n], granted)
            elif n in continued:  # the answer to this turn is read after it is recorded
                await self._tell([{"response_id": ids_N[n], "name": "shown", "event_id": ulid()}])

        posted = _posted(turns, signals, outcome_N)
        begun, step = number * PERIOD, COLLECT * _AT_ONCE / count
        waiting, n, s = sorted(self._late, key=lambda late: late[0]), 0, 0
        order = np.argsort(turns.at_N, kind="stable")
        self._late = []
        for until in np.arange(step, COLLECT + 2 * HORIZON + step, step):
            self._clock.set(nanoseconds(number, float(until)) / 1e9)
            chains: dict[int, list[int]] = defaultdict(list)
            while n < count and turns.at_N[order[n]] <= until:
                chains[int(turns.session_N[order[n]])].append(int(order[n]))
                n += 1
            await asyncio.gather(*(_one_by_one(ask, chain) for chain in chains.values()))
            events: list[dict[str, Any]] = []
            while s < len(posted) and posted[s].arrives <= until:
                events.append(posted[s].event(number, ids_N, subjects_N))
                s += 1
            while waiting and waiting[0][0] <= nanoseconds(0, begun + float(until)):
                events.append(waiting.pop(0)[1])
            await self._tell(events)
        self._late = waiting + [
            (nanoseconds(number, each.arrives), each.event(number, ids_N, subjects_N)) for each in posted[s:]
        ]

    async def _ask(self, account: int, session: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The id and message of an answer."""
        name = f"user-{account}"
        head = {
            "user": name,
            "user-signature": signature_of(self._secret, name),
            "session": f"{name} {session}",
            "organisation": f"o{self.population.organisation_A[account]}",
        }
        head |= {"consent": "train"} if self.population.consent_A[account] else {}
        headers = [(f"x-etude-{k}".encode(), v.encode()) for k, v in head.items()]
        turn, answer = await self._post("/v1/chat/completions", body, headers)
        return turn, answer["choices"][0]["message"]

    async def _show(self, turn: str, seed: int, granted: bool) -> str:
        """The subject of the signals on an edit: its id, or without consent the turn's."""
        action, number = divmod(seed, len(ASKED))
        edit = {
            "id": ulid(),
            "path": "src/arrays.py",
            "base": "b0",
            "old_lines": [1, 4],
            "new": "n0",
            "characters": read_answer(ACTIONS[action], number).characters,
        }
        _, answer = await self._post("/v1/suggestions", {"turn": turn, "suggestions": [edit]})
        assert answer["results"][0]["status"] == ("recorded" if granted else "unrecorded"), answer
        return edit["id"] if granted else turn

    async def _tell(self, events: list[dict[str, Any]]) -> None:
        for low in range(0, len(events), _EVENTS):
            page = events[low : low + _EVENTS]
            _, answer = await self._post("/v1/feedback", page)
            wrong = [result for result in answer["results"] if result["status"] != "recorded"]
            assert not wrong, wrong
            self.told += len(page)

    async def _post(self, path: str, body: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> tuple[str, Any]:
        """The turn's id and the body of an answer, which must be 200."""
        sent = [(b"content-type", b"application/json"), *headers]
        answer = await self._gateway.ask("POST", path, sent, msgspec.json.encode(body), _SECONDS)
        try:
            whole = b"".join([part async for part in answer.parts()])
        finally:
            answer.close()
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered {answer.status}: {whole[:300]!r}")
        return answer.header(b"x-etude-generation") or "", msgspec.json.decode(whole)


async def _one_by_one(work: Any, numbers: Sequence[int]) -> None:
    for number in numbers:
        await work(number)


def joined(all_turns: Sequence[Turns]) -> Turns:
    """The turns of several windows, one after the other."""
    return Turns(**{n: np.concatenate([getattr(turns, n) for turns in all_turns]) for n in Turns.__dataclass_fields__})


# Words --------------------------------------------------------------------------------------------------------------


def _asked(cell: int, case: str) -> str:
    return f"{ASKED[cell % len(ASKED)].rstrip('?')}, and keep its callers in {case}"


@cache
def _unhappy(words: str) -> float:
    return dissatisfied(f"{words} Now see case 1.")


def _next(chat: _Chat, kind: SignalKind, unhappy: float, asked: str, case: str) -> _Chat:
    """The conversation after an answer: the question's answer, the request put in other words, or an opinion."""
    if kind is SignalKind.RETRY:
        kept = max(n for n, message in enumerate(chat.messages) if message["role"] == "user")
        return _Chat(chat.session, [*chat.messages[:kept], {"role": "user", "content": asked}])
    words = min(_SAYS, key=lambda says: abs(_unhappy(says) - unhappy))
    text = f"Yes, in {case}" if kind is SignalKind.ANSWERED else f"{words} Now see {case}."
    return _Chat(chat.session, [*chat.messages, {"role": "user", "content": text}])


def _results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": c["id"], "content": "done"} for c in message.get("tool_calls") or ()]


def _continued(turns: Turns, signals: Signals) -> dict[int, tuple[int, SignalKind, float]]:
    """The turns that go on a conversation: the turn before, how, and how unhappy its user is."""
    out: dict[int, tuple[int, SignalKind, float]] = {}
    for kind in _GOES_ON:
        mine = signals.where(signals.of(kind))
        for before, value in zip(mine.turn_S.tolist(), mine.value_S.tolist(), strict=True):
            out[int(turns.next_N[before])] = (before, kind, value)
    return out


@dataclass(frozen=True)
class _Posted:
    """A signal that a client sends on a turn, at `arrives` (seconds since the window opened)."""

    turn: int
    kind: SignalKind
    value: float
    horizon: float
    arrives: float
    order: int  # of the client's own
    name: int

    def event(self, window: int, ids_N: list[str], subjects_N: list[str]) -> dict[str, Any]:
        """The event, for `/v1/feedback`."""
        subject = (subjects_N if self.kind in OF_AN_EDIT else ids_N)[self.turn]
        body = {
            "response_id": subject,
            "name": self.kind.value,
            "value": self.value,
            "event_id": f"{window}-{self.name}",
        }
        horizon = {} if self.horizon != self.horizon else {"horizon": self.horizon}
        return body | horizon | {"client_sequence": self.order}


def _posted(turns: Turns, signals: Signals, outcome_N: np.ndarray) -> list[_Posted]:
    """What clients tell, in the order in which it arrives."""
    mine = signals.where(signals.of(*_POSTED))
    order_S = np.argsort(np.argsort(mine.seen_S, kind="stable"))
    arrives_S = mine.seen_S + mine.lag_S
    columns = (mine.turn_S, mine.kind_S, mine.value_S, mine.horizon_S, arrives_S, order_S, mine.event_S)
    rows = [
        _Posted(n, KINDS[kind], value, horizon, arrives, order, event)
        for n, kind, value, horizon, arrives, order, event in zip(*(c.tolist() for c in columns), strict=True)
    ]
    return sorted(rows, key=lambda each: (each.arrives, each.order))
