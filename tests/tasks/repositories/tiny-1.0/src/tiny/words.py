"""Functions on words."""

from __future__ import annotations


def initials(name, separator="."):
    """First letters of the words of `name`, in upper case.

    >>> initials("ada lovelace")
    'A.L.'
    """
    letters = [word[0].upper() for word in name.split() if word]
    return "".join(letter + separator for letter in letters)


def shorten(text, width, end="..."):
    """Cut `text` to `width` characters, marking the cut with `end`.

    >>> shorten("hello world", 8)
    'hello...'
    """
    if len(text) <= width:
        return text
    keep = width - len(end)
    if keep < 0:
        keep = 0
    return text[:keep] + end


class Counter:
    """Counts words."""

    def __init__(self):
        self.counts = {}

    def add(self, text):
        """Count the words of `text`.

        >>> Counter().add("a b a")
        {'a': 2, 'b': 1}
        """
        for word in text.split():
            key = word.lower()
            self.counts[key] = self.counts.get(key, 0) + 1
        return self.counts
