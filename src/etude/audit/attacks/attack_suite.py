"""The attack suite: plays every item on every grader that this machine has."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from etude.audit.attacks import fingerprints, packs, plain
from etude.audit.attacks.boxes import CHECKS, LIMITS, SECONDS
from etude.audit.attacks.fingerprints import FingerprintsAgainst
from etude.audit.attacks.forgeries import forgeries
from etude.audit.attacks.gates import GATES
from etude.audit.attacks.injections import injections
from etude.audit.attacks.library import EXPECTED, JAVASCRIPT, SECRET, TASK, prepare, unpacked
from etude.audit.attacks.lookups import look_ups
from etude.audit.attacks.memory import memory
from etude.audit.attacks.monitors import MONITORS
from etude.audit.attacks.outside import outside
from etude.audit.attacks.packs import AttackPack
from etude.audit.attacks.probes import PROBES, script
from etude.audit.attacks.report import INSIDE, OUTSIDE, AttackReport, AttackResult
from etude.code import has_syntax, lines_of
from etude.config import SandboxConfig
from etude.grading import Grade, TestRunner, open_sandbox
from etude.records import Outcome
from etude.sandbox import Box, BoxError, Limits, Sandbox

LIBRARY_CHECKS = {"A10": (look_ups,), "C9": (forgeries,)}  # of the harness: no grader takes part
GRADED_CHECKS = {**MONITORS, "A7": (memory,), "C11": (injections,)}
GOLD_REPEATS = 10
ESCAPED = Path("/tmp/etude-attack-escaped")
LibraryCheck = Callable[[Sandbox, AttackPack], Awaitable[str]]  # returns the problem; "" if there is none


class HostState:
    """The state of the host that attacks must not change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.before = self._state()

    def _state(self) -> dict[str, object]:
        files = [path for path in sorted(self.root.rglob("*")) if path.is_file()]
        return {
            "files of the tasks": [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files],
            "mounts": [line for line in lines_of(Path("/proc/self/mountinfo").read_text()) if not _engine(line)],
            "hostname": socket.gethostname(),
            "escape": ESCAPED.exists(),
        }

    def changed(self) -> str:
        """Names of the parts of the state that have changed since the last call."""
        now = self._state()
        names = [name for name, value in now.items() if value != self.before[name]]
        ESCAPED.unlink(missing_ok=True)
        self.before = now | {"escape": False}
        return ", ".join(names)


def _engine(mount: str) -> bool:
    """Whether a line of mountinfo is the root of a container, which comes and goes with the container."""
    return any(place in mount for place in ("/containers/storage/", "/docker/"))


async def run_attacks(
    config: SandboxConfig,
    against: FingerprintsAgainst | None = None,
    *,
    quick: bool,
    progress: Callable[[str], None] = lambda _: None,
) -> AttackReport:
    """Play every attack on the configured backend, or the `quick` ones. Boxes reach nothing: the way out is attacked
    with servers of this process. Raises UserError where boxes cannot be made."""
    if config.type == "namespace":
        config = config.model_copy(update={"egress": (), "index": None})
    report = AttackReport(skipped=dict(fingerprints.REASONS))
    with tempfile.TemporaryDirectory(prefix="etude-attacks-") as folder, contextlib.closing(_listener()) as listener:
        python, javascript = prepare(Path(folder)), unpacked(JAVASCRIPT, Path(folder))
        if shutil.which("git") is None:
            report.skipped["A1"] = report.skipped["A2"] = "git is not installed, so no history could be planted"
        ESCAPED.unlink(missing_ok=True)
        played = _Attacks(python, HostState(Path(folder)), report, progress)
        for where in (OUTSIDE, INSIDE):
            async with open_sandbox(config, memo=0, outside=where == OUTSIDE) as sandbox:
                await played.grades(sandbox, python, where, 2 if quick else GOLD_REPEATS)
                if where == OUTSIDE:
                    await played.boxes(sandbox, listener.getsockname()[1])
                    if sandbox.capabilities().egress:
                        await played.gates(config)
                    await played.checks(LIBRARY_CHECKS, "box", sandbox)
                    if reason := await no_scripts(sandbox, javascript):
                        report.skipped |= dict.fromkeys((each.item for each in javascript.programs), reason)
                    else:
                        await played.grades(sandbox, javascript, where, 1)
                await played.checks(GRADED_CHECKS, where, sandbox)
                if where == INSIDE and not quick:
                    await plain.compare(sandbox, python, report, progress)
        if against is not None:
            await played.fingerprints(against)
    return report


_NEW_ENOUGH = 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 16) ? 0 : 1)'


