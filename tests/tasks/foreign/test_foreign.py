# pyright: reportPrivateUsage=false
"""Foreign Harbor folders: taken by their own gates, graded by tests/test.sh in a fresh box, refused with the reason."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from etude.config import SandboxConfig, validate_sandbox
from etude.errors import UserError
from etude.evals.suite import EvalResult, evaluate
from etude.grading.harbor import HARBOR_STATE, note_state, read_reward, taken_changes
from etude.grading.runner import open_sandbox
from etude.harness.loop import ChatAPI
from etude.protocol.backends.chat_formats import ChatModel
from etude.protocol.backends.chat_model import ChatClient
from etude.records import Budget, Episode
from etude.renderers import renderer_for
from etude.rollout import Taskset, dataset_part
from etude.rollout.episode import RolloutContext
from etude.run.inputs import check_playable, trainable
from etude.tasks import dataset
from etude.tasks.foreign import build as foreign
from etude.tasks.foreign import folder as folders
from etude.tasks.foreign import image as images
from etude.tasks.foreign.dataset import ForeignDataset, load_any_dataset
from etude.tasks.foreign.dockerfile import CopyStep, FolderRefused
from tests.helpers.chat_apis import KEY, FakeModel
from tests.helpers.foreign import DOCKERFILE, FILES, SOLVE, TOML, write
from tests.helpers.http_apps import answering

ROOT = Path(__file__).parents[3]


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ForeignDataset:
    """A dataset of the folder that works, and of two that don't."""
    root = tmp_path_factory.mktemp("foreign")
    write(root / "in/greeting")
    write(root / "in/unsolved", {"solution/solve.sh": None})
    write(root / "in/compose", {"environment/docker-compose.yaml": "services: {}"})
    data, trials = foreign.build_foreign([root / "in"], root / "out", silent)
    assert {trial.folder: trial.why for trial in trials.trials} == {
        "in/greeting": "",
        "in/unsolved": "it has no solution/solve.sh, so no run can prove that it is solvable",
        "in/compose": "it needs several containers (docker-compose)",
    }
    assert trials.share == "1 of 3 folders work (33 %)"
    assert isinstance(data, ForeignDataset)
    return data


def test_the_final_state_is_graded_by_the_folder_s_own_tests(built: ForeignDataset) -> None:
    """Files outside of the working folder, modes and links count; what steers Python or writes a reward does not."""
    (task,) = built.tasks
    forged = {
        ".root/logs/verifier/reward.txt": b"1.0",
        "sitecustomize.py": b"raise SystemExit",
        "x-1.dist-info/entry_points.txt": b"[pytest11]\nx = x\n",
    }

    async def play() -> tuple[list[float], str, list[str]]:
        async with open_sandbox() as sandbox:
            box = await sandbox.create(built.image(task), built.limits(task))
            try:
                seen = (await box.exec("ls /tests /solution /logs; ls /app /data; echo $NAME; pwd", 20)).output
                solved = SOLVE.split("set -e\n")[1]
                assert (await box.exec(f"cd /app; {solved} echo done", 20)).output.strip() == "done"
                await note_state(box)
                changes = await box.changes()
            finally:
                await box.close()
            plain = {path: data for path, data in changes.items() if path != HARBOR_STATE}
            grades = [await built.grade(sandbox, task, each) for each in (changes, plain, forged)]
            return [grade.score for grade in grades], seen, taken_changes(forged)[1]

    rewards, seen, aside = asyncio.run(play())
    assert rewards == [1.0, 0.0, 0.0], "without modes and links the program cannot be run"
    assert aside == sorted(forged)
    assert "check.py" not in seen, "tests are not in the agent's box"
    assert "solve.sh" not in seen, "nor is the solution"
    assert {"greet.sh", "made.txt", "name.txt", "world"} <= set(seen.split())


def test_tasks_are_decided_inside_and_say_so(built: ForeignDataset) -> None:
    assert [task.difficulty["decided"] for task in built.tasks] == [0.0]
    assert "decided inside" in (built.root / "DATACARD.md").read_text()
    assert any("decided inside" in warning for warning in built.manifest.warnings)
    with pytest.raises(UserError, match=r"none of the 1 training tasks of harbor-in .*min_decided"):
        trainable(dataset_part(built), 0.5)
    part = dataset_part(built)
    assert trainable(part, 0.0) is part


