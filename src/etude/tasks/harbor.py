"""Harbor task folders (schema 1.4), written and read by our own code: the harbor package needs a newer Python.

    task.toml  instruction.md  environment/{Dockerfile, files/}  tests/{Dockerfile, test.sh, tests.json}
    solution/{solve.sh, files/}

Fields that Harbor lacks go to [metadata.etude]. A verifier runs in an environment of its own, without network:
Harbor's defaults (shared, public) let an agent plant its reward. Format: harborframework.com/docs/tasks.
"""

import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec
import pytest
from msgspec.structs import asdict

from etude.code import is_script, language_of, toml_table
from etude.errors import UserError
from etude.records import Budget, CodeTask, Focus
from etude.tasks.inventory import files_below

SCHEMA_VERSION = "1.4"
_WORKDIR = "/workspace"
_PYTHON = ".".join(map(str, sys.version_info[:2]))  # site/ holds wheels for it
_NODE = "22"
_CONTAINER_FILES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")


class _Etude(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """[metadata.etude]: the fields of a CodeTask that Harbor lacks. Long texts are files of the folder."""

    repository: str
    kind: str
    operator: str
    function: str
    split: str
    licence: str
    source_roots: tuple[str, ...]
    focus: Focus
    visible_tests: tuple[str, ...]
    difficulty: dict[str, float]
    budget: Budget | None = None


class _Tests(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """tests/tests.json: the node ids of the hidden tests that decide."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


def image_name(repository: str) -> str:
    """The tag of the container image of a dataset's repository, e.g. "etude/pydash:8.1.0"."""
    name, _, version = (re.sub(r"[^a-z0-9.-]+", "-", part) for part in repository.lower().rpartition("-"))
    plain = f"{name}-{version}" if name else version
    if not name or not version[:1].isdigit():
        name, version = plain, "latest"
    return f"etude/{re.sub(r'[.-]+', '-', name).strip('-') or 'tasks'}:{version}"


def task_name(id: str) -> str:
    """The name of a task in Harbor's form: "etude/" and letters, digits, dots, hyphens and underscores."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", id.replace("+", "-"))
    return "etude/" + re.sub(r"\.{2,}", ".", plain).lstrip("._-")


def write_task(task: CodeTask, folder: Path) -> None:
    """Write `task` as a Harbor folder. `folder` must not exist."""
    folder.mkdir(parents=True)
    image = image_name(task.repository)
    command = "node /verifier/grade.mjs" if is_script(task.function) else "python3 /verifier/grade.py"
    tests = {"fail_to_pass": task.fail_to_pass, "pass_to_pass": task.pass_to_pass}
    files = {
        "task.toml": _task_toml(task),
        "instruction.md": f"{task.prompt}\n",
        "environment/Dockerfile": f"FROM {image}\nCOPY files/ {_WORKDIR}/\n",
        "tests/Dockerfile": f"FROM {image}-verifier\nCOPY . /tests/\n",
        "tests/test.sh": _TEST_SH.format(command=command),
        "tests/tests.json": json.dumps(tests, indent=1, ensure_ascii=False) + "\n",
        "solution/solve.sh": _SOLVE_SH,
        **{f"environment/files/{path}": text for path, text in task.changes.items()},
        **{f"solution/files/{path}": text for path, text in task.solution.items()},
    }
    for path, text in files.items():
        _write(folder / path, text)
    for script in ("tests/test.sh", "solution/solve.sh"):
        (folder / script).chmod(0o755)


def read_harbor_task(folder: Path) -> CodeTask:
    """Read the CodeTask of a Harbor folder. Tasks share equal file texts. Raises UserError if the folder is malformed,
    or is a foreign task (`foreign/`)."""
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise UserError(f"{folder} is not a Harbor task folder: {Path(e.filename).name} is missing.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{folder} cannot be read ({e}); repair it or build the dataset again.") from None
    metadata = toml_table(config, "metadata").get("etude")
    if metadata is None:
        image = toml_table(config, "environment").get("docker_image")
        container = next((f for f in _CONTAINER_FILES if (folder / "environment" / f).exists()), None)
        if image or container:
            what = f"the image {image}" if image else f"environment/{container}"
            how = "`etude tasks harbor` takes such folders as far as boxes can"
            raise UserError(f"{folder} is made for Docker ({what}); {how}.")
        raise UserError(
            f"{folder} has no [metadata.etude] in task.toml, so its tests have no ids; use `etude tasks harbor`."
        )
    try:
        etude = msgspec.convert(metadata, _Etude)
        tests = msgspec.json.decode((folder / "tests/tests.json").read_bytes(), type=_Tests)
    except (msgspec.MsgspecError, FileNotFoundError) as e:
        raise UserError(f"{folder} cannot be read ({e}); build the dataset again.") from None
    return CodeTask(
        id=folder.name,
        prompt=instruction.removesuffix("\n"),
        changes=_read_files(folder / "environment/files"),
        solution=_read_files(folder / "solution/files"),
        **asdict(etude),
        **asdict(tests),
    )


def write_verifier(root: Path, name: str, python_path: tuple[str, ...], source_roots: tuple[str, ...]) -> None:
    """Write the files from which a dataset's container is made: `root`/Dockerfile and `root`/verifier/, the grader."""
    _write(root / "Dockerfile", dockerfile(name, python_path))
    _write(root / "verifier/roots.json", json.dumps(source_roots, ensure_ascii=False) + "\n")
    for path in sorted((Path(__file__).parent / "verifier").iterdir()):
        if path.suffix == (".py" if python_path else ".mjs"):
            _write(root / "verifier" / path.name, path.read_text("utf-8"))


def dockerfile(name: str, python_path: tuple[str, ...]) -> str:
    """The Dockerfile in a dataset's root. Its target `agent` has the repository and site; `verifier` has the hidden
    tests, the grader, and a copy of the repository that no agent has touched."""
    search = {
        root: ":".join([str(PurePosixPath(root, p)) for p in python_path] + ["/site"]) for root in (_WORKDIR, "/grade")
    }
    python = f"FROM python:{_PYTHON}-slim AS agent\nRUN pip install --no-cache-dir pytest=={pytest.__version__}\n"
    agent = f"ENV PYTHONPATH={search[_WORKDIR]} PYTHONDONTWRITEBYTECODE=1\n"
    return f"""# {name}: docker build --target agent -t {image_name(name)} . && \\
# docker build --target verifier -t {image_name(name)}-verifier .
{python if python_path else f"FROM node:{_NODE}-slim AS agent{chr(10)}"}COPY repository/ {_WORKDIR}/
COPY site/ /site/
{agent if python_path else ""}WORKDIR {_WORKDIR}

FROM agent AS verifier
COPY repository/ /grade/
COPY hidden/ /hidden/
COPY verifier/ /verifier/
{f"ENV PYTHONPATH={search['/grade']}{chr(10)}" if python_path else ""}"""


# The grader is in the verifier's image. Tested code and tests share a process there: other runners have no supervisor
# outside of the tested process. etude's own grading has, and ignores this script.
_TEST_SH = """#!/bin/sh
# Writes 1 to /logs/verifier/reward.txt if every id of tests.json passes on the submitted tree, else 0.
exec {command}
"""

_SOLVE_SH = """#!/bin/sh
cp -R "$(dirname "$0")/files/." /workspace/
"""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def _read_files(folder: Path) -> dict[str, str]:
    return {path: sys.intern(file.read_bytes().decode()) for path, file in files_below(folder)}


def _task_toml(task: CodeTask) -> str:
    names = [name for name in _Etude.__struct_fields__ if name != "budget" or task.budget is not None]
    etude = {name: msgspec.to_builtins(getattr(task, name)) for name in names}
    network = {"network_mode": "no-network"}
    tables = {
        "task": {
            "name": task_name(task.id),
            "version": "1",
            "description": f"{task.prompt} ({task.repository})",
            "keywords": [language_of(task.focus.path) or "python", task.kind, task.operator],
        },
        "metadata.etude": etude,
        "agent": {"timeout_sec": 600.0, **network},
        "verifier": {"timeout_sec": 120.0, "environment_mode": "separate", **network},
        "environment": {"workdir": _WORKDIR, "cpus": 1, "memory_mb": 1024, **network},
    }
    lines = [f'schema_version = "{SCHEMA_VERSION}"', f'artifacts = [{{source = "{_WORKDIR}"}}]']
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_toml(key)} = {_toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml_value(key)


def _toml_value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(str(k))} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    # JSON's strings, numbers and booleans are TOML's, except that TOML forbids a bare DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
