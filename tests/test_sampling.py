"""Logits to distributions: every transform by hand, their order, and a slow reference on random rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from lossless import as_dict, distance, reference_probs

from specdec_cli import sampling
from specdec_cli.errors import UsageError
from specdec_cli.sampling import Sampler
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


def test_bias_comes_before_the_penalties() -> None:
    """Otherwise the repeat penalty would meet another sign."""
    found = probs([-1.0, 0.0], [0], repeat_penalty=2.0, logit_bias=((0, 3.0),))
    assert found[0] / found[1] == pytest.approx(math.e)


# ------------------------------------------------------------------ history


@pytest.mark.parametrize(
    ("last_n", "expected"),
    [(0, []), (1, [9]), (2, [8, 9]), (3, [3, 8, 9]), (4, [2, 3, 8, 9]), (64, [1, 2, 3, 8, 9]), (-1, [1, 2, 3, 8, 9])],
)
def test_history_is_the_end_of_tokens_and_path(last_n: int, expected: list[int]) -> None:
    sampler = Sampler(SamplingParams(repeat_last_n=last_n, presence_penalty=1.0), 10)
    assert sampler.history([1, 2, 3], [8, 9]) == expected


def test_history_is_empty_without_penalties() -> None:
    assert Sampler(SamplingParams(), 10).history([1, 2, 3], [4]) == []


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
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        repeat_last_n=draw(st.sampled_from([64, 3, 0, -1])),
        repeat_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3])),
        logit_bias=draw(st.sampled_from([(), ((1, 2.0),), ((1, -math.inf), (0, 1.0))])),
    )
    history = rng.integers(0, size + 2, draw(st.integers(0, 9))).tolist()
    return params, row, history


@given(settings_and_rows())
def test_equals_the_reference(case: tuple[SamplingParams, np.ndarray, list[int]]) -> None:
    params, row, history = case
    sampler = Sampler(params, row.size)
    found = sampler.distribution(row, sampler.history(history))
    assert np.isfinite(found.probs).all()
    assert found.probs.sum() == pytest.approx(1, abs=1e-12)
    assert distance(as_dict(found), reference_probs(row.tolist(), params, history)) < 1e-12


@given(settings_and_rows())
def test_single_precision_rows_give_nearly_the_same(case: tuple[SamplingParams, np.ndarray, list[int]]) -> None:
    params, row, history = case
    sampler = Sampler(params, row.size)
    single = sampler.distribution(row.astype(np.float32), sampler.history(history))
    expected = reference_probs(row.astype(np.float32).tolist(), params, history)
    assert distance(as_dict(single), expected) < 1e-4


@given(settings_and_rows())
def test_a_top_k_of_everything_changes_nothing(case: tuple[SamplingParams, np.ndarray, list[int]]) -> None:
    params, row, history = case
    found = [
        as_dict(Sampler(_with_top_k(params, k), row.size).distribution(row, history))
        for k in (0, row.size, row.size + 7)
    ]
    assert found[0] == found[1] == found[2]


def _with_top_k(params: SamplingParams, top_k: int) -> SamplingParams:
    names = [name for name in SamplingParams.__slots__ if name != "top_k"]
    return SamplingParams(**{name: getattr(params, name) for name in names}, top_k=top_k)


@given(
    st_np.arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1)).filter(lambda weights: weights.sum() > 0),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)
def test_nucleus_preselection_changes_nothing(weights: np.ndarray, top_p: float) -> None:
    """The nucleus by a full sort, without leaving out small weights first."""
    mask = Sampler._nucleus(weights, top_p)
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
            mask = Sampler._nucleus(np.ones(size), top_p)
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
    "settings", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.1}, {"temperature": 0}], ids=str
)
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


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
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


def test_defaults_are_llama_cpps() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.repeat_last_n, params.repeat_penalty) == (64, 1.0)
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy


# ------------------------------------------------------------------ what confidence and near-ties are read from


def test_top_probability() -> None:
    assert sampling.top_probability(ROW) == pytest.approx(0.5)
    assert sampling.top_probability(np.array([0.0, -np.inf])) == 1.0


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=9))
def test_top_two(values: list[int]) -> None:
    (best, high), (second, low) = sampling.top_two(np.array(values, dtype=np.float64))
    assert best != second
    assert [high, low] == sorted(values, reverse=True)[:2]
    assert (values[best], values[second]) == (high, low)
