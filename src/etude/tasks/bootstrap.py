"""Finds requirements that install and test a repository: goals first, then up to five tries to reach them in a box.

After the two stages of Cursor's environment set-up: goals (commands with an expected outcome) are proposed without
regard to how they can be reached, then requirements are tried until the goals hold. Rules propose both, or a model
behind an OpenAI-compatible URL. Packages are fetched in forms that run nothing; all commands run in a box without
network. Requirements that the last try lacked are added only if the repository names them. This module holds the part
that all languages share, and the kit of Python; `node.py` holds that of JavaScript.
"""

import json
import re
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from etude.code.functions import RepositoryLayout
from etude.errors import UserError, last_line
from etude.grading import TestRunner, open_sandbox
from etude.sandbox import Image, Limits, Sandbox
from etude.tasks import requirements
from etude.tasks.coverage import last_lines
from etude.tasks.environment import Install

MAX_GOALS = 10
TRIES = 5
SHARE = 0.8  # of the suite must pass, as in SWE-smith
SUITE_SECONDS = 300.0
COMMAND_SECONDS = 60.0
MODEL_SECONDS = 120.0
_COUNT = re.compile(r"(\d+) (passed|failed|errors?)\b")


Missed = tuple[tuple[str, str], ...]  # (command, end of its output)
OpenBoxes = Callable[..., AbstractAsyncContextManager[TestRunner]]  # `open_sandbox` with a configuration


@dataclass(frozen=True)
class Goal:
    """A command that must exit with 0 in a box. Its output must match `expected`, a regular expression; if `share` is
    set, the command is a test run and that share of the tests must pass."""

    command: str
    expected: str = ""
    share: float | None = None


@dataclass(frozen=True)
class BootstrapRecipe:
    """The requirements that reach the goals, and the number of tries that they took."""

    requirements: tuple[str, ...]
    goals: tuple[Goal, ...]
    tries: int


@dataclass(frozen=True)
class Try:
    """The requirements of one try. `missed` lists the goals that do not hold, with the end of their output."""

    requirements: tuple[str, ...]
    missed: Missed


@dataclass(frozen=True)
class Kit:
    """The parts of the search that differ from language to language."""

    repository: Path  # the path in messages
    language: str
    files: Sequence[str]  # of the repository, for a model's prompt
    note: str  # a note on the packages, for prompts
    goals: tuple[Goal, ...]  # by rules; the last one, the suite, stays when a model names the others
    rules: Callable[[Sequence[Try]], tuple[str, ...] | None]  # the next try's requirements
    usable: Callable[[Iterable[str]], Iterable[str]]  # the plain ones among a model's requirements
    installer: str  # "pip" or "npm"
    install: Install
    miss: Callable[[TestRunner, Path, Goal], Awaitable[str | None]]  # see `miss`
    boxes: OpenBoxes = open_sandbox


async def find(
    repository: Path,
    layout: RepositoryLayout,
    work: Path,
    how: str,
    install: Install,
    named: Path,
    boxes: OpenBoxes = open_sandbox,
) -> BootstrapRecipe:
    """Install the requirements of a Python repository into `work`/site. `how` is "rules" or the URL of a model;
    `named` is the path of the repository in messages. Raises UserError with the reason of the last try if none of TRIES
    reaches the goals."""
    kit = Kit(
        repository=named,
        language="Python",
        files=layout.files,
        note="pytest is there",
        goals=tuple(_goals(layout)),
        rules=lambda tries: _by_rules(repository, tries),
        usable=lambda lines: requirements.usable(list(lines)),
        installer="pip",
        install=install,
        miss=partial(miss, repository),
        boxes=boxes,
    )
    return await try_out(repository, work, how, kit)


async def try_out(repository: Path, work: Path, how: str, kit: Kit) -> BootstrapRecipe:
    """Returns the first of up to TRIES proposals that reaches the goals; its packages are in `work`/site. Raises
    UserError with the reason of the last try if none does."""
    named = kit.goals[:-1] if how == "rules" else _goals_of_model(how, repository, kit)[: MAX_GOALS - 1]
    goals = (*named, kit.goals[-1])
    tries: list[Try] = []
    try:
        while len(tries) < TRIES:
            wanted = kit.rules(tries) if how == "rules" else _by_model(how, repository, tries, kit)
            if wanted is None or any(wanted == old.requirements for old in tries):
                break
            site = work / f"site-{len(tries)}"
            missed = await _reach(kit, site, wanted, goals)
            tries.append(Try(wanted, missed))
            if not missed:
                site.rename(work / "site")
                return BootstrapRecipe(wanted, goals, len(tries))
    finally:
        for folder in work.glob("site-*"):
            shutil.rmtree(folder)
    command, output = tries[-1].missed[0] if tries else ("", "no requirements were proposed")
    raise UserError(
        f"{kit.repository} is left out after {len(tries)} tries: `{command[:200]}` does not hold. It printed: "
        f"{last_lines(output)}. Leave test files that fail out with `--exclude FILE`, or mend the suite."
    )


def _goals(layout: RepositoryLayout) -> Iterator[Goal]:
    """Every package can be imported and, if it has a __main__, prints its help; the suite is collected; the suite
    passes."""
    names = [root.rsplit("/", 1)[-1].removesuffix(".py") for root in layout.source_roots]
    for name in names[: MAX_GOALS - 4]:
        yield Goal(f"python3 -c 'import {name}'")
    modules = " ".join(f"'{path}'" for path in layout.modules)
    plain = (
        f"python3 -m pytest -q -p no:cacheprovider -c $(ls /site/pytest.ini || echo /dev/null) --rootdir . {modules}"
    )
    yield Goal(f"{plain} --collect-only", r"\d+ tests? collected|::")
    yield Goal(f"{plain} --tb=line", share=SHARE)


