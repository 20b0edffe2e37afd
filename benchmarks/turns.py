"""Plain decoding and `auto` in turns of a few tokens, so that a machine whose speed drifts slows both alike.

python benchmarks/turns.py TARGET.gguf DRAFT.gguf --prompts PROMPTS.jsonl [--categories A,B] [-n 96] [--repeat 3]

Both share one session and so the same memory: whoever is behind drops the few tokens that the other is ahead.
Greedy answers that part, as they may at a near-tie, count up to there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path

from specdec_cli.bench import select
from specdec_cli.interval import Ratio, geometric_mean
from specdec_cli.prompts import read_prompts
from specdec_cli.session import Session, SessionOptions
from specdec_cli.stats import Stats
from specdec_cli.types import AUTO_DRAFTING, PLAIN_DECODING, Event, Round, SamplingParams, Token

WAYS = (PLAIN_DECODING, AUTO_DRAFTING)
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
        """After the first round."""
        return (self.stats.num_tokens - self.stats.num_first_tokens) / self.seconds


def answer(session: Session, prompt: str, max_tokens: int, *, is_swapped: bool) -> tuple[Runner, Runner]:
    """Both ways through one answer, greedily, from empty caches."""
    session.clear()
    tokens, sampling = session.encode(prompt, raw=None), SamplingParams(temperature=0)
    session.prepare(len(tokens), max_tokens)
    plain, auto = (
        Runner(session.stream(tokens, sampling=sampling, max_tokens=max_tokens, drafting=way)) for way in WAYS
    )
    for runner in (plain, auto):
        runner.advance(1)
        runner.seconds = 0.0
    for turn, num_tokens in enumerate(range(TURN_TOKENS, max_tokens + TURN_TOKENS, TURN_TOKENS)):
        for runner in (plain, auto) if (turn + is_swapped) % 2 else (auto, plain):
            runner.advance(min(num_tokens, max_tokens))
        if any(one != other for one, other in zip(plain.tokens, auto.tokens, strict=False)):
            break
    return plain, auto


def row(name: str, pairs: Sequence[tuple[Runner, Runner]], ratio: Ratio) -> str:
    """One line of the table."""
    num = len(pairs)
    low, high = ratio.interval or (float("nan"), float("nan"))
    drafted = sum(auto.stats.num_drafted for _, auto in pairs)
    cells = [
        name,
        f"{sum(plain.tokens_per_s for plain, _ in pairs) / num:.1f}",
        f"{sum(auto.tokens_per_s for _, auto in pairs) / num:.1f}",
        f"{ratio.mean:.3f}x",
        f"{low:.3f}–{high:.3f}",
        f"{drafted}",
    ]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Print a table: a row for each category, its interval over the answers in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--categories", default="")
    parser.add_argument("-n", "--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    flags = parser.parse_args()
    prompts = select(read_prompts(flags.prompts), [name for name in flags.categories.split(",") if name])
    found: dict[str, list[tuple[Runner, Runner]]] = {}
    with Session.open(flags.target, flags.draft, SessionOptions()) as session:
        answer(session, prompts[0].text, min(16, flags.max_tokens), is_swapped=False)
        for repeat in range(flags.repeat):
            for prompt in prompts:
                pair = answer(session, prompt.text, flags.max_tokens, is_swapped=repeat % 2 == 1)
                found.setdefault(prompt.category, []).append(pair)
    sys.stdout.write(
        "| category | baseline tok/s | tok/s | speed-up | 95 % | drafted |\n|---|---:|---:|---:|---:|---:|\n"
    )
    for name, pairs in found.items():
        ratio = geometric_mean([[log(auto.tokens_per_s / plain.tokens_per_s) for plain, auto in pairs]])
        if ratio is not None:
            sys.stdout.write(row(name, pairs, ratio))


if __name__ == "__main__":
    main()
