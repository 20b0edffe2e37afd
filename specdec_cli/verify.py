"""The acceptance rule: one walk over a draft, chain or tree, that keeps the target's distribution exactly."""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np

from specdec_cli.distribution import Distribution
from specdec_cli.types import Draft, Source, Verdict

TargetAt = Callable[[int, list[int]], Distribution]
OnTrial = Callable[[Distribution, Distribution, bool], None]
"""Target and draft distribution at a node, whether the draft token was accepted."""


def verify(
    draft: Draft,
    target_at: TargetAt,
    rng: np.random.Generator,
    stop_tokens: Container[int] = (),
    on_trial: OnTrial | None = None,
) -> Verdict:
    """Accept the longest path that the target agrees with, then add one token of the target's own.

    At a node the children are tried in order: child c, drawn from `draft`, is accepted with probability
    min(1, target(c) / draft(c)); after a rejection the target distribution becomes the normalized residual
    max(0, target - draft) and the next sibling is tried. A point-mass target makes this greedy verification.

    Args:
        draft: the proposal; its `probs` must be what the tokens were sampled from.
        target_at: node index (-1 is the root) and accepted token ids up to it -> the target's distribution there;
            called for visited nodes only.
        rng: source of every random number.
        stop_tokens: the walk ends at an accepted one of these, without a further token.
        on_trial: told about every draft token that was tried.

    Source: Leviathan et al. 2023, Algorithm 1; for siblings Miao et al. 2024 (SpecInfer), Algorithm 2.
    """
    children = draft.children()
    path: list[int] = []
    accepted: list[int] = []
    node = -1
    while True:
        target = target_at(node, accepted)
        siblings = children.get(node, ())
        for child in siblings:
            proposal = draft.probs[child] or Distribution.point(draft.tokens[child])
            accepted_it = _accept(target, proposal, draft.tokens[child], rng)
            if on_trial is not None:
                on_trial(target, proposal, accepted_it)
            if accepted_it:
                break
            target = target.residual(proposal)
        else:
            return Verdict(tuple(path), target.sample(rng), _source(draft, bool(siblings)))
        node = child
        path.append(child)
        accepted.append(draft.tokens[child])
        if accepted[-1] in stop_tokens:
            return Verdict(tuple(path), None, "draft")


def _accept(target: Distribution, proposal: Distribution, token: int, rng: np.random.Generator) -> bool:
    ratio = target.prob(token) / proposal.prob(token)
    return ratio >= 1.0 or (ratio > 0.0 and rng.random() < ratio)


def _source(draft: Draft, rejected: bool) -> Source:
    if not draft.tokens:
        return "target"
    return "recovered" if rejected else "bonus"
