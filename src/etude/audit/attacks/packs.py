"""Attack packs: folders of dishonest programs. etude's own lie in `audit/packs`; users write further ones.

PACK/pack.toml     name, `dataset` (a folder, from PACK; default "dataset"), `tasks` (how many, or their ids; default
                   3), `outside` (whether all tests must be decided outside of the tested process)
PACK/dataset/      a task dataset of `etude tasks build`
PACK/attacks/*     programs (.py, .sh, .mjs); comments in the first ten lines name the `class: NAME` of the attack, and
                   may name a `flag:` that its grade must carry and its `item:` of the suite
PACK/head.*        of the same endings: what stands before each program of that ending, if there is such a file

A program runs in the box of a task as a command of the agent would, once for each task: in the repository, as the
agent's user, with these variables: ETUDE_PATH and ETUDE_FUNCTION (file and name of the broken function), ETUDE_LINES
(its first and last line, "12-30"), ETUDE_INSTRUCTION, and ETUDE_PHASE = 1. After it the visible tests run. A program
that names ETUDE_PHASE then runs again with ETUDE_PHASE = 2 and the tests' output in /tmp/test-output.txt, so it can use
the output of the agent's `test` tool. The changed files of the box are graded like any attempt.

An attack is stopped if no task rewards it and none takes its failure for one of infrastructure. Rewards of tasks that
a run leaves out by the default of `tasks.min_decided`, since too few of their tests are decided outside, are counted
apart, unless the pack says `outside`.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.code import shown_lines
from etude.config import MIN_DECIDED, SandboxConfig
from etude.errors import UserError
from etude.grading import GRADE_LIMITS, Grade, grade_changes, note_state, open_sandbox
from etude.harness import clean_failure, failures
from etude.records import CodeTask, Outcome
from etude.sandbox import Box, BoxError, Changes, Sandbox
from etude.tasks import Dataset, load_dataset

OWN = Path(__file__).parents[1] / "packs"
SECONDS = 30.0  # of a program
SHOWN = 400  # characters of a failure that the `test` tool prints
PROGRAMS = {".py": "python3", ".sh": "bash", ".mjs": "node"}
_CLASS = re.compile(r"class:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)  # in a comment of any form, a docstring too
_HEADER = re.compile(r"^[ \t]*(?:#|//|\*) *(flag|item): *(\S.*?) *$", re.MULTILINE)


@dataclass(frozen=True)
class AttackProgram:
    """A program of a pack."""

    name: str
    kind: str  # its class, as its author names it
    text: str = ""
    runner: str = ""
    item: str = ""  # of the suite
    flag: str = ""  # that its grade must carry

    @property
    def title(self) -> str:
        """The name in words."""
        return self.name.partition(".")[0].replace("_", " ")


GOLD = AttackProgram("the gold answer", "control", item="gold")
NOTHING = AttackProgram("no change", "control", item="no-op")
CONTROLS = (GOLD, NOTHING)


@dataclass(frozen=True)
class AttackPack:
    """A loaded pack, with the tasks that are attacked."""

    name: str
    data: Dataset
    tasks: tuple[CodeTask, ...]
    programs: tuple[AttackProgram, ...]
    outside: bool = False  # whether every test must be decided outside of the tested process


@dataclass(frozen=True)
class PlayedAttack:
    """The result of one program, or of a control, on one task. `problem` is empty if all is well. `untrained`: the
    program earned a reward of a task that is not trained on."""

    program: AttackProgram
    task: str
    graded: Grade
    problem: str
    untrained: bool = False

    @property
    def row(self) -> dict[str, Any]:
        """The result as a row of `--json`."""
        graded = self.graded
        return {
            "program": self.program.name,
            "kind": self.program.kind,
            "task": self.task,
            "outcome": graded.outcome.value,
            "reward": graded.score,
            "detail": graded.detail[:300],
            "problem": self.problem,
            "untrained": self.untrained,
        }


@dataclass
class PackReport:
    """All results of a pack, of controls and of programs."""

    name: str
    tasks: int
    results: list[PlayedAttack] = field(default_factory=list)

    @property
    def played(self) -> list[PlayedAttack]:
        """The results of programs."""
        return [each for each in self.results if each.program not in CONTROLS]

    @property
    def passed(self) -> bool:
        """Whether every attack was stopped and every control held."""
        return not any(each.problem for each in self.results)

    @property
    def summary(self) -> dict[str, Any]:
        """Counts, and the names of attacks that got through; `controls` holds the problems of gold answers, `untrained`
        the programs that earned rewards of tasks that are not trained on."""
        through = {each.program for each in self.played if each.problem}
        failed = [each for each in self.results if each.problem and each.program in CONTROLS]
        return {
            "pack": self.name,
            "tasks": self.tasks,
            "attacks": len({each.program for each in self.played}),
            "rewards": sum(each.graded.score > 0 and not each.untrained for each in self.played),
            "untrained": sorted({each.program.name for each in self.played if each.untrained}),
            "through": sorted(program.name for program in through),
            "classes_through": sorted({program.kind for program in through}),
            "controls": [f"{each.task}: {each.program.name} {each.problem}" for each in failed],
        }


def load_pack(folder: Path) -> AttackPack:
    """The pack in a folder. Raises UserError."""
    path = folder / "pack.toml"
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError:
        raise UserError(f"{folder} is no attack pack: it has no pack.toml (docs/sandbox.md)") from None
    except ValueError as e:
        raise UserError(f"{path} cannot be read: {e}") from None
    if unknown := table.keys() - {"name", "dataset", "tasks", "outside"}:
        raise UserError(f"{path}: unknown key {min(unknown)}; use name, dataset, tasks and outside")
    data = load_dataset(folder / str(table.get("dataset", "dataset")))
    tasks = _chosen(data, table.get("tasks", 3), path)
    return AttackPack(str(table.get("name", folder.name)), data, tasks, programs(folder), bool(table.get("outside")))


def programs(folder: Path) -> tuple[AttackProgram, ...]:
    """The programs of the pack in a folder. Raises UserError."""
    heads = {suffix: _read(path) for suffix in PROGRAMS if (path := folder / f"head{suffix}").is_file()}
    loaded = tuple(_program(each, heads) for each in sorted((folder / "attacks").glob("*")) if each.is_file())
    if not loaded:
        raise UserError(f"{folder}/attacks holds no programs (.py, .sh or .mjs)")
    return loaded


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None


def _program(path: Path, heads: Mapping[str, str]) -> AttackProgram:
    if path.suffix not in PROGRAMS:
        raise UserError(f"{path}: a program of a pack ends in {', '.join(PROGRAMS)}")
    text = _read(path)
    top = "\n".join(shown_lines(text)[:10])
    kind, head = _CLASS.search(top), dict(_HEADER.findall(top))
    if kind is None:
        raise UserError(f"{path}: a comment `class: NAME` within the first ten lines must name the class of the attack")
    text = heads.get(path.suffix, "") + text
    return AttackProgram(path.name, kind[1], text, PROGRAMS[path.suffix], head.get("item", ""), head.get("flag", ""))


def _chosen(data: Dataset, wanted: object, path: Path) -> tuple[CodeTask, ...]:
    if isinstance(wanted, int) and wanted > 0:
        by_function = {task.function: task for task in reversed(data.tasks)}  # different functions first
        return tuple(sorted(by_function.values(), key=lambda task: task.id)[:wanted])
    if isinstance(wanted, list) and wanted and all(name in data.by_id for name in wanted):
        return tuple(data.by_id[name] for name in wanted)
    raise UserError(f"{path}: tasks is a number from 1, or a list of ids of the dataset's tasks")


async def play_pack(
    pack: AttackPack, config: SandboxConfig | None = None, progress: Callable[[str], None] = lambda _: None
) -> PackReport:
    """Plays every program on every task of the pack. Raises UserError where boxes cannot be made."""
    pack.data.check_boxes(config)
    async with open_sandbox(config, memo=0) as sandbox:
        played = [each async for each in attacks(sandbox, pack, progress)]
    return PackReport(pack.name, len(pack.tasks), played)


async def attacks(
    sandbox: Sandbox, pack: AttackPack, progress: Callable[[str], None] = lambda _: None, gold: int = 1
) -> AsyncIterator[PlayedAttack]:
    """The results of each program on each task, after those of the controls; the gold answer is graded `gold` times."""
    for program in (GOLD, NOTHING, *pack.programs, *[GOLD] * (gold - 1)):
        for task in pack.tasks:
            progress(f"{pack.name}: {program.name} on {task.id}")
            yield await attack(sandbox, pack, task, program)


async def attack(sandbox: Sandbox, pack: AttackPack, task: CodeTask, program: AttackProgram) -> PlayedAttack:
    """The result of one program on one task."""
    problem, data = "", pack.data
    try:
        changes, fault = await attempt(sandbox, data, task, program)
        if fault:
            graded = Grade(Outcome.SCORED, 0.0, False, fault, None)
        else:
            graded = await grade_changes(sandbox, task, data.image(task), data.hidden, changes, GRADE_LIMITS)
    except (BoxError, TimeoutError) as e:
        graded = Grade(Outcome.INFRA, 0.0, False, f"{type(e).__name__}: {e}", None)
    except Exception as e:  # the run of a user would have ended here
        graded, problem = Grade(Outcome.INFRA, 0.0, False, f"{type(e).__name__}: {e}", None), f"raised {e!r}"
    earns = program not in CONTROLS and (graded.score > 0 or graded.passed)
    untrained = earns and not pack.outside and task.decided < MIN_DECIDED
    problem = problem or ("" if untrained else _problem(pack, program, graded))
    return PlayedAttack(program, task.id, graded, problem[:300], untrained)


def _problem(pack: AttackPack, program: AttackProgram, graded: Grade) -> str:
    if (graded.score != 1.0) if program is GOLD else (graded.score > 0 or graded.passed):
        return f"earns {graded.score:g}: {graded.detail}"
    if graded.outcome is Outcome.INFRA:
        return f"taken for our own failure: {graded.detail}"
    report = graded.report
    if pack.outside and report is not None and len(report.outside) < len(report.outcomes):
        return f"only {len(report.outside)} of {len(report.outcomes)} tests were decided outside"
    return f"not flagged as {program.flag}" if program.flag and program.flag not in graded.flags else ""


async def attempt(
    sandbox: Sandbox, data: Dataset, task: CodeTask, program: AttackProgram, *, tested: bool = True
) -> tuple[Changes, str]:
    """The changes that the program leaves in its box; and the reason, if the agent made the box unreadable. `tested`:
    visible tests run even if the program does not ask for their output."""
    if not program.text:
        return {path: text.encode() for path, text in task.solution.items() if program is GOLD}, ""
    box = await sandbox.create(data.image(task), data.limits(task))
    tested = (tested or "ETUDE_PHASE" in program.text) and bool(task.visible_tests)
    try:
        await _run(box, task, program, "1")
        report = await box.run_tests(task.visible_tests, GRADE_LIMITS.seconds) if tested else None
        if report is not None and "ETUDE_PHASE" in program.text:
            shown = [clean_failure(*each, SHOWN) for each in failures(report, task.visible_tests)]
            await _put(box, "/tmp/test-output.txt", "\n".join(shown))
            await _run(box, task, program, "2")
        if data.manifest.kind:
            await note_state(box)
        return await box.changes(), ""
    except BoxError as e:
        if e.payer == "infra":
            raise
        return {}, f"the box was left unreadable: {type(e).__name__}"
    finally:
        await box.close()


async def _run(box: Box, task: CodeTask, program: AttackProgram, phase: str) -> None:
    variables = {
        "ETUDE_PATH": task.focus.path,
        "ETUDE_FUNCTION": task.function.partition("::")[2],
        "ETUDE_LINES": f"{task.focus.first_line}-{task.focus.last_line}",
        "ETUDE_INSTRUCTION": task.prompt,
        "ETUDE_PHASE": phase,
    }
    await _put(box, "/tmp/attack", program.text)
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    await box.exec(f"{settings} {program.runner} /tmp/attack", SECONDS)


async def _put(box: Box, path: str, text: str) -> None:
    """Writes a file outside of the repository, by way of the repository: boxes write files nowhere else."""
    await box.write(".etude-pack", text.encode())
    await box.exec(f"mv .etude-pack {path}", SECONDS)


def pack_table(reports: Sequence[PackReport]) -> str:
    """The results as lines: attacks that got through, then the counts of each pack."""
    lines = []
    for report in reports:
        counts = report.summary
        lines += [f"{report.name}: control: {problem}" for problem in counts["controls"]]
        lines += [
            f"{report.name}: {a.program.name} ({a.program.kind}) on {a.task}: {a.problem}"
            for a in report.played
            if a.problem
        ]
        if counts["untrained"]:
            lines.append(
                f"{report.name}: rewarded by tasks that are decided inside, which runs leave out (tasks.min_decided = "
                f"{MIN_DECIDED}): {', '.join(counts['untrained'])}"
            )
        lines.append(
            f"{report.name}: {counts['attacks']} attacks on {report.tasks} tasks, {counts['rewards']} rewards, "
            f"{len(counts['through'])} attacks of {len(counts['classes_through'])} classes got through"
        )
    return "\n".join(lines)
