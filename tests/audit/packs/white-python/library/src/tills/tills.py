"""Tills hold coins."""

from __future__ import annotations

from contextlib import contextmanager

from .coins import Coin


class Till:
    """Coins in the order in which they came."""

    def __init__(self, amounts=()):
        self.content = list(amounts)
        self.closed = False

    def __len__(self):
        return len(self.content)

    def __iter__(self):
        return iter(self.content)

    def __contains__(self, amount):
        return amount in self.content

    def __eq__(self, other):
        if isinstance(other, Till):
            other = other.content
        if not isinstance(other, list):
            return NotImplemented
        return self.content == other

    def __enter__(self):
        self.saved = list(self.content)
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self.content[:] = self.saved
        self.closed = True

    def put(self, *amounts):
        """Put amounts into the till, and give it back."""
        for amount in amounts:
            if amount > 0:
                self.content.append(amount)
        return self

    def sorted(self):
        """A till with the same amounts in order."""
        amounts = sorted(self.content)
        return Till(amounts)

    def total(self):
        """The sum of the amounts."""
        amount = 0
        for each_ in self.content:
            amount += each_
        return amount

    def named(self, names):
        """How often each name of a mapping stands for an amount of the till."""
        counts = {}
        for name, amount in names.items():
            counts[name] = self.content.count(amount)
        return counts


@contextmanager
def limited(till, most):
    """A block after which the till holds at most `most` amounts."""
    before = len(till)
    yield before
    while len(till) > most:
        till.content.pop()


def merged(tills):
    """A till with the amounts of all."""
    made = Till()
    for till in tills:
        made.put(*till)
    return made


def each(till, visit):
    """The results of a function on the coins of a till."""
    results = []
    for amount in till:
        results.append(visit(Coin(amount)))
    return results


def drained(till):
    """Yield the amounts of a till from its end, and take them out."""
    while till.content:
        amount = till.content.pop()
        yield amount
