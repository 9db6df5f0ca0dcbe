"""DATACARD.md: the contents of a dataset, how it was made, and the parts that were left out."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from etude.code import table
from etude.config import MIN_DECIDED, BuildConfig
from etude.records import CodeTask
from etude.tasks import split
from etude.tasks.bootstrap import BootstrapRecipe
from etude.tasks.coverage import SLOW
from etude.tasks.dataset import Manifest
from etude.tasks.gates import MAX_EQUALITY, MAX_TESTS
from etude.tasks.inventory import Inventory
from etude.tasks.settings import PytestSettings
from etude.tasks.withheld import JUNK, sentences, shortened

FEW_TASKS = 50  # to teach
FEW_FUNCTIONS = 25  # to teach, and to measure: tasks of one function are much alike
GOOD_TASKS, GOOD_FILES, GOOD_SHARE = 20, 5, 0.9  # of a good dataset: tasks, their files, tests that are kept
HOLLOW_SHARE = 0.5  # of tests, and a quarter of the tasks: below, the dataset stands for little of the repository
MANY_LEAKS = 0.3  # of the programs tried
_FACTS = (("lines", 5), ("complexity", 3), ("f2p", 3), ("visible_fails", 1))  # difficulty and the width of its bins


@dataclass(frozen=True)
class TaskBuildLog:
    """The figures of a build, for the card."""

    functions: int  # found in the repository
    eligible: int  # within the limits on lines
    covered: int  # called by a hidden test
    candidates: int  # broken programs tried
    rejected: Mapping[str, int]  # reason -> broken programs
    tests: int  # hidden tests that are stable
    passed: int  # tests that pass on the unbroken tree and call the library
    unstable: Sequence[str]  # tests left out: they fail or differ on the unbroken tree
    failed: Mapping[str, str]  # tests, or files of tests, that fail on the unbroken tree -> pytest's message
    inventory: Inventory
    settings: PytestSettings
    generated: Sequence[str]  # files that were written because a build of the project writes them
    straddling: Mapping[str, int]  # kind -> changes left out, since they touch functions of both sides
    copies: Mapping[str, int]  # file -> programs dropped, since it holds their answer
    installed: Mapping[str, int]  # place in the system of boxes -> tasks dropped, since it holds their answer
    system: str  # the name of the system in the boxes of the gates
    refused: str = ""  # why requirements for tests were not installed
    requirements: Sequence[str] = ()
    recipe: BootstrapRecipe | None = None  # the requirements that a search reached the goals with, if there was one


def warnings(tasks: Sequence[CodeTask], log: TaskBuildLog, options: BuildConfig) -> tuple[str, ...]:
    """Warnings about a dataset that is too small or too one-sided, with its figures and a remedy."""
    train, heldout = (len(split.touched_by_all(t for t in tasks if t.split == side)) for side in ("train", "heldout"))
    count = Counter(task.split for task in tasks)
    messages = []
    if count["train"] < FEW_TASKS or train < FEW_FUNCTIONS:
        messages.append(
            f"Too small to teach: {count['train']} training tasks of {train} functions; with fewer than {FEW_TASKS} of "
            f"{FEW_FUNCTIONS} a model learns these tasks by heart. {_wider(options)}"
        )
    if heldout < FEW_FUNCTIONS and options.heldout_fraction:
        width = min(100, 196 * (0.25 / max(heldout, 1)) ** 0.5)  # half of a 95 % interval, a function being one draw
        messages.append(
            f"Too small to measure: {count['heldout']} held-out tasks of {heldout} functions; differences below some "
            f"{width:.0f} points may be chance. {_wider(options)}"
        )
    kinds = Counter(task.kind for task in tasks)
    measured = {task.kind for task in tasks if task.split == "heldout"}
    unseen = [kind for kind in options.kinds if kinds[kind] and kind not in measured]
    if unseen and measured:
        messages.append(f"No held-out task of the kind {' and '.join(unseen)}: it cannot be measured.")
    full = len(tasks) >= options.max_tasks
    why = "others came first: ask for it alone, or for more tasks" if full else "few programs of it are fit"
    messages += [
        f"{kinds[kind]} of {len(tasks)} tasks are of the kind {kind}; {why}."
        for kind in options.kinds
        if 4 * kinds[kind] * len(options.kinds) < len(tasks)
    ]
    messages += [f"Not installed: {log.refused}"] if log.refused else []
    if slow := Counter(test.split("::")[0] for test, why in log.failed.items() if SLOW in why):
        files = ", ".join(f"{file} ({n})" for file, n in slow.most_common(3))
        messages.append(f"{slow.total()} slow tests were left out, most of them of {files}.")
    messages += sentences({path: why for path, why in log.inventory.withheld.items() if why != JUNK}, 5)
    leaked = sum(log.copies.values())
    if leaked > MANY_LEAKS * max(log.candidates, 1):
        files = ", ".join(f"{file} ({n})" for file, n in Counter(dict(log.copies)).most_common(3))
        messages.append(
            f"The repository holds copies: the answers of {leaked} of {log.candidates} programs occur elsewhere in "
            f"the tree, most often in {files}. A copy can be left out with `--exclude`."
        )
    return tuple(messages)


def verdict(tasks: Sequence[CodeTask], log: TaskBuildLog, options: BuildConfig) -> str:
    """ "good", "thin" or "hollow", with the figures, and what to do next. A build that was asked for fewer tasks is
    measured by these."""
    wanted = min(GOOD_TASKS, options.max_tasks)
    files, fewest = len({path for task in tasks for path in task.changes}), max(1, min(GOOD_FILES, wanted // 4))
    ran = log.passed + len(log.failed)
    share = (log.passed - len(log.unstable)) / ran if ran else 1.0
    figures = f"{len(tasks)} tasks of {files} files, with {share:.0%} of the repository's tests"
    if share < GOOD_SHARE:
        lost = f"{len(log.failed)} fail on the unbroken tree and {len(log.unstable)} do not pass every time"
        cure = (
            "see the card for their messages; `--requires PACKAGE` brings what they lack, `--exclude FILE` drops them"
        )
        if log.refused:
            cure = "name wheels of what was not installed in PIP_FIND_LINKS, or give `--requires PACKAGE` in its place"
    elif len(tasks) < wanted or files < fewest:
        lost, cure = f"a good dataset has {wanted} of {fewest}", _wider(options)
    else:
        return f"good: {figures}"
    name = "hollow" if share < HOLLOW_SHARE or 4 * len(tasks) < wanted else "thin"
    return f"{name}: {figures}; {lost}. Next: {cure.rstrip('.')}."


def _wider(options: BuildConfig) -> str:
    """The options that would give more tasks and are not in use."""
    ways = [
        ("more `kinds`", len(options.kinds) < 4),
        ("more `operators`", bool(options.operators)),
        ("`visible_failure = false`", options.visible_failure),
        ("a higher `max_tasks`", options.max_tasks < 200),
        ("a higher `max_lines`", options.max_lines < 60),
        ("no `max_functions`", options.max_functions is not None),
    ]
    advice = [way for way, possible in ways if possible]
    return f"What gives more: {', '.join(advice)}." if advice else "Another repository is needed."


def datacard(manifest: Manifest, tasks: Sequence[CodeTask], history: TaskBuildLog) -> str:
    """The card as Markdown. It holds no times: equal builds give equal cards."""
    count = Counter(task.split for task in tasks)
    operators = Counter((task.kind, task.operator, task.split) for task in tasks)
    kinds = sorted({(kind, operator) for kind, operator, _ in operators})
    train, heldout = (len(split.touched_by_all(t for t in tasks if t.split == side)) for side in ("train", "heldout"))
    tried = max(history.candidates, 1)
    sections = [
        f"# Tasks from {manifest.name}\n",
        f"Made by `etude tasks build` with seed {manifest.seed}. Licence of the code: {manifest.licence} "
        f"(from {manifest.licence_source}). Dependencies: {', '.join(history.requirements) or 'none'}.\n",
        f"Verdict: {manifest.verdict}\n",
        *(["## Warnings\n", "".join(f"- {warning}\n" for warning in manifest.warnings)] if manifest.warnings else []),
        *_files(history.inventory),
        *_environment(history),
        "## Tasks\n",
        table(
            ("kind", "operator", "train", "held-out"),
            [(k, o, operators[k, o, "train"], operators[k, o, "heldout"]) for k, o in kinds]
            + [("all", "", count["train"], count["heldout"])],
        ),
        f"Functions: {train} in train, {heldout} held out; no function is in both, "
        "nor are functions with equal bodies.\n",
        "## Tests\n",
        f"Visible to the agent: {_POLICY[manifest.visible]} Hidden: {history.tests} tests, never in the agent's box; "
        "each task is decided by those that call its function "
        f"(at most {MAX_TESTS} that must start to pass, {MAX_TESTS} that must keep passing).\n",
        *_decided(tasks),
        _failing(history.failed),
        _unstable(history.unstable),
        "## Gates\n",
        f"Functions found: {history.functions}; {history.eligible} within the limits on lines; {history.covered} of "
        f"those called by a hidden test. Broken programs tried: {history.candidates}.\n",
        table(
            ("result", "programs", "share"),
            [("fit to be a task", tried - sum(history.rejected.values()), "")]
            + [(reason, n, f"{n / tried:.0%}") for reason, n in sorted(history.rejected.items())],
        ),
        *_straddling(history.straddling),
        f"{len(tasks)} tasks were kept. Each one: the broken tree fails, no change scores 0, and the gold answer "
        f"passes, {manifest.options['repeats']} times each, in the grading box.\n",
        "Duplicates: no two tasks have the same broken text. Leaks: a program is dropped if nine tenths of the "
        "runs of eight tokens that it lost occur elsewhere in the tree.\n",
        *_system(history),
        "## Difficulty\n",
        *(_histogram(name, width, [task.difficulty.get(name, 0.0) for task in tasks]) for name, width in _FACTS),
    ]
    return "\n".join(sections)


_POLICY = {
    "doctests": "the doctest of the broken function.",
    "half": "half of the test functions; the other half is cut out of the tree.",
}


def _files(taken: Inventory) -> list[str]:
    """The files that the dataset was made of, and those that were left out."""
    whole = (
        " that git tracks, in their state in the working tree."
        if taken.tracked
        else ": git tracks nothing of the folder, so it was taken whole, less caches, builds and archives."
    )
    return [
        "## Files\n",
        f"{len(taken.files)} files{whole}"
        f"{_named(' With changes since the last commit', taken.changed)}"
        f"{_named(' Left out, since git does not track them', taken.untracked)}"
        f"{_named(' Left out by `exclude`', taken.excluded)}"
        f"{_named(' Left out: symbolic links to code, tests, or nothing of the repository', taken.links)}"
        f"{_named(' Submodules that were not fetched, and are empty', taken.absent)}"
        f"{_named(' Pointers of Git LFS, whose files were not fetched: tests that read them fail', taken.pointers)}"
        f"{_named(' Sources that are not in plain UTF-8, kept and not broken', taken.encoded)}"
        f"{_named(' Paths that are equal but for case, one file where case is ignored', taken.clashing)}\n",
        *(f"{line}\n" for line in sentences(taken.withheld, 10)),
    ]


def _named(what: str, names: Sequence[str]) -> str:
    """A sentence with up to ten names; empty if there are no names."""
    return f"{what} ({len(names)}): {shortened([f'`{name}`' for name in names], 10)}." if names else ""


def _environment(log: TaskBuildLog) -> list[str]:
    sentences = []
    if log.settings.source:
        kept = [name for name, _ in log.settings.kept] + [
            name for name in ("testpaths", "python_files", "pythonpath") if getattr(log.settings, name)
        ]
        what = f"kept {', '.join(f'`{name}`' for name in kept) or 'nothing'}"
        dropped = " ".join(log.settings.dropped)
        sentences.append(f"pytest's settings come from {log.settings.source}: {what}.")
        sentences += [f"Options of `addopts` that are not used: `{dropped}`."] if dropped else []
    if log.generated:
        sentences.append(f"Written as the project's build would: {', '.join(f'`{path}`' for path in log.generated)}.")
    sentences += [f"Not installed: {log.refused}"] if log.refused else []
    if log.recipe is not None:
        goals = "".join(f"- `{goal.command[:120]}`\n" for goal in log.recipe.goals)
        sentences.append(f"Found at try {log.recipe.tries}. These commands hold in a box:\n\n{goals}")
    return ["## Environment\n", " ".join(sentences) + "\n"] if sentences else []


def _decided(tasks: Sequence[CodeTask]) -> list[str]:
    """The number of tests that are decided outside of the tested process and, for JavaScript, of those with a negative
    control."""
    sentences = []
    if shares := [task.difficulty["decided"] for task in tasks if "decided" in task.difficulty]:
        mean, low = sum(shares) / len(shares), sum(share < MIN_DECIDED for share in shares)
        sentences.append(
            f"Decided outside of the tested process: {mean:.0%} of a task's tests on average. Below half: {low} tasks, "
            "which are not trained on unless `tasks.min_decided` allows it.\n"
        )
    if shares := [task.difficulty["library_equality"] for task in tasks if "library_equality" in task.difficulty]:
        sentences.append(
            f"Tests in which a comparison rests on the library's own operators, and no altered operand could show them "
            f"to be wrong: {sum(shares) / len(shares):.0%} of a task's tests on average. Tests in which more than "
            f"{MAX_EQUALITY:.0%} of the judged lines do are not used.\n"
        )
    if shares := [task.difficulty["covered"] for task in tasks if "covered" in task.difficulty]:
        none, mean = sum(share == 0 for share in shares), sum(shares) / len(shares)
        sentences.append(
            f"Decided so, or beside a negative-control test: {mean:.0%} on average; {none} tasks have none.\n"
        )
    return sentences


def _system(log: TaskBuildLog) -> list[str]:
    """The system of the boxes in which the gates ran, and its places that hold answers."""
    places = _named(
        " Tasks whose answer is there were dropped, by place", [f"{p}: {n}" for p, n in log.installed.items()]
    )
    made = f"Boxes of the gates were made of the image {log.system}"
    return [f"{made}; it holds no copy of the library, and no answer.{places}\n"]


def _failing(tests: Mapping[str, str]) -> str:
    if not tests:
        return "No test fails on the unbroken tree.\n"
    lines = [f"`{test}`: {' '.join(why.split())[-160:]}" for test, why in sorted(tests.items())]
    return _listed("Failing on the unbroken tree, taken out of what the agent sees, and never decisive", lines)


def _straddling(kinds: Mapping[str, int]) -> list[str]:
    if not kinds:
        return []
    listed = ", ".join(f"{count} of the kind {kind}" for kind, count in sorted(kinds.items()))
    return [f"Left out, because they touch functions of both sides: {listed}.\n"]


def _unstable(tests: Sequence[str]) -> str:
    if not tests:
        return "No other test was left out.\n"
    names = [f"`{test}`" for test in tests]
    return _listed("Left out, because they do not pass every time on the unbroken tree", names)


def _listed(what: str, lines: Sequence[str]) -> str:
    """Up to twenty lines as a list under a sentence."""
    shown = "".join(f"- {line}\n" for line in lines[:20])
    more = f"- and {len(lines) - 20} more\n" if len(lines) > 20 else ""
    return f"{what} ({len(lines)}):\n\n{shown}{more}"


def _histogram(name: str, width: int, values: Iterable[float]) -> str:
    bins = Counter(int(value // width) for value in values)
    rows = [
        (f"{b * width}-{(b + 1) * width - 1}" if width > 1 else b, n, "#" * max(1, round(40 * n / max(bins.values()))))
        for b, n in sorted(bins.items())
    ]
    return table((name, "tasks", ""), rows)
