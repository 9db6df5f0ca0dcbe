"""The environment of a JavaScript repository: packages from npm without scripts, and the tests that call a function.

Ranges of package.json count, lock files do not. What the registry lacks or refuses for this machine, and what does not
come from a registry (addresses, workspaces, aliases), is left out and named.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from etude.code import SCRIPT_SUFFIXES, lines_of
from etude.code.functions import RepositoryLayout
from etude.config import BuildConfig
from etude.errors import UserError
from etude.grading import CALLED_FILE, TestRunner, open_sandbox, read_package, test_framework
from etude.sandbox import WORKSPACE, Image
from etude.tasks import bootstrap, javascript
from etude.tasks.bootstrap import SHARE, BootstrapRecipe, Goal, Kit, OpenBoxes, Try
from etude.tasks.javascript import JsFunction

NPM_SECONDS = 900.0  # hundreds of packages, on a busy machine
LINK = ("node_modules", "/site/node_modules")  # (link in the repository where Node looks for packages, its target)
_SETTINGS = re.compile(r"(jest|vitest|vite|babel)[\w.-]*\.[cm]?[jt]s|tsconfig[\w.-]*\.json|\.(babel|mocha|swc)rc.*")
_QUOTED = re.compile(r"['\"]((?:@[\w.-]+/)?[\w.-]+)(?:/[\w./-]+)?['\"]")
_ELSEWHERE = re.compile(r"[:/]")  # in a range: an address, a folder, `workspace:`, an alias
_PACKAGE = re.compile(r"((?:@[a-z0-9._-]+/)?[a-z0-9._-]+)(?:@([^\s:/]+(?: [^\s:/]+)*))?", re.IGNORECASE)


# npm's messages about a package that it cannot install, and what they mean.
_LACKS = re.compile(
    r"No matching version found for (?P<a>(?:@[\w.-]+/)?[\w.-]+)@"
    r"|'(?P<b>(?:@[\w.-]+/)?[\w.-]+)@[^']*' (?:could not be found|is not in this)"
)
_UNFIT = re.compile(r"Unsupported (?:platform|engine) for (?P<a>(?:@[\w.-]+/)?[\w.-]+)@")


class _NpmRefusal(UserError):
    """npm cannot install `package`; `why` ends a sentence about those that need it."""

    def __init__(self, message: str, package: str, why: str) -> None:
        super().__init__(message)
        self.package, self.why = package, why


def is_link(path: Path) -> bool:
    """Whether a path is `node_modules`, the only link that the repository of a dataset may hold."""
    return path.name == LINK[0] and path.is_symlink() and str(path.readlink()) == LINK[1]


def npm(arguments: list[str], folder: Path, timeout: float) -> None:
    """Run npm in `folder` for at most `timeout` seconds; the caller forbids scripts. Raises UserError with npm's first
    lines of error."""
    if shutil.which("npm") is None:
        raise UserError("npm is not installed; install Node.js, or leave JavaScript repositories out.")
    # A package that is a git address would be fetched by git with settings of its own, and built.
    # If a package.json above names `folder` as a workspace, npm reads the settings beside it, which can send this
    # machine's environment to any registry.
    own = ["--no-workspaces", "--git=/bin/false"]
    command = ["npm", *arguments, *own, "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"npm {arguments[0]} took over {timeout:.0f} s; check the network.") from None
    if done.returncode != 0:
        reason = [line for line in lines_of(done.stderr) if "error" in line.lower()] or ["no message"]
        message = "; ".join(line.strip()[:200] for line in reason[:2])
        message = f"npm {arguments[0]} failed ({message}); check the network and the package."
        if match := _LACKS.search(done.stderr):
            raise _NpmRefusal(message, name := match["a"] or match["b"], f"the registry has no such {name}")
        if match := _UNFIT.search(done.stderr):
            raise _NpmRefusal(message, match["a"], f"{match['a']} is not for this system or its Node.js")
        raise UserError(message)


async def prepare(
    repository: Path,
    layout: RepositoryLayout,
    work: Path,
    functions: Sequence[JsFunction],
    options: BuildConfig,
    progress: Callable[[str, int, int], None],
    named: Path,
    boxes: OpenBoxes = open_sandbox,
) -> tuple[BootstrapRecipe, dict[str, set[str]], str]:
    """Install the packages of the repository, which gets a link to them, into `work`/site. Returns the recipe, function
    id -> tests that call it, and the packages that were left out with the reasons. Raises UserError with the reason if
    in no try SHARE of the tests pass; `named` is the path of the repository in messages."""
    (repository / LINK[0]).symlink_to(LINK[1])
    callers: dict[str, set[str]] = {}
    refused: dict[str, str] = {}  # line -> reason, of the last try
    first = next(_proposals(repository, layout))
    elsewhere = [f"{name} ({version})" for name, version in first.items() if _ELSEWHERE.search(version)]

    def left_out() -> str:
        reasons = [f"{line}: {why}." for line, why in refused.items()]
        return " ".join([*reasons, *([f"Not of a registry: {', '.join(elsewhere)}."] if elsewhere else [])])

    def install(wanted: Sequence[str], site: Path) -> None:
        progress("installing packages of npm", 0, 1)
        refused.clear()
        refused.update(install_most(wanted, site, read_package(repository).get("name")))

    async def miss(sandbox: TestRunner, site: Path, goal: Goal) -> str | None:
        if goal.share is None:
            return await bootstrap.miss(repository, sandbox, site, goal)
        tell = partial(progress, "running the test files")
        passed, ran, printed, called = await _trace(
            sandbox, Image(repository, site, {}), layout.modules, functions, tell
        )
        callers.clear()
        callers.update(called)
        few = not ran or passed < goal.share * ran
        return f"{printed}\n{passed} of {ran} tests pass\n{left_out()}" if few else None

    how = "rules" if options.bootstrap == "declared" else options.bootstrap
    kit = Kit(
        repository=named,
        language="JavaScript",
        files=layout.files,
        note="packages of npm are meant, as name@range; their scripts do not run",
        goals=tuple(_goals(repository, layout)),
        rules=lambda tries: _by_rules(repository, layout, tries),
        usable=lambda lines: [line for line in lines if _PACKAGE.fullmatch(line)],
        installer="npm",
        install=install,
        miss=miss,
        boxes=boxes,
    )
    recipe = await bootstrap.try_out(repository, work, how, kit)
    return replace(recipe, requirements=tuple(r for r in recipe.requirements if r not in refused)), callers, left_out()


def _goals(whole: Path, layout: RepositoryLayout) -> Iterator[Goal]:
    """The exports of the package can be imported, unless they are built files; and the suite passes."""
    entry = str(read_package(whole).get("main", "index.js")).removeprefix("./")
    if entry in layout.sources and not javascript.typed(entry):
        yield Goal(f"node -e \"import('./{entry}')\"")
    used = sorted({_framework(whole, path) for path in layout.modules})
    yield Goal(f"{len(layout.modules)} test files under {', '.join(used)}", share=SHARE)


def _framework(whole: Path, path: str) -> str:
    return test_framework((whole / path).read_text("utf-8", "replace"), read_package(whole))


def _by_rules(whole: Path, layout: RepositoryLayout, tries: Sequence[Try]) -> tuple[str, ...] | None:
    """The packages of the next try: those of the last one and those that a run could not find; else those that tests
    and settings name; else all."""
    proposals = list(_proposals(whole, layout))
    if tries:
        proposals.insert(0, _mended(whole, layout, tries[-1]))
    for wanted in proposals:
        plain = tuple(f"{name}@{version}" for name, version in wanted.items() if not _ELSEWHERE.search(version))
        if all(plain != old.requirements for old in tries):
            return plain
    return None


def _proposals(whole: Path, layout: RepositoryLayout) -> Iterator[dict[str, str]]:
    about = read_package(whole)
    needed = about.get("dependencies", {}) | about.get("peerDependencies", {})
    development = about.get("devDependencies", {})
    read = [
        f for f in layout.files if (f in set(layout.tests) and f.endswith(SCRIPT_SUFFIXES)) or _SETTINGS.fullmatch(f)
    ]
    text = "\n".join((whole / path).read_text("utf-8", "replace") for path in read)
    own = json.dumps({key: value for key, value in about.items() if key in ("jest", "babel", "mocha")})
    named = set(_QUOTED.findall(text + own))
    used = {_framework(whole, path) for path in layout.modules} - {"node"}
    if not used & {"jest", "vitest"} and any(map(javascript.typed, (*layout.sources, *layout.modules))):
        used.add("tsx")
    if "jest" in used and any(re.fullmatch(r"jest\.config\.[cm]?ts", path) for path in layout.files):
        used |= {"ts-node", "typescript"}  # jest compiles its settings with it, where Node itself does not
    if "ts-jest" in named:
        used.add("typescript")
    runners = {name: development.get(name, "*") for name in sorted(used)}
    yield needed | {name: version for name, version in development.items() if name in named} | runners
    yield needed | development | runners


def _mended(whole: Path, layout: RepositoryLayout, last: Try) -> dict[str, str]:
    """The packages of the last try, mended; only packages that the repository imports by name are added."""
    output = "\n".join(text for _, text in last.missed)
    wanted = {m[1]: m[2] or "*" for line in last.requirements if (m := _PACKAGE.fullmatch(line))}
    lacking = set(re.findall(r"Cannot find (?:module|package) '((?:@[\w.-]+/)?[\w.-]+)", output)) - set(wanted)
    code = (f for f in layout.files if f.endswith(SCRIPT_SUFFIXES) or _SETTINGS.fullmatch(f))
    known = {name for f in code if lacking for name in _QUOTED.findall((whole / f).read_text("utf-8", "replace"))}
    development = read_package(whole).get("devDependencies", {})
    return wanted | {name: development.get(name, "*") for name in sorted(lacking & (known | set(development)))}


def install_most(wanted: Sequence[str], site: Path, own: str | None) -> dict[str, str]:
    """As `_install`, without the packages that npm cannot install: line -> the reason. Raises UserError if npm fails in
    another way."""
    left, refused = list(wanted), dict[str, str]()
    while True:
        try:
            _install(left, site, own)
            return refused
        except _NpmRefusal as e:
            shutil.rmtree(site, ignore_errors=True)
            named = [line for line in left if (m := _PACKAGE.fullmatch(line)) and m[1] == e.package]
            lines = named or [line for line in left if _needs(line, e.package, site)]
            if not lines:
                raise
            refused |= dict.fromkeys(lines, e.why)
            left = [line for line in left if line not in lines]


def _needs(line: str, package: str, site: Path) -> bool:
    """Whether npm cannot install a line by itself, because of this package."""
    try:
        with tempfile.TemporaryDirectory(dir=site.parent) as folder:
            _install([line], Path(folder) / "alone", None, "--package-lock-only")
    except _NpmRefusal as e:
        return e.package == package
    return False


def _install(wanted: Sequence[str], site: Path, own: str | None, *flags: str) -> None:
    """Install packages ("name@range") of the registry below `site`/node_modules, without their scripts. The
    repository's `own` package is removed: an agent could copy the answer from it or from a cache."""
    modules = site / "node_modules"
    modules.mkdir(parents=True)
    pairs = [m for line in wanted if (m := _PACKAGE.fullmatch(line)) and m[1] != own]
    (site / "package.json").write_text(
        json.dumps({"private": True, "dependencies": {m[1]: m[2] or "*" for m in pairs}})
    )
    if not pairs:
        return
    npm(["install", "--ignore-scripts", "--legacy-peer-deps", *flags], site, NPM_SECONDS)
    for name in filter(None, (".bin", ".cache", own)):
        shutil.rmtree(modules / name, ignore_errors=True)  # of .bin: links; nothing in a box calls them


