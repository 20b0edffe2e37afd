"""A world of known costs and acceptances, in which a length policy earns tokens per second; no model, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specdec_cli.types import LengthPolicy, Round

Seconds = Callable[[int], float]
MOST_REREAD = 7


class Text(Protocol):
    """What a drafter would say at every place of an answer."""

    def proposal(self, place: int, depth: int) -> tuple[float, float, bool]:
        """(confidence, probability of acceptance, whether it is accepted) of draft token `depth` after `place`.

        The acceptance holds given that all earlier tokens of the draft were accepted.
        """


class RandomText:
    """Acceptance probabilities that wander around a level; confidences that know them up to noise.

    Args:
        levels: for each place, the mean acceptance there, shape (n,).
        seed: of everything random.
        spread: how much acceptance differs from token to token.
        noise: error of the confidences.
    """

    def __init__(self, levels: Sequence[float], seed: int = 0, spread: float = 1.2, noise: float = 0.5) -> None:
        rng = np.random.default_rng(seed)
        num = len(levels) + 100
        logits = np.log(np.array([*levels, *[levels[-1]] * 100])) - np.log1p(-np.array([*levels, *[levels[-1]] * 100]))
        difficulty = logits + spread * rng.standard_normal(num)
        self._acceptance = _logistic(difficulty)
        self._confidence = _logistic(difficulty + noise * rng.standard_normal(num))
        self._accepted = rng.random(num) < self._acceptance

    def proposal(self, place: int, depth: int) -> tuple[float, float, bool]:
        """The same token whichever draft proposes it."""
        index = place + depth
        return float(self._confidence[index]), float(self._acceptance[index]), bool(self._accepted[index])


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
    _lost: int = 0

    def run(self, policy: LengthPolicy, num_tokens: int) -> float:
        """Rate in tokens per second of an answer of so many tokens."""
        rng = np.random.default_rng(self.seed)
        place, seconds, behind = 0, 0.0, 1
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
        confidences: list[float] = []
        proposals: list[tuple[float, float, bool]] = []
        draft_s, missed = 0.0, behind
        while len(confidences) < limit and turn.draft_more(confidences):
            proposal = self.text.proposal(place, len(confidences))
            step_s = took(self.step_s(missed))
            turn.spent(missed, step_s)
            draft_s += step_s
            missed = 1
            if not turn.keep_last([*confidences, proposal[0]]):
                break
            confidences.append(proposal[0])
            proposals.append(proposal)
        num_accepted = next((i for i, p in enumerate(proposals) if not p[2]), len(proposals))
        lost, verify_s = self._lost, 0.0
        if confidences and lost > MOST_REREAD:
            verify_s, self._lost = took(self.pass_s(lost)), 0
        verify_s += took(self.pass_s(1 + len(confidences) + self._lost))
        rejected = self.rereads and num_accepted < len(confidences)
        self._lost = self._lost + num_accepted + 1 if rejected else 0
        record = Round(
            len(self.records), len(confidences), num_accepted, num_accepted + 1, draft_s, verify_s, draft_s + verify_s,
            propose_s=draft_s, num_reread=lost,
            drafters=(self.drafter,) * len(confidences), confidences=tuple(confidences),
            outcomes=tuple(float(p[2]) for p in proposals[: num_accepted + 1]), decision=turn.decision,
            target_confidence=0.0 if confidences or not policy.watches else self.text.proposal(place, 0)[1],
        )  # fmt: skip
        # A fully accepted draft leaves its last token and the bonus token unread.
        behind = behind + num_accepted + 1 if not draft_s else (2 if num_accepted == len(confidences) > 0 else 1)
        return record, behind
