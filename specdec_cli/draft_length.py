"""How long a draft gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_cli.types import LengthPolicy, Round


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

    def learn(self, record: Round) -> None:
        """Nothing to learn: the length is fixed."""
