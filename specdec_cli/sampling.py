"""Logits to the distribution that sampling settings define, in llama.cpp's order and meaning.

Logit bias, penalties, DRY, the constraint, top-n-sigma, top-k, typical, top-p, min-p, XTC, temperature. All of it is a
function of the logits and the tokens before them, XTC and Mirostat included, so all of it is exact under speculation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec_cli.distribution import Distribution, Floats, Ids
from specdec_cli.errors import BackendError
from specdec_cli.repetition import HUGE, Breakers, dry_penalties, penalize
from specdec_cli.types import Constraint, Logits, SamplingParams

Candidates = tuple[Ids | None, Logits]
"""Token ids (ascending; None is all) and their logits."""

_MAX_BUDGETS = 256
"""Positions that Mirostat remembers: more than any draft is long."""

_BLOCK = 64

_TYPICAL_SAMPLE = 2048
"""Tokens that are sorted at first; a full sort of 150k takes 50 ms."""

_MIROSTAT_SAMPLE = 100
"""Likeliest tokens from which Mirostat 1 estimates, m in the paper."""


class Sampler:
    """The transform of logits rows for one answer; target and draft model each have their own.

    Args:
        params: the sampling settings.
        num_vocab: tokens beyond this one are never produced: vocabularies of a pair can differ in padding.
        constraint: which tokens a grammar allows; shared by target and draft.
        breakers: token sequences that DRY does not look across.
    """

    def __init__(
        self,
        params: SamplingParams,
        num_vocab: int,
        constraint: Constraint | None = None,
        breakers: Breakers | None = None,
    ) -> None:
        self.params = params
        self._num_vocab = num_vocab
        self._constraint = constraint
        self._breakers: Breakers = breakers or {}
        # Biases on tokens outside this model's vocabulary concern the other model only.
        self._bias = [(token, bias) for token, bias in params.logit_bias if 0 <= token < num_vocab]
        self._mirostat = Mirostat(params, num_vocab) if params.mirostat else None

    def distribution(self, logits: Logits, tokens: Sequence[int] = (), path: Sequence[int] = ()) -> Distribution:
        """What the next token is drawn from.

        Args:
            logits: one row, shape (>= num_vocab,); not changed.
            tokens: committed token ids before it, prompt included.
            path: draft tokens between those and this row.

        Raises:
            BackendError: the row holds NaN.
        """
        ids, values = self.candidates(logits, tokens, path)
        best = int(values.argmax())
        if np.isnan(values[best]):
            raise BackendError("the model gives no valid logits", "its file is damaged; download it again")
        # A row without any possible token is the caller's contradiction; whatever comes then must not be NaN.
        if values[best] == -np.inf or (self.params.is_greedy and not self.params.can_drop_best):
            return Distribution.point(best if ids is None else int(ids[best]))
        if self._mirostat is not None:
            return self._mirostat.distribution(ids, values, tokens, path)
        return self._mixture(*self._truncate(ids, values))

    def candidates(self, logits: Logits, tokens: Sequence[int] = (), path: Sequence[int] = ()) -> Candidates:
        """Tokens that the constraint allows, with their logits after bias, penalties and DRY; see `distribution`."""
        row = self._adjust(logits[: self._num_vocab], tokens, path)
        return self._allowed(row, tokens, path)

    def _adjust(self, row: Logits, tokens: Sequence[int], path: Sequence[int]) -> Logits:
        """Logit bias, penalties, DRY; a copy when anything changes."""
        params = self.params
        penalized = _last(params.penalty_window, tokens, path)
        repeated = _last(params.dry_window, tokens, path)
        if not self._bias and not penalized and not repeated:
            return row
        row = row.copy()
        for token, bias in self._bias:
            row[token] += bias if bias == -np.inf else min(max(bias, -HUGE), HUGE)
        if penalized:
            penalize(row, penalized, params)
        for token, penalty in dry_penalties(repeated, params, self._breakers).items() if repeated else ():
            if token < row.size:
                row[token] -= penalty
        return row

    def _allowed(self, row: Logits, tokens: Sequence[int], path: Sequence[int]) -> Candidates:
        if self._constraint is None:
            return None, row
        ids = self._constraint.allowed(tokens, path)
        ids = ids[: int(ids.searchsorted(row.size))]
        # Only tokens that this model lacks: whatever it drafts, the target refuses.
        return (ids, row[ids]) if ids.size else (None, row)

    def _truncate(self, ids: Ids | None, values: Logits) -> Candidates:
        """Top-n-sigma, top-k, typical, top-p, min-p: each looks at what the one before left."""
        params = self.params
        if params.top_n_sigma > 0:
            values = _top_n_sigma(values, params.top_n_sigma)
        ids, values = _keep(ids, values, _top_k(values, params.top_k))
        if params.typical_p < 1:
            ids, values = _keep(ids, values, _typical(values, params.typical_p))
        if params.top_p < 1 or params.min_p > 0:
            ids, values = _keep(ids, values, _top_p_min_p(values, params.top_p, params.min_p))
        return ids, values

    def _mixture(self, ids: Ids | None, values: Logits) -> Distribution:
        """Softmax at the temperature; XTC's coin becomes a mixture of its two outcomes."""
        probs = self._softmax(values)
        share = self.params.xtc_probability
        kept = _xtc(values, self.params.xtc_threshold) if share > 0 else None
        if kept is not None:
            probs = probs * (1 - share)
            probs[kept] += share * self._softmax(values[kept])
        if self.params.is_greedy:
            support = np.flatnonzero(probs)
            return Distribution(support if ids is None else ids[support], probs[support])
        return Distribution(ids, probs)

    def _softmax(self, values: Logits) -> Floats:
        shifted = values - values.max()
        temperature = self._temperature(shifted)
        if temperature == 0:
            return np.asarray(np.arange(shifted.size) == shifted.argmax(), dtype=np.float64)
        weights = tempered(shifted, temperature)
        return np.asarray(weights / weights.sum())

    def _temperature(self, shifted: Logits) -> float:
        """The fixed temperature, or the dynamic one: higher where the entropy is."""
        params = self.params
        if params.dynatemp_range <= 0 or shifted.size < 2:
            return params.temperature
        weights = np.exp(shifted)
        probs = weights / weights.sum()
        entropy = -float((probs * np.log(np.where(probs > 0, probs, 1.0))).sum())
        low = max(0.0, params.temperature - params.dynatemp_range)
        high = params.temperature + params.dynatemp_range
        place = entropy / float(np.log(shifted.size))
        return float(low + (high - low) * place**params.dynatemp_exponent)


