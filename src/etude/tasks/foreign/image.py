"""Makes the image of a foreign task without Docker: the tree, the packages and the programs of its boxes.

Python requirements of the Dockerfile and of the tests are installed as wheels. Packages of apt-get must be installed on
this machine. All other commands of RUN run in a box without a network, and leave their files in the tree.
"""

import functools
import json
import posixpath
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile, pairwise
from pathlib import Path

from etude.code import install_wheels, lines_of
from etude.grading import HARBOR_STATE, note_state
from etude.sandbox import RUNNER, SITE, WORKSPACE, BoxError, Image, Limits, Sandbox
from etude.tasks.foreign.dockerfile import ASIDE, HOME, CopyStep, FolderRefused, RunStep, pieces, words
from etude.tasks.foreign.folder import Folder
from etude.tasks.inventory import files_below

PROVIDED = "/opt/harbor"  # folder of boxes with `provided.py` under the names of the programs that it replaces
PROGRAMS = ("apt-get", "apt", "curl", "uv", "uvx", "pip", "pip3", "pytest")
RUN_SECONDS = 120.0
_OWN = frozenset({"python3", "python3-pip", "python3-venv", "python3-dev", "python-is-python3", "python3-pytest", "uv"})
_PLAIN = re.compile(r"[A-Za-z0-9]")
_VALUED = frozenset({"-t", "--target", "--timeout", "-o", "--option", "-c", "--constraint"})
_KEYWORDS = frozenset({"if", "elif", "then", "else", "do", "while", "until", "!", "exec", "time"})
_WITH = frozenset({"--with", "-w", "--from"})
_ENTRY = re.compile(r"^\s*([\w.-]+)\s*=\s*([\w.]+)\s*:\s*([\w.]+)", re.MULTILINE)


def image_of(root: Path, places: Mapping[str, str], environment: Mapping[str, str]) -> Image:
    """The image whose folders lie below `root`: tree/, site/ and provided/."""
    return Image(
        repository=root / "tree",
        site=root / "site",
        changes={},
        mounts={PROVIDED: root / "provided"},
        places=places,
        environment=environment,
    )


async def make(sandbox: Sandbox, folder: Folder, root: Path, limits: Limits) -> Image:
    """Make the image of `folder` below `root`. Raises FolderRefused, BoxError, or UserError for missing packages."""
    tree = root / "tree"
    for place in (*folder.layout.places.values(), ASIDE):
        (tree / place).mkdir(parents=True, exist_ok=True)
    install_wheels(_requirements(folder), root / "site", RUN_SECONDS * 5)
    _provide(root)
    declared = {name: value for name, value in folder.recipe.environment.items() if name != "PATH"}
    image = image_of(root, folder.layout.places, declared | folder.record.environment | _search(folder))
    for number, step in enumerate(folder.recipe.steps):
        if isinstance(step, CopyStep):
            _copy(folder, step, tree)
        elif script := _without_installers(step.script):
            seen = root / f"step-{number}"  # a sandbox keeps folders that it has read: each step begins with a copy
            shutil.copytree(tree, seen, symlinks=True)
            await _run(sandbox, replace(image, repository=seen), script, step.folder, tree, limits)
            shutil.rmtree(seen)
    (tree / folder.layout.inside(folder.layout.workdir)).mkdir(parents=True, exist_ok=True)
    (tree / HARBOR_STATE).unlink(missing_ok=True)
    _check_secrets(folder, tree)
    return image


def _search(folder: Folder) -> dict[str, str]:
    """PATH and PYTHONPATH: the folders of boxes come first, folders of the agent are left out."""
    path = f"{PROVIDED}/bin:/usr/local/bin:/usr/bin:/bin"
    declared_path = folder.recipe.environment.get("PATH", "$PATH").replace("${PATH}", "$PATH")
    return {
        "PATH": f"{PROVIDED}/bin:{declared_path.replace('$PATH', path)}" if "$PATH" in declared_path else path,
        "PYTHONPATH": f"{SITE}:{RUNNER}",
        "PYTHONNOUSERSITE": "1",  # of the home folder, which is part of the state
        "HOME": HOME,
    }


def _requirements(folder: Folder) -> list[str]:
    """The packages that RUN and the tests install with pip and uv, each once. Raises FolderRefused."""
    scripts = [step.script for step in folder.recipe.steps if isinstance(step, RunStep)]
    commands = [words(command) for script in [*scripts, folder.tests] for _, command in pieces(script)]
    requirements = [requirement for command in commands for requirement in _installed_by(command, folder)]
    if "pytest" in folder.tests and not any(re.match(r"pytest\b(?!-)", requirement) for requirement in requirements):
        requirements.append("pytest")  # the base image would bring it
    return list(dict.fromkeys(requirements))