async def no_scripts(sandbox: TestRunner, pack: AttackPack) -> str:
    """The reason why JavaScript tests cannot be decided outside of the tested process; "" if they can."""
    if not has_syntax("javascript"):
        return "the extra `apply` is not installed"
    box = await sandbox.create(pack.data.image(pack.tasks[0]), Limits(), bare=True)
    try:
        node = await box.exec(f"node -e '{_NEW_ENOUGH}'", 30)
    finally:
        await box.close()
    return "" if node.rc == 0 else "boxes have no Node.js of 20.16 or later"


def _listener() -> socket.socket:
    """A service of the host, which no box may reach."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


@dataclass(frozen=True)
class _Attacks:
    """The attacked pack, the state of the host, and the report."""

    pack: AttackPack
    host: HostState
    report: AttackReport
    progress: Callable[[str], None]

    def _add(self, item: str, name: str, where: str, verdict: str, problem: str = "") -> None:
        self.report.results.append(AttackResult(item, name, where, verdict, problem, self.host.changed()))

    async def grades(self, sandbox: Sandbox, pack: AttackPack, where: str, gold: int) -> None:
        """Plays the programs of a pack and its controls on the grader; records rewards, and the flags (F1)."""
        async for each in packs.attacks(sandbox, pack, lambda text: self.progress(f"{text} ({where})"), gold):
            program, flags = each.program, each.graded.flags
            self._add(program.item, program.title, where, _verdict(each.graded), each.problem)
            if program.flag or program is packs.GOLD:
                right = program.flag in flags if program.flag else not flags
                word = ", ".join(flags) or "silent"
                problem = "" if right else f"flags: {word}"
                self.report.results.append(AttackResult("F1", program.title, where, word, problem))

    async def boxes(self, sandbox: Sandbox, port: int) -> None:
        """Plays the probes inside a box, and the attacks on its owner."""
        for item in (item for item in PROBES if item not in self.report.skipped):
            probe = partial(_probe, script(item, SECRET, EXPECTED, port))
            await self._check(item, "probe", "box", self._in_box(sandbox, probe))
        for item, check in CHECKS.items():
            work = self._in_box(sandbox, partial(check, sandbox, self.pack.data.image(TASK)))
            await self._check(item, check.__name__, "box", work)

    async def gates(self, config: SandboxConfig) -> None:
        """Plays the attacks on boxes with a way out, which leads to servers of this process."""
        with outside() as world:
            async with open_sandbox(config, memo=0, egress=world.egress(None)) as sandbox:
                for item, check in GATES.items():
                    work = self._in_box(sandbox, lambda box, check=check: check(box, world))
                    await self._check(item, check.__name__, "box", work)

    async def checks(self, checks: Mapping[str, Sequence[LibraryCheck]], where: str, sandbox: Sandbox) -> None:
        """Plays the checks that need the pack's library and boxes of their own."""
        for item, check in ((item, check) for item, each in checks.items() for check in each):
            await self._check(item, check.__name__, where, check(sandbox, self.pack))

    async def _in_box(self, sandbox: Sandbox, work: Callable[[Box], Awaitable[str]]) -> str:
        box = await sandbox.create(self.pack.data.image(TASK), LIMITS)
        try:
            return await work(box)
        finally:
            await box.close()

    async def _check(self, item: str, name: str, where: str, work: Awaitable[str]) -> None:
        name = name.replace("_", " ")
        self.progress(f"{item} {name} ({where})")
        try:
            problem = " ".join((await work).split())[:200]
        except (BoxError, TimeoutError) as e:
            problem = f"{type(e).__name__}: {e}"
        self._add(item, name, where, "missed" if problem else "flagged" if item in MONITORS else "stopped", problem)

    async def fingerprints(self, against: FingerprintsAgainst) -> None:
        """Plays items E, as far as `against` has samples for them."""
        results = await against.results(lambda done, count: self.progress(f"E fingerprints: {done} of {count} boxes"))
        changed = self.host.changed()
        for item, result in results.items():
            if result.skipped:
                self.report.skipped[item] = result.skipped
                continue
            del self.report.skipped[item]
            played = AttackResult(item, "fingerprints", "box", result.word, result.problem, changed)
            self.report.results.append(played)
            changed = ""  # one effect is counted once


def _verdict(graded: Grade) -> str:
    word = {Outcome.TAMPERED: "tamper", Outcome.INFRA: "infra"}.get(graded.outcome, "pass" if graded.passed else "fail")
    flags = [flag for flag in graded.flags if flag != "tamper"]
    return f"{word} ({', '.join(flags)})" if flags else word


async def _probe(text: str, box: Box) -> str:
    await box.write("probe.py", text.encode())
    done = await box.exec("python3 probe.py", SECONDS)
    problem, end, _ = done.output.rpartition("end of probe")
    return problem if end else f"the probe did not end: {done.output[-200:]}"
