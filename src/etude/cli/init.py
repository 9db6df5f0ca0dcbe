"""`etude init`: a first configuration for the repository in the current folder, or an environment.

The configuration runs as written, with the bundled nano model on two CPU cores. An existing file is never replaced.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from etude.config import bundled
from etude.errors import UserError

CONFIG, MODULE = "etude.toml", "my_environment"


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude init`."""
    parser.add_argument(
        "--environment",
        action="store_true",
        help=f"write {MODULE}.py and {MODULE}.toml: tasks, tools, reward in Python",
    )
    parser.add_argument(
        "--exclude", nargs="+", default=[], metavar="FILE", help="leave out of the tasks: paths, folders or patterns"
    )


def run(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Writes into the current folder. Raises UserError."""
    if arguments.environment:
        if arguments.exclude:
            raise UserError("--exclude is for the tasks of a repository: drop it, or --environment")
        _write({name: _template(name) for name in (f"{MODULE}.py", f"{MODULE}.toml")})
        print(f"wrote {MODULE}.py and {MODULE}.toml; next: etude train {MODULE}.toml")
        return
    _check_free([CONFIG])
    text, summary = repository_toml(Path.cwd(), arguments.exclude)
    _write({CONFIG: text})
    print(f"{summary}\nwrote {CONFIG}; next: etude train {CONFIG}")


def repository_toml(repository: Path, exclude: list[str]) -> tuple[str, str]:
    """The configuration of a run on a repository, and a line on its functions and tests. Raises UserError for a folder
    without code, tests or functions that can be broken."""
    from etude.code import project_name
    from etude.tasks import read_functions, survey_repository

    if unnamed := next((pattern for pattern in exclude if not pattern.isprintable()), None):
        raise UserError(f"--exclude {unnamed!r} has characters that no configuration holds: give a pattern")
    surveyed = survey_repository(repository, exclude)
    fit = [f for f in read_functions(repository, surveyed)[1] if 1 <= f.body_lines <= 20]
    if not fit:
        raise UserError(f"{repository} has no function of 1 to 20 lines: there is nothing that could be broken")
    kind = "JavaScript" if surveyed.script else "Python"
    code = ", ".join(surveyed.layout.source_roots[:3]) + (", ..." if len(surveyed.layout.source_roots) > 3 else "")
    tests = sorted({path.rpartition("/")[0] or path for path in surveyed.modules}, key=lambda path: path.count("/"))
    summary = (
        f"{kind}: {len(fit)} functions of 1 to 20 lines in {code}; {len(surveyed.modules)} test files in "
        f"{', '.join(tests[:3])}{', ...' if len(tests) > 3 else ''}"
    )
    name = re.sub(r"-\d[^-]*$", "", project_name(repository)).lstrip("._-") or "run"
    # The files that git tracks are a clone's; of another folder, all files are.
    left_out = [*exclude, CONFIG] if surveyed.inventory.tracked else [*exclude, "outputs", CONFIG]
    values = {"@FOUND@": _comment(summary), "@NAME@": name, "@EXCLUDE@": json.dumps(left_out, ensure_ascii=False)}
    text = _template(CONFIG)
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text, summary


def _template(name: str) -> str:
    path = bundled(f"recipes/init/{name}")
    if path is None:
        raise UserError("this installation has no recipes/init: install etude's wheel, or work in its repository")
    return path.read_text("utf-8")


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _check_free(names: list[str]) -> None:
    for name in names:
        if Path(name).exists() or Path(name).is_symlink():
            raise UserError(f"{name} is there already, and is not replaced; move it away first")


def _write(files: dict[str, str]) -> None:
    """Writes all files, or none if a file exists or cannot be written. Raises UserError."""
    _check_free(list(files))
    done: list[Path] = []
    try:
        for name, text in files.items():
            with Path(name).open("x", encoding="utf-8") as file:
                done.append(Path(name))
                file.write(text)
    except OSError as e:
        for path in done:
            path.unlink()
        raise UserError(f"{Path.cwd()} cannot be written: {e.strerror}") from None