def _installed_by(command: Sequence[str], folder: Folder) -> Iterator[str]:
    command = list(dropwhile(lambda word: word in _KEYWORDS, command))
    rest = _pip(command)
    if rest is not None:
        arguments = iter(rest)
        for word in arguments:
            if word in ("-r", "--requirement"):
                yield from _listed(next(arguments, ""), folder)
            elif word in _VALUED:
                next(arguments, None)
            elif word in (".", "-e", "--editable") or word.startswith(("./", "/", "git+", "http")):
                raise FolderRefused(f"pip installs {word}")
            elif word.startswith(("-i", "--index-url", "--extra-index-url")):
                raise FolderRefused("pip installs from an index of its own")
            elif _PLAIN.match(word):
                yield word
    elif command[:1] in (["uvx"], ["uv"]):
        for option, value in pairwise(command):
            if option in _WITH:
                yield value
        for word in command:
            if word.startswith(("--with=", "--from=")):
                yield word.partition("=")[2]


def _pip(command: Sequence[str]) -> Sequence[str] | None:
    """The arguments after `install` in a call of pip; None for any other command."""
    plain = list(dropwhile(lambda word: word in ("sudo", "env") or re.fullmatch(r"\w+=.*", word), command))
    if plain[:1] in (["python"], ["python3"]) and plain[1:2] == ["-m"]:
        plain = plain[2:]
    if plain[:2] == ["uv", "pip"]:
        plain = plain[1:]
    if plain[:1] in (["pip"], ["pip3"]) and "install" in plain:
        return plain[plain.index("install") + 1 :]
    return plain[2:] if plain[:2] == ["uv", "add"] else None


def _listed(name: str, folder: Folder) -> list[str]:
    path = next((folder.path / "environment").rglob(posixpath.basename(name) or "-"), None)
    if path is None:
        raise FolderRefused(f"pip installs from {name}, which is not in environment/")
    lines = (line.partition(" #")[0].strip() for line in lines_of(path.read_text("utf-8", "replace")))
    return [line for line in lines if line and not line.startswith("#")]


def _apt(command: Sequence[str]) -> list[str] | None:
    """The packages that a call of apt-get installs; None for any other command."""
    plain = [word for word in command if not word.startswith("-") and word not in ("sudo", "env")]
    plain = [word for word in plain if not re.fullmatch(r"\w+=.*", word) or plain[:1] == ["apt-get"]]
    match plain:
        case ["apt-get" | "apt", "install", *packages]:
            return [word.partition("=")[0] for word in packages]
        case ["apt-get" | "apt", *_]:
            return []
        case _:
            return None


@functools.cache
def installed() -> frozenset[str]:
    """Names of the Debian packages on this machine, and of those that this Python replaces."""
    lists = Path("/var/lib/dpkg/info").glob("*.list")
    return _OWN | {path.name.removesuffix(".list").partition(":")[0] for path in lists}


def _without_installers(script: str) -> str:
    """The script of RUN with `:` in place of each command that installs; empty if no other command is left. Raises
    FolderRefused."""
    kept, others, end = list[str](), 0, 0
    for start, command in pieces(script):
        parts = words(command)
        wanted = _apt(parts)
        if missing := [name for name in wanted or () if name not in installed()]:
            raise FolderRefused(f"apt-get installs {missing[0]}, which this machine lacks")
        if wanted is None and not _installs(command, parts):
            others += 1
            continue
        kept += [script[end:start], ":"]
        end = start + len(command)
    return "".join([*kept, script[end:]]) if others else ""


def _installs(command: str, parts: Sequence[str]) -> bool:
    """Whether a command only installs or cleans up, so that it can be skipped."""
    if _pip(parts) is not None or "astral.sh/uv" in command:
        return True
    match parts:
        case ["rm", *paths]:
            return all(path.startswith(("-", "/var/", "/root/.cache", "/tmp")) for path in paths)
        case ["ln", *_, link]:
            return link.startswith("/usr/") and shutil.which(posixpath.basename(link)) is not None
        case _:
            return parts[:1] in (["apt-key"], ["locale-gen"], ["ldconfig"])


