"""Whichever drafter is worth more in this round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specdec_cli.drafters.model import NAME as MODEL
from specdec_cli.drafters.ngram import NAME as NGRAM
from specdec_cli.drafters.ngram import NgramDrafter
from specdec_cli.types import EMPTY_DRAFT, Draft, Drafter, LengthPolicy


class DraftsByModel(Drafter, Protocol):
    """A drafter with a draft model."""

    def room(self, tokens: Sequence[int]) -> int:
        """About how many tokens the draft model has room for; asked in every round."""

    def num_behind(self, tokens: Sequence[int]) -> int:
        """About how many tokens it decodes for its first proposal; asked in every round."""


class AutoDrafter:
    """An n-gram draft, which costs nothing, when its expected gain is the larger one; else the draft model's.

    Args:
        ngram: the draft-free drafter.
        model: the draft model's.
    """

    def __init__(self, ngram: NgramDrafter, model: DraftsByModel) -> None:
        self._ngram = ngram
        self._model = model

    @property
    def decode_s(self) -> float:
        """Seconds spent in the draft model's decode calls so far."""
        return self._model.decode_s

    def propose(self, tokens: Sequence[int], policy: LengthPolicy, limit: int) -> Draft:
        """A chain by one of the two."""
        found = self._ngram.lookup(tokens, limit)
        room = min(limit, self._model.room(tokens))
        model = policy.of(MODEL, self._model.num_behind(tokens), room)
        if len(found):
            gain = model.gain() if room > 0 else 0.0
            ngram = policy.of(NGRAM, 0, limit)
            if ngram.gain(found.confidences) > max(0.0, gain):
                length = ngram.best_length(found.confidences)
                if length:
                    return found.first(length)
        elif not model.draft_more(()):
            # The drafter would find the same; most rounds of a text that is hard to draft end here.
            return EMPTY_DRAFT
        return self._model.propose(tokens, policy, limit)
