"""`etude tasks build`: makes a dataset of gated tasks from a repository.

discover functions -> trace which tests call them -> choose visible and hidden tests -> break functions -> gates -> save
"""

import asyncio
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from etude.code import OPERATORS, SCRIPT_SUFFIXES, find_licence, install_wheels, is_script, project_name
from etude.code import functions as discover
from etude.code.functions import Function, Unit
from etude.config import BuildConfig, SandboxConfig
from etude.errors import UserError
from etude.grading import open_sandbox
from etude.sandbox import Image, Limits, Sandbox
from etude.sandbox.egress import wheel_project
from etude.tasks import (
    bootstrap,
    card,
    classes,
    coverage,
    dataset,
    environment,
    gates,
    histories,
    installed,
    inventory,
    javascript,
    leaks,
    multi_function,
    node,
    split,
    synthesis,
    system_index,
)
from etude.tasks.bootstrap import OpenBoxes
from etude.tasks.gates import MAX_TESTS, Bench, Rejected
from etude.tasks.git_history import Past
from etude.tasks.javascript import JsFunction
from etude.tasks.leaks import LeakIndex
from etude.tasks.multi_function import MultiFunctionChange
from etude.tasks.search import Progress, Target, search
from etude.tasks.survey import Survey, read_functions, survey_repository

_TRACE_SECONDS = 600.0
_RECORDED = BuildConfig.model_fields.keys() - {"write_tests", "requests"}  # options that a manifest holds
_ADVICE: dict[str, str] = {
    Rejected.LEAK: "the repository holds this code twice: leave the copy out with `--exclude FOLDER`",
    Rejected.HANGS: "its tests are slow: give more time with `--hang-seconds 30`",
    Rejected.SILENT: "accept programs that no visible test notices with `--no-visible-failure`",
}
_BESIDE_BYTES = 4 << 20
_SOURCES = (".py", ".pyi", ".pyx", ".pxd", ".so", *SCRIPT_SUFFIXES)
_CAP = 3 * MAX_TESTS  # hidden tests that may decide one task, before those that fail at times are left out
_SCRIPT_FILES = 3  # of JavaScript tests that decide one task, and that its agent may run


def build_dataset(
    repo: Path,
    out: Path,
    options: BuildConfig,
    progress: Progress,
    writer: synthesis.Writer | None = None,
    boxes: SandboxConfig | None = None,
) -> dataset.Dataset:
    """Make a dataset of gated tasks from the repository at `repo` in the folder `out`. `writer` writes tests for
    functions that no test calls (`synthesis.py`); by default `options.write_tests` does. `boxes` is the table [sandbox]
    of the boxes in which the suite and the gates run. All files are written to
    `out`.incomplete, which is renamed at the end. Raises UserError if the repository has no Python code, no tests that
    pass, or nothing to break; if a file does not parse; if `out` exists; or for an unknown operator."""
    check_operators(options)
    if not repo.is_dir():
        raise UserError(f"{repo} is not a folder; give the root of a Python repository.")
    dataset.check_free(out)
    if writer is None and options.write_tests is not None:
        writer = synthesis.by_command(options.write_tests)
    facts = survey_repository(repo, options.exclude)
    root, place = repo.resolve(), out.resolve()
    if not facts.inventory.tracked and place.is_relative_to(root):
        path = place.relative_to(root).as_posix()
        if not inventory.excludes(f"{path}/_", options.exclude):  # the next build would count the dataset as a part
            raise UserError(
                f"{out} lies inside the repository and would become part of it; choose a folder outside, or leave it "
                f"out with `--exclude {path.partition('/')[0]}`."
            )
    sources, functions = read_functions(repo, facts)
    past = histories.read(repo, project_name(repo), facts.inventory.files)
    with dataset.unfinished(out) as work:
        tree = work / "whole"
        discover.copy(repo, tree, [path for path in facts.layout.files if path not in facts.generated])
        for path, text in facts.generated.items():
            (tree / path).write_text(text, encoding="utf-8")
        opened = partial(open_sandbox, boxes, packages=[wheel_project(project_name(repo))])
        plan = _BuildPlan(repo, tree, work, options, progress, facts, past, sources, functions, writer, boxes, opened)
        asyncio.run(_run(plan))
    return dataset.load_dataset(out)


