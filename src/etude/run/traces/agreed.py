"""`etude corpus rollouts`: a model's rollouts on repositories without tests, kept where two of them agree.

    sources ──> trees, functions ──> tries: a function and a kind of change each ──> OUTPUT.partial ──> OUTPUT

`rollout/agreement.py` plays a try. The tries, their seeds and the order of rows depend on sources and options alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import msgspec

from etude import runfolder
from etude.code import redacted, secret_in
from etude.code.functions import functions, is_test
from etude.config import AgreedRolloutsConfig, EngineConfig, SandboxConfig
from etude.corpus.documents import CorpusSource, contents, corpus_sources, listed
from etude.errors import UserError
from etude.grading import open_sandbox
from etude.harness import Aborted, Model, Toolset
from etude.protocol.backends import EngineError
from etude.records import Budget
from etude.renderers import Renderer, renderer_for
from etude.rollout import CHANGE_TOOLS, KINDS, AgreedPair, ChangeTarget, LeftOut, RepositoryTree, agreed_pair
from etude.run.evaluate import Remote, check_model, opened_model, served_as
from etude.run.traces.partial import Progress, partial_rows
from etude.sandbox import BoxError, Image, Sandbox

LOST = (BoxError, EngineError, Aborted, TimeoutError)  # of a model or a box: the try is played again
MAX_LOST = 8  # tries; more than these are no accident
MIN_LINES = 3  # of a function's body


@dataclass(frozen=True)
class RolloutSources:
    """The repositories: those under a permissive licence, and one's own with their licence."""

    foreign: Sequence[str]
    own: Sequence[str] = ()
    own_licence: str = "own code"


@dataclass(frozen=True)
class RolloutPlayer:
    """The model that plays, its budget for each rollout, the engine that serves it if it is a folder, and its boxes."""

    model: Path | Remote
    budget: Budget
    engine: EngineConfig
    boxes: SandboxConfig | None = None

    @property
    def name(self) -> str:
        """The model's name in rows."""
        return self.model.chat.model if isinstance(self.model, Remote) else self.model.name

    def check(self) -> None:
        """Raises UserError for a model that cannot play."""
        renderer = check_model(self.model, self.engine, _renderer, Toolset(CHANGE_TOOLS), self.budget.context)
        if renderer is not None and renderer.dialect == "compact":
            raise UserError(
                f"{self.name} speaks the compact dialect, in which no request can be written: name a chat model"
            )


@dataclass
class AgreedReport:
    """The numbers of rows, of kept pairs and of tries; `left_out` counts tries without a pair by reason."""

    rows: int = 0
    kept: int = 0
    tries: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True)
class _SourceTree:
    source: CorpusSource
    tree: RepositoryTree
    dates: Mapping[str, str]  # of the last changes of files


@dataclass(frozen=True)
class _RolloutTry:
    name: str
    repository: _SourceTree
    target: ChangeTarget


def write_agreed_rollouts(
    sources: RolloutSources, output: Path, options: AgreedRolloutsConfig, player: RolloutPlayer, progress: Progress
) -> AgreedReport:
    """Writes the rows of kept rollouts into `output`. OUTPUT.partial keeps the finished tries, so that the same command
    goes on after a stop. Raises UserError."""
    if output.exists():
        raise UserError(f"{output} exists: name another file, or remove it")
    chosen = corpus_sources(sources.foreign, sources.own, sources.own_licence, (), ())
    player.check()
    with tempfile.TemporaryDirectory(prefix="etude-rollouts-") as folder:
        repositories = [_opened(source, Path(folder, str(number))) for number, source in enumerate(chosen)]
        tries = list(itertools.islice(_tries(repositories, options.seed), options.tries))
        if not tries:
            raise UserError("the sources have no Python function of three lines that a model could change")
        with partial_rows(output, _header(repositories, options, player), "options, model or sources") as partial:
            try:
                asyncio.run(_play(tries, partial, options, player, progress))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None  # such as a UserError, which is for the user to read
            report = _finish(tries, partial, output)
    return report


def _header(
    repositories: Sequence[_SourceTree], options: AgreedRolloutsConfig, player: RolloutPlayer
) -> dict[str, Any]:
    digest = blake3.blake3()
    for repository in repositories:
        texts = {path: blake3.blake3(data).hexdigest() for path, data in repository.tree.files.items()}
        digest.update(msgspec.json.encode((repository.source.name, repository.source.licence, texts)))
    return {
        "options": options.model_dump(mode="json", exclude={"workers", "tries"}),  # more tries go on from fewer
        "model": [str(player.model), *served_as(player.model)],
        "budget": msgspec.to_builtins(player.budget),
        "sources": digest.hexdigest(),
    }


