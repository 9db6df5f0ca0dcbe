"""Command-line flags made from sections of the configuration: their names, defaults and help texts."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic.fields import FieldInfo

from etude.config import SandboxConfig, Section, load_toml, validate, validate_sandbox
from etude.errors import UserError

S = TypeVar("S", bound=Section)


def add_flags(parser: argparse._ActionsContainer, options: type[Section], names: Sequence[str] = ()) -> None:
    """Adds a flag `--a-b` for each field `a_b` of `options`, or for the fields `names` alone. A flag that is left out
    sets no attribute."""
    for name in names or options.model_fields:
        field = options.model_fields[name]
        text = field.description or ""
        if not field.is_required() and field.default not in (None, "", ()):
            default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            text += f" (default: {default})"
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=text, **_kind(field))


def flag_values(arguments: argparse.Namespace, options: type[Section]) -> dict[str, Any]:
    """The values of the flags on the command line, by field name."""
    return {name: getattr(arguments, name) for name in options.model_fields if hasattr(arguments, name)}


def from_flags(arguments: argparse.Namespace, options: type[S], **fixed: Any) -> S:
    """`options` from the flags on the command line and `fixed` values. Raises UserError for the first wrong flag."""
    return validate(options, flag_values(arguments, options) | fixed, f"etude {arguments.command}")


def add_sandbox(parser: argparse._ActionsContainer, otherwise: str = "namespaces of this machine") -> None:
    """Adds the flag --sandbox, which `sandbox_of` reads; `otherwise` says where boxes are made without it."""
    text = (
        f"TOML whose table [sandbox] says how boxes are made, such as a run's; no more is read (default: {otherwise})"
    )
    parser.add_argument("--sandbox", type=Path, metavar="FILE", help=text)


def sandbox_of(arguments: argparse.Namespace) -> SandboxConfig | None:
    """The table [sandbox] of the file behind --sandbox; None without the flag. Raises UserError for a file without the
    table, and for the first wrong key."""
    if (path := arguments.sandbox) is None:
        return None
    table = load_toml(path).get("sandbox")
    if not isinstance(table, dict):
        raise UserError(f"--sandbox {path} has no table [sandbox]: write one into it, or drop the flag")
    return validate_sandbox(table, str(path))


def _kind(field: FieldInfo) -> dict[str, Any]:
    """The arguments of `add_argument` by a field's type. Numbers stay text, which the section validates."""
    annotation = field.annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    many = typing.get_origin(annotation) is tuple
    inner = typing.get_args(annotation)[0] if many else annotation
    if inner is bool:
        return {"action": argparse.BooleanOptionalAction}
    kind: dict[str, Any] = {"nargs": "+"} if many else {}
    if typing.get_origin(inner) is Literal:
        return kind | {"choices": typing.get_args(inner)}
    metavar = {int: "N", float: "X"}.get(inner) if isinstance(inner, type) else None
    return kind | {"metavar": metavar or "VALUE"}