def test_a_changed_folder_is_refused(built: ForeignDataset) -> None:
    path = built.root / "tasks/greeting/tests/check.py"
    text = path.read_text()
    path.write_text(text + "\n")
    with pytest.raises(UserError, match=r"tasks has changed since the dataset was built"):
        load_any_dataset(built.root)
    path.write_text(text)
    assert load_any_dataset(built.root).tasks == built.tasks
    with pytest.raises(UserError, match=r"holds foreign Harbor tasks: runs, .* take them, nothing else does"):
        dataset.load_dataset(built.root)


def test_what_cannot_play_them_is_refused(built: ForeignDataset) -> None:
    chat = type("Chat", (), {"dialect": "hermes"})()
    docker: SandboxConfig = validate_sandbox({"type": "docker", "image": "x"}, "x")
    parts = [dataset_part(built)]
    check_playable(parts, chat, None)
    with pytest.raises(UserError, match="compact dialect"):
        check_playable(parts, renderer_for(ROOT / "models/nano"), None)
    with pytest.raises(UserError, match=r'sandbox.type = "docker"'):
        check_playable(parts, chat, docker)


@pytest.mark.slow
def test_the_gates_hold_again(built: ForeignDataset) -> None:
    assert foreign.check_foreign(built.root, silent).ok


@pytest.mark.slow
def test_what_fails_in_a_box_is_said(tmp_path: Path) -> None:
    """Each gate has a folder that it refuses."""
    always = "echo 1 > /logs/verifier/reward.txt\n"
    write(tmp_path / "always", {"tests/test.sh": always})
    write(tmp_path / "never", {"solution/solve.sh": "true\n"})
    write(tmp_path / "json", {
        "tests/test.sh": "if [ -e done ]; then echo '{\"a\": 1, \"b\": 1.0}' > /logs/verifier/reward.json; fi\n",
        "solution/solve.sh": "touch done; echo x > done\n",
    })  # fmt: skip
    write(tmp_path / "run", {"environment/Dockerfile": DOCKERFILE + "RUN false && true\n"})
    write(tmp_path / "leak", {"environment/check.py": FILES["tests/check.py"],
                                "environment/Dockerfile": DOCKERFILE + "COPY check.py /app/visible.py\n"})  # fmt: skip
    write(tmp_path / "apt", {"environment/Dockerfile": DOCKERFILE + "RUN apt-get install -y no-such-package\n"})
    found = {trial.folder.split("/")[1]: trial.why for trial in foreign.try_folders([tmp_path], [], silent).trials}
    assert found["always"] == "doing nothing scores 1"
    assert found["never"].startswith("its own solution scores 0: the tests gave 0")
    assert found["json"] == ""
    assert found["run"].startswith("RUN false && true fails in a box")
    assert found["leak"] == "its image holds tests/check.py (as /workspace/visible.py)"
    assert found["apt"] == "apt-get installs no-such-package, which this machine lacks"


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1", 1.0), ('{"reward": 0.5, "other": 1}', 0.5), ('{"a": 1, "b": 0.5}', 0.75), ("7", 1.0), ("-1", 0.0)]
    + [(text, 0.0) for text in ("", "{}", "nan", "Infinity", "[1]", "null", "9" * 400, "[" * 100_000, '{"a": "x"}')],
)
def test_a_reward_file_is_a_finite_number_or_earns_nothing(text: str, reward: float) -> None:
    assert read_reward("reward.json", text)[0] == reward


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task.toml": TOML + "gpus = 1\n"}, "it needs a GPU"),
        ({"task.toml": TOML.replace("memory_mb = 512", 'os = "windows"')}, "it needs windows"),
        ({"task.toml": TOML + '[[steps]]\nname = "a"\n'}, "it has several steps"),
        ({"task.toml": "= "}, r"its task.toml or instruction.md cannot be read"),
        ({"tests/Dockerfile": "FROM python"}, r"its tests have an image of their own"),
        ({"tests/test.sh": None}, r"it has no tests/test.sh"),
        ({"environment/Dockerfile": None}, r"it has no environment/Dockerfile"),
    ],
)
def test_folders_are_refused_before_anything_runs(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(FolderRefused, match=reason):
        folders.load(write(tmp_path / "x", changes))


def test_an_image_by_name_is_taken_where_boxes_have_it(tmp_path: Path) -> None:
    """The refusal says what to give."""
    named = TOML.replace("memory_mb = 512", 'docker_image = "ghcr.io/x/y:1"\nworkdir = "/app"')
    folder = write(tmp_path / "x", {"environment/Dockerfile": None, "task.toml": named})
    with pytest.raises(FolderRefused, match=r"it names the image ghcr.io/x/y:1: give --base ghcr.io/x"):
        folders.load(folder)
    record = folders.load(folder, ["ghcr.io/x/y:1"]).record
    assert (record.workdir, record.places["/app"]) == ("/app", "")


def test_links_lead_nowhere(tmp_path: Path) -> None:
    """A stranger's folder, and what its RUN leaves, must not make us read or write this machine's own files."""
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = write(tmp_path / "x")
    (folder / "environment/data/link").symlink_to(outside)
    with pytest.raises(FolderRefused, match="its link environment/data/link leads out of it"):
        folders.load(folder)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(outside)
    for step in (CopyStep(("name.txt",), "/app/link/"), CopyStep(("name.txt",), "/app/link")):
        given = folders.load(write(tmp_path / "y", {"environment/name.txt": "x"}))
        with pytest.raises(FolderRefused, match="it writes through the link link"):
            images._copy(given, step, tree)
    assert images._without_links(tree, tree / "a/b") == tree / "a/b"
    with pytest.raises(FolderRefused, match="through the link link/b"):
        images._without_links(tree, tree / "link/b")
    assert not list(outside.iterdir())


def test_folders_are_found_at_any_depth(tmp_path: Path) -> None:
    for name in ("a/one", "a/b/two", "three"):
        write(tmp_path / name)
    assert [path.name for path in folders.find_folders([tmp_path])] == ["two", "one", "three"]
    with pytest.raises(UserError, match="holds no Harbor task folder"):
        folders.find_folders([tmp_path / "a/one/tests"])


def test_the_command_prints_the_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from etude.cli.main import main

    write(tmp_path / "x", {"solution/solve.sh": None})
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "harbor", str(tmp_path), "--json"])
    assert not ended.value.code
    *_, share, last = capsys.readouterr().out.splitlines()
    assert share == "0 of 1 folders work (0 %)"
    assert json.loads(last)["works"] == 0


