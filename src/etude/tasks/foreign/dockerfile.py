"""Reads the part of Dockerfiles that boxes can reproduce: FROM, ARG, ENV, WORKDIR, COPY and ADD of files, RUN.

Base images of Python, Ubuntu and Debian are replaced by the Python and the programs of this machine. Format:
docs.docker.com/reference/dockerfile.
"""

import json
import posixpath
import re
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.code import shown_lines

BASES = frozenset({"python", "ubuntu", "debian"})
_SYSTEM = frozenset(
    {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "proc", "sys", "dev", "run", "boot", "site", "tmp"}
    | {"tests", "solution", "logs", "workspace", ".host"}
)
_DEEP = frozenset({"opt", "home", "var", "mnt", "media"})  # folders in which boxes have entries of their own
_TAKEN = frozenset({"/opt/runner", "/opt/agent", "/opt/harbor", "/var/tmp", "/var/lib", "/var/cache", "/var/run"})
_PATH = re.compile(r"(?<![\w./:~}-])/(?:[\w.-]+/)*[\w.-]+")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
LOGS = "/logs"
HOME = "/root"  # as in containers
ASIDE = ".root"  # folder of the work tree for files outside of the working folder


class FolderRefused(Exception):
    """A foreign folder cannot become a task; the message is the reason, in half a sentence."""


@dataclass(frozen=True)
class CopyStep:
    """COPY or ADD: source paths below environment/, and an absolute target."""

    sources: tuple[str, ...]
    target: str
    mode: int | None = None


@dataclass(frozen=True)
class RunStep:
    """RUN: a shell script, and the folder in which it starts."""

    script: str
    folder: str


@dataclass(frozen=True)
class Recipe:
    """The content of a Dockerfile."""

    steps: tuple[CopyStep | RunStep, ...]
    environment: dict[str, str]
    workdir: str


@dataclass(frozen=True)
class Layout:
    """The folders of an image in a box: `places` maps absolute paths to folders of the work tree."""

    workdir: str
    places: dict[str, str] = field(default_factory=dict[str, str])

    def inside(self, path: str) -> str:
        """The path below the work tree for an absolute path. Raises FolderRefused."""
        path = posixpath.normpath(path)
        for place in sorted({**self.places, "/workspace": ""}, key=len, reverse=True):
            if _within(path, place):
                if place == "/workspace" and "" in self.places.values():
                    break
                return posixpath.normpath(posixpath.join(self.places.get(place, ""), path[len(place) + 1 :]))
        why = "begin without" if path.startswith("/tmp/") else "have from this machine, read-only"
        raise FolderRefused(f"it writes to {path}, which boxes {why}")


def read(text: str, bases: Sequence[str] = ()) -> Recipe:
    """Parse the Dockerfile `text`. `bases` are further base images that boxes may replace. Raises FolderRefused."""
    base, workdir = "", "/"
    variables: dict[str, str] = {}
    environment: dict[str, str] = {}
    steps: list[CopyStep | RunStep] = []
    for name, rest, heredoc in _instructions(text):
        match name:
            case "FROM" if base:
                raise FolderRefused("its Dockerfile has several stages")
            case "FROM":
                base = _base(_replaced(rest, variables), bases)
            case "ARG":
                key, equals, value = rest.partition("=")
                variables[key.strip()] = _replaced(value.strip().strip("\"'"), variables) if equals else ""
            case "ENV":
                values = {key: _replaced(value, variables) for key, value in _pairs(rest)}
                environment |= values
                variables |= values
            case "WORKDIR":
                workdir = posixpath.normpath(posixpath.join(workdir, _replaced(rest.strip("\"'"), variables)))
            case "COPY" | "ADD" if heredoc:
                raise FolderRefused("its Dockerfile copies a text from a heredoc")
            case "COPY" | "ADD":
                steps.append(_copy(_replaced(rest, variables), workdir))
            case "RUN":
                steps.append(RunStep(_script(rest, heredoc), workdir))
            case "USER" if rest not in ("root", "0", "0:0", "root:root"):
                raise FolderRefused(f"its Dockerfile changes to the user {rest}")
            case "SHELL" if "bash" not in rest:
                raise FolderRefused(f"its Dockerfile has SHELL {rest}")
            case "ENTRYPOINT" | "VOLUME" | "HEALTHCHECK" | "ONBUILD":
                raise FolderRefused(f"its Dockerfile has {name}")
            case "USER" | "SHELL" | "LABEL" | "MAINTAINER" | "EXPOSE" | "STOPSIGNAL" | "CMD":
                pass  # Harbor keeps its own command running
            case _:
                raise FolderRefused(f"its Dockerfile has {name}, which is not known")
    if not base:
        raise FolderRefused("its Dockerfile has no FROM")
    return Recipe(tuple(steps), environment, workdir)


def layout(recipe: Recipe, *texts: str) -> Layout:
    """The places of the folders that the recipe and `texts`, such as the instruction, name. Raises FolderRefused."""
    named = {recipe.workdir}
    for step in recipe.steps:
        named |= {step.target} if isinstance(step, CopyStep) else set(_PATH.findall(step.script)) | {step.folder}
    for text in texts:
        named |= set(_PATH.findall(text))
    workdir = "/workspace" if recipe.workdir == "/" else recipe.workdir
    own = place_of(workdir)
    if own is None and not _within(workdir, "/workspace"):
        raise FolderRefused(f"its working folder is {workdir}, which boxes have from this machine, read-only")
    places = {place: f"{ASIDE}{place}" for place in (*map(place_of, sorted(named)), LOGS, HOME) if place}
    if own is not None and not any(_within(path, "/workspace") for path in named):
        places[own] = ""
    nested = [p for p in places if any(p != q and _within(p, q) for q in places)]
    return Layout(workdir, {place: folder for place, folder in places.items() if place not in nested})


