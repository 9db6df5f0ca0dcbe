"""The traces of commands in a live box, brought into another box."""

import asyncio
from pathlib import Path

import pytest

from etude.grading.runner import open_sandbox
from etude.sandbox.base import BoxError, Image, Limits
from etude.sandbox.box import ValueBox
from etude.sandbox.left_state import LeftState

SHELL = "cd src; export A=b; f() { echo hi $1; }; alias l=ls; set -o pipefail; shopt -s extglob; umask 027; x=(1 '2 3')"
FILES = (
    "echo hi >/tmp/x; mkdir -p ~/q/z; ln -s b.txt link; mkdir empty; echo 1 >src/new.py; chmod +x src/a.py; "
    "chmod 644 src/run.sh; mkdir -p n/e; echo 3 >n/e/w.txt"
)
SHOWN = (
    "pwd; echo $A ${x[1]} $SHELLOPTS; f 2; alias; umask; cat /tmp/x; cd /workspace; "
    "find . ~ -printf '%y %m %l %p\\n' | sort"
)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    (tmp_path / "src").mkdir()
    for name, mode in (("src/a.py", 0o644), ("src/run.sh", 0o755)):
        (tmp_path / name).write_text("x = 1\n")
        (tmp_path / name).chmod(mode)
    return Image(tmp_path, None, {"b.txt": "hello"})


async def left_by(box: ValueBox, *commands: str) -> tuple[LeftState, dict[str, bytes | None]]:
    """The traces after the last command, and all files that were written."""
    watch, files, left = await box.watched(), dict[str, bytes | None](), LeftState()
    for command in commands:
        await box.exec(command, 10.0)
        left, written = await watch.look()
        files |= written
    return left, files


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param(("cat b.txt; python3 -c 'print(1)'",), id="nothing"),
        pytest.param((SHELL,), id="the shell"),
        pytest.param((FILES,), id="files"),
        pytest.param((FILES, "rm -r src; unset HISTFILE; echo 4 >b.txt", SHELL.partition("; ")[2]), id="all of it"),
        pytest.param(("sleep 50 & echo 1 >/tmp/y", "kill %1; sleep 0.1; rm /tmp/y"), id="gone again"),
    ],
)
def test_another_box_gets_what_commands_left(image: Image, commands: tuple[str, ...]) -> None:
    async def both() -> tuple[LeftState, str, str]:
        async with open_sandbox(workers=1) as sandbox:
            one, other = [await sandbox.create(image, Limits()) for _ in range(2)]
            left, files = await left_by(one, *commands)
            for path, data in files.items():
                if data is not None:
                    await other.write(path, data)
                elif path != "src/new.py":  # it was there only between two commands
                    await other.delete(path)
            await (await other.watched()).bring(left)
            shown = [(await box.exec(SHOWN, 10.0)).output for box in (one, other)]
            for box in (one, other):
                await box.close()
            return left, shown[0], shown[1]

    left, one, other = asyncio.run(both())
    assert left.fault == ""
    assert one == other
    assert (left == LeftState()) is (len(commands) == 1 and commands[0].startswith("cat")) or commands[0][0] == "s"


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("sleep 50 &", "1 processes go on in the background"),
        ("trap 'echo bye' EXIT", "traps, limits or open files of the shell have changed"),
        ("exec 5>/tmp/log", "traps, limits or open files of the shell have changed"),
        ("mkfifo /tmp/pipe", "/tmp/pipe is no file, folder or link"),
        ("head -c 9000000 /dev/zero >src/zero", "a command has written more than 8 MB"),
        ("head -c 9000000 /dev/zero >/tmp/zero", "files outside of the work tree are too large"),
    ],
)
def test_what_no_other_box_gets_is_named(image: Image, command: str, fault: str) -> None:
    async def once() -> LeftState:
        async with open_sandbox(workers=1) as sandbox:
            box = await sandbox.create(image, Limits())
            left, _ = await left_by(box, command)
            await box.close()
            return left

    assert asyncio.run(once()).fault.startswith(fault)


def test_a_box_that_cannot_get_it_says_so(image: Image) -> None:
    async def once() -> None:
        async with open_sandbox(workers=1) as sandbox:
            one, other = [await sandbox.create(image, Limits()) for _ in range(2)]
            left, _ = await left_by(one, "mkdir new; cd new")
            with pytest.raises(BoxError, match="cannot be brought back"):
                await (await other.watched()).bring(LeftState(shell=left.shell))
            for box in (one, other):
                await box.close()

    asyncio.run(once())
