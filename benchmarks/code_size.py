"""The size of the program in tokens, by `python -m benchmarks.code_size [FOLDER]`.

Lines can be packed; tokens cannot. `tokenize` splits a file; comments, new lines and indents do not count, and neither
do attack packs (`audit/packs`), which are data.
"""

from __future__ import annotations

import sys
import tokenize
from collections import Counter
from pathlib import Path

DATA = "audit/packs/"
UNCOUNTED = frozenset({
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
})  # fmt: skip


def tokens(path: Path) -> int:
    """The tokens of one file."""
    with path.open("rb") as file:
        return sum(token.type not in UNCOUNTED for token in tokenize.tokenize(file.readline))


def main() -> None:
    """Print the tokens of every folder below FOLDER (default: src/etude), and their sum."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "src/etude")
    rooms: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if not name.startswith(DATA):
            room, below, _ = name.partition("/")
            rooms[room if below else "."] += tokens(path)
    for room, count in rooms.most_common():
        print(f"{count:9,}  {room}")
    print(f"{rooms.total():9,}  in all")


if __name__ == "__main__":
    main()
