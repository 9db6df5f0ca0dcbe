"""Whole runs whose processes are killed: `python -m benchmarks.fleet_run engines|all [--kills N] [--seconds S]`.

engines  a run of ten steps on three engines and a player, undisturbed and then with one engine killed (kill -9) every
         `seconds`; its placer starts another, which joins. Throughput is that of sampled tokens that were kept, between
         the first episode's end and the last version, over the undisturbed rate times the mean share of engines that
         served.
all      a run of long episodes, all of whose processes are killed at once (SIGSTOP, then SIGKILL, so that none sees
         another's end) after `seconds` of play, `kills` times, each time resumed; the last round ends by Ctrl-C.

Tokens sampled are the engines' own counts, asked for right before a kill; kept are those of finished episodes, and of
journals where the run is not at its end. A command has run twice if its result was stored and it ran again. Each line
of the output is one JSON object; the load average stands beside the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from etude.ledger import Ledger
from etude.records import Episode, decode
from etude.rollout.journal import EpisodeJournal, TurnEnd, TurnPart
from etude.store import open_store
from etude.weights import manifests

ROOT = Path(__file__).parent.parent
TOKEN = "of-the-benchmark"
STEPS, KILLS = 10, 20
LOOK_SECONDS, DEADLINE = 0.1, 1500.0
SERVERS = "etude.inference.server.server"
CONFIG = """
stage = "rl"
name = "run"
[model]
path = "{root}/models/nano"
[tasks]
repository = "unused"
dataset = "{root}/tests/tasks/data/tiny"
[rollout]
prompts = 4
group = 4
staleness = 1
max_in_flight = 16
turns = {turns}
tokens = {tokens}
context = {context}
[trainer]
steps = {steps}
lr = 1e-3
[eval]
before = false
after = false
"""
FLEET = '[[engines]]\nname = "here"\ncount = 3\n[players]\nepisodes = 16\n'
# In every process of the run: the commands of episodes, when they begin and when their results are stored.
WATCH = """
import importlib.abc, os, sys
from importlib.machinery import PathFinder
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "etude.rollout.journal_seams":
            return None
        spec = PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            watch(module.JournalBox)
        spec.loader.exec_module = exec_module
        return spec
def note(word, box, digest):
    with open(os.environ["ETUDE_COMMANDS"], "a") as file:
        file.write(f"{word} {box._journal.folder} {box.number} {digest.hex()}\\n")
def watch(kind):
    recorded, run, record = kind._recorded, kind._run, kind._record
    kind.number = 0
    async def _recorded(self, entry, of):
        self.number += 1
        return await recorded(self, entry, of)
    async def _run(self, digest, work, watch):
        self.number += 1
        note("begun", self, digest)
        result = await run(self, digest, work, watch)
        await self._journal.flush()
        note("stored", self, digest)
        return result
    kind._recorded, kind._run = _recorded, _run
sys.meta_path.insert(0, Finder())
"""


class Watched:
    """A run in a folder, and the tokens that its engines have sampled."""

    def __init__(self, folder: Path, config: str, fleet: str = "") -> None:
        self.folder, self.run = folder, folder / "outputs/run"
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text(config)
        (folder / "site").mkdir()
        (folder / "site/sitecustomize.py").write_text(WATCH)
        self.fleet = ["--fleet", "fleet.toml"] if fleet else []
        (folder / "fleet.toml").write_text(fleet)
        self.sampled = 0
        self.log = (folder / "log").open("ab")

    def start(self, *arguments: str) -> None:
        path = os.pathsep.join([str(self.folder / "site"), *sys.path])
        own = {"ETUDE_API_KEY": TOKEN, "ETUDE_COMMANDS": str(self.folder / "commands"), "PYTHONPATH": path}
        command = [sys.executable, "-m", "etude.cli.main", "train", "run.toml", *arguments]
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=os.environ | own, stdout=self.log, stderr=self.log
        )

    def ledger(self) -> Ledger:
        return Ledger.open(f"sqlite:///{self.run}/ledger.db")

    def urls(self) -> list[str]:
        ledger = self.ledger()
        try:
            return [row.url for row in ledger.members.engines() if row.state != "gone"]
        finally:
            ledger.close()

    def count(self, urls: list[str]) -> int:
        """The tokens that these engines have sampled since their start."""
        total = 0
        for url in urls:
            with suppress(httpx2.HTTPError):
                answer = httpx2.get(f"{url}/health", headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False)
                total += int(answer.json()["generated_tokens"])
        return total

    def kept(self) -> int:
        """The tokens of episodes that have a result, those of impossible tasks too, and of the others' journals."""
        store, total = open_store(str(self.run / "rollouts")), 0
        for key in store.list():
            if key[0].isdigit() or key.startswith("impossible/"):
                total += decode(store.get(key), Episode).sampled_tokens
        for group, member in {tuple(map(int, key.split("/")[1:3])) for key in store.list("journal")}:
            journal = EpisodeJournal(store, group, member, 10**6)
            journal.read()
            entries = list(journal._recorded)  # pyright: ignore[reportPrivateUsage]
            total += sum(len(entry.generation.ids) for entry in entries if isinstance(entry, TurnPart | TurnEnd))
        return total

    def proof(self) -> dict[str, Any]:
        ledger = self.ledger()
        conservation = ledger.conservation(list(manifests(open_store(str(self.run / "weights")))))
        lost = {name: count for name, count in ledger.counts().items() if name in ("infra", "quarantined")}
        recovered = ledger.recovered()
        ledger.close()
        lines = [line.split(maxsplit=1) for line in (self.folder / "commands").read_text().splitlines()]
        begun, stored = (Counter(rest for word, rest in lines if word == kind) for kind in ("begun", "stored"))
        file = self.run / "metrics.jsonl"
        metrics = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return {
            "conserved": conservation.ok,
            "sentence": conservation.sentence,
            "late": conservation.late,
            "lost": lost,
            "recovered": recovered,
            "commands": stored.total(),
            "commands_twice": sum(count - 1 for count in stored.values()),
            "commands_cut": begun.total() - stored.total(),
            "most_stale": max((line.get("off_policy/max", 0) for line in metrics), default=None),
        }


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    pids = [pid]
    for parent in pids:  # it grows
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return pids


