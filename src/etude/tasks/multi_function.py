"""Changes of more than one function: broken classes, deleted features, reversed commits, and the tests that decide."""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.code import MutationCandidate, mutants
from etude.code import functions as discover
from etude.code.functions import Function, Unit
from etude.config import BuildConfig
from etude.tasks import classes, commits, features, split

_TRIES = 2  # broken programs of a class for each wanted task


@dataclass(frozen=True)
class MultiFunctionChange:
    """A broken program. `members` are the functions that change, `reach` the functions whose tests show whether it
    works, and `tests` the tests that decide, the most telling first."""

    unit: Unit
    program: MutationCandidate
    members: frozenset[str]
    reach: frozenset[str]
    tests: tuple[str, ...]


def find(
    repository: Path,
    sources: Mapping[str, str],
    functions: Sequence[Function],
    callers: Mapping[str, set[str]],
    modules: Sequence[str],
    options: BuildConfig,
) -> list[MultiFunctionChange]:
    """Changes of the kinds in `options.kinds`, chosen by the seed; of each kind at most twice an equal share of
    `max_tasks`."""
    share = max(1, options.max_tasks // len(options.kinds))
    made = {
        "class": lambda: _classes(sources, callers, options),
        "feature": lambda: _features(sources, functions, callers),
        "commit": lambda: _commits(repository, sources, functions, callers, modules),
    }
    changes: list[MultiFunctionChange] = []
    for kind, make in made.items():
        if kind in options.kinds:
            candidates = list(make())
            random.Random(f"{options.seed} {kind}").shuffle(candidates)
            changes += candidates[: 2 * share]
    return changes


def _ranked(own: set[str], callers: Mapping[str, set[str]], path: str) -> tuple[str, ...]:
    """The tests `own`, then as many other tests of the same module, which must keep passing."""
    others = {test for id, tests in callers.items() if id.startswith(f"{path}::") for test in tests} - own
    return (*sorted(own), *sorted(others))


def _classes(
    sources: Mapping[str, str], callers: Mapping[str, set[str]], options: BuildConfig
) -> Iterator[MultiFunctionChange]:
    for path, text in sources.items():
        for unit in discover.classes(path, text):
            methods = {f.id for f in discover.functions(path, text) if f.id.startswith(f"{unit.id}.")}
            tests = {test for id, names in callers.items() if id.startswith(f"{unit.id}.") for test in names}
            if not tests or unit.complexity < classes.MIN_COMPLEXITY:
                continue
            candidates = mutants(text, unit, options.seed, classes.OPERATORS)
            candidates.sort(key=lambda mutant: mutant.operator == "class_shuffle")  # tests rarely notice it: last
            allowed = set(options.operators or classes.OPERATORS)
            candidates = [mutant for mutant in candidates if mutant.operator in allowed][
                : _TRIES * options.per_function
            ]
            for mutant in candidates:
                program = MutationCandidate("class", mutant)
                gone = _touched(program, unit)
                if mutant.operator == "class_shuffle":
                    gone |= {unit.id, *methods}  # a diff cannot tell which methods moved
                yield MultiFunctionChange(unit, program, gone, frozenset(methods), _ranked(tests, callers, path))


def _features(
    sources: Mapping[str, str], functions: Sequence[Function], callers: Mapping[str, set[str]]
) -> Iterator[MultiFunctionChange]:
    for members in features.slices(functions, callers):
        program = features.deletion(members, sources)
        if program is not None:
            entry = members[0]
            tests = _ranked(callers[entry.id], callers, entry.path)
            reach = frozenset(member.id for member in members)
            yield MultiFunctionChange(entry, program, _touched(program, entry), reach, tests)


def _commits(
    repository: Path,
    sources: Mapping[str, str],
    functions: Sequence[Function],
    callers: Mapping[str, set[str]],
    modules: Sequence[str],
) -> Iterator[MultiFunctionChange]:
    by_id = {function.id: function for function in functions}
    everything = {test for tests in callers.values() for test in tests}
    for reversal in commits.reversals(repository, sources, functions, modules):
        touched = {test for test in everything if test.split("::")[0] in reversal.tests}
        own = touched & {test for id in reversal.members for test in callers.get(id, ())}
        unit = by_id[reversal.members[0]]
        if own:
            tests = _ranked(own, callers, unit.path)
            reach = frozenset(reversal.members)
            yield MultiFunctionChange(unit, reversal.program, _touched(reversal.program, unit), reach, tests)


def _touched(program: MutationCandidate, unit: Unit) -> frozenset[str]:
    pairs = [(unit.path, program.mutant), *program.elsewhere]
    return frozenset[str]().union(*(split.touched(path, mutant.source, mutant.text) for path, mutant in pairs))


def find_heldout(eligible: Sequence[Unit], changes: Sequence[MultiFunctionChange], options: BuildConfig) -> set[str]:
    """The functions to hold out, chosen so that every kind has tasks that touch held-out functions only."""
    sets: dict[str, list[frozenset[str]]] = defaultdict(list)
    for change in changes:
        sets[change.program.kind].append(change.members)
    return split.heldout_functions(eligible, options.heldout_fraction, options.seed, sets)
