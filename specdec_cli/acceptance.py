"""What a drafter's confidence is worth: the probability that the target accepts, learned as rounds go by."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdec_cli.distribution import Floats

EDGES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97, 0.99])
"""Borders of the confidence buckets: finer where long drafts are decided."""

NUM_BUCKETS = EDGES.size + 1
_CENTERS = np.array([0.05, *((EDGES[1:] + EDGES[:-1]) / 2), 0.997])

_PRIOR_WEIGHT = 8.0
_KEEP_OUTCOME = 0.99
_KEEP_SEEN = 0.97
_SURE = 3.0


def model_prior(confidence: Floats | float) -> Floats:
    """Acceptance of a draft model's token by its top probability, before anything was seen."""
    return np.asarray(0.15 + 0.83 * confidence)


def foreign_prior(confidence: Floats | float) -> Floats:
    """The same for a draft model with another tokenizer: another family, which nobody trained to agree."""
    return np.asarray(0.04 + 0.93 * confidence)


def match_prior(confidence: Floats) -> Floats:
    """Acceptance of an n-gram continuation by its confidence, before anything was seen."""
    return np.asarray(np.clip(1.4 * confidence - 0.33, 0.03, 0.9))


def sibling_prior(confidence: Floats | float) -> Floats:
    """Acceptance of a draft model's second, third, ... choice, those before it rejected, before anything was seen."""
    return np.asarray(0.02 + 0.85 * confidence)


class Acceptance:
    """Counts of one drafter, by confidence, older ones fading.

    Args:
        prior: confidences, shape (n,) -> their acceptance as far as known beforehand.
        is_sure: whether the surest confidence is expected more often than any other.
    """

    def __init__(self, prior: Callable[[Floats], Floats], *, is_sure: bool = True) -> None:
        self._is_sure = is_sure
        self._tried = np.full(NUM_BUCKETS, _PRIOR_WEIGHT)
        self._accepted = _PRIOR_WEIGHT * prior(_CENTERS)
        self._prior = self._accepted / self._tried
        self._seen = np.zeros(NUM_BUCKETS)
        self.begin()

    def estimate(self, confidence: float) -> float:
        """Probability that a token of this confidence is accepted."""
        bucket = self.bucket(confidence)
        return float(self._accepted[bucket] / self._tried[bucket])

    @property
    def estimates(self) -> Floats:
        """The same for every bucket, shape (NUM_BUCKETS,)."""
        return np.asarray(self._accepted / self._tried)

    @property
    def shares(self) -> Floats:
        """How often each bucket was seen of late, shape (NUM_BUCKETS,), sum 1."""
        return np.asarray(self._seen / self._seen.sum())

    @property
    def mean(self) -> float:
        """Expected acceptance of a token about which nothing is known yet."""
        return float(self.shares @ self.estimates)

    def begin(self) -> None:
        """A new answer: what tokens are worth stays, how easy the last text was is mostly forgotten."""
        # A flat start, and a little confidence: as if a few of each kind had been seen.
        self._seen = 0.25 * self._seen + 0.25
        self._seen[-1] += _SURE * self._is_sure

    def see(self, confidence: float) -> None:
        """A token of this confidence came up, whether it was scored or not."""
        self._seen *= _KEEP_SEEN
        self._seen[self.bucket(confidence)] += 1.0

    def learn(self, confidence: float, outcome: float) -> None:
        """A token of this confidence was tried; `outcome` in [0, 1] is its probability of acceptance, or 0 or 1."""
        bucket = self.bucket(confidence)
        # What fades is what was counted, down to the prior.
        fade = 1.0 - _KEEP_OUTCOME
        self._tried[bucket] += 1.0 - fade * (self._tried[bucket] - _PRIOR_WEIGHT)
        counted = self._accepted[bucket] - _PRIOR_WEIGHT * self._prior[bucket]
        self._accepted[bucket] += outcome - fade * counted

    @staticmethod
    def bucket(confidence: float) -> int:
        """Index of the bucket of a confidence."""
        return int(EDGES.searchsorted(confidence, side="right"))
