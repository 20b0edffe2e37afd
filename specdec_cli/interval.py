"""Geometric means of few ratios with their confidence: Student's t, without a statistics library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_NUM_BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean of ratios.

    Attributes:
        mean: the geometric mean.
        low: lower end of the 95 % interval; None where one number tells nothing about the spread.
        high: upper end.
        num_units: independent numbers that the interval rests on.
    """

    mean: float
    low: float | None
    high: float | None
    num_units: int

    @property
    def beats_one(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low is not None and self.low > 1


def geometric_mean(groups: Sequence[Sequence[float]]) -> Ratio | None:
    """Geometric mean of ratios with the t interval of their logarithms.

    The unit is a group, say the repeats of one prompt: its mean is one number among those of the other groups. Repeats
    of a prompt resemble each other, so counting each as a unit would make the interval too narrow. A single group has
    nothing but its repeats; then these are the units, and the interval says nothing about other prompts.

    Args:
        groups: logarithms of ratios, by group.

    Returns:
        None without any number.
    """
    filled = [group for group in groups if len(group)]
    if not filled:
        return None
    units = np.array([np.mean(group) for group in filled] if len(filled) > 1 else filled[0], dtype=np.float64)
    mean = float(units.mean())
    if units.size == 1:
        return Ratio(math.exp(mean), None, None, 1)
    half = t_quantile(units.size - 1) * float(units.std(ddof=1)) / math.sqrt(units.size)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), int(units.size))


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """What the absolute value of a t variable stays below with this probability.

    Args:
        freedom: degrees of freedom, 1 or more.
        confidence: above 0 and below 1.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_mass(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _central_mass(angle: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) tan(angle)): the finite series of Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    odd = freedom % 2
    term, total = 1.0, 0.0
    for step in range((freedom - odd) // 2):
        if step:
            term *= (2 * step - 1 + odd) / (2 * step + odd)
        total += term * math.cos(angle) ** (2 * step + odd)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
