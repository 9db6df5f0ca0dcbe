"""The consent of a project: the checked-in file `.etude/consent.toml`, with the paths that are never read."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from etude.errors import UserError
from etude.live.observe.worktree import TextRepository

CONSENT = ".etude/consent.toml"


@dataclass(frozen=True)
class ProjectConsent:
    """The fields of `.etude/consent.toml`."""

    exclude: tuple[str, ...] = ()
    traces: bool = True


def read_consent(repository: TextRepository) -> ProjectConsent:
    """The project's consent. Raises UserError for a missing, untracked or malformed file, and for `share = false`."""
    read = repository.read(CONSENT)
    if read is None:
        raise UserError(
            f"{repository.root} takes no part in learning from its edits; to change that, check in "
            f"{CONSENT} with the line `share = true`"
        )
    if not repository.tracked(CONSENT):
        raise UserError(f"{CONSENT} is not checked in: the project's consent is a commit that others can see")
    try:
        fields = tomllib.loads(read[0])
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"{CONSENT} is not TOML: {e}") from None
    exclude, traces = fields.pop("exclude", []), fields.pop("traces", True)
    share = fields.pop("share", False)
    well_formed = isinstance(exclude, list) and all(isinstance(x, str) and x.strip("/") for x in exclude)
    if fields or not well_formed or not isinstance(traces, bool) or not isinstance(share, bool):
        raise UserError(f"{CONSENT} has the keys share and traces (true or false) and exclude (a list of globs)")
    if not share:
        raise UserError(f"{CONSENT} says `share = false`: nothing is watched")
    return ProjectConsent(tuple(exclude), traces)
