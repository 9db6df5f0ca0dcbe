"""The lookups of an agent's tools (item A10): an index, a history or a memory that is older than the mutation, or
younger than the task's commit, would contain the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from etude.audit.attacks.boxes import LIMITS
from etude.audit.attacks.library import EXPECTED, LATER, NAMED, PATH, SECRET, TASK
from etude.audit.attacks.packs import AttackPack
from etude.harness import FullTools, Lexical
from etude.records import ToolCall
from etude.sandbox import Sandbox

ANSWERS = (SECRET, "math.ceil(len", "-len(items)", EXPECTED, LATER)
_NUMBERS = "src/lib/numbers.py"
_QUESTIONS = (
    "cut a list into pieces of a size",
    "what does chunk do when the size is below one",
    "ValueError of chunk",
    "round up the number of pieces",
    "chunk",
    SECRET,
    EXPECTED,
    "test_chunk expected value",
    "how was this fixed upstream",
)
_PLACES = ("", "src", PATH, ".git", "..", "../..", "/", "/opt/runner", "/site", "tests", "build", ".git/objects")
_REVISIONS = (
    *("HEAD", "HEAD~1", "HEAD@{1}", "main..ahead", "later", "stash", "ahead", "--all", "--reflog", "ffffffff"),
    *("-p --all", "refs/notes/commits", ":/Later", "HEAD; git stash show -p"),
)


async def look_ups(sandbox: Sandbox, pack: AttackPack) -> str:
    """Makes all lookups twice: first as an agent of another task, whose tree holds the answer, then as the task's own.

    Scorers are shared by all episodes of a run, so texts that `search` reads for the first must not reach the second.
    """
    image = pack.data.image(TASK)
    intact = replace(image, changes={_NUMBERS: "def double(n):\n    return n\n"}, history={})
    other = FullTools(await sandbox.create(intact, LIMITS), TASK)
    own = FullTools(await sandbox.create(image, LIMITS), TASK)
    shared = other.scorer = own.scorer = Lexical()
    try:
        answers = await _results(other, _searches())
        if SECRET not in "".join(answers.values()):
            return "these questions do not find the answer where it lies"
        await other.call(_call("todo", items=[{"task": SECRET, "status": "open"}]))
        leaks = {line: text for line, text in (await _results(own, _everything())).items() if _answers(text)}
        if leaks:
            line, text = next(iter(leaks.items()))
            return f"{line} says {', '.join(_answers(text))}"
        if _answers(own.state()):
            return "the list of another episode is shown"
        ranking = await _results(own, _searches())
        own.scorer = Lexical()
        if ranking != await _results(own, _searches()):
            return "the ranking tells what other trees hold"
        own.scorer = shared
        return await _commits(own) if image.history else ""
    finally:
        await other.box.close()
        await own.box.close()


async def _commits(tools: FullTools) -> str:
    """Shows all commits that the tool names, whole and by file. Returns the problem, or "" if there is none."""
    log = await tools.call(_call("history"))
    if NAMED not in log:
        return f"the history is not shown: {log[:100]}"
    for name in re.findall(r"^([0-9a-f]{4,40}) ", log, re.MULTILINE):
        for path in ("", PATH, _NUMBERS):
            if leaks := _answers(await tools.call(_call("history", commit=name, path=path))):
                return f"commit {name} says {', '.join(leaks)}"
    return ""


async def _results(tools: FullTools, calls: Iterator[ToolCall]) -> dict[str, str]:
    """Results by call. No tool repeats its arguments."""
    return {f"{call.name} {call.arguments}": await tools.call(call) for call in calls}


def _searches() -> Iterator[ToolCall]:
    yield from (_call("search", question=question) for question in _QUESTIONS)


def _everything() -> Iterator[ToolCall]:
    yield from _searches()
    for place in _PLACES:
        yield _call("search", question=_QUESTIONS[0], folder=place)
        yield _call("grep", pattern="quartz|ceil|velvet|-len", path=place)
        yield _call("read", path=place)
        yield _call("list", path=place)
    for text in ("", "ceil", "Round", "quartz", "Later", "--all"):
        yield from (_call("history", query=text), _call("history", author=text), _call("history", path=text))
    yield from (_call("history", commit=name) for name in _REVISIONS)
    yield from (_call("history", path=path) for path in (PATH, "--all", ".", ":/", "../.git"))


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def _answers(text: str) -> list[str]:
    return [answer for answer in ANSWERS if answer in text]
