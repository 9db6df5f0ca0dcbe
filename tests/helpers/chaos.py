"""What a run makes of kills, flipped bits, a restarting database, a full disk and a clock that jumps.

    python -m tests.helpers.chaos FOLDER [--seed 1] [--kills 60] [--flips 20] [--restarts 5] [--disks 5] [--jumps 4]

Every case disturbs a real run once and then resumes it. It must end in one sentence or in the end of the run: nothing
lost, nothing twice, no process left, nothing damaged that was taken without a word. Deterministic runs must end with
the weights of an undisturbed one. Results are lines of FOLDER/chaos.jsonl; those that are there are not played again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from etude import runfolder
from etude.store import open_store
from etude.weights.manifest import manifests
from tests.helpers.postgres import INSTALLED, PostgresServer

ROOT = Path(__file__).parents[2]
SECONDS = 600.0  # for a run of a few steps on a busy machine
STEPS = 4
CONFIG = f"""
name = "run"
deterministic = true
[model]
path = "{ROOT / "models/nano"}"
[tasks]
repository = "unused"
dataset = "DATASET"
[rollout]
prompts = 2
group = 3
staleness = 0
max_in_flight = 6
turns = 2
tokens = 48
context = 512
[trainer]
steps = {STEPS}
lr = 1e-3
[weights]
anchor_versions = 2
[eval]
before = false
after = false
"""
VICTIMS = ("etude.cli.main", "etude.trainer.rl.process", "etude.inference.server.server", "zygote")
KINDS = {
    "checkpoint": "outputs/run/checkpoints/*/*",
    "blob": "outputs/run/rollouts/0000000[67]/*.msgpack",  # of groups that were not trained on yet
    "manifest": "outputs/run/weights/versions/*.json",
    "ledger": "outputs/run/ledger.db",
    "dataset": "tiny/**/*",
    "delta": "outputs/run/weights/payloads/*",
    "config": "outputs/run/config.json",
    "metrics": "outputs/run/metrics.jsonl",
}
CLOCK = """
import os, time
_real, _began = time.time, time.monotonic()
_jump, _after = float(os.environ["CHAOS_JUMP"]), float(os.environ["CHAOS_AFTER"])
time.time = lambda: _real() + (_jump if time.monotonic() - _began > _after else 0.0)
"""


@dataclass
class Result:
    """How a case ended. `wrong`: empty if as promised."""

    kind: str
    number: int
    what: str
    ended: str = ""
    wrong: str = ""


def etude(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """The command line in `folder`, with both outputs in one pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "etude.cli.main", *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "TERM": "dumb", **variables},
    )  # fmt: skip


