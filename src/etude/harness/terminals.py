"""Commands that run in the background of a box's shell, each with its output in a file of the box.

They have the shell's folder and exported variables, no input, and a process group of their own. Commands may
damage their files in /tmp: then the terminal is lost.
"""

import shlex
from dataclasses import dataclass

from etude.harness.tools import Exec
from etude.renderers import ToolError

MOST = 8  # terminals of an episode
KEEP = 16_000  # last bytes of output shown at a time
SECONDS = 10.0  # for the shell to answer


@dataclass
class _Terminal:
    group: int  # process group
    file: str  # of its output
    seen: int = 0  # bytes of its output that were shown


class Terminals:
    """The terminals of one box; ids count from 1 and are never used again."""

    def __init__(self, execute: Exec) -> None:
        self._exec = execute
        self._terminals: dict[int, _Terminal] = {}

    @property
    def ids(self) -> list[int]:
        """The terminals that were started."""
        return list(self._terminals)

    async def start(self, command: str) -> str:
        """Starts a command. Raises ToolError."""
        if len(self._terminals) == MOST:
            raise ToolError(f"an episode has at most {MOST} terminals")
        number = len(self._terminals) + 1
        file = f"/tmp/terminal-{number}"
        # The group's leader outlives the command to write its status down.
        line = (
            f'{{ bash -c {shlex.quote(command)}; echo "$?" >{file}.exit; }} >{file} 2>&1 </dev/null & disown; echo $!'
        )
        done = await self._exec(line, SECONDS)
        if done.rc != 0 or not done.output.strip().isdigit():
            raise ToolError(f"the command could not be started: {done.output[-400:]}")
        self._terminals[number] = _Terminal(int(done.output), file)
        return f"started in terminal {number}"

    async def output(self, id: int) -> str:
        """The output of a command since the last call, after a line with the command's state. Raises ToolError."""
        terminal = self._get(id)
        file = terminal.file
        alive = f"{{ kill -0 {terminal.group} 2>/dev/null && echo running || echo killed; }}"
        line = (
            # The status first: all that a command printed is there once it has ended.
            f"{{ cat {file}.exit 2>/dev/null || {alive}; }} && __size=$(stat -c %s {file}) && echo $__size && "
            f"tail -c +{terminal.seen + 1} {file} | head -c $((__size - {terminal.seen})) | tail -c {KEEP}"
        )
        done = await self._exec(line, SECONDS)
        status, _, rest = done.output.partition("\n")
        size, _, text = rest.partition("\n")
        if not size.isdigit() or not (status.isdigit() or status in ("running", "killed")):
            raise ToolError(f"terminal {id} is lost")
        cut = max(0, int(size) - terminal.seen - KEEP)
        terminal.seen = int(size)
        state = f"exit code {status}" if status.isdigit() else status
        return "\n".join(filter(None, [state, f"[{cut} bytes cut]" if cut else "", text])).rstrip()

    async def kill(self, id: int) -> str:
        """Ends a command and its processes; returns the end of its output. Raises ToolError."""
        group = self._get(id).group
        line = f"kill -TERM -- -{group}; {_wait(-group)}; kill -KILL -- -{group}; {_wait(group)}"
        await self._exec(f"{{ {line}; }} 2>/dev/null", SECONDS)
        return await self.output(id)

    def _get(self, number: int) -> _Terminal:
        if number not in self._terminals:
            raise ToolError(f"there is no terminal {number}")
        return self._terminals[number]


def _wait(process: int) -> str:
    """A shell command that waits, for a second at most, for the end of a process, or of a group if negative."""
    return f"for __i in 1 2 3 4 5 6 7 8 9 10; do kill -0 -- {process} || break; sleep 0.1; done"
