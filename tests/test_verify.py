"""One verification round, proved by enumeration: what it emits has exactly the target's distribution.

`outcomes` walks through every random choice of drafting and verification with its exact probability; nothing is
sampled. What a round emits has a random length, so it is continued by the target alone to full length and compared
with the target's own distribution of sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import Model, Path, as_dict, distance, draft_tree, outcomes

from specdec_cli.distribution import Distribution
from specdec_cli.types import EMPTY_DRAFT, Draft, Verdict
from specdec_cli.verify import verify

TOLERANCE = 1e-12


# ------------------------------------------------------------------ random models


def model(seed: int, num_vocab: int, *, support: int = 0, sharpness: float = 1.5) -> Model:
    """A distribution for every path: dense, or sparse over `support` tokens that differ from path to path."""
    known: dict[Path, Distribution] = {}

    def at(path: Path) -> Distribution:
        if path not in known:
            rng = np.random.default_rng([seed, *path])
            weights = np.exp(sharpness * rng.standard_normal(support or num_vocab))
            ids = np.sort(rng.permutation(num_vocab)[:support]) if support else None
            known[path] = Distribution(ids, weights / weights.sum())
        return known[path]

    return at


seeds = st.integers(0, 2**32)


@st.composite
def models(draw: st.DrawFn, num_vocab: int) -> Model:
    """Dense, sparse (as after top-k), or greedy."""
    support = draw(st.sampled_from([0, 0, 1, 2, num_vocab - 1]))
    return model(draw(seeds), num_vocab, support=support, sharpness=draw(st.sampled_from([0.3, 1.5, 4.0])))


@st.composite
def grids(draw: st.DrawFn, num_vocab: int) -> Model:
    """Few distinct probabilities, zeros and exact ties among them: equal ratios and empty residuals occur."""
    rows = draw(
        st.lists(
            st.lists(st.integers(0, 3), min_size=num_vocab, max_size=num_vocab).filter(any), min_size=1, max_size=4
        )
    )
    tables = [Distribution(None, np.array(row) / sum(row)) for row in rows]
    return lambda path: tables[(3 * len(path) + sum(path)) % len(tables)]


# ------------------------------------------------------------------ what a round must mean


def run_verify(draft: Draft, target: Model, rng: Any, stop: Sequence[int] = ()) -> Verdict:
    return verify(draft, lambda node, accepted: target(tuple(accepted)), rng, stop)


def emission(draft: Draft, verdict: Verdict) -> Path:
    accepted = tuple(draft.tokens[node] for node in verdict.path)
    return accepted if verdict.token is None else (*accepted, verdict.token)


def sequences(target: Model, length: int, stop: Sequence[int] = (), start: Path = ()) -> dict[Path, float]:
    """The target's own distribution of what follows, up to `length` tokens in all or a stop token."""
    if len(start) >= length or (start and start[-1] in stop):
        return {start: 1.0}
    found: dict[Path, float] = {}
    for token, prob in as_dict(target(start)).items():
        for sequence, rest in sequences(target, length, stop, (*start, token)).items():
            found[sequence] = prob * rest
    return found


def completed(emitted: Mapping[Path, float], target: Model, length: int, stop: Sequence[int] = ()) -> dict[Path, float]:
    """Emissions, each continued by the target to full length."""
    found: dict[Path, list[float]] = {}
    for path, weight in emitted.items():
        for sequence, prob in sequences(target, length, stop, path).items():
            found.setdefault(sequence[:length], []).append(weight * prob)
    return {sequence: math.fsum(weights) for sequence, weights in found.items()}


def assert_lossless(draw_draft: Callable[[Any], Draft], target: Model, length: int, stop: Sequence[int] = ()) -> None:
    """Drafting and verification together leave the target's distribution of sequences as it was."""

    def one_round(rng: Any) -> Path:
        draft = draw_draft(rng)
        return emission(draft, run_verify(draft, target, rng, stop))

    emitted = outcomes(one_round)
    assert math.fsum(emitted.values()) == pytest.approx(1, abs=TOLERANCE)
    expected = sequences(target, length, stop)
    assert distance(completed(emitted, target, length, stop), expected) < TOLERANCE


def draft_chain(drafter: Model, length: int, rng: Any) -> Draft:
    tokens: list[int] = []
    probs: list[Distribution | None] = []
    for _ in range(length):
        proposal = drafter(tuple(tokens))
        tokens.append(proposal.sample(rng))
        probs.append(None if proposal.is_point else proposal)
    return Draft.chain(tokens, probs)


