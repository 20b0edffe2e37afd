"""What speculation gains on this machine, measured so that it can be believed.

Baseline and settings take turns prompt by prompt, in one process, each answer from empty caches. A ratio is formed only
between two answers to the same prompt in the same repeat, so that whatever slows the machine for minutes slows both.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from specdec_cli import interrupt
from specdec_cli.cost import CostModel
from specdec_cli.errors import ContextFullError, UsageError
from specdec_cli.interval import Ratio, geometric_mean
from specdec_cli.limits import DrafterName
from specdec_cli.prompts import Prompt
from specdec_cli.session import Session
from specdec_cli.stats import NearTie, Stats
from specdec_cli.types import (
    DEFAULT_BRANCHES,
    PLAIN_DECODING,
    Drafting,
    Finish,
    FinishReason,
    Round,
    SamplingParams,
    Token,
)

WARM_UP_TOKENS = 8

NOISY_SPREAD = 0.10
BUSY_LOAD = 0.20
"""Beyond these a report says that its numbers are doubtful."""

OFF = "off"
"""Name of the best setting when none beats plain decoding."""

_SWEEP_LENGTHS = (1, 2, 3, 5, 8)
_SWEEP_CONFIDENCE = 0.5


@dataclass(frozen=True, slots=True)
class Setting:
    """A way of drafting, and what it is called in reports."""

    name: str
    drafting: Drafting

    @classmethod
    def of(cls, drafting: Drafting) -> Setting:
        """Named by what is in force: a confidence counts with a number of tokens only."""
        name: str = drafting.drafter
        if drafting.num_draft_tokens is not None:
            name += f" k={drafting.num_draft_tokens} p={drafting.min_confidence:g}"
        if drafting.drafter in {"auto", "tree"} and drafting.max_branches != DEFAULT_BRANCHES:
            name += f" b={drafting.max_branches}"
        return cls(name, drafting)


BASELINE = Setting("baseline", PLAIN_DECODING)


def sweep_settings(has_model: bool) -> list[Setting]:
    """Drafters with lengths by cost, then lengths, then confidences around the middle length.

    Args:
        has_model: whether there is a draft model; without one only repeated text can be drafted.
    """
    main: DrafterName = "model" if has_model else "ngram"
    found = [Drafting(name) for name in ("auto", "model", "tree", "ngram")] if has_model else [Drafting("ngram")]
    found += [Drafting(main, num, _SWEEP_CONFIDENCE) for num in _SWEEP_LENGTHS]
    found += [Drafting(main, 5, confidence) for confidence in (0.0, 0.75)]
    if has_model:
        found.append(Drafting("ngram", 5, _SWEEP_CONFIDENCE))
    return [Setting.of(drafting) for drafting in found]


def select(prompts: Sequence[Prompt], categories: Sequence[str] = (), limit: int | None = None) -> list[Prompt]:
    """Prompts of some categories, the first few of each, every text once.

    Args:
        prompts: what there is.
        categories: names to keep; none is all.
        limit: the most prompts of a category.

    Raises:
        UsageError: a category that no prompt has.
    """
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for name in categories:
        if name not in known:
            raise UsageError(f"no prompt is of the category `{name}`", f"there are: {', '.join(known)}")
    chosen: dict[str, list[Prompt]] = {name: [] for name in known if not categories or name in categories}
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.category in chosen:
            distinct.setdefault(prompt.text, prompt)
    for prompt in distinct.values():
        chosen[prompt.category].append(prompt)
    return [prompt for members in chosen.values() for prompt in members[:limit]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        prompts: all different.
        settings: compared with the baseline.
        sampling: settings of every answer; with repeats its seed is counted up, so that each has its own.
        max_tokens: of each answer.
        num_repeats: how often each prompt is answered in each setting.
    """

    prompts: Sequence[Prompt]
    settings: Sequence[Setting]
    sampling: SamplingParams
    max_tokens: int
    num_repeats: int

    @property
    def num_answers(self) -> int:
        """Answers in all, the warm-up left out."""
        return len(self.prompts) * self.num_repeats * (1 + len(self.settings))

    def turns(self) -> Iterator[tuple[int, int, Setting]]:
        """(repeat, index of the prompt, setting) in the order of measuring: who goes first changes every time."""
        every = [BASELINE, *self.settings]
        for repeat in range(self.num_repeats):
            for prompt in range(len(self.prompts)):
                first = (repeat + prompt) % len(every)
                for setting in [*every[first:], *every[:first]]:
                    yield repeat, prompt, setting

    def seeded(self, repeat: int) -> SamplingParams:
        """The sampling settings of one repeat."""
        seed = self.sampling.seed
        return self.sampling if seed is None else dataclasses.replace(self.sampling, seed=(seed + repeat) % 2**64)


