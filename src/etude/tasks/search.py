"""Tries broken programs, function by function in waves, until there are enough tasks. Equal seeds give equal tasks."""

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from etude.code import OPERATORS, MutationCandidate, body_removal, combined_mutants, mutants, parse_snippet
from etude.code.functions import Function, Unit
from etude.config import BuildConfig
from etude.records import CodeTask
from etude.tasks import gates, javascript
from etude.tasks.gates import Bench, Candidate, ProvisionalTask, Rejected
from etude.tasks.javascript import JsFunction
from etude.tasks.leaks import LeakIndex

Progress = Callable[[str, int, int], None]  # stage, done, total
LEAK_SHARE = 0.9  # a program is dropped if so much of its lost text occurs elsewhere; siblings often share half
_ATTEMPTS = 3  # broken programs tried per wanted task
_BATCH = 20  # tasks between two calls of `progress`


@dataclass
class Target:
    """A unit to break, its tests, and its provisional tasks so far. `programs` are the broken versions to try; for a
    function, the search makes them when it begins."""

    function: Unit
    source: str  # its module
    split: str
    visible: tuple[str, ...]
    hidden: tuple[str, ...]
    programs: tuple[MutationCandidate, ...] = ()
    telling: list[ProvisionalTask] = field(default_factory=list)  # the visible tests fail too
    spare: list[ProvisionalTask] = field(default_factory=list)

    @property
    def good(self) -> int:
        """The number of provisional tasks that need no replacement: the telling ones, or all if there are no visible
        tests."""
        return len(self.telling) + (0 if self.visible else len(self.spare))


@dataclass(frozen=True)
class SearchResult:
    """The proved tasks, and the number of programs that were tried."""

    tasks: list[CodeTask]
    tried: int
    rejected: Counter[str]  # reason -> programs
    copies: Counter[str]  # file -> programs whose answer it holds


async def search(bench: Bench, targets: Sequence[Target], leaks: LeakIndex, progress: Progress) -> SearchResult:
    """Find up to `max_tasks` proved tasks, and fewer only if the programs run out."""
    targets = list(targets)
    random.Random(bench.options.seed).shuffle(targets)
    # Rare kinds go first: classes, features and commits would drown among the functions.
    targets.sort(key=lambda target: not target.programs)
    rejected: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    seen: set[str] = set()
    programs = [_programs(target, bench.options, leaks, seen, rejected, copies) for target in targets]
    await _probe(bench, targets, programs, rejected, progress)
    tasks = await _prove(bench, targets, rejected, progress)
    fit = sum(len(target.telling) + len(target.spare) for target in targets)
    return SearchResult(tasks=tasks, tried=fit + rejected.total(), rejected=rejected, copies=copies)


async def _probe(
    bench: Bench,
    targets: Sequence[Target],
    programs: Sequence[Iterator[Candidate]],
    rejected: Counter[str],
    progress: Progress,
) -> None:
    """Try programs in waves until there are `max_tasks` good ones. A wave holds one program of every function that
    still needs one, so the choice of programs does not depend on timing."""
    options = bench.options
    for _ in range(_ATTEMPTS * options.wanted):
        wave = [
            (target, candidate)
            for target, queue in zip(targets, programs, strict=True)
            if target.good < options.wanted and (candidate := next(queue, None)) is not None
        ]
        results = await gates.in_order(lambda pair: gates.probe(bench, pair[1]), wave, options.workers)
        for (target, _), result in zip(wave, results, strict=True):
            if isinstance(result, Rejected):
                rejected[result] += 1
            else:
                (target.telling if result.task.difficulty["visible_fails"] else target.spare).append(result)
        good = sum(target.good for target in targets)
        progress("breaking functions", min(good, options.max_tasks), options.max_tasks)
        if not wave or good >= options.max_tasks:
            return


async def _prove(bench: Bench, targets: Sequence[Target], rejected: Counter[str], progress: Progress) -> list[CodeTask]:
    """Prove the best probes. A probe that fails is replaced by the next one."""
    proved: set[str] = set()
    while True:
        chosen = _select(targets, bench.options)
        pairs = [(target, provisional) for target, provisional in chosen if provisional.task.id not in proved]
        if not pairs:
            return [provisional.task for _, provisional in chosen]
        for start in range(0, len(pairs), _BATCH):
            batch = pairs[start : start + _BATCH]

            before, total = len(chosen) - len(pairs) + start, len(chosen)
            results = await gates.in_order(
                lambda pair: gates.prove(bench, pair[1]),
                batch,
                bench.options.workers,
                lambda done, _, before=before, total=total: progress("proving tasks", before + done, total),
            )
            for (target, provisional), reason in zip(batch, results, strict=True):
                if reason is None:
                    proved.add(provisional.task.id)
                    continue
                rejected[reason] += 1
                (target.telling if provisional in target.telling else target.spare).remove(provisional)
            progress("proving tasks", len(proved), len(chosen))


