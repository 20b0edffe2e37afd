"""How fast a draft model will make a target, foretold from its agreement with a text and from measured times.

The rule is that of drafting itself: a token is worth drafting when the tokens it is expected to save take longer than
it does. A text of the target's own is replayed under that rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec_cli.cost import CostModel

MAX_DRAFT = 16
"""The longest draft that is considered, in tokens."""

LOOKAHEAD = 8
"""Further tokens that one plan holds: the first costs a pass the most, so one alone may not pay where four do."""

_BUCKETS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
_PRIOR_WEIGHT = 4.0
_QUANTILES = (np.arange(8) + 0.5) / 8
_MAX_ITERATIONS = 12
_CLOSE_ENOUGH = 1e-3

Floats = NDArray[np.float64]


def predict_rate(
    confidences: Sequence[float], matches: Sequence[bool], step_s: float, pass_s: Mapping[int, float]
) -> float:
    """Tokens per second that the target reaches with this draft model, never less than without.

    Args:
        confidences: the draft model's highest probability at each position of a text by the target, shape (n,).
        matches: whether its likeliest token there is the text's, shape (n,).
        step_s: seconds of one draft step.
        pass_s: number of tokens -> seconds of a pass of the target; 1 is among them.

    Raises:
        ValueError: the shapes differ, or there is no time for one token.
    """
    if len(confidences) != len(matches) or 1 not in pass_s:
        raise ValueError("as many matches as confidences are needed, and the time of a pass over one token")
    passes = pass_times(pass_s)
    baseline = best = float(1 / passes[1])
    if not len(matches):
        return baseline
    chances = calibrate(confidences, matches)
    # Dinkelbach's iteration: the best rate is the one under whose own price of time it is reached.
    rate = baseline
    for _ in range(_MAX_ITERATIONS):
        found = max(_replay(chances, matches, step_s, passes, rate), baseline)
        best = max(best, found)
        if abs(found - rate) <= _CLOSE_ENOUGH * rate:
            break
        rate = found
    return best


def expected_speedup(costs: CostModel, drafter: str, acceptance: float) -> float:
    """Tokens per second over plain decoding's when every draft token is accepted with the same probability.

    The length is the best one for it, 0 included: drafting that does not pay is switched off.

    Args:
        costs: what passes and draft steps take.
        drafter: whose steps; one without a model takes no time.
        acceptance: from 0 to 1, each token given that those before it were accepted.
    """
    lengths = np.arange(MAX_DRAFT + 1)
    tokens = np.cumsum(acceptance**lengths)
    seconds = lengths * costs.step_s(drafter) + costs.target.table[lengths]
    # In this order length 0 gives 1 exactly.
    return float((tokens * costs.target.table[0] / seconds).max())


def calibrate(confidences: Sequence[float], matches: Sequence[bool]) -> Floats:
    """Probability of acceptance for each confidence: how often tokens of about this confidence matched, shape (n,).

    Few positions share a bucket, so its mean is drawn to the confidence itself.
    """
    given, hits = np.asarray(confidences, np.float64), np.asarray(matches, np.float64)
    buckets = np.digitize(given, _BUCKETS)
    counts = np.bincount(buckets, minlength=len(_BUCKETS) + 1)[buckets]
    sums = np.bincount(buckets, hits, minlength=len(_BUCKETS) + 1)[buckets]
    return np.asarray((sums + _PRIOR_WEIGHT * given) / (counts + _PRIOR_WEIGHT))


def pass_times(pass_s: Mapping[int, float]) -> Floats:
    """Seconds of a pass over n tokens at index n, up to the longest plan; measured sizes are joined by lines.

    A larger pass never counts as faster: that would be noise.
    """
    sizes = sorted(pass_s)
    seconds = np.maximum.accumulate([pass_s[size] for size in sizes])
    wanted = np.arange(MAX_DRAFT + LOOKAHEAD + 2)
    times = np.interp(wanted, sizes, seconds)
    if len(sizes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        times = np.where(wanted > sizes[-1], seconds[-1] + slope * (wanted - sizes[-1]), times)
    return np.asarray(times, np.float64)


@dataclass(frozen=True, slots=True)
class _Prices:
    """What the decisions of a replay compare.

    Attributes:
        levels: acceptance that a token not drafted yet may turn out to have, equally likely each, shape (8,).
        step_s: seconds of one draft step.
        passes: what `pass_times` gives.
        rate: tokens that a second is worth.
    """

    levels: Floats
    step_s: float
    passes: Floats
    rate: float

    def place(self, num_pass: int) -> float:
        """Tokens that one more place in a pass over `num_pass` costs."""
        return float(self.rate * (self.passes[num_pass + 1] - self.passes[num_pass]))

    def plan(self, reach: Floats, num_pass: int) -> Floats:
        """Tokens gained by the best plan of further tokens, less what its time is worth; its length is fixed now.

        Args:
            reach: probabilities that everything drafted so far is accepted, shape (n,).
            num_pass: tokens of the pass as it stands.

        Returns:
            Shape (n,).
        """
        further = np.arange(1, LOOKAHEAD + 1)
        gained = np.cumsum(self.levels.mean() ** further)
        spent_s = further * self.step_s + self.passes[num_pass + further] - self.passes[num_pass]
        return np.asarray((reach[:, None] * gained - self.rate * spent_s).max(axis=1))

    def kept(self, reach: Floats, num_pass: int) -> Floats:
        """Tokens gained by keeping a drafted token, and going on where that pays, shape (n,)."""
        return np.asarray(reach - self.place(num_pass) + np.maximum(0, self.plan(reach, num_pass + 1)))

    def draft(self, reach: float, num_pass: int) -> float:
        """Tokens gained by drafting one more: as part of a plan, or to see how confident it is and decide then."""
        seen = np.maximum(0, self.kept(reach * self.levels, num_pass)).mean() - self.rate * self.step_s
        return max(float(seen), float(self.plan(np.array([reach]), num_pass)[0]))


def _replay(chances: Floats, matches: Sequence[bool], step_s: float, passes: Floats, rate: float) -> float:
    """Tokens per second over the text when a second is worth `rate` tokens."""
    prices = _Prices(np.quantile(chances, _QUANTILES), step_s, passes, rate)
    position, total_s, num_tokens = 0, 0.0, len(matches)
    while position < num_tokens:
        room = min(MAX_DRAFT, num_tokens - position - 1)
        num_drafted, num_kept = _draft(chances[position : position + room], prices)
        total_s += num_drafted * step_s + float(passes[1 + num_kept])
        drafted = matches[position : position + num_kept]
        position += 1 + next((index for index, match in enumerate(drafted) if not match), num_kept)
    return num_tokens / total_s


def _draft(chances: Floats, prices: _Prices) -> tuple[int, int]:
    """How many tokens a round drafts, and how many of them it has the target score."""
    reach = 1.0
    for num_kept, chance in enumerate(map(float, chances)):
        if prices.draft(reach, 1 + num_kept) < 0:
            return num_kept, num_kept
        reach *= chance
        # Its own step is spent: what is left to decide is whether it is worth its place in the pass.
        if prices.kept(np.array([reach]), 1 + num_kept)[0] < 0:
            return num_kept + 1, num_kept
    return len(chances), len(chances)
