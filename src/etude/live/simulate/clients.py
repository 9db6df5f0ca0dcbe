"""Simulated users of a small model: their requests through the gateway, and their reactions to the answers.

    requests    functions of a library, each broken at one token, for the model to mend
    judged      the effect of an answer on a function: whether it can be applied, changes a condition, is right
    Users       accounts that send requests by OpenAI's client library, and signals on every edit to the gateway

An account keeps a change by the change alone (`worth`), never by the words of an answer: whether it follows the firm's
house rule (a condition is changed), and whether the function is right again, by the account's hidden weights.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blake3
import httpx2
import numpy as np

from etude import runfolder
from etude.code import OPERATORS, lines_of, mutants
from etude.code.functions import functions
from etude.errors import RunFailed, UserError
from etude.harness import EditError, view_of
from etude.live.log.records import ulid
from etude.live.log.users import signature_of
from etude.live.simulate.users import SimulatedAccounts, properties_of

CONDITION = r"\b(?:if|elif|while)\b"
"""The house rule: the lines that a change adds hold a condition."""
CALL, ARGUMENT = "<|call|>", "<|arg|>"
_BREAKS = ("negate_cond", "op_flip", "bool_flip")
_LINES, _PER_FUNCTION = 20, 4
_OTHERS = {"tests", "docs", "setup.py"}
_TRIES, _PAUSE_SECONDS = 20, 0.5  # of sending a signal
_SECONDS = 120.0  # of one request


@dataclass(frozen=True)
class FunctionRequest:
    """A request to mend a function. `source` is the broken function, `right` the function before."""

    function: str
    name: str
    path: str
    source: str
    right: str

    @property
    def prompt(self) -> str:
        """The text of the request."""
        return f"Fix `{self.name}` in {self.path}\n{self.source}"


def requests(library: Path, seed: int, heldout: float) -> tuple[list[FunctionRequest], list[FunctionRequest]]:
    """The requests of users and the held-out requests, of the share `heldout` of the functions, by seed. Raises
    UserError for a library without functions that can be broken."""
    operators = {name: OPERATORS[name] for name in _BREAKS}
    by_function: dict[str, list[FunctionRequest]] = {}
    sources = library / "src" if (library / "src").is_dir() else library
    for file in sorted(sources.rglob("*.py")):
        if _OTHERS & set(file.relative_to(library).parts):
            continue
        path, text = file.relative_to(library).as_posix(), file.read_text("utf-8")
        for function in functions(path, text):
            if not 1 <= function.body_lines <= _LINES:
                continue
            right = view_of(text, function.first_line, function.last_line).source
            for mutant in mutants(text, function, seed, operators)[:_PER_FUNCTION]:
                source = view_of(mutant.text, mutant.first_line, mutant.last_line).source
                name = function.qualname.rpartition(".")[2]
                if source != right and re.search(CONDITION, source):
                    made = FunctionRequest(function.id, name, path, source, right)
                    by_function.setdefault(function.id, []).append(made)
    if len(by_function) < 2:
        raise UserError(f"{library} holds no functions that can be broken")
    names = np.random.default_rng((seed, 1)).permutation(sorted(by_function)).tolist()
    kept = round(len(names) * heldout)
    return (
        [made for name in names[kept:] for made in by_function[name]],
        [made for name in names[:kept] for made in by_function[name]],
    )


def answered(request: FunctionRequest) -> dict[str, Any]:
    """A request with the right answer as a chat, to train on: one call of the tool `edit`, whose lines are in the
    function once."""
    before, after = lines_of(request.source), lines_of(request.right)
    matches = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    same = matches[0].size if matches[0].a == matches[0].b == 0 else 0
    end = matches[-2].size if len(matches) > 1 and matches[-2].a + matches[-2].size == len(before) else 0
    end = min(end, len(before) - same, len(after) - same)
    while request.source.count(old := "\n".join(before[same : len(before) - end])) != 1 or not old:
        same, end = (same - 1, end) if same else (same, end - 1)
    arguments = {"old": old, "new": "\n".join(after[same : len(after) - end])}
    call = {"name": "edit", "arguments": json.dumps(arguments)}
    return {
        "messages": [
            {"role": "user", "content": request.prompt},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
            },
        ]
    }


@dataclass(frozen=True)
class Judgement:
    """The effect of an answer. `source` is the function after its edit; None without an edit that can be applied."""

    source: str | None
    house: bool  # whether the change follows the house rule
    right: bool


def judged(request: FunctionRequest, calls: Sequence[Any]) -> Judgement:
    """The effect of the first edit among the tool calls of an answer. A function that does not parse is neither by the
    rule nor right."""
    none = Judgement(None, False, False)
    for call in calls:
        if call.function.name != "edit":
            continue
        try:
            words = json.loads(call.function.arguments)
            after = view_of(request.source, 1, request.source.count("\n") + 1).edit(words["old"], words["new"]).source
        except (EditError, KeyError, TypeError, AttributeError, ValueError):
            return none
        try:
            ast.parse(after)
        except (SyntaxError, ValueError):
            return Judgement(after, False, False)
        has_Q = properties_of(request.source, after, house=CONDITION, generic=r"(?!)", lines=2)
        return Judgement(after, bool(has_Q[0]), after == request.right)
    return none


def calls_of(message: Any) -> Sequence[Any]:
    """The tool calls of an answer, also of one whose server left them in the text, in the dialect of the nano model."""
    if message.tool_calls or CALL not in (message.content or ""):
        return message.tool_calls or ()
    calls: list[Any] = []
    for part in message.content.split(CALL)[1:]:
        name, *values = part.split(ARGUMENT)
        words = json.dumps(dict(zip(("old", "new"), values, strict=False)))
        calls.append(SimpleNamespace(function=SimpleNamespace(name=name, arguments=words)))
    return calls


def worth(judgement: Judgement, house: float) -> float:
    """The hidden utility of a change, in [0, 1], for an account with the weight `house` of the house rule: the
    probability that the change is kept."""
    return house * judgement.house + (1.0 - house) * judgement.right


@dataclass(frozen=True)
class UsedTurn:
    """One answer that a user got. `turn` is the gateway's id, "" without an answer, for the reason `error`."""

    account: int
    turn: str
    utility: float
    error: str = ""
    retries: int = 0  # of OpenAI's client


