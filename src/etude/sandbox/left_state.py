"""The traces of commands in a live box, and how another box gets them.

A change set holds the content of regular files in the work tree. Commands leave more: files elsewhere, links, modes and
empty folders, the folder, variables and functions of the shell, processes. A `StateWatch` reads all of it beside the
shell and with one line in it, compares it with the fresh box, and says by name what no other box can get.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import blake3

from etude.records import Record
from etude.sandbox.base import BoxError
from etude.sandbox.shell import Shell

SECONDS = 5.0  # of each program and line
MAX_LISTED = 4 << 20  # bytes of a listing
MAX_KEPT = 8 << 20  # bytes of files that one command leaves, and again outside of the work tree
MARGIN = 0.05  # seconds: the clock of file times is coarse

# Fields end with NUL: the time; processes; whether the tree changed since $1; entries as attributes, path and target of
# a link. Folders of the image have a writable layer each, of which only what is newer than the box ($2) is listed.
_LOOK = r"""
export LC_ALL=C; exec 1>&3 2>/dev/null
[[ $(find / -maxdepth 0 -printf x) == x && $EPOCHREALTIME ]] || exit 3
printf '%s\0' "$EPOCHREALTIME"
for p in /proc/[0-9]*; do
  p=${p#/proc/}; [[ $p != $$ ]] && read -r line </proc/$p/stat || continue
  line=${line##*) }; [[ $line == Z* ]] || printf 'p%s\0' "$p"
done
[[ -z $1 || $(find . -newerct "@$1" -print -quit) ]] && printf 'c\0'
find . -path ./.git -prune -o \( ! -type f -o ! -perm 644 \) -printf 't%y %m 0 0\0%p\0%l\0'
while read -r _ place kind options _; do
  [[ $options == rw* && $place != $PWD && $place != /proc* ]] || continue
  form='o%y %m %s %T@\0%p\0%l\0'
  case $kind in
    tmpfs) find "$place" -xdev -mindepth 1 -printf "$form" ;;
    overlay) find "$place" -xdev -mindepth 1 -newerct "@${2:-$EPOCHREALTIME}" ! -path "$PWD*" -printf "$form" ;;
  esac
