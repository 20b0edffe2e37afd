"""What the cost rule makes of real drafts on a machine with other times: record once, replay with any d and t(n).

    python benchmarks/replay.py record TARGET.gguf DRAFT.gguf PROMPTS.jsonl traces.jsonl [-n 96]
    python benchmarks/replay.py rate traces.jsonl --pass 1:79,2:118,5:138,9:174,16:229,65:800 --step 1:20,8:50,64:250

Recording decodes each prompt greedily with the target, and at every place of the answer lets the draft model propose a
chain: what it says, how sure it is, and whether the target agrees. Replaying lets drafters and the cost rule work on
that with the given times in milliseconds (number of tokens:time of a pass). Beside the rule stand the best fixed
length chosen with hindsight for each prompt, and the bound for any stopping rule: knowing beforehand what will be
accepted.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec_cli.acceptance import Acceptance, match_prior, model_prior
from specdec_cli.cost import CostModel, Timing
from specdec_cli.draft_length import CostRule, Fixed
from specdec_cli.drafters.ngram import NgramDrafter
from specdec_cli.drafters.tree import GrowingDraft, grow
from specdec_cli.prompts import read_prompts
from specdec_cli.sampling import top_probability
from specdec_cli.session import Session, SessionOptions
from specdec_cli.types import PLAIN_DECODING, Draft, Drafting, LengthPolicy, Round, SamplingParams

Seconds = Callable[[int], float]
MAX_CHAIN, MAX_MISSES = 16, 2


def record(session: Session, text: str, max_tokens: int) -> dict[str, Any]:
    """Prompt, greedy answer, and for each place of it the draft model's chain of (token, confidence, agreed)."""
    prompt = session.encode(text)
    session.clear()
    greedy = SamplingParams(temperature=0, seed=0)
    answer = session.generate(prompt, sampling=greedy, max_tokens=max_tokens, drafting=PLAIN_DECODING).tokens
    _, context = session.prepare(len(prompt), max_tokens)
    assert context is not None
    chains = []
    for place in range(len(answer)):
        tokens, chain, misses = [*prompt, *answer[:place]], list[tuple[int, float, bool]](), 0
        for wanted in answer[place : place + MAX_CHAIN]:
            context.sync(tokens)
            row = context.score()[0][: session.target.num_vocab]
            token = int(row.argmax())
            agreed = token == wanted and not misses
            misses += not agreed
            chain.append((token, float(top_probability(row)), agreed))
            tokens.append(token)
            if misses == MAX_MISSES:
                break
        chains.append(chain)
    return {"prompt": prompt, "answer": list(answer), "chains": chains}


@dataclass
class _Recorded:
    """The only child that a chain's token may get."""

    token: int
    confidence: float

    @property
    def confidences(self) -> Sequence[float]:
        return [self.confidence]

    def draw(self) -> tuple[int, None]:
        return self.token, None


