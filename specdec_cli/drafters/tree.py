"""How a draft grows, a chain or a tree: best first, each token drawn only when the policy has decided that it is."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from specdec_cli.distribution import Distribution
from specdec_cli.types import EMPTY_DRAFT, MAX_DRAFT_TOKENS, Candidate, Draft, LengthPolicy

_FAINT = 0.002
"""A further child that is accepted less often is never worth its place."""


class Siblings(Protocol):
    """The children that one node may get.

    Attributes:
        confidences: for the first child, the second, ..., the estimate that it is accepted when those before it are
            not; known before any of them is drawn.
    """

    @property
    def confidences(self) -> Sequence[float]:
        """See above."""

    def draw(self) -> tuple[int, Distribution | None]:
        """The next child: its token, and the distribution that it was sampled from."""


class _Place(NamedTuple):
    """Where the next token may be drawn."""

    parent: int
    rank: int
    siblings: Siblings
    candidate: Candidate


class GrowingDraft:
    """A draft that is being drawn.

    Every token that was drawn stays. Verification looks at a node's earlier siblings and at the nodes above, which were
    all drawn before it, so that every token is new to whoever tries it, whatever was decided by those drawn before.

    Args:
        drafter: the name that its tokens get.
        max_leaves: of the widest tree.
    """

    def __init__(self, drafter: str, max_leaves: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.confidences: list[float] = []
        self._probs: list[Distribution | None] = []
        self._reaches: list[float] = []
        self.depths: list[int] = []
        self._drafter = drafter
        self._num_free = max_leaves - 1
        # By descending reach, earlier ones first among equals.
        self._places: list[tuple[float, int, _Place]] = []
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def draft(self) -> Draft:
        """What was drawn so far."""
        names = (self._drafter,) * len(self)
        return Draft(tuple(self.tokens), tuple(self.parents), tuple(self._probs), tuple(self.confidences), names)

    def path(self, node: int) -> list[int]:
        """Tokens from the root to a node; none for the root, -1."""
        path: list[int] = []
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def open(self, parent: int, siblings: Siblings, policy: LengthPolicy) -> None:
        """Let a node have children: its distribution is known now."""
        left, depth = (1.0, 1) if parent < 0 else (self._reaches[parent], self.depths[parent] + 1)
        reach = left
        for rank, confidence in enumerate(siblings.confidences):
            acceptance = policy.acceptance(confidence, rank)
            # No later sibling comes before an earlier one, whatever the estimates say.
            reach = min(reach, left * acceptance)
            if rank and reach < _FAINT:
                break
            left *= 1.0 - acceptance
            self._num_opened += 1
            place = _Place(parent, rank, siblings, Candidate(confidence, reach, depth))
            bisect.insort(self._places, (-reach, self._num_opened, place))
        del self._places[MAX_DRAFT_TOKENS:]

    def places(self) -> list[_Place]:
        """Where tokens may be drawn, best first; as many siblings as there are leaves left."""
        found, num_free = [], self._num_free
        for _, _, place in self._places:
            if place.rank and not num_free:
                continue
            num_free -= place.rank > 0
            found.append(place)
        return found

    def draw(self, places: Sequence[_Place]) -> range:
        """Draw tokens there; their nodes."""
        first = len(self)
        for place in places:
            token, probs = place.siblings.draw()
            self.tokens.append(token)
            self.parents.append(place.parent)
            self.confidences.append(place.candidate.confidence)
            self._probs.append(probs)
            self._reaches.append(place.candidate.reach)
            self.depths.append(place.candidate.depth)
            self._num_free -= place.rank > 0
        if len(places) == len(self._places):
            self._places.clear()
        else:
            drawn = {id(place) for place in places}
            self._places = [entry for entry in self._places if id(entry[2]) not in drawn]
        return range(first, len(self))


Expand = Callable[[GrowingDraft, Sequence[int]], Sequence[Siblings]]
"""A draft step: decodes these nodes (-1 is the root), and tells which children each may get."""


def grow(
    draft: GrowingDraft,
    expand: Expand,
    policy: LengthPolicy,
    limit: int,
    max_tokens: int = MAX_DRAFT_TOKENS,
    stop_tokens: Collection[int] = (),
) -> Draft:
    """Draw tokens, the best first, for as long as the policy wants more.

    Args:
        draft: an empty one.
        expand: called for the root, then for the nodes that the policy goes on behind.
        policy: as one drafter sees it.
        limit: the most tokens of a branch.
        max_tokens: the most tokens.
        stop_tokens: nothing follows one of these.
    """
    if min(limit, max_tokens) <= 0 or not policy.draft_more(()):
        return EMPTY_DRAFT
    nodes: Sequence[int] = [-1]
    goes_on = True
    while goes_on:
        for node, siblings in zip(nodes, expand(draft, nodes), strict=True):
            draft.open(node, siblings, policy)
        nodes = []
        # Where there is nothing to decode behind these, the rest may still be worth it.
        while goes_on and not nodes and (places := draft.places()):
            num, goes_on = policy.branch(draft.confidences, [place.candidate for place in places])
            drawn = draft.draw(places[: min(num, max_tokens - len(draft))])
            nodes = [node for node in drawn if draft.depths[node] < limit and draft.tokens[node] not in stop_tokens]
            goes_on = goes_on and len(draft) < max_tokens
        goes_on = goes_on and bool(nodes)
    return draft.draft
