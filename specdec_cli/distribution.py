"""A probability distribution over token ids: dense, or only its support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]

_BLOCK = 1024
"""Probabilities summed at once when a token is drawn from many."""


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities of the tokens that can come next.

    Attributes:
        ids: ascending token ids of the support, shape (n,), or None when `probs` covers ids 0..n-1.
        probs: shape (n,), non-negative, sums to 1.
    """

    ids: Ids | None
    probs: Floats

    @classmethod
    def point(cls, token: int) -> Distribution:
        """All mass on one token: what greedy decoding samples from."""
        return cls(np.array([token], dtype=np.int64), np.ones(1))

    @property
    def is_point(self) -> bool:
        """Whether only one token is possible."""
        return self.probs.size == 1

    def prob(self, token: int) -> float:
        """Probability of `token`; 0.0 outside the support."""
        if self.ids is None:
            return float(self.probs[token]) if 0 <= token < self.probs.size else 0.0
        index = int(self.ids.searchsorted(token))
        inside = index < self.ids.size and self.ids[index] == token
        return float(self.probs[index]) if inside else 0.0

    def mode(self) -> int:
        """The likeliest token."""
        index = int(self.probs.argmax())
        return index if self.ids is None else int(self.ids[index])

    def at(self, ids: Ids) -> Floats:
        """Probabilities of several tokens, shape of `ids`."""
        if self.ids is None:
            inside = ids < self.probs.size
            return np.where(inside, self.probs[np.where(inside, ids, 0)], 0.0)
        index = np.minimum(self.ids.searchsorted(ids), self.ids.size - 1)
        return np.where(self.ids[index] == ids, self.probs[index], 0.0)

    def sample(self, rng: np.random.Generator) -> int:
        """Draw one token id by inversion: one uniform number, none for a point mass."""
        if self.is_point:
            return 0 if self.ids is None else int(self.ids[0])
        probs, offset = self.probs, 0
        uniform = rng.random()
        if probs.size > 4 * _BLOCK:
            # First the block, then the token in it: cumulating 150k probabilities would take longer than drawing them.
            starts = np.arange(0, probs.size, _BLOCK)
            sums = np.cumsum(np.add.reduceat(probs, starts, dtype=np.float64))
            block = _invert(sums, uniform * sums[-1])
            before = sums[block - 1] if block else 0.0
            uniform = (uniform * sums[-1] - before) / (sums[block] - before)
            offset = block * _BLOCK
            probs = probs[offset : offset + _BLOCK]
        # Cumulated in double precision: in float32 the error is visible.
        cumulated = np.cumsum(probs.astype(np.float64))
        index = offset + _invert(cumulated, uniform * cumulated[-1])
        return index if self.ids is None else int(self.ids[index])

    def residual(self, draft: Distribution) -> Distribution:
        """Normalized max(0, self - draft): what is left to sample from after a rejection.

        Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", section 2.3.
        """
        excess = np.maximum(self.probs - self._matching(draft), 0.0)
        total = excess.sum(dtype=np.float64)
        # Nothing is left only when draft covers self; then a rejection has probability 0 and rounding caused this one.
        return Distribution(self.ids, excess / total) if total > 0.0 else self

    def without(self, token: int) -> Distribution | None:
        """What is left when a token was drawn and must not come again, normalized; None when that is nothing."""
        if self.ids is None:
            ids, probs = None, self.probs.copy()
            probs[token] = 0.0
        else:
            others = self.ids != token
            ids, probs = self.ids[others], self.probs[others]
        # Summed anew: 1 - prob(token) would be rounding noise where the token had nearly all of it.
        total = probs.sum(dtype=np.float64)
        return Distribution(ids, probs / total) if total > 0.0 else None

    def overlap(self, draft: Distribution) -> float:
        """Sum of min(self, draft), which is 1 - total variation: the probability that a draft token is accepted."""
        return float(np.minimum(self.probs, self._matching(draft)).sum(dtype=np.float64))

    def _matching(self, other: Distribution) -> Floats:
        """`other` on the tokens of self, same shape as `self.probs`."""
        if self.ids is not None:
            return other.at(self.ids)
        matching = np.zeros_like(self.probs)
        if other.ids is None:
            shared = min(self.probs.size, other.probs.size)
            matching[:shared] = other.probs[:shared]
        else:
            inside = other.ids < self.probs.size
            matching[other.ids[inside]] = other.probs[inside]
        return matching


def _invert(cumulated: Floats, value: float) -> int:
    """Index of the first sum above `value`."""
    return min(int(cumulated.searchsorted(value, side="right")), cumulated.size - 1)