def begin(folder: Path, *overrides: str, config: str = CONFIG, **variables: str) -> subprocess.Popen[str]:
    """A new run in `folder`, which has a dataset of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "tests/tasks/data/tiny", folder / "tiny", dirs_exist_ok=True)
    (folder / "run.toml").write_text(config.replace("DATASET", str(folder / "tiny")))
    return etude(folder, "train", "run.toml", *overrides, **variables)


def resume(folder: Path, **variables: str) -> tuple[int, str]:
    """Exit code and output of `--resume`."""
    process = etude(folder, "train", "outputs/run", "--resume", **variables)
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    found, queue = [], [pid]
    while queue:
        with suppress(OSError):
            for task in Path(f"/proc/{queue.pop(0)}/task").iterdir():
                below = [int(child) for child in (task / "children").read_text().split()]
                found += below
                queue += below
    return found


def named(pids: list[int], name: str) -> int | None:
    """The first of these whose command line holds `name`."""
    for pid in pids:
        with suppress(OSError):
            if name in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                return pid
    return None


def ended(code: int, output: str) -> str:
    """The last line of an output, and what is wrong with it as an end; raises AssertionError."""
    assert "Traceback" not in output, output[-3000:]
    last = (output.strip().splitlines() or [""])[-1]
    if code != 0:
        assert code in (1, 2), f"exit code {code}: {output[-1000:]}"
        assert last.startswith("etude: "), output[-1000:]
    return last[:200] if code else "ended"


def whole(folder: Path, want: list[tuple[int, str, int]] | None, episodes: int) -> None:
    """Raises AssertionError unless the run ended as promised. `want`: the versions of an undisturbed one."""
    run = folder / "outputs/run"
    report = json.loads((run / "report.json").read_text())
    assert all(report["checks"].values()), report["checks"]
    assert sum(report["episodes"].values()) == episodes, report["episodes"]
    lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, STEPS + 1)), f"lines of metrics: {lines}"
    if want is not None:
        assert versions(folder) == want, "the weights are not those of an undisturbed run"


def versions(folder: Path) -> list[tuple[int, str, int]]:
    """(version, digest, groups) of what was published."""
    return [(m.version, m.digest, len(m.groups)) for m in manifests(open_store(str(folder / "outputs/run/weights")))]


class Chaos:
    """Cases below one folder, with the random numbers of one seed."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed = folder.absolute(), seed
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log = self.folder / "chaos.jsonl"
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self.results = [Result(**json.loads(line)) for line in lines]

    def case(self, kind: str, number: int, play: Callable[[Path, random.Random, Result], None]) -> None:
        """Plays a case, unless its result is there."""
        if any((r.kind, r.number) == (kind, number) for r in self.results):
            return
        result = Result(kind, number, "")
        folder = self.folder / f"{kind}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            play(folder, random.Random(f"{self.seed} {kind} {number}"), result)
        except (AssertionError, subprocess.TimeoutExpired) as e:
            result.wrong = str(e) or type(e).__name__
        with self._log.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        self.results.append(result)
        print(f"{kind} {number}: {result.what}: {result.wrong[-1500:] or result.ended}", flush=True)
        if not result.wrong:
            shutil.rmtree(folder, ignore_errors=True)

    def pristine(self, name: str, **variables: str) -> Path:
        """A run that nobody disturbs, or one that a failpoint ends; made once."""
        folder = self.folder / name
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            output, _ = begin(folder, **variables).communicate(timeout=SECONDS)
            assert (folder / "outputs/run/metrics.jsonl").exists(), output
            (folder / "made").touch()
        return folder

    def want(self) -> list[tuple[int, str, int]]:
        """The versions of an undisturbed run."""
        return versions(self.pristine("undisturbed"))

    def kill(self, folder: Path, rng: random.Random, result: Result) -> None:
        """kill -9 of one process at a random moment, half of them in the first 30 seconds."""
        victim, moment = rng.choice(VICTIMS), rng.choice([rng.uniform(0, 30), rng.uniform(0, 90)])
        result.what = f"kill {victim.removeprefix('etude.')} after {moment:.1f} s"
        want, process = self.want(), begin(folder)
        began = time.monotonic()
        while process.poll() is None:
            below = descendants(process.pid)
            pid = process.pid if victim == VICTIMS[0] else named(below, victim)
            if pid is not None and time.monotonic() - began > moment:
                break
            time.sleep(0.02)
        if process.poll() is None:
            watched = []
            for one in below:
                with suppress(OSError):
                    watched.append(os.pidfd_open(one))
            with suppress(ProcessLookupError):
                os.kill(pid or process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=SECONDS)
            if victim != VICTIMS[0]:
                result.ended = ended(process.returncode, output)
            for one in watched:
                assert select.select([one], [], [], 30)[0], "a process outlived its controller"
                os.close(one)
        else:
            process.communicate()
            result.what += " (it had ended)"
        if (folder / "outputs/run/report.json").exists():
            return whole(folder, want, 6 * STEPS)
        if not (folder / "outputs/run").exists():  # killed before there was a run
            output, _ = (again := begin(folder)).communicate(timeout=SECONDS)
            code = again.returncode
        else:
            code, output = resume(folder)
        assert ended(code, output) == "ended", output[-1000:]
        whole(folder, want, 6 * STEPS)
        return None

    def flip(self, kind: str, folder: Path, rng: random.Random, result: Result) -> None:
        """One bit of one file of a run that was stopped in the last of four steps, then `--resume`."""
        want, stopped = self.want(), self.pristine("stopped", ETUDE_FAILPOINT="controller.finished:22")
        shutil.copytree(stopped, folder, symlinks=True)
        text = (folder / "outputs/run/config.json").read_text()
        (folder / "outputs/run/config.json").write_text(text.replace(str(stopped), str(folder)))
        runfolder.config_changed(folder / "outputs/run")  # the path of the dataset
        files = sorted(p for p in folder.glob(KINDS[kind]) if p.is_file() and p.stat().st_size)
        path = rng.choice(files)
        data = bytearray(path.read_bytes())
        used = [i for i, byte in enumerate(data) if byte] if kind == "ledger" else range(len(data))
        place, bit = rng.choice(used), rng.randrange(8)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        result.what = f"bit {bit} of byte {place} of {path.relative_to(folder)}"
        code, output = resume(folder)
        result.ended = ended(code, output)
        if code == 0:
            said = [line for line in output.splitlines() if line.startswith("etude: ")]
            result.ended = said[0][:200] if said else "ended as if nothing had been"
            other = said and kind == "config"  # than the undisturbed run's, and said to be
            whole(folder, None if other else want, 6 * STEPS)

    def restart(self, folder: Path, rng: random.Random, result: Result) -> None:
        """PostgreSQL is restarted, killed or away for five seconds while a run goes on."""
        away, crash = rng.choice([(0.0, False), (0.0, True), (5.0, False)])
        result.what = f"postgresql {'killed' if crash else 'restarted'}, away {away:.0f} s"
        server = PostgresServer(password := f"canary{rng.randrange(10**9)}")
        try:
            process = begin(folder, "--ledger", server.url)
            metrics, deadline = folder / "outputs/run/metrics.jsonl", time.monotonic() + SECONDS
            while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(rng.uniform(0, 3))
            server.restart(away, crash=crash)
            output, _ = process.communicate(timeout=SECONDS)
            result.ended = ended(process.returncode, output)
            assert process.returncode == 0, output[-1000:]
            whole(folder, self.want(), 6 * STEPS)
            holding = [p for p in folder.rglob("*") if p.is_file() and password.encode() in p.read_bytes()]
            assert not holding, f"the password stands in {holding}"
        finally:
            server.close()

    def full_disk(self, folder: Path, rng: random.Random, result: Result) -> None:
        """A disk that is full at some place of the run, then larger."""
        size = rng.choice([4, 8, 16, 24, 32, 48])
        result.what = f"a disk of {size} MB"
        with mounted(folder, size):
            process = begin(folder)
            output, _ = process.communicate(timeout=SECONDS)
            result.ended = ended(process.returncode, output)
            subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)
            if process.returncode == 0:
                return whole(folder, self.want(), 6 * STEPS)
            if (folder / "outputs/run").exists():
                code, output = resume(folder)
            else:
                output, _ = (again := begin(folder)).communicate(timeout=SECONDS)
                code = again.returncode
            assert ended(code, output) == "ended", output[-1000:]
            whole(folder, self.want(), 6 * STEPS)
        return None

    def jump(self, folder: Path, rng: random.Random, result: Result) -> None:
        """The clock of every process is set a day on or back while the run goes on."""
        jump, after = rng.choice([86400, -86400]), rng.uniform(5, 40)
        result.what = f"the clock jumps by {jump} s after {after:.0f} s"
        (folder / "clock").mkdir(parents=True)
        (folder / "clock/sitecustomize.py").write_text(CLOCK)
        paths = os.pathsep.join([str(folder / "clock"), *sys.path])
        variables = {"PYTHONPATH": paths, "CHAOS_JUMP": str(jump), "CHAOS_AFTER": str(after)}
        process = begin(folder, **variables)
        output, _ = process.communicate(timeout=SECONDS)
        result.ended = ended(process.returncode, output)
        assert process.returncode == 0, output[-1000:]
        whole(folder, self.want(), 6 * STEPS)

    def table(self) -> str:
        """A row per kind of disturbance."""
        rows = ["| disturbance | cases | one sentence | went on | wrong |", "|---|---|---|---|---|"]
        for kind in dict.fromkeys(r.kind for r in self.results):
            of = [r for r in self.results if r.kind == kind]
            count = Counter("wrong" if r.wrong else "said" if r.ended.startswith("etude: ") else "on" for r in of)
            rows.append(f"| {kind} | {len(of)} | {count['said']} | {count['on']} | {count['wrong']} |")
        return "\n".join(rows)


@contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[None]:
    """A disk of this size at `folder`. Raises CalledProcessError where that is not allowed."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "etude-chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def main() -> int:
    """Plays the cases that are not there yet, prints the table; 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    for name, count in (("kills", 60), ("flips", 20), ("restarts", 5), ("disks", 5), ("jumps", 4)):
        parser.add_argument(f"--{name}", type=int, default=count)
    options = parser.parse_args()
    chaos = Chaos(options.folder, options.seed)
    for number in range(options.flips):
        for kind in KINDS:
            chaos.case(f"flip-{kind}", number, partial(chaos.flip, kind))
    for number in range(options.kills):
        chaos.case("kill", number, chaos.kill)
    for number in range(options.restarts if INSTALLED else 0):
        chaos.case("postgresql", number, chaos.restart)
    for number in range(options.disks if os.getuid() == 0 else 0):
        chaos.case("full-disk", number, chaos.full_disk)
    for number in range(options.jumps):
        chaos.case("clock", number, chaos.jump)
    print(chaos.table())
    return int(any(result.wrong for result in chaos.results))


if __name__ == "__main__":
    sys.exit(main())
