"""Search-and-replace edits of whole lines: the smallest one between two texts."""

from dataclasses import dataclass

from etude.code import occurrences


@dataclass(frozen=True)
class StringEdit:
    """Replaces the only occurrence of `old` by `new`; both are whole lines without the last newline."""

    old: str
    new: str

    def apply(self, source: str) -> str:
        """The text after the edit. Raises ValueError unless `old` occurs exactly once and `new` differs."""
        count = occurrences(source, self.old)
        if count != 1:
            raise ValueError("no match" if count == 0 else f"{count} matches")
        if self.old == self.new:
            raise ValueError("no change")
        return source.replace(self.old, self.new)


def edit_between(before: str, after: str, most: int | None = None) -> StringEdit:
    """The smallest whole-line edit that turns `before` into `after`, grown to neighbours until it is unique. Raises
    ValueError when the texts are equal, or a side would have more than `most` line breaks."""
    if before == after:
        raise ValueError("the two texts are equal; there is no edit")
    a, b = before.split("\n"), after.split("\n")
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tail = 0
    while tail < min(len(a), len(b)) - head and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    start, end_a, end_b = head, len(a) - tail, len(b) - tail
    grow_down = True
    while True:
        if most is not None and max(end_a, end_b) - start > most + 1:
            raise ValueError(f"the edit has more than {most} lines")
        old, new = "\n".join(a[start:end_a]), "\n".join(b[start:end_b])
        # An empty side would leave an empty line behind, and a side of blank lines alone is seldom unique.
        if old.strip() and end_b > start and occurrences(before, old) == 1:
            return StringEdit(old, new)
        if start > 0 and (not grow_down or end_a == len(a)):
            start -= 1
        elif end_a < len(a):
            end_a, end_b = end_a + 1, end_b + 1
        else:
            return StringEdit(before, after)
        grow_down = not grow_down
