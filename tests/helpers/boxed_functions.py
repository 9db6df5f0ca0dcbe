"""Tools that run inside of boxes, and what may go wrong in them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from etude.harness.python_tools import tool
from etude.records import Task
from etude.renderers import ToolError
from etude.sandbox import Box

HERE = "the module is executed as a whole"


@dataclass
class Line:
    path: str
    number: int


async def unboxed(box: Box, task: Task, path: str) -> str:
    """Not for the box, but beside functions that are."""
    return f"{task.id}: {await box.list(path)}"


@tool(boxed=True)
def lines_with(word: str, most: int | None = None) -> list[Line]:
    """The lines of the shop that have a word.

    Args:
        word: a text without line breaks
        most: number of lines
    """
    print("this is printed", HERE)
    print("and this", file=sys.stderr)
    os.system("echo by a program; echo and here >&2; echo there >&3")
    text = Path("src/shop.py").read_text()
    return [Line("src/shop.py", n) for n, line in enumerate(text.splitlines(), 1) if word in line][:most]


@tool(boxed=True)
def price(amount: float, kind: Literal["net", "gross"] = "net") -> float:
    """The price by the shop's own code."""
    import shop

    return shop.Shop().price(amount) * (1 if kind == "net" else 2)


@tool(boxed=True)
async def awaited(text: str) -> bytes:
    """An async function."""
    return text.encode()


@tool(boxed=True)
def write(path: str, text: str) -> None:
    """Writes a file."""
    Path(path).write_text(text)


@tool(boxed=True)
def echo(text: str, times: int = 1) -> str:
    """A text again."""
    return text * times


@tool(boxed=True, seconds=20.0)
def fail(how: str) -> str:
    """Goes wrong."""
    match how:
        case "exception":
            raise ValueError("first line\nand \x1b[31msecond")
        case "long":
            raise ValueError("x" * 10_000)
        case "tool error":
            raise ToolError("no such section")
        case "sys.exit":
            sys.exit("left")
        case "os._exit":
            os._exit(0)
        case "os._exit 3":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            return str(len(b"x" * (16 << 30)))
        case "recursion":
            return fail(how)
        case "input":
            return input()
        case "result":

            class Bad:
                def __str__(self) -> str:
                    raise KeyError("no text")

            return Bad()  # type: ignore[return-value]
        case "descriptors":
            os.closerange(0, 256)
            return "nobody hears this"
        case "fork":
            os.fork()
            return "told once"
        case "thread":
            import threading

            threading.Thread(target=time.sleep, args=(100,)).start()
            return "done"
        case "program":
            subprocess.run(["false"], check=True)
    return how


@tool(boxed=True, seconds=1.0)
def endless(how: str) -> str:
    """Does not end."""
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        if how == "output":
            print("x" * 10_000)
        if how == "terminal":
            Path("/dev/tty").write_text("x" * 10_000)


def grep(pattern: str) -> str:
    """A name that is taken."""
    return pattern


class OtherTask(Task, frozen=True, kw_only=True):
    """A task of an environment."""


def of_an_environment(task: OtherTask) -> str:
    """Not for tasks of repositories."""
    return task.id


def untyped(words: set[str]) -> str:
    """JSON has no sets."""
    return str(words)


@tool(boxed=True)
def hog() -> str:
    """Takes memory in several processes, as much as the box has and more."""
    for _ in range(4):
        if os.fork() == 0:
            data = bytearray(os.urandom(1 << 20) * 600)
            time.sleep(30)
            return str(len(data))
    ends = [os.wait()[1] for _ in range(4)]
    return "some were killed" if signal.SIGKILL in ends else "none was killed"
