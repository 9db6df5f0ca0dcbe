"""Coins and their labels."""

from __future__ import annotations


class Coin:
    """An amount of a currency."""

    def __init__(self, amount, currency="eur"):
        self.amount = amount
        self.currency = currency

    def __eq__(self, other):
        if isinstance(other, int):
            return self.amount == other
        if not isinstance(other, Coin):
            return NotImplemented
        return (self.amount, self.currency) == (other.amount, other.currency)

    def __hash__(self):
        return hash(self.amount)

    def __add__(self, other):
        if self.currency != other.currency:
            raise ValueError(f"{self.currency} is not {other.currency}")
        amount = self.amount + other.amount
        return Coin(amount, self.currency)

    def times(self, count):
        """The coin `count` times."""
        amount = 0
        for _ in range(count):
            amount += self.amount
        return Coin(amount, self.currency)


class Label:
    """A text in which neither case nor blanks count."""

    def __init__(self, text):
        self.text = text

    def __eq__(self, other):
        if isinstance(other, Label):
            other = other.text
        if not isinstance(other, str):
            return NotImplemented
        return self.text.replace(" ", "").lower() == other.replace(" ", "").lower()

    def __hash__(self):
        return hash(self.text.lower())

    def joined(self, other, mark="-"):
        """Both labels with a mark between them."""
        first = self.text.strip()
        second = other.text.strip()
        return Label(first + mark + second)


def parsed(text):
    """The coin of a text such as "5 usd"."""
    amount, _, currency = text.partition(" ")
    if not amount.isdigit():
        raise ValueError(f"no amount in {text}")
    return Coin(int(amount), currency or "eur")


def biggest(coins):
    """The biggest coin, or None."""
    found = None
    for coin in coins:
        if found is None or coin.amount > found.amount:
            found = coin
    return found


def change(amount, sizes=(50, 20, 10, 5, 2, 1)):
    """The fewest coins that make up an amount."""
    made = []
    for size in sizes:
        while amount >= size:
            made.append(Coin(size))
            amount -= size
    return made
