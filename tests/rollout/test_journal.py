"""The journal of an episode: cut anywhere, an episode goes on in a new box and ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etude.grading.runner import open_sandbox
from etude.harness.loop import EngineModel, Sampling, turn_seed
from etude.protocol.wire import GenerateRequest
from etude.records import Budget, Episode, Generation, Outcome, Routes, joined
from etude.renderers import Renderer, renderer_for
from etude.rollout import journal as journals
from etude.rollout.environments.code import dataset_part
from etude.rollout.environments.taskset import Taskset
from etude.rollout.episode import EpisodeId, RolloutContext, run_episode
from etude.rollout.journal import (
    CommandResult,
    EpisodeJournal,
    JournalUnfit,
    Piece,
    TurnEnd,
    TurnPart,
    command_digest,
    open_journal,
    request_digest,
    rest_of,
    sweep_journals,
)
from etude.rollout.journal_seams import JournalPolicy
from etude.sandbox.shell import Shell
from etude.store import Store, open_store
from etude.tasks.dataset import Dataset
from tests.helpers.speakers import PATH, Speaker, a_task

SEED = 5
BUDGET = Budget(turns=20, tokens=4000, context=8000, seconds=60.0)
PART = 25  # tokens


class Slow:
    """A policy that says the turns of a script in parts, with log-probabilities and experts that follow from the
    position. `sampled` counts its tokens."""

    def __init__(self, turns: list[list[int]], seconds: float = 0.0) -> None:
        self.turns = {turn_seed(SEED, n): (n, said) for n, said in enumerate(turns)}
        self.seconds, self.sampled = seconds, 0

    async def generate(
        self,
        request: GenerateRequest,
        timeout: float,
        on_part: Callable[[Generation], None] | None = None,
        begun: Generation | None = None,
    ) -> Generation:
        number, answer = self.turns[request.seed]
        known = begun
        while known is None or len(known.ids) < len(answer):
            start = 0 if known is None else len(known.ids)
            await asyncio.sleep(self.seconds)
            ids = answer[start : start + PART]
            self.sampled += len(ids)
            first = (request.routes_from or 0) if known is None or known.routes is None else known.routes.end
            end = len(request.ids) + start + len(ids) - 1
            part = Generation(
                ids=ids,
                logprobs=[-0.001 * (start + i) for i in range(len(ids))],
                versions=[number] * len(ids),
                finish_reason="stop",
                routes=Routes(first=first, ids=bytes(i % 7 for i in range(2 * (end - first))), layers=1, slots=2),
                kv_version=number,
            )
            known = part if known is None else joined([known, part])
            if on_part is not None and len(known.ids) < len(answer):
                on_part(part)
        return known


def script(speaker: Speaker) -> list[list[int]]:
    def run(command: str) -> tuple[str, dict[str, object]]:
        return "run", {"command": command}

    def edit(new: str) -> tuple[str, dict[str, object]]:
        return "edit", {"path": PATH, "old": "- 3", "new": new}

    calls: list[list[tuple[str, dict[str, object]]]] = [
        [edit("+ 3"), ("test", {})],
        [run("cd src; echo 'y = 1' > new.py; echo hi > /tmp/x; ln -s new.py link; export Z=5"), ("list", {})],
        [run("pwd; cat /tmp/x; chmod +x new.py; rm -f other.py"), ("undo", {}), edit("* 3")],
        [run("echo $Z; ls; ls /tmp; echo 'z = 2' >> new.py; mkdir empty"), ("test", {})],
        [run("cat new.py; stat -c '%a %F' * | sort")],
        [("finish", {})],
    ]
    return [speaker.turn(*turn) for turn in calls]


class CutStore:
    """A store of a process that dies right after its put number `puts`: `die` is called, and later puts never come."""

    def __init__(self, store: Store, puts: float) -> None:
        self.store, self.puts = store, puts
        self.die: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put(self, key: str, data: bytes) -> None:
        if self.puts > 0:
            self.store.put(key, data)
            self.puts -= 1
            if self.puts == 0:
                self.die()


class Played:
    """Attempts at one episode, and what they ran and sampled."""

    def __init__(self, dataset: Dataset, renderer: Renderer, turns: list[list[int]], store: Store, sandbox: Any):
        self.dataset, self.renderer, self.turns, self.store, self.sandbox = dataset, renderer, turns, store, sandbox
        self.lines: list[str] = []  # that ended in a box
        self.sampled = 0
        self.recovered: dict[str, int] = {}

    async def attempt(self, number: int, puts: float) -> Episode | None:
        """One attempt; None if it dies after so many pieces."""
        store: Any = CutStore(self.store, puts)
        policy = Slow(self.turns)
        journal = await open_journal(store, 3, 1, number)
        model = EngineModel(policy, self.renderer, Sampling(routes=True))
        context = RolloutContext(Taskset((dataset_part(self.dataset),)), self.sandbox, model, BUDGET)
        task = asyncio.ensure_future(run_episode(context, a_task(), EpisodeId(3, 1, number, SEED), None, journal))
        loop = asyncio.get_running_loop()
        store.die = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None
        finally:
            self.sampled += policy.sampled
            self.recovered = journal.recovered
            journal._stopped = True  # a dead process writes nothing


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the agent that ended in boxes."""
    lines: list[str] = []
    real = Shell.exec

    async def execute(self: Shell, line: str, timeout: float) -> Any:
        result = await real(self, line, timeout)
        if "state of the shell" not in line and not line.startswith(("cd -- ", "\n")):
            lines.append(line)
        return result

    monkeypatch.setattr(Shell, "exec", execute)
    monkeypatch.setattr(journals, "INTERVAL", 0.0)
    return lines