@dataclass(frozen=True)
class UserModel:
    """The model of requests, by its name there. `tokens`: most of an answer; `at_once`: requests of all users."""

    name: str
    tokens: int
    at_once: int


@dataclass(frozen=True)
class UserPace:
    """The servers' clock passes `speed` times as fast as this one's. `pause`: seconds between two requests; `retries`:
    of OpenAI's client."""

    speed: float = 1.0
    pause: float = 0.0
    retries: int = 0


async def answers(url: str, model: UserModel, wanted: Sequence[FunctionRequest], seed: int) -> list[Judgement]:
    """One answer to each request, with a seed by its number. Raises RunFailed if a request fails."""
    import openai

    slots = asyncio.Semaphore(model.at_once)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3, timeout=_SECONDS) as client:

        async def one(number: int, request: FunctionRequest) -> Judgement:
            messages: Any = [{"role": "user", "content": request.prompt}]
            async with slots:
                completion = await client.chat.completions.create(
                    model=model.name, messages=messages, max_tokens=model.tokens, seed=1000 * seed + number
                )
            return judged(request, completion.choices[0].message.tool_calls or ())

        try:
            return list(await asyncio.gather(*(one(n, request) for n, request in enumerate(wanted))))
        except openai.OpenAIError as e:
            raise RunFailed(f"an answer of {url} failed: {e}") from None


