"""The n-gram drafter: what it proposes against a slow reference, its speed, and that answers stay the target's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lossless import RandomPolicy
from test_engine import GREEDY, PLAIN, SETTINGS, Bench, assert_exact, collect, greedy_answer

from specdec_cli.draft_length import Fixed
from specdec_cli.drafters import NgramDrafter
from specdec_cli.drafters.ngram import (
    MAX_MATCH,
    MAX_OCCURRENCES,
    MAX_STORE_TOKENS,
    MAX_VOTERS,
    NAME,
    Guess,
    NgramIndex,
)
from specdec_cli.types import EMPTY_DRAFT, MAX_DRAFT_TOKENS, LengthPolicy

Tokens = list[int]


class Store:
    """Statistics as a table: context -> (token, share)."""

    def __init__(self, table: dict[tuple[int, ...], tuple[int, float]]) -> None:
        self.table = table
        self.num_asked = 0

    def best(self, last_tokens: Sequence[int]) -> tuple[int, float, int] | None:
        self.num_asked += 1
        for size in (3, 2):
            found = self.table.get(tuple(last_tokens[-size:])) if len(last_tokens) >= size else None
            if found:
                return (*found, size)
        return None


# ------------------------------------------------------------------ against a reference


def match_length(text: Tokens, end: int) -> int:
    """Tokens before `end` that agree with the last ones of the text."""
    length = 0
    while length < min(end, MAX_MATCH) and text[end - 1 - length] == text[len(text) - 1 - length]:
        length += 1
    return length


def recent_places(text: Tokens) -> Tokens:
    """Earlier ends of the last three tokens, or else of the last two; only the most recent ones."""
    for size in (3, 2):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        if ends and len(text) >= size:
            return ends[-MAX_OCCURRENCES:]
    return []


def reference(text: Tokens, limit: int) -> list[Guess]:
    """Every place, token by token."""
    places = recent_places(text)
    if not places:
        return []
    best = max(match_length(text, end) for end in places)
    voters = [end for end in places if match_length(text, end) == best][-MAX_VOTERS:]
    guesses: list[Guess] = []
    text = list(text)
    for step in range(limit):
        following = [text[end + step] for end in voters]
        counts = {token: following.count(token) for token in following}
        most = max(counts.values())
        token = next(token for token in reversed(following) if counts[token] == most)
        guesses.append(Guess(token, most / len(following), min(best + step, MAX_MATCH)))
        voters = [end for end in voters if text[end + step] == token]
        text.append(token)
    return guesses


def lookups(index: NgramIndex, limit: int) -> list[Guess]:
    return list(index.follow(*index.longest(), limit))


texts = st.integers(1, 4).flatmap(lambda num: st.lists(st.integers(0, num), max_size=80))
loops = st.builds(
    lambda head, loop, times: head + loop * times,
    st.lists(st.integers(0, 3), max_size=9),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.integers(1, 90),
)


@given(st.one_of(texts, loops), st.integers(1, 20))
def test_proposals_are_those_of_the_reference(text: Tokens, limit: int) -> None:
    index = NgramIndex()
    index.sync(text)
    assert lookups(index, limit) == reference(text, limit)
    draft = NgramDrafter().lookup(text, limit)
    expected = reference(text, limit)
    assert draft.tokens == tuple(guess.token for guess in expected)
    assert draft.confidences == tuple(guess.share * guess.length / (guess.length + 1.5) for guess in expected)
    assert set(draft.tokens) <= set(text)


@given(st.lists(st.one_of(texts, st.integers(0, 80)), max_size=8), texts)
def test_any_history_of_texts_gives_the_index_of_a_fresh_one(history: list[Tokens | int], last: Tokens) -> None:
    """Numbers cut the text before: that is how answers with a common prompt follow each other."""
    index, fresh, before = NgramIndex(), NgramIndex(), list[int]()
    for step in history:
        before = before[:step] if isinstance(step, int) else before[: len(before) // 2] + step
        index.sync(before)
        assert len(index) == len(before)
    for text in (before, last):
        index.sync(text)
        fresh = NgramIndex()
        fresh.sync(text)
        assert (index._tokens, index._ends) == (fresh._tokens, fresh._ends)


def test_an_interrupted_update_leaves_nothing_wrong() -> None:
    class Interrupting(list[int]):
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            return interrupted() if isinstance(key, slice) and key.stop is None else found

    def interrupted() -> Any:
        yield 5
        raise KeyboardInterrupt

    index = NgramIndex()
    index.sync([1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        index.sync(Interrupting([1, 2, 3, 5, 6]))
    index.sync([1, 2, 3, 1, 2])
    assert [guess.token for guess in lookups(index, 1)] == [3]


# ------------------------------------------------------------------ which continuation


def tokens_after(text: Tokens, limit: int = 3) -> Tokens:
    return list(NgramDrafter().lookup(text, limit).tokens)


def test_the_longest_match_wins_over_more_and_later_ones() -> None:
    assert tokens_after([9, 1, 2, 3, 7, 8, 1, 2, 3, 4, 8, 1, 2, 3, 4, 9, 1, 2, 3], 1) == [7]


def test_the_most_frequent_continuation_wins_and_the_latest_among_equals() -> None:
    assert tokens_after([1, 2, 5, 1, 2, 5, 1, 2, 6, 0, 1, 2], 1) == [5]
    assert tokens_after([0, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 1) == [6]


def test_a_loop_goes_on() -> None:
    assert tokens_after([1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert tokens_after([4, 4, 4], 5) == [4] * 5


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2, 3, 4], [1, 2, 1]])
def test_nothing_to_propose(text: Tokens) -> None:
    assert NgramDrafter().propose(text, Fixed(5), 5) == EMPTY_DRAFT


def test_drafts_are_chains_of_point_masses_with_a_name() -> None:
    drafter = NgramDrafter()
    draft = drafter.propose([1, 2, 3, 1, 2], Fixed(4), 9)
    assert (draft.tokens, draft.parents, draft.probs) == ((3, 1, 2, 3), (-1, 0, 1, 2), (None,) * 4)
    assert draft.drafters == (NAME,) * 4
    assert drafter.decode_s == 0.0


def test_confidence_grows_with_the_match_and_with_agreement() -> None:
    assert [Guess(0, 1.0, size).confidence for size in range(2, 9)] == sorted(
        Guess(0, 1.0, size).confidence for size in range(2, 9)
    )
    assert Guess(0, 0.5, 4).confidence < Guess(0, 0.75, 4).confidence
    confidences = NgramDrafter().lookup([7] * 300, 64).confidences
    assert all(0 < confidence < 1 for confidence in confidences)


# ------------------------------------------------------------------ how much


@pytest.mark.parametrize("limit", [-1, 0, 1, 3, 500])
def test_limit(limit: int) -> None:
    draft = NgramDrafter().lookup([1, 2, 3] * 20, limit)
    assert len(draft) == max(0, min(limit, MAX_DRAFT_TOKENS))


def test_a_draft_ends_with_a_stop_token() -> None:
    assert NgramDrafter({3}).lookup([1, 2, 4, 3, 5, 1, 2], 9).tokens == (4, 3)


def test_the_policy_for_this_drafter_says_how_many() -> None:
    class Named(LengthPolicy):
        def of(self, drafter: str, num_behind: int, limit: int) -> LengthPolicy:
            assert drafter == NAME
            return Best()

    class Best(LengthPolicy):
        def best_length(self, confidences: Sequence[float]) -> int:
            assert len(confidences) == 9
            return 4

    assert len(NgramDrafter().propose([1, 2, 3] * 5, Named(), 9)) == 4


# ------------------------------------------------------------------ statistics of other texts


def test_statistics_are_asked_when_the_text_is_silent() -> None:
    store = Store({(2, 3): (4, 0.5), (2, 3, 4): (5, 1.0)})
    draft = NgramDrafter(store=store).lookup([1, 2, 3], 9)
    assert draft.tokens == (4, 5)
    assert draft.confidences == (0.5 * 2 / 3.5, 3 / 4.5)
    assert set(draft.drafters) == {NAME}


def test_the_longer_match_counts() -> None:
    pair = [8, 1, 2, 7, 9, 1, 2]
    assert NgramDrafter(store=Store({(1, 2): (6, 1.0)})).lookup(pair, 1).tokens == (7,)
    assert NgramDrafter(store=Store({(9, 1, 2): (6, 1.0)})).lookup(pair, 1).tokens == (6,)
    store = Store({(8, 1, 2): (6, 1.0)})
    assert NgramDrafter(store=store).lookup([8, 1, 2, 7, 8, 1, 2], 1).tokens == (7,)
    assert store.num_asked == 0


def test_statistics_end_where_they_must() -> None:
    loop = {(1, 1): (1, 1.0), (1, 1, 1): (1, 1.0)}
    assert len(NgramDrafter(store=Store(loop)).lookup([0, 1, 1], 60)) == MAX_STORE_TOKENS
    assert len(NgramDrafter(store=Store(loop)).lookup([0, 1, 1], 2)) == 2
    assert NgramDrafter({1}, Store(loop)).lookup([0, 1, 1], 9).tokens == (1,)
    assert NgramDrafter(store=Store({(0, 1): (99, 1.0)}), num_vocab=99).lookup([0, 1], 9) == EMPTY_DRAFT


# ------------------------------------------------------------------ time

RNG = np.random.default_rng(0)
SLOW_TEXTS = {
    "random": RNG.integers(0, 30_000, 4000).tolist(),
    "one token": [7] * 4000,
    "loop": [1, 2, 3, 4, 5, 6, 7] * 572,
    "coins": RNG.integers(0, 2, 4000).tolist(),
    "blocks": [*range(30), 1, 1] * 125,
}


@pytest.mark.parametrize("name", SLOW_TEXTS)
def test_a_lookup_takes_microseconds(name: str) -> None:
    """Promised are 200 us a lookup and 20 us a token; the bounds leave room for a busy machine."""
    text, drafter = SLOW_TEXTS[name], NgramDrafter()
    started = time.perf_counter()
    drafter.lookup(text, 64)
    assert time.perf_counter() - started < len(text) * 100e-6
    times = []
    for _ in range(20):
        started = time.perf_counter()
        drafter.lookup(text, 64)
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3


# ------------------------------------------------------------------ lossless


def ngram(bench: Bench, rng: Any) -> NgramDrafter:
    return NgramDrafter(bench.stop_tokens)


def with_statistics(bench: Bench, rng: Any) -> NgramDrafter:
    table = {(first, second): ((first + second) % bench.num_vocab, 0.7) for first in range(3) for second in range(3)}
    return NgramDrafter(bench.stop_tokens, Store(table), bench.num_vocab)


REPEATING = (1, 0, 2, 1, 0)


@pytest.mark.parametrize("make", [ngram, with_statistics], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", SETTINGS)
def test_answers_have_exactly_the_targets_distribution(name: str, make: Callable[[Bench, Any], Any]) -> None:
    assert_exact(Bench(params=SETTINGS[name], prompt=REPEATING, max_tokens=2), make)


@pytest.mark.parametrize("name", ["plain", "penalties", "everything"])
def test_three_tokens_with_a_stop_token_and_any_policy(name: str) -> None:
    for policy in (lambda: Fixed(3), lambda: Fixed(3, 0.6), lambda: RandomPolicy(3)):
        bench = Bench(params=SETTINGS[name], prompt=REPEATING, max_tokens=3, stop_tokens={2}, policy=policy)
        assert_exact(bench, ngram)


def test_one_drafter_for_many_answers() -> None:
    """What it remembers of an answer never shapes the next one."""
    drafter = NgramDrafter()
    assert_exact(Bench(prompt=REPEATING, max_tokens=3), lambda bench, rng: drafter)


def test_a_constraint_keeps_the_distribution_it_defines() -> None:
    assert_exact(Bench(params=PLAIN, prompt=REPEATING, max_tokens=2, constrained=True), ngram)


@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(0, 8))
def test_greedy_answer_is_the_targets_own(seed: int, num_vocab: int, k: int) -> None:
    bench = Bench(num_vocab, GREEDY, (1, 0, 1), 40, (), seed, lambda: Fixed(k))
    assert collect(bench.events(NgramDrafter(), np.random.default_rng(0)))[0] == greedy_answer(bench)
