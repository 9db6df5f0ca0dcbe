"""The extras of this installation, as in `pip install 'etude[train]'`: their packages, and the packages that are
missing.

The metadata of the installed package lists the packages of an extra. A checkout on the path without an installation has
no metadata: no package counts as missing there, and the import of a missing one fails with its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from etude.errors import UserError

# Extra -> the features that need it, in the order of README. The extra for developers is left out.
EXTRAS = {
    "play": "episodes against an engine elsewhere",
    "serve": "`etude serve`, `eval` and `weights`",
    "train": "`etude train`, `demo` and `bench`",
    "apply": "tables of edits and JavaScript",
    "live": "`etude live`",
    "ray": "fleets in a cluster of Ray",
    "postgres": "ledgers and logs in PostgreSQL",
}
_SHOWN = 3


@cache
def packages_of_extra(extra: str) -> tuple[str, ...]:
    """The names of the packages of an extra, with those of the extras that it includes."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        lines = requires("etude") or []
    except PackageNotFoundError:
        return ()
    names: list[str] = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.marker.evaluate({"extra": ""}):
            continue  # a dependency of the core
        if requirement.name == "etude":
            names += [name for inner in sorted(requirement.extras) for name in packages_of_extra(inner)]
        else:
            names.append(canonicalize_name(requirement.name))
    return tuple(dict.fromkeys(names))


def missing_packages(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [name for name in packages_of_extra(extra) if not _installed(name)]


def need(what: str, *extras: str) -> None:
    """Raises UserError if a package of `extras` is not installed; `what` is the command or the feature that needs
    it."""
    lacking = {extra: names for extra in extras if (names := missing_packages(extra))}
    if lacking:
        raise UserError(_sentence(what, list(dict.fromkeys(n for names in lacking.values() for n in names)), lacking))


def missing_extra_message(what: str, module: str) -> str | None:
    """The message about a module that could not be imported, with the name of its extra; None if no extra brings it."""
    from packaging.utils import canonicalize_name

    name = canonicalize_name(module.partition(".")[0])
    return next((_sentence(what, [name], [extra]) for extra in EXTRAS if name in packages_of_extra(extra)), None)


def _sentence(what: str, names: list[str], extras: Iterable[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    verb = "is" if len(names) == 1 else "are"
    named = ", ".join(names[:_SHOWN]) + more
    return f"{what} needs {named}, which {verb} not installed: pip install 'etude[{','.join(extras)}]'"


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
