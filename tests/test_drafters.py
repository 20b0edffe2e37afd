"""Drafters: what a draft says about itself is true, and the policy decides before a token is sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import Alternating, Path, RandomTrees, as_dict, distance, outcomes, reference_probs

from specdec_cli.distribution import Distribution
from specdec_cli.draft_length import Fixed
from specdec_cli.drafters import AutoDrafter, ModelDrafter, NgramDrafter, NoDrafter
from specdec_cli.sampling import Sampler, top_probability
from specdec_cli.testing import FakeContext
from specdec_cli.types import EMPTY_DRAFT, Draft, LengthPolicy, Round, SamplingParams

PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
GREEDY = SamplingParams(temperature=0)
PENALIZED = SamplingParams(
    temperature=0.7, top_k=3, top_p=0.9, min_p=0.02, repeat_last_n=3, repeat_penalty=1.3, frequency_penalty=0.6
)
TOKENS = (1, 0, 2, 2)


def drafter_on(
    context: FakeContext, params: SamplingParams, rng: Any, stop: Sequence[int] = (), max_leaves: int = 1
) -> ModelDrafter:
    return ModelDrafter(context, Sampler(params, 4), rng, stop, max_leaves)


def fake(**kwargs: int) -> FakeContext:
    return FakeContext.random(3, num_vocab=4, **kwargs)


def propose(params: SamplingParams, rng: Any, policy: LengthPolicy, limit: int = 9, stop: Sequence[int] = ()) -> Draft:
    return drafter_on(fake(), params, rng, stop).propose(TOKENS, policy, limit)


def test_no_drafter() -> None:
    drafter = NoDrafter()
    assert drafter.propose([1, 2], Fixed(5), 5) == EMPTY_DRAFT
    assert drafter.decode_s == 0.0


@pytest.mark.parametrize("params", [PLAIN, PENALIZED], ids=["plain", "penalized"])
def test_attached_distributions_are_the_settings_own_and_what_was_sampled_from(params: SamplingParams) -> None:
    """The one condition of losslessness that only the drafter can break."""
    context = fake()

    def tokens_and_probs(rng: Any) -> tuple[Path, tuple[tuple[tuple[int, float], ...], ...]]:
        draft = propose(params, rng, Fixed(3))
        points = [probs or Distribution.point(token) for token, probs in zip(draft.tokens, draft.probs, strict=True)]
        return draft.tokens, tuple(tuple(as_dict(probs).items()) for probs in points)

    expected: dict[Path, float] = {}
    for (tokens, attached), weight in outcomes(tokens_and_probs).items():
        prefix = list(TOKENS)
        expected[tokens] = 1.0
        for token, probs in zip(tokens, attached, strict=True):
            reference = reference_probs(context.logits_after(prefix), params, prefix)
            assert distance(dict(probs), reference) < 1e-12
            expected[tokens] *= reference[token]
            prefix.append(token)
        assert weight == pytest.approx(expected[tokens], abs=1e-12)
    assert sum(expected.values()) == pytest.approx(1)


def test_greedy_tokens_are_point_masses_with_softmax_confidence() -> None:
    draft = propose(GREEDY, None, Fixed(3))
    context, prefix = fake(), list(TOKENS)
    assert draft.probs == (None,) * 3
    for token, confidence in zip(draft.tokens, draft.confidences, strict=True):
        logits = context.logits_after(prefix)
        assert token == logits.argmax()
        assert confidence == pytest.approx(top_probability(logits))
        prefix.append(token)


def test_a_single_candidate_needs_no_random_number() -> None:
    draft = propose(SamplingParams(top_k=1), None, Fixed(2))
    assert draft.probs == (None, None)
    assert draft.tokens == propose(GREEDY, None, Fixed(2)).tokens


class Recording(LengthPolicy):
    """Says no at a given call; remembers what it was asked."""

    def __init__(self, num_kept: int) -> None:
        self.num_kept = num_kept
        self.asked: list[tuple[str, tuple[float, ...]]] = []

    def draft_more(self, confidences: Sequence[float]) -> bool:
        self.asked.append(("more", tuple(confidences)))
        return True

    def keep_last(self, confidences: Sequence[float]) -> bool:
        self.asked.append(("keep", tuple(confidences)))
        return len(confidences) <= self.num_kept

    def learn(self, record: Round) -> None:
        """Nothing."""


@pytest.mark.parametrize("params", [PLAIN, PENALIZED, GREEDY], ids=["plain", "penalized", "greedy"])
@pytest.mark.parametrize("num_kept", [0, 1, 3])
def test_the_policy_decides_without_having_seen_the_token(num_kept: int, params: SamplingParams) -> None:
    """A dropped token leaves the generator where it was: it was never sampled."""
    policy = Recording(num_kept)
    rng, twin = np.random.default_rng(1), np.random.default_rng(1)
    draft = propose(params, rng, policy)
    assert len(draft) == len(draft.confidences) == num_kept
    propose(params, twin, Fixed(num_kept))
    assert rng.random() == twin.random()
    context, expected, prefix = fake(), [], list(TOKENS)
    for token in (*draft.tokens, None):
        logits = context.logits_after(prefix)
        probs = reference_probs(logits, params, prefix)
        # With a single candidate left, the model's own probability says more than 1.0.
        expected.append(top_probability(logits) if len(probs) == 1 else max(probs.values()))
        prefix.append(token or 0)
    shown = [confidences for kind, confidences in policy.asked if kind == "keep"]
    assert [pytest.approx(tuple(expected[: index + 1])) for index in range(num_kept + 1)] == shown
    more = [confidences for kind, confidences in policy.asked if kind == "more"]
    assert more == [pytest.approx(tuple(expected[:index])) for index in range(num_kept + 1)]


@pytest.mark.parametrize("limit", [-3, 0, 1, 2, 5])
def test_limit(limit: int) -> None:
    assert len(propose(PLAIN, np.random.default_rng(0), Fixed(3), limit)) == max(0, min(limit, 3))


@pytest.mark.parametrize(("num_ctx", "drafted"), [(3, 0), (4, 1), (5, 2), (6, 3), (99, 5)])
def test_a_small_context_shortens_the_draft(num_ctx: int, drafted: int) -> None:
    """Four tokens before it; the last drafted token is not decoded itself."""
    context = fake(num_ctx=num_ctx)
    draft = drafter_on(context, PLAIN, np.random.default_rng(0)).propose(TOKENS, Fixed(5), 9)
    assert len(draft) == drafted


def test_a_draft_ends_with_a_stop_token() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        draft = propose(PLAIN, rng, Fixed(6), stop=(1, 3))
        stops = [index for index, token in enumerate(draft.tokens) if token in (1, 3)]
        assert stops == [len(draft) - 1] or (not stops and len(draft) == 6)


def test_nothing_is_decoded_when_nothing_is_wanted() -> None:
    context = fake()
    assert drafter_on(context, PLAIN, np.random.default_rng(0)).propose(TOKENS, Fixed(0), 9) == EMPTY_DRAFT
    assert context.num_calls == 0


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.booleans(), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_any_jump_between_prefixes_gives_the_draft_of_a_fresh_cache(
    seed: int, can_forget: bool, other: list[int]
) -> None:
    context = FakeContext.random(3, num_vocab=4, chunk=2, can_forget=can_forget)
    drafter = drafter_on(context, PENALIZED, np.random.default_rng(seed))
    drafter.propose(other, Fixed(3), 9)
    fresh = drafter_on(fake(), PENALIZED, np.random.default_rng(seed + 1))
    drafter._rng = np.random.default_rng(seed + 1)
    again, expected = drafter.propose(TOKENS, Fixed(4), 9), fresh.propose(TOKENS, Fixed(4), 9)
    assert (again.tokens, again.confidences) == (expected.tokens, expected.confidences)
    assert drafter.decode_s == context.decode_s > 0


# ------------------------------------------------------------------ trees


def tokens_to(draft: Draft, node: int) -> list[int]:
    return [*tokens_to(draft, draft.parents[node]), draft.tokens[node]] if node >= 0 else []


@pytest.mark.parametrize("params", [PLAIN, PENALIZED], ids=["plain", "penalized"])
def test_siblings_are_drawn_without_replacement_from_what_they_carry(params: SamplingParams) -> None:
    """Each carries the settings' own distribution without its earlier siblings, and comes as often as that says."""
    context = fake()

    def nodes(rng: Any) -> tuple[Any, ...]:
        draft = drafter_on(fake(), params, rng, max_leaves=4).propose(TOKENS, RandomTrees(8, 5), 9)
        points = [probs or Distribution.point(token) for token, probs in zip(draft.tokens, draft.probs, strict=True)]
        return draft.tokens, draft.parents, tuple(tuple(as_dict(probs).items()) for probs in points)

    found = outcomes(nodes)
    assert max(max(parents.count(parent) for parent in parents) for _, parents, _ in found) >= 2
    for (tokens, parents, attached), weight in found.items():
        draft, expected = Draft(tokens, parents), 1.0
        for node, (token, probs) in enumerate(zip(tokens, attached, strict=True)):
            prefix = [*TOKENS, *tokens_to(draft, parents[node])]
            reference = reference_probs(context.logits_after(prefix), params, prefix)
            earlier = [tokens[other] for other in range(node) if parents[other] == parents[node]]
            if len(reference) == 1:
                # Nothing to sample: the likeliest ones, in order.
                assert dict(probs) == {token: 1.0}
                continue
            left = {key: prob for key, prob in reference.items() if key not in earlier}
            reference = {key: prob / sum(left.values()) for key, prob in left.items()}
            assert distance(dict(probs), reference) < 1e-12
            expected *= reference[token]
        assert weight == pytest.approx(expected, abs=1e-12)


