"""Everything that is derived from the events of an answer, or of several."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import pairwise, zip_longest
from typing import Any

from specdec_cli.types import Event, Prefill, Round, Token


@dataclass(slots=True)
class Stats:
    """Counts and times of one answer, fed with its events.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_tokens: tokens of the answer so far.
        num_closing: further tokens that completed a grammar's sentence after the limit.
        num_first_tokens: those of them that the first round gave: they came with the reading of the prompt.
        num_rounds: target passes that produced tokens.
        num_drafted: draft tokens scored.
        num_accepted: draft tokens accepted.
        num_trees: rounds in which the draft had several branches.
        num_branches: branches of these drafts.
        drafted_by_position: draft tokens scored at draft position 1, 2, ..., in a tree the position in the branch.
        accepted_by_position: accepted ones at the same positions.
        drafted_by_drafter: draft tokens scored, by the name of what proposed them.
        accepted_by_drafter: accepted ones.
        first_token_s: seconds from the start to the first token; None without one.
        first_round_s: seconds from the start to the end of the first round.
        wall_s: seconds from the start to the last event.
        draft_s: seconds in the draft model's decode calls, prompt included.
        verify_s: seconds in the target's decode calls, prompt included.
        num_target_decoded: tokens that the target decoded, prompt and rejected drafts included; where a caller counts.
        num_draft_decoded: the same for the draft model.
        saved_s: seconds that plain decoding would have taken longer; None where nobody knows.
    """

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_closing: int = 0
    num_first_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_trees: int = 0
    num_branches: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_drafter: dict[str, int] = field(default_factory=dict)
    accepted_by_drafter: dict[str, int] = field(default_factory=dict)
    first_token_s: float | None = None
    first_round_s: float = 0.0
    wall_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_target_decoded: int = 0
    num_draft_decoded: int = 0
    saved_s: float | None = None
    _started: float = field(default_factory=time.perf_counter, repr=False)

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Several answers as one: counts and seconds added up, what is not known left out."""
        whole = cls()
        for part in parts:
            for name, value in part._summands():
                setattr(whole, name, _plus(getattr(whole, name), value))
        return whole

    def _summands(self) -> list[tuple[str, Any]]:
        return [(item.name, getattr(self, item.name)) for item in fields(self) if not item.name.startswith("_")]

    def add(self, event: Event) -> None:
        """Take the next event into account, at the moment it arrives."""
        self.stop()
        if isinstance(event, Token) and event.source == "closing":
            self.num_closing += 1
        elif isinstance(event, Token):
            self.num_tokens += 1
            if self.first_token_s is None:
                self.first_token_s = self.wall_s
        elif isinstance(event, Prefill):
            self.num_prompt_tokens = event.num_tokens
            self.verify_s += event.verify_s
        elif isinstance(event, Round):
            self._add_round(event)

    def stop(self) -> None:
        """Let the wall time end now: for an answer that was interrupted between two events."""
        self.wall_s = time.perf_counter() - self._started

    def _add_round(self, record: Round) -> None:
        if self.num_rounds == 0:
            self.num_first_tokens = record.num_tokens
            self.first_round_s = self.wall_s
        self.num_rounds += 1
        self.num_drafted += record.num_drafted
        self.num_accepted += record.num_accepted
        self.draft_s += record.draft_s
        self.verify_s += record.verify_s
        if record.parents:
            self.num_trees += 1
            self.num_branches += record.num_leaves
        depths, accepted = record.depths, frozenset(record.accepted_nodes)
        missing = max(depths, default=0) - len(self.drafted_by_position)
        self.drafted_by_position += [0] * missing
        self.accepted_by_position += [0] * missing
        for node, depth in enumerate(depths):
            self.drafted_by_position[depth - 1] += 1
            self.accepted_by_position[depth - 1] += node in accepted
        for node, drafter in enumerate(record.drafters):
            for counts, num in ((self.drafted_by_drafter, 1), (self.accepted_by_drafter, node in accepted)):
                counts[drafter] = counts.get(drafter, 0) + num

    @property
    def generation_s(self) -> float:
        """Seconds after the first round: what the reading of the prompt has no part in."""
        return self.wall_s - self.first_round_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first round; 0.0 when there was no second one."""
        later = self.num_tokens - self.num_first_tokens
        return later / self.generation_s if later > 0 and self.generation_s > 0 else 0.0

    def saved_against(self, plain_s: float) -> float:
        """Seconds saved after the first round, negative for lost ones, against plain decoding.

        Args:
            plain_s: seconds of a plain decoding step.
        """
        return max(0, self.num_tokens - self.num_first_tokens) * plain_s - self.generation_s

    @property
    def accepted_lengths(self) -> list[int]:
        """Number of rounds in which 0, 1, 2, ... draft tokens were accepted."""
        reached = [self.num_rounds, *self.accepted_by_position, 0]
        return [more - fewer for more, fewer in pairwise(reached)]

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass: 1 + accepted / rounds; 0.0 without rounds."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted / drafted at draft position 1, 2, ..."""
        return [a / d for a, d in zip(self.accepted_by_position, self.drafted_by_position, strict=True)]

    @property
    def other_s(self) -> float:
        """Seconds outside both models' decode calls."""
        return max(0.0, self.wall_s - self.draft_s - self.verify_s)

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of `wall_s` in "draft", "verify" and "other"; all 0.0 before the first event."""
        whole = self.wall_s or 1.0
        return {"draft": self.draft_s / whole, "verify": self.verify_s / whole, "other": self.other_s / whole}


def _plus(first: Any, second: Any) -> Any:
    """The sum of two numbers, lists by position, or mappings by key; None counts for nothing."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict):
        return {key: first.get(key, 0) + second.get(key, 0) for key in [*first, *(k for k in second if k not in first)]}
    if isinstance(first, list):
        return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
    return first + second


_TINY_GAP = 0.01
_MAX_DEVIATIONS = 6.0
"""Two logits move independently, and the worst of hundreds of positions is the one that flips."""


@dataclass(frozen=True, slots=True)
class NearTie:
    """Where two greedy outputs part, and how close the target's two best tokens are there.

    Attributes:
        position: index of the first differing token in the answer.
        texts: both tokens as text, the target's best first.
        logits: their logits in plain decoding, same order.
        noise: by how much (root mean square over the vocabulary) the logits change there when llama.cpp decodes the
            last tokens, or all, as one batch, with other kernels, and not one by one, or finds them in another order
            in its cache; no speculation is involved.
    """

    position: int
    texts: tuple[str, str]
    logits: tuple[float, float]
    noise: float = 0.0

    @property
    def gap(self) -> float:
        """Difference of the two logits."""
        return self.logits[0] - self.logits[1]

    @property
    def is_explained(self) -> bool:
        """Whether the two kinds of decoding can disagree about a gap of this size."""
        return self.gap <= max(_TINY_GAP, _MAX_DEVIATIONS * self.noise)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A speculative answer and the baseline's for the same prompt and seed.

    Attributes:
        speculative: what the speculative run took.
        baseline: what plain decoding took.
        agree: whether the greedy outputs are equal; None when sampling.
        near_tie: the first difference of two greedy outputs.
    """

    speculative: Stats
    baseline: Stats
    agree: bool | None = None
    near_tie: NearTie | None = None

    @property
    def speedup(self) -> float:
        """Speculative / baseline tokens per second; 0.0 when either is unknown."""
        base = self.baseline.tokens_per_s
        return self.speculative.tokens_per_s / base if base else 0.0