def _last(window: int | None, tokens: Sequence[int], path: Sequence[int]) -> list[int]:
    """The last `window` tokens (None is all) of both."""
    if window == 0:
        return []
    whole = [*(tokens if window is None else tokens[-window:]), *path]
    return whole if window is None else whole[-window:]


def _keep(ids: Ids | None, values: Logits, kept: Ids | None) -> Candidates:
    if kept is None:
        return ids, values
    return kept if ids is None else ids[kept], values[kept]


def _top_k(values: Logits, k: int) -> Ids | None:
    """Ascending indices of the k largest; None keeps everything."""
    if not 0 < k < values.size:
        return None
    num_blocks = values.size // _BLOCK
    if num_blocks <= 2 * k:
        return np.asarray(np.sort(np.argpartition(values, values.size - k)[values.size - k :]))
    # The k largest block maxima are k values, so none of the k largest is below the least of them; a partition of the
    # few that are left takes a tenth of the time of one over a whole vocabulary.
    maxima = values[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
    among = np.flatnonzero(values >= np.partition(maxima, num_blocks - k)[num_blocks - k])
    return among[np.sort(np.argpartition(values[among], among.size - k)[among.size - k :])]


def _top_n_sigma(values: Logits, num_sigma: float) -> Logits:
    """Tang et al. 2024: nothing further below the best than so many standard deviations."""
    if values.size < 2:
        return values
    finite = values if values.min() > -np.inf else values[values > -np.inf]
    threshold = values.max() - num_sigma * finite.std(dtype=np.float64)
    return np.where(values < threshold, -np.inf, values)


def _typical(values: Logits, typical_p: float) -> Ids:
    """Meister et al. 2023: tokens whose surprise is nearest to the entropy, until their mass exceeds `typical_p`."""
    shifted = values - values.max()
    weights = tempered(shifted, 1.0)
    total = weights.sum()
    probs = weights / total
    surprise = np.log(total) - shifted
    entropy = float((probs * np.where(probs > 0, surprise, 0.0)).sum())
    distances = np.abs(surprise - entropy)
    nearest = _TYPICAL_SAMPLE
    while True:
        order = _smallest(distances, nearest)
        mass = np.cumsum(probs[order].astype(np.float64))
        size = int(mass.searchsorted(typical_p, side="right")) + 1
        if size <= order.size or order.size == distances.size:
            return np.sort(order[:size])
        nearest *= 8


def _smallest(values: Floats, num: int) -> Ids:
    """Indices of the `num` smallest or a few more, in ascending order of value; the first of equal ones first."""
    if num >= values.size:
        return np.argsort(values, kind="stable")
    among = np.flatnonzero(values <= np.partition(values, num - 1)[num - 1])
    return np.asarray(among[np.argsort(values[among], kind="stable")])


def _top_p_min_p(values: Logits, top_p: float, min_p: float) -> Ids:
    """Top-p (Holtzman et al. 2020), then min-p: both keep a prefix of the candidates sorted by probability."""
    weights = np.exp(values - values.max())
    keep = weights >= min_p
    if top_p < 1:
        keep &= _nucleus(weights, top_p)
    return np.flatnonzero(keep)


def _nucleus(weights: Floats, top_p: float) -> NDArray[np.bool_]:
    """Mask of the likeliest tokens whose mass first reaches `top_p`."""
    total = weights.sum(dtype=np.float64)
    # n tokens below (1 - top_p) / n hold less than 1 - top_p together, so none of them is in the nucleus.
    # Of equal tokens rounding could leave none.
    lowest = min((1 - top_p) * total / weights.size, weights.max())
    candidates = np.flatnonzero(weights >= lowest)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    mass = np.cumsum(weights[order], dtype=np.float64)
    size = int(mass.searchsorted(top_p * total)) + 1
    mask = np.zeros(weights.size, dtype=np.bool_)
    mask[order[:size]] = True
    return mask


def _xtc(values: Logits, threshold: float) -> Ids | None:
    """What XTC keeps when its coin falls so: of the tokens above the threshold only the least likely; None is all."""
    weights = np.exp(values - values.max())
    above = np.flatnonzero((weights >= threshold * weights.sum()) & (weights > 0))
    if threshold > 0.5 or above.size < 2:
        return None
    dropped = above[np.argsort(-weights[above], kind="stable")][:-1]
    return np.setdiff1d(np.arange(values.size), dropped)


def tempered(shifted: Logits, temperature: float) -> Floats:
    """exp(shifted / temperature) of values that are 0 at most."""
    if not 1e-6 < temperature < 1e6:
        # In float32 the temperature itself would become 0 or infinite.
        shifted = shifted.astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(shifted / temperature))