@dataclass(frozen=True, slots=True)
class Answer:
    """One measured answer.

    Attributes:
        setting: name.
        prompt: index in the plan.
        category: of the prompt.
        repeat: from 0.
        seed: of its random generator; None for greedy answers without one.
        reason: why it ended.
        tokens: ids.
        stats: counts and times.
        rounds: all of them, in order.
    """

    setting: str
    prompt: int
    category: str
    repeat: int
    seed: int | None
    reason: FinishReason
    tokens: tuple[int, ...]
    stats: Stats
    rounds: tuple[Round, ...]

    def oracle_s(self, costs: CostModel) -> float:
        """Seconds after the first round if every draft had stopped at its last accepted token."""
        later = self.rounds[1:]
        return self.stats.generation_s + sum(oracle_round_s(record, costs) - record.total_s for record in later)

    def oracle_per_s(self, costs: CostModel) -> float:
        """Tokens per second with perfect stopping; 0.0 when there was no second round."""
        num, seconds = self.stats.num_tokens - self.stats.num_first_tokens, self.oracle_s(costs)
        return num / seconds if num > 0 and seconds > 0 else 0.0


def oracle_round_s(record: Round, costs: CostModel) -> float:
    """Seconds of a round whose draft stops at its last accepted token: a d + t(a + 1) for the same a + 1 tokens.

    A round whose whole draft was accepted stays as it was: nobody knows what a longer one would have given.
    """
    num = record.num_accepted
    if num >= record.num_drafted:
        return record.total_s
    drafters = record.drafters or ("model",) * num
    return sum(costs.step_s(drafter) for drafter in drafters[:num]) + costs.target(num + 1)


OnStep = Callable[[int, int], None]
"""Answers done, answers in all."""


@dataclass(slots=True)
class Measurement:
    """What was measured.

    Attributes:
        plan: what was wanted.
        costs: d and t(n) of these models here.
        answers: in the order of measuring.
        interrupted: whether Ctrl-C ended it.
    """

    plan: Plan
    costs: CostModel
    answers: list[Answer] = field(default_factory=list)
    interrupted: bool = False

    @property
    def categories(self) -> list[str]:
        """Categories of the prompts, in order."""
        return list(dict.fromkeys(prompt.category for prompt in self.plan.prompts))

    def pairs(self, setting: str, category: str | None = None) -> list[Pair]:
        """Answers of one setting, each beside the baseline's to the same prompt in the same repeat.

        Args:
            setting: name.
            category: of the prompts; None is all.
        """
        base = {(a.prompt, a.repeat): a for a in self.answers if a.setting == BASELINE.name}
        return [
            Pair(base[answer.prompt, answer.repeat], answer)
            for answer in self.answers
            if answer.setting == setting
            and category in (None, answer.category)
            and (answer.prompt, answer.repeat) in base
        ]

    def part(self, setting: str, category: str | None = None) -> Part:
        """The result of one setting in one category, or in all."""
        return Part.of(self.pairs(setting, category), self.costs)

    @property
    def best(self) -> Setting | None:
        """The setting with the largest geometric-mean speed-up of those whose interval is above 1; None without any."""
        found, num = (
            [(self.part(setting.name).speedup, setting) for setting in self.plan.settings],
            len(self.plan.settings),
        )
        beating = [(speedup.mean, setting) for speedup, setting in found if speedup and speedup.beats_one(num)]
        return max(beating, key=lambda item: item[0])[1] if beating else None

    @property
    def is_off(self) -> bool:
        """Whether plain decoding was the fastest in the mean: more than the want of a clear winner."""
        speedups = [self.part(setting.name).speedup for setting in self.plan.settings]
        return all(speedup is not None and speedup.mean <= 1 for speedup in speedups)

    @property
    def baseline_spread(self) -> float | None:
        """(max - min) / mean of the baseline's speed over the repeats of a prompt, median over prompts."""
        speeds: dict[int, list[float]] = {}
        for answer in self.answers:
            if answer.setting == BASELINE.name and answer.stats.tokens_per_s:
                speeds.setdefault(answer.prompt, []).append(answer.stats.tokens_per_s)
        spreads = [(max(s) - min(s)) / statistics.fmean(s) for s in speeds.values() if len(s) > 1]
        return statistics.median(spreads) if spreads else None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to the same prompt in the same repeat."""

    baseline: Answer
    answer: Answer

    @property
    def counts(self) -> bool:
        """Whether both are long enough to have a speed."""
        return self.baseline.stats.tokens_per_s > 0 and self.answer.stats.tokens_per_s > 0

    def log_ratio(self, tokens_per_s: float) -> float:
        """Logarithm of a speed over the baseline's."""
        return math.log(tokens_per_s / self.baseline.stats.tokens_per_s)


