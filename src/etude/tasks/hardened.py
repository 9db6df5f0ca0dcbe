"""The second edition of a dataset, after `etude tasks harden`: fewer or better tasks, with the reasons on its card."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from etude.code import table
from etude.errors import UserError
from etude.records import CodeTask
from etude.tasks import dataset
from etude.tasks.dataset import Dataset, Hardening

CARD = "DATACARD.md"
_TITLE = "## Hardening"
_SECTION = re.compile(rf"\n*^{_TITLE}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINKED = ("repository", "site", "hidden", "history.msgpack")


def write_hardened(data: Dataset, out: Path, tasks: Sequence[CodeTask], hardening: Hardening) -> None:
    """Write the dataset with `tasks` alone to `out`; the folder of the dataset itself is replaced once the new one is
    whole. Raises UserError if `out` is another folder that exists, or cannot be written."""

    def fill(work: Path) -> None:
        for name in (*_LINKED, CARD):
            _copy(data.root / name, work / name)
        counts = {name: n for name, n in data.manifest.counts.items() if name not in ("tasks", "train", "heldout")}
        manifest = msgspec.structs.replace(data.manifest, counts=counts, hardening=hardening)
        dataset.save(work, manifest, tasks)

    replace_dataset(data.root, out, hardening, fill)


def check_place(root: Path, out: Path) -> None:
    """Raises UserError if the dataset in `root` cannot be written to `out`, which may be `root`."""
    if out.resolve() != root.resolve():
        dataset.check_free(out)
    elif way := next((path for path in (_beside(root, "hardened"), _beside(root, "before")) if path.exists()), None):
        raise UserError(f"{way} is in the way, of a command that was stopped: remove it.")


def replace_dataset(root: Path, out: Path, hardening: Hardening, fill: Callable[[Path], None]) -> None:
    """Make the dataset `out` of that in `root`: `fill` writes all but the section of the card. Raises UserError."""
    check_place(root, out)
    same = out.resolve() == root.resolve()
    place = _beside(root, "hardened") if same else out
    with dataset.unfinished(place) as work:
        fill(work)
        card = work / CARD
        text = card.read_text("utf-8") if card.is_file() else ""
        card.write_text(_SECTION.sub("\n", text).rstrip() + "\n\n" + section(hardening), "utf-8")
    if same:
        root.rename(_beside(root, "before"))
        place.rename(root)
        shutil.rmtree(_beside(root, "before"))


def _beside(root: Path, ending: str) -> Path:
    return root.with_name(f"{root.resolve().name}.{ending}")


def section(hardening: Hardening) -> str:
    """The section of the card."""
    rows = [(task, result) for task, result in sorted(hardening.results.items())]
    undecided = [(task, why) for task, why in sorted(hardening.undecided.items())]
    parts = [
        f"{_TITLE}\n",
        f"{hardening.figures}. Attackers: {', '.join(f'{n} {name}' for name, n in hardening.attackers.items())}.\n",
        *([table(("task", "result"), rows)] if rows else ["No task earned a reward for them.\n"]),
        *([table(("task", "undecided"), undecided)] if undecided else []),
    ]
    return "\n".join(parts)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    elif source.exists():
        shutil.copy2(source, target)