class Users:
    """Accounts that use a gateway from `begin` to `end`, on a separate thread. Their firm's proxy has the `key`, and
    signs their names with its `secret`. Each turn is a line of the file `kept`, whose lines are the first turns: who
    asks what next follows from the seed and their number."""

    def __init__(
        self,
        url: str,
        key: str,
        secret: str,
        model: UserModel,
        population: SimulatedAccounts,
        wanted: Sequence[FunctionRequest],
        window_seconds: float,
        seed: int,
        kept: Path,
        pace: UserPace = UserPace(),
    ) -> None:
        rows = runfolder.read_jsonl(kept, ("account", "utility"), ("turn", "error"))
        self.turns = [UsedTurn(**row) for row in rows]
        self.acknowledged: list[str] = []  # ids of signals that the gateway took
        self.lost = 0  # signals that the gateway never took
        self._url, self._key, self._population, self._requests = url, key, population, wanted
        self._secret, self._model, self._window, self._seed, self._kept = secret, model, window_seconds, seed, kept
        self._pace = pace
        self._rng = np.random.default_rng((seed, 5))
        self._house_A = self._rng.beta(6, 4, population.size)  # hidden weights of the house rule
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._numbers: dict[int, int] = {}  # signals of each account's client

    def begin(self) -> None:
        """Starts the users."""
        self._rng = np.random.default_rng((self._seed, 6, len(self.turns)))
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stops the users, after the signals on their last edits. Raises the error of a failed user."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join(_SECONDS + 60)
        if self._thread.is_alive():
            raise RunFailed("users still wait for the gateway")
        if self._failed is not None:
            raise self._failed

    def use(self, count: int, seconds: float = 3600.0) -> None:
        """Runs the users for `count` turns. Raises RunFailed if that takes longer than `seconds`."""
        wanted, deadline = len(self.turns) + count, time.monotonic() + seconds
        self.begin()
        while len(self.turns) < wanted and self._failed is None and time.monotonic() < deadline:
            time.sleep(0.1)
        self.end()
        if len(self.turns) < wanted:
            raise RunFailed(f"the users had not enough answers within {seconds:.0f} seconds")

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except Exception as e:
            self._failed = e

    async def _live(self) -> None:
        import openai

        limits = httpx2.Limits(max_connections=64)
        headers = {"authorization": f"Bearer {self._key}"}
        async with (
            openai.AsyncOpenAI(
                base_url=f"{self._url}/v1", api_key=self._key, max_retries=self._pace.retries, timeout=_SECONDS
            ) as client,
            httpx2.AsyncClient(base_url=self._url, timeout=30.0, limits=limits, headers=headers) as http,
        ):
            signals: set[asyncio.Task[None]] = set()

            async def ask() -> None:
                while not self._stop.is_set():
                    telling = await self._ask(client, http)
                    if telling is not None:
                        signals.add(task := asyncio.ensure_future(telling))
                        task.add_done_callback(signals.discard)
                    await asyncio.sleep(self._pace.pause)

            await asyncio.gather(*(ask() for _ in range(self._model.at_once)))
            await asyncio.gather(*signals)

    async def _ask(self, client: Any, http: httpx2.AsyncClient) -> Any:
        """One turn; returns the coroutine that sends its signals, None without an answer."""
        import openai

        population, model = self._population, self._model
        account = int(self._rng.choice(population.size, p=population.activity_A))
        request = self._requests[int(self._rng.integers(len(self._requests)))]
        name = f"user-{account}"
        headers = {"x-etude-user": name, "x-etude-session": ulid()}
        headers["x-etude-user-signature"] = signature_of(self._secret, name)
        if population.consent_A[account]:
            headers["x-etude-consent"] = "train"
        messages: Any = [{"role": "user", "content": request.prompt}]
        try:
            raw = await client.chat.completions.with_raw_response.create(
                model=model.name, messages=messages, max_tokens=model.tokens, extra_headers=headers
            )
        except openai.OpenAIError as e:
            self._keep(UsedTurn(account, "", 0.0, f"{type(e).__name__}: {e}"[:200]))
            await asyncio.sleep(_PAUSE_SECONDS)
            return None
        judgement = judged(request, calls_of(raw.parse().choices[0].message))
        utility = worth(judgement, float(self._house_A[account]))
        turn = raw.headers["x-etude-generation"]
        self._keep(UsedTurn(account, turn, utility, retries=raw.retries_taken))
        return self._tell(http, account, turn, request, judgement, utility)

    def _keep(self, turn: UsedTurn) -> None:
        runfolder.append_json(self._kept, asdict(turn))
        self.turns.append(turn)

    async def _tell(
        self,
        http: httpx2.AsyncClient,
        account: int,
        turn: str,
        request: FunctionRequest,
        judgement: Judgement,
        utility: float,
    ) -> None:
        """Sends the signals of an edit, at their times. A client that is gone sends no further signals."""
        population, rng = self._population, self._rng
        if judgement.source is None:
            await self._signal(http, account, turn, "invalid_call")
            return
        kept, gone = rng.random() < utility, rng.random() < population.drop_A[account] / 2
        seconds = self._window / self._pace.speed
        after, noticed = float(rng.uniform(0.2, 0.9)) * seconds, rng.random() < population.skill_A[account]
        edit = ulid()
        digests = [blake3.blake3(text.encode()).hexdigest()[:32] for text in (request.source, judgement.source)]
        lines = request.source.count("\n") + 1
        suggestion = {
            "id": edit,
            "path": request.path,
            "base": digests[0],
            "old_lines": [1, lines],
            "new": digests[1],
            "characters": 40,
        }
        status = await self._post(http, "/v1/suggestions", {"turn": turn, "suggestions": [suggestion]})
        subject = edit if status == "recorded" else turn
        if not kept and noticed:
            await self._signal(http, account, subject, "rejected")
            return
        await self._signal(http, account, subject, "applied")
        await asyncio.sleep(after)
        if gone:
            await self._signal(http, account, subject, "gone")
        elif not kept:
            await self._signal(http, account, subject, "undone")
        else:
            await asyncio.sleep(seconds - after + 0.05)
            await self._signal(http, account, subject, "survived", horizon=self._window)

    async def _signal(self, http: httpx2.AsyncClient, account: int, subject: str, name: str, **more: Any) -> None:
        number = self._numbers[account] = self._numbers.get(account, 0) + 1
        event = {
            "response_id": subject,
            "name": name,
            "value": 1.0,
            "source": "client",
            "event_id": ulid(),
            "client_sequence": number,
            **more,
        }
        if await self._post(http, "/v1/feedback", event) in ("recorded", "duplicate"):
            self.acknowledged.append(str(event["event_id"]))
        else:
            self.lost += 1

    async def _post(self, http: httpx2.AsyncClient, path: str, body: Any) -> str:
        """The status of the only result; "" if the gateway takes the body at no try."""
        for _ in range(_TRIES):
            try:
                answer = await http.post(path, json=body)
            except httpx2.HTTPError:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if answer.status_code in (200, 404):
                status = str(answer.json()["results"][0]["status"])
                if status != "unknown":
                    return status
            elif answer.status_code != 503:
                return ""
            await asyncio.sleep(_PAUSE_SECONDS)
        return ""


def mean_utility(turns: Sequence[UsedTurn]) -> float | None:
    """Mean hidden utility of the answers; None without any."""
    utilities = [turn.utility for turn in turns if turn.turn]
    return float(np.mean(utilities)) if utilities else None