class Worker(FakeModel):
    """Runs the solution's commands, and looks for the tests."""

    def turn(self, user: str, number: int) -> list[tuple[str, dict[str, object]]]:
        assert "You work in /app. Paths that tools take are relative to /app." in user
        commands = "cd /app; " + SOLVE.split("set -e\n")[1]
        calls: list[list[tuple[str, dict[str, object]]]] = [
            [("run", {"command": commands}), ("read", {"path": "out/greeting.txt"}), ("test", {})], [("finish", {})],
        ]  # fmt: skip
        return calls[number]


def test_an_episode_on_a_foreign_task(built: ForeignDataset) -> None:
    """From the prompt to the reward, as a run or an evaluation plays it."""

    async def play(url: str) -> tuple[Episode, EvalResult]:
        async with open_sandbox() as sandbox, ChatClient(ChatModel(f"{url}/v1", "m"), KEY) as client:
            episodes: list[Episode] = []
            budget = Budget(turns=3, tokens=500, context=9000, seconds=60.0)
            context = RolloutContext(Taskset((dataset_part(built),)), sandbox, ChatAPI(client), budget)
            result = await evaluate(context, samples=1, split="train", on_episode=episodes.append)
            return episodes[0], result

    with answering(Worker(built.tasks).app()) as url:
        episode, result = asyncio.run(play(url))
    assert episode.passed, episode.detail
    assert result.pass_1.mean == 1.0
    assert "Hello Ada" in episode.turns[0].results[1]
    assert "no tests that you may see" in episode.turns[0].results[2]
    assert episode.flags == ()


def test_an_output_beside_the_current_folder_is_no_way_out_of_a_tree() -> None:
    tree = Path("../out/tree")
    assert images._without_links(tree, tree / "app/copied.txt") == tree / "app/copied.txt"
    with pytest.raises(FolderRefused, match=r"through the link \.\./secret"):
        images._without_links(tree, tree / "../secret")