class Mirostat:
    """Mirostat 1 and 2 (Basu et al. 2021): truncation by a surprise budget that follows the tokens chosen so far.

    The budget is a function of the tokens before a row and of the distributions they were drawn from. Rows are asked
    for root to leaf and a round after the other, so it is known for every draft node, and going back to an earlier
    position forgets what came after it.

    Args:
        params: version, target surprise, learning rate, temperature.
        num_vocab: tokens of the whole vocabulary, also when a grammar allows fewer.
    """

    def __init__(self, params: SamplingParams, num_vocab: int) -> None:
        self._params = params
        self._num_vocab = max(num_vocab, 2)
        self._budgets: OrderedDict[int, tuple[float, Distribution]] = OrderedDict()

    def distribution(self, ids: Ids | None, values: Logits, tokens: Sequence[int], path: Sequence[int]) -> Distribution:
        """The truncated distribution after `tokens` and `path`."""
        position = len(tokens) + len(path)
        budget = self._budget(position, tokens, path)
        weights = tempered(values - values.max(), self._params.temperature or 1e-9)
        probs = weights / weights.sum()
        kept = self._kept(probs, budget)
        found = Distribution(kept if ids is None else ids[kept], probs[kept] / probs[kept].sum())
        self._budgets[position] = budget, found
        while len(self._budgets) > _MAX_BUDGETS:
            self._budgets.popitem(last=False)
        return found

    def _budget(self, position: int, tokens: Sequence[int], path: Sequence[int]) -> float:
        while self._budgets and next(reversed(self._budgets)) >= position:
            self._budgets.popitem()
        if not self._budgets:
            return 2 * self._params.mirostat_tau
        last, (budget, before) = next(reversed(self._budgets.items()))
        prob = before.prob((path or tokens)[-1])
        if last < position - 1 or prob <= 0:
            # A draft model never sees the row that a bonus token is drawn from, nor are all of the target's tokens
            # among its own candidates: its budget stays what it was.
            return budget
        surprise = -float(np.log2(prob))
        return budget - self._params.mirostat_eta * (surprise - self._params.mirostat_tau)

    def _kept(self, probs: Floats, budget: float) -> Ids:
        # Beyond a thousand bits every token with a probability at all is within the budget, or none is.
        budget = min(max(budget, -1000.0), 1000.0)
        if self._params.mirostat == 2:
            kept: Ids = np.flatnonzero(probs >= 2.0**-budget)
        else:
            likeliest = _top_k(probs, self._size(probs, budget))
            kept = np.arange(probs.size) if likeliest is None else likeliest
        return kept if kept.size else np.array([int(probs.argmax())])

    def _size(self, probs: Floats, budget: float) -> int:
        """Mirostat 1: how many tokens, from a Zipf exponent estimated on the likeliest 100."""
        num_possible = int(np.count_nonzero(probs))
        num_top = min(_MIROSTAT_SAMPLE, num_possible)
        top = np.sort(np.partition(probs, probs.size - num_top)[-num_top:])[::-1].astype(np.float64)
        ranks = np.log(np.arange(2, top.size + 1) / np.arange(1, top.size))
        exponent = float((ranks * np.log(top[:-1] / top[1:])).sum() / max((ranks * ranks).sum(), 1e-300))
        excess = exponent - 1
        # At exponents 0 and 1 the formula has limits, but no value.
        exponent = max(exponent, 1e-3)
        spread = 1 - self._num_vocab**-excess
        share = excess / spread if spread else 1 / np.log(self._num_vocab)
        log_size = (np.log(share) + budget * np.log(2)) / exponent
        return max(1, int(np.exp(min(log_size, np.log(num_possible)))))


def largest(values: Floats, num: int) -> Ids:
    """Indices of the `num` largest values, the largest first."""
    indices = _top_k(values, num)
    indices = np.arange(values.size) if indices is None else indices
    return np.asarray(indices[np.argsort(-values[indices], kind="stable")])


def top_probability(logits: Logits) -> float:
    """Probability of the likeliest token under plain softmax: a greedy draft's confidence."""
    return float(1.0 / np.exp(logits - logits.max()).sum(dtype=np.float64))


def top_two(ids: Ids | None, values: Logits) -> tuple[tuple[int, float], tuple[int, float]]:
    """The two best candidates with their logits, best first: what a near-tie is judged by."""
    places = np.argsort(-values, kind="stable")[:2] if values.size < 1000 else np.argpartition(-values, 1)[:2]
    first, second = int(places[0]), int(places[-1])
    if values[second] > values[first]:
        first, second = second, first
    chosen = [(place if ids is None else int(ids[place]), float(values[place])) for place in (first, second)]
    return chosen[0], chosen[1]