async def _trace(
    sandbox: TestRunner,
    image: Image,
    modules: Sequence[str],
    functions: Sequence[JsFunction],
    tell: Callable[[int, int], None],
) -> tuple[int, int, str, dict[str, set[str]]]:
    """(tests that passed, tests that ran, errors printed, function id -> tests that call it). The sources report the
    calls. `tell` is called with the numbers of files that have run, and of all."""
    passed = ran = 0
    printed = ""
    callers: dict[str, set[str]] = defaultdict(set)
    layers = _saying(image.repository, functions)
    for number, path in enumerate(modules):
        tell(number, len(modules))
        report, trace = await sandbox.scripts.list_tests(image, path, layers)
        good = {f"{path}::{name}" for name in single(report.tests) if report.tests[name][0] == "passed"}
        outcomes = [outcome for outcome, _ in report.tests.values()]
        ran += max(1, len(outcomes) - outcomes.count("skipped"))
        passed += outcomes.count("passed")
        printed = (printed + trace.printed[-1000:])[-4000:]
        for called in trace.called if good else ():
            callers[functions[called].id] |= good
    return passed, ran, printed, dict(callers)


def _saying(repository: Path, functions: Sequence[JsFunction]) -> dict[str, bytes]:
    """Sources in which each function writes its number to CALLED at its first call; no line moves. So calls are seen
    under any runner, in any process and context, and whatever compiles the text."""
    sources: dict[str, bytes] = {}
    for number, function in sorted(enumerate(functions), key=lambda pair: -pair[1].body[0]):
        data = sources.get(function.path) or (repository / function.path).read_bytes()
        directive = re.compile(rb"\s*(['\"])use [\w ]+\1;?").match(data, function.body[0] + 1)
        place = directive.end() if directive else function.body[0] + 1
        line = (
            f";globalThis.__called_{number} ??= (process.getBuiltinModule('fs')"
            f".appendFileSync('{WORKSPACE}/{CALLED_FILE}', '{number}\\n'), 1);"
        )
        sources[function.path] = data[:place] + line.encode() + data[place:]
    return sources


def single(names: Iterable[str]) -> set[str]:
    """Tests that can be shown or hidden by themselves: they hold no other tests, and their names are unique."""
    names = set(names)
    parents = {" > ".join(parts[:i]) for name in names for parts in [name.split(" > ")] for i in range(1, len(parts))}
    doubled = {name for name in names if f"{name} #2" in names}
    return {name for name in names if name not in parents | doubled and re.sub(r" #\d+$", "", name) not in doubled}
