"""Search, background terminals, the list of work and lints, in real boxes wherever something runs."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from etude.grading import leaks
from etude.grading.runner import open_sandbox
from etude.harness.chunks import chunks
from etude.harness.full_tools import FullTools
from etude.harness.loop import Sampling
from etude.harness.ranking import Lexical, best, cosine, search, words
from etude.records import ToolCall
from etude.renderers import Renderer
from etude.sandbox.base import Image, Limits
from tests.harness.test_loop import play
from tests.helpers.histories import rewrite
from tests.helpers.speakers import PATH, SOURCE, MemoryBox, Scripted, Speaker, a_box, a_task

TREE = {
    "src/cart.py": '''"""Carts."""
import os
RATE = 3


# How much a customer saves.
def discount(amount, share):
    return amount * share


class Cart:
    """What a customer wants to buy."""

    size = 9

    def add(self, item):
        self.items.append(item)

    @property
    def total(self):
        return sum(item.price for item in self.items)
''',
    "src/checkout.py": "def pay(cart):\n    charge = discount(cart.total, 0.1)\n    return charge\n",
    "src/parser.py": "def parse_header(line):\n    key, _, value = line.partition(':')\n    return key, value\n",
    "README": "A shop.\n\nHow to install it: run make.\n",
}


def ask(tools: FullTools, name: str, **arguments: Any) -> str:
    return asyncio.run(tools.call(ToolCall(name=name, arguments=arguments)))


def memory() -> FullTools:
    return FullTools(MemoryBox({path: text.encode() for path, text in TREE.items()}), a_task())


def places(result: str) -> list[str]:
    return re.findall(r"^(\S+:\d+-\d+.*) \(score", result, re.MULTILINE)


# --- search -----------------------------------------------------------------------------------------------------------


def test_chunks_are_syntax_nodes_and_together_the_file() -> None:
    found = chunks("src/cart.py", TREE["src/cart.py"])
    assert [(c.first, c.last, c.name) for c in found] == [
        (1, 6, ""), (7, 8, "discount"), (11, 15, "Cart"), (16, 17, "Cart.add"), (19, 21, "Cart.total"),
    ]  # fmt: skip
    kept = {line for c in found for line in c.text.split("\n") if line.strip()}
    assert kept == {line for line in TREE["src/cart.py"].split("\n") if line.strip()}
    assert [(c.first, c.last, c.name) for c in chunks("a.py", "def f(:\n")] == [(1, 2, "")]
    assert [(c.first, c.last) for c in chunks("a.txt", "x\n" * 90)] == [(1, 40), (41, 80), (81, 91)]
    long = chunks("a.py", "def f():\n" + "    x = 1\n" * 299)
    assert [(c.first, c.last, c.name) for c in long] == [(1, 120, "f"), (121, 240, "f"), (241, 300, "f")]
    assert len({c.key for c in long}) == 3
    assert chunks("b.py", "def f(): pass\n")[0].key != chunks("a.py", "def f(): pass\n")[0].key


def test_words_meet_without_their_endings() -> None:
    assert words("parseHTTPHeaders parsing_2 parsed parser") == ["pars", "http", "head", "pars", "2", "pars", "pars"]
    assert words("classes class queries query") == ["class", "class", "query", "query"]


def test_a_question_finds_places_by_words_and_structure() -> None:
    tools = memory()
    assert places(ask(tools, "search", question="how is the header of a message parsed?"))[0] == (
        "src/parser.py:1-3 parse_header"
    )
    found = places(ask(tools, "search", question="where do we pay the charge"))
    assert found[:2] == ["src/checkout.py:1-3 pay", "src/cart.py:7-8 discount"], "the second is called by the first"
    assert places(ask(tools, "search", question="install make", folder="README")) == ["README:1-4"]
    assert places(ask(tools, "search", question="install make", folder="src")) == []
    assert ask(tools, "search", question="zebra crossing") == "nothing found"
    assert ask(tools, "search", question="???") == "nothing found"
    assert ask(tools, "search", question="x", folder="nowhere").startswith("error: ")
    assert tools.metrics["calls/search"] == 7


def test_edits_are_found_at_once_and_what_they_replaced_is_not() -> None:
    tools = memory()
    question = {"question": "refund of an order"}
    assert ask(tools, "search", **question) == "nothing found"
    new = "def refund(order):\n    return -order.total\n"
    ask(tools, "edit", path="src/refunds.py", old="", new=new)
    assert places(ask(tools, "search", **question)) == ["src/refunds.py:1-2 refund", "src/cart.py:19-21 Cart.total"]
    ask(tools, "edit", path="src/refunds.py", old="refund(order)", new="give_back(it)")
    assert "refund(order)" not in ask(tools, "search", **question)
    ask(tools, "undo")
    ask(tools, "undo")
    assert ask(tools, "search", **question) == "nothing found"


def test_an_index_reads_each_chunk_once() -> None:
    scorer = Lexical()
    before = [c for path, text in TREE.items() for c in chunks(path, text)]
    scorer("pay", before)
    read = dict(scorer._read)
    changed = [*chunks("src/checkout.py", "def pay(cart):\n    return refuse(cart)\n")]
    after = [c for c in before if c.path != "src/checkout.py"] + changed
    assert best("refuse", after, scorer, 3)[0][0] == changed[0]
    assert [key for key in scorer._read if key not in read] == [changed[0].key]
    assert all(scorer._read[key] is value for key, value in read.items())
    assert list(scorer("pay", before)) == list(Lexical()("pay", before)), "what was read before changes nothing"


def test_another_embedder_takes_the_place_of_the_default() -> None:
    """A model that knows three directions; each chunk is embedded once."""
    asked: list[int] = []

    def embed(texts: Any) -> np.ndarray:
        asked.append(len(texts))
        return np.array([["disc" in t, "saves" in t or "disc" in t, "zz" in t] for t in texts], float)

    class Embedding(FullTools):
        scorer = staticmethod(cosine(embed))

    tools = Embedding(MemoryBox({path: text.encode() for path, text in TREE.items()}), a_task())
    found = places(ask(tools, "search", question="what he saves"))
    assert found[0] == "src/cart.py:1-6"
    assert set(found[1:]) == {"src/cart.py:7-8 discount", "src/checkout.py:1-3 pay"}, "cosine 1 / sqrt 2 each"
    ask(tools, "search", question="discount")
    assert asked == [1 + sum(len(chunks(p, t)) for p, t in TREE.items()), 1]


def test_ties_are_broken_by_path_and_line() -> None:
    files = [(path, "def same():\n    return 1\n") for path in ("b.py", "a.py")]
    found = re.findall(r"^(\w\.py)", search("same", files, lambda _, chunks: [1.0] * len(chunks)), re.MULTILINE)
    assert found == ["a.py", "b.py"]


# --- background terminals ---------------------------------------------------------------------------------------------


def in_a_box(tmp_path: Path, work: Callable[[FullTools, Callable[..., Awaitable[str]]], Awaitable[None]]) -> None:
    """Runs `work` with tools over a live box of a real sandbox."""
    (tmp_path / "src").mkdir(exist_ok=True)
    (tmp_path / PATH).write_text(SOURCE)

    async def run() -> None:
        async with open_sandbox(workers=1) as sandbox:
            tools = FullTools(await sandbox.create(Image(tmp_path, None, {}), Limits()), a_task())

            async def call(name: str, **arguments: Any) -> str:
                return await tools.call(ToolCall(name=name, arguments=arguments))

            try:
                await work(tools, call)
            finally:
                await tools.box.close()

    asyncio.run(run())


async def until(call: Callable[..., Awaitable[str]], number: int, wanted: str) -> str:
    """All that a terminal prints until it says `wanted`."""
    deadline, found = time.monotonic() + 30, ""
    while wanted not in found:
        assert time.monotonic() < deadline, found
        found += await call("output", id=number) + "\n"
    return found


def test_commands_in_the_background(tmp_path: Path) -> None:
    async def work(tools: FullTools, call: Callable[..., Awaitable[str]]) -> None:
        await call("run", command="cd src; export WHO=me; mkfifo /tmp/door /tmp/back")
        one = await call("run", command="echo hello $WHO in $(basename $PWD); cat /tmp/door; exit 3", background=True)
        two = await call("run", command="trap '' TERM; echo \"it's\" up; sleep 1000 & wait; wait", background=True)
        assert (one, two) == ("started in terminal 1", "started in terminal 2")
        assert tools.state().endswith("Terminals: 1, 2")
        assert "hello me in src" in await until(call, 1, "hello")
        assert await call("output", id=1) == "running", "what was shown is not shown again"
        assert "it's up" in await until(call, 2, "up")
        assert (await call("run", command="echo free")).endswith("free"), "the shell itself is free"
        await call("run", command="echo through > /tmp/door")
        last = await until(call, 1, "exit code 3")
        assert "through" in last
        assert await call("output", id=1) == "exit code 3"
        assert (await call("kill", id=2)).startswith("killed")
        assert "sleep 1000" not in await call("run", command="cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert await call("output", id=2) == "killed"
        assert await call("kill", id=1) == "exit code 3"
        three = await call("run", command="(((", background=True)
        assert three == "started in terminal 3"
        assert "unexpected EOF" in await until(call, 3, "exit code 2")
        await call("run", command="head -c 50000 /dev/zero | tr '\\0' x", background=True)
        shown = await until(call, 4, "exit code 0")
        assert "bytes cut]" in shown or shown.count("x") >= 50000
        assert await call("output", id=9) == "error: there is no terminal 9"
        await call("run", command="rm /tmp/terminal-1")
        assert await call("output", id=1) == "error: terminal 1 is lost"
        for _ in range(4):
            await call("run", command="true", background=True)
        assert await call("run", command="true", background=True) == "error: an episode has at most 8 terminals"

    in_a_box(tmp_path, work)


# --- the list of work -------------------------------------------------------------------------------------------------


def test_arguments_are_read_as_the_tools_take_them() -> None:
    """Null for what is not required leaves it out; what stands in quotes, or is a whole float, is read."""
    tools = FullTools(a_box(), a_task())
    for given, taken in (
        ({"command": "ls", "seconds": None, "background": None}, {"command": "ls"}),
        ({"command": "5", "seconds": "30", "background": "true"}, {"command": "5", "seconds": 30, "background": True}),
        ({"command": "ls", "seconds": 30.0}, {"command": "ls", "seconds": 30}),
    ):
        found = tools.taken(ToolCall(name="run", arguments=given))
        assert (found, list(map(type, found.values()))) == (taken, list(map(type, taken.values())))
    assert ask(tools, "run", command=None) == f"{MALFORMED}command is not of type string"
    assert ask(tools, "run", command="ls", seconds="soon") == f"{MALFORMED}seconds is not of type integer"
    assert ask(tools, "list", path=None) == ask(tools, "list")


MALFORMED, STATUS = "error: malformed call: ", '{"enum": ["open", "doing", "done"]}'


def test_a_list_of_work_is_replaced_as_a_whole_and_counted() -> None:
    tools = FullTools(a_box(), a_task())
    items = [{"task": "find\nit", "status": "done"}, {"task": "fix it", "status": "doing"},
             {"task": "test it", "status": "open"}]  # fmt: skip
    assert ask(tools, "todo", items=items) == "1. [x] find it\n2. [~] fix it\n3. [ ] test it"
    assert tools.metrics["todo_open"] == 2
    assert ask(tools, "todo", items=[items[0]]) == "1. [x] find it"
    assert tools.metrics["todo_open"] == 0
    for wrong, why in (
        ([{"task": "a", "status": "later"}], f"{MALFORMED}items[0].status does not fit {STATUS}"),
        ([{"task": "a", "status": ["open"]}], f"{MALFORMED}items[0].status is not of type string"),
        ([items[0], {"task": " ", "status": "open"}], "error: item 2 is no object of a task and a status"),
        ([items[0], "fix"], f"{MALFORMED}items[1] is not of type object"),
        ([items[0], {"task": "a"}], f"{MALFORMED}items[1] needs status"),
        ([{**items[0], "more": 1}], "error: item 1 is no object of a task and a status"),
        ([items[0]] * 51, "error: a list has at most 50 items"),
    ):
        assert ask(tools, "todo", items=wrong) == why
        assert tools.state() == "Your list:\n1. [x] find it", "what was refused changes nothing"
    assert ask(tools, "todo", items="fix it") == "error: malformed call: items is not of type array"
    assert ask(tools, "todo", items=[]) == "the list is empty"


def test_the_list_and_the_edits_outlive_the_context(hermes: Renderer, hermes_folder: Path) -> None:
    speaker = Speaker(hermes_folder)
    items = [{"task": "mend the price", "status": "open"}]
    turn = speaker.turn(("todo", {"items": items}), ("edit", {"path": PATH, "old": "- 3", "new": "* 3"}))
    policy = Scripted([turn, speaker.turn(text="On it."), speaker.turn(("finish", {}))])
    draft = play(hermes, policy, sampling=Sampling(summarise_at=1, summary_tokens=50))
    assert f"On it.\n\nFiles you have edited: {PATH}\nYour list:\n1. [ ] mend the price" in hermes.text(
        policy.prompts[2]
    )
    assert draft.metrics["todo_open"] == 1


# --- lints ------------------------------------------------------------------------------------------------------------


def test_new_syntax_errors_are_told_and_old_ones_are_not() -> None:
    box = a_box()
    box.files["src/old.py"] = box.start["src/old.py"] = b"def broken(:\n\n\nx = 1\n"
    tools = FullTools(box, a_task())
    paths = {"paths": [PATH, "src/old.py"]}
    only = " (the box has no linter: only syntax was checked)"
    assert ask(tools, "lints", **paths) == f"nothing new{only}"
    ask(tools, "edit", path="src/old.py", old="x = 1", new="x = 2")
    assert ask(tools, "lints", **paths) == f"nothing new{only}", "it was broken before"
    ask(tools, "edit", path=PATH, old="return total", new="return total)")
    assert ask(tools, "lints", **paths) == f"{PATH}:12: SyntaxError: unmatched ')'"
    ask(tools, "edit", path="src/new.py", old="", new="return 1\n")
    assert ask(tools, "lints", paths=["src/new.py"]) == "src/new.py:1: SyntaxError: 'return' outside function"
    ask(tools, "run", command="src/other.py=for")
    assert ask(tools, "lints", paths=["src/other.py"]).endswith("SyntaxError: invalid syntax (may be older)")
    assert ask(tools, "lints", paths=["README"]) == "error: there is no linter for README"
    assert ask(tools, "lints", paths=["nope.py"]) == "error: no such file: nope.py"
    assert ask(tools, "lints", paths=[]) == "error: give one to 20 paths"
    assert ask(tools, "lints", paths=[1]) == f"{MALFORMED}paths[0] is not of type string"


def test_a_linter_of_the_box_is_asked(tmp_path: Path) -> None:
    """A module that speaks as pyflakes does, and as much of it as is needed to be wrong about `bad` names."""
    package = tmp_path / "src" / "pyflakes"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import re, sys\n"
        "for n, line in enumerate(sys.stdin, 1):\n"
        "    for name in re.findall(r'bad\\w*', line):\n"
        "        print(f'<stdin>:{n}:1: undefined name {name!r}')\n"
    )
    (tmp_path / PATH).write_text(SOURCE.replace("amount - 3", "amount - bad_old"))

    async def run() -> None:
        async with open_sandbox(workers=1) as sandbox:
            tools = FullTools(await sandbox.create(Image(tmp_path, None, {}), Limits()), a_task())
            try:
                edit = ToolCall(name="edit", arguments={"path": PATH, "old": "return total", "new": "return bad_new"})
                await tools.call(edit)
                found = await tools.call(ToolCall(name="lints", arguments={"paths": [PATH]}))
                assert found == f"{PATH}:12: undefined name 'bad_new'"
            finally:
                await tools.box.close()

    asyncio.run(run())


# --- history ----------------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> None:
    who = {"NAME": "Ada", "EMAIL": "ada@example.org", "DATE": "2024-05-01T10:00:00Z"}
    names = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, env={**os.environ, **names})


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_history_ends_at_the_base_and_does_not_hold_the_answer(tmp_path: Path) -> None:
    """A repository in which the answer was committed, and taken back later; the box has what is made of it."""
    full, repository = tmp_path / "full", tmp_path / "box"
    (full / "src").mkdir(parents=True)
    (repository / "src").mkdir(parents=True)
    answer = SOURCE.replace("amount - 3", "amount * self.secret_multiplier(amount, 3)")
    git(tmp_path, "init", "-q", "-b", "main", str(full))
    for text, message in ((answer, "Price carts"), (SOURCE, "Simplify prices"), (answer, "Fix the price of 100%")):
        (full / PATH).write_text(text)
        git(full, "add", "-A")
        git(full, "commit", "-q", "-m", message)
    (repository / PATH).write_text(SOURCE)
    wanted = leaks.answer_fingerprint(answer, SOURCE)
    rewrite(full, "main~1", repository / ".git", {PATH: SOURCE.encode()}, wanted)

    async def work(tools: FullTools, call: Callable[..., Awaitable[str]]) -> None:
        listed = await call("history")
        assert re.findall(r"^[0-9a-f]+ 2024-05-01 Ada: (.*)$", listed, re.MULTILINE) == [
            "Simplify prices",
            "Price carts",
        ]
        first = listed.split()[-5]
        assert await call("history", query="PRICE c", author="ada", path="src") == listed.split("\n")[1]
        assert await call("history", query="$(touch /tmp/x); '") == "no commits"
        shown = await call("history", commit=first)
        assert "amount - 3" in shown
        assert "secret_multiplier" not in shown
        assert await call("history", commit="HEAD~1; ls") == "error: give a commit as this tool names it"
        assert (await call("history", commit="abcdef1")).startswith("error: git says: ")
        assert "x" not in (await call("run", command="ls /tmp")).split()
        assert await tools.box.changes() == {}

    in_a_box(repository, work)


def test_a_box_without_a_history_says_so(tmp_path: Path) -> None:
    async def work(_: FullTools, call: Callable[..., Awaitable[str]]) -> None:
        assert await call("history") == "error: this repository has no history"

    in_a_box(tmp_path, work)


def test_tools_that_compact_models_do_not_know_are_unknown_to_them(compact: Renderer, compact_folder: Path) -> None:
    speaker = Speaker(compact_folder)
    draft = play(compact, Scripted([speaker.turn(("todo", {"items": "x"})), speaker.turn(("finish", {}))]))
    assert draft.turns[0].results == ("error: unknown tool todo",)
    assert msgspec.msgpack.encode(draft.turns[0])