@dataclass
class Replay:
    """One recorded answer under given times.

    Attributes:
        trace: what `record` made.
        pass_s: t(n).
        step_s: d(m), a draft step that decodes m tokens.
    """

    trace: dict[str, Any]
    pass_s: Seconds
    step_s: Seconds

    @property
    def answer(self) -> Sequence[int]:
        """The target's own."""
        return self.trace["answer"]  # type: ignore[no-any-return]

    def rate(self, policy: LengthPolicy, drafter: str) -> float:
        """Tokens per second with "auto" or "model"."""
        ngram, place, seconds, behind, index = NgramDrafter(), 0, 0.0, 1, 0
        while place < len(self.answer):
            draft, draft_s = self._ngram_draft(policy, ngram, place) if drafter == "auto" else (Draft(), 0.0)
            if not len(draft):
                draft, draft_s = self._model_draft(policy, place, behind)
            answer = self.answer[place:]
            matches = [token == wanted for token, wanted in zip(draft.tokens, answer, strict=False)]
            num = matches.index(False) if False in matches else len(matches)
            pass_s = self.pass_s(1 + len(draft))
            outcomes = (1.0,) * num + (0.0,) * (num < len(draft))
            done = Round(
                index, len(draft), num, min(num + 1, len(answer)), draft_s, pass_s, draft_s + pass_s,
                propose_s=draft_s, drafters=draft.drafters, confidences=draft.confidences, outcomes=outcomes,
            )  # fmt: skip
            policy.learn(done)
            behind = behind + done.num_tokens if not draft_s else 2 if num == len(draft) > 0 else 1
            place, seconds, index = place + done.num_tokens, seconds + done.total_s, index + 1
        return len(self.answer) / seconds

    def _ngram_draft(self, policy: LengthPolicy, ngram: NgramDrafter, place: int) -> tuple[Draft, float]:
        limit = len(self.answer) - place
        found = ngram.lookup([*self.trace["prompt"], *self.answer[:place]], limit)
        if not len(found):
            return found, 0.0
        turn = policy.of("ngram", 0, limit)
        if turn.gain(found.confidences) <= max(0.0, policy.of("model", 1, limit).gain()):
            return Draft(), 0.0
        return found.first(policy.of("ngram", 0, limit).best_length(found.confidences)), 0.0

    def _model_draft(self, policy: LengthPolicy, place: int, behind: int) -> tuple[Draft, float]:
        chain = self.trace["chains"][place]
        if not chain[-1][2]:
            # Recording stopped after misses; whoever drafts on pays for it all the same.
            chain = chain + [(-1, chain[-1][1], False)] * MAX_CHAIN
        chain = chain[: min(MAX_CHAIN, len(self.answer) - place)]
        turn = policy.of("model", behind, len(chain))
        steps: list[float] = []

        def expand(draft: GrowingDraft, _nodes: Sequence[int]) -> list[_Recorded]:
            num = 1 if steps else behind
            steps.append(self.step_s(num))
            turn.spent(num, steps[-1])
            return [_Recorded(*chain[len(draft)][:2])]

        return grow(GrowingDraft("model", 1), expand, turn, len(chain)), sum(steps)

    def bound(self) -> float:
        """Rate of whoever knows what will be accepted: the shortest way through the answer, in any number of rounds."""
        num = len(self.answer)
        least = [0.0] * (num + 1)
        for place in range(num - 1, -1, -1):
            chain = self.trace["chains"][place]
            right = next((i for i, (_, _, agreed) in enumerate(chain) if not agreed), len(chain))
            least[place] = min(
                k * self.step_s(1) + self.pass_s(k + 1) + least[min(place + k + 1, num)] for k in range(right + 1)
            )
        return num / least[0]


def rule(pass_s: Seconds, step_s: Seconds) -> CostRule:
    """As a session makes it: times known, the text not."""
    costs = CostModel(
        Timing({n: pass_s(n) for n in (1, 2, 3, 4, 5, 8, 16)}), {"model": Timing({n: step_s(n) for n in (1, 2, 8, 64)})}
    )
    return CostRule(costs, {"model": Acceptance(model_prior), "ngram": Acceptance(match_prior)})


def times(text: str) -> Seconds:
    """`1:79,2:118` in milliseconds -> seconds of n tokens, in straight lines."""
    table = {int(n): float(ms) / 1e3 for n, ms in (item.split(":") for item in text.split(","))}
    sizes = sorted(table)
    return lambda n: float(np.interp(n, sizes, [table[size] for size in sizes])) * max(1.0, n / sizes[-1])


def main() -> None:
    """Record or replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    for name in ("target", "draft", "prompts", "traces"):
        recording.add_argument(name, type=Path)
    recording.add_argument("-n", type=int, default=96)
    replaying = commands.add_parser("rate")
    replaying.add_argument("traces", type=Path)
    replaying.add_argument("--pass", dest="passes", type=times, required=True)
    replaying.add_argument("--step", type=times, required=True)
    options = parser.parse_args()
    (_record if options.command == "record" else _rate)(options)


def _record(options: argparse.Namespace) -> None:
    drafting = SessionOptions(Drafting("model", 1), use_tuned=False)
    with Session.open(options.target, options.draft, drafting) as session, options.traces.open("w") as out:
        for prompt in read_prompts(options.prompts):
            trace = {"category": prompt.category, **record(session, prompt.text, options.n)}
            print(json.dumps(trace), file=out, flush=True)


def _rate(options: argparse.Namespace) -> None:
    plain = 1 / options.passes(1)
    rows = []
    for line in options.traces.read_text().splitlines():
        replay = Replay(json.loads(line), options.passes, options.step)
        fixed = [replay.rate(Fixed(k), "model") for k in range(13)]
        auto, model = (replay.rate(rule(options.passes, options.step), name) for name in ("auto", "model"))
        rows.append([value / plain for value in (auto, model, max(fixed), replay.bound())])
        best = fixed.index(max(fixed))
        shown = "  ".join(f"{value:5.2f}x" for value in rows[-1])
        print(f"{replay.trace['category']:16} {shown}  K={best}")
    means = [math.exp(sum(map(math.log, column)) / len(rows)) for column in zip(*rows, strict=True)]
    print(f"{'geometric mean':16} " + "  ".join(f"{value:5.2f}x" for value in means))
    print(f"{'':16}  auto   model  fixed   bound (draft model)")


if __name__ == "__main__":
    main()
