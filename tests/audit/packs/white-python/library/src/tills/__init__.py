"""Coins, labels and tills."""

from .coins import Coin, Label, biggest, change, parsed
from .tills import Till, drained, each, limited, merged

__all__ = ["Coin", "Label", "Till", "biggest", "change", "drained", "each", "limited", "merged", "parsed"]
