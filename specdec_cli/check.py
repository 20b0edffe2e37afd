"""Is speculation lossless on these models and this machine? Three measurements a user can repeat.

1. Greedy answers equal the baseline's, up to near-ties, which are shown with both logits.
2. Drafted tokens are accepted as often as theory says: 1 - total variation of the two distributions, computed from
   both models' logits at the very positions that were tried.
3. First tokens, drawn through the whole loop, follow the target's own distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec_cli.distribution import Distribution, Floats
from specdec_cli.prompts import Prompt
from specdec_cli.sampling import Sampler
from specdec_cli.session import Session
from specdec_cli.stats import NearTie
from specdec_cli.types import PLAIN_DECODING, SamplingParams, Token

ALPHA = 1e-3
"""Probability that a correct program fails the second or the third part."""

_Z_ALPHA = 3.29
_MIN_EXPECTED = 5.0
_NUM_SIMULATIONS = 20_000


@dataclass(frozen=True, slots=True)
class GreedyCase:
    """One prompt decoded greedily with and without speculation.

    Attributes:
        category: of the prompt.
        num_tokens: compared tokens.
        near_tie: the first difference; None when the answers are equal.
    """

    category: str
    num_tokens: int
    near_tie: NearTie | None

    @property
    def passed(self) -> bool:
        """Equal, or different at a near-tie only."""
        return self.near_tie is None or self.near_tie.is_explained


@dataclass(slots=True)
class Acceptance:
    """Draft tokens that were tried, one prompt category or all.

    Attributes:
        num_tried: draft tokens that the verification came to.
        num_accepted: those accepted.
        sum_overlap: sum of 1 - total variation at their positions.
        sum_variance: sum of overlap * (1 - overlap).
        sum_match: sum of the target's probability of the draft's likeliest token: what argmax drafts, accepted when
            the target samples the same token, would be accepted with.
    """

    num_tried: int = 0
    num_accepted: int = 0
    sum_overlap: float = 0.0
    sum_variance: float = 0.0
    sum_match: float = 0.0

    def add(self, target: Distribution, proposal: Distribution, accepted: bool) -> None:
        """Count one trial."""
        overlap = min(1.0, target.overlap(proposal))
        self.num_tried += 1
        self.num_accepted += accepted
        self.sum_overlap += overlap
        self.sum_variance += overlap * (1 - overlap)
        self.sum_match += target.prob(proposal.mode())

    def merged(self, other: Acceptance) -> Acceptance:
        """Both together."""
        sums = (getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self))
        return Acceptance(*sums)

    @property
    def rate(self) -> float:
        """Accepted / tried."""
        return self.num_accepted / max(1, self.num_tried)

    @property
    def expected(self) -> float:
        """Mean of 1 - total variation."""
        return self.sum_overlap / max(1, self.num_tried)

    @property
    def match_rate(self) -> float:
        """Mean acceptance of argmax drafts by match at the same positions."""
        return self.sum_match / max(1, self.num_tried)

    @property
    def error(self) -> float:
        """Standard error of `rate` around `expected`."""
        return float(np.sqrt(self.sum_variance)) / max(1, self.num_tried)

    @property
    def interval(self) -> tuple[float, float]:
        """99.9 % confidence interval around `expected`, which decides: where `rate` should lie, within 0 and 1."""
        reach = _Z_ALPHA * self.error
        return max(0.0, self.expected - reach), min(1.0, self.expected + reach)

    @property
    def passed(self) -> bool:
        """Whether the rate is as expected, at level `ALPHA`; rounding is allowed for where nothing is random."""
        low, high = self.interval
        return self.num_tried > 0 and low - 1e-6 <= self.rate <= high + 1e-6


@dataclass(frozen=True, slots=True)
class FirstToken:
    """First tokens of many answers against the target's own distribution.

    Attributes:
        num_samples: answers begun.
        num_bins: likeliest tokens with enough expected hits, and one bin for the rest.
        statistic: chi-squared.
        p_value: how often a correct program has a larger statistic.
    """

    num_samples: int
    num_bins: int
    statistic: float
    p_value: float

    @property
    def passed(self) -> bool:
        """Whether the difference can be chance, at level `ALPHA`."""
        return self.p_value >= ALPHA


@dataclass(slots=True)
class CheckReport:
    """All three parts.

    Attributes:
        greedy: one case a prompt.
        acceptance: by category.
        first_token: the third part.
    """

    greedy: list[GreedyCase] = field(default_factory=list)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    first_token: FirstToken | None = None

    @property
    def total(self) -> Acceptance:
        """Acceptance over all categories."""
        total = Acceptance()
        for part in self.acceptance.values():
            total = total.merged(part)
        return total

    @property
    def passed(self) -> bool:
        """Whether every part that was run passed."""
        first = self.first_token is None or self.first_token.passed
        return all(case.passed for case in self.greedy) and self.total.passed and first


OnStep = Callable[[str, int, int], None]
"""Name of the part, steps done, steps of that part."""


def check(
    session: Session,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    num_first: int,
    on_step: OnStep = lambda *_: None,
) -> CheckReport:
    """Run the three parts.

    Args:
        session: with a draft model.
        prompts: what is answered.
        sampling: settings of the second and third part, with a seed; temperature above 0.
        max_tokens: tokens of each answer.
        num_first: answers begun in the third part.
        on_step: told about progress.
    """
    report = CheckReport()
    for number, prompt in enumerate(prompts):
        on_step("greedy", number, len(prompts))
        report.greedy.append(_greedy_case(session, prompt, max_tokens))
    for number, prompt in enumerate(prompts):
        on_step("acceptance", number, len(prompts))
        part = report.acceptance.setdefault(prompt.category, Acceptance())
        tokens = session.encode(prompt.text, raw=None)
        for _ in session.stream(tokens, sampling=sampling, max_tokens=max_tokens, on_trial=part.add):
            pass
    prompt = prompts[-1]
    report.first_token = _first_token(session, prompt, sampling, num_first, on_step)
    return report


def _greedy_case(session: Session, prompt: Prompt, max_tokens: int) -> GreedyCase:
    greedy = SamplingParams(temperature=0, seed=0)
    tokens = session.encode(prompt.text, raw=None)
    session.clear()
    drafted = session.generate(tokens, sampling=greedy, max_tokens=max_tokens).tokens
    session.clear()
    plain = session.generate(tokens, sampling=greedy, max_tokens=max_tokens, drafting=PLAIN_DECODING).tokens
    return GreedyCase(prompt.category, len(plain), session.near_tie(tokens, drafted, plain, greedy))


def _first_token(
    session: Session, prompt: Prompt, sampling: SamplingParams, num_samples: int, on_step: OnStep
) -> FirstToken:
    tokens = session.encode(prompt.text, raw=None)
    found: list[int] = []
    for number in range(num_samples):
        on_step("first token", number, num_samples)
        params = dataclasses.replace(sampling, seed=(sampling.seed or 0) + number)
        # Two tokens, so that the first one is drafted; an answer may also end at once.
        events = session.stream(tokens, sampling=params, max_tokens=2)
        found.append(next((event.id for event in events if isinstance(event, Token)), -1))
    target, _ = session.prepare(len(tokens), 2)
    target.sync(tokens)
    sampler = Sampler(sampling, session.target.num_vocab)
    expected = sampler.distribution(target.score()[0], tokens)
    return compare_counts(found, expected, session.target.stop_tokens, sampling.seed or 0)


def compare_counts(found: Sequence[int], expected: Distribution, ends: frozenset[int], seed: int) -> FirstToken:
    """Chi-squared of sampled tokens against a distribution, its p-value by simulation.

    Args:
        found: sampled token ids; -1 for an answer that ended at once.
        expected: what they should follow.
        ends: tokens that end an answer.
        seed: of the simulation.
    """
    ids = np.arange(expected.probs.size) if expected.ids is None else expected.ids
    is_end = np.isin(ids, sorted(ends))
    probs = np.append(np.where(is_end, 0.0, expected.probs), expected.probs[is_end].sum())
    labels = np.append(ids, -1)
    binned = np.flatnonzero(probs * len(found) >= _MIN_EXPECTED)
    shares = np.append(probs[binned], max(0.0, 1.0 - float(probs[binned].sum())))
    counts = np.array([found.count(int(labels[index])) for index in binned])
    counts = np.append(counts, len(found) - counts.sum())
    # An impossible token makes the statistic infinite, as it should.
    statistic = float(_chi_squared(counts[None], shares * len(found))[0])
    rng = np.random.default_rng(seed)
    simulated = rng.multinomial(len(found), shares / shares.sum(), size=_NUM_SIMULATIONS)
    larger = int(np.count_nonzero(_chi_squared(simulated, shares * len(found)) >= statistic - 1e-9))
    return FirstToken(len(found), len(shares), statistic, (larger + 1) / (_NUM_SIMULATIONS + 1))


def _chi_squared(counts: NDArray[np.int64], expected: Floats) -> Floats:
    """The statistic of each row of counts, shape (rows, bins); infinite where an impossible bin was hit."""
    possible = expected > 1e-9 * expected.sum()
    terms = (counts[:, possible] - expected[possible]) ** 2 / expected[possible]
    impossible = (counts[:, ~possible] > 0).any(axis=1)
    return np.where(impossible, np.inf, terms.sum(axis=1))