def full_tree(tokens_at: Callable[[Path], Sequence[int]], depth: int) -> Draft:
    """A point-mass tree with the given children at every node."""
    tokens: list[int] = []
    parents: list[int] = []
    level: list[tuple[int, Path]] = [(-1, ())]
    for _ in range(depth):
        following: list[tuple[int, Path]] = []
        for parent, path in level:
            for token in tokens_at(path):
                following.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(parent)
        level = following
    return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), (1.0,) * len(tokens))


# ------------------------------------------------------------------ the enumeration itself


def test_enumeration_knows_a_fair_and_an_unfair_coin() -> None:
    assert outcomes(lambda rng: (rng.random() < 0.25, rng.random() >= 0.5)) == {
        (True, False): 0.125,
        (True, True): 0.125,
        (False, False): 0.375,
        (False, True): 0.375,
    }


def test_the_proof_rejects_a_biased_rule() -> None:
    """Argmax drafts with probabilities attached: the bias that two projects shipped."""
    target, drafter = model(1, 3), model(2, 3)

    def biased(rng: Any) -> Draft:
        return Draft.chain([int(drafter(()).probs.argmax())], [drafter(())])

    with pytest.raises(AssertionError):
        assert_lossless(biased, target, 2)


# ------------------------------------------------------------------ chains


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@settings(max_examples=12)
@given(data=st.data())
def test_sampled_chain(length: int, data: st.DataObject) -> None:
    num_vocab = data.draw(st.integers(3, 5 if length < 3 else 3))
    target, drafter = data.draw(models(num_vocab)), data.draw(models(num_vocab))
    assert_lossless(lambda rng: draft_chain(drafter, length, rng), target, length + 1)


@settings(max_examples=25)
@given(grids(3), grids(3), st.integers(1, 3))
def test_sampled_chain_with_ties_and_zeros(target: Model, drafter: Model, length: int) -> None:
    assert_lossless(lambda rng: draft_chain(drafter, length, rng), target, length + 1)


@given(models(4), st.lists(st.integers(0, 5), max_size=3))
def test_point_mass_chain(target: Model, tokens: list[int]) -> None:
    """Any fixed tokens, also ones the target does not have: lossless without averaging over anything."""
    assert_lossless(lambda rng: Draft.chain(tokens), target, len(tokens) + 1)


@settings(max_examples=15)
@given(seeds, st.sampled_from([(3, 5), (5, 3), (4, 3)]), st.sampled_from([0, 2]))
def test_vocabularies_of_different_size(seed: int, sizes: tuple[int, int], support: int) -> None:
    target, drafter = model(seed, sizes[0], support=support), model(seed + 1, sizes[1], support=support)
    assert_lossless(lambda rng: draft_chain(drafter, 2, rng), target, 3)


@settings(max_examples=15)
@given(models(4), models(4), st.sets(st.integers(0, 3), min_size=1, max_size=2))
def test_stop_tokens_in_a_chain(target: Model, drafter: Model, stop: set[int]) -> None:
    assert_lossless(lambda rng: draft_chain(drafter, 2, rng), target, 3, sorted(stop))


def test_mixed_chain() -> None:
    """One token sampled, one looked up, one sampled again."""
    target, drafter = model(3, 3), model(4, 3)

    def mixed(rng: Any) -> Draft:
        first = drafter(()).sample(rng)
        third = drafter((first, 1)).sample(rng)
        return Draft.chain([first, 1, third], [drafter(()), None, drafter((first, 1))])

    assert_lossless(mixed, target, 4)


# ------------------------------------------------------------------ trees


