"""`etude eval MODEL --suite SUITE`: measures one model, or two on the same tasks with the same seeds.

Model and suite determine the kind of measurement (`_Mode`), a function each; `_RULES` are the flags that only some
kinds accept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.flags import add_flags, add_sandbox, from_flags, sandbox_of
from etude.config import EvalConfig, InferenceConfig, ModelConfig, RLConfig, RolloutConfig, validate
from etude.errors import UserError
from etude.weights import model_folder, rl_config

if TYPE_CHECKING:
    from etude.run.evaluate import Remote

ENGINE = ("threads", "device", "dtype")
BUDGET = ("turns", "tokens", "context", "seconds")
TOOLS = ("tools", "custom_tools")


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `etude eval`."""
    parser.add_argument(
        "model", help="HF folder, run folder, GGUF file, the name of a model such as nano, or the URL of a chat API"
    )
    suites = (
        "task datasets made by `etude tasks build`; run folders or TOMLs for the tasks of the run; an environment as "
        "module:Class; or `retrieval`, or `fast-apply`, or a table of edits"
    )
    parser.add_argument("--suite", type=Path, nargs="+", required=True, metavar="SUITE", help=suites)
    parser.add_argument("--split", choices=("heldout", "train"), default="heldout")
    add_flags(parser, EvalConfig, ("samples", "max_tasks"))
    ready = "also say whether RL can begin with the model: which tasks teach, what the model does at all"
    parser.add_argument("--readiness", action="store_const", const=True, help=ready)
    parser.add_argument("--seed", type=int, help="of the episodes (default: that of a run that is measured, or 0)")
    parser.add_argument("--against", metavar="MODEL", help="a second model: paired difference, second minus first")
    add_sandbox(parser, "that of a run or TOML among the suites, else of the model's run, else namespaces")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    engine = parser.add_argument_group("engine")
    add_flags(engine, InferenceConfig, ENGINE)
    add_flags(engine, ModelConfig, ("dialect", "chat_template"))
    variables = "variables of the chat template as a JSON object, e.g. '{\"enable_thinking\": false}'"
    engine.add_argument("--chat-template-kwargs", metavar="JSON", help=variables)
    budget = parser.add_argument_group(
        "budget of an episode, by default that of a run that is measured, or a small model's; with a chat API 50, "
        "32000, 131072, 900"
    )
    add_flags(budget, RolloutConfig, (*BUDGET, *TOOLS))
    kept = "folder that keeps finished episodes; the same command goes on where it stopped"
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help=kept)
    parser.add_argument("--concurrency", type=int, metavar="N", help="episodes at a time")
    remote = parser.add_argument_group("chat API", "MODEL as https://host/v1, with tool calls (docs/harness.md)")
    remote.add_argument("--model", dest="names", nargs="+", metavar="NAME", help="the model there; one for each URL")
    remote.add_argument("--api", choices=("openai", "anthropic"), default="openai", help="default: openai")
    keys = "file with the key (default: the variable OPENAI_API_KEY or ANTHROPIC_API_KEY)"
    remote.add_argument("--key-file", type=Path, metavar="FILE", help=keys)
    remote.add_argument("--temperature", type=float, metavar="X", help="of a chat API (default: its own)")
    edits = parser.add_argument_group("fast-apply", "applied edits (docs/fast-apply.md)")
    tested = "a task dataset; the edits undo its mutations, and the tests decide on answers that differ"
    edits.add_argument("--tests", type=Path, metavar="DIR", help=tested)
    edits.add_argument("--judge", metavar="URL", help="OpenAI API of a model that is asked about failed edits")
    edits.add_argument("--judge-model", metavar="NAME", help="name of the judging model at that API")
    files = parser.add_argument_group("retrieval", "questions about files of a repository (docs/documents.md)")
    files.add_argument("--documents", choices=("full", "own", "both"), help="which see each other (default: both)")
    folders = "folders (default: libraries kept out of training, fetched by pip into outputs/corpus)"
    files.add_argument("--repository", type=Path, nargs="+", help=folders)
    files.add_argument("--orders", type=int, help="random orders of the documents, the first included (default: 1)")


class _Mode(Enum):
    """A kind of measurement of `etude eval`."""

    FOLDERS = "model folders on task datasets"
    CHAT_API = "chat APIs, and model folders beside them, on task datasets"
    RETRIEVAL = "model folders on questions about files"
    EDITS = "model folders on edits to apply"


@dataclass(frozen=True)
class _Rule:
    """Flags, by their names in the parsed arguments, the modes that accept them, and the refusal for other modes."""

    flags: tuple[str, ...]
    modes: tuple[_Mode, ...]
    refusal: str


