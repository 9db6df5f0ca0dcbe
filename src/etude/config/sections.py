"""The base of all tables, their paths, and error messages in one sentence."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

import etude
from etude.config.catalogue import CHAT_TEMPLATES, NAMES, pretrained
from etude.errors import USERS_FAULTS, UserError

S = TypeVar("S", bound="Section")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of a run, and of its folder


class Section(BaseModel):
    """A table of the configuration. Frozen; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def option(default: Any, text: str, **limits: Any) -> Any:
    """A field of a section: its default, its meaning, and pydantic's constraints on it."""
    return Field(default=default, description=text, **limits)


def absolute(path: str) -> str:
    """The absolute path for a path relative to the current folder; URLs and empty text stay unchanged."""
    return str(Path(path).absolute()) if path and "://" not in path else path


def bundled(path: str) -> Path | None:
    """A file or folder that comes with etude, such as "recipes/demo.toml": in the installed package, else in the
    repository around the package. None if neither has it."""
    package = Path(etude.__file__).parent
    return next((root / path for root in (package / "bundled", package.parents[1]) if (root / path).exists()), None)


def bundled_model(name: str | Path) -> Path | None:
    """The bundled model of a name without folders; None if there is none."""
    return bundled(f"models/{name}") if re.fullmatch(r"\w[\w.-]*", str(name)) else None


def find_model(name: str | Path) -> Path:
    """The absolute folder of a model: `name` is the name of a bundled or a pretrained model, a folder, or a GGUF file.
    Raises UserError. A name goes before a folder of that name (write `./NAME`), for the current folder may be a
    repository from which tasks are made. The folder of a pretrained model may not exist yet (`weights.runs`). A missing
    folder `models/NAME` is looked up among the bundled models, because an installation may have moved."""
    if (own := bundled_model(name)) is not None:
        return own
    if (known := pretrained(name)) is not None:
        return known.folder
    path = Path(name)
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path.absolute()
    folder = bundled(f"models/{path.name}") if path.parent.name == "models" else None
    if folder is None:
        names = ", ".join(("nano", *NAMES))
        raise UserError(
            f"{name} is not a folder, nor the name of a model ({names}): give an HF folder, or that of a run"
        )
    return folder


def _model_folder(name: str) -> str:
    try:
        return str(find_model(name))
    except UserError:
        return absolute(name)  # the run reports the error


LocalPath = Annotated[str, AfterValidator(absolute)]  # absolute after validation; URLs are kept
LocalPathOrNone = Annotated[str, AfterValidator(lambda path: path if path == "none" else absolute(path))]
LocalPathOrLook = Annotated[str, AfterValidator(lambda path: path if path in ("none", "image") else absolute(path))]
ModelPath = Annotated[str, AfterValidator(_model_folder)]
ChatTemplateOrNone = Annotated[
    str | None, AfterValidator(lambda name: name if not name or name in CHAT_TEMPLATES else absolute(name))
]
ModelPathOrSelf = Annotated[str, AfterValidator(lambda name: name if name == "self" else _model_folder(name))]


def validate(kind: type[S], data: dict[str, Any], where: str) -> S:
    """Validate `data` as a configuration of type `kind`. Raises UserError that names the first wrong key."""
    try:
        return kind.model_validate(data)
    except pydantic.ValidationError as e:
        raise UserError(error_sentence(e, data, where, kind=kind)) from None


def load_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises UserError."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give a TOML file") from None
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the path of a TOML configuration") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UserError(f"{path} cannot be read as TOML: {e}") from None


@dataclass(frozen=True)
class OptionKey:
    """An option of a stage: its dotted name, its default, and its meaning."""

    name: str
    default: Any
    meaning: str
    needed: bool = False  # there is no default
    off: bool = False  # it counts only with a table, or a variant of one, that is absent by default
    heading: bool = False  # it is a table, and its options follow


