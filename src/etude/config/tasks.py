"""Configuration of tasks and of tables of edits."""

from __future__ import annotations

import datetime
from typing import Any, Literal, cast

import pydantic

from etude.config.sections import Section, option

TaskKind = Literal["mutation", "removal", "combined", "class", "feature", "commit"]


class BuildConfig(Section):
    """Options for tasks from a repository: the flags of `etude tasks build`, and a part of the table [tasks]."""

    seed: int = option(1, "seed of every draw; in a run, by default the run's seed")
    max_tasks: int = option(600, "tasks of a dataset, at most", ge=2)
    kinds: tuple[TaskKind, ...] = option(
        ("mutation", "removal"), "how programs are broken (docs/tasks.md)", min_length=1
    )
    operators: tuple[str, ...] = option((), "mutation operators to use; empty: all")
    per_function: int = option(3, "tasks of one function and kind, at most", ge=1)
    min_lines: int = option(3, "shortest function that is broken, docstring left out", ge=1)
    max_lines: int = option(30, "longest function that is broken, docstring left out", ge=1)
    max_functions: int | None = option(None, "functions to try, drawn by the seed; default: all", ge=1)
    requires: tuple[str, ...] = option((), "packages that the tests need and the repository does not name")
    exclude: tuple[str, ...] = option((), "files left out of the dataset: paths, folders or patterns")
    heldout_fraction: float = option(0.25, "share of functions kept for evaluation; 0: none", ge=0, lt=1)
    bootstrap: str = option("declared", "dependencies: declared, rules, or the URL of a model that proposes them")
    visible: Literal["auto", "doctests", "half"] = option("auto", "tests that the agent may run")
    visible_failure: bool = option(False, "only tasks in which a test fails that the agent may run")
    symptoms: bool = option(True, "describe the failure in a task's statement, not only the function to repair")
    repeats: int = option(3, "times that each gate must hold", ge=1)
    workers: int = option(2, "boxes at a time", ge=1)
    hang_seconds: float = option(5.0, "a broken program that runs longer is dropped", gt=0)
    requests: str | None = option(None, "users' words for commits (.jsonl of `etude live requests`), for kind commit")
    write_tests: str | None = option(None, "command that writes tests for functions that have none (docs/tasks.md)")

    @property
    def wanted(self) -> int:
        """Tasks of one function over all kinds, at most."""
        return self.per_function * len(self.kinds)

    @pydantic.model_validator(mode="after")
    def _possible(self) -> BuildConfig:
        if self.min_lines > self.max_lines:
            raise ValueError("min_lines must not be above max_lines")
        if self.requests is not None and "commit" not in self.kinds:
            raise ValueError("requests are words for commits: add commit to kinds, or drop requests")
        if self.bootstrap not in ("declared", "rules") and not self.bootstrap.startswith(("http://", "https://")):
            raise ValueError("bootstrap must be declared, rules, or the URL of an OpenAI-compatible server")
        return self


MIN_DECIDED = 0.5  # by default, of a task's tests that are decided outside of the tested process


class TaskSource(BuildConfig):
    """The source of tasks: a repository from which they are built, or a dataset."""

    repository: str = option("", "folder of a repository with tests, or NAME==VERSION")
    sha256: str | None = option(None, "digest of the source package; required with NAME==VERSION")
    dataset: str | None = option(None, "an existing task dataset; built from `repository` when absent")
    harbor: str | None = option(None, "instead: a folder of Harbor tasks that others wrote (docs/tasks.md)")
    min_decided: float = option(
        MIN_DECIDED, "leave out tasks with a smaller share of tests decided outside of the tested process", ge=0, le=1
    )

    @property
    def where(self) -> str:
        """The folder or package of the tasks, as in the configuration."""
        return self.dataset or self.harbor or self.repository

    @pydantic.field_validator("repository", "dataset", "harbor", mode="before")
    @classmethod
    def _one(cls, value: object, info: pydantic.ValidationInfo) -> object:
        if isinstance(value, list | tuple):
            raise ValueError(f"one {info.field_name} per source: give a table [[tasks.sources]] for each")
        return value


class WeightedSource(TaskSource):
    """One of several sources: a table [[tasks.sources]]. The keys of [tasks] are its defaults."""

    weight: float = option(1.0, "share of the groups, against the other sources' weights", gt=0)

    @pydantic.model_validator(mode="after")
    def _source_is_named(self) -> WeightedSource:
        if not self.where:
            raise ValueError("give a source's repository, dataset or harbor")
        return self


