"""Drafts by a model with another tokenizer than the target's.

Two ways, both of Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", where they are called String-Level Exact Match and Token-Level Intersection.
"""

from __future__ import annotations

import itertools
import time
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec_cli.drafters.model import NAME, ModelDrafter
from specdec_cli.drafters.tree import GrowingDraft
from specdec_cli.sampling import Sampler, top_probability
from specdec_cli.translation import SharedTokens, Translation, Translator, is_cut, num_complete
from specdec_cli.types import EMPTY_DRAFT, Candidate, Constraint, Context, Draft, LengthPolicy, Logits, SamplingParams

_LOOK_BACK = 6
"""Committed tokens of the target with which a draft's text is read."""

_MAX_STEPS = 8
"""Draft tokens after which one more token of the target should stand."""

_MAX_UNSETTLED = 3
"""More of the target's tokens are not held back at the end of a draft: some scripts have no spaces."""

_RATIO_GAIN = 1 / 32
"""The ratio of draft tokens to the target's begins as on a sample text, and follows what is drafted."""


@dataclass(slots=True)
class _Chain:
    """What the draft model has written in one round.

    Attributes:
        prefix: the committed text in the draft model's tokens.
        tokens: what it drafted after them.
        texts: their bytes.
        confidences: its own probabilities of them.
        left: tokens with confidences that the round before drafted and did not use; taken before any is decoded.
        has_ended: the answer ends here by the draft.
    """

    prefix: list[int]
    left: list[tuple[int, float]]
    tokens: list[int] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    has_ended: bool = False

    def confidence_at(self, start: int) -> float:
        """The most that a token from this byte on can have: that of the draft token that begins there, if one does."""
        begins = itertools.accumulate((len(text) for text in self.texts), initial=0)
        return next((own for begin, own in zip(begins, self.confidences, strict=False) if begin == start), 1.0)

    def add(self, token: int, text: bytes, confidence: float) -> None:
        """One more draft token."""
        self.tokens.append(token)
        self.texts.append(text)
        self.confidences.append(confidence)


Standing = list[tuple[int, float]]
"""Tokens of the target that more text would not change, each with its confidence."""


