"""Finds the tests that call each function: the suite runs once under a profile hook, inside a box."""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from etude.errors import UserError

if TYPE_CHECKING:
    from etude.sandbox.base import Box

SCRIPT = ".etude_trace.py"
RESULT = ".etude_trace.json"


class _CallTrace(msgspec.Struct):
    functions: list[str]  # "path::qualname"
    tests: dict[str, list[int]]  # node id -> indices into `functions`


def record(roots: Sequence[str], test_files: Sequence[str], result: str) -> None:
    """Run pytest in this process and write which functions below `roots` each passing test calls. Its source is what
    the box runs, so it uses nothing of this module."""
    import json
    import os
    import sys
    import threading

    import pytest

    here = os.getcwd() + os.sep
    prefixes = tuple(os.path.join(here, root) for root in roots)
    index: dict[str, int] = {}
    tests: dict[str, list[int]] = {}

    class Tracer:
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_call(self, item):  # type: ignore[no-untyped-def]
            codes = set()

            def hook(frame, event, argument):  # type: ignore[no-untyped-def]
                if event == "call":
                    codes.add(frame.f_code)

            threading.setprofile(hook)
            sys.setprofile(hook)
            outcome = yield
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            if outcome.excinfo is not None:  # failed, skipped or expected to fail: it can't tell right from wrong
                return
            called = set()
            for code in codes:
                path = os.path.abspath(code.co_filename)
                if path.startswith(prefixes):
                    # A nested function or comprehension counts as the function around it.
                    name = code.co_qualname.split(".<locals>")[0]
                    called.add(path[len(here) :] + "::" + name)
            tests[item.nodeid] = sorted(index.setdefault(name, len(index)) for name in called)

    options = ["-q", "-p", "no:cacheprovider", "-p", "no:warnings", "-c", os.devnull, "--rootdir", here]
    pytest.main([*options, *test_files], plugins=[Tracer()])
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"functions": list(index), "tests": tests}, file)


def script(roots: Sequence[str], test_files: Sequence[str]) -> str:
    """Text of the program that a box runs."""
    arguments = ", ".join(json.dumps(value) for value in (list(roots), list(test_files), RESULT))
    return f"from __future__ import annotations\n\n\n{inspect.getsource(record)}\n\nrecord({arguments})\n"


def parse(data: bytes) -> dict[str, set[str]]:
    """Function id -> node ids of the tests that call it. Raises UserError if no test ran."""
    trace = msgspec.json.decode(data, type=_CallTrace)
    if not trace.tests:
        raise UserError("no test of this repository passes under pytest; repair the suite, or check its dependencies.")
    callers: dict[str, set[str]] = defaultdict(set)
    for test, indices in trace.tests.items():
        for i in indices:
            callers[trace.functions[i]].add(test)
    return dict(callers)


async def trace(box: Box, roots: Sequence[str], test_files: Sequence[str], timeout: float) -> dict[str, set[str]]:
    """Run the suite in `box` and return which tests call which function."""
    await box.write(SCRIPT, script(roots, test_files).encode())
    done = await box.exec(f"python {SCRIPT}", timeout)
    if done.timed_out:
        raise UserError(f"the test suite runs longer than {timeout:.0f} s; give a smaller repository.")
    return parse(await box.read(RESULT, max_bytes=64 << 20))
