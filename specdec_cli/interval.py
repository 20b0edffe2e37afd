"""Geometric means of few ratios with their confidence: Student's t, without a statistics library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_NUM_BISECTIONS = 60
_MAX_LOG = 100.0
"""Two numbers can have an interval beyond what a float holds."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean of ratios.

    Attributes:
        mean: the geometric mean.
        error: standard error of its logarithm; None where one number tells nothing about the spread.
        num_units: independent numbers that it rests on.
    """

    mean: float
    error: float | None
    num_units: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the 95 % interval; None without `error`."""
        return self._interval(CONFIDENCE)

    def beats_one(self, num_tried: int = 1) -> bool:
        """Whether the interval is above 1 also when this is the best of several that were tried.

        Of eleven settings that gain nothing one would pass by luck in every fourth sweep, so the chance of error is
        divided by their number (Bonferroni).
        """
        interval = self._interval(1 - (1 - CONFIDENCE) / num_tried)
        return interval is not None and interval[0] > 1

    def _interval(self, confidence: float) -> tuple[float, float] | None:
        if self.error is None:
            return None
        factor = math.exp(min(t_quantile(self.num_units - 1, confidence) * self.error, _MAX_LOG))
        return self.mean / factor, self.mean * factor


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
    error = float(units.std(ddof=1)) / math.sqrt(units.size) if units.size > 1 else None
    return Ratio(math.exp(mean), error, int(units.size))


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
