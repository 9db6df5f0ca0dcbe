"""`etude tasks fast-apply`: makes tables of edits from repositories, for training and held out, and a card about
them."""

import logging
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.code import has_syntax, shown_lines
from etude.config import EditTableConfig
from etude.corpus import dedup
from etude.corpus.edits import make
from etude.corpus.edits.card import EditBuildLog, card
from etude.corpus.edits.repositories import FileChange, Repository, Text, read
from etude.edits import Example, weighted_examples, write_examples
from etude.errors import UserError

log = logging.getLogger(__name__)
HELD_OUT_LINES = 400
_TRIES = 6  # draws of one file, at most


Progress = Callable[[str, int, int], None]


def build_edit_table(
    training: Sequence[str],
    held_out: Sequence[str],
    output: Path,
    options: EditTableConfig,
    progress: Progress | None = None,
    own: Collection[str] = (),
) -> tuple[list[Example], list[Example]]:
    """Write train.parquet, heldout.parquet (if there are held-out repositories) and DATACARD.md. Repositories named in
    `own` need no open licence, and are trained on unless they are held out. Raises UserError for a repository that
    cannot be used or is on both sides, and if they give no example; then no file is left behind."""
    if output.exists():
        raise UserError(f"{output} exists: give a folder that does not")
    report = progress or (lambda *_: None)
    training = list(dict.fromkeys([*training, *(name for name in own if name not in held_out)]))
    if not training:
        raise UserError("there is no repository to train on: name one, or give your own by --own")
    read_all = [_read(argument, argument in own, i, len(training), report) for i, argument in enumerate(training)]
    tests = [_read(argument, argument in own, i, len(held_out), report) for i, argument in enumerate(held_out)]
    clash = {_plain(r.name) for r in read_all} & {_plain(r.name) for r in tests}
    if clash:
        raise UserError(f"{', '.join(sorted(clash))} is both trained on and held out: name it on one side")
    missing = Counter(t.language for r in [*read_all, *tests] for t in r.texts if not _usable(t.language))
    unique, duplicates = _without_duplicates(read_all)
    tests, copies = _without_duplicates(tests)
    counter = Counter[str]()
    train = _drawn(unique, options, options.max_lines, None, counter, report)
    clean, flagged, worst = _decontaminated(train, tests)
    tested = _drawn(tests, options, HELD_OUT_LINES, options.held_out_edits, counter, report) if tests else []
    if not clean or (tests and not tested):
        raise UserError("no edit could be made from these repositories: give repositories with more code, or a history")
    clean, tested = weighted_examples(clean), weighted_examples(tested)
    history = EditBuildLog(
        repositories=tuple(
            (r.name, r.licence, r.licence_source, r.origin, len(r.texts), len(r.changes)) for r in [*read_all, *tests]
        ),
        held_out=tuple(r.name for r in tests),
        without_syntax=dict(missing),
        near_duplicates=duplicates + copies,
        contaminated=flagged,
        worst_overlap=worst,
        tried=counter["tried"],
        kept=counter["kept"],
    )
    _write(output, clean, tested, card(clean, tested, options, history))
    return clean, tested


