"""Adds tests for functions that no test calls: a writer outside of etude writes them, and those that mutants fail are
kept.

A writer gets a function and its module, and returns the text of a test module. It is a Python callable, or a command
that reads JSON ({"path", "qualname", "source"}) and prints the module. Written tests are hidden: the agent's tree never
holds them.
"""

import ast
import json
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import blake3

from etude.code import mutants, parse
from etude.code.functions import Function
from etude.errors import UserError
from etude.sandbox import Image, Limits, Sandbox
from etude.tasks.statements import failing

Writer = Callable[[Function, str], str]  # (function, text of its module) -> text of a test module
MUTANTS = 6
SHARE = 0.5  # of the mutants that must die
WRITER_SECONDS = 120.0
_LIMITS = Limits(seconds=20.0)


def by_command(command: str) -> Writer:
    """A writer that runs `command` on this machine, once for each function. Raises UserError if it fails."""

    def write(function: Function, source: str) -> str:
        request = json.dumps({"path": function.path, "qualname": function.qualname, "source": source})
        try:
            done = subprocess.run(
                shlex.split(command), input=request, capture_output=True, text=True, timeout=WRITER_SECONDS, check=True
            )
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            raise UserError(f"the command that writes tests failed on {function.id} ({e}); repair it.") from None
        return done.stdout

    return write


async def write(
    sandbox: Sandbox,
    image: Image,
    functions: Sequence[Function],
    sources: Mapping[str, str],
    writer: Writer,
    folder: Path,
    seed: int,
) -> dict[str, set[str]]:
    """Write tests of functions. Returns function id -> tests that were kept. Their files are in `folder`, which must
    not exist."""
    written: dict[str, list[str]] = {}  # function id -> tests
    for function in functions:
        text = writer(function, sources[function.path])
        path = f"tests/test_written_{blake3.blake3(function.id.encode()).hexdigest()[:12]}.py"
        tree = parse(text)
        nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef)] if tree is not None else []
        if names := [node.name for node in nodes if node.name.startswith("test")]:
            written[function.id] = [f"{path}::{name}" for name in names]
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    kept: dict[str, set[str]] = {}
    for function in functions:
        tests = written.get(function.id, [])
        if good := await _kept(sandbox, image, function, sources[function.path], tests, folder, seed):
            kept[function.id] = good
    return kept


async def _kept(
    sandbox: Sandbox, image: Image, function: Function, source: str, tests: list[str], folder: Path, seed: int
) -> set[str]:
    """The tests that pass on the original text, if together they fail on SHARE of some mutants."""
    report = await sandbox.run_tests(image, {}, tests, folder, _LIMITS)
    good = [test for test in tests if report.outcomes.get(test) == "passed"]
    chosen = mutants(source, function, seed)[:MUTANTS]
    dead = 0
    for mutant in chosen if good else ():
        broken = Image(image.repository, image.site, {function.path: mutant.text})
        dead += bool(failing(await sandbox.run_tests(broken, {}, good, folder, _LIMITS), good))
    return set(good) if chosen and dead >= SHARE * len(chosen) else set()
