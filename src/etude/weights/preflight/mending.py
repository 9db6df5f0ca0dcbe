"""The mended copy of a model folder: edited configurations, the weights as they are."""

from __future__ import annotations

import json
import os
import shutil
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from etude import runfolder
from etude.errors import UserError
from etude.weights.preflight.findings import ConfigEdit, as_object
from etude.weights.preflight.folder_report import examine

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ROUNDS = 4  # an edit may show what another one must mend


def repair(folder: Path, out: Path) -> list[ConfigEdit]:
    """Writes `out`: the model folder with all that can be mended, whole or not at all. Weights are links to the same
    files, or copies on another disk. Returns the edits. Raises UserError if `out` exists, or if nothing can be
    mended."""
    if out.exists():
        raise UserError(f"{out} exists already: name a new folder for the mended copy")
    if out.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{out} is inside of {folder}: name a folder elsewhere for the mended copy")
    if not (edits := _edits(folder)):
        raise UserError(f"nothing in {folder} can be mended by its configuration: no copy is written")
    made: list[ConfigEdit] = []

    def write(into: Path) -> None:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name.startswith("."):  # of git, and of downloads
                continue
            if path.is_dir():
                shutil.copytree(path, into / path.name, copy_function=_link)
            else:
                _link(path, into / path.name)
        rounds = chain([edits], (_edits(into) for _ in range(_ROUNDS)))
        for some in takewhile(bool, rounds):
            for edit in some:
                _apply(into, edit)
            made.extend(edit for edit in some if edit not in made)

    runfolder.make_whole(out.absolute(), write)
    return made


def _edits(folder: Path) -> list[ConfigEdit]:
    edits: list[ConfigEdit] = []
    for finding in examine(folder, whole=False).findings:
        edits += (edit for edit in finding.edits if edit not in edits)
    return edits


def _link(source: Path | str, target: Path | str) -> None:
    """A second name of weights, a copy of all else, which may be edited."""
    whole = Path(source).resolve()  # in a cache of downloads, a file without a suffix
    if Path(source).suffix in _WEIGHTS:
        try:
            return os.link(whole, target)
        except OSError:  # another disk
            pass
    shutil.copyfile(whole, target)


def _apply(folder: Path, edit: ConfigEdit) -> None:
    path = folder / edit.file
    if not edit.path:
        path.write_text(edit.value, encoding="utf-8")
        return
    data: Any = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    part = data
    for key in edit.path[:-1]:
        part = part[key]
    if edit.value is None:
        as_object(part).pop(str(edit.path[-1]), None)
    else:
        part[edit.path[-1]] = edit.value
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
