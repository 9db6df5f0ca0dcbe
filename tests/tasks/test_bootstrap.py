"""How a repository is installed and tested is found by rules or by a model, in boxes, from a package index on disk."""

from __future__ import annotations

import asyncio
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from etude.code import functions, install_wheels
from etude.config import BuildConfig
from etude.errors import UserError
from etude.tasks import bootstrap, requirements
from etude.tasks.build import build_dataset

SOURCE = "def twice(value):\n    result = value\n    result = result + value\n    return result\n"
TEST = "from helperlib import three\nfrom lib import twice\n\n\ndef test_twice():\n    assert twice(three()) == 6\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "lib-1.0"
    (root / "tests").mkdir(parents=True)
    (root / "lib.py").write_text(SOURCE)
    (root / "tests/test_lib.py").write_text(TEST)
    (root / "pyproject.toml").write_text(
        '[project]\nname = "lib"\nversion = "1.0"\n[project.optional-dependencies]\ntest = ["pytest", "helperlib>=1"]\n'
    )
    return root


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, which pip takes instead of the network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "helperlib-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("helperlib.py", "def three():\n    return 3\n")
        info = "helperlib-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: helperlib\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _find(repository: Path, work: Path, how: str) -> bootstrap.BootstrapRecipe:
    work.mkdir()
    layout = functions.layout(repository)
    return asyncio.run(bootstrap.find(repository, layout, work, how, install_wheels, repository))


def test_the_second_try_installs_what_the_tests_need(repository: Path, index: Path, tmp_path: Path) -> None:
    recipe = _find(repository, tmp_path / "work", "rules")
    assert (recipe.requirements, recipe.tries) == (("helperlib>=1",), 2)
    assert recipe.goals[0].command == "python3 -c 'import lib'"
    assert recipe.goals[-1].share == bootstrap.SHARE
    assert len(recipe.goals) <= bootstrap.MAX_GOALS
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"site"}
    assert (tmp_path / "work/site/helperlib.py").is_file()


@pytest.mark.slow
def test_left_out_with_the_reason(repository: Path, index: Path, tmp_path: Path) -> None:
    (repository / "tests/test_lib.py").write_text(TEST.replace("== 6", "== 7"))
    with pytest.raises(
        UserError, match=r"left out after 2 tries: `python3 -m pytest .* does not hold. It printed: .*1 failed"
    ):
        _find(repository, tmp_path / "work", "rules")
    assert list((tmp_path / "work").iterdir()) == []
    out = tmp_path / "out"
    with pytest.raises(UserError, match="left out after"):
        build_dataset(repository, out, BuildConfig(bootstrap="rules"), lambda *_: None)
    assert not out.exists()


def test_sources_of_requirements(tmp_path: Path) -> None:
    files = {
        "setup.cfg": "[options]\ninstall_requires = six\n[options.extras_require]\ntesting =\n    mock>=2\n    tox\n",
        "tox.ini": "[testenv]\ndeps =\n    -r requirements/test.txt\n    freezegun==1.2  # dates\n",
        "requirements/test.txt": "-r base.txt\nhypothesis>=6; python_version > '3'\n-e .\nhttps://example.org/a.zip\n",
        "requirements/base.txt": "attrs\n",
        ".github/workflows/ci.yml": "- run: python -m pip install --upgrade pip pytest 'jsonschema<5' && pytest\n",
        "README.md": "`pip install .[dev]` and pip install -r ../outside.txt\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = list(requirements.sources(tmp_path))
    assert found == [
        ["six"],
        ["mock>=2"],
        ["hypothesis>=6; python_version > '3'", "attrs", "freezegun==1.2"],
        ["mock>=2"],
        ["jsonschema<5"],
    ]


class _Model(BaseHTTPRequestHandler):
    goals: ClassVar[list[dict[str, str]]] = []
    answers: ClassVar[list[list[str]]] = []
    prompts: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        self.prompts.append(prompt)
        said = {"goals": self.goals} if "Name up to" in prompt else {"requirements": self.answers.pop(0)}
        self._reply({"choices": [{"message": {"content": f"Here it is:\n```json\n{json.dumps(said)}\n```"}}]})

    def _reply(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def model() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.slow
def test_a_model_proposes(repository: Path, index: Path, tmp_path: Path, model: str) -> None:
    _Model.goals = [{"command": "python -c 'import helperlib; print(helperlib.three())'", "expected": "^3"}]
    _Model.answers, _Model.prompts = [[], ["helperlib", "--index-url=x"]], []
    recipe = _find(repository, tmp_path / "work", model)
    assert (recipe.requirements, recipe.tries) == (("helperlib",), 2)
    assert recipe.goals[0].expected == "^3"
    first, second, third = _Model.prompts
    assert "Do not say how to install" in first
    assert "tests/test_lib.py" in second
    assert "No module named 'helperlib'" in third
    assert "Tried:" in third


@pytest.mark.slow
def test_a_model_that_repeats_itself_is_not_asked_for_ever(
    repository: Path, index: Path, tmp_path: Path, model: str
) -> None:
    _Model.goals, _Model.answers = [{"command": "false", "expected": ""}], [["helperlib"], ["helperlib"]]
    with pytest.raises(UserError, match="left out after 1 tries: `false`"):
        _find(repository, tmp_path / "work", model)
    with pytest.raises(UserError, match="gave no JSON object"):
        bootstrap._ask("http://127.0.0.1:9/v1", "?")