@dataclass(frozen=True, slots=True)
class Part:
    """What one setting gave in one category, or in all.

    Attributes:
        baseline: counts and times of the baseline's answers, added up.
        speculative: the same of the setting's.
        speedup: geometric mean over prompts, with the t interval over the prompts' mean log ratios (see
            `specdec_cli.interval`); None without a pair that is long enough.
        oracle: speed-up that the same drafts would give with perfect stopping.
        first_token_s: median seconds to the first token: the baseline's and the setting's.
        num_prompts: distinct prompts.
        num_pairs: pairs that count.
        num_short: pairs left out because an answer ended in its first round.
        num_equal: pairs with the same tokens, short ones included.
    """

    baseline: Stats
    speculative: Stats
    speedup: Ratio | None
    oracle: Ratio | None
    first_token_s: tuple[float | None, float | None]
    num_prompts: int
    num_pairs: int
    num_short: int
    num_equal: int

    @classmethod
    def of(cls, pairs: Sequence[Pair], costs: CostModel) -> Part:
        """From pairs of answers."""
        used = [pair for pair in pairs if pair.counts]
        base, spec = [pair.baseline.stats for pair in used], [pair.answer.stats for pair in used]
        return cls(
            merged(base),
            merged(spec),
            _mean_ratio((pair, pair.answer.stats.tokens_per_s) for pair in used),
            _mean_ratio((pair, pair.answer.oracle_per_s(costs)) for pair in used),
            (_median_first_s(base), _median_first_s(spec)),
            len({pair.answer.prompt for pair in used}),
            len(used),
            len(pairs) - len(used),
            sum(pair.baseline.tokens == pair.answer.tokens for pair in pairs),
        )


def merged(parts: Iterable[Stats]) -> Stats:
    """Counts and times of several answers, added up; rates then are those of all of them together."""
    total = Stats()
    for stats in parts:
        for name in _SUMMED:
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        for name in ("drafted_by_position", "accepted_by_position"):
            setattr(total, name, _added(getattr(total, name), getattr(stats, name)))
    return total


_SUMMED = (
    "num_prompt_tokens", "num_tokens", "num_first_tokens", "num_rounds", "num_drafted", "num_accepted",
    "first_round_s", "wall_s", "draft_s", "verify_s",
)  # fmt: skip


def _added(first: list[int], second: list[int]) -> list[int]:
    size = max(len(first), len(second))
    return [sum(numbers[i] for numbers in (first, second) if i < len(numbers)) for i in range(size)]


def _mean_ratio(speeds: Iterable[tuple[Pair, float]]) -> Ratio | None:
    groups: dict[int, list[float]] = {}
    for pair, speed in speeds:
        groups.setdefault(pair.answer.prompt, []).append(pair.log_ratio(speed))
    return geometric_mean([*groups.values()])


