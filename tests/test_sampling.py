"""Logits to distributions: every transform by hand, their order, and a slow reference on random rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from lossless import Alternating, as_dict, distance, reference_mirostat, reference_probs

from specdec_cli import sampling
from specdec_cli.errors import UsageError
from specdec_cli.sampling import Mirostat, Sampler
from specdec_cli.types import SamplingParams

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Softmax gives 0.5, 0.25, 0.125, 0.0625, 0.0625 in an order that sorting must find.
PROBS = {3: 0.5, 0: 0.25, 4: 0.125, 1: 0.0625, 2: 0.0625}
ROW = np.log([PROBS[token] for token in range(5)])


def probs(row: Sequence[float], history: Sequence[int] = (), **settings: object) -> dict[int, float]:
    params = SamplingParams(**{**OFF, **settings})  # type: ignore[arg-type]
    return as_dict(Sampler(params, len(row)).distribution(np.asarray(row, dtype=np.float64), history))


# ------------------------------------------------------------------ each transform by hand


def test_everything_off_is_softmax() -> None:
    assert probs(ROW) == pytest.approx(PROBS)
    assert probs(ROW + 1000) == pytest.approx(PROBS)


def test_temperature() -> None:
    assert probs(np.log([0.5, 0.25, 0.25]), temperature=0.5) == pytest.approx({0: 4 / 6, 1: 1 / 6, 2: 1 / 6})
    flat = probs(np.log([0.64, 0.36]), temperature=2)
    assert flat == pytest.approx({0: 8 / 14, 1: 6 / 14})


def test_zero_temperature_is_the_first_best_token() -> None:
    assert probs(ROW, temperature=0) == {3: 1.0}
    assert probs([1.0, 2.0, 2.0], temperature=0) == {1: 1.0}
    assert probs([1.0, 2.0, 2.0], temperature=0, logit_bias=((2, 0.5),)) == {2: 1.0}
    assert probs([1.0, 2.0, 1.9], [1], temperature=0, repeat_penalty=1.2) == {2: 1.0}


def test_top_k() -> None:
    assert probs(ROW, top_k=1) == {3: 1.0}
    assert probs(ROW, top_k=2) == pytest.approx({3: 2 / 3, 0: 1 / 3})
    assert probs(ROW, top_k=5) == pytest.approx(PROBS)
    assert probs(ROW, top_k=50) == pytest.approx(PROBS)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.3, [3]), (0.51, [0, 3]), (0.74, [0, 3]), (0.76, [0, 3, 4]), (0.999, [0, 1, 2, 3, 4])]
)
def test_top_p_includes_the_token_that_reaches_the_mass(top_p: float, kept: list[int]) -> None:
    found = probs(ROW, top_p=top_p)
    assert list(found) == kept
    total = sum(PROBS[token] for token in kept)
    assert found == pytest.approx({token: PROBS[token] / total for token in kept})


@pytest.mark.parametrize(
    ("min_p", "kept"), [(1.0, [3]), (0.51, [3]), (0.49, [0, 3]), (0.2, [0, 3, 4]), (0.1, [0, 1, 2, 3, 4])]
)
def test_min_p_is_relative_to_the_best(min_p: float, kept: list[int]) -> None:
    assert list(probs(ROW, min_p=min_p)) == kept


@pytest.mark.parametrize(
    ("num_sigma", "kept"),
    [(0.5, [3]), (0.85, [3]), (0.86, [0, 3]), (1.7, [0, 3]), (1.72, [0, 3, 4]), (2.6, [0, 1, 2, 3, 4])],
)
def test_top_n_sigma_counts_standard_deviations_below_the_best(num_sigma: float, kept: list[int]) -> None:
    """In bits below the best 0, 1, 2, 3, 3: deviation 1.166, so the others are 0.857, 1.715 and 2.572 of it below."""
    assert list(probs(ROW, top_n_sigma=num_sigma)) == kept


def test_top_n_sigma_ignores_impossible_tokens() -> None:
    """Of 0 and 2 alone: mean 1, deviation 1."""
    row = [0.0, 2.0, -math.inf, -math.inf]
    assert list(probs(row, top_n_sigma=1.9)) == [1]
    assert list(probs(row, top_n_sigma=2.1)) == [0, 1]
    assert probs([-math.inf, 3.0], top_n_sigma=0.01) == {1: 1.0}
    assert probs(np.zeros(3), top_n_sigma=0.01) == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
    assert probs([0.0, 2.0], top_n_sigma=-1) == probs([0.0, 2.0])


@pytest.mark.parametrize(
    ("typical_p", "size"), [(0.2, 1), (0.24, 1), (0.26, 2), (0.7, 2), (0.8, 3), (0.9, 4), (0.95, 5)]
)
def test_typical_keeps_what_is_as_surprising_as_expected(typical_p: float, size: int) -> None:
    """Entropy 1.875 bits; surprises 1, 2, 3, 4, 4, so the nearest is 2 (token 0), then 1 (3), 3 (4), 4 (1, 2)."""
    order = [0, 3, 4, 1, 2][:size]
    found = probs(ROW, typical_p=typical_p)
    total = sum(PROBS[token] for token in order)
    assert found == pytest.approx({token: PROBS[token] / total for token in order})


def test_typical_may_drop_the_best_token() -> None:
    row = np.log([0.4, *[0.05] * 12])
    assert 0 not in probs(row, typical_p=0.32)
    # Twelve equal ones are nearest; their mass passes 0.32 with the seventh. Greedy takes the first of what is left.
    assert len(probs(row, typical_p=0.32)) == 7
    assert probs(row, typical_p=0.32, temperature=0) == {1: 1.0}
    assert probs([0.0, -math.inf], typical_p=0.5) == {0: 1.0}


def test_xtc_is_the_mixture_of_its_two_outcomes() -> None:
    """Above 0.1 are 0.5, 0.25 and 0.125; the least likely of them stays, with all below."""
    removed = {4: 0.5, 1: 0.25, 2: 0.25}
    found = probs(ROW, xtc_probability=0.3, xtc_threshold=0.1)
    assert found == pytest.approx({token: 0.7 * PROBS[token] + 0.3 * removed.get(token, 0.0) for token in PROBS})
    assert probs(ROW, xtc_probability=1.0, xtc_threshold=0.1) == pytest.approx(removed)
    assert probs(ROW, xtc_probability=0.0, xtc_threshold=0.1) == pytest.approx(PROBS)


@pytest.mark.parametrize("threshold", [0.51, 0.5, 0.3, 1.0])
def test_xtc_needs_two_tokens_above_its_threshold(threshold: float) -> None:
    assert probs(ROW, xtc_probability=1.0, xtc_threshold=threshold) == pytest.approx(PROBS)


def test_xtc_between_equal_tokens_keeps_one() -> None:
    assert probs(np.zeros(2), xtc_probability=1.0, xtc_threshold=0.5) == {1: 1.0}
    assert probs(np.zeros(2), xtc_probability=0.5, xtc_threshold=0.5) == pytest.approx({0: 0.25, 1: 0.75})


def test_xtc_at_zero_temperature_is_a_coin_between_two_tokens() -> None:
    assert probs(ROW, xtc_probability=0.3, xtc_threshold=0.1, temperature=0) == pytest.approx({3: 0.7, 4: 0.3})
    assert probs(ROW, xtc_probability=1.0, xtc_threshold=0.1, temperature=0) == {4: 1.0}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_xtc_with_threshold_zero_keeps_the_least_likely_possible_token(dtype: type) -> None:
    row = np.array([1.0, 0.0, -np.inf, -1.0], dtype=dtype)
    params = SamplingParams(**OFF, xtc_probability=1.0, xtc_threshold=0.0)  # type: ignore[arg-type]
    assert as_dict(Sampler(params, 4).distribution(row)) == {3: 1.0}


def test_dynamic_temperature_follows_the_entropy() -> None:
    """Equal tokens have all the entropy there is, a certain one none."""
    assert probs(np.zeros(4), dynatemp_range=0.5) == pytest.approx(dict.fromkeys(range(4), 0.25))
    # Entropy 1.875 bits of log2(5): the place in 0.5 ... 1.5.
    for exponent in (0.5, 1.0, 2.0, 0.0):
        temperature = 0.5 + (1.875 / math.log2(5)) ** exponent
        found = probs(ROW, dynatemp_range=0.5, dynatemp_exponent=exponent)
        assert found == pytest.approx(probs(ROW, temperature=temperature))


def test_dynamic_temperature_does_not_go_below_zero() -> None:
    place = 1.875 / math.log2(5)
    assert probs(ROW, temperature=0.5, dynatemp_range=3.0) == pytest.approx(probs(ROW, temperature=3.5 * place))
    assert probs([5.0, -math.inf], temperature=0.5, dynatemp_range=1.0) == {0: 1.0}
    assert not SamplingParams(temperature=0, dynatemp_range=0.5).is_greedy
    assert probs(ROW, temperature=0, dynatemp_range=0.5) == pytest.approx(probs(ROW, temperature=0.5 * place))


def test_dynamic_temperature_normalizes_by_the_candidates_that_are_left() -> None:
    """Of 0.5 and 0.25 alone: entropy 0.918 bits of 1."""
    entropy = -(2 / 3 * math.log2(2 / 3) + 1 / 3 * math.log2(1 / 3))
    expected = probs(ROW, top_k=2, temperature=0.5 + entropy)
    assert probs(ROW, top_k=2, dynatemp_range=0.5) == pytest.approx(expected)


def test_mirostat_2_keeps_what_is_within_the_budget() -> None:
    """Surprises 1 ... 4 bits; the budget begins at 2 tau and follows what was chosen."""
    sampler = Sampler(SamplingParams(**OFF, mirostat=2, mirostat_tau=1.25, mirostat_eta=1.0), 5)  # type: ignore[arg-type]
    first = as_dict(sampler.distribution(ROW, [7], []))
    assert first == pytest.approx({3: 2 / 3, 0: 1 / 3})
    # 2.5 bits - (0.585 - 1.25) = 3.165: one more token; then the budget falls by 2.585 - 1.25 with token 4.
    second = as_dict(sampler.distribution(ROW, [7], [3]))
    assert list(second) == [0, 3, 4]
    assert second[4] == pytest.approx(1 / 7)
    third = as_dict(sampler.distribution(ROW, [7], [3, 4]))
    assert list(third) == [3]
    # Back to the other branch: 2.5 - (1.585 - 1.25).
    assert list(as_dict(sampler.distribution(ROW, [7, 0], []))) == [0, 3]


def test_mirostat_always_keeps_the_best_token() -> None:
    for version in (1, 2):
        assert probs(ROW, mirostat=version, mirostat_tau=0.0) == {3: 1.0}
        assert probs(ROW, mirostat=version, temperature=0) == {3: 1.0}


def test_mirostat_replaces_all_truncations_and_penalties() -> None:
    for version in (1, 2):
        plain = probs(ROW, [3, 3], mirostat=version)
        other = probs(
            ROW, [3, 3], mirostat=version, top_k=1, top_p=0.1, min_p=1, typical_p=0.1, top_n_sigma=0.1,
            repeat_penalty=9, dry_multiplier=9.0, xtc_probability=1.0, dynatemp_range=1.0,
        )  # fmt: skip
        assert plain == other
        assert probs(ROW, mirostat=version, logit_bias=((2, 50.0),)) == pytest.approx({2: 1.0})


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "row",
    [np.zeros(4), [0.0], [0.0, -np.inf, -np.inf], [0.0, 0.0, -np.inf], [0.0, -1e4, -1e4], [90.0, -90.0], [0.0, 1e-9]],
    ids=str,
)
def test_mirostat_is_a_distribution_on_any_row_with_any_budget(row: Any, dtype: type, version: int) -> None:
    row = np.asarray(row, dtype=dtype)
    for tau, eta in ((0.0, 0.0), (0.0, 100.0), (100.0, 100.0), (5.0, 0.1)):
        params = SamplingParams(**OFF, mirostat=version, mirostat_tau=tau, mirostat_eta=eta)  # type: ignore[arg-type]
        sampler = Sampler(params, row.size)
        path: list[int] = []
        for _ in range(4):
            found = sampler.distribution(row, [0], path)
            assert np.isfinite(found.probs).all()
            assert found.probs.sum() == pytest.approx(1)
            path.append(found.sample(np.random.default_rng(len(path))))


def test_mirostat_goes_on_where_a_row_was_not_asked_for() -> None:
    """A draft model does not see the row of the bonus token: its budget stays what it was, not the first one."""
    params = SamplingParams(**OFF, mirostat=2, mirostat_tau=1.0, mirostat_eta=1.0)  # type: ignore[arg-type]
    mirostat = Mirostat(params, 5)
    budgets = []
    for tokens in ([1], [1, 3], [1, 3, 3, 3]):
        mirostat.distribution(None, ROW, tokens, [])
        budgets.append(mirostat._budgets[len(tokens)][0])
    assert budgets == pytest.approx([2.0, 2.0 - (math.log2(1.5) - 1), 2.0 - (math.log2(1.5) - 1)])


def test_mirostat_forgets_old_positions() -> None:
    mirostat = Mirostat(SamplingParams(**OFF, mirostat=2), 5)  # type: ignore[arg-type]
    for size in range(1, 600):
        mirostat.distribution(None, ROW, [3] * size, [])
    assert 200 < len(mirostat._budgets) < 300


# ------------------------------------------------------------------ a constraint


class Only:
    """Allows the same tokens everywhere."""

    def __init__(self, *ids: int) -> None:
        self._ids = np.array(ids)

    def allowed(self, tokens: Sequence[int], path: Sequence[int]) -> np.ndarray:
        return self._ids


def constrained(ids: Sequence[int], **settings: object) -> dict[int, float]:
    params = SamplingParams(**{**OFF, **settings})  # type: ignore[arg-type]
    return as_dict(Sampler(params, 5, Only(*ids)).distribution(ROW))


def test_a_constraint_removes_everything_else_before_the_cuts() -> None:
    assert constrained([0, 1, 4]) == pytest.approx({0: 4 / 7, 1: 1 / 7, 4: 2 / 7})
    assert constrained([1, 2, 4], top_k=1) == {4: 1.0}
    assert constrained([1, 2, 4], top_p=0.4) == {4: 1.0}
    assert constrained([1, 2, 4], min_p=0.9) == {4: 1.0}
    assert constrained([0, 4], temperature=0) == {0: 1.0}
    assert constrained([2], temperature=0) == constrained([2]) == constrained([2], typical_p=0.1) == {2: 1.0}
    assert constrained([0, 1, 4], xtc_probability=1.0, xtc_threshold=0.2) == pytest.approx({1: 1 / 3, 4: 2 / 3})
    assert constrained([0, 1, 4], top_n_sigma=0.1) == {0: 1.0}


def test_a_constraint_sees_the_drafted_tokens() -> None:
    constraint = Alternating(5, 2)
    sampler = Sampler(SamplingParams(**OFF), 5, constraint)  # type: ignore[arg-type]
    assert list(as_dict(sampler.distribution(ROW, [0, 1], []))) == [0, 2, 3, 4]
    assert list(as_dict(sampler.distribution(ROW, [0, 1], [2]))) == [1, 3, 4]
    assert constraint.asked == [(0, 1), (0, 1, 2)]


def test_a_constraint_may_allow_tokens_of_the_longer_vocabulary() -> None:
    params = SamplingParams(**OFF)  # type: ignore[arg-type]
    assert as_dict(Sampler(params, 3, Only(0, 2, 3, 4)).distribution(np.zeros(5))) == pytest.approx({0: 0.5, 2: 0.5})


def test_candidates_are_what_the_constraint_allows_after_bias_and_penalties() -> None:
    params = SamplingParams(**OFF, logit_bias=((0, 1.0),), presence_penalty=2.0)  # type: ignore[arg-type]
    ids, values = Sampler(params, 5, Only(0, 3)).candidates(np.zeros(5), [3])
    assert ids is not None
    assert (ids.tolist(), values.tolist()) == ([0, 3], [1.0, -2.0])
    ids, values = Sampler(params, 5).candidates(np.zeros(5), [3])
    assert (ids, values.tolist()) == (None, [1.0, 0.0, 0.0, -2.0, 0.0])
    assert sampling.top_two(np.array([4, 7, 9]), np.array([1.0, 3.0, 2.0])) == ((7, 3.0), (9, 2.0))


# ------------------------------------------------------------------ the first transforms by hand


def test_logit_bias_adds_up() -> None:
    assert probs(np.zeros(3), logit_bias=((1, math.log(2)), (1, math.log(2)))) == pytest.approx(
        {0: 1 / 6, 1: 4 / 6, 2: 1 / 6}
    )
    assert probs(np.zeros(3), logit_bias=((1, -math.inf),)) == pytest.approx({0: 0.5, 2: 0.5})


def test_bias_outside_the_vocabulary_concerns_the_other_model() -> None:
    assert probs(np.zeros(2), logit_bias=((2, 5.0), (9, 1.0))) == pytest.approx({0: 0.5, 1: 0.5})


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_once() -> None:
    row = np.array([2.0, -2.0, 0.0, 1.0])
    expected = np.exp([1.0, -4.0, 0.0, 1.0])
    found = probs(row, [0, 0, 0, 1, 2], repeat_penalty=2.0)
    assert list(found.values()) == pytest.approx(expected / expected.sum())


def test_frequency_counts_and_presence_does_not() -> None:
    expected = np.exp([0.0 - 3 * 0.5 - 0.25, 0.0 - 0.5 - 0.25, 0.0])
    found = probs(np.zeros(3), [0, 1, 0, 0], frequency_penalty=0.5, presence_penalty=0.25)
    assert list(found.values()) == pytest.approx(expected / expected.sum())


def test_negative_penalties_reward() -> None:
    assert probs(np.zeros(2), [1], presence_penalty=-math.log(3)) == pytest.approx({0: 0.25, 1: 0.75})


def test_history_beyond_the_vocabulary_is_ignored() -> None:
    assert probs(np.zeros(2), [5, 7], presence_penalty=1.0) == pytest.approx({0: 0.5, 1: 0.5})


def test_the_row_is_left_alone() -> None:
    row = ROW.copy()
    probs(row, [0, 1], repeat_penalty=1.5, logit_bias=((2, 1.0),), top_k=3, top_p=0.9, min_p=0.1, temperature=0.3)
    assert row.tolist() == ROW.tolist()


def test_padding_is_never_produced() -> None:
    row = np.array([0.0, 0.0, 99.0])
    for settings in ({}, {"top_k": 2}, {"top_p": 0.9}, {"temperature": 0}):
        params = SamplingParams(**{**OFF, **settings})  # type: ignore[arg-type]
        assert 2 not in as_dict(Sampler(params, 2).distribution(row))


# ------------------------------------------------------------------ order of application


def test_top_p_counts_mass_among_the_top_k() -> None:
    """Of 0.5, 0.25, 0.125 the first two hold 0.857; of everything they hold 0.75 and top-p 0.8 would take a third."""
    assert list(probs(ROW, top_k=3, top_p=0.8)) == [0, 3]
    assert list(probs(ROW, top_p=0.8)) == [0, 3, 4]


def test_temperature_comes_last() -> None:
    """A high temperature would flatten the row before top-p and min-p, a low one would sharpen it."""
    for temperature in (0.1, 10.0):
        assert list(probs(ROW, top_p=0.7, temperature=temperature)) == [0, 3]
        assert list(probs(ROW, min_p=0.4, temperature=temperature)) == [0, 3]


def test_bias_and_penalties_come_before_the_cuts() -> None:
    assert list(probs(ROW, top_k=1, logit_bias=((2, 5.0),))) == [2]
    assert list(probs(ROW, [3, 3], top_k=1, frequency_penalty=1.0)) == [0]
    assert list(probs(ROW, [3], top_p=0.4, presence_penalty=2.0)) == [0]
    assert list(probs(ROW, min_p=1.0, logit_bias=((2, 5.0),))) == [2]


def test_top_n_sigma_comes_before_top_k() -> None:
    """The deviation is that of all tokens, not of the best ones."""
    row = [0.0, -1.0, -1.5, -9.0, -9.0]
    assert list(probs(row, top_n_sigma=0.5, top_k=3)) == [0, 1, 2]
    assert list(probs(row[:3], top_n_sigma=0.5)) == [0]


def test_typical_comes_after_top_k_and_before_top_p() -> None:
    """Of 0.57, 0.29, 0.14 the second is nearest to the entropy of 1.38 bits; of all, too, but 3 comes next."""
    assert list(probs(ROW, top_k=3, typical_p=0.3)) == [0, 3]
    # Top-p first would keep token 3 alone.
    assert list(probs(ROW, typical_p=0.2, top_p=0.5)) == [0]
    assert list(probs(ROW, top_p=0.5, typical_p=0.2)) == [0]


def test_xtc_comes_after_min_p_and_before_the_temperature() -> None:
    """Of what min-p leaves, 0.57, 0.29 and 0.14, two are above 0.2; at a high temperature all three would be."""
    found = probs(ROW, min_p=0.2, xtc_probability=1.0, xtc_threshold=0.2, temperature=100.0)
    assert list(found) == [0, 4]


def test_dynamic_temperature_is_that_of_each_outcome_of_xtc() -> None:
    kept = [1, 2, 4]
    alone = probs(ROW[kept], dynatemp_range=0.5)
    expected = {token: 0.5 * prob for token, prob in probs(ROW, dynatemp_range=0.5).items()}
    for place, token in enumerate(kept):
        expected[token] += 0.5 * alone[place]
    assert probs(ROW, dynatemp_range=0.5, xtc_probability=0.5) == pytest.approx(expected)


def test_dry_comes_after_the_penalties_and_before_the_cuts() -> None:
    """0.5 of the repeat penalty on a logit of 1, then 2 less; the other way round the sign would differ."""
    row = [1.0, 0.0, 0.0]
    found = probs(row, [1, 1, 0, 1, 1], repeat_penalty=2.0, dry_multiplier=2.0)
    assert found[0] / found[2] == pytest.approx(math.exp(0.5 - 2.0))
    assert 0 not in probs(row, [1, 1, 0, 1, 1], top_k=2, dry_multiplier=2.0)


def test_bias_comes_before_the_penalties() -> None:
    """Otherwise the repeat penalty would meet another sign."""
    found = probs([-1.0, 0.0], [0], repeat_penalty=2.0, logit_bias=((0, 3.0),))
    assert found[0] / found[1] == pytest.approx(math.e)


# ------------------------------------------------------------------ history


@pytest.mark.parametrize(
    ("last_n", "expected"),
    [(0, []), (1, [9]), (2, [8, 9]), (3, [3, 8, 9]), (4, [2, 3, 8, 9]), (64, [1, 2, 3, 8, 9]), (-1, [1, 2, 3, 8, 9])],
)
def test_penalties_and_dry_see_the_end_of_tokens_and_path(last_n: int, expected: list[int]) -> None:
    params = SamplingParams(**OFF, repeat_last_n=last_n, presence_penalty=50.0)  # type: ignore[arg-type]
    found = Sampler(params, 10).distribution(np.zeros(10), [1, 2, 3], [8, 9])
    assert [token for token in range(10) if found.prob(token) < 1e-9] == sorted(expected)


@pytest.mark.parametrize(("last_n", "expected"), [(0, []), (4, []), (5, [5]), (6, [5]), (7, [4, 5]), (-1, [4, 5])])
def test_dry_sees_the_end_of_tokens_and_path(last_n: int, expected: list[int]) -> None:
    """9 came before 4 six tokens ago, before 5 four tokens ago."""
    params = SamplingParams(**OFF, dry_last_n=last_n, dry_multiplier=50.0, dry_allowed_length=1)  # type: ignore[arg-type]
    found = Sampler(params, 10).distribution(np.zeros(10), [9, 4, 9, 5, 1], [2, 9])
    assert [token for token in range(10) if found.prob(token) < 1e-9] == expected


def test_penalties_that_are_off_look_at_nothing() -> None:
    assert SamplingParams().penalty_window == SamplingParams().dry_window == 0
    assert SamplingParams(repeat_penalty=2.0).penalty_window == 64
    assert SamplingParams(repeat_penalty=2.0, repeat_last_n=-1).penalty_window is None
    assert SamplingParams(repeat_penalty=2.0, mirostat=2).penalty_window == 0
    assert SamplingParams(dry_multiplier=1.0).dry_window == 64
    assert SamplingParams(dry_multiplier=1.0, dry_last_n=-1).dry_window is None
    assert SamplingParams(dry_multiplier=1.0, dry_base=0.9).dry_window == 0
    assert SamplingParams(dry_multiplier=1.0, mirostat=1).dry_window == 0


# ------------------------------------------------------------------ against the reference


@st.composite
def settings_and_rows(draw: st.DrawFn) -> tuple[SamplingParams, np.ndarray, list[int]]:
    size = draw(st.integers(2, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = rng.standard_normal(size) * draw(st.sampled_from([0.1, 1.0, 5.0]))
    if draw(st.booleans()):
        row[rng.random(size) < 0.2] = -np.inf
        row[0] = 0.0
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0])),
        top_k=draw(st.integers(0, size + 2)),
        top_p=draw(st.sampled_from([1.0, 0.99, 0.95, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        top_n_sigma=draw(st.sampled_from([0.0, 0.0, 0.7, 2.0])),
        typical_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.3])),
        xtc_probability=draw(st.sampled_from([0.0, 0.0, 0.4, 1.0])),
        xtc_threshold=draw(st.sampled_from([0.0, 0.1, 0.3, 0.6])),
        dynatemp_range=draw(st.sampled_from([0.0, 0.0, 0.3, 5.0])),
        dynatemp_exponent=draw(st.sampled_from([0.5, 1.0, 3.0])),
        dry_multiplier=draw(st.sampled_from([0.0, 0.0, 0.8])),
        dry_last_n=draw(st.sampled_from([64, 5, -1])),
        dry_allowed_length=draw(st.integers(1, 3)),
        repeat_last_n=draw(st.sampled_from([64, 3, 0, -1])),
        repeat_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3])),
        logit_bias=draw(st.sampled_from([(), ((1, 2.0),), ((1, -math.inf), (0, 1.0))])),
    )
    history = rng.integers(0, min(size + 2, draw(st.sampled_from([2, 3, 99]))), draw(st.integers(0, 12))).tolist()
    return params, row, history


def without_rounding(params: SamplingParams) -> SamplingParams:
    """What decides by a comparison of sums or of the entropy may fall the other way in single precision."""
    return dataclasses.replace(params, typical_p=1.0, xtc_threshold=0.6 if params.xtc_threshold > 0.0 else 0.0)


@given(settings_and_rows())
def test_equals_the_reference(case: tuple[SamplingParams, np.ndarray, list[int]]) -> None:
    params, row, history = case
    sampler = Sampler(params, row.size)
    found = sampler.distribution(row, history)
    assert np.isfinite(found.probs).all()
    assert found.probs.sum() == pytest.approx(1, abs=1e-12)
    assert distance(as_dict(found), reference_probs(row.tolist(), params, history)) < 1e-12


@given(settings_and_rows())
def test_single_precision_rows_give_nearly_the_same(case: tuple[SamplingParams, np.ndarray, list[int]]) -> None:
    params, row, history = without_rounding(case[0]), case[1], case[2]
    sampler = Sampler(params, row.size)
    single = sampler.distribution(row.astype(np.float32), history)
    expected = reference_probs(row.astype(np.float32).tolist(), params, history)
    assert distance(as_dict(single), expected) < 1e-4


@given(settings_and_rows())
def test_a_top_k_of_everything_changes_nothing(case: tuple[SamplingParams, np.ndarray, list[int]]) -> None:
    params, row, history = case
    found = [
        as_dict(Sampler(dataclasses.replace(params, top_k=k), row.size).distribution(row, history))
        for k in (0, row.size, row.size + 7)
    ]
    assert found[0] == found[1] == found[2]


@st.composite
def mirostat_cases(draw: st.DrawFn) -> tuple[SamplingParams, np.ndarray, list[int]]:
    size = draw(st.integers(2, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = rng.standard_normal((3, size)) * draw(st.sampled_from([0.3, 1.0, 4.0]))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
        mirostat=draw(st.sampled_from([1, 2])),
        mirostat_tau=draw(st.sampled_from([0.5, 1.0, 3.0, 5.0])),
        mirostat_eta=draw(st.sampled_from([0.0, 0.1, 1.0])),
        logit_bias=draw(st.sampled_from([(), ((1, 2.0),)])),
    )
    return params, rows, rng.integers(0, size, 3).tolist()


@given(mirostat_cases(), st.integers(0, 3), st.booleans())
def test_mirostat_equals_the_reference(
    case: tuple[SamplingParams, np.ndarray, list[int]], num_committed: int, constrained: bool
) -> None:
    """Row after row, the budget following random tokens; wherever drafting begins."""
    params, rows, prompt = case
    size = rows.shape[1]
    constraint = Alternating(size, 3) if constrained and size > 2 else None
    sampler = Sampler(params, size, constraint)
    rng = np.random.default_rng(0)
    answer: list[int] = []
    for step in range(4):
        tokens = [*prompt, *answer]
        committed = min(num_committed, step)
        found = as_dict(sampler.distribution(rows[step % 3], [*prompt, *answer[:committed]], answer[committed:]))
        expected = reference_mirostat(
            lambda before: rows[(len(before) - 3) % 3].tolist(),
            params,
            tokens,
            3,
            allowed_after=(lambda before: constraint.allowed(before).tolist()) if constraint else lambda before: None,
        )
        assert distance(found, expected) < 1e-9
        answer.append(int(rng.choice(list(expected))))


@given(
    st_np.arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1)).filter(lambda weights: weights.sum() > 0),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)
def test_nucleus_preselection_changes_nothing(weights: np.ndarray, top_p: float) -> None:
    """The nucleus by a full sort, without leaving out small weights first."""
    mask = sampling._nucleus(weights, top_p)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order])
    needed = top_p * weights.sum()
    size = int(mask.sum())
    assert set(weights[mask]) == set(weights[order[:size]])
    slack = 1e-12 * weights.sum()
    assert mass[size - 1] >= needed - slack
    assert size == 1 or mass[size - 2] < needed + slack


def test_nucleus_of_equal_weights() -> None:
    for size in (1, 2, 3, 7, 100):
        for top_p in (0.001, 0.5, 0.95, 1 - 1e-12):
            mask = sampling._nucleus(np.ones(size), top_p)
            assert int(mask.sum()) in {math.ceil(top_p * size - 1e-9), math.ceil(top_p * size)}


# ------------------------------------------------------------------ ties, infinities, extremes


@given(st.lists(st.integers(0, 2), min_size=2, max_size=9), st.integers(1, 9))
def test_ties_keep_exactly_k_of_the_best(values: list[int], top_k: int) -> None:
    row = np.array(values, dtype=np.float64)
    found = probs(row, top_k=top_k)
    kept = min(top_k, row.size)
    assert len(found) == kept
    assert sorted((values[token] for token in found), reverse=True) == sorted(values, reverse=True)[:kept]
    assert found == probs(row, top_k=top_k)


def test_ties_are_all_kept_by_min_p() -> None:
    assert list(probs([1.0, 1.0, 0.0, 1.0], min_p=1.0)) == [0, 1, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.1}, {"temperature": 0}, {"typical_p": 0.5},
        {"top_n_sigma": 1.0}, {"xtc_probability": 0.5, "xtc_threshold": 0.0}, {"dynatemp_range": 0.5}, {"mirostat": 1},
        {"mirostat": 2}, {"dry_multiplier": 100.0, "dry_base": 100.0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_tokens_stay_impossible(settings: dict[str, float], dtype: type) -> None:
    row = np.array([0.0, -np.inf, 1.0, -np.inf, -np.inf], dtype=dtype)
    params = SamplingParams(
        **{**OFF, **settings},
        repeat_penalty=1.2,
        presence_penalty=1,
        logit_bias=((0, -math.inf),),  # type: ignore[arg-type]
    )
    assert as_dict(Sampler(params, 5).distribution(row, [1, 2, 2])) == {2: 1.0}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("temperature", [1e-320, 1e-60, 1e-42, 1e-30, 1e-5])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float, dtype: type) -> None:
    """Neither 0/0 nor an overflow on the way."""
    row = np.array([1.0, 3.0, -2.0, 2.0], dtype=dtype)
    params = SamplingParams(**{**OFF, "temperature": temperature})  # type: ignore[arg-type]
    assert as_dict(Sampler(params, 4).distribution(row)) == {1: 1.0}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_huge_temperature_is_uniform(dtype: type) -> None:
    row = np.array([1.0, 3.0, -2.0, -np.inf], dtype=dtype)
    params = SamplingParams(**{**OFF, "temperature": 1e300})  # type: ignore[arg-type]
    assert as_dict(Sampler(params, 4).distribution(row)) == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bias", [1e300, -1e300])
def test_a_huge_bias_decides(bias: float, dtype: type) -> None:
    params = SamplingParams(**OFF, logit_bias=((1, bias),))  # type: ignore[arg-type]
    found = as_dict(Sampler(params, 2).distribution(np.zeros(2, dtype=dtype)))
    assert found == {1 if bias > 0 else 0: 1.0}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_penalties_stay_finite(dtype: type) -> None:
    """The longest repetition that the exponent allows, and the smallest divisor: neither overflows nor warns."""
    row = np.array([1.0, 2.0, 3.0, -5.0], dtype=dtype)
    dry = SamplingParams(**OFF, dry_multiplier=100.0, dry_base=100.0, dry_last_n=-1)  # type: ignore[arg-type]
    assert set(as_dict(Sampler(dry, 4).distribution(row, [2] * 500))) == {0, 1, 3}
    divided = SamplingParams(**OFF, repeat_penalty=0.01)  # type: ignore[arg-type]
    assert as_dict(Sampler(divided, 4).distribution(row, [1, 3]))[1] == pytest.approx(1.0)
    many = SamplingParams(**OFF, repeat_last_n=-1, frequency_penalty=100.0, presence_penalty=100.0)  # type: ignore[arg-type]
    assert set(as_dict(Sampler(many, 4).distribution(row, [2] * 5000))) == {0, 1, 3}
    biased = SamplingParams(**OFF, logit_bias=((2, 1e300),) * 3, repeat_penalty=0.01, dry_multiplier=100.0)  # type: ignore[arg-type]
    assert as_dict(Sampler(biased, 4).distribution(row, [2] * 50)) == {2: 1.0}


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.5}, {"top_n_sigma": 1.0}, {"mirostat": 1},
        {"mirostat": 2}, {"xtc_probability": 0.5}, {"dynatemp_range": 0.5}, {"temperature": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_row_without_any_possible_token_never_gives_nan(settings: dict[str, float]) -> None:
    params = SamplingParams(**{**OFF, **settings})  # type: ignore[arg-type]
    try:
        found = Sampler(params, 3).distribution(np.full(3, -np.inf))
    except UsageError:
        return
    assert np.isfinite(found.probs).all()


# ------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        *[("temperature", value, "temperature") for value in (-0.1, math.nan, math.inf, -math.inf)],
        *[("top_k", value, "top-k") for value in (-1,)],
        *[("top_p", value, "top-p") for value in (0, 0.0, -0.5, 1.5, math.nan, math.inf)],
        *[("min_p", value, "min-p") for value in (-0.01, 1.01, math.nan, math.inf)],
        *[("repeat_last_n", value, "repeat-last-n") for value in (-2,)],
        *[("repeat_penalty", value, "repeat-penalty") for value in (0, -1, math.nan, math.inf)],
        *[("presence_penalty", value, "presence-penalty") for value in (math.nan, math.inf, -math.inf, 101)],
        *[("frequency_penalty", value, "frequency-penalty") for value in (math.nan, math.inf, -101)],
        *[("typical_p", value, "typical-p") for value in (0, -0.5, 1.5, math.nan)],
        *[("top_n_sigma", value, "top-n-sigma") for value in (-2, math.nan, math.inf)],
        *[("xtc_probability", value, "xtc-probability") for value in (-0.1, 1.1, math.nan)],
        *[("xtc_threshold", value, "xtc-threshold") for value in (-0.1, 1.1, math.nan)],
        *[("dynatemp_range", value, "dynatemp-range") for value in (-0.1, 101, math.nan, math.inf)],
        *[("dynatemp_exponent", value, "dynatemp-exponent") for value in (-0.1, 101, math.nan, math.inf)],
        *[("dry_multiplier", value, "dry-multiplier") for value in (-0.1, 101, math.nan, math.inf)],
        *[("dry_base", value, "dry-base") for value in (-0.1, 101, math.nan, math.inf)],
        *[("dry_allowed_length", value, "dry-allowed-length") for value in (0, -1)],
        *[("dry_last_n", value, "dry-last-n") for value in (-2,)],
        *[("mirostat", value, "mirostat") for value in (-1, 3)],
        *[("mirostat_tau", value, "mirostat-tau") for value in (-1, 101, math.nan, math.inf)],
        *[("mirostat_eta", value, "mirostat-eta") for value in (-1, 101, math.nan, math.inf)],
        *[("logit_bias", ((7, value),), "logit-bias") for value in (math.nan, math.inf)],
        *[("seed", value, "seed") for value in (-1, 2**64)],
    ],
)
def test_a_value_out_of_range_names_the_option(field: str, value: object, option: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.message.startswith(option)
    shown = value[0][1] if isinstance(value, tuple) else value
    assert str(shown) in caught.value.message
    assert f"--{option}`" in caught.value.hint


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"top_k": 0, "top_p": 1, "min_p": 0},
        {"min_p": 1, "repeat_last_n": -1, "seed": 2**64 - 1},
        {"logit_bias": ((1, -math.inf),)},
        {"presence_penalty": -100, "frequency_penalty": 100},
    ],
    ids=str,
)
def test_values_at_the_edges_are_allowed(settings: dict[str, object]) -> None:
    SamplingParams(**settings)  # type: ignore[arg-type]


def test_an_empty_breaker_is_refused() -> None:
    with pytest.raises(UsageError, match="--dry-breaker must not be empty"):
        SamplingParams(dry_breakers=("a", ""))
    SamplingParams(dry_breakers=())


def test_defaults_are_llama_cpps() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.repeat_last_n, params.repeat_penalty) == (64, 1.0)
    assert (params.typical_p, params.xtc_probability, params.xtc_threshold) == (1.0, 0.0, 0.1)
    assert (params.dynatemp_range, params.dynatemp_exponent) == (0.0, 1.0)
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_last_n) == (0.0, 1.75, 2, 64)
    assert params.dry_breakers == ("\n", ":", '"', "*")
    assert (params.mirostat, params.mirostat_tau, params.mirostat_eta) == (0, 5.0, 0.1)
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy


# ------------------------------------------------------------------ what confidence and near-ties are read from


def test_top_probability() -> None:
    assert sampling.top_probability(ROW) == pytest.approx(0.5)
    assert sampling.top_probability(np.array([0.0, -np.inf])) == 1.0


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=9))
def test_top_two(values: list[int]) -> None:
    (best, high), (second, low) = sampling.top_two(None, np.array(values, dtype=np.float64))
    assert best != second
    assert [high, low] == sorted(values, reverse=True)[:2]
    assert (values[best], values[second]) == (high, low)
