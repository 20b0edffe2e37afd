"""A world of known costs and acceptances, in which a length policy earns tokens per second; no model, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specdec_cli.drafters.tree import GrowingDraft, grow
from specdec_cli.types import Draft, LengthPolicy, Round

Seconds = Callable[[int], float]
MOST_REREAD = 7
NUM_OTHERS = 7
"""Further choices that the text knows of at each place."""


class Text(Protocol):
    """What a drafter would say at every place of an answer."""

    def proposal(self, place: int, depth: int) -> tuple[float, float, bool]:
        """(confidence, probability of acceptance, whether it is accepted) of draft token `depth` after `place`.

        The acceptance holds given that all earlier tokens of the draft were accepted.
        """

    def others(self, place: int, depth: int) -> tuple[Sequence[float], int | None]:
        """Confidences of further choices there, each given that those before it are wrong; which choice is right.

        Returns:
            None in place of 1, 2, ... when the right one, if the first is not, is none of these either.
        """


class RandomText:
    """Acceptance probabilities that wander around a level; confidences that know them up to noise.

    Args:
        levels: for each place, the mean acceptance there, shape (n,).
        seed: of everything random.
        spread: how much acceptance differs from token to token.
        noise: error of the confidences.
        caught: share of what is left that the second choice catches, in the mean; the third and later ones a little
            less each.
    """

    def __init__(
        self, levels: Sequence[float], seed: int = 0, spread: float = 1.2, noise: float = 0.5, caught: float = 0.45
    ) -> None:
        rng = np.random.default_rng(seed)
        num = len(levels) + 100
        logits = np.log(np.array([*levels, *[levels[-1]] * 100])) - np.log1p(-np.array([*levels, *[levels[-1]] * 100]))
        difficulty = logits + spread * rng.standard_normal(num)
        self._acceptance = _logistic(difficulty)
        self._confidence = _logistic(difficulty + noise * rng.standard_normal(num))
        self._accepted = rng.random(num) < self._acceptance
        means = np.log(caught / (1 - caught)) - 0.25 * np.arange(NUM_OTHERS)
        ease = means + 0.6 * rng.standard_normal((num, NUM_OTHERS))
        self._others = _logistic(ease + noise * rng.standard_normal((num, NUM_OTHERS)))
        catches = rng.random((num, NUM_OTHERS)) < _logistic(ease)
        self._right = [int(row.argmax()) + 1 if row.any() else None for row in catches]

    def proposal(self, place: int, depth: int) -> tuple[float, float, bool]:
        """The same token whichever draft proposes it."""
        index = place + depth
        return float(self._confidence[index]), float(self._acceptance[index]), bool(self._accepted[index])

    def others(self, place: int, depth: int) -> tuple[Sequence[float], int | None]:
        """Consistent with `proposal`: there the first choice is the right one, or one of these is, or none."""
        return self._others[place + depth].tolist(), self._right[place + depth]


def _logistic(values: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-values)))


@dataclass
class World:
    """Costs, and what happened in them.

    Attributes:
        text: the drafter's proposals.
        step_s: d(m), seconds of a draft step that decodes m tokens.
        pass_s: t(n), seconds of a target pass.
        noise: of the times: they are multiplied by exp(noise * normal).
        outliers: share of passes that take five times as long.
        drift: times grow by this share over a thousand tokens.
        rereads: whether the target's cache cannot drop rejected tokens: accepted ones before them are decoded again
            with the next draft, or in a pass of their own when they have become many.
        max_leaves: of the widest tree; 1 is chains.
        num_prompt: tokens that the drafter decodes before its first proposal.
    """

    text: Text
    step_s: Seconds
    pass_s: Seconds
    noise: float = 0.0
    outliers: float = 0.0
    drift: float = 0.0
    rereads: bool = False
    seed: int = 0
    records: list[Round] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    drafter: str = "model"
    max_leaves: int = 1
    num_prompt: int = 1
    _lost: int = 0

    def run(self, policy: LengthPolicy, num_tokens: int) -> float:
        """Rate in tokens per second of an answer of so many tokens."""
        rng = np.random.default_rng(self.seed)
        place, seconds, behind = 0, 0.0, self.num_prompt
        self.records, self.places, self._lost = [], [], 0

        def took(expected: float) -> float:
            slow = 5.0 if rng.random() < self.outliers else 1.0
            return expected * slow * (1 + self.drift * place / 1000) * float(np.exp(self.noise * rng.standard_normal()))

        while place < num_tokens:
            record, behind = self._round(policy, place, num_tokens - place, behind, took)
            policy.learn(record)
            self.records.append(record)
            self.places.append(place)
            place += record.num_tokens
            seconds += record.total_s
        return place / seconds

    def _round(
        self, policy: LengthPolicy, place: int, limit: int, behind: int, took: Callable[[float], float]
    ) -> tuple[Round, int]:
        turn = policy.of(self.drafter, behind, limit)
        steps: list[float] = []
        decoded: set[int] = set()

        def expand(draft: GrowingDraft, nodes: Sequence[int]) -> list[Choices]:
            num = len(nodes) if steps else behind
            step_s = took(self.step_s(num))
            turn.spent(num, step_s)
            steps.append(step_s)
            decoded.update(nodes)
            return [self._choices(place, draft.path(node)) for node in nodes]

        draft = grow(GrowingDraft(self.drafter, self.max_leaves), expand, turn, limit)
        path, tried, draft_s = *self._walk(draft, place), sum(steps)
        num_accepted = len(path)
        lost, verify_s = self._lost, 0.0
        if len(draft) and lost > MOST_REREAD:
            verify_s, self._lost = took(self.pass_s(lost)), 0
        verify_s += took(self.pass_s(1 + len(draft) + self._lost))
        rejected = self.rereads and num_accepted < len(draft)
        self._lost = self._lost + num_accepted + 1 if rejected else 0
        record = Round(
            len(self.records), len(draft), num_accepted, num_accepted + 1, draft_s, verify_s, draft_s + verify_s,
            propose_s=draft_s, num_reread=lost, drafters=draft.drafters, confidences=draft.confidences,
            outcomes=tuple(float(node in path) for node in tried), decision=turn.decision,
            target_confidence=0.0 if len(draft) or not policy.watches else self.text.proposal(place, 0)[1],
            **({} if draft.is_chain else {"parents": draft.parents, "path": tuple(path), "tried": tuple(tried)}),
        )  # fmt: skip
        # What was accepted and not decoded is read in the next step, and the target's own token.
        last = path[-1] if path else -1
        behind = behind + num_accepted + 1 if not draft_s else 1 + (last >= 0 and last not in decoded)
        return record, behind

    def _choices(self, place: int, path: Sequence[int]) -> Choices:
        confidence = self.text.proposal(place, len(path))[0]
        if self.max_leaves == 1:
            return Choices([confidence])
        return Choices([confidence, *self.text.others(place, len(path))[0]][: self.max_leaves])

    def _walk(self, draft: Draft, place: int) -> tuple[list[int], list[int]]:
        """The accepted nodes, and those that were tried: a token is the number of its choice."""
        children, node = draft.children(), -1
        path, tried = list[int](), list[int]()
        while node in children:
            right = 0 if self.text.proposal(place, len(path))[2] else self.text.others(place, len(path))[1]
            for child in children[node]:
                tried.append(child)
                if draft.tokens[child] == right:
                    break
            else:
                break
            node = child
            path.append(node)
        return path, tried


class Choices:
    """Children of a node, numbered."""

    def __init__(self, confidences: Sequence[float]) -> None:
        self.confidences = confidences
        self._numbers = iter(range(len(confidences)))

    def draw(self) -> tuple[int, None]:
        """The next one."""
        return next(self._numbers), None
