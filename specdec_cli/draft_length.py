"""How long a draft gets: a fixed length, or the cost rule with what was measured on this machine.

A round that drafts K tokens costs K d + t(K + 1) and yields 1 + accepted tokens. The rate E[tokens] / E[time] is
largest when every round maximizes E[tokens] - R E[time], with R that best rate itself (renewal-reward; Dinkelbach
1967). Where the target's cache cannot drop what was rejected, a rejection costs r more, in the next round: with A the
probability that all drafted tokens are accepted, that is (1 - A) r, and one more token adds (A - A') r of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdec_cli.acceptance import Acceptance, model_prior, sibling_prior
from specdec_cli.cost import CostModel, Timing
from specdec_cli.distribution import Floats
from specdec_cli.types import Candidate, Decision, LengthPolicy, Reason, Round


@dataclass(frozen=True, slots=True)
class Fixed(LengthPolicy):
    """Up to `num_draft_tokens`, ended early by the first token below a confidence.

    Attributes:
        num_draft_tokens: the most tokens of a draft; 0 is plain decoding.
        min_confidence: a token drafted with less is dropped and the draft ends; 0 never ends it.
    """

    num_draft_tokens: int
    min_confidence: float = 0.0

    def draft_more(self, confidences: Sequence[float]) -> bool:
        """Whether the draft is shorter than allowed."""
        return len(confidences) < self.num_draft_tokens

    def keep_last(self, confidences: Sequence[float]) -> bool:
        """Whether the last token is confident enough."""
        return confidences[-1] >= self.min_confidence

    def acceptance(self, confidence: float, rank: int) -> float:
        """What is usual: it orders the branches of a tree."""
        return float((sibling_prior if rank else model_prior)(confidence))

    def learn(self, record: Round) -> None:
        """Nothing to learn: the length is fixed."""


SIBLING = "sibling"
"""Name of the acceptance of a draft model's further choices."""

_HORIZON = 16
"""The longest draft by which is decided whether drafting could pay at all."""

_STEP = 0.06
_NUM_REACHES = 60
"""Grid of the look-ahead: probabilities exp(-0.06 i) that the whole draft so far is accepted."""

_REFRESH_EVERY, _REFRESH_OFF = 3, 32
_RATE_GAIN = 1 / 24
_INVESTMENT_ROUNDS, _RETURN = 64.0, 2.0
"""Reading what a draft model missed must promise twice its time in so many rounds: gains are guessed, costs are not."""

_PROBE_SHARE = 0.012
_FIRST_ALLOWANCE = 0.5
_MAX_ALLOWANCE, _MAX_DEBT = 4.0, 1.0
"""Probing may lose this share of the time; the allowances are in target passes. Reading the prompt is not paid back
beyond one pass, or in a long answer it would keep the rule from noticing that the text has become easy."""

_MIN_GAP, _MAX_GAP = 8, 64

_FIRST_CHECK, _LAST_CHECK, _CLEAR_GAIN = 8, 256, 1.5
"""After 8, 16, ... 256 rounds with drafts in a row one is plain, unless drafting pays clearly: t(1) might be wrong."""

_EASY, _WORTH_READING, _EASY_SHARE, _MOST_LEFT = 0.95, 0.5, 1 / 20, 256
"""With each token accepted in 95 %, drafting must gain this many tokens a round for the prompt to be read for it, and
pay for that though only one text in twenty is so easy."""

_HOPE_GAP, _HOPE_GAIN, _HOPE_SHARE = 4, 1 / 2, 0.3
"""A target that has become surer by 30 % of what was missing is a reason to probe early, and beyond the allowance."""

_OVERDRAFT, _CREDIT_ROUNDS = 2.0, 200
"""By two target passes in a long answer; a short one could not earn them back."""

_FIRST_LENGTH, _FIRST_READY = 14, 4
"""Longer drafts than this, or ready chains, wait for a long acceptance: small errors of the estimates multiply."""

_MARGIN = 0.05
_LOWEST_BALANCE, _FIRST_BALANCE, _HIGHEST_BALANCE = -3.0, 0.0, 2.0
_FORGET_BALANCE = 1 / 48
"""A drafter that has lost more than it gained must promise more: 0.05 tokens a round for each token lost."""


