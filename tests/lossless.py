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
from specdec_cli.types import Candidate, Draft, LengthPolicy, Round, SamplingParams

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
    logits: Sequence[float],
    params: SamplingParams,
    history: Sequence[int] = (),
    num_vocab: int | None = None,
    *,
    allowed: Sequence[int] | None = None,
    breakers: Mapping[int, Sequence[tuple[int, ...]]] | None = None,
) -> dict[int, float]:
    """Sampling as the documentation says it, one step at a time over a fully sorted list; Mirostat has its own."""
    row = adjusted(logits, params, history, num_vocab, breakers or {})
    order = ranked(row, allowed)
    if params.top_n_sigma > 0 and len(order) > 1:
        finite = [row[token] for token in order if row[token] > -math.inf]
        mean = math.fsum(finite) / len(finite)
        sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / len(finite))
        best = row[order[0]]
        row = [value if value >= best - params.top_n_sigma * sigma else -math.inf for value in row]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.typical_p < 1:
        order = _typical(row, order, params.typical_p)
    if params.top_p < 1:
        mass = _softmax([row[token] for token in order])
        size = next((n for n in range(1, len(order) + 1) if math.fsum(mass[:n]) >= params.top_p), len(order))
        order = order[:size]
    if params.min_p > 0:
        mass = _softmax([row[token] for token in order])
        order = [token for token, prob in zip(order, mass, strict=True) if prob >= params.min_p * mass[0]]
    outcomes_of_coin = [(1.0, order)]
    if params.xtc_probability > 0:
        outcomes_of_coin = [
            (1 - params.xtc_probability, order),
            (params.xtc_probability, _without_top_choices(row, order, params.xtc_threshold)),
        ]
    found: dict[int, float] = {}
    for share, left in outcomes_of_coin:
        for token, prob in _at_temperature(row, left, params).items():
            found[token] = found.get(token, 0.0) + share * prob
    return {token: prob for token, prob in found.items() if prob > 0.0}


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    history: Sequence[int],
    num_vocab: int | None,
    breakers: Mapping[int, Sequence[tuple[int, ...]]],
) -> list[float]:
    """Logits after bias, penalties and DRY; with Mirostat after bias alone."""
    row = [float(value) for value in logits[:num_vocab]]
    for token, bias in params.logit_bias:
        if token < len(row):
            row[token] += bias
    if params.mirostat:
        return row
    for token, count in Counter(last(history, params.repeat_last_n)).items():
        if token < len(row):
            value = row[token]
            value = value * params.repeat_penalty if value <= 0 else value / params.repeat_penalty
            row[token] = value - count * params.frequency_penalty - params.presence_penalty
    for token, penalty in reference_dry(last(history, params.dry_last_n), params, breakers, len(row)).items():
        row[token] -= penalty
    return row


def last(history: Sequence[int], size: int) -> list[int]:
    """The last tokens that count; -1 is all."""
    return list(history) if size < 0 else list(history)[len(history) - min(size, len(history)) :]


def ranked(row: Sequence[float], allowed: Sequence[int] | None) -> list[int]:
    """Candidates, likeliest first."""
    return sorted(range(len(row)) if allowed is None else allowed, key=lambda token: (-row[token], token))


def reference_dry(
    history: Sequence[int],
    params: SamplingParams,
    breakers: Mapping[int, Sequence[tuple[int, ...]]],
    num_vocab: int,
) -> dict[int, float]:
    """DRY by comparing the end of the text with every earlier place, token by token."""
    if params.dry_multiplier == 0 or params.dry_base < 1:
        return {}
    # Tokens behind the last complete breaker.
    reach = len(history)
    for start in range(len(history) - 1, -1, -1):
        ends = [
            start + 1 + len(tail)
            for tail in breakers.get(history[start], ())
            if tuple(history[start + 1 : start + 1 + len(tail)]) == tail
        ]
        if ends:
            reach = len(history) - max(ends)
            break
    found: dict[int, float] = {}
    for place in range(1, len(history)):
        length = 0
        while length < place and history[place - 1 - length] == history[len(history) - 1 - length]:
            length += 1
        length = min(length, reach)
        token = history[place]
        if length >= params.dry_allowed_length and token < num_vocab and () not in breakers.get(token, ()):
            penalty = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            found[token] = max(found.get(token, 0.0), penalty)
    return found


def _typical(row: Sequence[float], order: Sequence[int], typical_p: float) -> list[int]:
    mass = dict(zip(order, _softmax([row[token] for token in order]), strict=True))
    entropy = -math.fsum(prob * math.log(prob) for prob in mass.values() if prob > 0)
    distances = {token: abs(-math.log(prob) - entropy) if prob > 0 else math.inf for token, prob in mass.items()}
    by_distance = sorted(order, key=lambda token: distances[token])
    size = next((n for n in range(1, len(order) + 1) if math.fsum(mass[t] for t in by_distance[:n]) > typical_p), None)
    return sorted(by_distance[:size], key=lambda token: (-row[token], token))


