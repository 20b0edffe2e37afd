"""The draft-verify loop: one generator of events, for chains and trees; with an empty drafter it is the baseline."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specdec_cli.distribution import Distribution
from specdec_cli.errors import ContextFullError
from specdec_cli.sampling import Sampler, top_probability
from specdec_cli.types import (
    Context,
    Drafter,
    Event,
    Finish,
    FinishReason,
    LengthPolicy,
    Prefill,
    Round,
    Token,
    Verdict,
)
from specdec_cli.verify import OnTrial, verify


def speculate(
    target: Context,
    drafter: Drafter,
    policy: LengthPolicy,
    sampler: Sampler,
    rng: np.random.Generator,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop_tokens: Collection[int] = (),
    on_trial: OnTrial | None = None,
) -> Iterator[Event]:
    """Generate an answer with the target's own output distribution.

    Args:
        target: the model whose distribution is served; any cache state, it is synced.
        drafter: proposes; its proposals change the speed only.
        policy: decides how long a draft gets.
        sampler: the settings under which the target is sampled.
        rng: the one generator of this answer, shared with the drafter.
        prompt: token ids, at least one.
        max_tokens: the most tokens of the answer.
        stop_tokens: the answer ends before one of these (end-of-generation tokens).
        on_trial: told about every draft token that was tried; for checks.

    Yields:
        `Prefill`, then for each round its `Token` events and one `Round`, then `Finish`. Closing the generator at any
        point is safe: the next `sync` repairs the caches.

    Raises:
        ContextFullError: the prompt does not fit.
    """
    _check_room(len(prompt), max_tokens, target.num_ctx)
    yield _prefill(target, prompt)
    end = len(prompt) + max_tokens
    loop = _Loop(target, drafter, policy, sampler, rng, list(prompt), end, stop_tokens, on_trial)
    while (finish := loop.finished()) is None:
        yield from loop.round()
    yield Finish(finish)


def _check_room(num_prompt: int, max_tokens: int, num_ctx: int) -> None:
    if num_prompt >= num_ctx:
        wanted = -(-(num_prompt + max_tokens) // 256) * 256
        raise ContextFullError(
            f"the prompt has {num_prompt} tokens, which leaves no room in a context of {num_ctx}",
            f"use `--ctx {wanted}` or a shorter prompt",
        )


def _prefill(target: Context, prompt: Sequence[int]) -> Prefill:
    verify_s = target.decode_s
    target.sync(prompt)
    return Prefill(len(prompt), target.decode_s - verify_s)


@dataclass(slots=True)
class _Loop:
    """The state of one answer."""

    target: Context
    drafter: Drafter
    policy: LengthPolicy
    sampler: Sampler
    rng: np.random.Generator
    tokens: list[int]
    end: int
    stop_tokens: Collection[int]
    on_trial: OnTrial | None
    num_rounds: int = 0
    stopped: bool = False

    def finished(self) -> FinishReason | None:
        """Why no further round is possible, if so."""
        if self.stopped:
            return "eog"
        if len(self.tokens) >= self.end:
            return "length"
        # The last committed token must fit in front of the next one's logits.
        return "context" if len(self.tokens) > self.target.num_ctx else None

    def round(self) -> Iterator[Event]:
        """Draft, score, verify, keep."""
        started = time.perf_counter()
        draft_s, verify_s = self.drafter.decode_s, self.target.decode_s
        num_decoded = self.target.num_decoded
        limit = min(self.end, self.target.num_ctx) - len(self.tokens)
        draft = self.drafter.propose(self.tokens, self.policy, limit)
        # A tree has more tokens than its depth. What is left out was drawn last, whatever it turned out to be.
        draft = draft.first(self.target.num_ctx - len(self.tokens))
        proposed = time.perf_counter()
        self.target.sync(self.tokens)
        rows = self.target.score(draft)

        children, siblings = draft.children(), list[int]()
        tried, outcomes = list[int](), list[float]()

        def target_at(node: int, accepted: list[int]) -> Distribution:
            siblings[:] = children.get(node, ())
            return self.sampler.distribution(rows[node + 1], self.tokens, accepted)

        def on_trial(target: Distribution, proposal: Distribution, accepted: bool) -> None:
            tried.append(siblings.pop(0))
            outcomes.append(min(1.0, target.overlap(proposal)))
            if self.on_trial is not None:
                self.on_trial(target, proposal, accepted)

        verdict = verify(draft, target_at, self.rng, self.stop_tokens, on_trial)
        self.target.keep(verdict.path)
        new = self._commit([draft.tokens[node] for node in verdict.path], verdict)
        is_tree = not draft.is_chain
        record = Round(
            index=self.num_rounds,
            num_drafted=len(draft),
            num_accepted=sum(token.source == "draft" for token in new),
            num_tokens=len(new),
            draft_s=self.drafter.decode_s - draft_s,
            verify_s=self.target.decode_s - verify_s,
            total_s=time.perf_counter() - started,
            propose_s=proposed - started,
            num_reread=self.target.num_decoded - num_decoded - 1 - len(draft),
            drafters=draft.drafters,
            confidences=draft.confidences,
            outcomes=tuple(outcomes),
            target_confidence=0.0 if len(draft) or not self.policy.watches else top_probability(rows[0]),
            decision=self.policy.decision,
            parents=draft.parents if is_tree else (),
            tried=tuple(tried) if is_tree else (),
            path=verdict.path if is_tree else (),
        )
        self.num_rounds += 1
        yield from new
        self.policy.learn(record)
        yield record

    def _commit(self, accepted: list[int], verdict: Verdict) -> list[Token]:
        """Append what the round decided to the tokens, up to a stop token or the budget."""
        new = [Token(token, "draft") for token in accepted]
        if verdict.token is not None:
            new.append(Token(verdict.token, verdict.source))
        new = new[: self.end - len(self.tokens)]
        for index, token in enumerate(new):
            if token.id in self.stop_tokens:
                self.stopped = True
                new = new[:index]
                break
        self.tokens += [token.id for token in new]
        return new
