"""Finds a model by any of its names: a Hugging Face folder, a GGUF file, a bundled or a pretrained model, or the run
that trained it.

A version of a run in stage rl is written as a model folder, once, to RUN/models/VERSION; the other stages have written
theirs. `RUN@12` names version 12.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from etude import runfolder
from etude.config import RLConfig, Section, bundled_model, find_model, pretrained
from etude.errors import UserError
from etude.models import is_gguf, is_quantised
from etude.renderers import with_chat_template
from etude.store import Store, open_store

_VERSION = re.compile(r"(.+)@(\d+)")


class _RunHead(msgspec.Struct):
    """The fields of config.json that identify a run; a model's config.json lacks them."""

    stage: str | None = None


class _ReportHead(msgspec.Struct):
    """The fields of report.json with the best measured version and the newest version."""

    best: int | None = None
    steps: int | None = None


def model_folder(name: str | Path, chat_template: str | None = None) -> Path:
    """The Hugging Face folder that `name` stands for, with another chat template if requested; missing models are
    fetched or converted. Raises UserError."""
    folder = bundled_model(name) or _of_run(name) or _whole(find_model(name))
    return folder if chat_template is None else with_chat_template(folder, chat_template)


def with_models(config: Any) -> Any:
    """The configuration of a stage, with model folders in place of names of runs, of models to fetch or convert, and
    with chat templates applied. The configuration stored in a run keeps its folder, which is made again if the cache
    has lost it. Raises UserError."""
    changed: dict[str, Any] = {}
    for table, key in (("model", "path"), ("distill", "teacher")):
        part: Section | None = getattr(config, table, None)
        value: str | Path | None = getattr(part, key, None)
        if part is None or value is None:
            continue
        origin: str | Path | None = getattr(part, "origin", None)
        if origin is not None and Path(value).is_dir():
            continue
        first = _of_run(origin or value) or Path(origin or value)
        folder = _whole(first)
        if (template := getattr(part, "chat_template", None)) is not None:
            folder = with_chat_template(folder, template)
        if origin is not None and folder != Path(value):
            raise UserError(
                f"{value} is gone from the cache, and {origin}{f' with {template}' if template else ''} makes another "
                "folder now: put back the files that the run began with"
            )
        made = {"origin": type(value)(first)} if folder != first and "origin" in type(part).model_fields else {}
        changed[table] = part.model_copy(update={key: type(value)(folder)} | made)
    return config.model_copy(update=changed)


def _whole(folder: Path) -> Path:
    """`folder`, or the folder made from it: of a pretrained model that was not fetched yet, of a GGUF file, or of
    quantised weights."""
    if is_quantised(folder):
        from etude.models.dequantise import plain_folder

        return plain_folder(folder)
    if (folder / "config.json").is_file() or not (pretrained(folder) or is_gguf(folder)):
        return folder
    from etude.models import gguf_folder

    return gguf_folder(folder)


def stage_of(folder: Path) -> str | None:
    """The stage of the run in this folder; None for a folder that is not a run's."""
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=_RunHead).stage
    except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def rl_config(name: str | Path) -> RLConfig | None:
    """The configuration of a run of stage rl by the name of its model; None for all others."""
    run, _ = run_and_version(name)
    return runfolder.load_config(run) if stage_of(run) == "rl" else None


def run_and_version(name: str | Path) -> tuple[Path, int | None]:
    """The folder and the version of RUN or RUN@N."""
    match = _VERSION.fullmatch(str(name))
    return (Path(match[1]), int(match[2])) if match and not Path(name).exists() else (Path(name), None)


def _of_run(name: str | Path) -> Path | None:
    """The model of a run; None if `name` is not a run. Raises UserError if the run has no model yet."""
    run, version = run_and_version(name)
    stage = stage_of(run)
    if stage is None:
        return None
    if version is None and runfolder.is_running(run):
        how = f"wait for its end, or name a version: {name}@N" if stage == "rl" else "wait for its end"
        raise UserError(f"{name} is still running: {how}")
    if stage == "rl":
        return _exported(run, runfolder.load_config(run), version)
    if version is not None:
        raise UserError(f"{run} keeps its last model alone: name it without @{version}")
    if not (run / "checkpoint").is_dir():
        raise _nothing_yet(run)
    return (run / "checkpoint").absolute()


def _exported(run: Path, config: RLConfig, version: int | None) -> Path:
    from etude.models.loading import model_id
    from etude.weights.export import export
    from etude.weights.manifest import Trust
    from etude.weights.signature import read_public_key

    if config.store is None and not (run / "weights").is_dir():  # a look-up must not create a store
        raise _nothing_yet(run)
    store = open_store(f"{config.store or run}/weights")
    version = _newest_or_best(run, store) if version is None else version
    out = run.absolute() / "models" / str(version)
    if out.is_dir():
        return out
    base, key = model_folder(with_models(config).model.path), config.weights.signing_key
    trust = Trust(None if key is None else read_public_key(Path(f"{key}.pub")), model=model_id(base))
    runfolder.make(out.parent)
    held = os.open(out.parent, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)  # another process may be writing it
        if not out.is_dir():
            export(store, version, base, out, trust)
    finally:
        os.close(held)
    return out


def _nothing_yet(run: Path) -> UserError:
    return UserError(f"{run} has no model yet: continue it with `etude train --resume {run}`")


def _newest_or_best(run: Path, store: Store) -> int:
    """The version that the run's report names as its best; the newest without a report, or if the run went on after it.
    Raises UserError without a version."""
    from etude.weights.manifest import published_versions

    numbers = published_versions(store)
    if not numbers:
        raise _nothing_yet(run)
    try:
        report = msgspec.json.decode((run / "report.json").read_bytes(), type=_ReportHead)
    except FileNotFoundError:
        report = _ReportHead()
    except (OSError, msgspec.MsgspecError) as e:
        raise UserError(f"{run / 'report.json'} is damaged ({e}): name a version, as {run}@{numbers[-1]}") from None
    return numbers[-1] if report.best is None or report.steps != numbers[-1] else report.best
