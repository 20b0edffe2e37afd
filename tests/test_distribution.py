"""Distributions over token ids: dense and sparse say the same, sampling follows them exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from lossless import as_dict, distance, outcomes

from specdec_cli.distribution import Distribution

NUM_VOCAB = 6


@st.composite
def distributions(draw: st.DrawFn) -> Distribution:
    """Sparse or dense ones over up to 6 tokens; zeros inside the support occur."""
    weights = draw(st_np.arrays(np.float64, draw(st.integers(1, NUM_VOCAB)), elements=st.floats(0, 1, width=16)))
    weights = weights if weights.sum() > 0 else np.ones_like(weights)
    probs = weights / weights.sum()
    if draw(st.booleans()):
        return Distribution(None, probs)
    ids = draw(st.permutations(range(NUM_VOCAB)))[: probs.size]
    return Distribution(np.array(sorted(ids), dtype=np.int64), probs)


class Scripted:
    """A generator that returns one given number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        """The number."""
        return self.value


def draw_with(distribution: Distribution, value: float) -> int:
    rng: Any = Scripted(value)
    return distribution.sample(rng)


@given(distributions())
def test_prob_and_at_agree(distribution: Distribution) -> None:
    expected = as_dict(distribution)
    for token in range(NUM_VOCAB + 2):
        assert distribution.prob(token) == expected.get(token, 0.0)
    together = distribution.at(np.arange(NUM_VOCAB + 2))
    assert together.tolist() == [expected.get(token, 0.0) for token in range(NUM_VOCAB + 2)]


@given(distributions())
def test_sampling_is_exact(distribution: Distribution) -> None:
    assert distance(outcomes(lambda rng: distribution.sample(rng)), as_dict(distribution)) < 1e-15


@given(distributions(), st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-53, 2**-53, 1e-300]))
def test_an_impossible_token_is_never_drawn(distribution: Distribution, value: float) -> None:
    assert distribution.prob(draw_with(distribution, value)) > 0


def test_sampling_edges_belong_to_the_upper_token() -> None:
    distribution = Distribution(None, np.array([0.25, 0.0, 0.5, 0.25, 0.0]))
    drawn = [draw_with(distribution, value) for value in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)]
    assert drawn == [0, 0, 2, 2, 3, 3]


def test_sampling_uses_one_number_and_none_for_a_point() -> None:
    rng, twin = np.random.default_rng(1), np.random.default_rng(1)
    Distribution(None, np.array([0.5, 0.5])).sample(rng)
    twin.random()
    assert Distribution.point(7).sample(rng) == 7
    assert Distribution(None, np.ones(1)).sample(rng) == 0
    assert rng.random() == twin.random()


@pytest.mark.parametrize("size", [1 << 12, 1 << 16], ids=["in one piece", "by blocks"])
def test_sampling_cumulates_in_double_precision(size: int) -> None:
    # In float32, adding 1e-4 to 1e4 changes nothing.
    probs = np.full(size, np.float32(1e-4))
    probs[0] = 1e4
    tail = float(np.float32(1e-4)) * (size - 1)
    middle = (1e4 + tail / 2) / (1e4 + tail)
    assert draw_with(Distribution(None, probs), middle) == pytest.approx(size / 2, abs=2)


@given(distributions(), distributions())
def test_residual_is_what_is_left(target: Distribution, draft: Distribution) -> None:
    expected = {token: prob - draft.prob(token) for token, prob in as_dict(target).items()}
    expected = {token: prob for token, prob in expected.items() if prob > 0}
    total = math.fsum(expected.values())
    if total < 1e-6:
        return
    residual = target.residual(draft)
    assert residual.probs.sum() == pytest.approx(1, abs=1e-12)
    assert distance(as_dict(residual), {token: prob / total for token, prob in expected.items()}) < 1e-9


@given(distributions())
def test_residual_of_an_equal_distribution_stays_a_distribution(distribution: Distribution) -> None:
    dense = Distribution(None, distribution.at(np.arange(NUM_VOCAB)))
    for draft in (distribution, dense):
        left = distribution.residual(draft)
        assert left.probs.sum() == pytest.approx(1)
        assert np.isfinite(left.probs).all()


@given(distributions(), distributions())
def test_overlap_is_one_minus_total_variation(first: Distribution, second: Distribution) -> None:
    variation = sum(abs(first.prob(token) - second.prob(token)) for token in range(NUM_VOCAB)) / 2
    assert first.overlap(second) == pytest.approx(1 - variation, abs=1e-12)
    assert first.overlap(second) == pytest.approx(second.overlap(first), abs=1e-12)


def test_vocabularies_of_different_size() -> None:
    small, large = Distribution(None, np.array([0.5, 0.5])), Distribution(None, np.array([0.2, 0.2, 0.6]))
    assert small.residual(large).probs.tolist() == [0.5, 0.5]
    assert large.residual(small).probs.tolist() == [0, 0, 1]
    assert small.overlap(large) == large.overlap(small) == pytest.approx(0.4)
    assert small.prob(2) == small.prob(-1) == 0.0


def test_point() -> None:
    point = Distribution.point(3)
    assert point.is_point
    assert as_dict(point) == {3: 1.0}
    assert not Distribution(None, np.array([0.0, 1.0])).is_point


def test_large_dense_distributions_are_drawn_from_right() -> None:
    """Block by block: the token at which the cumulated probability passes the uniform number, as for small ones."""
    probs = np.random.default_rng(2).dirichlet(np.full(20_000, 0.05)).astype(np.float32)
    probs /= probs.sum()
    large = Distribution(None, probs)
    cumulated = np.cumsum(probs.astype(np.float64))
    cumulated /= cumulated[-1]
    for uniform in [0.0, 1 - 2**-53, *np.random.default_rng(3).random(2000)]:
        drawn = large.sample(Fixed(uniform))  # type: ignore[arg-type]
        assert probs[drawn] > 0
        low, high = (cumulated[drawn - 1] if drawn else 0.0), cumulated[drawn]
        assert low - 1e-9 <= uniform <= high + 1e-9


class Fixed:
    """A generator that gives one number."""

    def __init__(self, uniform: float) -> None:
        self._uniform = uniform

    def random(self) -> float:
        return self._uniform
