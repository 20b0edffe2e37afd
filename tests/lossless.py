"""What the tests of losslessness are built from: enumeration of random choices, slow references, scripted drafters."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from specdec_cli.distribution import Distribution
from specdec_cli.types import Draft, LengthPolicy, Round, SamplingParams

Result = TypeVar("Result")
Path = tuple[int, ...]
Model = Callable[[Path], Distribution]


# ------------------------------------------------------------------ enumerating every random choice


class Uniform:
    """A uniform number that is not drawn yet: the comparison with a threshold splits the enumeration."""

    def __init__(self, rng: EnumeratingRng) -> None:
        self._rng = rng

    def __lt__(self, threshold: float) -> bool:
        below = min(max(float(threshold), 0.0), 1.0)
        return self._rng.branch([below, 1.0 - below]) == 0

    def __le__(self, threshold: float) -> bool:
        return self < threshold

    def __gt__(self, threshold: float) -> bool:
        return not self < threshold

    def __ge__(self, threshold: float) -> bool:
        return not self < threshold


class EnumeratingRng:
    """Stands in for `numpy.random.Generator`: follows a script of branches and records the alternatives at its end.

    `random()` gives a real number, the middle of one step of the distribution, inside `Distribution.sample`, and a
    `Uniform` elsewhere; so the code under test runs unchanged.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self._position = 0
        self._edges: list[float] | None = None
        self.weight = 1.0
        self.choices: list[int] = []
        self.alternatives: list[list[int]] = []

    def branch(self, weights: Sequence[float]) -> int:
        """Take the scripted branch, or the first possible one; remember the others."""
        possible = [index for index, weight in enumerate(weights) if weight > 0.0]
        if self._position < len(self._script):
            chosen = self._script[self._position]
        else:
            chosen = possible[0]
            self.alternatives += [[*self.choices, index] for index in possible[1:]]
        self._position += 1
        self.choices.append(chosen)
        self.weight *= weights[chosen]
        return chosen

    def expect(self, edges: Sequence[float]) -> None:
        """The next `random()` selects a step between these edges."""
        self._edges = [0.0, *edges]

    def random(self) -> Any:
        """The middle of a step when one is expected, else a number that is decided by its comparison."""
        if self._edges is None:
            return Uniform(self)
        edges, self._edges = self._edges, None
        widths = [high - low for low, high in itertools.pairwise(edges)]
        index = self.branch(widths)
        return (edges[index] + edges[index + 1]) / 2


_sample = Distribution.sample


def _observed_sample(self: Distribution, rng: Any) -> int:
    if isinstance(rng, EnumeratingRng) and not self.is_point:
        total = math.fsum(map(float, self.probs))
        cumulated = [math.fsum(map(float, self.probs[: index + 1])) / total for index in range(self.probs.size)]
        rng.expect([*cumulated[:-1], 1.0])
    return _sample(self, rng)


def outcomes(run: Callable[[Any], Result]) -> dict[Result, float]:
    """Every result of `run(rng)` with its exact probability."""
    found: dict[Result, list[float]] = {}
    pending: list[list[int]] = [[]]
    with mock.patch.object(Distribution, "sample", _observed_sample):
        while pending:
            rng = EnumeratingRng(pending.pop())
            result = run(rng)
            found.setdefault(result, []).append(rng.weight)
            pending += rng.alternatives
    return {result: math.fsum(weights) for result, weights in found.items()}


def distance(first: Mapping[Any, float], second: Mapping[Any, float]) -> float:
    """The largest difference of two distributions."""
    return max(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second})


# ------------------------------------------------------------------ references, slow and obvious


def as_dict(distribution: Distribution) -> dict[int, float]:
    """Token -> probability, without the impossible ones."""
    ids = range(distribution.probs.size) if distribution.ids is None else distribution.ids
    return {int(token): float(prob) for token, prob in zip(ids, distribution.probs, strict=True) if prob > 0.0}


def reference_probs(
    logits: Sequence[float], params: SamplingParams, history: Sequence[int] = (), num_vocab: int | None = None
) -> dict[int, float]:
    """Sampling as the documentation says it, one step at a time over a fully sorted list."""
    row = [float(value) for value in logits[:num_vocab]]
    for token, bias in params.logit_bias:
        if token < len(row):
            row[token] += bias
    window = [] if params.repeat_last_n == 0 else list(history)
    if params.repeat_last_n > 0:
        window = window[-params.repeat_last_n :]
    for token, count in Counter(window).items():
        if token < len(row):
            value = row[token]
            value = value * params.repeat_penalty if value <= 0 else value / params.repeat_penalty
            row[token] = value - count * params.frequency_penalty - params.presence_penalty
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if params.temperature == 0:
        return {order[0]: 1.0}
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = _softmax([row[token] for token in order])
        size = next((n for n in range(1, len(order) + 1) if math.fsum(mass[:n]) >= params.top_p), len(order))
        order = order[:size]
    if params.min_p > 0:
        mass = _softmax([row[token] for token in order])
        order = [token for token, prob in zip(order, mass, strict=True) if prob >= params.min_p * mass[0]]
    final = _softmax([row[token] / params.temperature for token in order])
    return {token: prob for token, prob in zip(order, final, strict=True) if prob > 0.0}


