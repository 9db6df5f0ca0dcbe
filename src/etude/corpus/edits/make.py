"""Makes examples of applied edits, each with a sketch drawn for it: real edits, synthetic edits, and no change."""

import hashlib
import random
from collections.abc import Sequence

from etude.code import lines_of
from etude.corpus.edits import snippets
from etude.corpus.edits.repositories import FileChange, Repository, Text
from etude.corpus.edits.synthetic import edit as synthetic_edit
from etude.edits import Example, Sketch, draw_no_op, draw_sketch, edit_hunks

PER_PATH = 4  # real edits of one file
PER_REPOSITORY = 50  # real edits of one repository
NO_OPS = 0.02  # share of edits that change nothing, at most
_SIZES = (12, 20, 30, 40, 80, 160, 400)  # lines; each example draws its maximum from these
_TITLE = 60  # characters of a line that an instruction quotes


def real(repository: Repository, change: FileChange, max_lines: int, rng: random.Random) -> Example | None:
    """An edit by people, or a part of it of at most `max_lines` lines; None if no sketch determines it."""
    cut = snippets.parts(change.before, change.after, change.language, _drawn_size(max_lines, rng), rng)
    return cut and edit_with_sketch(repository, change.path, change.language, "real", *cut, change.subject, rng)


def synthetic(
    repository: Repository, text: Text, others: Sequence[str], max_lines: int, rng: random.Random
) -> Example | None:
    """A synthetic edit of a file or of a part of it; `others` are lines of the same language."""
    part = snippets.part(text.text, text.language, _drawn_size(max_lines, rng), rng)
    if part is None or not part.endswith("\n"):
        return None
    result = synthetic_edit(part, others, rng.choices((1, 2, 3, 5), (5, 3, 2, 1))[0], rng)
    if result is None or not snippets.parses(result, text.language):
        return None
    return edit_with_sketch(repository, text.path, text.language, "synthetic", part, result, "", rng)


def unchanged(repository: Repository, text: Text, max_lines: int, rng: random.Random) -> Example | None:
    """An example whose sketch changes no line; None without such a sketch."""
    part = snippets.part(text.text, text.language, _drawn_size(max_lines, rng), rng)
    drawn = part and draw_no_op(part, text.language, rng)
    return _row(repository, text.path, text.language, "no-op", part, part, drawn, "") if part and drawn else None


def _drawn_size(max_lines: int, rng: random.Random) -> int:
    """A random maximum of lines for one example, up to `max_lines`."""
    return rng.choice([size for size in _SIZES if size <= max_lines] or [max_lines])


def edit_with_sketch(
    repository: Repository,
    path: str,
    language: str,
    kind: str,
    before: str,
    after: str,
    subject: str,
    rng: random.Random,
) -> Example | None:
    """An edit with a sketch drawn for it; None if no sketch determines the edit."""
    if not after.strip() or not before.strip():
        return None
    drawn = draw_sketch(before, after, language, rng)
    if drawn is None or len(drawn.text) > 2 * len(after) + 400:
        return None
    which = rng.choice(("subject", "template", "empty"))
    instruction = subject if which == "subject" else _template(before, after, rng) if which == "template" else ""
    return _row(repository, path, language, kind, before, after, drawn, instruction)


def _row(
    repository: Repository,
    path: str,
    language: str,
    kind: str,
    before: str,
    after: str,
    drawn: Sketch,
    instruction: str,
) -> Example:
    lines = max(before.count("\n"), after.count("\n"))
    return Example(
        id=hashlib.blake2b("\0".join((before, drawn.text, after)).encode(), digest_size=8).hexdigest(),
        repository=repository.name,
        licence=repository.licence,
        origin=repository.origin,
        path=path,
        language=language,
        kind=kind,
        noise=drawn.noise,
        merges=drawn.merges,
        instruction=instruction,
        file=before,
        sketch=drawn.text,
        result=after,
        lines=lines,
        fraction=changed_fraction(before, after),
    )


def changed_fraction(before: str, after: str) -> float:
    """The share of characters in changed lines, in the longer of the two texts."""
    file, result = lines_of(before), lines_of(after)
    changed = sum(
        max(sum(map(len, file[h.start : h.end])), sum(map(len, result[h.low : h.high])))
        for h in edit_hunks(file, result)
    )
    return min(1.0, changed / max(1, max(sum(map(len, file)), sum(map(len, result)))))


def _template(before: str, after: str, rng: random.Random) -> str:
    """An instruction that describes the first hunk."""
    file, result = lines_of(before), lines_of(after)
    hunk = edit_hunks(file, result)[0]
    old = next((line.strip() for line in file[hunk.start : hunk.end] if line.strip()), "")[:_TITLE]
    new = next((line.strip() for line in result[hunk.low : hunk.high] if line.strip()), "")[:_TITLE]
    if old and new:
        return rng.choice((f"Change `{old}` to `{new}`.", f"Replace `{old}`.", f"Use `{new}`."))
    if new:
        return rng.choice((f"Add `{new}`.", f"Insert `{new}`."))
    return rng.choice((f"Remove `{old}`.", f"Delete `{old}`.")) if old else "Tidy up."
