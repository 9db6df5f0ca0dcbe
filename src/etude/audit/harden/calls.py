"""Compares an answer with the gold answer on calls that tests make, and on these calls with altered arguments.

The tests run on the gold answer in a box, with the function noted; both answers are then called in boxes of their own.
Only plain functions of Python whose arguments are literals are compared.
"""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from etude.code import is_script, lines_of
from etude.grading import graded_changes
from etude.records import CodeTask
from etude.sandbox import Box, Changes, Limits, Sandbox
from etude.tasks import Dataset

MAX_CALLS = 150
ENOUGH = 10  # equal calls, with at least two results
_LIMITS = Limits(seconds=60.0)
_SECONDS = 60.0
_NOTES = """

def _etude_noted(inner):
    import functools

    @functools.wraps(inner)
    def noted(*args, **kwargs):
        with open("/tmp/etude-calls", "a") as file:
            file.write(repr((args, kwargs)) + chr(10))
        return inner(*args, **kwargs)
    return noted


{name} = _etude_noted({name})
"""
_CALLS = """
import importlib, itertools, json, sys
sys.path[:0] = {roots!r}
function = getattr(importlib.import_module({module!r}), {name!r})
shown = []
for args, kwargs in {calls!r}:
    try:
        value = function(*args, **kwargs)
        if hasattr(value, "__next__"):
            value = list(itertools.islice(value, 50))
        shown.append(repr(value)[:2000])
    except BaseException as e:
        shown.append(type(e).__name__)
with open("/workspace/.etude-shown", "w") as file:
    json.dump(shown, file)
"""
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ComparedCalls:
    """`different`: the first call with another result, as text; `equal`: calls with equal ones; `results`: different
    values among those."""

    different: str = ""
    equal: int = 0
    results: int = 0

    @property
    def enough(self) -> bool:
        """Whether so many calls agree that chance cannot explain it."""
        return not self.different and self.equal >= ENOUGH and self.results > 1


async def compare_calls(sandbox: Sandbox, data: Dataset, task: CodeTask, changes: Changes) -> ComparedCalls:
    """The comparison of `changes` with the gold answer; empty for methods and scripts. Raises BoxError."""
    path, name = task.focus.path, task.function.partition("::")[2]
    if is_script(path) or not name.isidentifier() or path not in task.solution:
        return ComparedCalls()
    gold: Changes = {path: text.encode("utf-8", "surrogateescape") for path, text in task.solution.items()}
    noted = {**gold, path: (task.solution[path] + _NOTES.format(name=name)).encode("utf-8", "surrogateescape")}
    calls = [call for known in await _recorded(sandbox, data, task, noted) for call in altered(known)][:MAX_CALLS]
    if not calls:
        return ComparedCalls()
    program = _CALLS.format(
        roots=[f"/workspace/{root}".rstrip("/.") for root in (*data.manifest.python_path, "")],
        module=_module(path, data.manifest.python_path),
        name=name,
        calls=calls,
    )
    kept, _ = graded_changes(changes, task.source_roots)
    first, again, other = [await _shown(sandbox, data, task, each, program) for each in (gold, gold, kept)]
    results, equal = set[str](), 0
    for call, right, same, value in zip(calls, first, again, other or [""] * len(first), strict=False):
        if right != same or " at 0x" in right:
            continue
        if value != right:
            return ComparedCalls(f"{name}{call[0]!r:.80} gives {value[:60]}, not {right[:60]}")
        results.add(right)
        equal += 1
    return ComparedCalls("", equal, len(results))


def altered(call: Call) -> Iterator[Call]:
    """The call, and it with one argument altered in each way that its kind allows."""
    args, kwargs = call
    yield call
    for place, value in enumerate(args):
        for other in _others(value):
            yield (*args[:place], other, *args[place + 1 :]), dict(kwargs)
    for name, value in kwargs.items():
        for other in _others(value):
            yield args, kwargs | {name: other}


def _others(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1, 2 * value + 3]
        case float():
            return [value + 0.5, -value]
        case str():
            return [value + "x", value[::-1], value.upper(), value[1:]]
        case bytes():
            return [value + b"x", value[::-1]]
        case list() | tuple():
            items: list[Any] = list(value)
            inner = [[other, *items[1:]] for other in (_others(items[0])[:1] if items else [])]
            return [type(value)(each) for each in (items[::-1], items[1:], items + items[:1], *inner)]
        case dict():
            return [dict(list(value.items())[1:]), {**value, "etude": 1}]
        case _:
            return []


async def _recorded(sandbox: Sandbox, data: Dataset, task: CodeTask, noted: Changes) -> list[Call]:
    """The literal arguments with which visible and deciding tests call the function, each once. The box holds hidden
    tests and the gold answer, and no agent's code."""
    box = await sandbox.create(data.image(task), _LIMITS)
    try:
        files = sorted(
            {test.partition("::")[0] for test in task.hidden_tests if (data.hidden / test.partition("::")[0]).is_file()}
        )
        await _lay(box, {**noted, **{path: (data.hidden / path).read_bytes() for path in files}})
        await box.exec(f"python3 -m pytest -q -p no:cacheprovider {' '.join(files)}", _SECONDS)
        output = await box.exec("sort -u /tmp/etude-calls | head -c 60000", _SECONDS)
    finally:
        await box.close()
    calls: dict[str, Call] = {}
    for line in lines_of(output.output):
        try:
            calls[line] = ast.literal_eval(line)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return [copy.deepcopy(call) for call in list(calls.values())[:30]]


async def _shown(sandbox: Sandbox, data: Dataset, task: CodeTask, changes: Changes, program: str) -> list[str]:
    """The results of the calls in a box with `changes`, as texts."""
    box = await sandbox.create(data.image(task), _LIMITS)
    try:
        await _lay(box, {**changes, ".etude-calls.py": program.encode()})
        await box.exec("python3 .etude-calls.py", _SECONDS)
        done = await box.exec("cat .etude-shown", _SECONDS)
    finally:
        await box.close()
    try:
        shown = json.loads(done.output)
    except ValueError:
        return []
    return [str(each) for each in shown] if isinstance(shown, list) else []


async def _lay(box: Box, files: Mapping[str, bytes | None]) -> None:
    for path, content in files.items():
        if content is not None:
            await box.write(path, content)


def _module(path: str, roots: tuple[str, ...]) -> str:
    inner = next((path.removeprefix(f"{root}/") for root in roots if path.startswith(f"{root}/")), path)
    return inner.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