def _softmax(values: Sequence[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def reference_answers(
    next_probs: Callable[[list[int]], Mapping[int, float]],
    prompt: Sequence[int],
    max_tokens: int,
    stop_tokens: Sequence[int] = (),
) -> dict[tuple[Path, str], float]:
    """(answer, reason it ended) -> probability, by sampling one token after the other from the target alone."""
    found: dict[tuple[Path, str], float] = {}

    def extend(answer: Path, weight: float) -> None:
        if len(answer) == max_tokens:
            found[answer, "length"] = found.get((answer, "length"), 0.0) + weight
            return
        for token, prob in next_probs([*prompt, *answer]).items():
            if token in stop_tokens:
                found[answer, "eog"] = found.get((answer, "eog"), 0.0) + weight * prob
            else:
                extend((*answer, token), weight * prob)

    extend((), 1.0)
    return found


# ------------------------------------------------------------------ drafters and policies


def without(distribution: Distribution, earlier: Sequence[int]) -> Distribution | None:
    """Renormalized without the earlier siblings; None when nothing is left."""
    left = {token: prob for token, prob in as_dict(distribution).items() if token not in earlier}
    if not left:
        return None
    total = math.fsum(left.values())
    return Distribution(np.array(list(left)), np.array(list(left.values())) / total)


def draft_tree(drafter: Model, widths: Sequence[int], rng: Any, *, replace: bool) -> Draft:
    """Sampled siblings at every node, `widths[depth]` of them, breadth first."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[Distribution | None] = []
    level: list[tuple[int, Path]] = [(-1, ())]
    for width in widths:
        following: list[tuple[int, Path]] = []
        for parent, path in level:
            earlier: list[int] = []
            for _ in range(width):
                proposal = drafter(path) if replace else without(drafter(path), earlier)
                if proposal is None:
                    break
                token = proposal.sample(rng)
                earlier.append(token)
                following.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(parent)
                probs.append(proposal)
        level = following
    return Draft(tuple(tokens), tuple(parents), tuple(probs), (1.0,) * len(tokens))


class ScriptedDrafter:
    """Proposes what a function says, cut to the allowed depth and number of nodes."""

    decode_s = 0.0

    def __init__(self, script: Callable[[Sequence[int], int], Draft], *, max_nodes: int = 64) -> None:
        self._script = script
        self._max_nodes = max_nodes

    def propose(self, tokens: Sequence[int], policy: LengthPolicy, limit: int) -> Draft:
        """The script's draft; the first nodes stand before their children, so any first part is a draft."""
        if limit == 0 or not policy.draft_more([]):
            return Draft()
        return first_nodes(self._script(tokens, limit), limit, self._max_nodes)


def first_nodes(draft: Draft, depth: int, num_nodes: int) -> Draft:
    """The nodes of a draft up to a depth, at most so many."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    kept = [index for index in range(len(draft)) if depths[index] <= depth][:num_nodes]
    new = {old: index for index, old in enumerate(kept)}
    return Draft(
        tuple(draft.tokens[index] for index in kept),
        tuple(new.get(draft.parents[index], -1) for index in kept),
        tuple(draft.probs[index] for index in kept),
        tuple(draft.confidences[index] for index in kept),
    )


def random_tree(seed: int, num_vocab: int) -> Callable[[Sequence[int], int], Draft]:
    """A script of random point-mass trees and chains: empty drafts, duplicates and single nodes among them."""

    def script(tokens: Sequence[int], limit: int) -> Draft:
        rng = np.random.default_rng([seed, len(tokens), *tokens[-2:]])
        size = int(rng.integers(0, limit + 2))
        chain = rng.random() < 0.5
        nodes = tuple(int(token) for token in rng.integers(0, num_vocab, size))
        parents = tuple(index - 1 if chain else int(rng.integers(-1, index)) for index in range(size))
        return Draft(nodes, parents, (None,) * size, (1.0,) * size)

    return script


class RandomPolicy:
    """Draws its decisions, and learns nothing."""

    def __init__(self, seed: int, chance: float = 0.7) -> None:
        self._rng = np.random.default_rng(seed)
        self._chance = chance

    def draft_more(self, confidences: Sequence[float]) -> bool:
        """Mostly, up to 6."""
        return len(confidences) < 6 and bool(self._rng.random() < self._chance)

    def keep_last(self, confidences: Sequence[float]) -> bool:
        """Mostly."""
        return bool(self._rng.random() < self._chance)

    def learn(self, record: Round) -> None:
        """Nothing."""


def collect(events: Iterator[Any]) -> tuple[Path, str]:
    """(answer, reason it ended) of an event stream."""
    answer: list[int] = []
    reason = ""
    for event in events:
        if type(event).__name__ == "Token":
            answer.append(event.id)
        elif type(event).__name__ == "Finish":
            reason = event.reason
    return tuple(answer), reason
