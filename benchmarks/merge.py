"""The deterministic merge on real commits: how many of their edits it makes, makes wrongly, or refuses.

`python -m benchmarks.merge --clones DIR` draws edits of one file from the commits of nine libraries in three languages
and prints a table. The sketch of an edit has its changed lines, some lines of context that say something, and a marker
wherever lines are left out. `--set chosen` takes the six libraries on which the costs and the margin were chosen.
`--record FILE` writes the table as a section of `docs/figures`. A clone is `CLONES/OWNER+NAME`; it is made from GitHub
if it is not there.

The draw: commits without merges, in the order of a seed, each with one of its changed files of the language, at most 80
changed lines in at most 8 places. Commits that change whether a file ends with a line end are left out, since a sketch
cannot say it.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from benchmarks import results
from etude.code import line_comment, lines_of
from etude.edits import Edit, EditGrade, grade_edit
from etude.errors import UserError

SUFFIXES = {"python": (".py",), "typescript": (".ts", ".tsx"), "go": (".go",)}
KEPT_BACK = {
    "python": ("pallets/click", "encode/httpx", "python-attrs/attrs"),
    "typescript": ("colinhacks/zod", "pmndrs/zustand", "honojs/hono"),
    "go": ("spf13/cobra", "gin-gonic/gin", "go-chi/chi"),
}
CHOSEN = {
    "python": ("jd/tenacity", "marshmallow-code/marshmallow"),
    "typescript": ("sindresorhus/ky", "immerjs/immer"),
    "go": ("urfave/cli", "stretchr/testify"),
}
SEED, PER_LANGUAGE, CONTEXTS = 1126, 100, (2, 3)
MAX_CHANGED, MAX_PLACES, MAX_CHARACTERS = 80, 8, 200_000
OUTCOMES = ("exact", "blanks at line ends", "wrong", "refused")


@dataclass(frozen=True)
class Change:
    """One file before and after a commit."""

    repository: str
    commit: str
    path: str
    language: str
    before: str
    after: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws, merges, prints the table, and returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description=__doc__)
    parser.add_argument("--clones", type=Path, required=True, help="folder of clones, OWNER+NAME")
    parser.add_argument("--set", choices=("kept-back", "chosen"), default="kept-back")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--wrong", action="store_true", help="name the edits that are made wrongly")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the table as a section of docs/figures")
    given = parser.parse_args(arguments)
    changes = list(drawn(KEPT_BACK if given.set == "kept-back" else CHOSEN, given.clones, given.seed))
    counts: dict[tuple[int, str], Counter[str]] = {}
    for context in CONTEXTS:
        for change in changes:
            outcome = merged(change, context)
            counts.setdefault((context, change.language), Counter())[outcome] += 1
            counts.setdefault((context, "all"), Counter())[outcome] += 1
            if given.wrong and outcome in OUTCOMES[1:3]:
                print(f"{outcome}: {change.repository} {change.commit[:12]} {change.path}, {context} lines of context")
    for (context, language), outcomes in counts.items():
        shown = ", ".join(f"{name} {outcomes[name]}" for name in OUTCOMES)
        print(f"{context} lines of context, {language}: {outcomes.total()} edits, {shown}")
    if given.record is not None:
        given.record.write_text(results.dump(record(counts, given)))
    return 0


def drawn(libraries: dict[str, tuple[str, ...]], clones: Path, seed: int) -> Iterator[Change]:
    """The edits of all libraries, as many of each language."""
    for language, names in libraries.items():
        for number, name in enumerate(names):
            count = PER_LANGUAGE // len(names) + (number < PER_LANGUAGE % len(names))
            yield from changes_of(name, language, _clone(clones, name), count, seed)


def _clone(clones: Path, name: str) -> Path:
    folder = clones / name.replace("/", "+")
    if not folder.exists():
        subprocess.run(["git", "clone", "-q", "--bare", f"https://github.com/{name}", str(folder)], check=True)
    return next(path for path in (folder / ".git", folder / "repo", folder) if path.exists())


def changes_of(name: str, language: str, git: Path, count: int, seed: int) -> Iterator[Change]:
    """`count` edits of a library, drawn by the rule above."""

    def read(*words: str) -> bytes:
        return subprocess.run(["git", "--git-dir", str(git), *words], capture_output=True, check=True).stdout

    commits = sorted(read("log", "--no-merges", "--format=%H").decode().split())
    rng = random.Random(f"{seed}:{name}")
    rng.shuffle(commits)
    for commit in commits:
        entries = lines_of(read("diff-tree", "-r", "--no-renames", "--diff-filter=M", commit).decode())
        files = [(path, meta.split()) for meta, _, path in (entry.partition("\t") for entry in entries) if path]
        files = [(path, words) for path, words in files if path.endswith(SUFFIXES[language])]
        rng.shuffle(files)
        for path, words in files:
            old, new = (read("cat-file", "blob", blob) for blob in words[2:4])
            try:
                change = Change(name, commit, path, language, old.decode(), new.decode())
            except UnicodeDecodeError:
                continue
            if _fits(change):
                yield change
                count -= 1
                break
        if count == 0:
            return


def _fits(change: Change) -> bool:
    before, after = change.before, change.after
    if "\0" in before + after or len(before) > MAX_CHARACTERS or before.endswith("\n") != after.endswith("\n"):
        return False
    places = _places(before, after)
    changed = sum(end - start + high - low for start, end, low, high in places)
    return 0 < len(places) <= MAX_PLACES and changed <= MAX_CHANGED


def _places(before: str, after: str) -> list[tuple[int, int, int, int]]:
    codes = SequenceMatcher(None, lines_of(before), lines_of(after), autojunk=False).get_opcodes()
    return [code[1:] for code in codes if code[0] != "equal"]


def sketch_of(change: Change, context: int) -> str:
    """The changed lines with `context` lines that are not blank on each side, and markers for the rest."""
    lines, regions = lines_of(change.after), list[list[int]]()
    for _, _, low, high in _places(change.before, change.after):
        above = below = context
        while low > 0 and above:
            low -= 1
            above -= bool(lines[low].strip())
        while high < len(lines) and below:
            below -= bool(lines[high].strip())
            high += 1
        if regions and low - regions[-1][1] <= 1:
            regions[-1][1] = max(high, regions[-1][1])
        else:
            regions.append([low, high])
    marker = line_comment(change.language, "... existing code ...")
    shown, at = list[str](), 0
    for low, high in regions:
        shown += ([marker] if low > at else []) + lines[low:high]
        at = high
    return "\n".join([*shown, *([marker] if at < len(lines) else []), ""])


def merged(change: Change, context: int) -> str:
    """The outcome of an edit, one of OUTCOMES."""
    try:
        text = Edit(change.before, sketch_of(change, context), path=change.path).merged()
    except UserError:
        return "refused"
    grade = grade_edit(change.after, text, change.language)
    return {EditGrade.EXACT: "exact", EditGrade.WHITESPACE: "blanks at line ends"}.get(grade, "wrong")


def record(counts: dict[tuple[int, str], Counter[str]], given: argparse.Namespace) -> dict[str, Any]:
    """The table as a section of `docs/figures`; its title, text and level stay as they are in the file."""
    section = results.load(given.record) if given.record.exists() else {"title": "The merge", "level": 3}
    rows = [
        {"case": f"{language}, {context} lines/{name}", "value": outcomes[name], "unit": "", "baseline": ""}
        for (context, language), outcomes in counts.items()
        for name in OUTCOMES
    ]
    command = f"python -m benchmarks.merge --clones DIR --set {given.set} --seed {given.seed}"
    about = {"bench": f"merge/{given.set}", "command": command, **results.described()}
    return section | {"records": [about | {"conditions": "", "by": "language, context", "rows": rows}]}


if __name__ == "__main__":
    sys.exit(main())
