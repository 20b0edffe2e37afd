"""Drafts by a small model in the target's tokens."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np

from specdec_cli.distribution import Distribution
from specdec_cli.sampling import Sampler, top_probability
from specdec_cli.types import Context, Draft, LengthPolicy, Logits

NAME = "model"


class ModelDrafter:
    """Samples a chain from a draft model and keeps its cache across rounds: no token is decoded twice.

    Args:
        context: the draft model.
        sampler: the target's settings, over the tokens that both models have.
        rng: the answer's random generator.
        stop_tokens: a draft ends with one of these.
    """

    def __init__(
        self, context: Context, sampler: Sampler, rng: np.random.Generator, stop_tokens: Collection[int] = ()
    ) -> None:
        self._context = context
        self._sampler = sampler
        self._rng = rng
        self._stop_tokens = stop_tokens

    @property
    def decode_s(self) -> float:
        """Seconds spent in the draft model's decode calls so far."""
        return self._context.decode_s

    def propose(self, tokens: Sequence[int], policy: LengthPolicy, limit: int) -> Draft:
        """A chain of sampled tokens (greedy ones at temperature 0) with the distributions they were drawn from."""
        prefix = list(tokens)
        drafted: list[int] = []
        probs: list[Distribution | None] = []
        confidences: list[float] = []
        # The draft model decodes the prefix of the token it drafts, so that has to fit its cache.
        limit = min(limit, self.room(tokens))
        policy = policy.of(NAME, self.num_behind(tokens), limit)
        while len(drafted) < limit and policy.draft_more(confidences):
            started, num_decoded = time.perf_counter(), self._context.num_decoded
            row, proposal = self._next(prefix, drafted)
            # The decision must not look at the sampled token: dropping unlikely ones would bias the output.
            confidence = top_probability(row) if proposal.is_point else float(proposal.probs.max())
            policy.spent(self._context.num_decoded - num_decoded, time.perf_counter() - started)
            if not policy.keep_last([*confidences, confidence]):
                break
            token = proposal.sample(self._rng)
            confidences.append(confidence)
            drafted.append(token)
            probs.append(None if proposal.is_point else proposal)
            prefix.append(token)
            if token in self._stop_tokens:
                break
        return Draft.chain(drafted, probs, confidences, NAME)

    def room(self, tokens: Sequence[int]) -> int:
        """The most tokens that can be drafted: the draft model's context may be smaller than the target's."""
        return self._context.num_ctx - len(tokens) + 1

    def num_behind(self, tokens: Sequence[int]) -> int:
        """Tokens that the draft model decodes for its first proposal."""
        return self._context.num_missing(tokens)

    def _next(self, prefix: Sequence[int], drafted: Sequence[int]) -> tuple[Logits, Distribution]:
        row = self._row(prefix)
        committed = prefix[: len(prefix) - len(drafted)] if drafted else prefix
        return row, self._sampler.distribution(row, committed, drafted)

    def _row(self, tokens: Sequence[int]) -> Logits:
        """Logits after `tokens`, in the target's ids."""
        self._context.sync(tokens)
        row: Logits = self._context.score()[0]
        return row
