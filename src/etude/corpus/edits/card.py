"""DATACARD.md of a folder of edits. It holds no times: equal builds give equal cards."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from etude.code import table
from etude.config import EditTableConfig
from etude.corpus.edits import make
from etude.edits import BINS, Example


@dataclass(frozen=True)
class EditBuildLog:
    """The figures of a build, for the card."""

    repositories: tuple[tuple[str, str, str, str, int, int], ...]  # name, licence, its source, origin, files, changes
    held_out: tuple[str, ...]
    without_syntax: dict[str, int]  # files by language that were left out for want of a parser
    near_duplicates: int
    contaminated: int
    worst_overlap: float  # largest share of a kept training example's shingles in the held-out repositories
    tried: int
    kept: int


def bin_name(index: int) -> str:
    """The name of an edit-fraction bin."""
    if index == len(BINS):
        return f"> {BINS[-1]:.0%}"
    return f"<= {BINS[0]:.0%}" if index == 0 else f"{BINS[index - 1]:.0%} to {BINS[index]:.0%}"


def card(train: Sequence[Example], tested: Sequence[Example], options: EditTableConfig, history: EditBuildLog) -> str:
    """The card as Markdown."""
    every = [*train, *tested]
    missing = ", ".join(f"{name} ({count} files)" for name, count in sorted(history.without_syntax.items()))
    sections = [
        "# Applied edits\n",
        f"(file, sketch, result) triples made by `etude tasks fast-apply` with seed {options.seed}: {len(train)} to "
        f"train on, {len(tested)} held out by repository.\n",
        "## Where they come from\n",
        table(
            ("repository", "licence", "stated in", "origin", "files", "changed files", "used for", "edits"),
            [
                (
                    *row,
                    "evaluation" if row[0] in history.held_out else "training",
                    sum(e.repository == row[0] for e in every),
                )
                for row in sorted(history.repositories)
            ],
        ),
        "`commits`: files that a commit changed. `releases`: files that differ between two releases of a package, "
        "edits that people made, several commits in one. `files`: no history, so its edits are synthetic. Repositories "
        "without a permissive licence are refused.\n",
        "## What they are\n",
        _counts("kind", train, tested, lambda e: [e.kind]),
        _counts("language", train, tested, lambda e: [e.language]),
        _counts("share of the file changed", train, tested, lambda e: [bin_name(e.size)]),
        _counts("lines", train, tested, lambda e: [_length(e.lines)]),
        _counts("noise in the sketch", train, tested, lambda e: e.noise or ("none",)),
        _counts("the merge of the sketch is the result", train, tested, lambda e: ["yes" if e.merges else "no"]),
        "Texts are whole files, or parts of them (whole definitions between blank lines, their indentation taken "
        "away). Both sides parse. A clean sketch of every edit determines the result: the deterministic merge finds "
        "one place for each block and gives the result byte for byte. Noise is kept as long as no block then fits "
        "equally well elsewhere.\n",
        f"At most {make.PER_PATH} real edits of one file, and of one repository {make.PER_REPOSITORY}; for each "
        f"real one {options.synthetic:g} synthetic ones in training, as far as they go; at most {make.NO_OPS:.0%} "
        "that change nothing. Weights: files of fewer than 100 lines count a quarter, bins of the changed share have "
        "equal mass.\n",
        "## What was left out\n",
        f"Near copies of other files: {history.near_duplicates} (MinHash over 5-token shingles, Jaccard from about "
        f"0.8). Draws that gave no edit (nothing parses, no determined sketch): {history.tried - history.kept} "
        f"of {history.tried}. Training edits that share a tenth of their 12-token shingles with a held-out repository: "
        f"{history.contaminated}; the largest share left is {history.worst_overlap:.1%}. "
        + (f"Languages without a parser here: {missing}.\n" if missing else "Every language was parsed.\n"),
    ]
    return "\n".join(sections)


def _length(lines: int) -> str:
    edges = (20, 40, 100, 400)
    return next((f"up to {edge}" for edge in edges if lines <= edge), "more")


def _counts(title: str, train: Sequence[Example], tested: Sequence[Example], keys) -> str:
    sides = [Counter(key for e in side for key in keys(e)) for side in (train, tested)]
    names = sorted(set(sides[0]) | set(sides[1]))
    return table((title, "training", "held out"), [(name, *(side[name] for side in sides)) for name in names])