class CostRule(LengthPolicy):
    """Drafts while one more token is worth its time, and not at all where drafting does not pay.

    Args:
        costs: d and t(n), by which everything is decided.
        acceptances: by drafter, what its confidence is worth, and as "sibling" that of a draft model's further choices;
            kept up to date with every round.
        max_draft_tokens: the longest draft.
        max_leaves: of the widest tree that the draft model may make; 1 is chains only.
        observed: what the rounds really take is learned here. None is `costs` itself. Anything else makes the lengths a
            function of the tokens alone: a seed then repeats its answer, though no two runs take the same times.
    """

    def __init__(
        self,
        costs: CostModel,
        acceptances: Mapping[str, Acceptance],
        max_draft_tokens: int = 64,
        observed: CostModel | None = None,
        max_leaves: int = 1,
    ) -> None:
        self._costs = costs
        self._observed = observed or costs
        self._acceptances = {SIBLING: Acceptance(sibling_prior), **acceptances}
        self._max_draft_tokens = max_draft_tokens
        self._max_leaves = max_leaves
        # As if plain decoding had gone on for long: a lucky first round must not raise the price of time.
        self._num_tokens, self._seconds = 1.0, costs.target(1)
        self._allowance = _FIRST_ALLOWANCE * costs.target(1)
        self._gap, self._num_off = 1, 0
        self._check_gap, self._num_on = _FIRST_CHECK, 0
        self._sureness = self._probed_at = 0.5
        self._lookaheads: dict[str, tuple[int, _Lookahead]] = {}
        self._num_rounds = 0
        self._longest = dict.fromkeys(acceptances, 0)
        self._lag = 1
        self._was_rejected = False
        for acceptance in self._acceptances.values():
            acceptance.begin()
        self._turn: _Turn | None = None
        self._balances = dict.fromkeys(acceptances, _FIRST_BALANCE)

    def margin(self, drafter: str) -> float:
        """Gain that a round by this drafter must promise, in tokens: estimates that proved too high need to."""
        return _MARGIN * max(0.0, -self._balances[drafter])

    @property
    def rate(self) -> float:
        """R: what time is worth, in tokens per second; the recent rate, but never below plain decoding's."""
        return max(1.0 / self._costs.target(1), self._num_tokens / self._seconds)

    def of(self, drafter: str, num_behind: int, limit: int) -> _Turn:
        """The rule for one drafter in this round."""
        acceptance = self._acceptances[drafter]
        # What a cache happens to hold from before must not decide about a sampled answer.
        num_behind = num_behind if self._observed is self._costs else self._lag
        first = _FIRST_LENGTH if drafter in self._costs.drafts else _FIRST_READY
        longest = min(limit, self._max_draft_tokens, first + 2 * self._longest[drafter])
        self._turn = _Turn(self, drafter, num_behind, longest, acceptance, self._max_draft_tokens, limit)
        return self._turn

    def draft_more(self, confidences: Sequence[float]) -> bool:
        """Only drafters know what they cost."""
        raise NotImplementedError("ask `of(drafter)`")

    def keep_last(self, confidences: Sequence[float]) -> bool:
        """Only drafters know what they cost."""
        raise NotImplementedError("ask `of(drafter)`")

    @property
    def watches(self) -> bool:
        """Every fourth round without a draft: it takes a pass over the target's row."""
        return self._num_off % 4 == 1

    @property
    def decision(self) -> Decision | None:
        """The numbers behind the last draft's length."""
        return self._turn.decision if self._turn else None

    def learn(self, record: Round) -> None:
        """Take times and outcomes of a finished round into account."""
        ranks = record.ranks
        for node, outcome in zip(record.tried_nodes, record.outcomes, strict=True):
            name = SIBLING if ranks[node] else record.drafters[node] if record.drafters else ""
            if name in self._acceptances:
                self._acceptances[name].learn(record.confidences[node], outcome)
        self._num_rounds += 1
        if self._was_rejected:
            self._observed.learn_rejection(1 + record.num_drafted, record.num_reread)
        self._was_rejected = record.num_accepted < record.num_drafted
        for drafter in record.drafters[:1]:
            self._longest[drafter] = max(self._longest.get(drafter, 0), record.num_accepted)
        stepped = self._turn is not None and self._turn.num_steps > 0
        ends_accepted = 0 < record.num_drafted == record.num_accepted
        self._lag = 1 + ends_accepted if stepped else self._lag + record.num_tokens
        if record.index == 0:
            # It has read the prompt; its time says nothing about a round. What drafting cost comes off later probes.
            drafting_s = self._turn.counted_s if self._turn else 0.0
            self._allowance = max(self._allowance - drafting_s, -_MAX_DEBT * self._costs.target(1))
            return
        if self.is_check_due:
            self._check_gap = min(2 * self._check_gap, _LAST_CHECK)
        self._num_on = self._num_on + 1 if record.num_drafted else 0
        num_decoded = 1 + record.num_drafted + record.num_reread
        self._observed.target.learn(num_decoded, record.total_s - record.propose_s)
        seconds = record.total_s
        if self._observed is not self._costs:
            proposing_s = self._turn.counted_s if self._turn else 0.0
            seconds = proposing_s + self._costs.target(num_decoded)
        self._num_tokens += _RATE_GAIN * (record.num_tokens - self._num_tokens)
        self._seconds += _RATE_GAIN * (seconds - self._seconds)
        self._settle(record, seconds)
        self._turn = None

    def _settle(self, record: Round, seconds: float) -> None:
        """Book what drafting gained or cost, and choose the time of the next probe."""
        plain_s = self._costs.target(1)
        # Reading again what a rejection lost is a price of the round with that rejection.
        num_scored = 1 + record.num_drafted
        own_s = seconds - (self._costs.target(num_scored + record.num_reread) - self._costs.target(num_scored))
        own_s += self._costs.rejected_s if self._was_rejected else 0.0
        turn, gained = self._turn, record.num_tokens - own_s / plain_s
        for drafter, balance in self._balances.items():
            if turn is not None and drafter == turn.drafter and (record.num_drafted or turn.num_steps):
                self._balances[drafter] = min(max(balance + gained, _LOWEST_BALANCE), _HIGHEST_BALANCE)
            else:
                self._balances[drafter] = balance * (1 - _FORGET_BALANCE)
        self._allowance = min(self._allowance + _PROBE_SHARE * seconds, _MAX_ALLOWANCE * plain_s)
        if turn is None or not turn.num_steps:
            self._num_off += 1
            if record.target_confidence:
                self._sureness += _HOPE_GAIN * (record.target_confidence - self._sureness)
            return
        self._num_off = 0
        if not turn.is_probe:
            self._gap = _MIN_GAP
            return
        # What was missed is read now, so that the next probe is cheap; hope must not be paid for twice.
        lost = min(-gained, 1.0) if self._is_hopeful else -gained
        self._allowance = max(self._allowance - max(0.0, lost) * plain_s, -_MAX_ALLOWANCE * plain_s)
        self._probed_at += 0.5 * (self._sureness - self._probed_at)
        # Known before the token was scored, so that luck does not decide.
        self._gap = 1 if turn.num_kept else min(max(_MIN_GAP, 2 * self._gap), _MAX_GAP)

    @property
    def is_first_round(self) -> bool:
        """Whether nothing has been learned of this answer yet."""
        return self._num_rounds == 0

    @property
    def is_check_due(self) -> bool:
        """Whether what plain decoding takes has not been seen for long, and the gain over it is small."""
        return self._num_on >= self._check_gap and self.rate * self._costs.target(1) < _CLEAR_GAIN

    def may_probe(self, seconds: float) -> bool:
        """Whether a probe of so many seconds is due, and within the allowance; earlier where the text grows easier."""
        if self._is_hopeful and self._num_off + 1 >= _HOPE_GAP:
            credit = _OVERDRAFT * min(1.0, self._num_rounds / _CREDIT_ROUNDS)
            return seconds <= self._allowance + credit * self._costs.target(1)
        return self._num_off + 1 >= self._gap and seconds <= self._allowance

    @property
    def _is_hopeful(self) -> bool:
        return self._sureness > self._probed_at + _HOPE_SHARE * (1.0 - self._probed_at)

    def lookahead(self, drafter: str) -> _Lookahead:
        """What going on is worth for this drafter, at most a few rounds old."""
        made, lookahead = self._lookaheads.get(drafter, (-_REFRESH_EVERY, None))
        if lookahead is None or self._num_rounds - made >= (_REFRESH_EVERY if self._num_off < 2 else _REFRESH_OFF):
            step_s = self._costs.step_s(drafter)
            further = self.siblings.mean if self._max_leaves > 1 else 0.0
            lookahead = _Lookahead.build(self._acceptances[drafter], step_s, self._costs, self.rate, further)
            self._lookaheads[drafter] = self._num_rounds, lookahead
        return lookahead

    @property
    def siblings(self) -> Acceptance:
        """What a draft model's second, third, ... choice is worth."""
        return self._acceptances[SIBLING]

    @property
    def costs(self) -> CostModel:
        """d and t(n) by which is decided."""
        return self._costs

    @property
    def observed(self) -> CostModel:
        """d and t(n) as they turn out."""
        return self._observed


