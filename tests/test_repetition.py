"""Penalties and DRY alone: by hand, against a slow reference, and the breakers of a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lossless import reference_dry

from specdec_cli.repetition import dry_penalties, find_breakers, penalize
from specdec_cli.types import SamplingParams

DRY = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)


def test_penalties_are_in_place_and_once_a_token() -> None:
    row = np.array([4.0, -4.0, 0.0, 1.0], dtype=np.float32)
    penalize(row, [0, 1, 0, 2, 9], SamplingParams(repeat_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25))
    assert row.tolist() == [2.0 - 1.25, -8.0 - 0.75, -0.75, 1.0]


def test_what_is_impossible_stays_impossible() -> None:
    row = np.array([-np.inf, 0.0], dtype=np.float32)
    penalize(row, [0, 0, 1], SamplingParams(repeat_penalty=0.01, frequency_penalty=-100.0))
    assert row.tolist() == [-np.inf, 100.0]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], {}),
        ([5], {}),
        ([5, 5], {}),
        # The end `5 5` stood one token earlier, with overlap, and 5 followed.
        ([5, 5, 5], {5: 1.0}),
        ([5, 5, 5, 5], {5: 2.0}),
        ([1, 2, 3, 1], {}),
        ([1, 2, 3, 1, 2], {3: 1.0}),
        ([0, 1, 2, 3, 9, 0, 1, 2], {3: 2.0}),
        # Followed by 3 and by 4; the longer match of each counts.
        ([1, 2, 4, 0, 1, 2, 3, 0, 1, 2], {4: 1.0, 3: 2.0}),
        ([1, 2, 3, 0, 1, 2, 3, 0, 1, 2], {3: 2.0**4}),
    ],
)
def test_dry_by_hand(history: list[int], expected: dict[int, float]) -> None:
    assert dry_penalties(history, DRY, {}) == expected


@pytest.mark.parametrize(
    ("breakers", "expected"),
    [
        ({}, {3: 4.0}),
        # A token that is a breaker of its own cuts the repetition: `1 2` is left of `0 8 1 2`.
        ({8: [()]}, {3: 1.0}),
        ({1: [()]}, {}),
        ({2: [()]}, {}),
        # Two tokens: complete, incomplete, and complete only with what is not there yet.
        ({0: [(8,)]}, {3: 1.0}),
        ({0: [(7,)]}, {3: 4.0}),
        ({2: [(3,)]}, {3: 4.0}),
        # Of several tails the longest that fits counts.
        ({8: [(), (1,)]}, {}),
        # What would complete a repetition is not penalized when it is a breaker itself; as the head of one it is.
        ({3: [()]}, {}),
        ({3: [(5,)]}, {3: 4.0}),
    ],
    ids=str,
)
def test_dry_does_not_look_across_breakers(
    breakers: dict[int, list[tuple[int, ...]]], expected: dict[int, float]
) -> None:
    assert dry_penalties([0, 8, 1, 2, 3, 9, 0, 8, 1, 2], DRY, breakers) == expected


def test_dry_growth_is_limited_to_single_precision() -> None:
    params = SamplingParams(dry_multiplier=100.0, dry_base=2.0, dry_last_n=-1)
    assert dry_penalties([7] * 1000, params, {}) == {7: 1e30}
    params = SamplingParams(dry_multiplier=1e-20, dry_base=2.0, dry_last_n=-1)
    assert dry_penalties([7] * 1000, params, {}) == {7: pytest.approx(1e-20 * 2.0**127)}
    flat = SamplingParams(dry_multiplier=3.0, dry_base=1.0)
    assert dry_penalties([7] * 1000, flat, {}) == {7: 3.0}


token = st.integers(0, 3)


@given(
    st.lists(token, max_size=40),
    st.integers(1, 5),
    st.dictionaries(token, st.lists(st.lists(token, max_size=2).map(tuple), min_size=1, max_size=3), max_size=2),
)
def test_dry_equals_the_reference(
    history: list[int], allowed_length: int, breakers: dict[int, list[tuple[int, ...]]]
) -> None:
    params = SamplingParams(dry_multiplier=0.7, dry_base=1.3, dry_allowed_length=allowed_length)
    found = dry_penalties(history, params, breakers)
    assert found == pytest.approx(reference_dry(history, params, breakers, 4))


# ------------------------------------------------------------------ breakers of a vocabulary


class Words:
    """Just enough of a model: its pieces, and a tokenizer that takes the longest piece."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self.num_vocab = len(pieces)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self._pieces[token]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special
        assert not parse_special
        data, tokens = text.encode(), []
        while data:
            fitting = [index for index, piece in enumerate(self._pieces) if piece and data.startswith(piece)]
            tokens.append(max(fitting, key=lambda index: len(self._pieces[index])))
            data = data[len(self._pieces[tokens[-1]]) :]
        return tokens


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((), {}),
        (("c",), {2: [()], 4: [()]}),
        # `ab` inside token 3, or `a` and `b`; `ca` ends with the beginning of it.
        (("ab",), {0: [(1,)], 3: [()], 4: [(1,)]}),
        # Each token that ends with a beginning, with the tokens of the rest.
        (("abc",), {0: [(1, 2)], 3: [(2,)], 4: [(1, 2)]}),
        (("b", "ab"), {0: [(1,)], 1: [()], 3: [()], 4: [(1,)]}),
    ],
    ids=str,
)
def test_breakers_begin_in_any_token(texts: Sequence[str], expected: dict[int, list[tuple[int, ...]]]) -> None:
    model = Words(b"a", b"b", b"c", b"ab", b"ca", b"")
    assert find_breakers(texts, model) == expected  # type: ignore[arg-type]


def test_a_piece_may_begin_a_breaker_twice() -> None:
    """`aa` has both letters of `aab` or its second one is the first; the rest of the latter is `ab`."""
    found = find_breakers(("aab",), Words(b"a", b"b", b"aa"))  # type: ignore[arg-type]
    assert found == {0: [(0, 1)], 2: [(1,), (0, 1)]}


def test_long_breakers_are_cut_as_in_llama_cpp() -> None:
    """40 bytes, and 20 tokens behind the first one."""
    found = find_breakers(("a" * 50,), Words(b"a"))  # type: ignore[arg-type]
    assert found == {0: [(0,) * 20]}
    assert find_breakers(("é" * 30,), Words("é".encode() * 20)) == {0: [()]}  # type: ignore[arg-type]
