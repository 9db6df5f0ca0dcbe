"""Both presentations of the tools: what the model reads, and what happens to the files."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from etude.harness.compact_tools import CompactTools
from etude.harness.full_tools import FullTools
from etude.harness.grep import compile_pattern, search
from etude.harness.tools import Tools, failures, verdict
from etude.records import ToolCall
from etude.renderers import ToolError
from etude.renderers.schemas import COMPACT_PARAMETERS, SCHEMAS
from etude.sandbox.base import BoxDead, TestReport, TooLarge
from tests.helpers.speakers import PATH, SOURCE, TEST, MemoryBox, a_box, a_task


def ask(tools: Tools, name: str, **arguments: Any) -> str:
    return asyncio.run(tools.call(ToolCall(name=name, arguments=arguments)))


@pytest.fixture
def box() -> MemoryBox:
    return a_box()


@pytest.fixture
def compact(box: MemoryBox) -> CompactTools:
    tools = CompactTools(box, a_task())
    asyncio.run(tools.open())
    assert asyncio.run(tools.source()) == "def price(self, amount):\n    total = amount - 3\n    return total"
    return tools


@pytest.fixture
def full(box: MemoryBox) -> FullTools:
    return FullTools(box, a_task())


def test_compact_results_are_the_words_of_the_dialect(compact: CompactTools, box: MemoryBox) -> None:
    assert ask(compact, "undo") == "error: nothing to undo"
    assert ask(compact, "edit", old="amount + 3", new="x") == "error: no match"
    assert ask(compact, "edit", old="amount", new="x") == "error: 2 matches"
    assert ask(compact, "edit", old="total", new="total") == "error: no change"
    failed = ask(compact, "test")
    assert failed == ("failed: doctest:Shop.price: expected 6, got -1 " + "x" * 200)[:100]
    assert ask(compact, "edit", old="    total = amount - 3\n", new="    total = amount * 3\n") == "ok"
    assert ask(compact, "test") == "passed"
    assert box.files[PATH].decode() == SOURCE.replace("- 3", "* 3")
    assert ask(compact, "read") == "def price(self, amount):\n    total = amount * 3\n    return total"
    assert ask(compact, "undo") == "undone"
    assert box.files[PATH].decode() == SOURCE
    assert ask(compact, "undo") == "error: nothing to undo"
    assert ask(compact, "dance") == "error: unknown tool dance"
    assert asyncio.run(compact.call(ToolCall(name="edit", arguments=None, error="x"))) == "error: malformed call"
    assert ask(compact, "list") == "other.py\nshop.py"
    assert ask(compact, "grep", pattern="^import") == "src/other.py:1: import shop"
    assert ask(compact, "grep", pattern="zzz") == "no matches"
    assert ask(compact, "grep", pattern="(a+)+").startswith("error: the pattern repeats")
    assert compact.metrics == {
        "edits": 1, "edit_errors": 3, "repeats": 0, "undo": 1, "tests_run": 2, "tests_failed": 1, "malformed": 2,
        "calls/edit": 4, "calls/undo": 3, "calls/test": 2, "calls/read": 1, "calls/list": 1, "calls/grep": 3,
    }  # fmt: skip
    assert compact.visible_passed is False, "the last edit was taken back"


@pytest.mark.parametrize("kind", ["compact", "full"])
def test_edits_that_lead_to_a_file_as_it_has_been_are_counted(kind: str, request: pytest.FixtureRequest) -> None:
    tools: Tools = request.getfixturevalue(kind)
    path = {} if kind == "compact" else {"path": PATH}
    ask(tools, "edit", old="- 3", new="- 4", **path)
    assert tools.metrics["repeats"] == 0
    ask(tools, "undo")
    ask(tools, "edit", old="- 3", new="- 4", **path)
    assert tools.metrics["repeats"] == 1
    ask(tools, "edit", old="- 4", new="- 3", **path)  # as at the start
    assert tools.metrics["repeats"] == 2
    ask(tools, "edit", old="- 3", new="- 5", **path)
    assert (tools.metrics["repeats"], tools.metrics["edits"]) == (2, 4)


def test_a_command_that_changes_the_file_is_seen(compact: CompactTools, box: MemoryBox) -> None:
    assert ask(compact, "edit", old="- 3", new="- 4") == "ok"
    assert ask(compact, "run", command=f"{PATH}={SOURCE.replace('- 3', '- 5')}") == f"exit 0\nwrote {PATH}"
    assert "amount - 5" in ask(compact, "read")
    assert ask(compact, "undo") == "error: nothing to undo"  # what the command wrote is not taken back
    assert ask(compact, "edit", old="- 5", new="* 3") == "ok"
    assert box.files[PATH].decode() == SOURCE.replace("- 3", "* 3")
    ask(compact, "run", command=f"{PATH}=gone")
    assert ask(compact, "edit", old="* 3", new="- 3") == "error: the function was moved or removed"


def test_a_result_leaves_room_in_a_small_context(full: FullTools, box: MemoryBox) -> None:
    box.files["long.py"] = "".join(f"line {n}\n" for n in range(1, 400)).encode()
    full.room = 200  # tokens
    shown = ask(full, "read", path="long.py")
    *lines, last = shown.splitlines()
    assert lines[0] == "     1\tline 1"
    assert sum(len(line) + 1 for line in lines) <= 300
    assert last == (
        f"[{399 - len(lines)} more lines; your context has room for no more at once; "
        f"read on with offset {len(lines) + 1}]"
    )
    assert ask(full, "read", path="long.py", offset=3, limit=1).splitlines() == [
        "     3\tline 3", "[396 more lines; read on with offset 4]",
    ], "what was asked for fits"  # fmt: skip
    cut = ask(full, "grep", pattern="line")
    assert len(cut) < 400
    assert cut.startswith("long.py:1: line 1\n")
    assert "\n[cut short: your context has room for no more at once]\n" in cut
    assert cut.endswith("long.py:200: line 200\n[search cut short]"), "the end of a result is often what counts"
    together = [ToolCall(name="read", arguments={"path": "long.py", "offset": at}) for at in (1, 100, 200)]
    results, _ = asyncio.run(full.call_all(together))
    assert sum(len(result) for result in results) <= 300 + 3 * 100, "the calls of a turn share the room"
    full.room, full.sharing = 0, 1
    box.files["wide.py"] = b"x" * 5000 + b"\ny"
    (line, more) = ask(full, "read", path="wide.py").splitlines()
    assert line == "     1\t" + "x" * 143 + " [line cut short]"
    assert more.startswith("[1 more lines; ")


def test_full_tools(full: FullTools, box: MemoryBox) -> None:
    assert ask(full, "list") == ".git/\nREADME\nsrc/"
    assert ask(full, "read", path="README") == "     1\tShop"
    assert ask(full, "read", path=PATH, offset=4, limit=2) == (
        "     4\tclass Shop:\n     5\t    def price(self, amount):\n[7 more lines; read on with offset 6]"
    )
    assert ask(full, "read", path=PATH, offset=99) == "error: the file has 12 lines"
    assert ask(full, "read", path="nope") == "error: no such file: nope"
    near = ask(full, "edit", path=PATH, old="total = amout - 3", new="x")
    assert near == "error: no match; the nearest line is 11: total = amount - 3"
    assert ask(full, "edit", path=PATH, old="amount", new="x").startswith("error: 2 matches: give more lines")
    assert ask(full, "edit", path=PATH, old="amount - 3", new="amount * 3") == "ok"
    assert ask(full, "test") == "1 of 1 passed"
    assert ask(full, "edit", path="src/new.py", old="", new="n = 1\n") == "ok"
    assert (
        ask(full, "edit", path="src/new.py", old="", new="n = 2\n")
        == "error: src/new.py exists; give the text to replace"
    )
    assert ask(full, "undo") == "undone: src/new.py"
    assert "src/new.py" not in box.files
    assert ask(full, "undo") == f"undone: {PATH}"
    assert box.files[PATH].decode() == SOURCE
    assert ask(full, "test").startswith("0 of 1 passed\nfailed: doctest:Shop.price: expected 6, got -1")
    assert ask(full, "grep", pattern="shop", ignore_case=True, path="src") == (
        'src/other.py:1: import shop\nsrc/shop.py:1: """Shop."""\nsrc/shop.py:4: class Shop:\n'
        "src/shop.py:8:         >>> Shop().price(2)"
    )
    assert ask(full, "grep", pattern="Shop").count(".git") == 0
    assert ask(full, "grep", pattern="Shop", path="nope") == "error: no such folder: nope"
    assert ask(full, "grep", pattern="Shop", path="README") == "README:1: Shop"


def test_undo_does_not_overwrite_what_something_else_wrote(full: FullTools, box: MemoryBox) -> None:
    ask(full, "edit", path="README", old="Shop", new="Store")
    ask(full, "run", command="README=other")
    assert ask(full, "undo") == "error: README has changed since that edit"
    assert box.files["README"] == b"other"


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("read", {}, "read needs path"),
        ("read", {"path": 1}, "path is not of type string"),
        ("read", {"path": "a", "offset": True}, "offset is not of type integer"),
        ("read", {"path": "a", "file": "b"}, "read has no argument file"),
    ],
)
def test_wrong_arguments_are_malformed(full: FullTools, name: str, arguments: dict[str, Any], why: str) -> None:
    assert ask(full, name, **arguments) == f"error: malformed call: {why}"
    assert full.metrics["malformed"] == 1


def test_only_failures_that_are_ours_are_raised(compact: CompactTools, full: FullTools, box: MemoryBox) -> None:
    box.fault = TooLarge("the change set is too large")
    assert ask(compact, "edit", old="- 3", new="* 3") == "error: the change set is too large"
    assert ask(full, "read", path=PATH) == "error: the change set is too large"
    box.fault = None
    assert ask(compact, "read").endswith("amount - 3\n    return total")  # the refused edit did not happen
    box.fault = BoxDead("gone")
    for tools in (compact, full):
        with pytest.raises(BoxDead):
            ask(tools, "test")


def test_files_that_are_not_utf8_are_kept_byte_for_byte() -> None:
    source = b"# \xff\xe9\ndef f():\n    return 'caf\xe9' - 1\n"
    box = MemoryBox({PATH: source})
    task = msgspec.structs.replace(a_task(), focus=msgspec.structs.replace(a_task().focus, first_line=2, last_line=3))
    tools = CompactTools(box, task)
    asyncio.run(tools.open())
    assert asyncio.run(tools.source()) == "def f():\n    return 'caf?' - 1"
    assert ask(tools, "edit", old="' - 1", new="' + 1") == "ok"
    assert box.files[PATH] == source.replace(b"- 1", b"+ 1")
    full = FullTools(MemoryBox({PATH: source, "b": b"\0"}), task)
    assert ask(full, "read", path=PATH).endswith("return 'caf?' - 1")
    assert ask(full, "read", path="b") == "error: b is a binary file"


def test_test_reports_in_one_line() -> None:
    def report(**outcomes: str) -> TestReport:
        return TestReport(outcomes, {"a.py::T::test_a[x::y]": "boom\nbang"}, 0.0, timed_out=True)

    assert verdict(failures(TestReport({"a::b": "passed"}, {}, 0.0), ["a::b"])) == "passed"
    assert verdict(failures(report(**{"a.py::T::test_a[x::y]": "failed"}), ["a.py::T::test_a[x::y]"])) == (
        "failed: test_a[x::y]: boom bang"
    )
    assert verdict(failures(report(), [TEST])) == "failed: doctest:Shop.price: timed out"


def test_schemas_name_the_tools_of_the_compact_dialect_and_those_that_only_large_models_use() -> None:
    names = [s["function"]["name"] for s in SCHEMAS]
    assert len(names) == len(set(names))
    assert set(names) - set(COMPACT_PARAMETERS) == {
        "apply", "search", "output", "kill", "todo", "lints", "history",
    }  # fmt: skip
    assert set(COMPACT_PARAMETERS) <= set(names)


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+$", r"(a|a)*b", r"(a?){25}a{25}", "a?" * 25 + "a" * 25, r"(.*)\1", r".*x.*y.*z.*w", "[", "(?(1)a)", "(a*)*",
     r"(?:a|b|ab){9}" * 3, "x" * 501, r"(a{0,99}){99}"],
)  # fmt: skip
def test_patterns_that_may_take_too_long_are_refused(pattern: str) -> None:
    with pytest.raises(ToolError):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"def .*\(.*\):", r".*foo.*", r".*?foo", r"^\s*return \w+$", r"(foo|bar)", r"[a-z]{3}", r"a\.*", "(ab)*c"],
)
def test_allowed_patterns_match_what_python_says(pattern: str) -> None:
    import re

    texts = ["def f(x):", "xfooy", "  return x", "abc", "a...", "ababc", "bar", ""]
    compiled, _ = compile_pattern(pattern)
    assert [bool(compiled.search(t)) for t in texts] == [bool(re.search(pattern, t)) for t in texts]


def test_the_worst_allowed_patterns_end() -> None:
    """The deadline is looked at between lines, so one line must be short work: 5 s is 50 times what it takes."""
    text = ("a" * 5000 + "\n") * 200
    for pattern in (r"[a-z]+[a-z]+!", "a?a?a?a?a?a?b", r".*.*!", r"(?=a*b)a*c"):
        started = time.process_time()
        search([("f", text)], pattern, ignore_case=False, limit=10, seconds=0.05)
        assert time.process_time() - started < 5


@pytest.mark.parametrize("arguments", [{}, {"old": "x"}, {"old": "x", "new": "y", "more": "z"}])
def test_a_compact_call_with_other_arguments_is_malformed(arguments):
    """Sampled by a model in training: `edit` alone. An outcome, not an exception."""
    from etude.harness.compact_tools import CompactTools
    from etude.records import ToolCall

    tools = CompactTools.__new__(CompactTools)
    with pytest.raises(ToolError, match="edit takes 2 arguments"):
        tools.taken(ToolCall(name="edit", arguments=arguments))
    assert tools.taken(ToolCall(name="edit", arguments={"old": "x", "new": "y"})) == {"old": "x", "new": "y"}


@pytest.mark.parametrize("odd", ["\f", "\x1c", "\x85", "\u2028", "\r"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_tools_count_lines_as_git_does(odd: str, end: str) -> None:
    """What `read` numbers, `grep` finds and `edit` replaces are the same lines; the others keep their bytes."""
    box = MemoryBox({"notes.txt": f"a{odd}b{end}c{odd}c{end}needle{end}".encode()})
    tools = FullTools(box, a_task())  # type: ignore[arg-type]
    assert ask(tools, "read", path="notes.txt") == f"     1\ta{odd}b\n     2\tc{odd}c\n     3\tneedle"
    assert ask(tools, "grep", pattern="needle") == "notes.txt:3: needle"
    assert "the nearest line is 3" in ask(tools, "edit", path="notes.txt", old="needles", new="")
    assert ask(tools, "edit", path="notes.txt", old=f"b\nc{odd}c\n", new="B\nC\n") == "ok"
    assert box.files["notes.txt"] == f"a{odd}B{end}C{end}needle{end}".encode()


def test_places_that_overlap_are_counted() -> None:
    text = "x = [\n    (\n    )\n    )\n    )\n]\n"
    for end in ("\n", "\r\n"):
        box = MemoryBox({"m.py": text.replace("\n", end).encode()})
        tools = FullTools(box, a_task())  # type: ignore[arg-type]
        answer = ask(tools, "edit", path="m.py", old="    )\n    )", new="    )")
        assert answer.startswith("error: 2 matches")
        assert box.files == box.start
