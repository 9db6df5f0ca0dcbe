"""Changes of more than one function: broken classes, deleted features, reversed commits, and the tests that decide."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.code import functions as discover
from etude.code import mutate
from etude.code.functions import Function, Unit
from etude.code.mutate import MutationCandidate
from etude.config import BuildConfig
from etude.tasks import classes, commits, features, split


@dataclass(frozen=True)
class MultiFunctionChange:
    """One unit broken in one or several ways. `members` are the functions that change, `tests` those that decide, the
    most telling first."""

    unit: Unit
    programs: tuple[MutationCandidate, ...]
    members: tuple[str, ...]
    tests: tuple[str, ...]


def find(
    repository: Path, sources: Mapping[str, str], functions: Sequence[Function], callers: Mapping[str, set[str]],
    options: BuildConfig,
) -> list[MultiFunctionChange]:  # fmt: skip
    """Changes of the kinds in `options.kinds`, of each at most twice an equal share of `max_tasks`, by the seed."""
    share = max(1, options.max_tasks // len(options.kinds))
    made = {
        "class": lambda: _classes(sources, callers, options),
        "feature": lambda: _features(sources, functions, callers),
        "commit": lambda: _commits(repository, sources, functions, callers),
    }
    changes: list[MultiFunctionChange] = []
    for kind, make in made.items():
        if kind in options.kinds:
            candidates = list(make())
            random.Random(f"{options.seed} {kind}").shuffle(candidates)
            changes += candidates[: 2 * share]
    return changes


def _ranked(own: set[str], callers: Mapping[str, set[str]], path: str) -> tuple[str, ...]:
    """`own`, then as many other tests of the same module as there are: what must keep working."""
    others = {test for id, tests in callers.items() if id.startswith(f"{path}::") for test in tests} - own
    return (*sorted(own), *sorted(others))


def _classes(
    sources: Mapping[str, str], callers: Mapping[str, set[str]], options: BuildConfig
) -> Iterator[MultiFunctionChange]:
    for path, text in sources.items():
        for unit in discover.classes(path, text):
            members = tuple(id for id in callers if id.startswith(f"{unit.id}."))
            tests = {test for id in members for test in callers[id]}
            if not tests or unit.complexity < classes.MIN_COMPLEXITY:
                continue
            mutants = mutate.mutants(text, unit, options.seed, classes.OPERATORS)
            mutants.sort(key=lambda mutant: mutant.operator == "class_shuffle")  # rarely noticed: last
            allowed = set(options.operators or classes.OPERATORS)
            programs = tuple(MutationCandidate("class", mutant) for mutant in mutants if mutant.operator in allowed)
            if programs:
                yield MultiFunctionChange(unit, programs, members, _ranked(tests, callers, path))


def _features(
    sources: Mapping[str, str], functions: Sequence[Function], callers: Mapping[str, set[str]]
) -> Iterator[MultiFunctionChange]:
    for members in features.slices(functions, callers):
        program = features.deletion(members, sources)
        if program is not None:
            entry = members[0]
            ids = tuple(member.id for member in members)
            yield MultiFunctionChange(entry, (program,), ids, _ranked(callers[entry.id], callers, entry.path))


def _commits(
    repository: Path, sources: Mapping[str, str], functions: Sequence[Function], callers: Mapping[str, set[str]]
) -> Iterator[MultiFunctionChange]:
    by_id = {function.id: function for function in functions}
    everything = {test for tests in callers.values() for test in tests}
    for reversal in commits.reversals(repository, sources, functions):
        touched = {test for test in everything if test.split("::")[0] in reversal.tests}
        own = touched & {test for id in reversal.members for test in callers.get(id, ())}
        unit = by_id[reversal.members[0]]
        if own:
            yield MultiFunctionChange(unit, (reversal.program,), reversal.members, _ranked(own, callers, unit.path))


def side(change: MultiFunctionChange, heldout: set[str], seed: int, fraction: float) -> str | None:
    """The split of a change: "train", "heldout", or None if it breaks functions of both. A class is drawn by itself."""
    if change.programs[0].kind == "class":
        return "heldout" if split.rank(seed, change.unit.id)[0] < 256 * fraction else "train"
    inside = [member in heldout for member in change.members]
    return None if any(inside) and not all(inside) else "heldout" if all(inside) else "train"
