"""Changes of more than one function: broken classes, deleted features, reversed commits, and the tests that decide."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    callers: split.Callers,
    modules: Sequence[str],
    options: BuildConfig,
) -> list[MultiFunctionChange]:
    """Changes of the kinds in `options.kinds`, chosen by the seed; of each kind at most twice an equal share of
    `max_tasks`."""
    share = max(1, options.max_tasks // len(options.kinds))
    made = {  # by generators: of other kinds, none is made
        "class": _classes(sources, callers, options),
        "feature": _features(sources, functions, callers),
        "commit": _commits(repository, sources, functions, callers, modules, options.requests),
    }
    changes: list[MultiFunctionChange] = []
    for kind, changes_of_kind in made.items():
        if kind in options.kinds:
            candidates = list(changes_of_kind)
            random.Random(f"{options.seed} {kind}").shuffle(candidates)
            changes += candidates[: 2 * share]
    return changes


def _change(
    unit: Unit, program: MutationCandidate, reach: Iterable[str], own: set[str], callers: split.Callers
) -> MultiFunctionChange:
    """A change that the tests `own` decide, and after these the other tests of the module, which must keep passing."""
    pairs = [(unit.path, program.mutant), *program.elsewhere]
    members = frozenset(id for path, mutant in pairs for id in split.touched(path, mutant.source, mutant.text))
    others = _calling(f"{unit.path}::", callers) - own
    return MultiFunctionChange(unit, program, members, frozenset(reach), (*sorted(own), *sorted(others)))


def _calling(prefix: str, callers: split.Callers) -> set[str]:
    """The tests that call functions whose ids begin with `prefix`."""
    return {test for id, tests in callers.items() if id.startswith(prefix) for test in tests}


def _classes(sources: Mapping[str, str], callers: split.Callers, options: BuildConfig) -> Iterator[MultiFunctionChange]:
    for path, text in sources.items():
        for unit in discover.classes(path, text):
            methods = {f.id for f in discover.functions(path, text) if f.id.startswith(f"{unit.id}.")}
            tests = _calling(f"{unit.id}.", callers)
            if not tests or unit.complexity < classes.MIN_COMPLEXITY:
                continue
            allowed = set(options.operators or classes.OPERATORS)
            candidates = [m for m in mutants(text, unit, options.seed, classes.OPERATORS) if m.operator in allowed]
            candidates.sort(key=lambda mutant: mutant.operator == "class_shuffle")  # tests rarely notice it: last
            for mutant in candidates[: _TRIES * options.per_function]:
                change = _change(unit, MutationCandidate("class", mutant), methods, tests, callers)
                if mutant.operator == "class_shuffle":  # a diff cannot tell which methods moved
                    change = replace(change, members=change.members | {unit.id, *methods})
                yield change


def _features(
    sources: Mapping[str, str], functions: Sequence[Function], callers: split.Callers
) -> Iterator[MultiFunctionChange]:
    for members in features.slices(functions, callers):
        program = features.deletion(members, sources)
        if program is not None:
            entry = members[0]
            yield _change(entry, program, (member.id for member in members), callers[entry.id], callers)


def _commits(
    repository: Path,
    sources: Mapping[str, str],
    functions: Sequence[Function],
    callers: split.Callers,
    modules: Sequence[str],
    requests: str | None,
) -> Iterator[MultiFunctionChange]:
    words = commits.users_requests(Path(requests)) if requests is not None else {}
    by_id = {function.id: function for function in functions}
    everything = {test for tests in callers.values() for test in tests}
    for program, tests, members in commits.reversals(repository, sources, functions, modules, words):
        touched = {test for test in everything if test.split("::")[0] in tests}
        own = touched & {test for id in members for test in callers.get(id, ())}
        if own:
            yield _change(by_id[members[0]], program, members, own, callers)
