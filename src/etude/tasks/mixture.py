"""A mixture: the datasets of several repositories as one dataset, whose tasks are drawn by weight.

A task keeps its repository, its image and its hidden tests; its id begins with the name of its repository. Every
repository keeps its own held-out tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from etude.errors import UserError
from etude.grading import Grade
from etude.records import CodeTask
from etude.sandbox import Changes, Image, Limits, Sandbox
from etude.sandbox.egress import normal_project, wheel_project
from etude.tasks.dataset import DATASET_FORMAT, Dataset, Manifest


@dataclass(frozen=True, kw_only=True)
class MixedDataset(Dataset):
    """Several datasets as one. `weights` maps the name of a repository to its share of the groups; the shares add up to
    1."""

    sources: tuple[Dataset, ...]
    weights: Mapping[str, float]

    @property
    def parts(self) -> tuple[Dataset, ...]:
        """The dataset of each repository."""
        return self.sources

    def of(self, task: CodeTask) -> tuple[Dataset, CodeTask]:
        """The dataset that a task comes from, and the task as that dataset has it."""
        part = next(part for part in self.sources if part.name == task.repository)
        return part, part.by_id[task.id.removeprefix(f"{part.name}:")]

    def image(self, task: CodeTask) -> Image:
        """The image of the agent's box."""
        part, own = self.of(task)
        return part.image(own)

    def limits(self, task: CodeTask) -> Limits:
        """The limits of the agent's box."""
        part, own = self.of(task)
        return part.limits(own)

    async def grade(self, sandbox: Sandbox, task: CodeTask, changes: Changes) -> Grade:
        """Grade a change set by the task's hidden tests, which are those of its part."""
        part, own = self.of(task)
        return await part.grade(sandbox, own, changes)

    def each(self, change: Callable[[Dataset], Dataset]) -> MixedDataset:
        """The mixture with `change` applied to each part; names and weights stay."""
        return replace(_joined([change(part) for part in self.sources]), weights=self.weights)


def mix(parts: Sequence[Dataset], weights: Sequence[float], *, more: bool = False) -> Dataset:
    """Mix several datasets; a single one is returned unchanged, unless `more` will join it. `weights` are positive
    numbers. Raises UserError for two datasets of one project, since one would hold out functions that the other trains
    on."""
    projects = Counter(part.name if part.manifest.kind else normal_project(wheel_project(part.name)) for part in parts)
    twice = next((name for name, count in projects.items() if count > 1), None)
    if twice is not None:
        raise UserError(
            f"two sources of tasks are of the project {twice}, and one would train on held-out functions of the "
            "other: keep one of them"
        )
    if len(parts) == 1 and not more:
        return parts[0]
    total = sum(weights)
    shares = {part.name: weight / total for part, weight in zip(parts, weights, strict=True)}
    return replace(_joined(parts), weights=shares)


def _joined(parts: Sequence[Dataset]) -> MixedDataset:
    tasks = [
        structs.replace(task, id=f"{part.name}:{task.id}", repository=part.name)
        for part in parts
        for task in part.tasks
    ]
    name, first = " + ".join(part.name for part in parts), parts[0]
    manifest = Manifest(
        format=DATASET_FORMAT,
        name=name,
        licence="",
        licence_source="",
        seed=first.manifest.seed,
        python_path=(),
        source_roots=(),
        visible="",
        options={},
        counts={},
        digests={},
    )
    return MixedDataset(
        root=first.root,
        name=name,
        repository=first.repository,
        site=first.site,
        hidden=first.hidden,
        tasks=tuple(tasks),
        manifest=manifest,
        sources=tuple(parts),
        weights={},
    )
