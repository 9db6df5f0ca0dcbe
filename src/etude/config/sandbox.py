"""The table [sandbox]: the backend that makes the boxes of agents, and the hosts that they may reach."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal, cast

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter

from etude.config.sections import Section, absolute, error_sentence, option
from etude.errors import UserError

Limit = Literal["memory", "processes", "disk"]


class ServiceConfig(Section):
    """A service of the image, which runs in the boxes of agents and of tested code."""

    name: str = Field(pattern=r"^[\w-]+$", description="name of the service; its output lies in /tmp/NAME.log of a box")
    start: str = Field(min_length=1, description="command line that starts the service, for bash")
    ready: str = Field(min_length=1, description="command line that succeeds once the service is ready")
    seconds: float = option(30.0, "until then the service must be ready", gt=0, le=600)


def _one_of_a_name(services: tuple[ServiceConfig, ...]) -> tuple[ServiceConfig, ...]:
    names = [service.name for service in services]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"sandbox.services has two services {twice!r}; give each a name of its own")
    return services


Services = Annotated[tuple[ServiceConfig, ...], AfterValidator(_one_of_a_name)]


class NamespaceSandboxConfig(Section):
    """Boxes by namespaces of this machine's kernel. Without hosts or an index they have no network. See
    docs/sandbox.md."""

    type: Literal["namespace"] = "namespace"
    image: Annotated[str | None, AfterValidator(lambda path: path and absolute(path))] = option(
        None, "archive (docker save, podman save, skopeo copy) or root folder; not set: a minimal one of this machine"
    )
    exclude: tuple[str, ...] = option((), "paths of the image that boxes lack, such as a copy of the product")
    programs: tuple[str, ...] = option((), "programs of this machine that the minimal image has as well: gcc, pip")
    services: Services = option((), "services of the image, as tables [[sandbox.services]]")
    egress: tuple[str, ...] = option(
        (), "hosts: NAME, NAME:PORT, *.NAME; NAME:PORT@ADDRESS for a name that is not resolved"
    )
    index: str | None = option(None, "URL of a simple package index that boxes may install from")
    index_before: date | None = option(None, "files uploaded on this day (UTC) or later are left out")
    index_without: tuple[str, ...] = option((), "projects that the index leaves out, besides that of the tasks")

    @pydantic.model_validator(mode="after")
    def _programs_are_of_the_minimal_image(self) -> NamespaceSandboxConfig:
        if self.image is not None and self.programs:
            raise ValueError("sandbox.programs are added to the minimal image; drop it, or sandbox.image")
        return self

    @pydantic.model_validator(mode="after")
    def _an_index_has_a_date(self) -> NamespaceSandboxConfig:
        if self.index is not None and self.index_before is None:
            raise ValueError("sandbox.index needs sandbox.index_before, a date such as 2024-05-01")
        return self


class ContainerSandboxConfig(Section):
    """Boxes in containers of this machine."""

    type: Literal["docker", "podman"]
    image: str = Field(min_length=1, description="container image of boxes, with sh, bash and python3")
    runtime: str | None = option(None, "OCI runtime, such as runsc")
    without: tuple[Limit, ...] = option((), "limits that boxes may lack if `type` cannot give them")
    services: Services = option((), "services of the image, as tables [[sandbox.services]]")


def _with_type(table: Any) -> Any:
    if not isinstance(table, dict):
        return table
    table = cast(dict[str, Any], table)
    if "type" not in table and table.keys() & {"runtime", "without"}:
        raise ValueError(f"give sandbox.type as well: {', '.join(SANDBOX_TYPES[1:])}")
    return {"type": "namespace"} | table


SANDBOX_TYPES = ("namespace", "docker", "podman")
SandboxConfig = Annotated[
    Annotated[NamespaceSandboxConfig | ContainerSandboxConfig, Field(discriminator="type")],
    BeforeValidator(_with_type),
]  # the backend of the boxes: a table [sandbox] whose `type` selects the other keys


def validate_sandbox(table: dict[str, Any], where: str) -> SandboxConfig:
    """Validate the table [sandbox] alone. Raises UserError that names the first wrong key."""
    try:
        return TypeAdapter[SandboxConfig](SandboxConfig).validate_python(table)
    except pydantic.ValidationError as e:
        raise UserError(error_sentence(e, {"sandbox": table}, where, ("sandbox",))) from None
