"""Estimates the number of stored weights that an optimizer step changes, before the step.

A stored weight is a float32 master rounded to m mantissa bits. The master lies anywhere in its rounding cell, so a move
of |dw| changes the stored bits with probability |dw| / ulp, at most 1, where ulp = 2^(e - m) for an exponent e.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from etude.weights.ulpd.chunk_grid import Bits, Format


def adam_move(learning_rate: float, beta1: float = 0.9) -> float:
    """E|dw| of a step of Adam whose gradients are mostly noise: 0.8 sqrt((1 - b1) / (1 + b1)) of the learning rate. The
    momentum of independent gradients g averages to a normal variable of variance (1 - b1) / (1 + b1) E[g^2], and 0.8 =
    sqrt(2 / pi) is the mean of |x| for a standard normal x."""
    return math.sqrt(2 / math.pi * (1 - beta1) / (1 + beta1)) * learning_rate


def density(parts: Iterable[Bits], form: Format, moved: float) -> float:
    """The share of elements whose bits change when masters move by `moved` on average. `parts` are bits of `form`."""
    fields = form.exponent_mask + 1
    count_E = np.zeros(fields, np.int64)
    for part in parts:
        exponent = (part >> part.dtype.type(form.mantissa)) & part.dtype.type(form.exponent_mask)
        count_E += np.bincount(exponent, minlength=fields)
    exponent_E = np.maximum(np.arange(fields), 1) - form.bias  # subnormals have the ulp of the smallest normal ones
    chance_E = np.minimum(1.0, moved * np.exp2(form.mantissa - exponent_E.astype(float)))
    return float((count_E * chance_E).sum() / max(int(count_E.sum()), 1))
