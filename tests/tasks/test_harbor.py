"""Harbor folders: round trip, what a foreign reader finds in them, and what is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

from etude.errors import UserError
from etude.records import Budget, CodeTask, Focus
from etude.tasks import dataset, harbor
from tests.tasks.harbor_box import reward

TINY = Path(__file__).parent / "data/tiny"

TASK = CodeTask(
    id="m.f.op_flip.1",
    repository="lib-1.0",
    kind="mutation",
    operator="op_flip",
    function="src/m.py::f",
    split="train",
    prompt='Fix `f` in src/m.py "now"\n\twith \\ and é and \x7f',
    focus=Focus(path="src/m.py", first_line=1, last_line=2),
    source_roots=("src",),
    changes={"src/m.py": "def f(a):\r\n    return a - 1", "src/é.py": ""},
    solution={"src/m.py": "def f(a):\r\n    return a + 1", "src/é.py": "x = 1\n"},
    visible_tests=("src/m.py::doctest:f",),
    fail_to_pass=("tests/test_m.py::test_f[\"a'b\\n-é]",),
    pass_to_pass=(),
    difficulty={"lines": 1.0, "odd key": 0.5},
    licence="MIT",
)


@pytest.mark.parametrize("budget", [None, Budget(turns=3)])
def test_round_trip(tmp_path: Path, budget: Budget | None) -> None:
    task = CodeTask(**{name: getattr(TASK, name) for name in TASK.__struct_fields__} | {"budget": budget})
    harbor.write_task(task, tmp_path / task.id)
    assert harbor.read_harbor_task(tmp_path / task.id) == task


def test_what_harbor_reads(tmp_path: Path) -> None:
    folder = tmp_path / TASK.id
    harbor.write_task(TASK, folder)
    config = tomllib.loads((folder / "task.toml").read_text())
    assert config["schema_version"] == "1.4"
    assert config["task"]["name"] == f"etude/{TASK.id}"
    # Harbor's defaults are a shared verifier and a public network, and only artifacts reach a separate verifier.
    assert config["verifier"]["environment_mode"] == "separate"
    assert {config[t]["network_mode"] for t in ("agent", "verifier", "environment")} == {"no-network"}
    assert config["artifacts"] == [{"source": "/workspace"}]
    assert (folder / "environment/Dockerfile").read_text().startswith("FROM etude/lib:1.0\n")
    for script in ("tests/test.sh", "solution/solve.sh"):
        assert (folder / script).stat().st_mode & 0o111
    agent_sees = [p for p in (folder / "environment").rglob("*") if p.is_file()]
    assert not any(b"return a + 1" in p.read_bytes() or b"test_f" in p.read_bytes() for p in agent_sees)


# `PackageInfo.name` of harbor 0.25 (harbor.constants.ORG_NAME_PATTERN), and no ".." in it.
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")


@pytest.mark.parametrize(
    "id", ["m.f.op_flip+op_const.1a", "_build.f.x.1", "__init__.A.__call__.x.1", "m.é.x.1", "a..b.x.1", "m.f$.x.1"]
)
def test_names_are_those_that_harbor_takes(tmp_path: Path, id: str) -> None:
    harbor.write_task(msgspec.structs.replace(TASK, id=id), tmp_path / id)
    name = tomllib.loads((tmp_path / id / "task.toml").read_text())["task"]["name"]
    assert _NAME.fullmatch(name)
    assert ".." not in name
    assert name.startswith("etude/")
    assert harbor.read_harbor_task(tmp_path / id).id == id


def test_names_of_images() -> None:
    assert harbor.image_name("pydash-8.1.0") == "etude/pydash:8.1.0"
    assert harbor.image_name("lib-2.0+dev_1") == "etude/lib:2.0-dev-1"
    assert harbor.image_name("my_Lib.x") == "etude/my-lib-x:latest"
    assert harbor.image_name("two-words") == "etude/two-words:latest"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dataset.Dataset:
    """The small dataset, written anew by this version."""
    folder = tmp_path_factory.mktemp("harbor") / "tiny"
    shutil.copytree(TINY, folder)
    data = dataset.load_dataset(folder)
    shutil.rmtree(folder / "tasks")
    return dataset.save(folder, data.manifest, data.tasks)


def test_the_script_grades_with_the_paths_of_harbor(tiny: dataset.Dataset) -> None:
    for task in tiny.tasks[:2]:
        assert reward(tiny.root, task.id, solved=False) == "0"
        assert reward(tiny.root, task.id, solved=True) == "1"


def test_what_lies_beside_the_source_folders_does_not_count(tiny: dataset.Dataset) -> None:
    """An agent's test files, settings and modules named like those of the standard library are not handed in."""
    task = tiny.tasks[0]
    cheats = {
        "conftest.py": "import os\nos._exit(0)", "json.py": "raise SystemExit", "pytest.ini": "[pytest]\naddopts = -x",
        "tests/test_lists.py": "def test_x(): pass", "tests/conftest.py": "raise SystemExit",
    }  # fmt: skip
    assert reward(tiny.root, task.id, solved=True, extra=cheats) == "1"
    assert reward(tiny.root, task.id, solved=False, extra=cheats) == "0"


@pytest.mark.release
def test_the_loader_of_harbor_takes_every_folder(tiny: dataset.Dataset) -> None:
    """Harbor needs Python 3.12: $HARBOR_PYTHON names one that has it (`make harbor`)."""
    python = os.environ.get("HARBOR_PYTHON")
    if python is None:
        pytest.skip("HARBOR_PYTHON is not set")
    code = "import sys\nfrom harbor.models.task.task import Task\nfor folder in sys.argv[1:]: print(Task(folder).name)"
    folders = [str(tiny.root / "tasks" / task.id) for task in tiny.tasks]
    done = subprocess.run([python, "-c", code, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [harbor.task_name(task.id) for task in tiny.tasks]


def _sample(folder: Path, environment: str) -> Path:
    """A task as `harbor init` lays it out."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(
        'schema_version = "1.4"\n[task]\nname = "org/hello"\ndescription = ""\n[metadata]\ncategory = "x"\n'
        f"[verifier]\ntimeout_sec = 120.0\n[environment]\ncpus = 1\n{environment}"
    )
    (folder / "instruction.md").write_text("Write hello to hello.txt.\n")
    (folder / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "solution/solve.sh").write_text("echo hello > hello.txt\n")
    return folder


def test_foreign_tasks_are_refused(tmp_path: Path) -> None:
    image = _sample(tmp_path / "image", 'docker_image = "alpine:3"\n')
    with pytest.raises(UserError, match=r"made for Docker \(the image alpine:3\)"):
        harbor.read_harbor_task(image)
    build = _sample(tmp_path / "build", "")
    (build / "environment/Dockerfile").write_text("FROM alpine\n")
    with pytest.raises(UserError, match=r"made for Docker \(environment/Dockerfile\)"):
        harbor.read_harbor_task(build)
    with pytest.raises(UserError, match=r"no \[metadata\.etude\]"):
        harbor.read_harbor_task(_sample(tmp_path / "plain", ""))


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.toml is missing"):
        harbor.read_harbor_task(tmp_path)
    harbor.write_task(TASK, tmp_path / "a")
    (tmp_path / "a/tests/tests.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        harbor.read_harbor_task(tmp_path / "a")
    (tmp_path / "a/task.toml").write_text("=")
    with pytest.raises(UserError, match="cannot be read"):
        harbor.read_harbor_task(tmp_path / "a")