def _median_first_s(parts: Sequence[Stats]) -> float | None:
    times = [stats.first_token_s for stats in parts if stats.first_token_s is not None]
    return statistics.median(times) if times else None


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(session: Session, plan: Plan, on_step: OnStep = lambda *_: None) -> Measurement:
    """Answer every prompt in every setting and repeat, after a short warm-up of each setting.

    Ctrl-C ends it: what is done then is in the result, the answer under way is not.

    Args:
        session: with the models.
        plan: what to measure.
        on_step: told about progress.

    Raises:
        ContextFullError: a prompt does not fit.
    """
    prompts = [session.encode(prompt.text, raw=None) for prompt in plan.prompts]
    # Once for the longest one: contexts made anew in between would cost the answer that happens to need them.
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    context, _ = session.prepare(len(prompts[longest]), plan.max_tokens)
    if len(prompts[longest]) >= context.num_ctx:
        raise ContextFullError(
            f"prompt {longest + 1} ({plan.prompts[longest].category}) has {len(prompts[longest])} tokens, which leaves"
            f" no room in a context of {context.num_ctx}",
            "use a larger `--ctx`, or leave the prompt out",
        )
    measurement = Measurement(plan, session.costs)
    try:
        with interrupt.stop_on_sigint():
            for setting in (BASELINE, *plan.settings):
                _answer(session, plan, prompts[0], (0, 0, setting), min(WARM_UP_TOKENS, plan.max_tokens))
            for done, turn in enumerate(plan.turns()):
                on_step(done, plan.num_answers)
                answer = _answer(session, plan, prompts[turn[1]], turn, plan.max_tokens)
                measurement.answers.append(answer)
            on_step(plan.num_answers, plan.num_answers)
    except KeyboardInterrupt:
        measurement.interrupted = True
    return measurement


def _answer(
    session: Session, plan: Plan, tokens: Sequence[int], turn: tuple[int, int, Setting], max_tokens: int
) -> Answer:
    repeat, prompt, setting = turn
    params = plan.seeded(repeat)
    session.clear()
    found, rounds, stats = list[int](), list[Round](), Stats()
    reason: FinishReason = "length"
    for event in session.stream(tokens, sampling=params, max_tokens=max_tokens, drafting=setting.drafting):
        stats.add(event)
        if isinstance(event, Token):
            found.append(event.id)
        elif isinstance(event, Round):
            rounds.append(event)
        elif isinstance(event, Finish):
            reason = event.reason
    return Answer(
        setting.name, prompt, plan.prompts[prompt].category, repeat, params.seed, reason, tuple(found), stats,
        tuple(rounds),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A greedy answer that differs from the baseline's.

    Attributes:
        setting: name.
        prompt: index in the plan.
        category: of the prompt.
        near_tie: where, and whether rounding explains it.
    """

    setting: str
    prompt: int
    category: str
    near_tie: NearTie


def disagreements(session: Session, measurement: Measurement) -> list[Disagreement]:
    """Where greedy answers part from the baseline's, each difference once; run it after everything is measured."""
    plan, found = measurement.plan, dict[tuple[int, tuple[int, ...], tuple[int, ...]], Disagreement]()
    for setting in plan.settings:
        for pair in measurement.pairs(setting.name):
            first, second, prompt = pair.answer.tokens, pair.baseline.tokens, pair.answer.prompt
            if first == second or (prompt, first, second) in found:
                continue
            tokens = session.encode(plan.prompts[prompt].text, raw=None)
            tie = session.near_tie(tokens, first, second, plan.sampling)
            assert tie is not None
            found[prompt, first, second] = Disagreement(setting.name, prompt, pair.answer.category, tie)
    return [*found.values()]


def doubts(measurement: Measurement, load: float) -> list[str]:
    """Why the numbers may be wrong, in words.

    Args:
        measurement: what was measured.
        load: share of the CPUs that other processes used before the start.
    """
    found, spread = list[str](), measurement.baseline_spread
    if load > BUSY_LOAD:
        found.append(f"other processes load the machine: {load:.0%} of the CPUs before the start")
    if spread is not None and spread > NOISY_SPREAD:
        found.append(
            f"the results are noisy: the baseline's repeats of a prompt differ by {spread:.0%}; "
            "stop other programs, or raise `--repeat`"
        )
    short = sum(measurement.part(setting.name).num_short for setting in measurement.plan.settings)
    if short:
        unit = "pair of answers was" if short == 1 else "pairs of answers were"
        found.append(f"{short} {unit} too short for a speed and left out")
    return found