done </proc/mounts
printf 'e\0'
"""
_PACK = "exec tar -cPf - --format=posix --no-recursion --null -T - >&3"
_UNPACK = "exec tar -xPpf -"
_REMOVE = "exec xargs -0 rm -rf --"

_MARK = "--8<-- state of the shell"
_PARTS = ("echo $$; builtin pwd", "declare -p", "declare -f; declare -F", "alias -p", "shopt -p", "set +o", "umask")
_KEPT = ("trap -p; ulimit -Sa; cd /proc/self/fd && echo *",)  # no other shell gets these
_SHELL = f"( {f'; echo {shlex.quote(_MARK)}; '.join((*_PARTS, *_KEPT))} ) 2>/dev/null"
_VARIABLE = re.compile(r"declare -[a-zA-Z-]+ ([A-Za-z_][A-Za-z0-9_]*)")
# Variables that follow from the rest, or change by themselves.
_VOLATILE = frozenset(
    {
        "_",
        "__n",
        "__line",
        "__time",
        "PWD",
        "SHLVL",
        "COLUMNS",
        "LINES",
        "BASH",
        "BASHOPTS",
        "SHELLOPTS",
        "BASHPID",
        "BASH_ALIASES",
        "BASH_ARGC",
        "BASH_ARGV",
        "BASH_ARGV0",
        "BASH_CMDS",
        "BASH_COMMAND",
        "BASH_LINENO",
        "BASH_SOURCE",
        "BASH_SUBSHELL",
        "BASH_MONOSECONDS",
        "BASH_TRAPSIG",
        "DIRSTACK",
        "EPOCHREALTIME",
        "EPOCHSECONDS",
        "FUNCNAME",
        "HISTCMD",
        "LINENO",
        "OPTIND",
        "PIPESTATUS",
        "PPID",
        "RANDOM",
        "SECONDS",
        "SRANDOM",
        "GROUPS",
        "COMP_WORDBREAKS",
    }
)


class LeftState(Record, frozen=True, kw_only=True):
    """The difference between a box and a fresh one of its image, beside the content of regular files in the work tree.
    `fault` is the reason why another box cannot get it; empty: it can."""

    shell: tuple[str, ...] = ()  # its folder, variables, functions, aliases and options; () as in a fresh box
    entries: tuple[bytes, ...] = ()  # new or changed files, links and folders
    archive: bytes = b""  # of these
    gone: tuple[bytes, ...] = ()  # paths of the fresh box
    fault: str = ""


@dataclass(frozen=True)
class _Look:
    """A box at one moment."""

    time: float
    shell: tuple[str, ...]
    processes: frozenset[str]
    entries: Mapping[bytes, bytes]  # path -> attributes and target of a link
    changed: bool  # since the look before: something in the work tree


@dataclass
class StateWatch:
    """Watches one live box. `start` comes first, before a command of the agent. Nobody sees the state of `services`."""

    shell: Shell
    services: bool = False
    blind: str = ""  # why no other box can get what is left here, from now on
    _fresh: _Look | None = None
    _since: float = 0.0
    _files: dict[str, bytes | None] = field(default_factory=dict[str, bytes | None])  # path -> digest at the last look

    async def start(self) -> None:
        """Notes the state of the fresh box. Raises BoxError with payer "infra" alone."""
        try:
            self._fresh = await self._look()
            self._since = self._fresh.time
            self._files = {path: _digest(data) for path, data in (await self.shell.changes()).items()}
        except (BoxError, TimeoutError) as e:
            if isinstance(e, BoxError) and e.payer == "infra":
                raise
            self.blind = f"the box cannot be read: {e}"

    async def look(self) -> tuple[LeftState, dict[str, bytes | None]]:
        """The difference to the fresh box, and the files of the work tree that were written (None: deleted) since the
        look before. Raises BoxError with payer "infra" alone."""
        if self.blind:
            return LeftState(fault=self.blind), {}
        try:
            now = await self._look()
            files = await self._written(now)
            if sum(len(data or b"") for data in files.values()) > MAX_KEPT:
                self.blind = f"a command has written more than {MAX_KEPT >> 20} MB"
                return LeftState(fault=self.blind), {}
            return await self._left(now), files
        except (BoxError, TimeoutError) as e:
            if isinstance(e, BoxError) and e.payer == "infra":
                raise
            return LeftState(fault=f"the box cannot be read: {e}"), {}

    async def bring(self, left: LeftState) -> None:
        """Makes the box one with these differences. Raises BoxError if it cannot be."""
        if self.blind:
            raise BoxError(self.blind)
        for script, payload in ((_REMOVE, b"\0".join(left.gone)), (_UNPACK, left.archive)):
            if payload and (done := await self.shell.program(["bash", "-c", script], payload, SECONDS)).status:
                raise BoxError(f"files cannot be brought back: {done.errors[-200:].strip()}")
        if left.shell:
            assert self._fresh is not None
            await self.shell.exec(restoring(self._fresh.shell, left.shell), SECONDS)
        now, _ = await self.look()
        if now.fault or (now.shell, now.entries) != (left.shell, left.entries):
            raise BoxError(f"the state of the box cannot be brought back{now.fault and f': {now.fault}'}")

    async def _look(self) -> _Look:
        answer = await self.shell.exec(_SHELL, SECONDS)
        sections = tuple(answer.output.split(f"{_MARK}\n"))
        if answer.cut or answer.timed_out or len(sections) != len(_PARTS) + len(_KEPT):
            raise BoxError("the shell does not tell its state")
        pid, _, folder = sections[0].partition("\n")
        since = f"{self._since - MARGIN:.6f}" if self._since else ""
        began = "" if self._fresh is None else f"{self._fresh.time:.6f}"
        argv = ["bash", "-c", _LOOK, "bash", since, began]
        done = await self.shell.program(argv, b"", SECONDS, max_report=MAX_LISTED)
        fields = done.report.split(b"\0")
        if done.status or done.cut or fields[-2:] != [b"e", b""]:
            raise BoxError("its files and processes cannot be listed")
        time, processes, entries, changed = float(fields[0]), set[str](), dict[bytes, bytes](), False
        rest = iter(fields[1:-2])
        for about in rest:
            if about[:1] == b"p":
                processes.add(about[1:].decode())
            elif about == b"c":
                changed = True
            else:
                path, target = next(rest), next(rest)
                entries.setdefault(path, _attributes(about, target))
        shell = (folder, "\n".join(_variables(sections[1])), *sections[2:])
        return _Look(time, shell, frozenset(processes - {pid}), entries, changed)

    async def _written(self, now: _Look) -> dict[str, bytes | None]:
        if not now.changed:
            return {}
        current = await self.shell.changes()
        self._since = now.time
        digests = {path: _digest(data) for path, data in current.items()}
        written = {path: current[path] for path, digest in digests.items() if self._files.get(path, b"") != digest}
        written |= {path: None for path, digest in self._files.items() if path not in digests and digest is not None}
        self._files = digests
        return written

    async def _left(self, now: _Look) -> LeftState:
        fresh, kept = self._fresh, -len(_KEPT)
        assert fresh is not None
        fault = "the box has services" if self.services else ""
        if more := now.processes - fresh.processes:
            fault = f"{len(more)} processes go on in the background"
        elif now.shell[kept:] != fresh.shell[kept:]:
            fault = "traps, limits or open files of the shell have changed"
        made = {folder for path, digest in self._files.items() if digest is not None for folder in _parents(path)}
        new = {
            path: about
            for path, about in now.entries.items()
            if fresh.entries.get(path) != about and not (about.startswith(b"td 755") and path in made)
        }
        if special := next((path for path, about in new.items() if about[1:2] not in b"fdl"), None):
            fault = fault or f"{special.decode('utf-8', 'replace')} is no file, folder or link"
        missing = {path: about for path, about in fresh.entries.items() if path not in now.entries}
        files_of_tree = {path for path, about in missing.items() if about.startswith(b"tf")}  # gone, or of usual mode
        usual = {path for path in files_of_tree if self._files.get(os.fsdecode(path[2:])) is not None}
        archive = b""
        if (packed := sorted(new.keys() | usual)) and not fault:
            done = await self.shell.program(["bash", "-c", _PACK], b"\0".join(packed), SECONDS, max_report=MAX_KEPT)
            archive = done.report
            if done.cut or done.status:
                fault = "files outside of the work tree are too large, or cannot be read"
        return LeftState(
            shell=now.shell if now.shell != fresh.shell else (),
            entries=tuple(sorted(path + b"\0" + _lasting(about) for path, about in new.items())),
            archive=archive,
            gone=tuple(sorted(missing.keys() - files_of_tree)),
            fault=fault,
        )


def restoring(fresh: Sequence[str], wanted: Sequence[str]) -> str:
    """A line that gives a fresh shell the folder, variables, functions, aliases and options of another one."""
    lines = [wanted[2]]
    if wanted[0] != fresh[0]:
        lines.append(f"cd -- {shlex.quote(wanted[0].rstrip(chr(10)))}")
    before, after = (_names(parts[1]) for parts in (fresh, wanted))
    lines += [f"unset -v {name}" for name in before.keys() - after.keys()]
    lines += [line for name, line in after.items() if before.get(name) != line]
    lines += [wanted[3], *_changed(fresh[4], wanted[4]), f"umask {wanted[6]}", *_changed(fresh[5], wanted[5])]
    return "\n".join(lines)


def _changed(before: str, after: str) -> list[str]:
    """The lines of a list of options that are new. All of them would set `BASH_COMPAT`."""
    known = set(before.split("\n"))
    return [line for line in after.split("\n") if line not in known]


def _names(variables: str) -> dict[str, str]:
    return {match[1]: line for line in _joined(variables) if (match := _VARIABLE.match(line))}


def _variables(listed: str) -> list[str]:
    return [line for line in _joined(listed) if (match := _VARIABLE.match(line)) and match[1] not in _VOLATILE]


def _joined(listed: str) -> list[str]:
    """The declarations in a list; values of old shells may have several lines."""
    return re.split(r"\n(?=declare -)", listed.strip("\n"))


def _attributes(about: bytes, target: bytes) -> bytes:
    """Kind, mode, size, target of a link, and time; folders have neither size nor time."""
    kind, mode, size, time = about.split(b" ")
    size, time = (b"0", b"0") if kind[1:] == b"d" else (size, time)
    return b" ".join((kind, mode, size, target, time))


def _lasting(about: bytes) -> bytes:
    """Attributes without the time, which is that of the copy in another box."""
    return about.rpartition(b" ")[0]


def _parents(path: str) -> list[bytes]:
    parts = path.split("/")[:-1]
    return [b"./" + os.fsencode("/".join(parts[: n + 1])) for n in range(len(parts))]


def _digest(data: bytes | None) -> bytes | None:
    return None if data is None else blake3.blake3(data).digest()