def _finish(tries: Sequence[_RolloutTry], partial: Path, output: Path) -> AgreedReport:
    """Writes the output in the order of the tries. Without a row the partial file stays, and UserError says why."""
    noted = {line["name"]: line for line in runfolder.read_jsonl(partial, texts=("name",))}
    lines = [noted[each.name] for each in tries]
    rows = [row for line in lines for row in line.get("rows", ())]
    left_out = Counter(line["left_out"] for line in lines if "left_out" in line)
    report = AgreedReport(len(rows), sum("rows" in line for line in lines), len(tries), left_out)
    if not rows:
        reasons = "; ".join(f"{count} because {why}" for why, count in left_out.most_common())
        raise UserError(f"no pair of rollouts of {len(tries)} agrees: {reasons}; take another model, or more tries")
    runfolder.write(output, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    partial.unlink()
    return report


def _renderer(model: Path) -> Renderer:
    return renderer_for(model, "auto", {})


# Tries ----------------------------------------------------------------------------------------------------------------


def _opened(source: CorpusSource, folder: Path) -> _SourceTree:
    """A source with its files in a folder, from which boxes are made. Credential files are not among them."""
    files: dict[str, bytes] = {}
    dates: dict[str, str] = {}
    for file, data, _ in contents(source, listed(source, Counter(), 1 << 20)):
        files[file.path], dates[file.path] = data, file.date
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    folder.mkdir(exist_ok=True)
    return _SourceTree(source, RepositoryTree(files, Image(folder, None, {})), dates)


def _tries(repositories: Sequence[_SourceTree], seed: int) -> Iterator[_RolloutTry]:
    """Every function of the repositories in a drawn order, then once more in another, and so on, without an end."""
    units = [
        (repository, unit)
        for repository in repositories
        for path, data in sorted(repository.tree.files.items())
        if path.endswith(".py") and not is_test(path)
        for unit in functions(path, data.decode("utf-8", "replace"))
        if unit.body_lines >= MIN_LINES
    ]
    for number in itertools.count() if units else ():
        rng = random.Random(f"{seed}/{number}")
        for repository, unit in rng.sample(units, len(units)):
            name = repository.source.name
            target = ChangeTarget(name, unit.path, unit.qualname, unit.first_line, unit.last_line, rng.choice([*KINDS]))
            yield _RolloutTry(f"{name}:{unit.id}:{number}", repository, target)


async def _play(
    tries: Sequence[_RolloutTry],
    partial: Path,
    options: AgreedRolloutsConfig,
    player: RolloutPlayer,
    progress: Progress,
) -> None:
    """Appends the tries that are missing to `partial`: their rows, or the reason why there are none."""
    known = {line["name"] for line in runfolder.read_jsonl(partial, texts=("name",))}
    left = iter([each for each in tries if each.name not in known])
    done, lost = len(tries) - sum(each.name not in known for each in tries), 0

    async def work(sandbox: Sandbox, model: Model) -> None:
        nonlocal done, lost
        for each in left:
            progress("rollouts", done, len(tries))
            try:
                line = await _line(each, sandbox, model, options, player)
            except LOST as e:
                lost += 1
                if lost > MAX_LOST:
                    raise UserError(
                        f"more than {MAX_LOST} tries lost their model or box ({e}); the same command goes on"
                    ) from None
                line = {"left_out": "its model or box was lost twice"}
            runfolder.append_json(partial, {"name": each.name} | line)
            done += 1
        progress("rollouts", done, len(tries))

    async with (
        open_sandbox(player.boxes) as sandbox,
        opened_model(player.model, player.engine, _renderer, player.budget.context) as model,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(options.workers):
            group.create_task(work(sandbox, model))


async def _line(
    each: _RolloutTry, sandbox: Sandbox, model: Model, options: AgreedRolloutsConfig, player: RolloutPlayer
) -> dict[str, Any]:
    """The rows of a try, or the reason why there are none. What is lost is played once more. Raises one of LOST."""
    seed = int.from_bytes(blake3.blake3(f"{options.seed}/{each.name}".encode()).digest(8)) >> 1
    for again in (False, True):
        try:
            pair = await agreed_pair(
                each.target, each.repository.tree, sandbox, model, player.budget, seed, options.agreement
            )
            rows = [_row(each, pair, which, player.name, seed) for which in ((1, 2) if options.first else (2,))]
        except LeftOut as e:
            return {"left_out": str(e)}
        except LOST as e:
            if again or (isinstance(e, BoxError) and e.payer != "infra"):
                raise
            continue
        text = json.dumps(rows, ensure_ascii=False)
        if redacted(text)[1] or secret_in(text.encode("utf-8", "surrogatepass")) is not None:
            return {"left_out": "it holds a likely secret"}
        return {"rows": rows}
    raise AssertionError


def _row(each: _RolloutTry, pair: AgreedPair, which: int, model: str, seed: int) -> dict[str, Any]:
    source, target = each.repository.source, each.target
    origin = {
        "path": target.path,
        "revision": source.revision,
        "licence": source.licence,
        "first_line": target.first_line,
        "last_line": target.last_line,
        "date": each.repository.dates[target.path],
        "function": target.name,
        "change": target.kind,
        "rollout": which,
        "agreement": round(pair.agreement, 4),
        "model": model,
    }
    played = pair.first if which == 1 else pair.second
    name = blake3.blake3(f"{each.name}/{seed}/{which}".encode()).hexdigest(length=16)
    return played.row() | {"id": name, "source": source.name, "origin": origin}