def check_operators(options: BuildConfig) -> None:
    """Raises UserError if `options` name a mutation operator that does not exist."""
    known = {**OPERATORS, **classes.OPERATORS}
    if unknown := sorted(set(options.operators) - known.keys()):
        raise UserError(f"unknown operator {unknown[0]}; there are {', '.join(sorted(known))}")


@dataclass(frozen=True)
class _BuildPlan:
    repo: Path
    tree: Path  # a copy of the files that the dataset is made of
    work: Path
    options: BuildConfig
    progress: Progress
    facts: Survey  # its generated files are in the tree alone
    past: Past
    sources: Mapping[str, str]  # path -> text
    functions: Sequence[Unit]
    writer: synthesis.Writer | None
    boxes: SandboxConfig | None
    open: OpenBoxes

    @property
    def eligible(self) -> list[Unit]:
        return [f for f in self.functions if self.options.min_lines <= f.body_lines <= self.options.max_lines]


async def _run(plan: _BuildPlan) -> None:
    options, work, (licence_name, licence_source) = plan.options, plan.work, find_licence(plan.repo)
    async with plan.open(workers=options.workers, memo=0) as sandbox:
        prepared = await _prepare(plan, sandbox)
        plan.progress("reading the system of boxes", 0, 1)
        systems = await asyncio.to_thread(system_index.indexes, sandbox)
        library = installed.library_of(project_name(plan.repo), plan.tree, plan.facts.layout.source_roots)
        installed.refuse_copies(library, systems, work / "site")
        policy, shown = _write_trees(plan, prepared)
        bench = Bench(
            sandbox=sandbox,
            name=project_name(plan.repo),
            repository=work / "repository",
            site=work / "site",
            hidden=work / "hidden",
            source_roots=plan.facts.layout.source_roots,
            licence=licence_name,
            options=options,
        )
        callers = prepared.callers
        if plan.writer is not None:
            callers = await _write_tests(plan, bench, callers, plan.writer)
        drawn = await _targets(plan, bench, callers, policy, shown)
        searched = await search(bench, drawn.targets, LeakIndex(bench.repository), plan.progress)
        system = sandbox.image_name
    _cut_out(bench.repository, drawn.unstable)
    copied = leaks.stored({"repository": bench.repository, "site": bench.site}, searched.tasks)
    in_system = installed.held(systems, [task for task in searched.tasks if task.id not in copied])
    for reason, places in ((Rejected.LEAK, copied), (Rejected.INSTALLED, in_system)):
        searched.rejected.update({reason: len(places)} if places else {})
    tasks = [task for task in searched.tasks if task.id not in {*copied, *in_system}]
    for folder in (work / "written", plan.tree):  # not earlier, since folders of an open sandbox must not change
        shutil.rmtree(folder, ignore_errors=True)
    if not tasks:
        raise _no_task(plan.repo, searched.rejected, in_system)
    commits = histories.build(plan.past, bench.repository, plan.facts.layout.tests, tasks, work)
    fit = searched.tried - searched.rejected.total()
    history = card.TaskBuildLog(
        functions=len(plan.functions),
        eligible=len(plan.eligible),
        covered=len(drawn.functions),
        candidates=searched.tried,
        rejected=searched.rejected,
        tests=len(drawn.stable),
        passed=len({test for tests in prepared.callers.values() for test in tests}),
        unstable=sorted(drawn.unstable),
        failed=prepared.failed,
        inventory=plan.facts.inventory,
        settings=plan.facts.pytest,
        generated=tuple(plan.facts.generated),
        requirements=prepared.requirements,
        refused=prepared.refused,
        recipe=prepared.recipe,
        straddling=drawn.straddling,
        copies=searched.copies,
        installed=Counter(in_system.values()),
        system=system,
    )
    manifest = dataset.Manifest(
        format=dataset.DATASET_FORMAT,
        name=bench.name,
        licence=licence_name,
        licence_source=licence_source,
        seed=options.seed,
        python_path=plan.facts.layout.python_path,
        source_roots=plan.facts.layout.source_roots,
        visible=policy,
        options=options.model_dump(mode="json", include=_RECORDED),
        digests={},
        counts={"functions": len(drawn.functions), "candidates": searched.tried, "fit": fit, "commits": commits},
        warnings=card.warnings(tasks, history, options),
        verdict=card.verdict(tasks, history, options),
        image=system if plan.boxes is not None and plan.boxes.image else "",
        services=tuple(service.name for service in (plan.boxes.services if plan.boxes is not None else ())),
    )
    made = dataset.save(work, manifest, tasks)
    (work / "DATACARD.md").write_text(card.datacard(made.manifest, made.tasks, history), "utf-8")


