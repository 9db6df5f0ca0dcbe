"""Functions of users as tools: their schemas, their calls in the controller and in boxes, and all that goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from etude.errors import UserError
from etude.grading.runner import open_sandbox
from etude.harness.boxed_tools import MAX_ERROR
from etude.harness.full_tools import FullTools
from etude.harness.python_tools import MAX_RESULT, python_tool, tool
from etude.records import Task, ToolCall
from etude.renderers import ToolError
from etude.sandbox.base import Box, BoxDead, Image, Limits, NotFound
from tests.helpers import boxed_functions as boxed
from tests.helpers.speakers import PATH, SOURCE, a_box, a_task

Call = Callable[..., Awaitable[str]]


def tools(*functions: Callable[..., Any], box: Any = None) -> FullTools:
    return FullTools(a_box() if box is None else box, a_task(), functions=functions)


def ask(tools: FullTools, name: str, **arguments: Any) -> str:
    return asyncio.run(tools.call(ToolCall(name=name, arguments=arguments)))


def result(function: Callable[..., Any], **arguments: Any) -> str:
    return ask(tools(function), function.__name__, **arguments)


# --- schemas ----------------------------------------------------------------------------------------------------------


def search_docs(
    query: str,
    most: int = 3,
    weight: float = 1.0,
    exact: bool = False,
    tags: list[str] | None = None,
    options: dict[str, int] = {},  # noqa: B006
    part: Literal["guide", "reference"] = "guide",
    page: Optional[int] = None,  # noqa: UP045
    *,
    any: list = [],  # type: ignore[type-arg] # noqa: B006
    more: dict[str, Any] | None = None,
    plain="x",  # type: ignore[no-untyped-def]
) -> str:
    """The sections of our manual on a subject.

    Args:
        query: words, in any order
    """
    return json.dumps([query, most, weight, exact, tags, options, part, page, any, more, plain])


def test_a_schema_has_the_types_that_json_has() -> None:
    about = python_tool(search_docs).schema["function"]
    assert (about["name"], about["parameters"]["required"]) == ("search_docs", ["query"])
    assert about["description"].endswith("on a subject.\n\nArgs:\n    query: words, in any order")
    assert about["parameters"]["properties"] == {
        "query": {"type": "string"},
        "most": {"type": "integer"},
        "weight": {"type": "number"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object", "additionalProperties": {"type": "integer"}},
        "part": {"type": "string", "enum": ["guide", "reference"]},
        "page": {"type": "integer"},
        "any": {"type": "array"},
        "more": {"type": "object"},
        "plain": {"type": "string"},
    }


def test_the_schemas_stand_beside_those_of_the_built_in_tools() -> None:
    names = [schema["function"]["name"] for schema in tools(search_docs).schemas]
    assert names[-2:] == ["finish", "search_docs"]
    few = FullTools(a_box(), a_task(), names=("read", "finish"), functions=[search_docs])
    assert [schema["function"]["name"] for schema in few.schemas] == ["read", "finish", "search_docs"]
    assert ask(few, "grep", pattern="x") == "error: unknown tool grep"


def takes_set(x: set[str]) -> None: ...
def takes_union(x: int | str) -> None: ...
def takes_none(x: int | None) -> None: ...
def takes_list(x: list[set[str]]) -> None: ...
def takes_keys(x: dict[int, str]) -> None: ...
def takes_mixed(x: Literal["a", 1]) -> None: ...
def takes_any(x: Any) -> None: ...
def takes_many(*x: str) -> None: ...
def takes_names(**x: str) -> None: ...
def takes_positions(x: str, /) -> None: ...


@pytest.mark.parametrize(
    "function",
    [takes_set, takes_union, takes_none, takes_list, takes_keys, takes_mixed, takes_any, takes_many, takes_names,
     takes_positions],
)  # fmt: skip
def test_other_types_are_refused_by_the_name_of_the_parameter(function: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=rf"^the tool {function.__name__}: \W*x.* must be a str, int") as raised:
        tools(function)
    assert "\n" not in str(raised.value)


def test_names_that_are_taken_or_no_names_are_refused() -> None:
    def grep(pattern: str) -> str: ...  # type: ignore[empty-body]
    def unknown(x: Nothing) -> str: ...  # type: ignore # noqa: F821

    for functions, why in (
        ([grep], "the tool grep has the name of a built-in tool: rename the function"),
        ([search_docs, search_docs], "two tools have the name search_docs"),
        ([lambda x: x], "the tool <function .*<lambda>.* is no function with a name: write one"),
        ([3], "the tool 3 is no function with a name"),
        ([Told], "the tool <class .*Told.* is no function with a name"),
        ([unknown], r"the tool unknown: its annotations cannot be read \(NameError"),
    ):
        with pytest.raises(UserError, match=why):
            tools(*functions)  # type: ignore[arg-type]


# --- calls in the controller ------------------------------------------------------------------------------------------


def test_arguments_come_as_the_model_gives_them_and_defaults_fill_the_rest() -> None:
    own = tools(search_docs)
    shown = json.loads(ask(own, "search_docs", query="ä", tags=["a"], options={"b": 1}, page=None, weight=2))
    assert shown == ["ä", 3, 2, False, ["a"], {"b": 1}, "guide", None, [], None, "x"]
    assert own.metrics == {"calls/search_docs": 1}


def test_arguments_are_read_as_the_function_takes_them() -> None:
    """Numbers in quotes and whole floats are integers; null leaves out, but where the function takes None."""
    own = tools(search_docs)
    shown = json.loads(ask(own, "search_docs", query="7", most="5", weight="2", options='{"b": "1"}', tags=None))
    assert shown == json.loads(ask(own, "search_docs", query="7", most=5.0, weight=2, options={"b": 1}, page=None))
    assert shown[:3] == ["7", 5, 2]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "search_docs needs query"),
        ({"query": 3}, "query is not of type string"),
        ({"query": None}, "query is not of type string"),
        ({"query": "a", "most": True}, "most is not of type integer"),
        ({"query": "a", "most": "three"}, "most is not of type integer"),
        ({"query": "a", "options": []}, "options is not of type object"),
        ({"query": "a", "tags": ["a", 1]}, "tags[1] is not of type string"),
        ({"query": "a", "options": {"b": "1", "c": "x"}}, "options.b is not of type integer"),
        ({"query": "a", "part": "index"}, 'part does not fit {"enum": ["guide", "reference"]}'),
        ({"query": "a", "colour": 1}, "search_docs has no argument colour"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_malformed(arguments: dict[str, Any], why: str) -> None:
    own = tools(search_docs)
    assert ask(own, "search_docs", **arguments) == f"error: malformed call: {why}"
    assert own.metrics == {"malformed": 1}


class Told:
    def __str__(self) -> str:
        return "as str has it"


class Untold:
    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("value", "shown"),
    [("ä€😀\n", "ä€😀\n"), (b"\xc3\xa4\xff", "ä\ufffd"), (None, "None"), (4, "4"), (True, "True"),
     ([1, "a"], "[1, 'a']"), (Told(), "as str has it"),
     (Untold(), "error: KeyError: 'no text'"), ("half \ud83d", "half ?"), ("", "")],
)  # fmt: skip
def test_results_are_shown_as_text(value: object, shown: str) -> None:
    def give() -> object:
        return value

    async def give_later() -> object:
        return value

    assert result(give) == shown
    assert result(give_later) == shown


def test_large_results_are_cut() -> None:
    def give(size: int) -> str:
        return "a" * (size // 2) + "b" * (size // 2)

    shown = result(give, size=10**7)
    assert len(shown) < MAX_RESULT + 100
    assert shown.startswith("aaa")
    assert shown.endswith("bbb")
    assert f"\n[{10**7 - MAX_RESULT} characters cut]\n" in shown
    own = tools(give)
    own.room = 200  # tokens
    assert len(ask(own, "give", size=1000)) < 400


def test_exceptions_are_text_and_the_episode_goes_on() -> None:
    def fail(how: str) -> str:
        raises: dict[str, BaseException] = {
            "exit": SystemExit(3), "stop": StopIteration(), "interrupt": KeyboardInterrupt(), "tool": ToolError("no"),
            "cancelled": asyncio.CancelledError(), "value": ValueError("1\n2"), "late": TimeoutError("mine"),
        }  # fmt: skip
        raise raises[how]

    async def fail_later(how: str) -> str:
        return fail(how)

    own = tools(fail, fail_later)
    for name, how, shown in (
        ("fail", "exit", "RuntimeError: SystemExit: 3"),
        ("fail_later", "exit", "RuntimeError: SystemExit: 3"),
        ("fail", "stop", "RuntimeError: StopIteration"),
        ("fail", "interrupt", "RuntimeError: KeyboardInterrupt"),
        ("fail", "tool", "no"),
        ("fail", "cancelled", "RuntimeError: CancelledError"),
        ("fail_later", "cancelled", "CancelledError"),
        ("fail", "value", "ValueError: 1\n2"),
        ("fail_later", "late", "TimeoutError: mine"),
        ("fail", "else", "KeyError: 'else'"),
    ):
        assert ask(own, name, how=how) == f"error: {shown}"


def test_a_call_that_takes_too_long_is_given_up() -> None:
    ended: list[str] = []

    @tool(seconds=0.3)
    def sleeps() -> str:
        time.sleep(20)
        return "late"

    @tool(seconds=0.3)
    async def stubborn() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        ended.append("it goes on")
        await asyncio.sleep(30)
        return "late"

    async def call(name: str) -> str:
        shown = await tools(sleeps, stubborn).call(ToolCall(name=name, arguments={}))
        await asyncio.sleep(0.1)
        return shown

    for name in ("sleeps", "stubborn"):
        began = time.monotonic()
        assert asyncio.run(call(name)) == f"error: {name} took longer than 0.3 seconds"
        assert time.monotonic() - began < 5
    assert ended


def test_a_call_ends_with_the_episode() -> None:
    def sleeps() -> None:
        time.sleep(20)

    own = tools(sleeps)
    own.deadline = time.monotonic() + 0.3
    assert ask(own, "sleeps").startswith("error: sleeps took longer than 0.")


def test_functions_run_beside_the_loop_and_a_decorated_one_is_itself() -> None:
    @tool
    def nap() -> str:
        time.sleep(0.3)
        return "awake"

    async def both() -> float:
        began = time.monotonic()
        call = ToolCall(name="nap", arguments={})
        assert await asyncio.gather(tools(nap).call(call), tools(nap).call(call)) == ["awake"] * 2
        return time.monotonic() - began

    assert nap() == "awake"
    assert asyncio.run(both()) < 0.58


def test_names_of_parameters_are_free() -> None:
    def free(self: str, tool: str, function: str, call: str, name: str, arguments: str) -> str:
        return self + tool + function + call + name + arguments

    arguments = {"self": "a", "tool": "b", "function": "c", "call": "d", "name": "e", "arguments": "f"}
    call = ToolCall(name="free", arguments=arguments)
    assert asyncio.run(tools(free).call(call)) == "abcdef"


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "3", True, None])
def test_seconds_are_a_number_above_0(seconds: Any) -> None:
    with pytest.raises(UserError, match="the seconds of a tool are a number above 0"):
        tool(seconds=seconds)


def test_only_functions_can_be_marked() -> None:
    with pytest.raises(UserError, match="cannot be marked: write a function"):
        tool(len)


# --- the episode's box and task ---------------------------------------------------------------------------------------


async def count_lines(path: str, box: Box, task: Task) -> str:
    """The number of lines."""
    return f"{task.id}: {(await box.read(path)).count(10)}"


def test_the_episodes_box_and_task_are_passed_beside_the_schema() -> None:
    own = tools(count_lines)
    assert python_tool(count_lines).parameters["properties"] == {"path": {"type": "string"}}
    assert ask(own, "count_lines", path=PATH) == "shop-1: 12"
    assert ask(own, "count_lines", path=PATH, box="x") == "error: malformed call: count_lines has no argument box"
    assert ask(own, "count_lines", path="nothing") == "error: no such file: nothing"


def test_a_lost_box_is_no_fault_of_the_call() -> None:
    box = a_box()
    own = tools(count_lines, box=box)
    for fault, shown in ((NotFound("gone"), "error: gone"), (BoxDead("lost"), None)):
        box.fault = fault
        if shown is not None:
            assert ask(own, "count_lines", path=PATH) == shown
        else:
            with pytest.raises(BoxDead):
                ask(own, "count_lines", path=PATH)


def test_a_task_of_another_class_and_a_missing_box_are_refused() -> None:
    class OtherTask(Task, frozen=True, kw_only=True):
        extra: str

    def other(task: OtherTask) -> None: ...

    other.__annotations__["task"] = OtherTask
    with pytest.raises(UserError, match="the tool other takes a OtherTask, and these tasks are CodeTasks"):
        tools(other)
    for function in (count_lines, boxed.echo):
        with pytest.raises(UserError, match="needs a box, and episodes without files have none"):
            python_tool(function).refuse_without(None, a_task())


# --- calls in boxes ---------------------------------------------------------------------------------------------------


def in_a_box(folder: Path, functions: Sequence[Callable[..., Any]], work: Callable[[FullTools, Call], Any]) -> None:
    """Runs `work` with tools over a live box of a real sandbox."""
    (folder / "src").mkdir(exist_ok=True)
    (folder / PATH).write_text(SOURCE.replace("- 3", "* 3"))
    (folder / "base64.py").write_text("1 / 0\n")  # it hides the standard library's from programs in the box

    async def run() -> None:
        async with open_sandbox(workers=1) as sandbox:
            own = FullTools(await sandbox.create(Image(folder, None, {}), Limits()), a_task(), functions=functions)

            async def call(name: str, **arguments: Any) -> str:
                return await own.call(ToolCall(name=name, arguments=arguments))

            try:
                await work(own, call)
            finally:
                await own.box.close()

    asyncio.run(run())


def test_a_boxed_function_sees_the_repository_and_leaves_nothing_there(tmp_path: Path) -> None:
    functions = (boxed.lines_with, boxed.price, boxed.awaited, boxed.write, boxed.echo, boxed.unboxed)

    async def work(own: FullTools, call: Call) -> None:
        await call("run", command="cd src; export WHO=me")
        lines = "[Line(path='src/shop.py', number=11), Line(path='src/shop.py', number=12)]"
        assert await call("lines_with", word="total") == lines, "what is printed is no part of it"
        assert await call("lines_with", word="total", most=1) == "[Line(path='src/shop.py', number=11)]"
        assert await call("price", amount=2, kind="gross") == "12"
        assert await call("price", amount=2, kind="other") == (
            'error: malformed call: kind does not fit {"enum": ["net", "gross"]}'
        )
        assert await call("unboxed", path="src") == "shop-1: ['shop.py']"
        text = "ä€😀\x1b[31m\r\n\0\x7f\x85\u2028 '\"$(echo no)\\"
        assert await call("awaited", text=text) == text
        assert await call("echo", text="half \ud83d") == "half ?"
        assert await call("echo", text="") == ""
        assert await own.box.changes() == {}
        assert await call("write", path="new.txt", text="hello") == "None"
        assert await own.box.changes() == {"new.txt": b"hello"}
        assert await call("run", command="echo $WHO; pwd; ls /tmp") == "exit code 0\nme\n/workspace/src"
        await call("run", command="python3() { echo no; }; alias python3=false; set -C -u -e; rm -r /workspace/src")
        assert await call("echo", text="still there") == "still there"
        assert own.metrics["calls/lines_with"] == 2

    in_a_box(tmp_path, functions, work)


def test_large_results_and_arguments_of_boxed_functions(tmp_path: Path) -> None:
    async def work(_: FullTools, call: Call) -> None:
        shown = await call("echo", text="a", times=10**7)
        assert 20_000 < len(shown) < 31_000
        assert "characters cut]\n" in shown
        wide = await call("echo", text="😀", times=10**5)
        assert 20_000 < len(wide.encode()) < 31_000
        assert "characters cut]\n" in wide
        assert (await call("echo", text="x" * 300_000)).startswith("xxx"), "arguments are compressed"
        varied = "".join(chr(0x4E00 + n * n % 20_000) for n in range(60_000))
        assert await call("echo", text=varied) == "error: the arguments of echo are too long"

    in_a_box(tmp_path, (boxed.echo,), work)


FAULTS = {
    "exception": "ValueError: first line and \x1b[31msecond",
    "long": "ValueError: " + "x" * (MAX_ERROR - len("ValueError: ")),
    "tool error": "ToolError: no such section",
    "sys.exit": "SystemExit: left",
    "os._exit": "fail ended without a result (exit code 0)",
    "os._exit 3": "fail ended without a result (exit code 3)",
    "segfault": "fail ended without a result (ended by SIGSEGV)",
    "abort": "fail ended without a result (ended by SIGABRT)",
    "killed": "fail ended without a result (ended by SIGKILL)",
    "memory": "MemoryError",
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "input": "EOFError: EOF when reading a line",
    "result": "KeyError: 'no text'",
    "program": "CalledProcessError: Command '['false']' returned non-zero exit status 1.",
}


def test_whatever_a_boxed_function_does_costs_the_call(tmp_path: Path) -> None:
    async def work(own: FullTools, call: Call) -> None:
        await call("run", command="export WHO=me")
        for how, shown in FAULTS.items():
            assert await call("fail", how=how) == f"error: {shown}"
        assert (await call("fail", how="descriptors")).startswith("error: fail ended without a result (exit code ")
        assert await call("fail", how="fork") == "told once"
        assert await call("fail", how="thread") == "done", "threads are not waited for"
        for how in ("loop", "output", "stubborn", "terminal"):
            assert await call("endless", how=how) == "error: endless took longer than 1 seconds"
            assert await call("run", command="echo $WHO") == "exit code 0\nme", "the shell is as it was"
        assert await call("fail", how="nothing") == "nothing"
        assert await own.box.changes() == {}
        own.deadline = time.monotonic() + 0.5
        assert (await call("endless", how="loop")).startswith("error: endless took longer than 0.")

    in_a_box(tmp_path, (boxed.fail, boxed.endless), work)


def test_too_much_memory_in_a_box_costs_the_call(tmp_path: Path) -> None:
    async def work(_: FullTools, call: Call) -> None:
        # Control groups end a process that takes too much; without them all of the box's processes are ended.
        assert await call("hog") in (
            "some were killed",
            "error: hog ended without a result (ended by SIGKILL)",
            "error: hog ended without a result (the shell of the box was lost: too much memory ends all its processes)",
        )
        assert await call("run", command="echo on") == "exit code 0\non"
        assert await call("echo", text="on") == "on"

    in_a_box(tmp_path, (boxed.hog, boxed.echo), work)


def test_a_call_with_the_box_that_takes_too_long_does_not_end_the_box(tmp_path: Path) -> None:
    @tool(seconds=0.5)
    async def wait(box: Box, again: bool) -> str:
        await box.exec("sleep 30", 60.0)
        while again:
            await box.exec("sleep 0.1", 60.0)
        await asyncio.sleep(30)
        return "late"

    async def work(own: FullTools, call: Call) -> None:
        for again in (False, True):
            began = time.monotonic()
            shown = await call("wait", again=again)
            assert shown in ("error: wait took longer than 0.5 seconds", "error: the time of the call is over")
            assert time.monotonic() - began < 10
            assert await call("run", command="echo on") == "exit code 0\non", "no command is in the way"

    wait.__annotations__["box"] = Box
    in_a_box(tmp_path, (wait,), work)


class Holder:
    def method(self, x: str) -> str:
        return x


def test_only_functions_of_a_module_can_be_boxed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closure(x: str) -> str:
        return x

    for function in (closure, lambda x: x, Holder.method, Holder().method):
        with pytest.raises(UserError, match="cannot run in a box: a boxed tool is a function at the top of a module"):
            tool(boxed=True)(function)
    monkeypatch.syspath_prepend(tmp_path)
    head = "from etude.harness.python_tools import tool\n"
    body = '@tool(boxed=True)\ndef f(x: str) -> str:\n    """F."""\n    return x\n'
    much = bytes(n * n % 251 ^ n >> 8 & 255 for n in range(200_000)).hex()
    modules = {
        "relative_in_function": (f"{head}{body}    from .helpers import y\n",
                   r"the tool f cannot run in a box: its module tools_pkg.relative_in_function imports from its "
                   r"package \(line 6: from .helpers import y\), which the box does not have"),
        "relative": (f"{head}from . import helpers\n{body.replace('return x', 'return x * helpers.y')}",
                     r"line 2: from \. import helpers"),
        "replaced": (f"{head}{body}g = f\ndef f(): ...\n", r"tools_pkg.replaced.f is another object"),
        "large": (f"{head}{body.replace('return x', 'return DATA')}DATA = {much!r}\n",
                  r"its module tools_pkg.large is too large: "),
        "with_box": (f"{head}from etude.sandbox import Box\n{body.replace('x: str', 'x: str, box: Box')}",
                     "the tool f: it runs in the box, where there is no box: "),
    }  # fmt: skip
    package = tmp_path / "tools_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helpers.py").write_text("y = 1\n")
    for name, (text, why) in modules.items():
        (package / f"{name}.py").write_text(text)
        module = __import__(f"tools_pkg.{name}", fromlist=[name])
        with pytest.raises(UserError, match=why):
            python_tool(getattr(module, "g", module.f))
    names: dict[str, Any] = {"__name__": "tools_pkg.nowhere"}
    exec(head + body, names)
    with pytest.raises(UserError, match=r"tools_pkg.nowhere.f is another object"):
        python_tool(names["f"])


def test_what_a_function_needs_of_its_module_travels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the environment beside it, nor what reads files or imports neighbours; names may be changed later."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "neighbour.py").write_text("y = 1\n")
    (tmp_path / "whole.py").write_text('''"""A module."""
from __future__ import annotations

import math, pathlib
from pathlib import Path

import etude
from neighbour import y

TEXT = (Path(__file__).parent / "neighbour.py").read_text()
try:
    import tomllib as toml
except ImportError:
    toml = None
TABLE: dict[str, int] = {}
TABLE["half"] = 2


class Own(etude.Environment[etude.Task]):
    table = TEXT

    def tasks(self):
        return [y]

    @etude.reward(weight=0.5)
    def right(self, episode):
        return 1


def root(n: int) -> float:
    return math.sqrt(n) / TABLE["half"]


@etude.tool(
    boxed=True,
)
def half_root(n: int) -> str:
    """Half of the root."""
    return f"{root(n)} {toml.__name__} {'TEXT' in globals()} {'Own' in globals()} {'pathlib' in globals()}"
''')
    module = __import__("whole")

    async def work(own: FullTools, call: Call) -> None:
        assert await call("half_root", n=36) == "3.0 tomllib False False True"

    in_a_box(tmp_path, (module.half_root,), work)


def test_a_module_may_import_the_decorator_and_the_whole_of_etude(tmp_path: Path, monkeypatch: Any) -> None:
    """`boxed_functions` imports records, renderers and the sandbox's types: stand-ins in the box."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_tools.py").write_text(
        textwrap.dedent('''
            import etude
            import etude.config.run as run
            from etude.harness.python_tools import tool
            from etude import Environment

            class Asked(etude.Task, frozen=True):
                right: int = 1

            ASKED = [Asked(id="a", prompt="?")]

            class Mine(Environment[Asked]):
                @etude.reward
                def one(self, episode: etude.EnvironmentEpisode[Asked]):
                    return 1.0

                @etude.reward(weight=0.5)
                def half(self, episode):
                    return 1.0

            @tool
            def outside(x: str) -> str:
                return x

            @tool(boxed=True)
            def names() -> str:
                """Names."""
                return f"{etude.__name__} {run.__name__} {Environment.__name__} {outside('x')} {__name__} {__file__}"

            if __name__ == "__main__":
                raise SystemExit
            ''')
    )
    import my_tools  # type: ignore[import-not-found]

    async def work(_: FullTools, call: Call) -> None:
        assert await call("names") == "etude etude.config.run Environment x etude_tool my_tools.py"

    (tmp_path / "repository").mkdir()
    in_a_box(tmp_path / "repository", (my_tools.names,), work)