async def _reach(kit: Kit, site: Path, wanted: Sequence[str], goals: Sequence[Goal]) -> Missed:
    """Returns the goals that do not hold with these requirements: (command, end of its output)."""
    try:
        kit.install(wanted, site)
    except UserError as e:
        return ((f"{kit.installer} install", str(e)),)
    async with kit.boxes(workers=1, memo=0) as sandbox:
        outputs = [(goal.command, await kit.miss(sandbox, site, goal)) for goal in goals]
    return tuple((command, text) for command, text in outputs if text is not None)


async def miss(repository: Path, sandbox: Sandbox, site: Path, goal: Goal) -> str | None:
    """Returns None if the goal holds, else the end of the command's output."""
    seconds = SUITE_SECONDS if goal.share is not None else COMMAND_SECONDS
    box = await sandbox.create(Image(repository, site, {}), Limits(seconds=seconds))
    try:
        done = await box.exec(goal.command, seconds)
    finally:
        await box.close()
    if done.timed_out:
        return f"longer than {seconds:.0f} s"
    if goal.share is None:
        held = re.search(goal.expected, done.output) is not None and (done.rc == 0 or bool(goal.expected))
        return None if held else done.output[-2000:]
    summary = last_line(done.output)
    counts = {word.rstrip("s"): int(number) for number, word in _COUNT.findall(summary)}
    ran = sum(counts.values())
    return None if ran and counts.get("passed", 0) >= goal.share * ran else done.output[-4000:]


def _by_rules(repository: Path, tries: Sequence[Try]) -> tuple[str, ...] | None:
    """The requirements of the next try: one more source of the repository, then the packages that the last try
    lacked."""
    wanted: tuple[str, ...] = ()
    for source in requirements.sources(repository):
        wanted = tuple(dict.fromkeys((*wanted, *source)))
        if all(wanted != old.requirements for old in tries):
            return wanted
    output = "\n".join(text for _, text in tries[-1].missed)
    names = re.findall(r"No module named '(\w+)|fixture '(\w+)' not found", output)
    missing = [requirements.MISSING[name] for pair in names for name in pair if name in requirements.MISSING]
    return tuple(dict.fromkeys([*tries[-1].requirements, *missing])) if missing else None


_GOALS_PROMPT = """This is a {language} repository. Name up to {count} shell commands that must work once it is
installed with its test dependencies, each with a regular expression that its output must match. They run in the
repository's root, without network. Do not say how to install anything. Answer with JSON alone:
{{"goals": [{{"command": "...", "expected": "..."}}]}}

{text}"""
_SETUP_PROMPT = """This is a {language} repository. Name the packages of the package index (name and, if needed,
version) that must be installed so that these commands work; {note}. Answer with JSON alone:
{{"requirements": ["..."]}}

Commands that must work:
{goals}

{text}"""


def _goals_of_model(url: str, repository: Path, kit: Kit) -> list[Goal]:
    prompt = _GOALS_PROMPT.format(language=kit.language, count=MAX_GOALS - 1, text=_described(repository, kit.files))
    answer = _ask(url, prompt)
    goals = []
    for item in answer.get("goals", ()):
        command, expected = str(item.get("command", "")), str(item.get("expected", ""))
        try:
            re.compile(expected)
        except re.error:
            continue
        if command:
            goals.append(Goal(command, expected))
    return goals


def _by_model(url: str, repository: Path, tries: Sequence[Try], kit: Kit) -> tuple[str, ...]:
    """The requirements of the next try, from a model that sees three failures of the last try, as in Cursor's second
    stage."""
    failed = tries[-1].missed[:3] if tries else ()
    goals = "\n".join(f"$ {command}\nIt printed:\n{output[-1000:]}" for command, output in failed) or "the test suite"
    text = _described(repository, kit.files)
    if tries:
        text += f"\nTried: {', '.join(tries[-1].requirements)}"
    answer = _ask(url, _SETUP_PROMPT.format(language=kit.language, note=kit.note, goals=goals, text=text))
    return tuple(kit.usable(str(line) for line in answer.get("requirements", ())))


def _described(repository: Path, files: Sequence[str]) -> str:
    """The list of files, and the beginnings of the files about the installation of the project."""
    telling = re.compile(r"pyproject\.toml|setup\.(cfg|py)|tox\.ini|.*requirements.*\.txt|README.*|package\.json")
    shown = [f for f in files if telling.fullmatch(f)]
    texts = (f"--- {f}\n{(repository / f).read_text('utf-8', 'replace')[:4000]}" for f in shown)
    return "Files:\n" + "\n".join(files[:300]) + "\n\n" + "\n".join(texts)


def _ask(url: str, prompt: str) -> dict[str, Any]:
    """The JSON object in the reply of a model. Raises UserError if the server cannot be reached or sends no JSON
    object."""
    base = url.rstrip("/")
    try:
        with httpx2.Client(timeout=MODEL_SECONDS, trust_env=False) as client:
            name = client.get(f"{base}/models").raise_for_status().json()["data"][0]["id"]
            body = {"model": name, "messages": [{"role": "user", "content": prompt}], "temperature": 0.0}
            answer = client.post(f"{base}/chat/completions", json=body).raise_for_status().json()
        text = answer["choices"][0]["message"]["content"]
        parsed = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
        hint = "check the URL, or use --bootstrap rules"
        raise UserError(f"the model at {base} gave no JSON object ({e}); {hint}.") from None
    return parsed