def keys(kind: type[Section], above: str = "", values: Section | None = None, off: bool = False) -> Iterator[OptionKey]:
    """Every option below `kind`, with the values of `values` as defaults, and those of the tables of its lists. Of a
    choice between tables the default one comes first; a key of several tables comes once."""
    seen = set[str]()
    for name, field in kind.model_fields.items():
        key, meaning = f"{above}{name}", field.description or ""
        needed = values is None and field.is_required()
        default = None if needed else getattr(values, name) if values is not None else field.get_default()
        tables = sorted(_tables(field.annotation), key=lambda table: not isinstance(default, table))
        entries: list[OptionKey] = []
        for number, table in enumerate(tables):
            here = isinstance(default, table)
            apart = off or not (here or (needed and number == 0))
            entries += keys(table, f"{key}.", default if here else None, apart)
        single = OptionKey(key, default, meaning, needed, off, heading=isinstance(default, Section))
        if not tables or (meaning and not needed) or (default is None and not needed):
            entries.insert(0, single)
        elif typing.get_origin(field.annotation) is tuple:
            entries.insert(0, OptionKey(f"[{key}]", None, meaning, heading=True))
        for entry in entries:
            if entry.name not in seen:
                seen.add(entry.name)
                yield entry


def _tables(annotation: Any) -> Iterator[type[Section]]:
    """The tables that a value may be, or of which it may be a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated, tuple):
        for part in typing.get_args(annotation):
            yield from _tables(part)


def _closest(key: str, names: list[str]) -> str:
    """The key or table that `key` resembles most, as a whole and in its last part; "" for none."""
    depth, last = key.count(".") + 1, key.split(".")[-1]
    shapes = dict.fromkeys([*names, *(".".join(name.split(".")[:depth]) for name in names)])
    alike = [n for n in shapes if difflib.SequenceMatcher(None, n.split(".")[-1], last).ratio() > 0.6]
    return next(iter(difflib.get_close_matches(key, alike, 1, 0.7)), "")


def error_sentence(
    error: pydantic.ValidationError,
    data: Any,
    where: str,
    above: tuple[str, ...] = (),
    kind: type[Section] | None = None,
) -> str:
    """One error in one sentence, an unknown key before all others: it may be the one that is missing. `above` is the
    key under which `data` was validated. An unknown key gets the closest key of `kind`."""
    errors = error.errors()
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    parts: list[str] = []
    table, shape = data, ""
    location = (*above, *map(str, first["loc"]))
    for number, part in enumerate(location):
        if isinstance(table, str | int | float):
            break
        inside = isinstance(table, dict) and part in table
        if not inside and number < len(location) - 1 and isinstance(table, dict):
            # Pydantic adds the name of the chosen variant of a union.
            shape = f" of a {part} model" if parts == ["model"] else f' with {".".join(parts)}.type = "{part}"'
            continue
        parts.append(part)
        table = cast(dict[str, Any], table)[part] if inside else None
    key = ".".join(parts) or "the configuration"
    if first["type"] == "extra_forbidden":
        named = ".".join(part for part in parts if not part.isdecimal())  # without the number in a list of tables
        close = _closest(named, [k.name for k in keys(kind)] if kind else [])
        stage = kind.model_fields["stage"].default if kind and "stage" in kind.model_fields else "rl"
        hint = f"did you mean {close}?" if close else f"`etude train --keys {stage}` prints the known keys"
        return f"{where}: unknown key {key}{shape}; {hint}"
    if first["type"] in ("model_type", "dict_type") and kind:
        below = [k.name for k in keys(kind) if k.name.startswith(f"{key}.")]
        if below:
            return f"{where}: {key} is a table: give its keys, such as {below[0]}"
    if first["type"] == "missing":
        return f"{where}: {key} is needed{shape}"
    if first["type"] == "tuple_type":
        if kind and any(known.name.startswith(f"{key}.") for known in keys(kind)):
            return f"{where}: {key} is a list of tables: write [[{key}]] above the keys of each"
        return f"""{where}: {key} is a list: write '["a", "b"]'"""
    return f"{where}: {key}: {first['msg'].removeprefix('Value error, ')}"


def import_object(path: str, what: str) -> Any:
    """The object at the import path "module:name", for the option `what`. Raises UserError. Modules are also searched
    in the current folder, after the installed ones: the folder may be a repository whose other modules must not be
    imported."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise UserError(f'{what}: {path!r} is not an import path; write "module:name"')
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("etude."):
            raise UserError(
                f"{what}: {module} imports {e.name}, which this etude does not have: take the names of `import etude` "
                "(docs/environments.md)"
            ) from None
        raise UserError(f"{what}: {path}: {e}; run etude in the folder of the module, or install it") from None
    except USERS_FAULTS as e:
        raise UserError(f"{what}: importing {module} raised {type(e).__name__}: {e}") from e
    try:
        return getattr(imported, name)
    except AttributeError:
        raise UserError(f"{what}: the module {module} has no {name}") from None
