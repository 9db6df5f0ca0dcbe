"""Try broken programs, function by function in waves, until there are enough tasks. Equal seeds give equal tasks."""

from __future__ import annotations

import ast
import random
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from etude.records import Task
from etude.tasks import gates, mutate
from etude.tasks.discover import Function
from etude.tasks.gates import Bench, Candidate, Rejected
from etude.tasks.leaks import LeakIndex
from etude.tasks.options import BuildOptions

Progress = Callable[[str, int, int], None]  # stage, done, total
LEAK_SHARE = 0.9  # of a program's lost text found elsewhere, from which on it is dropped; siblings often share half
_ATTEMPTS = 3  # broken programs tried per wanted task


@dataclass
class Target:
    """A function to break, with its tests and what came of it so far."""

    function: Function
    source: str  # its module
    split: str
    visible: tuple[str, ...]
    hidden: tuple[str, ...]
    telling: list[Task] = field(default_factory=list)  # tasks whose visible tests fail too
    spare: list[Task] = field(default_factory=list)

    @property
    def good(self) -> int:
        """Tasks that need no better ones: without visible tests none can be telling."""
        return len(self.telling) + (0 if self.visible else len(self.spare))


@dataclass(frozen=True)
class Found:
    tasks: list[Task]
    tried: int
    rejected: Counter[str]  # reason -> programs


async def search(bench: Bench, targets: Sequence[Target], leaks: LeakIndex, progress: Progress) -> Found:
    """Gate broken programs of `targets` until there are `max_tasks` good ones, or no programs are left.

    A wave holds one program of every function that still needs one, so what is tried does not depend on timing.
    """
    options = bench.options
    targets = list(targets)
    random.Random(options.seed).shuffle(targets)
    rejected: Counter[str] = Counter()
    programs = [_programs(target, options, leaks, rejected) for target in targets]
    wanted = options.per_function * len(options.kinds)
    seen: set[str] = set()
    for _ in range(_ATTEMPTS * wanted):
        wave: list[tuple[Target, Candidate]] = []
        for target, queue in zip(targets, programs, strict=True):
            candidate = _next(queue, seen, rejected) if target.good < wanted else None
            if candidate is not None:
                wave.append((target, candidate))
        if not wave:
            break
        results = await gates.in_order(lambda pair: gates.gate(bench, pair[1]), wave, options.workers)
        for (target, _), result in zip(wave, results, strict=True):
            if isinstance(result, Rejected):
                rejected[result.value] += 1
            else:
                (target.telling if result.difficulty["visible_fails"] else target.spare).append(result)
        found = sum(target.good for target in targets)
        progress("gating tasks", min(found, options.max_tasks), options.max_tasks)
        if found >= options.max_tasks:
            break
    accepted = sum(len(target.telling) + len(target.spare) for target in targets)
    return Found(tasks=_select(targets, options, wanted), tried=accepted + sum(rejected.values()), rejected=rejected)


def _programs(target: Target, options: BuildOptions, leaks: LeakIndex, rejected: Counter[str]) -> Iterator[Candidate]:
    """Broken programs of a function in the order to try them; those whose answer can be copied are counted out."""
    broken: list[tuple[str, mutate.Mutant]] = []
    if "removal" in options.kinds:
        removed = mutate.removal(target.source, target.function)
        broken += [("removal", removed)] if removed else []
    if "mutation" in options.kinds:
        broken += [("mutation", mutant) for mutant in mutate.mutants(target.source, target.function, options.seed)]
    for kind, mutant in broken:
        leak = leaks.share(mutant.original_body, mutant.body)
        if leak >= LEAK_SHARE:
            rejected[Rejected.LEAK.value] += 1
            continue
        yield Candidate(
            function=target.function,
            kind=kind,
            mutant=mutant,
            split=target.split,
            visible=target.visible,
            hidden=target.hidden,
            leak=leak,
        )


def _next(queue: Iterator[Candidate], seen: set[str], rejected: Counter[str]) -> Candidate | None:
    for candidate in queue:
        body = _meaning(candidate.mutant.snippet)
        if body not in seen:
            seen.add(body)
            return candidate
        rejected[Rejected.DUPLICATE.value] += 1
    return None


def _meaning(snippet: str) -> str:
    """The parameters and statements of a function, whatever its name, layout and docstring."""
    node = ast.parse(textwrap.dedent(snippet)).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return ast.dump(node.args) + "".join(ast.dump(statement) for statement in body)


def _select(targets: Sequence[Target], options: BuildOptions, wanted: int) -> list[Task]:
    """At most `wanted` tasks of a function and `max_tasks` in all: telling ones first, functions taking turns."""
    chosen: list[Task] = []
    used: Counter[str] = Counter()
    for name in ("telling", "spare"):
        for turn in range(_ATTEMPTS * wanted):
            for target in targets:
                tasks = getattr(target, name)
                if turn < len(tasks) and used[target.function.id] < wanted and len(chosen) < options.max_tasks:
                    chosen.append(tasks[turn])
                    used[target.function.id] += 1
    return chosen