def pieces(store: Store) -> list[Piece]:
    return [msgspec.msgpack.decode(store.get(key)[journals.DIGEST :], type=Piece) for key in store.list("journal")]


def recorded(store: Store) -> set[bytes]:
    return {e.request for piece in pieces(store) for e in piece.entries if isinstance(e, CommandResult)}


def timeless(episode: Episode) -> Episode:
    turns = tuple(msgspec.structs.replace(turn, seconds_model=0.0, seconds_tools=0.0) for turn in episode.turns)
    metrics = {name: value for name, value in episode.metrics.items() if not name.startswith("seconds")}
    return msgspec.structs.replace(episode, id="", attempt=0, turns=turns, metrics=metrics)


def test_an_episode_that_is_cut_at_every_seam_ends_as_an_undisturbed_one(
    dataset: Dataset, hermes: Renderer, hermes_folder: Path, tmp_path: Path, counted: list[str]
) -> None:
    """Every attempt dies after one more piece. In the end each recorded command ran exactly once."""
    turns = script(Speaker(hermes_folder))

    async def both() -> tuple[Episode, Episode, Played, int]:
        async with open_sandbox(workers=1, repeatable=True) as sandbox:
            whole = Played(dataset, hermes, turns, open_store(str(tmp_path / "whole")), sandbox)
            undisturbed = await whole.attempt(0, float("inf"))
            assert undisturbed is not None
            once = list(counted)
            counted.clear()
            cut = Played(dataset, hermes, turns, open_store(str(tmp_path / "cut")), sandbox)
            for number in range(100):
                done = recorded(cut.store)
                before = len(counted)
                if (episode := await cut.attempt(number, 1)) is not None:
                    break
                again = {command_digest("exec", line) for line in counted[before:]} & done
                assert not again, "a recorded command ran again"
            else:
                raise AssertionError("it never ends")
            assert sorted(set(counted)) == sorted(once)
            return undisturbed, episode, cut, number

    undisturbed, episode, cut, attempts = asyncio.run(both())
    assert undisturbed.outcome is Outcome.SCORED
    assert undisturbed.passed
    assert undisturbed.turns[4].results[0].startswith("exit code 0\ny = 1\nz = 2\n"), undisturbed.turns[4].results
    assert episode.segments == undisturbed.segments
    assert timeless(episode) == timeless(undisturbed)
    assert attempts > 10, "too few seams"
    assert cut.recovered["continued"] == 1
    assert cut.recovered["recovered_commands"] == 6


