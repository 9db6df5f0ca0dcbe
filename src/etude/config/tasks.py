"""How tasks and tables of edits are made."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import Field

from etude.config.sections import Section

TaskKind = Literal["mutation", "removal", "combined", "class", "feature", "commit"]


class BuildConfig(Section):
    """How tasks are made from a repository: the flags of `etude tasks build`, and a part of the table [tasks]."""

    seed: int = Field(default=1, description="seed of every draw; in a run the run's own, unless given")
    max_tasks: int = Field(default=600, ge=2, description="tasks of a dataset, at most")
    kinds: tuple[TaskKind, ...] = Field(
        default=("mutation", "removal"), min_length=1, description="how programs are broken (docs/tasks.md)"
    )
    operators: tuple[str, ...] = Field(default=(), description="mutation operators to use; empty: all")
    per_function: int = Field(default=3, ge=1, description="tasks of one function and kind, at most")
    min_lines: int = Field(default=3, ge=1, description="shortest function that is broken, docstring left out")
    max_lines: int = Field(default=30, ge=1, description="longest function that is broken, docstring left out")
    max_functions: int | None = Field(
        default=None, ge=1, description="functions to try, drawn by the seed; default: all of them"
    )
    max_test_files: int | None = Field(
        default=None, ge=1, description="JavaScript test files to use, drawn by the seed; default: all of them"
    )
    heldout_fraction: float = Field(default=0.25, gt=0, lt=1, description="share of functions kept for evaluation")
    bootstrap: str = Field(
        default="declared", description="dependencies: declared, rules, or the URL of a model that proposes them"
    )
    visible: Literal["auto", "doctests", "half"] = Field(default="auto", description="tests that the agent may run")
    visible_failure: bool = Field(default=False, description="only tasks in which a test fails that the agent may run")
    repeats: int = Field(default=3, ge=1, description="times that each gate must hold")
    workers: int = Field(default=2, ge=1, description="boxes at a time")
    test_cap: int = Field(
        default=12, ge=1, description="hidden tests of a task that must start to pass, and that must keep passing"
    )
    hang_seconds: float = Field(default=5.0, gt=0, description="a broken program that runs longer is dropped")
    write_tests: str | None = Field(
        default=None, description="command that writes tests for functions that have none (docs/tasks.md)"
    )

    @property
    def wanted(self) -> int:
        """Tasks of one function over all kinds, at most."""
        return self.per_function * len(self.kinds)

    @pydantic.model_validator(mode="after")
    def _possible(self) -> BuildConfig:
        if self.min_lines > self.max_lines:
            raise ValueError("min_lines must not be above max_lines")
        if self.bootstrap not in ("declared", "rules") and not self.bootstrap.startswith(("http://", "https://")):
            raise ValueError("bootstrap must be declared, rules, or the URL of an OpenAI-compatible server")
        return self


class TasksConfig(BuildConfig):
    """The tasks of a run: built from a repository, or read from a dataset or a folder of edits."""

    repository: str = Field(default="", description="folder of a repository with tests, or NAME==VERSION")
    sha256: str | None = Field(default=None, description="digest of the source package; required with NAME==VERSION")
    dataset: str | None = Field(
        default=None, description="an existing task dataset; built from `repository` when absent"
    )
    edits: str | None = Field(
        default=None, description="instead: a folder of `etude tasks fast-apply`; episodes apply edits, without boxes"
    )
    environment: str | None = Field(
        default=None,
        description='instead: import path of an environment in Python, "module:Class" (docs/environments.md)',
    )
    arguments: dict[str, Any] = Field(default={}, description="keyword arguments that the environment is made with")

    @pydantic.model_validator(mode="after")
    def _given(self) -> TasksConfig:
        if not (self.repository or self.dataset or self.edits or self.environment):
            raise ValueError("give tasks.repository, tasks.dataset, tasks.edits or tasks.environment")
        if self.arguments and not self.environment:
            raise ValueError("tasks.arguments are those of an environment: give tasks.environment")
        return self


class EditTableConfig(Section):
    """How `etude tasks fast-apply` makes tables of edits: its flags."""

    seed: int = Field(default=1, description="seed of every draw")
    max_lines: int = Field(default=400, ge=8, le=2500, description="longest file to train on; longer ones give parts")
    per_path: int = Field(default=4, ge=1, description="real edits of one file, at most")
    per_repository: int = Field(default=50, ge=1, description="real edits of one repository, at most")
    synthetic: float = Field(default=4.0, ge=0, description="synthetic edits for each real one")
    no_ops: float = Field(default=0.02, ge=0, lt=1, description="share of edits that change nothing, at most")
    held_out_edits: int = Field(default=450, ge=1, description="edits made of the held-out repositories")