def _write(output: Path, train: Sequence[Example], tested: Sequence[Example], text: str) -> None:
    partial = output.with_name(output.name + ".incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_examples(train, partial / "train.parquet")
    if tested:
        write_examples(tested, partial / "heldout.parquet")
    (partial / "DATACARD.md").write_text(text, encoding="utf-8")
    partial.rename(output)


def _read(argument: str, own: bool, index: int, count: int, report: Progress) -> Repository:
    report("reading", index, count)
    return read(argument, own)


def _plain(name: str) -> str:
    """A repository's name without its version."""
    return re.sub(r"-v?\d.*$", "", name).lower().replace("_", "-")


def _usable(language: str) -> bool:
    return language == "markdown" or has_syntax(language)


def _without_duplicates(repositories: Sequence[Repository]) -> tuple[list[Repository], int]:
    """Repositories without files that are near copies (MinHash, Jaccard from about 0.8) of an earlier one."""
    every = [(i, text) for i, r in enumerate(repositories) for text in r.texts if _usable(text.language)]
    kept = dedup.near(dedup.exact(every, lambda e: e[1].text), lambda e: e[1].text, bands=16, rows=8)
    by: dict[int, list[Text]] = defaultdict(list)
    for i, text in kept:
        by[i].append(text)
    out = []
    for i, r in enumerate(repositories):
        paths = {text.path for text in by[i]}
        gone = {text.path for text in r.texts} - paths
        changes = tuple(c for c in r.changes if c.path not in gone and _usable(c.language))
        out.append(Repository(r.name, r.licence, r.licence_source, r.origin, tuple(by[i]), changes))
    return out, len(every) - len(kept)


@dataclass
class _EditDraw:
    """The examples drawn so far; no edit is drawn twice. `max_lines` is the maximum length of an example."""

    max_lines: int
    rng: random.Random
    counter: Counter[str]
    examples: dict[tuple[str, str], Example] = field(default_factory=dict)
    by_file: Counter[str] = field(default_factory=Counter)

    def take(
        self, maker: Callable[..., Example | None], repository: Repository, of: Text | FileChange, limit: int, *more
    ) -> bool:
        """Draw one example of a file; False if the file has `limit` examples or gives no new one."""
        key = f"{repository.name}/{of.path}"
        if self.by_file[key] >= limit:
            return False
        self.counter["tried"] += 1
        example = maker(repository, of, *more, self.max_lines, self.rng)
        if example is None or (edit := (example.file, example.result)) in self.examples:
            return False
        self.examples[edit] = example
        self.by_file[key] += 1
        self.counter["kept"] += 1
        return True


def _drawn(
    repositories: Sequence[Repository],
    options: EditTableConfig,
    max_lines: int,
    wanted: int | None,
    counter: Counter[str],
    report: Progress,
) -> list[Example]:
    """Real edits first, then synthetic ones in their ratio, then sketches without a change. `wanted` is the number of
    examples of an evaluation; None draws training examples in the ratios of `options`."""
    draw = _EditDraw(max_lines, random.Random(f"{options.seed}/{max_lines}/{wanted}"), counter)
    cap = make.PER_REPOSITORY
    if wanted is not None:  # an evaluation wants real edits: half of them, if there are so many
        cap = -(-wanted // 2 // max(1, sum(bool(r.changes) for r in repositories)))
    for i, repository in enumerate(repositories):
        report("real edits", i, len(repositories))
        made = 0
        usable = [c for c in repository.changes if _usable(c.language)]
        # Several hunks of one file are several edits.
        for change in [c for c in draw.rng.sample(usable, len(usable)) for _ in range(_TRIES)]:
            if made >= cap:
                break
            made += draw.take(make.real, repository, change, make.PER_PATH)
    reals = len(draw.examples)
    goal = round(max(reals, 1) * options.synthetic)
    if wanted is not None:
        goal = wanted - reals - round(wanted * make.NO_OPS)
    texts = [(r, text) for r in repositories for text in r.texts if _usable(text.language)]
    others: dict[str, list[str]] = defaultdict(list)  # lines to put into other files, by language
    for _, text in texts:
        if len(others[text.language]) < 200_000:
            others[text.language] += shown_lines(text.text)
    limit = make.PER_PATH * (1 + max(1, round(options.synthetic)))  # of one file, real ones included
    for repository, text in _balanced(texts, draw.rng, limit):
        if len(draw.examples) - reals >= goal:
            break
        report("synthetic edits", len(draw.examples) - reals, goal)
        draw.take(make.synthetic, repository, text, limit, others[text.language])
    allowed = int(make.NO_OPS * len(draw.examples) / (1 - make.NO_OPS))
    for repository, text in draw.rng.sample(texts, len(texts)):
        if allowed <= 0:
            break
        allowed -= draw.take(make.unchanged, repository, text, limit + 1)
    examples = list(draw.examples.values())
    draw.rng.shuffle(examples)
    return examples


def _balanced(
    texts: Sequence[tuple[Repository, Text]], rng: random.Random, rounds: int
) -> Iterator[tuple[Repository, Text]]:
    """Files in random order, round after round. In each round the languages come in proportion to the cube roots of
    their numbers of files, so that Python does not drown the others."""
    by: dict[str, list[tuple[Repository, Text]]] = defaultdict(list)
    for entry in texts:
        by[entry[1].language].append(entry)
    languages = sorted(by)
    weights = [len(by[name]) ** (1 / 3) for name in languages]
    queues = {name: [e for _ in range(rounds) for e in rng.sample(by[name], len(by[name]))] for name in languages}
    while any(queues.values()):
        name = rng.choices(languages, [w if queues[n] else 0.0 for n, w in zip(languages, weights, strict=True)])[0]
        yield queues[name].pop()


def _decontaminated(train: Sequence[Example], tests: Sequence[Repository]) -> tuple[list[Example], int, float]:
    """Training examples that share less than a tenth of their shingles with the held-out repositories."""
    known = [text.text for r in tests for text in r.texts] + [c.before for r in tests for c in r.changes]
    if not known:
        return list(train), 0, 0.0
    flagged = set(dedup.contamination((e.file + e.result for e in train), known).flagged)
    clean = [e for i, e in enumerate(train) if i not in flagged]
    return clean, len(flagged), dedup.contamination((e.file + e.result for e in clean), known).worst