def test_a_player_that_is_killed(dataset: Dataset, hermes_folder: Path, tmp_path: Path, counted: list[str]) -> None:
    """A real process and `kill -9`, between two commands."""
    hermes = renderer_for(hermes_folder)  # as it is now: other tests write into the folder
    turns = script(Speaker(hermes_folder))
    store = open_store(str(tmp_path / "store"))
    program = tmp_path / "player.py"
    program.write_text(f"""
import asyncio, pathlib
from etude.grading.runner import open_sandbox
from etude.renderers import renderer_for
from etude.store import open_store
from etude.tasks.dataset import DATASET_FORMAT, Dataset, Manifest
from tests.helpers.speakers import Speaker, a_task
from tests.rollout import test_journal as t
root, folder = pathlib.Path({str(dataset.root)!r}), pathlib.Path({str(hermes_folder)!r})
manifest = Manifest(format=DATASET_FORMAT, name="shop-1.0", licence="MIT", licence_source="pyproject.toml", seed=0,
    python_path=("src",), source_roots=("src",), visible="doctests", options={{}}, counts={{}}, digests={{}})
dataset = Dataset(root, "shop-1.0", root / "repository", root / "site", root / "hidden", (a_task(),), manifest)
async def main():
    async with open_sandbox(workers=1, repeatable=True) as sandbox:
        policy = t.Slow(t.script(Speaker(folder)), seconds=0.05)
        journal = await t.open_journal(open_store({str(tmp_path / "store")!r}), 3, 1, 0)
        model = t.EngineModel(policy, renderer_for(folder), t.Sampling(routes=True))
        context = t.RolloutContext(t.Taskset((t.dataset_part(dataset),)), sandbox, model, t.BUDGET)
        await t.run_episode(context, a_task(), t.EpisodeId(3, 1, 0, t.SEED), None, journal)
asyncio.run(main())
""")
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    player = subprocess.Popen([sys.executable, str(program)], env=env, cwd=root)
    deadline = time.monotonic() + 60
    while len(recorded(store)) < 3:
        assert time.monotonic() < deadline
        assert player.poll() is None
        time.sleep(0.01)
    os.kill(player.pid, signal.SIGKILL)
    player.wait()
    known = recorded(store)
    kept = sum(len(e.generation.ids) for p in pieces(store) for e in p.entries if not isinstance(e, CommandResult))

    async def rest() -> tuple[Episode, Played]:
        async with open_sandbox(workers=1, repeatable=True) as sandbox:
            played = Played(dataset, hermes, turns, store, sandbox)
            episode = await played.attempt(1, float("inf"))
            assert episode is not None
            return episode, played

    episode, played = asyncio.run(rest())
    assert episode.passed
    assert not {command_digest("exec", line) for line in counted} & known
    assert played.sampled == sum(map(len, turns)) - kept, "recorded tokens are not sampled again"
    assert played.recovered["recovered_tokens"] == kept