def _no_task(repo: Path, rejected: Counter[str], in_system: Mapping[str, str]) -> UserError:
    """The error for a repository that gives no task. `in_system` maps tasks to places of boxes with their answer."""
    reasons = rejected.most_common(3)
    advice = _ADVICE.get(reasons[0][0], "add tests") if reasons else "add tests"
    if in_system and reasons[0][0] == Rejected.INSTALLED:
        advice = f"leave {Counter(in_system.values()).most_common(1)[0][0]} out of the image with `exclude`"
    listed = ", ".join(f"{reason}: {n}" for reason, n in reasons)
    return UserError(f"no broken program of {repo} passed the gates ({listed}); {advice}.")


@dataclass(frozen=True)
class _Prepared:
    """The result of the first runs of the suite, and the packages that they needed."""

    callers: split.Callers
    requirements: Sequence[str]
    failed: Mapping[str, str]  # test, or file that cannot be collected -> the end of pytest's message
    recipe: bootstrap.BootstrapRecipe | None = None
    refused: str = ""  # why requirements for tests were not installed


async def _prepare(plan: _BuildPlan, sandbox: Sandbox) -> _Prepared:
    """Install the requirements of the tests into `work`/site, and run the suite."""
    plan.progress("installing dependencies", 0, 1)
    facts, options = plan.facts, plan.options
    scripts = [f for f in plan.functions if isinstance(f, JsFunction)]
    if scripts:
        recipe, callers, refused = await node.prepare(
            plan.tree, facts.layout, plan.work, scripts, options, plan.progress, plan.repo, plan.open
        )
        return _Prepared(callers, recipe.requirements, {}, recipe, refused)
    name = project_name(plan.repo).removesuffix(f"-{facts.version}")

    def install(wanted: Sequence[str], site: Path) -> None:
        install_wheels(wanted, site, python=sandbox.python)
        environment.finish(site, plan.tree, name, facts.version, facts.pytest)

    if options.bootstrap == "declared":
        result = await environment.find(
            plan.tree, plan.work, options.requires, install, lambda site: _trace(plan, sandbox, site)
        )
        recipe = None
    else:
        recipe = await bootstrap.find(
            plan.tree, facts.layout, plan.work, options.bootstrap, install, plan.repo, plan.open
        )
        result = environment.PythonEnvironment(recipe.requirements, await _trace(plan, sandbox, plan.work / "site"))
    trace = result.trace
    if not trace.passed:
        raise environment.explained(plan.repo, trace, result.refused)
    return _Prepared(trace.callers, result.requirements, trace.failed | trace.broken, recipe, result.refused)


async def _trace(plan: _BuildPlan, sandbox: Sandbox, site: Path) -> coverage.SuiteTrace:
    """Run the whole suite once on the unchanged repository."""
    tell = partial(plan.progress, "running the test suite")
    tell(0, 1)
    box = await sandbox.create(Image(plan.tree, site, {}), Limits(seconds=_TRACE_SECONDS))
    try:
        return await coverage.trace(box, plan.facts.layout, _TRACE_SECONDS, tell)
    finally:
        await box.close()


async def _write_tests(
    plan: _BuildPlan, bench: Bench, callers: split.Callers, writer: synthesis.Writer
) -> split.Callers:
    """Returns `callers` together with the tests written for functions without tests; their files join the hidden
    ones."""
    plan.progress("writing tests", 0, 1)
    missing = [f for f in plan.eligible if f.id not in callers and isinstance(f, Function)]
    folder = plan.work / "written"
    kept = await synthesis.write(
        bench.sandbox, bench.image({}), missing, plan.sources, writer, folder, plan.options.seed
    )
    files = {test.split("::")[0] for tests in kept.values() for test in tests}
    discover.copy(folder, bench.hidden, sorted(files))
    return {**callers, **kept}


