"""Rename augmentation: gives an edit other names, so that a model learns to copy files instead of memorising them."""

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Iterable

from etude.edits import Example

WORD = re.compile(r"[^\W\d]\w+")
COMMON = 0.01  # words in a larger share of the texts belong to the languages, and stay


def rare(examples: Iterable[Example]) -> tuple[str, ...]:
    """The words of two characters or more that at most a hundredth of the files and sketches hold (or one), sorted.
    Sketches count because their markers ("rest of code") hold words that may occur in no file."""
    distinct = {text for example in examples for text in (example.file, example.sketch)}
    counts = Counter(word for text in distinct for word in set(WORD.findall(text)))
    return tuple(sorted(word for word, count in counts.items() if count <= max(COMMON * len(distinct), 1)))


def renamed(example: Example, names: tuple[str, ...], rng: random.Random) -> Example:
    """The edit with each of its words that is among `names` replaced, everywhere, by another name. No two words become
    one, and no word becomes one that the edit holds: equal lines stay equal, and others stay different."""
    texts = (example.file, example.sketch, example.result, example.instruction)
    words = {word for text in texts for word in WORD.findall(text)}
    own = sorted(words.intersection(names))
    free = [name for name in rng.sample(names, min(len(names), 2 * len(words))) if name not in words]
    other = dict(zip(own, free, strict=False))
    file, sketch, result, instruction = (WORD.sub(lambda m: other.get(m[0], m[0]), text) for text in texts)
    return dataclasses.replace(example, file=file, sketch=sketch, result=result, instruction=instruction)
