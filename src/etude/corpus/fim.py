"""Fill-in-the-middle examples in prefix-suffix-middle order (Bavarian et al. 2022)."""

import random

from etude.code import lines_of


def split(text: str, rng: random.Random) -> tuple[str, str, str]:
    """Cut text into (prefix, middle, suffix) with prefix + middle + suffix == text and a non-empty middle. Half of the
    cuts are at whole lines, as editing tools request, half between any two characters. Raises ValueError for empty
    text."""
    if not text:
        raise ValueError("cannot cut an empty text for fill-in-the-middle")
    lines = lines_of(text, ends=True)
    if len(lines) > 2 and rng.random() < 0.5:
        start = rng.randrange(len(lines))
        end = min(len(lines), start + rng.randint(1, 4))
        return "".join(lines[:start]), "".join(lines[start:end]), "".join(lines[end:])
    start = rng.randrange(len(text))
    end = min(len(text), start + rng.randint(1, max(1, len(text) // 2)))
    return text[:start], text[start:end], text[end:]
