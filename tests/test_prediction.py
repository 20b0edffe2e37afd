from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_cli.prediction import LOOKAHEAD, MAX_DRAFT, calibrate, pass_times, predict_rate

PASSES = {1: 0.080, 2: 0.120, 3: 0.128, 5: 0.140, 9: 0.176}


def agreement(share: float, num: int = 200) -> list[bool]:
    """Matches at random places; those of a smaller share are among those of a larger one."""
    return (np.random.default_rng(7).random(num) < share).tolist()


def test_a_cheap_perfect_draft_is_worth_as_many_tokens_as_its_passes_hold() -> None:
    rate = predict_rate([0.99] * 400, [True] * 400, 0.001, PASSES)
    best = max((k + 1) / (0.001 * k + pass_times(PASSES)[k + 1]) for k in range(MAX_DRAFT + 1))
    assert rate == pytest.approx(best, rel=0.05)


def test_an_expensive_draft_is_not_asked() -> None:
    matches = agreement(0.8)
    assert predict_rate([0.8] * 200, matches, 0.2, PASSES) == 1 / PASSES[1]
    assert predict_rate([0.8] * 200, matches, 0.002, PASSES) > 1.2 / PASSES[1]


def test_more_agreement_is_faster() -> None:
    rates = [predict_rate([0.7] * 200, agreement(share), 0.02, PASSES) for share in (0.0, 0.5, 0.8, 0.95, 1.0)]
    assert rates == sorted(rates)
    assert rates[0] == 1 / PASSES[1]
    assert rates[-1] > 1.5 * rates[0]


def test_a_cheaper_step_is_faster() -> None:
    rates = [predict_rate([0.85] * 200, agreement(0.85), step_s, PASSES) for step_s in (0.06, 0.04, 0.02, 0.01)]
    assert rates == sorted(rates)


def test_four_tokens_can_pay_where_one_does_not() -> None:
    passes = {1: 1.0, 2: 2.1, 3: 2.12, 5: 2.2, 9: 2.4}
    assert 1 - (0.05 + passes[2] - passes[1]) < 0
    assert predict_rate([1.0] * 100, [True] * 100, 0.05, passes) > 2.5


def test_confidence_tells_where_to_draft() -> None:
    matches = agreement(0.6)
    told = predict_rate([0.98 if match else 0.1 for match in matches], matches, 0.02, PASSES)
    assert told > 1.1 * predict_rate([0.6] * 200, matches, 0.02, PASSES)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60),
    st.floats(0, 10),
    st.lists(st.floats(1e-4, 10), min_size=1, max_size=5),
)
def test_never_slower_than_without(places: list[tuple[float, bool]], step_s: float, times: list[float]) -> None:
    passes = dict(zip((1, 2, 3, 5, 9), times, strict=False))
    rate = predict_rate([c for c, _ in places], [m for _, m in places], step_s, passes)
    assert 1 / passes[1] <= rate <= (MAX_DRAFT + 1) / passes[1] * (1 + 1e-9)


def test_calibration_believes_what_happened() -> None:
    chances = calibrate([0.95] * 100 + [0.3] * 100, [True] * 50 + [False] * 50 + [True] * 100)
    assert chances[0] == pytest.approx(0.52, abs=0.02)
    assert chances[-1] > 0.95
    assert calibrate([0.5], [True])[0] < 0.7


def test_pass_times_never_fall_and_go_on() -> None:
    times = pass_times({1: 0.1, 2: 0.2, 3: 0.15, 5: 0.25, 9: 0.29})
    assert len(times) == MAX_DRAFT + LOOKAHEAD + 2
    assert (np.diff(times) >= 0).all()
    assert times[[1, 3, 4, 9, 13]] == pytest.approx([0.1, 0.2, 0.225, 0.29, 0.33])
    assert pass_times({1: 0.1})[9] == 0.1


def test_what_cannot_be_foretold() -> None:
    assert predict_rate([], [], 0.1, PASSES) == 1 / PASSES[1]
    with pytest.raises(ValueError, match="as many matches"):
        predict_rate([0.5], [], 0.1, PASSES)
    with pytest.raises(ValueError, match="one token"):
        predict_rate([0.5], [True], 0.1, {2: 0.1})