class LaterIsBetter(RandomTrees):
    """Believes that further choices of a draft model are accepted more often than its first one."""

    def acceptance(self, confidence: float, rank: int) -> float:
        return 0.9 if rank else 0.1


@pytest.mark.parametrize("trees", [RandomTrees, LaterIsBetter])
def test_greedy_siblings_are_the_likeliest_tokens_by_conditional_probability(trees: type[RandomTrees]) -> None:
    draft = drafter_on(fake(), GREEDY, None, max_leaves=4).propose(TOKENS, trees(3, 12, wide=True), 9)
    context = fake()
    assert not draft.is_chain
    assert set(draft.probs) == {None}
    for parent, nodes in draft.children().items():
        probs = reference_probs(context.logits_after([*TOKENS, *tokens_to(draft, parent)]), PLAIN)
        assert [draft.tokens[node] for node in nodes] == list(probs)[: len(nodes)]
        left = 1.0
        for node in nodes:
            prob = probs[draft.tokens[node]]
            assert draft.confidences[node] == pytest.approx(prob / left)
            left -= prob


def test_a_grammar_bounds_the_siblings() -> None:
    """Where one token is possible there is one child, whatever was asked for; penalties order them."""
    constraint = Alternating(4, 0)
    for params in (GREEDY, PLAIN, PENALIZED):
        sampler = Sampler(params, 4, constraint)
        drafter = ModelDrafter(fake(), sampler, np.random.default_rng(0), max_leaves=16)
        draft = drafter.propose(TOKENS, RandomTrees(1, 30, wide=True), 4)
        for node, token in enumerate(draft.tokens):
            assert token in constraint.allowed(TOKENS, tokens_to(draft, draft.parents[node]))
        for nodes in draft.children().values():
            assert len({draft.tokens[node] for node in nodes}) == len(nodes)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 7), st.integers(1, 30), st.integers(5, 20))