@dataclass(slots=True)
class _Turn(LengthPolicy):
    """The rule as one drafter sees it in one round."""

    rule: CostRule
    drafter: str
    num_behind: int
    limit: int
    learned: Acceptance
    max_nodes: int
    num_left: int
    reach: float = 1.0
    num_kept: int = 0
    num_steps: int = 0
    is_probe: bool = False
    counted_s: float = 0.0
    reason: Reason = "off"

    def draft_more(self, confidences: Sequence[float]) -> bool:
        """Whether to begin: the expected gain is positive; in the beginning also to see whether it has become so."""
        del confidences
        if self.limit <= 0:
            self.reason = "end"
            return False
        if self.gain() > 0:
            self.reason = "check" if self.rule.is_check_due else self.reason
            return not self.rule.is_check_due
        step_s = self.rule.costs.step_s(self.drafter, self.num_behind)
        # Only a drafter that has read the prompt can tell; later there is a budget.
        self.is_probe = self._could_pay() if self.rule.is_first_round else self.rule.may_probe(step_s)
        return self.is_probe

    def _could_pay(self) -> bool:
        """Whether drafting would pay well with a text that the drafter knows well, what it has to read included."""
        costs, rate = self.rule.costs, self.rule.rate
        missed = rate * costs.step_s(self.drafter, self.num_behind)
        lengths = np.arange(1, min(_HORIZON, self.limit) + 1)
        spent = lengths * costs.step_s(self.drafter) + costs.target.table[lengths] - costs.target.table[0]
        spent += costs.rejected_s * (1 - _EASY**lengths)
        accepted = np.cumsum(_EASY**lengths)
        gains = accepted - rate * spent
        best = int(gains.argmax())
        num_rounds = min(self.num_left, _MOST_LEFT) / (1 + accepted[best])
        return bool(gains[best] > max(_WORTH_READING, missed / (_EASY_SHARE * num_rounds)))

    def keep_last(self, confidences: Sequence[float]) -> bool:
        """Only what all tokens before are worth tells."""
        raise NotImplementedError("ask `branch(confidences, candidates)`")

    def acceptance(self, confidence: float, rank: int) -> float:
        """By what was learned of the drafter's tokens, or of its further choices."""
        learned = self.rule.siblings if rank else self.learned
        if rank < 2:
            learned.see(confidence)
        return learned.estimate(confidence)

    def branch(self, confidences: Sequence[float], candidates: Sequence[Candidate]) -> tuple[int, bool]:
        """Go on behind those whose share of one more draft step pays; when none does, add those worth their place."""
        num = len(confidences)
        lookahead = self.rule.lookahead(self.drafter)
        risked = self._risked(candidates[0], lookahead)
        num_taken = self._step(num, candidates, lookahead, risked)
        goes_on = num_taken > 0
        if not goes_on:
            is_last = candidates[0].depth >= self.limit or num + 1 >= self.max_nodes
            num_taken = self._rest(num, candidates, lookahead, risked)
            self.reason = "end" if is_last and num_taken else "cost"
        if num_taken:
            self.reach = math.fsum(candidate.reach for candidate in candidates[:num_taken])
            self.num_kept = num + num_taken
        return num_taken, goes_on

    def is_promising(self, confidences: Sequence[float], confidence: float) -> bool:
        """By the acceptance of such a token; both gains grow with it."""
        num = len(confidences)
        candidate = Candidate(confidence, self.reach * self.learned.estimate(confidence), num + 1)
        lookahead = self.rule.lookahead(self.drafter)
        risked = self._risked(candidate, lookahead)
        return max(self._step(num, [candidate], lookahead, risked), self._rest(num, [candidate], lookahead, risked)) > 0

    def _risked(self, candidate: Candidate, lookahead: _Lookahead) -> float:
        """What a rejection there may cost; only of chains: what takes trees can drop a rejected branch."""
        return lookahead.price * max(0.0, self.reach - candidate.reach)

    def _step(self, num: int, candidates: Sequence[Candidate], lookahead: _Lookahead, risked: float) -> int:
        """How many of the candidates to decode in one more draft step, which they pay for together."""
        step_s = self.rule.costs.step_s
        best, best_gain, more, worth = 0, 0.0, 0.0, 0.0
        num_before = num
        for index, candidate in enumerate(candidates[: max(0, self.max_nodes - num - 1)], 1):
            if candidate.depth >= self.limit:
                break
            if index == 2:
                # The places that the first branch will want are worth more to it.
                num_before = lookahead.filled(num + 1, candidates[0].reach) - 1
            place = num_before + index
            # What is gained behind this one, were the step its own.
            gain = max(lookahead.more(place, candidate.reach), -lookahead.step_cost)
            if index > 1 and gain <= -lookahead.step_cost:
                break
            more += gain
            worth += min(0.0, candidate.reach - lookahead.pass_cost(place) - (risked if index == 1 else 0.0))
            saved = 0.0
            if index > 1:
                ratio = step_s(self.drafter, index) / step_s(self.drafter)
                saved = lookahead.step_cost * (index - ratio)
            if more + saved > 0 and worth + more + saved >= best_gain:
                best, best_gain = index, worth + more + saved
        return best

    def _rest(self, num: int, candidates: Sequence[Candidate], lookahead: _Lookahead, risked: float) -> int:
        """How many of the candidates are worth scoring when nothing comes behind them."""
        best, best_gain, gain = 0, 0.0, -risked
        for index, candidate in enumerate(candidates[: max(0, self.max_nodes - num)], 1):
            gain += candidate.reach - lookahead.pass_cost(num + index)
            if gain >= best_gain:
                best, best_gain = index, gain
        return best

    def best_length(self, confidences: Sequence[float]) -> int:
        """The prefix with the largest expected gain; the tokens are there already."""
        values, reaches = self._ready(confidences)
        best = int(values.argmax())
        if values[best] <= self.rule.margin(self.drafter):
            best = 0
        is_check = best > 0 and self.rule.is_check_due
        best = 0 if is_check else best
        self.reach, self.num_kept = float(reaches[best]), best
        self.reason = "check" if is_check else "cost" if best < len(confidences) else "end"
        return best

    def gain(self, confidences: Sequence[float] | None = None) -> float:
        """Expected tokens of the round beyond plain decoding's, its time taken off at the rate R."""
        if confidences is not None:
            return float(self._ready(confidences)[0].max()) - self.rule.margin(self.drafter)
        costs, rate = self.rule.costs, self.rule.rate
        # A draft that is accepted to its end leaves two tokens to read, not one: that is no investment.
        two_s = costs.step_s(self.drafter, 2)
        missed_s = costs.step_s(self.drafter, max(self.num_behind, 2)) - two_s
        num_rounds = max(1.0, min(_INVESTMENT_ROUNDS, self.num_left / 2))
        spent_s = self.learned.mean * (two_s - costs.step_s(self.drafter)) + _RETURN * missed_s / num_rounds
        gain = self.rule.lookahead(self.drafter).more(0, 1.0) - rate * spent_s
        return gain - self.rule.margin(self.drafter)

    def spent(self, num_tokens: int, seconds: float) -> None:
        """A draft step took so long."""
        self.num_steps += 1
        self.counted_s += self.rule.costs.step_s(self.drafter, num_tokens)
        drafts = self.rule.observed.drafts
        if self.drafter in drafts:
            drafts[self.drafter].learn(num_tokens, seconds)
        else:
            drafts[self.drafter] = Timing({num_tokens: seconds})

    def learn(self, record: Round) -> None:
        """The rule learns, not one drafter's view of it."""
        self.rule.learn(record)

    @property
    def decision(self) -> Decision:
        """The numbers that were compared last."""
        target, num = self.rule.costs.target, self.num_kept
        reason: Reason = "probe" if self.is_probe else self.reason
        return Decision(
            reason, self.reach, self.learned.mean, self.rule.rate, self.rule.costs.step_s(self.drafter),
            target(num + 1), target(num + 2),
        )  # fmt: skip

    def _ready(self, confidences: Sequence[float]) -> tuple[Floats, Floats]:
        """Gain and reach of each prefix of a ready chain, shape (1 + len(confidences),); the first is nothing."""
        shown = confidences[: self.limit]
        reaches = np.cumprod([1.0, *(self.learned.estimate(c) for c in shown)])
        costs = self.rule.costs
        spent = costs.target.table[: len(shown) + 1] - costs.target.table[0] + costs.rejected_s * (1.0 - reaches)
        return np.cumsum(reaches) - 1.0 - self.rule.rate * spent, reaches