def _within(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")


def place_of(path: str) -> str | None:
    """The folder near the root that a box shows for an absolute path; None for folders that every box has."""
    parts = posixpath.normpath(path).strip("/").split("/")
    depth = 2 if parts[0] in _DEEP else 1
    place = "/" + "/".join(parts[:depth])
    if not parts[0] or parts[0] in _SYSTEM or len(parts) < depth or place in _TAKEN:
        return None
    if len(parts) == depth and "." in parts[-1]:
        return None  # a file in the root
    return place


def pieces(script: str) -> list[tuple[int, str]]:
    """The commands of a script that are joined by `&&`, `;` or a new line outside of quotes and brackets, each with its
    offset."""
    commands, start, quote, depth, i = list[tuple[int, str]](), 0, "", 0, 0
    while i <= len(script):
        c = script[i : i + 1] or "\n"
        if c == "#" and not quote and (i == 0 or script[i - 1].isspace()):  # quotes in a comment do not count
            i = script.find("\n", i) if "\n" in script[i:] else len(script)
            continue
        if c == "\\" and quote != "'":
            i += 1
        elif quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "({":
            depth += 1
        elif c in ")}":
            depth = max(0, depth - 1)  # the bracket of a `case` has no opening one
        elif not depth and (c in ";\n" or script.startswith("&&", i)):
            if command := script[start:i].strip():
                commands.append((script.index(command, start), command))
            i += script.startswith("&&", i)
            start = i + 1
        i += 1
    return commands


def words(command: str) -> list[str]:
    """The words of a command up to a pipe or `||`, without redirections; none if the command is compound."""
    try:
        parts = shlex.split(command.replace("\\\n", " ").rstrip("\\ \n"), comments=True)
    except ValueError:
        return []
    end = next((i for i, word in enumerate(parts) if word in ("|", "||", "&")), len(parts))
    return [word for word in parts[:end] if not re.match(r"[0-9&]?[<>]", word)]


def _instructions(text: str) -> list[tuple[str, str, str]]:
    """(name, arguments, text of a heredoc with its last line) of each instruction."""
    lines, instructions = deque(shown_lines(text)), list[tuple[str, str, str]]()
    while lines:
        parts = [lines.popleft()]
        if _is_blank(parts[0]):
            continue
        while parts[-1].rstrip().endswith("\\") and lines:
            parts[-1] = parts[-1].rstrip()[:-1]
            while lines and _is_blank(lines[0]):
                lines.popleft()
            if lines:
                parts.append(lines.popleft())
        name, _, rest = " ".join(part.strip() for part in parts).strip().partition(" ")
        name = name.upper()
        body: list[str] = []
        if name in ("RUN", "COPY", "ADD") and (match := _HEREDOC.search(rest)):
            while lines and (not body or body[-1].strip() != match[2]):
                body.append(lines.popleft())
        instructions.append((name, rest.strip(), "\n".join(body)))
    return instructions


def _is_blank(line: str) -> bool:
    """Whether a line holds nothing, or a comment."""
    return line.strip()[:1] in ("", "#")


def _base(rest: str, bases: Sequence[str]) -> str:
    image = next((word for word in rest.split() if not word.startswith("--")), "")
    plain = image.partition("@")[0]
    name = plain.rpartition("/")[2].partition(":")[0]
    official = plain.count("/") == 0 or plain.startswith(("docker.io/library/", "library/"))
    if not (official and name in BASES) and plain not in bases and image not in bases:
        raise FolderRefused(f"its base image {plain} is neither Python, Ubuntu nor Debian")
    return image


def _copy(rest: str, workdir: str) -> CopyStep:
    mode, paths = None, list[str]()
    arguments: list[str] = json.loads(rest) if rest.startswith("[") else words(rest)
    for word in arguments:
        name, _, value = word.partition("=")
        if not word.startswith("--"):
            paths.append(word)
        elif name == "--chmod" and re.fullmatch("0?[0-7]{3}", value):
            mode = int(value, 8)
        elif name not in ("--chown", "--link"):
            raise FolderRefused(f"its Dockerfile copies with {word}")
    if len(paths) < 2 or any("://" in path for path in paths):
        raise FolderRefused(f"its Dockerfile copies {rest}")
    *sources, target = paths
    folder = target.endswith("/") or target in (".", "./") or len(sources) > 1
    target = posixpath.normpath(posixpath.join(workdir, target)) + ("/" if folder else "")
    return CopyStep(tuple(sources), target, mode)


def _script(rest: str, heredoc: str) -> str:
    if rest.startswith("--"):
        raise FolderRefused(f"its Dockerfile runs with {rest.split()[0]}")
    if rest.startswith("["):
        return shlex.join(json.loads(rest))
    if heredoc and re.fullmatch(_HEREDOC.pattern, rest):
        return heredoc.rpartition("\n")[0]
    return f"{rest}\n{heredoc}" if heredoc else rest


def _pairs(rest: str) -> list[tuple[str, str]]:
    parts = words(rest)
    if parts and "=" not in parts[0]:
        return [(parts[0], rest.partition(" ")[2].strip())]
    return [(key, value) for key, _, value in (word.partition("=") for word in parts)]


def _replaced(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name) or match[2] or (match[0] if name == "PATH" else "")

    return _VARIABLE.sub(value, text)