@pytest.mark.parametrize("widths", [(2,), (3,), (2, 1), (1, 2), (1, 1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("replace", [True, False], ids=["replaced", "distinct"])
@settings(max_examples=3)
@given(data=st.data())
def test_sampled_tree(widths: tuple[int, ...], replace: bool, data: st.DataObject) -> None:
    strategy = data.draw(st.sampled_from([models(3), grids(3)]))
    target, drafter = data.draw(strategy), data.draw(strategy)
    assert_lossless(lambda rng: draft_tree(drafter, widths, rng, replace=replace), target, len(widths) + 1)


def draft_spine(drafter: Model, widths: Sequence[int], rank: int, rng: Any) -> Draft:
    """Siblings without replacement at every depth; only behind one of them, by its rank, there are more."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[Distribution | None] = []
    parent, path = -1, ()
    for width in widths:
        level = draft_tree(lambda _, at=path: drafter(at), [width], rng, replace=False)
        chosen = min(rank, len(level) - 1)
        tokens += level.tokens
        parents += [parent] * len(level)
        probs += level.probs
        parent, path = len(tokens) - len(level) + chosen, (*path, level.tokens[chosen])
    return Draft(tuple(tokens), tuple(parents), tuple(probs), (1.0,) * len(tokens))


@pytest.mark.parametrize(("widths", "rank"), [((4, 1, 1, 1), 3), ((1, 1, 1, 4), 0)])
def test_sampled_siblings_of_depth_and_width_four(widths: tuple[int, ...], rank: int) -> None:
    target, drafter = model(rank, 4), model(5 + rank, 4, sharpness=1.0)
    assert_lossless(lambda rng: draft_spine(drafter, widths, rank, rng), target, 5)


@settings(max_examples=10)
@given(models(4), seeds)
def test_point_mass_tree_of_depth_and_width_three(target: Model, seed: int) -> None:
    """Children drawn from 5 tokens, duplicates and unknown ones among them."""

    def children(path: Path) -> list[int]:
        return [int(token) for token in np.random.default_rng([seed, *path]).integers(0, 5, 3)]

    assert_lossless(lambda rng: full_tree(children, 3), target, 4)


@settings(max_examples=10)
@given(models(4), st.integers(0, 3))
def test_stop_token_in_a_tree(target: Model, stop: int) -> None:
    assert_lossless(lambda rng: full_tree(lambda path: (0, 1, 2), 2), target, 3, [stop])


@settings(max_examples=10)
@given(models(3), models(3), seeds)
def test_tree_that_mixes_sampled_and_fixed_siblings(target: Model, drafter: Model, seed: int) -> None:
    fixed = int(np.random.default_rng(seed).integers(0, 3))

    def mixed(rng: Any) -> Draft:
        first = drafter(()).sample(rng)
        below = drafter((first,)).sample(rng)
        tokens, parents = (first, fixed, below, fixed, fixed), (-1, -1, 0, 0, 1)
        return Draft(tokens, parents, (drafter(()), None, drafter((first,)), None, None), (1.0,) * 5)

    assert_lossless(mixed, target, 3)


# ------------------------------------------------------------------ verify against a second implementation of the rule


def meaning(draft: Draft, target: Model, stop: Sequence[int]) -> dict[tuple[Path, str], float]:
    """(what is emitted, source of its end) -> probability for one fixed draft, in plain dictionaries.

    For a fixed draft the rule is not lossless, only the average over drafts is; so this pins down the rule itself.
    """
    found: dict[tuple[Path, str], float] = {}

    def walk(node: int, path: Path, weight: float) -> None:
        if path and path[-1] in stop:
            found[path, "draft"] = found.get((path, "draft"), 0.0) + weight
            return
        current = as_dict(target(path))
        siblings = [child for child, parent in enumerate(draft.parents) if parent == node]
        for child in siblings:
            token, probs = draft.tokens[child], draft.probs[child]
            proposal = {token: 1.0} if probs is None else as_dict(probs)
            accept = min(1.0, current.get(token, 0.0) / proposal[token])
            if accept > 0:
                walk(child, (*path, token), weight * accept)
            weight *= 1 - accept
            if weight <= 0:
                return
            excess = {key: max(0.0, value - proposal.get(key, 0.0)) for key, value in current.items()}
            total = math.fsum(excess.values())
            current = {key: value / total for key, value in excess.items() if value > 0}
        source = "target" if not draft.tokens else "recovered" if siblings else "bonus"
        for token, prob in current.items():
            key = ((*path, token), source)
            found[key] = found.get(key, 0.0) + weight * prob

    walk(-1, (), 1.0)
    return found


@given(models(4), models(4), seeds, st.sets(st.integers(0, 3), max_size=1))
def test_rule_for_a_fixed_draft(target: Model, drafter: Model, seed: int, stop: set[int]) -> None:
    rng = np.random.default_rng(seed)
    widths = [(1, 1, 1), (2, 2), (3, 1), (1, 3), (3,)][int(rng.integers(5))]
    draft = draft_tree(drafter, widths, rng, replace=bool(rng.random() < 0.5))

    def one_round(rng: Any) -> tuple[Path, str]:
        verdict = run_verify(draft, target, rng, sorted(stop))
        return emission(draft, verdict), verdict.source

    assert distance(outcomes(one_round), meaning(draft, target, sorted(stop))) < TOLERANCE


@given(models(5), models(5))
def test_a_drafted_token_is_accepted_with_probability_one_minus_total_variation(target: Model, drafter: Model) -> None:
    def accepted(rng: Any) -> int:
        return len(run_verify(draft_chain(drafter, 1, rng), target, rng).path)

    first, second = as_dict(target(())), as_dict(drafter(()))
    variation = sum(abs(first.get(token, 0.0) - second.get(token, 0.0)) for token in range(5)) / 2
    assert outcomes(accepted).get(1, 0.0) == pytest.approx(1 - variation, abs=TOLERANCE)
    assert target(()).overlap(drafter(())) == pytest.approx(1 - variation, abs=TOLERANCE)


# ------------------------------------------------------------------ greedy, and the rest of the contract


@given(seeds, st.integers(0, 4), st.booleans())
def test_greedy_is_exact_match(seed: int, size: int, chain: bool) -> None:
    """Against a point-mass target nothing is random, whatever the draft attached to its tokens."""
    rng = np.random.default_rng(seed)
    greedy = model(seed, 3, support=1)
    parents = tuple(index - 1 if chain else int(rng.integers(-1, index)) for index in range(size))
    tokens = tuple(int(token) for token in rng.integers(0, 3, size))
    attached = [Distribution(None, rng.dirichlet(np.ones(3))) if rng.random() < 0.5 else None for _ in tokens]
    draft = Draft(tokens, parents, tuple(attached), (1.0,) * size)
    emitted = outcomes(lambda source: emission(draft, run_verify(draft, greedy, source)))
    assert len(emitted) == 1
    (path,) = emitted
    assert path == next(iter(sequences(greedy, len(path))))
    assert path[:-1] in _paths(draft)
    # The first of two equal siblings is entered: below the second one nothing is found.
    assert path not in _paths(draft) or len(set(zip(tokens, parents, strict=True))) < size


def _paths(draft: Draft) -> set[Path]:
    """The token paths of a draft, the empty one included."""
    found: list[Path] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return {(), *found}


def test_equal_distributions_accept_everything_without_a_random_number() -> None:
    target = model(5, 5)
    draft = draft_chain(target, 3, np.random.default_rng(0))
    rng, twin = np.random.default_rng(1), np.random.default_rng(1)
    verdict = run_verify(draft, target, rng)
    assert (verdict.path, verdict.source) == ((0, 1, 2), "bonus")
    twin.random()  # the bonus token's
    assert rng.random() == twin.random()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_every_random_number_comes_from_the_generator(position: int) -> None:
    """Two seeds differ in every position: no number is drawn from elsewhere or twice."""
    target, drafter = model(6, 5, sharpness=0.3), model(7, 5, sharpness=0.3)
    drawn = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        draft = draft_chain(drafter, 3, rng)
        emitted = emission(draft, run_verify(draft, target, rng))
        drawn.update(emitted[position : position + 1])
    assert drawn == set(range(5))


def test_sources() -> None:
    certain = model(8, 3, support=1)
    best = [next(iter(as_dict(certain(()))))]
    best.append(next(iter(as_dict(certain((best[0],))))))
    rng = np.random.default_rng(0)
    assert run_verify(EMPTY_DRAFT, certain, rng) == Verdict((), best[0], "target")
    assert run_verify(Draft.chain(best[:1]), certain, rng) == Verdict((0,), best[1], "bonus")
    wrong = Draft.chain([(best[0] + 1) % 3])
    assert run_verify(wrong, certain, rng) == Verdict((), best[0], "recovered")
    assert run_verify(Draft.chain(best), certain, rng, {best[0]}) == Verdict((0,), None, "draft")


def test_only_visited_nodes_are_evaluated() -> None:
    """Each distribution costs work over the whole vocabulary."""
    certain = model(9, 3, support=1)
    best = next(iter(as_dict(certain(()))))
    other = (best + 1) % 3
    draft = Draft((other, best, other, other), (-1, -1, 0, 1), (None,) * 4, (1.0,) * 4)
    visited: list[tuple[int, Path]] = []

    def target_at(node: int, accepted: list[int]) -> Distribution:
        visited.append((node, tuple(accepted)))
        return certain(tuple(accepted))

    verify(draft, target_at, np.random.default_rng(0))
    assert visited[0] == (-1, ())
    assert visited[1:] == [(1, (best,))] + ([(3, (best, other))] if as_dict(certain((best,))) == {other: 1.0} else [])


def test_deep_duplicates_under_one_parent() -> None:
    """The second of two equal siblings has nothing left to be accepted with, and neither has the residual."""
    target = model(10, 3)
    for tokens in itertools.product(range(3), repeat=3):
        draft = Draft(tokens, (-1, -1, -1), (None,) * 3, (1.0,) * 3)
        paths = outcomes(lambda rng, draft=draft: run_verify(draft, target, rng).path)
        repeated = {index for index, token in enumerate(tokens) if token in tokens[:index]}
        assert not {path[0] for path in paths if path} & repeated
        assert_lossless(lambda rng, draft=draft: draft, target, 2)