def test_a_tree_keeps_to_its_limits(seed: int, max_leaves: int, limit: int, num: int, num_ctx: int) -> None:
    context = fake(num_ctx=num_ctx, max_leaves=6)
    drafter = drafter_on(context, PLAIN, np.random.default_rng(seed), (2,), max_leaves)
    draft = drafter.propose(TOKENS, RandomTrees(seed, num, wide=True), limit)
    assert draft.num_leaves <= min(max_leaves, 6)
    assert max(draft.depths) <= limit
    assert len(draft) <= min(num, drafter.room(TOKENS))
    assert all(draft.tokens[parent] != 2 for parent in draft.parents if parent >= 0)


@pytest.mark.parametrize("num", [1, 2, 5, 12])
def test_a_fixed_number_of_tokens_makes_a_best_first_tree(num: int) -> None:
    """As many tokens in all, those that are accepted with the largest probability."""
    draft = drafter_on(fake(), GREEDY, None, max_leaves=16).propose(TOKENS, Fixed(num), 9)
    assert len(draft) == num
    reaches = reaches_of(draft)
    larger = drafter_on(fake(), GREEDY, None, max_leaves=16).propose(TOKENS, Fixed(num + 8), 9)
    assert sorted(reaches) == pytest.approx(sorted(reaches_of(larger))[-num:])


def test_a_tree_with_all_its_leaves_still_grows() -> None:
    """Though a further branch would be likelier than what comes next in those that there are."""
    draft = drafter_on(fake(sharpness=1), GREEDY, None, max_leaves=2).propose(TOKENS, Fixed(12), 9)
    assert (draft.num_leaves, len(draft)) == (2, 12)


def reaches_of(draft: Draft) -> list[float]:
    """A sibling is accepted after the rejection of those before it."""
    reaches: list[float] = []
    left: dict[int, list[float]] = {}
    for node, parent in enumerate(draft.parents):
        rejections = left.setdefault(parent, [])
        acceptance = Fixed(1).acceptance(draft.confidences[node], len(rejections))
        reaches.append((reaches[parent] if parent >= 0 else 1.0) * math.prod(rejections) * acceptance)
        rejections.append(1.0 - acceptance)
    return reaches