def _write_trees(plan: _BuildPlan, prepared: _Prepared) -> tuple[str, set[str]]:
    """Write repository/ and hidden/. Returns the policy ("doctests" or "half") and the visible test functions. Tests
    that fail on the unbroken tree are not visible either."""
    callers, layout, repository = prepared.callers, plan.facts.layout, plan.work / "repository"
    policy = plan.options.visible
    if policy == "auto":
        covered = [f for f in plan.eligible if f.id in callers]
        policy = "doctests" if 2 * sum(f.doctest for f in covered) >= len(covered) > 0 else "half"
    discover.copy(plan.tree, repository, sorted({*layout.files} - {*layout.tests}))
    discover.copy(plan.tree, plan.work / "hidden", _beside_tests(plan))
    shown: set[str] = set()
    if policy == "half":
        everything = {split.base(test) for names in callers.values() for test in names}
        shown = split.visible_half(callers, plan.options.seed) | _uncuttable(plan, everything)
        # Snapshots hold values that hidden tests expect.
        discover.copy(plan.tree, repository, [path for path in layout.tests if not path.endswith(".snap")])
        _cut_out(repository, everything - shown | {split.base(test) for test in prepared.failed})
    if plan.facts.script:
        (repository / node.LINK[0]).symlink_to(node.LINK[1])
    return policy, shown


def _beside_tests(plan: _BuildPlan) -> list[str]:
    """The files of tests, and small files beside them that tests may read, such as samples and a README, outside of the
    library's folders."""
    layout = plan.facts.layout
    roots = tuple(f"{root}/" for root in layout.source_roots)
    beside = (path for path in layout.files if not path.endswith(_SOURCES) and not path.startswith(roots))
    return sorted({*layout.tests, *(p for p in beside if (plan.tree / p).stat().st_size <= _BESIDE_BYTES)})


def _cut_out(repository: Path, tests: Iterable[str]) -> None:
    """Remove test functions from the files that the agent sees. A test id without a function names its whole file."""
    gone = {split.base(test) for test in tests}
    for path in sorted({test.split("::")[0] for test in gone}):
        file = repository / path
        if not file.is_file():
            continue
        if path in gone:
            file.unlink()
        else:
            text = file.read_bytes().decode()
            file.write_bytes(split.without_tests(path, text, gone).encode())


def _uncuttable(plan: _BuildPlan, tests: Collection[str]) -> set[str]:
    """JavaScript tests with computed names: they cannot be cut out of their files, so they are visible."""
    computed: set[str] = set()
    for path in {test.split("::")[0] for test in tests if is_script(test)}:
        text = (plan.tree / path).read_text("utf-8", "replace")
        names = {f"{path}::{name}" for name in javascript.titles(path, text)}
        computed |= {test for test in tests if test.startswith(f"{path}::")} - names
    return computed


@dataclass(frozen=True)
class _Targets:
    """The functions and changes to break, and the tests that decide them."""

    targets: list[Target]
    functions: list[Unit]  # that are broken one by one
    stable: set[str]  # hidden tests
    unstable: set[str]  # tests left out
    straddling: Counter[str]  # kind -> changes that touch functions of both sides


_Sides = tuple[tuple[str, ...], tuple[str, ...]]  # hidden tests, visible tests


