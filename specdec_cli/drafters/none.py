"""The drafter of the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_cli.types import EMPTY_DRAFT, Draft, LengthPolicy


class NoDrafter:
    """Proposes nothing: every round is plain decoding by the target."""

    decode_s = 0.0

    def propose(self, tokens: Sequence[int], policy: LengthPolicy, limit: int) -> Draft:  # noqa: ARG002
        """An empty draft."""
        return EMPTY_DRAFT
