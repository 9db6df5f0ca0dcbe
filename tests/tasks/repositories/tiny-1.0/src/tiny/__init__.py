"""A library small enough to read in a minute; the tests of etude build tasks from it."""

from tiny.lists import chunk, clamp, count_if, flatten
from tiny.words import Counter, initials, shorten

__all__ = ["Counter", "chunk", "clamp", "count_if", "flatten", "initials", "shorten"]
