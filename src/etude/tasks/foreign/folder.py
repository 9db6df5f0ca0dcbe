"""A foreign Harbor folder: task.toml, instruction.md, environment/, tests/test.sh and solution/solve.sh."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.code import toml_table
from etude.errors import UserError
from etude.records import Record
from etude.tasks.foreign.dockerfile import FolderRefused, Layout, Recipe, layout, read

FOREIGN = "harbor"
MEMORY_MB = 4096  # of a box, at most
MAX_SECONDS = 800.0  # of the tests: an episode's grade has 900
_REQUIRED = {  # file -> why it is needed
    "instruction.md": "",
    "tests/test.sh": "",
    "solution/solve.sh": ", so no run can prove that it is solvable",
}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml")


class ForeignRecord(Record, frozen=True, kw_only=True):
    """The facts about a foreign task that its folder does not hold."""

    id: str
    source: str  # the original name of the folder
    split: str
    workdir: str
    places: dict[str, str]
    environment: dict[str, str]
    verifier_environment: dict[str, str]
    seconds: float  # of the tests
    memory_mb: int
    allowed: tuple[str, ...]  # files that steer Python or pytest and belong to the solution
    licence: str
    closed: tuple[str, ...] | None = None  # the files that the solution changes, if others stay as they are


@dataclass(frozen=True)
class Folder:
    """The content of a folder, as far as etude uses it, and the record of its task, whose gates have not run yet."""

    path: Path
    recipe: Recipe
    layout: Layout
    record: ForeignRecord

    @property
    def tests(self) -> str:
        """The text of tests/test.sh."""
        return (self.path / "tests/test.sh").read_text("utf-8", "replace")


def find_folders(roots: Sequence[Path]) -> list[Path]:
    """The task folders at and below `roots`, sorted. Raises UserError if there are none."""
    folders: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give Harbor task folders, or a folder of them.")
        folders |= {path.parent.resolve() for path in root.rglob("task.toml")}
    kept = sorted(path for path in folders if not any(parent in folders for parent in path.parents))
    if not kept:
        raise UserError(f"{', '.join(map(str, roots))} holds no Harbor task folder (no task.toml).")
    return kept


def load(path: Path, bases: Sequence[str] = ()) -> Folder:
    """Read the folder `path`. Raises FolderRefused for features that boxes cannot reproduce."""
    root = path.resolve()
    if link := next((p for p in root.rglob("*") if p.is_symlink() and not p.resolve().is_relative_to(root)), None):
        raise FolderRefused(f"its link {link.relative_to(root)} leads out of it")
    for name, purpose in _REQUIRED.items():
        if not (path / name).is_file():
            raise FolderRefused(f"it has no {name}{purpose}")
    try:
        config = tomllib.loads((path / "task.toml").read_text("utf-8"))
        instruction = (path / "instruction.md").read_text("utf-8").strip()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise FolderRefused(f"its task.toml or instruction.md cannot be read ({e})") from None
    environment, verifier = toml_table(config, "environment"), toml_table(config, "verifier")
    needs = (
        (
            any((path / "environment" / name).exists() for name in _COMPOSE),
            "it needs several containers (docker-compose)",
        ),
        ((path / "tests/Dockerfile").exists(), "its tests have an image of their own (tests/Dockerfile)"),
        (config.get("steps"), "it has several steps"),
        (environment.get("gpus"), "it needs a GPU"),
        (environment.get("os", "linux") != "linux", f"it needs {environment.get('os')}"),
        (environment.get("mcp_servers"), "it needs MCP servers"),
        (environment.get("healthcheck"), "it waits for a service (healthcheck)"),
        (verifier.get("collect"), "its tests collect from other containers"),
    )
    for need, reason in needs:
        if need:
            raise FolderRefused(reason)
    recipe = read(_dockerfile(path, environment, bases), bases)
    where = layout(recipe, instruction)
    record = ForeignRecord(
        id=path.name,
        source=path.name,
        split="train",
        workdir=where.workdir,
        places=where.places,
        environment=_variables(environment),
        verifier_environment=_variables(verifier),
        seconds=min(MAX_SECONDS, float(verifier.get("timeout_sec") or 600.0)),
        memory_mb=_memory(environment),
        allowed=(),
        licence=str(toml_table(config, "metadata").get("license") or toml_table(config, "task").get("license") or ""),
    )
    return Folder(path, recipe, where, record)


def _dockerfile(path: Path, environment: dict[str, Any], bases: Sequence[str]) -> str:
    """The text of the Dockerfile, or of one for an image that task.toml names. Raises FolderRefused."""
    docker, image = path / "environment/Dockerfile", environment.get("docker_image")
    if docker.is_file():
        return docker.read_text("utf-8", "replace")
    if not image:
        raise FolderRefused("it has no environment/Dockerfile")
    if image not in bases:
        raise FolderRefused(
            f"it names the image {image}: give --base {image}, and its archive or root folder as image of the table "
            "[sandbox] in --sandbox FILE"
        )
    workdir = environment.get("workdir")
    return f"FROM {image}\n" + (f"WORKDIR {workdir}\n" if workdir else "")


def _variables(table: dict[str, Any]) -> dict[str, str]:
    """Variables with a value. Those of the host, `${NAME}`, are left out: they are keys of services that boxes do not
    reach."""
    return {name: str(value) for name, value in toml_table(table, "env").items() if "${" not in str(value)}


def _memory(environment: dict[str, Any]) -> int:
    number = environment.get("memory_mb")
    if number is None:
        text = re.fullmatch(r"(\d+)\s*([GM])B?", str(environment.get("memory") or "2G").strip(), re.IGNORECASE)
        number = int(text[1]) * (1024 if text[2].upper() == "G" else 1) if text else 2048
    return max(512, min(int(number), MEMORY_MB))