# In a mode of a row that its sentence does not name, the flags have no effect.
_RULES = (
    _Rule(
        ("chat_template",),
        (_Mode.FOLDERS, _Mode.RETRIEVAL, _Mode.EDITS),
        "--chat-template belongs to model folders: a chat API has its own",
    ),
    _Rule(
        ("dialect", "chat_template_kwargs"),
        (_Mode.FOLDERS,),
        "--dialect and --chat-template-kwargs belong to model folders that play tasks",
    ),
    _Rule(
        ("documents", "repository", "orders"),
        (_Mode.RETRIEVAL,),
        "--documents, --repository and --orders belong to --suite retrieval",
    ),
    _Rule(
        ("tests", "judge", "judge_model"),
        (_Mode.EDITS, _Mode.RETRIEVAL),
        "--tests, --judge and --judge-model belong to --suite fast-apply",
    ),
    _Rule(
        ("sandbox",),
        (_Mode.FOLDERS, _Mode.CHAT_API, _Mode.EDITS),
        "--sandbox is for tasks with boxes, and --suite retrieval has none",
    ),
    _Rule(
        ("readiness",),
        (_Mode.FOLDERS, _Mode.CHAT_API),
        "--readiness is for task datasets, whose samples RL compares",
    ),
    _Rule(
        ("key_file", "temperature"),
        (_Mode.CHAT_API, _Mode.RETRIEVAL, _Mode.EDITS),
        "--key-file and --temperature belong to the URL of a chat API",
    ),
)