@dataclass(frozen=True, slots=True)
class _Lookahead:
    """Expected gain, in tokens, of drafting on: dynamic programming over draft length and reach.

    Attributes:
        gains: gain of one more step and the best that follows, by length and reach, shape (num, _NUM_REACHES) where num
            is `MAX_TABULATED` - 1.
        pass_costs: the target's additional time for token 1, 2, ..., in tokens, shape (num,).
        step_cost: a draft step's time in tokens.
        price: of a rejection, in tokens.
        lasts: the smallest reach behind which one more step pays, by length, infinite where none does, shape (num,).
        usual: acceptance of a token about which nothing is known yet.
    """

    gains: Floats
    pass_costs: Floats
    step_cost: float
    price: float
    lasts: Floats
    usual: float

    @classmethod
    def build(
        cls, acceptance: Acceptance, step_s: float, costs: CostModel, rate: float, further: float = 0.0
    ) -> _Lookahead:
        """From the end backwards: V(n) = max(0, E[max(0, A' - cost(n+1) - (A - A') price + V(n+1))] - R d).

        Args:
            acceptance: of the tokens to come.
            step_s: d.
            costs: t(n), and what a rejection costs.
            rate: R.
            further: in a tree, acceptance of a second choice where the first is rejected: one more place to go on.
        """
        pass_costs, price = rate * np.diff(costs.target.table), rate * costs.rejected_s
        estimates = np.clip(acceptance.estimates, 1e-6, 1.0)
        choices = [estimates, np.clip((1.0 - estimates) * further, 1e-6, 1.0)] if further else [estimates]
        acceptances = np.concatenate(choices)
        shares = np.tile(acceptance.shares, len(choices))
        reaches = np.exp(-_STEP * np.arange(_NUM_REACHES))
        places = np.arange(_NUM_REACHES)[:, None] - np.log(acceptances)[None, :] / _STEP
        low = np.minimum(places.astype(np.intp), _NUM_REACHES)
        part = np.clip(places - low, 0, 1)
        reached = reaches[:, None] * acceptances[None, :]
        kept = reached - price * (reaches[:, None] - reached)
        gains = np.empty((pass_costs.size, _NUM_REACHES))
        value = np.zeros(_NUM_REACHES + 2)
        for num in range(pass_costs.size - 1, -1, -1):
            worth = part * (value[1:] - value[:-1]).take(low)
            worth += value.take(low)
            worth += kept
            worth -= pass_costs[num]
            gains[num] = np.maximum(0.0, worth, out=worth) @ shares - rate * step_s
            np.maximum(0.0, gains[num], out=value[:_NUM_REACHES])
        lasts = np.append(reaches, np.inf)[np.sum(gains > 0, axis=1) - 1]
        return cls(gains, pass_costs, rate * step_s, price, lasts, acceptance.mean)

    def more(self, num: int, reach: float) -> float:
        """Gain of drafting token num + 1 after `num` tokens that are all accepted with probability `reach`."""
        place = -math.log(max(reach, 1e-9)) / _STEP
        if place >= _NUM_REACHES - 1:
            return -1.0
        row, low = self.gains[min(num, len(self.gains) - 1)], int(place)
        return float(row[low] + (place - low) * (row[low + 1] - row[low]))

    def filled(self, num: int, reach: float) -> int:
        """Tokens that a draft of `num` has when its branch of this reach has gone on as far as is to be expected."""
        lasts = self.lasts[num:]
        goes_on = reach * self.usual ** np.arange(lasts.size) >= lasts
        return num + int(lasts.size if goes_on.all() else goes_on.argmin())

    def pass_cost(self, num: int) -> float:
        """The target's additional time, in tokens, for draft token `num`, from 1."""
        return float(self.pass_costs[min(num, self.pass_costs.size) - 1])