def servers(pid: int) -> dict[int, str]:
    """The servers below a process: pids and arguments."""
    texts = dict[int, str]()
    for each in tree(pid):
        with suppress(OSError):
            text = Path(f"/proc/{each}/cmdline").read_text()
            if SERVERS in text:
                texts[each] = text
    return texts


def play(watched: Watched, kills: int, pause: float) -> dict[str, Any]:
    """A run on three engines; one is killed every `pause` seconds, `kills` times at most."""
    watched.start(*watched.fleet)
    begun = struck = 0.0
    done, sampled, serving, killed = 0, 0, list[int](), 0
    last: dict[str, int] = {}
    deadline = time.monotonic() + DEADLINE
    while watched.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(LOOK_SECONDS)
        if not (watched.run / "ledger.db").exists():
            continue
        ledger = watched.ledger()
        rows = ledger.members.engines()
        if not begun and ledger.counts()["scored"]:
            begun = struck = time.monotonic()
        ledger.close()
        if not begun:
            continue
        serves = [row.url for row in rows if row.state == "serving"]
        serving.append(len(serves))
        for url in serves:
            last[url] = watched.count([url]) or last.get(url, 0)
        if killed < kills and len(serves) > 1 and time.monotonic() - struck > pause:
            victim = next(iter(servers(watched.process.pid)))  # the oldest
            for url in serves:
                last[url] = watched.count([url])
            os.kill(victim, signal.SIGKILL)
            killed, struck = killed + 1, time.monotonic()
        done, sampled = time.monotonic(), sum(last.values())
    kept = watched.kept()
    return {
        "code": watched.process.returncode,
        "kills": killed,
        "seconds": done - begun,
        "kept": kept,
        "sampled": sampled,
        "useful": kept / max(kept, sampled),
        "rate": kept / (done - begun),
        "serving": sum(serving) / len(serving) / 3,
        **watched.proof(),
    }


def engines(folder: Path, kills: int, pause: float) -> None:
    config = CONFIG.format(root=ROOT, turns=6, tokens=400, context=1800, steps=STEPS)
    calm = play(Watched(folder / "calm", config, FLEET), 0, pause)
    print(json.dumps({"run": "calm", "load": os.getloadavg(), **calm}), flush=True)
    cut = play(Watched(folder / "cut", config, FLEET), kills, pause)
    share = cut["rate"] / (calm["rate"] * cut["serving"] / calm["serving"])
    print(json.dumps({"run": "engines", "load": os.getloadavg(), "throughput_share": share, **cut}), flush=True)


def everything(folder: Path, kills: int, seconds: float) -> None:
    config = CONFIG.format(root=ROOT, turns=24, tokens=3000, context=8000, steps=10_000)
    watched = Watched(folder / "all", config)
    watched.start()
    again = 0
    for number in range(kills + 1):
        deadline, urls = time.monotonic() + DEADLINE, list[str]()
        while not watched.count(urls):
            assert watched.process.poll() is None, (watched.folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(LOOK_SECONDS)
            urls = watched.urls() if (watched.run / "ledger.db").exists() else []
        time.sleep(seconds)
        assert watched.process.poll() is None, (watched.folder / "log").read_text()[-2000:]
        if number == kills:
            break
        pids = tree(watched.process.pid)
        own = watched.count(urls)
        for signal_ in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal_)
        watched.process.wait()
        watched.sampled += own
        again = watched.sampled - watched.kept()
        figures = {"kill": number + 1, "load": os.getloadavg()[0], "sampled": watched.sampled, "again": again}
        print(json.dumps(figures), flush=True)
        watched.start("--resume")
    watched.process.send_signal(signal.SIGINT)  # between a version and its row in the ledger a kill looks like a loss
    watched.process.wait(DEADLINE)
    figures = {"run": "all", "kills": kills, "load": os.getloadavg(), "sampled": watched.sampled}
    print(json.dumps({**figures, "again": again / watched.sampled, **watched.proof()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenario", choices=("engines", "all"))
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = engines if arguments.scenario == "engines" else everything
        work(Path(folder), arguments.kills, arguments.seconds)


if __name__ == "__main__":
    main()
