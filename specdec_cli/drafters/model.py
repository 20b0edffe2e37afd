"""Drafts by a small model in the target's tokens: a chain, or a tree."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np

from specdec_cli.distribution import Distribution, Floats
from specdec_cli.drafters.tree import GrowingDraft, grow
from specdec_cli.sampling import Sampler, largest, top_probability
from specdec_cli.types import MAX_DRAFT_TOKENS, Context, Draft, LengthPolicy, Logits

NAME = "model"


class ModelDrafter:
    """Samples a chain or a tree from a draft model and keeps its cache across rounds: no token is decoded twice.

    Args:
        context: the draft model.
        sampler: the target's settings, over the tokens that both models have.
        rng: the answer's random generator.
        stop_tokens: nothing follows one of these.
        max_leaves: of the widest tree; 1 is chains.
    """

    def __init__(
        self,
        context: Context,
        sampler: Sampler,
        rng: np.random.Generator,
        stop_tokens: Collection[int] = (),
        max_leaves: int = 1,
    ) -> None:
        self._context = context
        self._sampler = sampler
        self._rng = rng
        self._stop_tokens = stop_tokens
        self._max_leaves = min(max_leaves, context.max_leaves)

    @property
    def decode_s(self) -> float:
        """Seconds spent in the draft model's decode calls so far."""
        return self._context.decode_s

    def propose(self, tokens: Sequence[int], policy: LengthPolicy, limit: int) -> Draft:
        """Sampled tokens (the likeliest ones at temperature 0) with the distributions they were drawn from."""
        # The draft model decodes the prefix of the token it drafts, so that has to fit its cache.
        room = self.room(tokens)
        limit = min(limit, room)
        policy = policy.of(NAME, self.num_behind(tokens), limit)

        def expand(draft: GrowingDraft, nodes: Sequence[int]) -> list[_Children]:
            started, num_decoded = time.perf_counter(), self._context.num_decoded
            # The last row is the last node's, or the root's.
            rows = self._decode(tokens, draft)
            children = [self._children(rows[node - len(draft)], tokens, draft.path(node)) for node in nodes]
            policy.spent(self._context.num_decoded - num_decoded, time.perf_counter() - started)
            return children

        draft = GrowingDraft(NAME, self._max_leaves)
        return grow(draft, expand, policy, limit, min(room, MAX_DRAFT_TOKENS), self._stop_tokens)

    def room(self, tokens: Sequence[int]) -> int:
        """The most tokens that can be drafted: the draft model's context may be smaller than the target's."""
        return self._context.num_ctx - len(tokens) + 1

    def num_behind(self, tokens: Sequence[int]) -> int:
        """Tokens that the draft model decodes for its first proposal."""
        return self._context.num_missing(tokens)

    def _decode(self, tokens: Sequence[int], draft: GrowingDraft) -> Logits:
        """Logits after the nodes that were drawn last, after `tokens` when there are none."""
        if len(draft) and self._max_leaves > 1:
            return self._context.grow(draft.draft)
        # A chain is text to the cache: one that cannot drop a tail keeps what is accepted of it.
        self._context.sync([*tokens, *draft.tokens])
        return self._context.score()

    def _children(self, row: Logits, tokens: Sequence[int], path: Sequence[int]) -> _Children:
        proposal = self._sampler.distribution(row, tokens, path)
        # Decisions must not look at the sampled token: dropping unlikely ones would bias the output.
        confidence = top_probability(row) if proposal.is_point else float(proposal.probs.max())
        if self._max_leaves == 1:
            return _Children(self._rng, proposal, [confidence])
        if proposal.is_point:
            return self._likeliest(row, proposal.mode(), confidence, tokens, path)
        probs = proposal.probs[largest(proposal.probs, self._max_leaves)]
        return _Children(self._rng, proposal, [confidence, *_rests(probs[probs > 0], 1.0)])

    def _likeliest(
        self, row: Logits, first: int, confidence: float, tokens: Sequence[int], path: Sequence[int]
    ) -> _Children:
        """Point masses: what greedy decoding takes, then the likeliest others."""
        ids, values = self._sampler.candidates(row, tokens, path)
        place = first if ids is None else int(ids.searchsorted(first))
        places = [other for other in largest(values, self._max_leaves).tolist() if values[other] > -np.inf]
        places = [place, *(other for other in places if other != place)][: self._max_leaves]
        if len(places) == 1:
            return _Children(self._rng, Distribution.point(first), [confidence])
        best = values.max()
        # Where nothing was added to the row its sum is known.
        total = 1 / confidence if np.may_share_memory(row, values) else np.exp(values - best).sum(dtype=np.float64)
        rests = _rests(np.exp(values[places] - best), float(total))
        return _Children(self._rng, None, [confidence, *rests], places if ids is None else ids[places].tolist())


def _rests(weights: Floats, total: float) -> list[float]:
    """For each weight but the first, its share of what those before it leave of `total`."""
    lefts = np.maximum(total - np.cumsum(weights[:-1], dtype=np.float64), weights[1:])
    return (weights[1:] / np.maximum(lefts, 1e-300)).tolist()  # type: ignore[no-any-return]


class _Children:
    """Tokens that may follow one node: drawn without replacement, or point masses in a given order.

    Args:
        rng: the answer's random generator.
        proposal: what the first one is drawn from; None with `points`.
        confidences: of the first, the second, ...
        points: ids of the point masses.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        proposal: Distribution | None,
        confidences: Sequence[float],
        points: Sequence[int] = (),
    ) -> None:
        self.confidences = confidences
        self._rng = rng
        self._proposal = proposal
        self._points = iter(points)
        self._last: int | None = None

    def draw(self) -> tuple[int, Distribution | None]:
        """The next one."""
        if self._proposal is None:
            return next(self._points), None
        if self._last is not None:
            # As many tokens as there are confidences have a probability: something is left.
            self._proposal = self._proposal.without(self._last) or self._proposal
        self._last = self._proposal.sample(self._rng)
        return self._last, None if self._proposal.is_point else self._proposal
