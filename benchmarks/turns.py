"""Plain decoding and `auto` in turns of a few tokens, so that a machine whose speed drifts slows all alike.

python benchmarks/turns.py TARGET.gguf DRAFT.gguf --prompts PROMPTS.jsonl [--categories A,B] [-n 96] [--repeat 3]

With `--chains` also `auto` with one branch at most, and what trees make of it. All ways share one session and so the
same memory: whoever is behind goes first and drops the few tokens that the others are ahead. Greedy answers that part,
as they may at a near-tie, count up to there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path

from specdec_cli.bench import select
from specdec_cli.interval import Ratio, geometric_mean
from specdec_cli.prompts import read_prompts
from specdec_cli.session import Session, SessionOptions
from specdec_cli.stats import Stats
from specdec_cli.types import AUTO_DRAFTING, PLAIN_DECODING, Drafting, Event, Round, SamplingParams, Token

Ways = dict[str, Drafting]
"""By what they are called in the table: plain decoding first; the last one is held against the one before it."""

WAYS: Ways = {"baseline": PLAIN_DECODING, "speed-up": AUTO_DRAFTING}
WAYS_WITH_CHAINS: Ways = {
    "baseline": PLAIN_DECODING,
    "chains": replace(AUTO_DRAFTING, max_branches=1),
    "trees": AUTO_DRAFTING,
}
TURN_TOKENS = 4


@dataclass(slots=True)
class Runner:
    """One way through one answer; the seconds begin after the first round, which reads the prompt."""

    events: Iterator[Event]
    stats: Stats = field(default_factory=Stats)
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    is_done: bool = False

    def advance(self, num_tokens: int) -> None:
        """Go on to the end of the round that brings the answer to so many tokens."""
        begin = time.perf_counter()
        while not self.is_done and self.stats.num_tokens < num_tokens:
            self.is_done = not self._finish_round()
        self.seconds += time.perf_counter() - begin

    def _finish_round(self) -> bool:
        for event in self.events:
            self.stats.add(event)
            if isinstance(event, Token):
                self.tokens.append(event.id)
            if isinstance(event, Round):
                return True
        return False

    @property
    def tokens_per_s(self) -> float:
        """After the first round; 0.0 when there was no second one."""
        later = self.stats.num_tokens - self.stats.num_first_tokens
        return later / self.seconds if later else 0.0


def answer(session: Session, prompt: str, max_tokens: int, ways: Ways, first: int = 0) -> list[Runner]:
    """Every way through one answer, greedily, from empty caches; `first` is which one begins."""
    session.clear()
    tokens, sampling = session.encode(prompt, raw=None), SamplingParams(temperature=0)
    session.prepare(len(tokens), max_tokens)
    runners = [
        Runner(session.stream(tokens, sampling=sampling, max_tokens=max_tokens, drafting=way)) for way in ways.values()
    ]
    for runner in runners:
        runner.advance(1)
        runner.seconds = 0.0
    for turn, num_tokens in enumerate(range(TURN_TOKENS, max_tokens + TURN_TOKENS, TURN_TOKENS), first):
        begin = turn % len(runners)
        for runner in sorted(runners[begin:] + runners[:begin], key=lambda one: one.stats.num_tokens):
            runner.advance(min(num_tokens, max_tokens))
        if have_parted(runners):
            break
    return runners


def have_parted(runners: Sequence[Runner]) -> bool:
    """Whether one answer is no longer the beginning of another."""
    return any(len(set(ids)) > 1 for ids in zip(*(runner.tokens for runner in runners), strict=False))


def row(name: str, answers: Sequence[Sequence[Runner]], ratios: Sequence[Ratio]) -> str:
    """One line of the table; `ratios` are those of `compare`."""
    low, high = ratios[-1].interval or (float("nan"), float("nan"))
    last = [runners[-1].stats for runners in answers]
    cells = [
        name,
        f"{sum(runners[0].tokens_per_s for runners in answers) / len(answers):.1f}",
        *(f"{ratio.mean:.3f}x" for ratio in ratios),
        f"{low:.3f}–{high:.3f}",
        *(
            f"{Stats.total(runners[way].stats for runners in answers).mean_acceptance_length:.2f}"
            for way in range(1, len(answers[0]))
        ),
        f"{sum(stats.num_drafted for stats in last)}",
        f"{sum(stats.num_trees for stats in last)} of {sum(stats.num_rounds for stats in last)}",
    ]
    return f"| {' | '.join(cells)} |\n"


def header(ways: Ways) -> str:
    """The first two lines of the table."""
    later = list(ways)[1:]
    over = [f"{later[-1]} over {later[-2]}"] if len(later) > 1 else []
    lengths = [f"length, {name}" for name in later] if len(later) > 1 else ["length"]
    names = ["category", "baseline tok/s", *later, *over, "95 %", *lengths, "drafted", "trees of rounds"]
    return f"| {' | '.join(names)} |\n|---|{'---:|' * (len(names) - 1)}\n"


def compare(groups: Sequence[Sequence[Sequence[Runner]]]) -> list[Ratio]:
    """Every later way over the first, and with more than one the last over the one before it; groups of answers."""
    num_ways = len(groups[0][0])
    pairs = [(way, 0) for way in range(1, num_ways)] + ([(num_ways - 1, num_ways - 2)] if num_ways > 2 else [])
    logs = [
        [[log(runners[one].tokens_per_s / runners[other].tokens_per_s) for runners in answers] for answers in groups]
        for one, other in pairs
    ]
    return [ratio for ratio in map(geometric_mean, logs) if ratio is not None]


def main() -> None:
    """Print a table: a row for each category, its interval over the answers in it, and one for all categories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--categories", default="")
    parser.add_argument("-n", "--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chains", action="store_true")
    flags = parser.parse_args()
    prompts = select(read_prompts(flags.prompts), [name for name in flags.categories.split(",") if name])
    ways = WAYS_WITH_CHAINS if flags.chains else WAYS
    found: dict[str, list[list[Runner]]] = {}
    with Session.open(flags.target, flags.draft, SessionOptions()) as session:
        answer(session, prompts[0].text, min(16, flags.max_tokens), ways)
        for repeat in range(flags.repeat):
            for prompt in prompts:
                runners = answer(session, prompt.text, flags.max_tokens, ways, repeat)
                if all(runner.tokens_per_s for runner in runners):
                    found.setdefault(prompt.category, []).append(runners)
    sys.stdout.write(header(ways))
    for name, answers in found.items():
        sys.stdout.write(row(name, answers, compare([answers])))
    sys.stdout.write(
        row("all", [runners for answers in found.values() for runners in answers], compare([*found.values()]))
    )


if __name__ == "__main__":
    main()