async def _targets(plan: _BuildPlan, bench: Bench, callers: split.Callers, policy: str, shown: set[str]) -> _Targets:
    """The functions and changes to try, each with its split and its tests."""
    options = plan.options
    eligible = [f for f in plan.eligible if f.id in callers]
    if options.max_functions is not None and len(eligible) > options.max_functions:
        eligible = random.Random(options.seed).sample(eligible, options.max_functions)
    # A test that calls few functions says more about each of them than one that calls many.
    breadth = Counter(test for names in callers.values() for test in names)
    python = [f for f in plan.functions if isinstance(f, Function)]
    modules = plan.facts.layout.modules
    changes = multi_function.find(plan.repo, plan.sources, python, callers, modules, options) if python else []
    members: dict[str, list[frozenset[str]]] = defaultdict(list)  # of each kind, so that all have held-out tasks
    for change in changes:
        members[change.program.kind].append(change.members)
    heldout = split.heldout_functions(eligible, options.heldout_fraction, options.seed, members)
    drafts: list[Target] = []  # with all their tests
    for f in eligible:
        ranked = sorted(callers[f.id], key=lambda test: (breadth[test], test))
        hidden, visible = _of_function(f, ranked, policy, shown)
        side = "heldout" if f.id in heldout else "train"
        drafts.append(Target(f, plan.sources[f.path], side, visible, hidden))
    for change in changes:
        hidden, visible = _of_change(change, shown, callers)
        side = split.side(change.members, heldout) or ""
        drafts.append(Target(change.unit, plan.sources[change.unit.path], side, visible, hidden, (change.program,)))
    known = {test for draft in drafts for test in draft.hidden}
    visible = {test for draft in drafts for test in draft.visible}
    stage = partial(plan.progress, "looking for flaky tests")
    stable, unstable = await gates.stable_tests(bench, sorted(known | visible), bench.hidden, {}, stage)
    unstable |= await _failing_as_shown(bench, {test for test in visible & stable if is_script(test)}, unstable)
    single = not {"mutation", "removal", "combined"}.isdisjoint(options.kinds)
    targets = [
        replace(t, visible=_kept(t.visible, stable - unstable), hidden=_kept(t.hidden, stable))
        for t in drafts
        if t.split and (single or t.programs)
    ]
    targets = [t for t in targets if t.hidden and (t.visible or not options.visible_failure)]
    if not targets:
        limits = f"{options.min_lines} to {options.max_lines}"
        raise UserError(f"no hidden test calls a function of {limits} lines in {plan.repo}; widen the limits.")
    straddling = Counter(draft.programs[0].kind for draft in drafts if not draft.split)
    return _Targets(targets, eligible, stable & known, unstable, straddling)


async def _failing_as_shown(bench: Bench, visible: Collection[str], unstable: Collection[str]) -> set[str]:
    """Visible tests of JavaScript that fail in the files as the agent sees them, cut and without hidden tests: such as
    a test that needs the one before it, which is hidden."""
    gone = set(unstable)
    paths = {test.partition("::")[0] for test in visible}
    texts = {path: (bench.repository / path).read_bytes().decode() for path in paths}
    while left := sorted({*visible} - gone):
        cut = {path: split.without_tests(path, text, gone).encode() for path, text in texts.items()}
        _, failed = await gates.stable_tests(bench, left, None, cut)
        if not failed:
            break
        gone |= failed
    return gone & {*visible}


def _of_function(f: Unit, ranked: Sequence[str], policy: str, shown: set[str]) -> _Sides:
    """The tests of a function, in their order."""
    hidden, visible = _sides(ranked, shown)
    hidden, visible = hidden[:_CAP], visible[:MAX_TESTS]
    if policy == "doctests":
        visible = (f"{f.path}::doctest:{f.qualname}",) if f.doctest else ()
    return (_of_files(hidden), _of_files(visible)) if is_script(f.path) else (hidden, visible)


def _sides(tests: Iterable[str], shown: set[str]) -> _Sides:
    tests = tuple(tests)
    return tuple(t for t in tests if split.base(t) not in shown), tuple(t for t in tests if split.base(t) in shown)


def _of_files(tests: Sequence[str]) -> tuple[str, ...]:
    """The tests of the first files: each is a process or two, when an agent tests too."""
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))[:_SCRIPT_FILES]
    return tuple(test for test in tests if test.split("::")[0] in files)


def _of_change(change: MultiFunctionChange, shown: set[str], callers: split.Callers) -> _Sides:
    """The tests of a change, first those that reach it."""
    reach = {test for function in change.reach for test in callers.get(function, ())}
    hidden, visible = _sides((test for test in change.tests if test in reach), shown)
    others, _ = _sides((test for test in change.tests if test not in reach), shown)
    return hidden[:_CAP] + others[:_CAP], visible[:_CAP]


def _kept(tests: Iterable[str], stable: set[str]) -> tuple[str, ...]:
    return tuple(test for test in tests if test in stable)
