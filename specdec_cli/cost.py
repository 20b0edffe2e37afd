"""What a pass over n tokens costs on this machine: learned from measured passes, robust to outliers and slow drift."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import numpy as np

from specdec_cli.distribution import Floats

MAX_TABULATED = 65
"""A target pass over the largest draft."""

USUAL_DRAFT, BOUND = 16, 3.0
"""A pass over so many tokens that takes three times as long as a single one is bound by arithmetic."""

_KNOTS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 65, 128, 512], dtype=np.float64)
_NUM_SMALL = 9
"""The first knots are every size up to this."""

_GROWTH, _EXPONENT = 0.45, 0.5
"""Shape of t(n) / t(1) = 1 + 0.45 (n - 1)^0.5 while nothing else is known: a CPU's, measured on 4-bit models."""

_LEVEL_GAIN, _KNOT_GAIN, _MAX_STEP, _CORRECTION = 0.04, 0.12, 0.3, 0.5
_MIN_SECONDS = 1e-9
_REJECTED_GAIN = 1 / 16


class Timing:
    """Seconds of a decode pass as a function of its number of tokens.

    A table of a few sizes, interpolated; each observation moves the whole table a little, which follows a growing
    context, and its own size more. An observation far too slow moves it no further than a moderate one: processes get
    interrupted. One far too fast moves its own size half the way.

    Args:
        measured: number of tokens -> seconds, at least one entry with positive seconds; sizes between them get the
            shape that is usual, larger ones go on as the last two, or in proportion.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        sizes = sorted(measured)
        # More tokens never take less time, and what disturbs a measurement makes it longer: the shorter one counts.
        measured = dict(zip(reversed(sizes), accumulate((measured[n] for n in reversed(sizes)), min), strict=True))
        factors = [max(measured[n], _MIN_SECONDS) / _usual(n) for n in sizes]
        self._seconds = np.interp(_KNOTS, sizes, factors) * _usual(_KNOTS)
        if len(sizes) > 1:
            low, high = sizes[-2:]
            slope = max(0.0, measured[high] - measured[low]) / (high - low)
            if high <= USUAL_DRAFT and measured[high] >= BOUND * measured[sizes[0]]:
                # Kernels take turns at such sizes: two of them do not tell how larger ones go on.
                slope = max(slope, measured[high] / high)
            beyond = high < _KNOTS
            self._seconds[beyond] = max(measured[high], _MIN_SECONDS) + slope * (_KNOTS[beyond] - high)
        self._refresh()

    def __call__(self, num_tokens: int) -> float:
        """Seconds of a pass over so many tokens."""
        if num_tokens <= _NUM_SMALL:
            return float(self._monotone[max(1, num_tokens) - 1])
        if num_tokens <= MAX_TABULATED:
            return float(self.table[num_tokens - 1])
        slope = (self._monotone[-1] - self._monotone[-2]) / (_KNOTS[-1] - _KNOTS[-2])
        inside = float(np.interp(num_tokens, _KNOTS, self._monotone))
        return inside + float(slope) * max(0.0, num_tokens - float(_KNOTS[-1]))

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Take one pass into account."""
        ratio = math.log(max(seconds, _MIN_SECONDS) / self(num_tokens))
        step = min(max(ratio, -_MAX_STEP), _MAX_STEP)
        # Nothing makes a pass much faster than it can be: then what was known is wrong.
        own = _CORRECTION * max(ratio, -1.0) if ratio < -_MAX_STEP else _KNOT_GAIN * step
        self._seconds *= np.exp(_LEVEL_GAIN * step + own * _nearness(num_tokens))
        self._refresh()

    def scaled(self, factor: float) -> Timing:
        """The same with every time multiplied."""
        return Timing({size: factor * seconds for size, seconds in self.as_dict().items()})

    def as_dict(self) -> dict[int, float]:
        """What `Timing` can be made from again."""
        return {int(n): float(s) for n, s in zip(_KNOTS, self._monotone, strict=True)}

    def _refresh(self) -> None:
        # More tokens never take less time; noise must not promise that they do.
        self._monotone = np.maximum.accumulate(self._seconds)
        self._table: Floats | None = None

    @property
    def table(self) -> Floats:
        """Seconds of passes over 1, 2, ... tokens, shape (MAX_TABULATED,)."""
        # Most rounds learn a time, and only those that draft look at more than a few.
        if self._table is None:
            self._table = np.interp(np.arange(1, MAX_TABULATED + 1), _KNOTS, self._monotone)
        return self._table


@lru_cache(maxsize=64)
def _nearness(num_tokens: int) -> Floats:
    """How much a time of so many tokens says about each knot, 1 at its own and 0 from a factor of 1.4 on."""
    return np.maximum(0.0, 1.0 - np.abs(np.log2(_KNOTS / num_tokens)) * 2.0)


def _usual(num_tokens: Floats | int) -> Floats:
    return np.asarray(1.0 + _GROWTH * (np.asarray(num_tokens, dtype=np.float64) - 1.0) ** _EXPONENT)


@dataclass(slots=True)
class CostModel:
    """Times of one pair in one setting.

    Attributes:
        target: t(n), a round's time apart from proposing.
        drafts: for each drafter that decodes, d as a function of the tokens that a step decodes.
        rejected_s: what a rejection costs in the next round, where accepted tokens are decoded again because the
            target's cache cannot drop the rejected ones; 0.0 where it can.
    """

    target: Timing
    drafts: dict[str, Timing] = field(default_factory=dict)
    rejected_s: float = 0.0

    def copy(self) -> CostModel:
        """The same numbers, which do not change with this one's."""
        drafts = {name: Timing(timing.as_dict()) for name, timing in self.drafts.items()}
        return CostModel(Timing(self.target.as_dict()), drafts, self.rejected_s)

    def learn_rejection(self, num_scored: int, num_reread: int) -> None:
        """A draft was rejected, and the next pass, over `num_scored` tokens, had to read so many more."""
        price_s = self.target(num_scored + num_reread) - self.target(num_scored)
        self.rejected_s += _REJECTED_GAIN * (price_s - self.rejected_s)

    def ratios(self) -> Floats:
        """What decisions depend on: passes of a few sizes and draft steps, in plain passes."""
        passes = [self.target(n) + self.rejected_s for n in (2, 4, 8)]
        return np.array([*passes, *(self.step_s(name) for name in sorted(self.drafts))]) / self.target(1)

    def step_s(self, drafter: str, num_tokens: int = 1) -> float:
        """Seconds of a draft step; 0.0 for a drafter without a model."""
        timing = self.drafts.get(drafter)
        return timing(num_tokens) if timing else 0.0