def test_the_draft_models_cache_keeps_the_branch_that_was_taken() -> None:
    context = fake()
    drafter = drafter_on(context, GREEDY, None, max_leaves=4)
    draft = drafter.propose(TOKENS, RandomTrees(3, 12, wide=True), 9)
    decoded = context._draft
    assert 4 < len(decoded) <= len(draft)
    assert not decoded.is_chain
    for node in range(len(decoded)):
        taken = [*TOKENS, *tokens_to(draft, node), 1]
        if not any(draft.parents[child] == node and draft.tokens[child] == 1 for child in range(len(decoded))):
            assert drafter.num_behind(taken) == 1
    taken = [*TOKENS, *tokens_to(draft, len(decoded) - 1), 1]
    before = context.num_decoded
    drafter.propose(taken, Fixed(1), 9)
    assert context.num_decoded == before + 1


@pytest.mark.parametrize("k", [0, 1, 4])
def test_fixed(k: int) -> None:
    policy = Fixed(k, 0.5)
    assert [policy.draft_more([1.0] * size) for size in range(6)] == [size < k for size in range(6)]
    assert [policy.keep_last([0.1, last]) for last in (0.4, 0.5, 0.6)] == [False, True, True]
    assert Fixed(k).keep_last([0.0])


def test_draft_shapes() -> None:
    chain = Draft.chain([5, 6, 7])
    assert (chain.parents, chain.probs, chain.is_chain, len(chain)) == ((-1, 0, 1), (None,) * 3, True, 3)
    tree = Draft((5, 6, 7), (-1, -1, 1), (None,) * 3, (1.0,) * 3)
    assert not tree.is_chain
    assert tree.children() == {-1: [0, 1], 1: [2]}
    assert EMPTY_DRAFT.is_chain
    assert Draft.chain([]) == EMPTY_DRAFT


class Weighing(LengthPolicy):
    """Says what each drafter is worth; takes everything a drafter has."""

    def __init__(self, ngram: float, model: float) -> None:
        self.worth = {"ngram": ngram, "model": model}
        self.drafter = ""

    def of(self, drafter: str, num_behind: int, limit: int) -> LengthPolicy:
        view = Weighing(*self.worth.values())
        view.drafter = drafter
        return view

    def gain(self, confidences: Sequence[float] | None = None) -> float:
        assert (confidences is None) == (self.drafter == "model")
        return self.worth[self.drafter]

    def draft_more(self, confidences: Sequence[float]) -> bool:
        return len(confidences) < 3

    def keep_last(self, confidences: Sequence[float]) -> bool:
        return True

    def learn(self, record: Round) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("ngram", "model", "expected"), [(2.0, 1.0, "ngram"), (1.0, 2.0, "model"), (-1.0, -2.0, "model")]
)
def test_auto_takes_what_is_worth_more(ngram: float, model: float, expected: str) -> None:
    drafter = AutoDrafter(NgramDrafter(), drafter_on(fake(), GREEDY, None))
    draft = drafter.propose([1, 2, 3, 0, 1, 2, 3, 0, 1, 2], Weighing(ngram, model), 9)
    assert set(draft.drafters) == {expected}
    assert len(draft) == 3
    assert (drafter.decode_s > 0) == (expected == "model")


def test_auto_falls_back_on_the_model_without_a_match() -> None:
    drafter = AutoDrafter(NgramDrafter(), drafter_on(fake(), GREEDY, None))
    assert set(drafter.propose([1, 2, 3], Weighing(9.0, 1.0), 9).drafters) == {"model"}


def test_auto_asks_no_draft_model_that_could_not_pay() -> None:
    model = mock.Mock(spec=ModelDrafter)
    model.room.return_value = 9
    assert not len(AutoDrafter(NgramDrafter(), model).propose([1, 2, 3], Fixed(0), 9))
    assert not model.propose.called
    AutoDrafter(NgramDrafter(), model).propose([1, 2, 3], Fixed(1), 9)
    assert model.propose.called


def test_what_the_draft_model_has_to_read() -> None:
    drafter = drafter_on(fake(), GREEDY, None)
    assert drafter.num_behind(TOKENS) == len(TOKENS)
    drafter.propose(TOKENS, Fixed(3), 9)
    assert drafter.num_behind(TOKENS) == 1
    assert drafter.num_behind([*TOKENS[:2], 3, 3, 3]) == 3