def run(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Prints rates with 95 % intervals. Raises UserError."""
    engine = from_flags(arguments, InferenceConfig, **({} if hasattr(arguments, "threads") else {"threads": 2}))
    mode = _mode(arguments)
    for rule in _RULES:
        if mode not in rule.modes and any(getattr(arguments, flag, None) is not None for flag in rule.flags):
            raise UserError(rule.refusal)
    _MEASURES[mode](arguments, engine)


def _mode(arguments: argparse.Namespace) -> _Mode:
    """The mode of the models and suites. Raises UserError for a combination without a mode."""
    suites: list[Path] = arguments.suite
    alone = [suite for suite in suites if str(suite) in ("retrieval", "fast-apply") or suite.suffix == ".parquet"]
    if alone and len(suites) > 1:
        raise UserError(f"--suite {alone[0]} is measured alone; several suites are task datasets")
    url = next((model for model in _names(arguments) if "://" in model), None)
    if url is not None and alone:
        raise UserError(f"{url}: a chat API is measured on task datasets alone")
    if url is not None:
        return _Mode.CHAT_API
    if suites[0] == Path("retrieval"):
        return _Mode.RETRIEVAL
    return _Mode.EDITS if alone else _Mode.FOLDERS


def _names(arguments: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return [model for model in (arguments.model, arguments.against) if model]


def _folders(arguments: argparse.Namespace) -> list[Path]:
    """The model folders. Raises UserError."""
    return [model_folder(model, getattr(arguments, "chat_template", None)) for model in _names(arguments)]


# Task datasets --------------------------------------------------------------------------------------------------------


def _measure_folders(arguments: argparse.Namespace, engine: InferenceConfig) -> None:
    rendered = _rendered(arguments)
    _check_tasks(arguments, urls=[])
    rollout = None if (trained := _trained(arguments)) is None else trained.rollout
    budget = {} if rollout is None else {name: getattr(rollout, name) for name in BUDGET}
    tools = {} if rollout is None else {name: getattr(rollout, name) for name in TOOLS}
    _measure_tasks(arguments, engine, _folders(arguments), budget, tools, rendered)


def _measure_chat_apis(arguments: argparse.Namespace, engine: InferenceConfig) -> None:
    from etude.protocol.backends import ChatModel
    from etude.run.evaluate import CHAT_BUDGET, remote

    models = _names(arguments)
    urls = [model for model in models if "://" in model]
    _check_tasks(arguments, urls)
    key, names = api_key(arguments), iter(arguments.names)

    def behind(url: str) -> Remote:
        return remote(ChatModel(url, next(names), arguments.api, arguments.temperature), key)

    measured = [behind(model) if model in urls else model_folder(model) for model in models]
    _measure_tasks(arguments, engine, measured, CHAT_BUDGET, {}, {})


def _check_tasks(arguments: argparse.Namespace, urls: Sequence[str]) -> None:
    if arguments.concurrency is not None and arguments.concurrency < 1:
        raise UserError("--concurrency is a number of episodes from 1")
    if len(arguments.names or []) != len(urls):
        raise UserError("give --model NAME for each URL, and for URLs alone")


def _trained(arguments: argparse.Namespace) -> RLConfig | None:
    """The configuration of the first run among the models; None without a run."""
    return next((config for config in map(rl_config, _names(arguments)) if config is not None), None)


def _measure_tasks(
    arguments: argparse.Namespace,
    engine: InferenceConfig,
    models: Sequence[Path | Remote],
    budget: Mapping[str, Any],
    tools: Mapping[str, tuple[str, ...]],
    rendered: Mapping[str, Any],
) -> None:
    """Plays task datasets. `budget` and `tools` are the values without flags, `rendered` the renderer's options."""
    from etude.run.evaluate import Measurement, Remote, evaluate_models, named_suites, sandbox_of_suites

    trained, boxes = _trained(arguments), sandbox_of(arguments)
    if boxes is None:
        boxes = sandbox_of_suites(arguments.suite, None if trained is None else trained.sandbox)
    seed = arguments.seed if arguments.seed is not None else trained.seed if trained is not None else 0
    changed = {name: getattr(arguments, name) for name in BUDGET if hasattr(arguments, name)}
    measurement = Measurement(
        [each for suite in arguments.suite for each in named_suites(suite)],
        from_flags(arguments, EvalConfig),
        validate(RolloutConfig, {**budget, **changed}, "etude eval").budget(),
        arguments.split,
        seed,
        arguments.concurrency,
        arguments.output,
        boxes=boxes,
        **{name: tuple(getattr(arguments, name, tools.get(name, ()))) for name in TOOLS},
        **rendered,
    )
    for name in (name for name in TOOLS if hasattr(arguments, name)):
        flag = f"--{name.replace('_', '-')}"
        if not any(isinstance(suite, Path) for suite in measurement.suites):
            raise UserError(f"{flag} is for tasks of repositories, and an environment brings its own tools: drop it")
        for model in models:
            if not isinstance(model, Remote) and measurement.renderer(model).dialect == "compact":
                raise UserError(f"{model} speaks the compact dialect, which has its own tools: drop {flag}")
    evaluate_models(models, measurement, engine, as_json=arguments.json, with_readiness=arguments.readiness is not None)


def _rendered(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the renderer by their flags. Raises UserError."""
    options: dict[str, Any] = {"dialect": arguments.dialect} if hasattr(arguments, "dialect") else {}
    if arguments.chat_template_kwargs is not None:
        try:
            variables = json.loads(arguments.chat_template_kwargs)
        except ValueError:
            variables = None
        if not isinstance(variables, dict):
            raise UserError("--chat-template-kwargs is a JSON object, such as '{\"enable_thinking\": false}'")
        options["chat_template_kwargs"] = variables
    return options


def api_key(arguments: argparse.Namespace) -> str | None:
    """The key of the API from a file; None without one. Raises UserError."""
    if arguments.key_file is None:
        return None
    try:
        return arguments.key_file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--key-file {arguments.key_file} cannot be read: {e}") from None


# Questions and edits --------------------------------------------------------------------------------------------------


def _measure_retrieval(arguments: argparse.Namespace, engine: InferenceConfig) -> None:
    from etude.evals.document_suite import MASKS, evaluate_retrieval

    evaluate_retrieval(
        _folders(arguments),
        engine,
        masks=[mask for mask in MASKS if arguments.documents in (None, "both", mask)],
        repositories=arguments.repository or (),
        samples=from_flags(arguments, EvalConfig).max_tasks or 100,
        orders=1 if arguments.orders is None else arguments.orders,
        seed=arguments.seed or 0,
        as_json=arguments.json,
    )


def _measure_edits(arguments: argparse.Namespace, engine: InferenceConfig) -> None:
    from etude.edits.judge import Judge
    from etude.evals.fast_apply import evaluate_edits

    models = _folders(arguments)
    if (arguments.judge is None) != (arguments.judge_model is None):
        raise UserError("--judge and --judge-model belong together: give both")
    if arguments.tests is not None and arguments.suite != [Path("fast-apply")]:
        raise UserError("--tests brings edits of its own: give it with --suite fast-apply")
    if arguments.sandbox is not None and arguments.tests is None:
        raise UserError("--sandbox is for edits whose tests decide: give --tests with it")
    evaluate_edits(
        models,
        arguments.suite[0],
        engine,
        max_edits=from_flags(arguments, EvalConfig).max_tasks,
        as_json=arguments.json,
        tests=arguments.tests,
        split=arguments.split,
        judge=Judge(arguments.judge, arguments.judge_model) if arguments.judge else None,
        boxes=sandbox_of(arguments),
    )


_MEASURES: dict[_Mode, Callable[[argparse.Namespace, InferenceConfig], None]] = {
    _Mode.FOLDERS: _measure_folders,
    _Mode.CHAT_API: _measure_chat_apis,
    _Mode.RETRIEVAL: _measure_retrieval,
    _Mode.EDITS: _measure_edits,
}