class TasksConfig(TaskSource):
    """The tasks of a run: of one source, of several, of a folder of edits, or of an environment."""

    sources: tuple[WeightedSource, ...] = option((), "instead: several sources, mixed by weight (docs/tasks.md)")
    edits: str | None = option(None, "instead: a folder of `etude tasks fast-apply`; episodes apply edits, no boxes")
    environment: str | None = option(None, 'instead: "module:Class" of an environment in Python (docs/environments.md)')
    arguments: dict[str, Any] = option({}, "keyword arguments that the environment is made with")

    @property
    def of_repositories(self) -> bool:
        """Whether the tasks are datasets, made of repositories or Harbor folders. Edits and environments need no
        building, and choose their held-out tasks themselves."""
        return self.edits is None and self.environment is None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _sources_are_built_alike(cls, data: Any) -> Any:
        """Options of [tasks] are the defaults of each source."""
        tables = cast(dict[str, Any], data)
        if not isinstance(data, dict) or not isinstance(tables.get("sources"), list | tuple):
            return tables
        names = (*BuildConfig.model_fields, "min_decided")
        shared = {name: tables[name] for name in names if name in tables}
        own: list[Any] = [*tables["sources"]]
        sources = [shared | cast(dict[str, Any], one) if isinstance(one, dict) else one for one in own]
        return tables | {"sources": sources}

    @pydantic.model_validator(mode="after")
    def _one_kind_of_source(self) -> TasksConfig:
        if self.sources and (self.where or self.edits or self.environment):
            raise ValueError("tasks.sources stand alone: make each other kind of tasks one of the sources")
        if not (self.where or self.sources or self.edits or self.environment):
            raise ValueError(
                "give tasks.repository, tasks.dataset, tasks.harbor, tables [[tasks.sources]], tasks.edits or "
                "tasks.environment"
            )
        if self.arguments and not self.environment:
            raise ValueError("tasks.arguments are those of an environment: give tasks.environment")
        return self


class EditTableConfig(Section):
    """The flags of `etude tasks fast-apply`, which makes tables of edits."""

    seed: int = option(1, "seed of every draw")
    max_lines: int = option(400, "maximum lines of a file to train on; longer files are cut into parts", ge=8, le=2500)
    synthetic: float = option(4.0, "synthetic edits for each real one", ge=0)
    held_out_edits: int = option(450, "edits made from the held-out repositories", ge=1)


class TracesConfig(Section):
    """The flags of `etude tasks traces`, which plays gold answers as episodes to train on."""

    seed: int = option(1, "seed of every draw")
    per_task: int = option(1, "traces of one task", ge=1)
    tools: tuple[str, ...] = option((), "as rollout.tools; read, edit, undo, test and finish are needed")
    workers: int = option(2, "boxes at a time", ge=1)


class AgreedRolloutsConfig(Section):
    """The flags of `etude corpus rollouts`, which keeps a model's rollouts on a repository where two agree."""

    seed: int = option(1, "seed of every draw")
    tries: int = option(100, "functions to change: a pair of rollouts each", ge=1)
    agreement: float = option(0.5, "share of the first patch's changed lines that the second must have", gt=0, le=1)
    first: bool = option(False, "make rows of the first rollouts of kept pairs, too")
    workers: int = option(2, "tries at a time", ge=1)


class DocumentBuildConfig(Section):
    """The flags of `etude corpus build`, which makes documents of repositories, packages and replay data."""

    seed: int = option(1, "seed of every draw")
    workers: int = option(2, "processes; any number gives the same bytes", ge=1)
    hold_out_after: str | None = option(None, "files whose last commit lies after this day (YYYY-MM-DD) are held out")
    hold_out_months: int | None = option(None, "the same for the last months before the newest commit", ge=1)
    fim: float = option(0.5, "share of the texts that are to be filled in the middle", ge=0, le=1)
    windows: float = option(0.2, "share of the code that is joined to windows in import order", ge=0, le=1)
    window_characters: int = option(100_000, "longest text, files and windows", ge=1000, le=4_000_000)
    fim_characters: int = option(12_000, "longest text to be filled in; it must fit a row of training", ge=200)

    @pydantic.model_validator(mode="after")
    def _one_date(self) -> DocumentBuildConfig:
        if self.hold_out_after is not None and self.hold_out_months is not None:
            raise ValueError("hold_out_after and hold_out_months exclude each other")
        if self.hold_out_after is not None:
            try:
                day = datetime.date.fromisoformat(self.hold_out_after).isoformat()
            except ValueError:
                day = None
            if day != self.hold_out_after:
                raise ValueError(f"hold_out_after is {self.hold_out_after!r}: give a day as YYYY-MM-DD")
        return self