class Retokenized:
    """String-Level Exact Match: what the draft model writes is read with the target's tokenizer.

    The text that was committed becomes draft tokens, the draft model goes on greedily, and its text becomes tokens of
    the target again, read together with the last committed ones. Proposed are tokens that stand: followed by more text
    of the draft beyond the word they are in, or, at its end, a word that is one whole token of the draft model. They
    are point masses, hence lossless whatever they are. What was drafted and not proposed is used in the next round if
    the text went on that way.

    The policy decides for each token of the target. Its confidence is the product of the draft tokens that begin in it,
    and a draft step is told to take as long as all steps for one token of the target take in the mean.

    Args:
        context: the draft model.
        translator: both tokenizers.
        translation: the answer's text in draft tokens.
        may_end: whether the target may end the answer; where it may not, neither does the draft.
        constraint: which tokens of the target a grammar allows.
    """

    def __init__(
        self,
        context: Context,
        translator: Translator,
        translation: Translation,
        *,
        may_end: bool = True,
        constraint: Constraint | None = None,
    ) -> None:
        self._context = context
        self._target = translator.target
        self._draft = translator.draft
        self._translation = translation
        self._constraint = constraint
        self._stop_tokens = translator.draft.model.stop_tokens
        never = () if may_end else tuple((token, -np.inf) for token in self._stop_tokens)
        params = SamplingParams(temperature=0, logit_bias=never)
        self._sampler = Sampler(params, min(context.num_vocab, self._draft.model.num_vocab))
        self._ratio = translator.efficiency.draft_tokens
        self._last: _Chain | None = None

    @property
    def decode_s(self) -> float:
        """Seconds spent in the draft model's decode calls so far."""
        return self._context.decode_s

    def room(self, tokens: Sequence[int]) -> int:
        """About how many tokens of the target can be drafted: the draft model's context may be too small."""
        room = self._context.num_ctx - self._translation.about(tokens, self._ratio) + 1
        return min(room, int(room / self._ratio))

    def num_behind(self, tokens: Sequence[int]) -> int:
        """About how many tokens the draft model decodes for its first proposal, counted as the target's."""
        # To translate what is new takes longer than all else of a round without a draft.
        held = self._context.tokens
        if held and not self._translation.has_begun:
            missing = self._context.num_missing(self._translation.ids(tokens))
        else:
            missing = self._translation.about(tokens, self._ratio) - len(held)
        return max(1, round(missing / self._ratio))

    def propose(self, tokens: Sequence[int], policy: LengthPolicy, limit: int) -> Draft:
        """A chain of point masses."""
        limit = min(limit, self.room(tokens))
        policy = policy.of(NAME, self.num_behind(tokens), limit)
        told: list[float] = []
        standing: Standing = []
        reach, goes_on = 1.0, limit > 0 and policy.draft_more(told)
        if not goes_on:
            return EMPTY_DRAFT
        chain = self._resume(self._translation.ids(tokens))
        before = self._before(tokens)
        while goes_on:
            standing = self._grow(chain, before, told, policy)
            if len(standing) <= len(told) or not self._is_allowed(tokens, standing, len(told)):
                break
            confidence = standing[len(told)][1]
            reach *= policy.acceptance(confidence, 0)
            num_taken, goes_on = policy.branch(told, [Candidate(confidence, reach, len(told) + 1)])
            if not num_taken:
                break
            told.append(confidence)
            goes_on = goes_on and len(told) < limit
        self._last = chain
        if standing:
            self._ratio += _RATIO_GAIN * (len(chain.tokens) / len(standing) - self._ratio)
        kept = standing[: len(told)]
        return Draft.chain([token for token, _ in kept], None, [confidence for _, confidence in kept], NAME)

    def _resume(self, prefix: list[int]) -> _Chain:
        """A new chain, with what the last one has left of it if the text took that way."""
        last = self._last
        if last is None or prefix[: len(last.prefix)] != last.prefix:
            return _Chain(prefix, [])
        # Tokens that were left already follow those that were drafted.
        drafted = [*zip(last.tokens, last.confidences, strict=True), *last.left]
        num_new = len(prefix) - len(last.prefix)
        if [token for token, _ in drafted[:num_new]] != prefix[len(last.prefix) :]:
            return _Chain(prefix, [])
        return _Chain(prefix, drafted[num_new:])

    def _before(self, tokens: Sequence[int]) -> bytes:
        """Text of the last committed tokens, from the beginning of a word on where that is near."""
        text = b""
        for token in reversed(tokens[-_LOOK_BACK:]):
            piece = self._target.piece(token)
            if not piece:
                break
            text = piece + text
            if piece.startswith(b" "):
                break
        return text

    def _grow(self, chain: _Chain, before: bytes, told: Sequence[float], policy: LengthPolicy) -> Standing:
        """Draft until more tokens of the target stand than were told, or nothing worth scoring comes."""
        standing = self._standing(chain, before)
        start = sum(len(self._target.piece(token)) for token, _ in standing[: len(told)])
        for _ in range(_MAX_STEPS):
            if len(standing) > len(told) or not self._step(chain, policy):
                break
            standing = self._standing(chain, before)
            highest = chain.confidence_at(start)
            if len(standing) <= len(told) and not policy.is_promising(told, highest):
                # What the drafts of this text are like must be known of those as well that end here.
                policy.acceptance(highest, 0)
                break
        return standing

    def _step(self, chain: _Chain, policy: LengthPolicy) -> bool:
        """One more draft token, if there can be one."""
        if chain.has_ended or len(chain.prefix) + len(chain.tokens) > self._context.num_ctx or not chain.prefix:
            return False
        token, confidence = chain.left.pop(0) if chain.left else self._decode(chain, policy)
        text = self._draft.piece(token)
        chain.has_ended = token in self._stop_tokens
        if not chain.has_ended and not text:
            # Another special token: whatever it means to the draft model, the target has its own.
            chain.left.insert(0, (token, confidence))
            return False
        chain.add(token, b"" if chain.has_ended else text, confidence)
        return True

    def _decode(self, chain: _Chain, policy: LengthPolicy) -> tuple[int, float]:
        started, num_decoded = time.perf_counter(), self._context.num_decoded
        self._context.sync([*chain.prefix, *chain.tokens])
        row = self._context.score()[0]
        token, confidence = self._sampler.distribution(row).mode(), top_probability(row)
        seconds, num_decoded = time.perf_counter() - started, self._context.num_decoded - num_decoded
        policy.spent(max(1, round(num_decoded / self._ratio)), seconds * self._ratio)
        return token, confidence

    def _standing(self, chain: _Chain, before: bytes) -> Standing:
        """The target's tokens for what was drafted, as far as they stand."""
        text = b"".join(chain.texts)
        if not chain.has_ended:
            text = text[: num_complete(text)]
        tokens = self._target.encode_behind(before, text)
        ends = self._target.ends(tokens)
        if chain.has_ended:
            eos = self._target.model.eos
            if eos is not None and (ends[-1] if ends else 0) == len(text):
                tokens, ends = [*tokens, eos], [*ends, len(text) + 1]
            num = len(tokens)
        else:
            num = num_settled(text, ends, self._draft.ends(chain.tokens))
        return list(zip(tokens[:num], self._confidences(chain, ends[:num]), strict=True))

    @staticmethod
    def _confidences(chain: _Chain, ends: Sequence[int]) -> list[float]:
        """For each token of the target the product of the draft tokens that begin in it."""
        found = [1.0] * len(ends)
        start = place = 0
        for text, confidence in zip(chain.texts, chain.confidences, strict=True):
            while place < len(ends) and start >= ends[place]:
                place += 1
            if place == len(ends):
                break
            found[place] *= confidence
            start += len(text)
        return found

    def _is_allowed(self, tokens: Sequence[int], standing: Standing, index: int) -> bool:
        if self._constraint is None:
            return True
        allowed = self._constraint.allowed(tokens, [token for token, _ in standing[:index]])
        place = int(allowed.searchsorted(standing[index][0]))
        return place < allowed.size and int(allowed[place]) == standing[index][0]


