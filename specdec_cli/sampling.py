"""Logits to the distribution that sampling settings define, in llama.cpp's order and meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_cli.distribution import Distribution, Floats, Ids
from specdec_cli.types import Logits, SamplingParams

_HUGE = 1e30
"""Decides against any logit, and is still a float32."""


class Sampler:
    """The transform of logits rows under fixed settings; the same one serves target and draft model.

    Args:
        params: the sampling settings.
        num_vocab: tokens beyond this one are never produced: vocabularies of a pair can differ in padding.
    """

    def __init__(self, params: SamplingParams, num_vocab: int) -> None:
        self.params = params
        self._num_vocab = num_vocab
        # Biases on tokens outside this model's vocabulary concern the other model only.
        self._bias = [(token, bias) for token, bias in params.logit_bias if 0 <= token < num_vocab]
        self._history_size = params.history_size

    def history(self, tokens: Sequence[int], path: Sequence[int] = ()) -> list[int]:
        """The part of `tokens` + `path` that `distribution` needs to see; empty when penalties are off."""
        size = self._history_size
        if size == 0:
            return []
        whole = [*(tokens if size is None else tokens[-size:]), *path]
        return whole if size is None else whole[-size:]

    def distribution(self, logits: Logits, history: Sequence[int] = ()) -> Distribution:
        """What the next token is drawn from.

        Args:
            logits: one row, shape (>= num_vocab,); not changed.
            history: last tokens before it, from `history()`.
        """
        row = self._adjust(logits[: self._num_vocab], history)
        best = int(row.argmax())
        # A row without any possible token is the caller's contradiction; whatever comes then must not be NaN.
        if self.params.is_greedy or row[best] == -np.inf:
            return Distribution.point(best)
        ids, values = self._top_k(row)
        ids, values = self._truncate(ids, values)
        weights = _tempered(values - values.max(), self.params.temperature)
        return Distribution(ids, weights / weights.sum())

    def _adjust(self, row: Logits, history: Sequence[int]) -> Logits:
        """Logit bias, then penalties (Keskar et al. 2019 for the repeat penalty's form)."""
        if not self._bias and not history:
            return row
        row = row.copy()
        for token, bias in self._bias:
            row[token] += bias if bias == -np.inf else min(max(bias, -_HUGE), _HUGE)
        if history:
            self._penalize(row, history)
        return row

    def _penalize(self, row: Logits, history: Sequence[int]) -> None:
        seen, counts = np.unique(np.asarray(history), return_counts=True)
        inside = seen < row.size
        seen, counts = seen[inside], counts[inside]
        values = row[seen]
        repeat = self.params.repeat_penalty
        values = np.where(values <= 0, values * repeat, values / repeat)
        row[seen] = values - counts * self.params.frequency_penalty - self.params.presence_penalty

    def _top_k(self, row: Logits) -> tuple[Ids | None, Logits]:
        """The k largest logits by ascending id, or everything."""
        k = self.params.top_k
        if not 0 < k < row.size:
            return None, row
        ids = np.sort(np.argpartition(row, row.size - k)[row.size - k :])
        return ids, row[ids]

    def _truncate(self, ids: Ids | None, values: Logits) -> tuple[Ids | None, Logits]:
        """Top-p (Holtzman et al. 2020) and min-p; both keep a prefix of the candidates sorted by probability."""
        top_p, min_p = self.params.top_p, self.params.min_p
        if top_p >= 1 and min_p <= 0:
            return ids, values
        weights = np.exp(values - values.max())
        keep = weights >= min_p
        if top_p < 1:
            keep &= self._nucleus(weights, top_p)
        kept = np.flatnonzero(keep)
        return kept if ids is None else ids[kept], values[kept]

    @staticmethod
    def _nucleus(weights: Floats, top_p: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Mask of the likeliest tokens whose mass first reaches `top_p`."""
        total = weights.sum(dtype=np.float64)
        # n tokens below (1 - top_p) / n hold less than 1 - top_p together, so none of them is in the nucleus.
        candidates = np.flatnonzero(weights >= (1 - top_p) * total / weights.size)
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
        mass = np.cumsum(weights[order], dtype=np.float64)
        size = int(mass.searchsorted(top_p * total)) + 1
        mask = np.zeros(weights.size, dtype=np.bool_)
        mask[order[:size]] = True
        return mask


def _tempered(shifted: Logits, temperature: float) -> Floats:
    """exp(shifted / temperature) of values that are 0 at most."""
    if not 1e-6 < temperature < 1e6:
        # In float32 the temperature itself would become 0 or infinite.
        shifted = shifted.astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(shifted / temperature))


def top_probability(logits: Logits) -> float:
    """Probability of the likeliest token under plain softmax: a greedy draft's confidence."""
    return float(1.0 / np.exp(logits - logits.max()).sum(dtype=np.float64))


def top_two(logits: Logits) -> tuple[tuple[int, float], tuple[int, float]]:
    """The two best tokens with their logits, best first: what a near-tie is judged by."""
    second, best = np.argpartition(logits, logits.size - 2)[-2:]
    if logits[second] > logits[best]:
        second, best = best, second
    return (int(best), float(logits[best])), (int(second), float(logits[second]))