def _without_top_choices(row: Sequence[float], order: Sequence[int], threshold: float) -> list[int]:
    mass = _softmax([row[token] for token in order])
    above = sum(prob >= threshold and prob > 0 for prob in mass)
    return list(order) if threshold > 0.5 or above < 2 else list(order[above - 1 :])


def _at_temperature(row: Sequence[float], order: Sequence[int], params: SamplingParams) -> dict[int, float]:
    temperature = params.temperature
    if params.dynatemp_range > 0 and len(order) > 1:
        mass = _softmax([row[token] for token in order])
        entropy = -math.fsum(prob * math.log(prob) for prob in mass if prob > 0)
        low, high = max(0.0, temperature - params.dynatemp_range), temperature + params.dynatemp_range
        temperature = low + (high - low) * (entropy / math.log(len(order))) ** params.dynatemp_exponent
    if temperature == 0:
        return {order[0]: 1.0}
    best = row[order[0]]
    return dict(zip(order, _softmax([(row[token] - best) / temperature for token in order]), strict=True))


def reference_mirostat(
    logits_after: Callable[[Sequence[int]], Sequence[float]],
    params: SamplingParams,
    tokens: Sequence[int],
    num_prompt: int,
    num_vocab: int | None = None,
    allowed_after: Callable[[Sequence[int]], Sequence[int] | None] = lambda tokens: None,
) -> dict[int, float]:
    """Mirostat after `tokens`, with the budget followed from the first token of the answer."""
    budget = 2 * params.mirostat_tau
    found: dict[int, float] = {}
    for position in range(num_prompt, len(tokens) + 1):
        before = tokens[:position]
        row = adjusted(logits_after(before), params, before, num_vocab, {})
        order = ranked(row, allowed_after(before))
        mass = _softmax([(row[token] - row[order[0]]) / (params.temperature or 1e-9) for token in order])
        if params.mirostat == 2:
            size = sum(prob > 0 and -math.log2(prob) <= budget for prob in mass)
        else:
            size = _mirostat_size(mass, budget, len(row))
        kept = _softmax([math.log(prob) for prob in mass[: max(size, 1)]])
        found = dict(zip(order, kept, strict=False))
        if position < len(tokens):
            budget -= params.mirostat_eta * (-math.log2(found[tokens[position]]) - params.mirostat_tau)
    return found


def _mirostat_size(mass: Sequence[float], budget: float, num_vocab: int) -> int:
    """The formula of Basu et al. 2021, section 4 and Algorithm 1."""
    pairs = [(i, mass[i], mass[i + 1]) for i in range(min(99, len(mass) - 1)) if mass[i + 1] > 0]
    ranks = [math.log((i + 2) / (i + 1)) for i, _, _ in pairs]
    if not ranks:
        return 1
    ratios = [math.log(first / second) for _, first, second in pairs]
    exponent = math.fsum(t * b for t, b in zip(ranks, ratios, strict=True)) / math.fsum(t * t for t in ranks)
    excess = exponent - 1
    return int((excess * 2**budget / (1 - num_vocab**-excess)) ** (1 / exponent))


class Alternating:
    """A grammar with a state: no token twice in a row, and token 0 only at even places of the answer."""

    def __init__(self, num_vocab: int, num_prompt: int) -> None:
        self._num_vocab = num_vocab
        self._num_prompt = num_prompt
        self.asked: list[Path] = []

    def allowed(self, tokens: Sequence[int], path: Sequence[int] = ()) -> Any:
        """Ascending ids."""
        whole = [*tokens, *path]
        self.asked.append(tuple(whole))
        odd = (len(whole) - self._num_prompt) % 2 == 1
        return np.array([t for t in range(self._num_vocab) if t != whole[-1] and not (t == 0 and odd)])


def _softmax(values: Sequence[float]) -> list[float]:
    best = max(values)
    weights = [math.exp(value - best) for value in values]
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


class RandomPolicy(LengthPolicy):
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


class RandomTrees(RandomPolicy):
    """Draws several candidates at a time, up to a number of tokens, also further ones of a node after deeper ones.

    Args:
        seed: of its decisions.
        max_tokens: of a draft.
        wide: mostly take many.
    """

    def __init__(self, seed: int, max_tokens: int, *, wide: bool = False) -> None:
        super().__init__(seed, 0.95 if wide else 0.8)
        self._max_tokens = max_tokens
        self._widest = 8 if wide else 3

    def branch(self, confidences: Sequence[float], candidates: Sequence[Candidate]) -> tuple[int, bool]:
        """Any number, as also a policy may that looks at what was drawn before."""
        reaches = [candidate.reach for candidate in candidates]
        assert reaches == sorted(reaches, reverse=True)
        num = int(self._rng.integers(1, self._widest + 1))
        num = min(num, len(candidates), self._max_tokens - len(confidences))
        return num, num > 0 and bool(self._rng.random() < self._chance)


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