def num_settled(text: bytes, ends: Sequence[int], draft_ends: Sequence[int]) -> int:
    """How many of the target's tokens for an unfinished text stand.

    Args:
        text: what was drafted so far.
        ends: where each of the target's tokens for it ends, ascending.
        draft_ends: the same for the draft model's tokens.
    """
    # The draft model could have written a longer word at once: of 100 words that are one token of both at the end of a
    # draft, 96 stay so in code and prose. Of punctuation, which tokenizers join with what follows, half.
    agree = ends and ends[-1] == draft_ends[-1] and [0, *ends][-2] == [0, *draft_ends][-2]
    if agree and _kind(text[-4:].decode("utf-8", "ignore")[-1:]) in "LN":
        return len(ends)
    fewest = max(0, len(ends) - _MAX_UNSETTLED)
    return next((num for num in range(len(ends) - 1, fewest, -1) if _is_border(text, ends[num - 1])), fewest)


def _is_border(text: bytes, place: int) -> bool:
    """Whether tokenizers cut there whatever follows: behind a word, a number, or punctuation in front of a space."""
    if is_cut(text, place):
        return False
    before, after = text[max(0, place - 4) : place].decode("utf-8", "ignore"), text[place : place + 4]
    first, second = _kind(before[-1:]), _kind(after.decode("utf-8", "ignore")[:1])
    return first != second and (first in "LN" or (first == "P" and after.startswith(b" ")))


def _kind(letter: str) -> str:
    """L for letters and their marks, N for digits, Z for spaces, P for everything else."""
    if letter.isspace():
        return "Z"
    kind = unicodedata.category(letter)[0] if letter else "P"
    return {"M": "L", "L": "L", "N": "N", "Z": "Z"}.get(kind, "P")


class Intersected(ModelDrafter):
    """Token-Level Intersection: the draft model proposes only tokens that both vocabularies have.

    Its logits of these are moved to the target's ids and go through the target's own sampling settings, which
    renormalizes them. Tokens carry the distribution they were sampled from, so the usual rejection rule applies.

    Args:
        context: the draft model.
        translation: the answer's text in draft tokens.
        shared: tokens of both.
        sampler: the target's settings, over the target's vocabulary.
        num_vocab: ids of the target.
        rng: the answer's random generator.
        stop_tokens: a draft ends with one of these.
    """

    def __init__(
        self,
        context: Context,
        translation: Translation,
        shared: SharedTokens,
        sampler: Sampler,
        num_vocab: int,
        rng: np.random.Generator,
        stop_tokens: Collection[int] = (),
    ) -> None:
        super().__init__(context, sampler, rng, stop_tokens)
        self._translation = translation
        self._shared = shared
        self._num_vocab = num_vocab

    def room(self, tokens: Sequence[int]) -> int:
        """About how many tokens can be drafted; what was drafted may be read as more tokens by the draft model."""
        size = len(self._translation.ids(tokens))
        # Special tokens alone are no text that a draft model could go on with.
        return (self._context.num_ctx - size + 1) // 2 if size else 0

    def num_behind(self, tokens: Sequence[int]) -> int:
        """Tokens that the draft model decodes for its first proposal."""
        return self._context.num_missing(self._translation.ids(tokens))

    def _decode(self, tokens: Sequence[int], draft: GrowingDraft) -> Logits:
        # Never more than the cache takes, however it is read: a bad draft is better than an end.
        self._context.sync(self._translation.ids([*tokens, *draft.tokens])[-self._context.num_ctx :])
        own = self._context.score()
        rows = np.full((1, self._num_vocab), -np.inf, dtype=own.dtype)
        rows[:, self._shared.target] = own[:, self._shared.draft]
        return rows