def test_a_journal_gives_the_agent_nothing(
    dataset: Dataset, hermes: Renderer, hermes_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what the agent did and saw: no hidden test, no answer, no token of the engines. The box has no way to
    it, while it is written and after it was recovered."""
    monkeypatch.setenv("ETUDE_API_KEY", "token-of-the-engines")
    monkeypatch.setattr(journals, "INTERVAL", 0.0)
    speaker, store = Speaker(hermes_folder), open_store(str(tmp_path / "store"))
    look = f"cat {tmp_path}/store/journal/*/*/*; find / -name '*.msgpack' -o -name '00000003'; env; echo $((3*37))-seen"
    search = "grep -rlsa -e '111-seen' --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev / ; echo end"
    calls = [("run", {"command": look}), ("test", {}), ("run", {"command": search}), ("finish", {})]
    turns = [speaker.turn(call) for call in calls]

    async def both() -> Episode:
        async with open_sandbox(workers=1, repeatable=True) as sandbox:
            played = Played(dataset, hermes, turns, store, sandbox)
            assert await played.attempt(0, 4) is None
            assert len(recorded(store)) >= 1
            episode = await played.attempt(1, float("inf"))
            assert episode is not None
            return episode

    episode = asyncio.run(both())
    assert not episode.passed
    saw, _, found, _ = ("\n".join(turn.results) for turn in episode.turns)
    assert "111-seen" in saw
    assert found.splitlines()[1:] == ["end"], "the box has a trace of the journal"
    assert "No such file" in saw
    assert "msgpack" not in saw
    data = b"".join(store.get(key) for key in store.list("journal"))
    assert b"111-seen" in data
    hidden = [path.read_bytes() for path in (dataset.root / "hidden").rglob("*.py")]
    lines = {line.strip() for text in hidden for line in text.splitlines() if len(line.strip()) > 12}
    assert lines
    assert not [line for line in lines if line in data]
    for secret in ("token-of-the-engines", "test_price", "* 3"):
        assert secret.encode() not in data
        assert secret not in saw + found


# Parts ----------------------------------------------------------------------------------------------------------------


def generation(ids: list[int], version: int = 0) -> Generation:
    return Generation(ids=ids, logprobs=[-0.5] * len(ids), versions=[version] * len(ids), finish_reason="stop")


def a_request(*ids: int) -> GenerateRequest:
    return GenerateRequest(ids=list(ids), max_tokens=9)


class Turns:
    """A policy with one answer, that sends some parts before."""

    def __init__(self, answer: Generation, *parts: Generation, fails: bool = False) -> None:
        self.answer, self.parts, self.fails = answer, parts, fails
        self.begun: list[Generation | None] = []

    async def generate(self, request: Any, timeout: float, on_part: Any = None, begun: Any = None) -> Generation:
        self.begun.append(begun)
        for part in self.parts:
            on_part(part)
        if self.fails:
            raise OSError("killed")
        return self.answer


def played(store: Any, attempt: int, policy: Any, *requests: GenerateRequest, keep: bool = True) -> EpisodeJournal:
    """One attempt of these requests; raises what they raise once it has recorded all."""

    async def play() -> EpisodeJournal:
        journal = await open_journal(store, 1, 2, attempt)
        try:
            for request in requests:
                await JournalPolicy(journal, policy).generate(request, 5.0)
            return journal
        finally:
            await journal.close(keep)

    return asyncio.run(play())


def test_a_turn_in_flight_goes_on_from_its_tokens(tmp_path: Path) -> None:
    store, whole = open_store(str(tmp_path)), generation([1, 2, 3, 4, 5])
    with pytest.raises(OSError, match="killed"):
        played(store, 0, Turns(whole, generation([1, 2]), generation([3]), fails=True), a_request(7))
    policy = Turns(whole, generation([4]))
    journal = played(store, 1, policy, a_request(7), a_request(8))
    assert policy.begun == [generation([1, 2, 3]), None]
    assert journal.recovered["recovered_tokens"] == 3
    again = Turns(whole)
    assert played(store, 2, again, a_request(7)).recovered["recovered_tokens"] == 5
    assert again.begun == []


def test_another_prompt_or_another_order_begins_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = open_store(str(tmp_path))
    played(store, 0, Turns(generation([1, 2])), a_request(7), a_request(8))
    for wrong in (a_request(6), a_request(8), msgspec.structs.replace(a_request(7), seed=3)):
        with pytest.raises(JournalUnfit, match="another way"):
            played(store, 1, Turns(generation([1, 2])), wrong, keep=False)
    assert request_digest(a_request(7)) == request_digest(msgspec.structs.replace(a_request(7), session="x"))

    async def anew() -> EpisodeJournal:
        journal = await open_journal(store, 1, 2, 1)
        with pytest.raises(JournalUnfit):
            journal.take(TurnEnd, b"")
        await journal.begin_anew()
        assert journal.take(TurnEnd, b"") is None
        return journal

    assert asyncio.run(anew()).recovered == {"begun_anew": 1, "dropped_tokens": 4}
    assert store.list("journal") == []
    assert "member 2 of group 1 begins anew, 4 tokens are sampled again" in capfd.readouterr().err


def test_pieces_that_a_dead_player_still_writes_change_nothing(tmp_path: Path) -> None:
    """An attempt names how many pieces it goes on from; what comes later there is not read."""
    store, first = open_store(str(tmp_path)), Turns(generation([1]))
    played(store, 0, first, a_request(7))
    played(store, 1, Turns(generation([2])), a_request(7), a_request(8))

    async def zombie() -> None:
        journal = EpisodeJournal(store, 1, 2, 0)
        journal._last = pieces(store)[0].entries
        journal.add(TurnEnd(request=request_digest(a_request(9)), after=0, generation=generation([9]), at=0.0))
        await journal.flush()

    asyncio.run(zombie())
    assert [len(piece.entries) for piece in pieces(store)] == [2, 1]
    third = Turns(generation([3]))
    journal = played(store, 2, third, a_request(7), a_request(8), a_request(10))
    assert len(third.begun) == 1, "only the new turn is sampled"
    assert journal.recovered["recovered_tokens"] == 2


@pytest.mark.parametrize("damage", ["flip", "piece", "chain"])
def test_a_damaged_journal_is_forgotten(tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]) -> None:
    store, policy = open_store(str(tmp_path)), Turns(generation([1]))
    played(store, 0, policy, a_request(7))
    played(store, 1, policy, a_request(7), a_request(8))
    keys = store.list("journal")
    if damage == "flip":
        data = bytearray(store.get(keys[1]))
        data[-1] ^= 1
        store.put(keys[1], bytes(data))
    elif damage == "piece":
        store.delete(keys[0])
    else:
        store.put(keys[0], b"")
    last = Turns(generation([1]))
    journal = played(store, 2, last, a_request(7), keep=False)
    assert len(last.begun) == 1
    assert journal.recovered["begun_anew"] == 1
    assert "begins anew" in capfd.readouterr().err
    assert store.list("journal") == []


def test_pieces_are_few_and_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "INTERVAL", 0.2)
    monkeypatch.setattr(journals, "PIECE_BYTES", 4000)
    store, puts = open_store(str(tmp_path)), list[str]()
    real = store.put
    monkeypatch.setattr(store, "put", lambda key, data: (puts.append(key), real(key, data)))

    async def play() -> None:
        journal = await open_journal(store, 1, 2, 0)
        for number in range(60):
            entry = TurnPart(request=b"", after=number, generation=generation([number]), at=0.0)
            journal.add(entry)
            await asyncio.sleep(0.01)
        await journal.close(keep=True)

    asyncio.run(play())
    written = pieces(store)
    assert 3 <= len(puts) <= 10, "about five a second here"
    assert len(written) < len(puts), "the last one is written again until it is long"
    assert [e.generation.ids[0] for p in written for e in p.entries if isinstance(e, TurnPart)] == [*range(60)]


def test_a_journal_that_grows_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journals, "MAX_BYTES", 2000)
    monkeypatch.setattr(journals, "PIECE_BYTES", 500)
    store = open_store(str(tmp_path))
    played(store, 0, Turns(generation([1] * 40)), *(a_request(n) for n in range(20)))
    assert "member 2 of group 1 is no longer recorded: it is longer than 0 MB" in capfd.readouterr().err


def test_journals_of_finished_episodes_are_swept(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    played(store, 0, Turns(generation([1])), a_request(7))
    store.put("00000001/0002-0.msgpack", b"an episode")
    sweep_journals(store, {(1, 2)})
    assert len(store.list()) == 2
    sweep_journals(store, {(1, 1)})
    assert store.list() == ["00000001/0002-0.msgpack"]


def test_the_rest_of_a_turn_joins_its_beginning() -> None:
    def turn(first: int, last: int, end: int, ids: list[int]) -> Generation:
        routes = Routes(first=first, ids=bytes(range(3 * first, 3 * last)), layers=3, slots=1)
        return msgspec.structs.replace(generation(ids), routes=routes, kv_version=end)

    begun, whole = turn(2, 6, 0, [1, 2]), turn(2, 9, 0, [1, 2, 3, 4, 5])
    rest = rest_of(whole, begun)
    assert rest.routes is not None
    assert (rest.ids, rest.routes.first, rest.routes.end) == ([3, 4, 5], 6, 9)
    assert joined([begun, rest]) == whole == rest_of(whole, None)
    with pytest.raises(ValueError, match="not those of consecutive"):
        joined([whole, rest])


def test_the_time_before_a_kill_counts(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))

    class Deadline:
        deadline = 0.0

    async def play(attempt: int, spent: float) -> float:
        journal, tools = await open_journal(store, 1, 2, attempt), Deadline()
        tools.deadline = time.monotonic() + 100
        journal.started(tools)  # type: ignore[arg-type]
        policy: Any = Turns(generation([1]))
        await JournalPolicy(journal, policy).generate(a_request(7), 100.0)
        journal._origin = time.monotonic() - spent if attempt == 0 else journal._origin
        await JournalPolicy(journal, policy).generate(a_request(8), 100.0)
        await JournalPolicy(journal, policy).generate(a_request(9 + attempt), 100.0) if attempt else None
        await journal.close(keep=True)
        return tools.deadline - time.monotonic()

    asyncio.run(play(0, 70.0))
    assert 25 < asyncio.run(play(1, 0.0)) <= 30