def _programs(
    target: Target,
    options: BuildConfig,
    leaks: LeakIndex,
    seen: set[str],
    rejected: Counter[str],
    copies: Counter[str],
) -> Iterator[Candidate]:
    """Broken programs of a function in the order in which they are tried. Programs whose answer can be copied, and
    those that mean the same as one that was `seen`, are left out and counted."""
    for broken in target.programs or _broken(target, options):
        parts = [broken.mutant, *dict(broken.elsewhere).values()]
        leak, worst = max(
            ((leaks.share(part.original_body, part.body), part) for part in parts), key=lambda pair: pair[0]
        )
        if leak >= LEAK_SHARE:
            rejected[Rejected.LEAK] += 1
            copies[leaks.place(target.function.path, worst.original_body, worst.body)] += 1
            continue
        candidate = Candidate(
            function=target.function,
            broken=broken,
            split=target.split,
            visible=target.visible,
            hidden=target.hidden,
            leak=leak,
        )
        key = _key(candidate)
        if key in seen:
            rejected[Rejected.DUPLICATE] += 1
            continue
        seen.add(key)
        yield candidate


def _broken(target: Target, options: BuildConfig) -> list[MutationCandidate]:
    """The broken versions of one function, with its removal at a seeded place among them."""
    function = target.function
    if isinstance(function, JsFunction):
        return javascript.broken(target.source, function, options)
    assert isinstance(function, Function)
    programs: list[MutationCandidate] = []
    allowed = set(options.operators or OPERATORS)
    if "mutation" in options.kinds:
        single = mutants(target.source, function, options.seed)
        programs += [MutationCandidate("mutation", mutant) for mutant in single if mutant.operator in allowed]
    if "combined" in options.kinds:
        several = combined_mutants(target.source, function, options.seed, allowed)
        combined = [MutationCandidate("combined", mutant, sites=mutant.operator.count("+") + 1) for mutant in several]
        turns = [combined, programs]
        random.Random(f"{options.seed} {function.id} turns").shuffle(turns)
        programs = [broken for pair in zip_longest(*turns) for broken in pair if broken is not None]
    removed = body_removal(target.source, function) if "removal" in options.kinds else None
    if removed is not None:
        # Not first for every function: a small dataset would hold removals alone.
        turn = random.Random(f"{options.seed} {function.id}").randrange(options.wanted)
        programs.insert(turn, MutationCandidate("removal", removed))
    return programs


def _key(candidate: Candidate) -> str:
    """A text that two programs of the same meaning share."""
    broken = candidate.broken
    # Removed bodies are all alike, but their solutions differ.
    text = broken.mutant.original if broken.kind in ("removal", "feature") else broken.mutant.snippet
    if broken.kind == "commit":  # a snippet shows nothing of lines that are only deleted
        text = "\0".join(candidate.changes.values())
    # One function means the same whatever its layout and name; of several, or of parts of one, the text is taken.
    whole = broken.kind in ("mutation", "removal", "combined") and candidate.function.path.endswith(".py")
    return f"{broken.kind} {_meaning(text) if whole else text}"


def _meaning(snippet: str) -> str:
    """The parameters and statements of a function, without its name, layout and docstring."""
    node = parse_snippet(snippet)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return ast.dump(node.args) + "".join(ast.dump(statement) for statement in body)


def _select(targets: Sequence[Target], options: BuildConfig) -> list[tuple[Target, ProvisionalTask]]:
    """At most `wanted` tasks of each function and `max_tasks` in all: telling ones first, with functions taking
    turns."""
    chosen: list[tuple[Target, ProvisionalTask]] = []
    used: Counter[str] = Counter()
    for name in ("telling", "spare"):
        for turn in range(_ATTEMPTS * options.wanted):
            for target in targets:
                available = getattr(target, name)
                full = used[target.function.id] >= options.wanted or len(chosen) >= options.max_tasks
                if turn < len(available) and not full:
                    chosen.append((target, available[turn]))
                    used[target.function.id] += 1
    return chosen
