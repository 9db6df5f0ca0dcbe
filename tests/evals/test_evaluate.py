"""`evaluate` with everything real but the model, which knows the answers: dataset, sandbox, agent loop, grading."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from models.make_nano.tokenizer import train
from tokenizers import Tokenizer

from etude.config import EvalConfig
from etude.errors import UserError
from etude.evals.suite import EvalResult, compare, evaluate
from etude.grading.runner import open_sandbox
from etude.harness.loop import EngineModel, Sampling
from etude.protocol.wire import GenerateRequest
from etude.records import Budget, CodeTask, Episode, Generation
from etude.renderers import Renderer, renderer_for
from etude.rollout.environments.code import dataset_part
from etude.rollout.environments.taskset import Taskset
from etude.rollout.episode import RolloutContext
from etude.run.evaluate import Measurement
from etude.tasks.dataset import Dataset, load_dataset
from tests.renderers.families import FAMILIES

TINY = Path(__file__).parent.parent / "tasks" / "data" / "tiny"


class Solver:
    """Repairs a task the first `solved` times that it is asked to, and gives up after that."""

    def __init__(self, tokenizer: Tokenizer, tasks: tuple[CodeTask, ...], solved: int) -> None:
        self.tokenizer, self.tasks, self.solved = tokenizer, tasks, solved
        self.asked: dict[str, int] = {}
        self.seeds: list[int] = []

    async def generate(self, request: GenerateRequest, *_: object) -> Generation:
        prompt = self.tokenizer.decode(request.ids, skip_special_tokens=False)
        task = next(task for task in self.tasks if task.prompt in prompt)
        self.asked[task.id] = self.asked.get(task.id, 0) + 1
        self.seeds.append(request.seed)
        turn = "<|call|>finish<|end|>"
        if self.asked[task.id] <= self.solved:
            old, new = the_edit(task)
            turn = f"<|call|>edit<|arg|>{old}<|arg|>{new}<|call|>test{turn}"
        said = self.tokenizer.encode(turn, add_special_tokens=False).ids
        return Generation(ids=said, logprobs=[-0.1] * len(said), versions=[0] * len(said), finish_reason="stop")


def the_edit(task: CodeTask) -> tuple[str, str]:
    """The one line that the solution changes."""
    [path] = task.changes
    pairs = zip(task.changes[path].splitlines(), task.solution[path].splitlines(), strict=True)
    [(old, new)] = [(a.strip(), b.strip()) for a, b in pairs if a != b]
    return old, new


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    train([Path(json.__file__).read_text()], 1024).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def results(model: Path) -> tuple[EvalResult, EvalResult, list[Episode], list[Solver]]:
    dataset, renderer = load_dataset(TINY), renderer_for(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    solvers = [Solver(tokenizer, dataset.tasks, solved) for solved in (0, 1)]
    kept: list[Episode] = []

    async def both() -> list[EvalResult]:
        async with open_sandbox() as sandbox:
            return [await played(dataset, sandbox, solver, renderer, kept) for solver in solvers]

    before, after = asyncio.run(asyncio.wait_for(both(), 60))
    return before, after, kept, solvers


async def played(dataset: Dataset, sandbox, policy: Solver, renderer: Renderer, kept: list[Episode]) -> EvalResult:
    taskset = Taskset((dataset_part(dataset),))
    setting = RolloutContext(taskset, sandbox, EngineModel(policy, renderer, Sampling()), Budget())
    return await evaluate(setting, samples=2, split="train", seed=3, on_episode=kept.append)


def test_solved_tasks_pass_and_the_rest_fail(results):
    before, after, kept, _ = results
    assert before.pass_1.mean == 0.0
    assert after.pass_1.mean == 0.5
    assert after.pass_k == {1: 0.5, 2: 1.0}
    assert len(kept) == 2 * 3 * 2
    assert after.outcomes == {"scored": 6}
    assert after.stops == {"finished": 6}


def test_behaviour_is_what_the_agent_did(results):
    _, after, _, _ = results
    assert after.behaviour["turns"] == 1.0
    assert after.behaviour["edits"] == after.behaviour["tests_run"] == 0.5
    assert after.behaviour["edit_errors"] == after.behaviour["malformed"] == 0.0
    assert after.behaviour["sampled_tokens"] > 3


def test_both_models_met_the_same_seeds(results):
    *_, solvers = results
    assert sorted(solvers[0].seeds) == sorted(solvers[1].seeds)
    assert len(set(solvers[0].seeds)) == 6


def test_the_difference_is_paired(results):
    before, after, _, _ = results
    comparison = compare(before, after)
    assert comparison.difference.mean == 0.5
    assert (comparison.better, comparison.worse) == (3, 0)


def test_an_empty_split_is_the_user_s_to_fix(model):
    taskset = Taskset((dataset_part(TINY),))
    setting = RolloutContext(taskset, None, EngineModel(None, renderer_for(model), Sampling()), Budget())
    with pytest.raises(UserError, match="no nosuch tasks"):
        asyncio.run(evaluate(setting, samples=1, split="nosuch"))


def test_folders_are_rendered_as_the_measurement_says(tmp_path):
    folder = next(family for family in FAMILIES if family.name == "qwen3").write(tmp_path / "qwen3")
    asked = [{"role": "user", "content": "x"}]
    plain = Measurement([TINY], EvalConfig(), Budget(), "heldout", 0)
    silent = replace(plain, dialect="hermes", chat_template_kwargs={"enable_thinking": False})
    said, other = (m.renderer(folder).text(m.renderer(folder).prompt(asked)) for m in (plain, silent))
    assert other == said + "<think>\n\n</think>\n\n"
    with pytest.raises(UserError):
        replace(plain, dialect="kimi_k2").renderer(folder)