async def _run(sandbox: Sandbox, image: Image, script: str, folder: str, tree: Path, limits: Limits) -> None:
    """Run a script in a box on `image`, and write the changed files to `tree`. Raises FolderRefused or BoxError."""
    shown = " ".join(script.split())[:80]
    box = await sandbox.create(image, limits, bare=True)
    try:
        where = shlex.quote(folder)
        line = f"( mkdir -p {where} && cd {where} && sh -c {shlex.quote(script)} )"
        done = await box.exec(f"{line} < /dev/null", RUN_SECONDS)
        if done.rc != 0:
            message = " ".join(done.output.split())[-160:]
            raise FolderRefused(f"RUN {shown} fails in a box: {message or f'exit code {done.rc}'}")
        await note_state(box)
        changes = await box.changes()
    except BoxError as e:
        if e.payer == "infra":
            raise
        raise FolderRefused(f"RUN {shown} fails in a box: {e}") from None
    finally:
        await box.close()
    state = changes.pop(HARBOR_STATE, None)
    for path, data in changes.items():
        target = _without_links(tree, tree / path)
        if data is None:
            target.unlink(missing_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    _restore(tree, state or b"")


def _without_links(tree: Path, path: Path) -> Path:
    """A path of the tree that may be written to. Raises FolderRefused if a link on the way could lead out of the tree,
    to files of this machine."""
    way = [path, *(parent for parent in path.parents if parent != tree and parent.is_relative_to(tree))]
    if not path.is_relative_to(tree) or ".." in path.relative_to(tree).parts or any(part.is_symlink() for part in way):
        raise FolderRefused(f"it writes through the link {path.relative_to(tree)}")
    return path


def _restore(tree: Path, state: bytes) -> None:
    """Write the empty folders, links and modes of a box. Links are made but never followed: they name places in a
    box."""
    parts = iter(state.decode("utf-8", "surrogateescape").split("\0"))
    for part in parts:
        kind, _, name = part.partition(" ")
        path = tree / name
        if ".." in Path(name).parts or (path.is_absolute() and not path.is_relative_to(tree)):
            continue
        if any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(tree)):
            continue
        if kind == "d":
            path.mkdir(parents=True, exist_ok=True)
        elif kind == "l":
            target = next(parts, "")
            if not path.is_symlink() and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(target)
        elif kind == "x" and path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o111)


def _copy(folder: Folder, step: CopyStep, tree: Path) -> None:
    context = (folder.path / "environment").resolve()
    target = _without_links(tree, tree / folder.layout.inside(step.target))
    sources: list[Path] = []
    for pattern in step.sources:
        plain = pattern.strip("/") or "."
        matches = sorted(context.glob(plain)) if any(c in plain for c in "*?[") else [context / plain]
        if not matches or not all(path.exists() and path.resolve().is_relative_to(context) for path in matches):
            raise FolderRefused(f"its Dockerfile copies {pattern}, which is not in environment/")
        sources += matches
    into = step.target.endswith("/") or target.is_dir()
    for source in sources:
        if source.is_dir():
            for path in source.rglob("*"):
                _without_links(tree, target / path.relative_to(source))
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            place = _without_links(tree, target / source.name if into else target)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)
            if step.mode is not None:
                place.chmod(step.mode)


def _provide(root: Path) -> None:
    """Write provided/: the programs that replace installers, the programs of the installed packages, and the list of
    apt-get packages."""
    folder = root / "provided"
    (folder / "bin").mkdir(parents=True)
    (folder / "packages.json").write_text(json.dumps(sorted(installed())), "utf-8")
    text = (Path(__file__).parent / "provided.py").read_text("utf-8")
    programs: dict[str, str] = dict.fromkeys(PROGRAMS, text)
    programs["python"] = '#!/bin/sh\nexec python3 "$@"\n'
    for entries in sorted((root / "site").glob("*.dist-info/entry_points.txt")):
        _, _, scripts = entries.read_text("utf-8", "replace").partition("[console_scripts]")
        for name, module, function in _ENTRY.findall(scripts.partition("\n[")[0]):
            code = f"import sys; from {module} import {function.partition('.')[0]}; sys.argv[0] = '{name}'"
            programs.setdefault(name, f'#!/bin/sh\nexec python3 -P -c "{code}; sys.exit({function}())" "$@"\n')
    for name, program in programs.items():
        (folder / "bin" / name).write_text(program, "utf-8")
        (folder / "bin" / name).chmod(0o755)


def _check_secrets(folder: Folder, tree: Path) -> None:
    """Raises FolderRefused if a file of the tests or of the solution is in the image."""
    secrets = [file for part in ("tests", "solution") for _, file in files_below(folder.path / part)]
    hidden = {file.read_bytes(): file for file in secrets if file.stat().st_size}
    for shown, file in files_below(tree):
        if not file.is_symlink() and file.stat().st_size and (own := hidden.get(file.read_bytes())):
            raise FolderRefused(f"its image holds {own.relative_to(folder.path)} (as {WORKSPACE}/{shown})")
