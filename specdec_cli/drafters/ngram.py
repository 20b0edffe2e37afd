"""Drafts without a draft model: what followed the same tokens before, in prompt and answer or in the user's texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from specdec_cli.context import common_prefix
from specdec_cli.types import EMPTY_DRAFT, Draft, LengthPolicy

NAME = "ngram"

MAX_DRAFT_TOKENS = 64
"""The most tokens that are looked up: no context scores more."""

MAX_MATCH = 64
"""Longer matches count as this long."""

MAX_OCCURRENCES = 64
"""Earlier places that are compared, the most recent ones: it bounds the work where a text repeats itself."""

MAX_VOTERS = 16
"""Of the places with the longest match, the most recent ones that say what comes next."""

MAX_STORE_TOKENS = 8
"""The most tokens drafted from statistics, whose contexts do not grow: each is a query, and soon one is wrong."""

_GRAMS = (3, 2)
_ENOUGH = 3
_HALF_TRUST = 1.5


class Guess(NamedTuple):
    """What may come next.

    Attributes:
        token: its id.
        share: of the earlier places that were asked, those that were followed by it, in (0, 1].
        length: tokens before it that agree with these places.
    """

    token: int
    share: float
    length: int

    @property
    def confidence(self) -> float:
        """In (0, 1), grows with share and length; a score to be calibrated, not a probability."""
        return self.share * self.length / (self.length + _HALF_TRUST)


class Statistics(Protocol):
    """What followed what in other texts, with ids of the target's vocabulary."""

    def best(self, last_tokens: Sequence[int]) -> tuple[int, float, int] | None:
        """The most frequent token after these, its share, and how many of `last_tokens` were looked at; else None."""


class NgramIndex:
    """Where every pair and triple of tokens ends, kept up to date as a text grows: microseconds a token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def sync(self, tokens: Sequence[int]) -> None:
        """Index exactly `tokens`: what is there already stays, what differs goes."""
        size = len(self._tokens)
        try:
            # A comparison of lists, at 2 ns a token, spares the loop of `common_prefix` in every round but the first.
            if list(tokens[:size]) != self._tokens:
                self._truncate(common_prefix(self._tokens, tokens))
            self._extend(tokens[len(self._tokens) :])
        except BaseException:
            # Half an update would stay wrong for good.
            self._tokens.clear()
            self._ends.clear()
            raise

    def _extend(self, tokens: Sequence[int]) -> None:
        known, ends = self._tokens, self._ends
        for token in tokens:
            known.append(token)
            size = len(known)
            for length in _GRAMS:
                if length <= size:
                    ends.setdefault(tuple(known[-length:]), []).append(size)

    def _truncate(self, size: int) -> None:
        known, ends = self._tokens, self._ends
        for end in range(len(known), size, -1):
            for length in _GRAMS:
                if length <= end:
                    gram = tuple(known[end - length : end])
                    ends[gram].pop()
                    if not ends[gram]:
                        del ends[gram]
        del known[size:]

    def longest(self) -> tuple[list[int], int]:
        """Where else the end of the text stands.

        Returns:
            The ends of the earlier places that agree with the most of the last tokens, oldest first, and the number
            of these tokens; no places and 0 when not even two tokens agree.
        """
        for length in _GRAMS:
            # The last place is the end of the text itself.
            found = self._ends.get(tuple(self._tokens[-length:]), [])[-1 - MAX_OCCURRENCES : -1]
            if found:
                return self._narrowed(found, length)
        return [], 0

    def _narrowed(self, ends: list[int], length: int) -> tuple[list[int], int]:
        """The places among `ends`, which agree with `length` tokens, that agree with the most: by bisection."""
        known, most = self._tokens, min(MAX_MATCH, len(self._tokens) - 1)
        while length < most:
            middle = (length + most + 1) // 2
            suffix = known[-middle:]
            found = [end for end in ends if end >= middle and known[end - middle : end] == suffix]
            if found:
                ends, length = found, middle
            else:
                most = middle - 1
        return ends, length

    def follow(self, ends: Sequence[int], length: int, limit: int) -> Iterator[Guess]:
        """What came after these places, as far as most of them agree, then as far as most of those agree, and so on.

        A place whose text has run up to the end goes on in what was guessed: that is how a loop continues.

        Args:
            ends: places as `longest` tells them.
            length: tokens that agree there.
            limit: the most guesses.
        """
        voters = ends[-MAX_VOTERS:]
        if not voters:
            return
        # A copy that grows with the guesses; nothing before the first place is read.
        text = self._tokens[voters[0] :]
        places = [end - voters[0] for end in voters]
        for step in range(limit):
            votes = [text[place + step] for place in places]
            token = _winner(votes)
            count = votes.count(token)
            text.append(token)
            if count < len(votes):
                places = [place for place, vote in zip(places, votes, strict=True) if vote == token]
            yield Guess(token, count / len(votes), min(length + step, MAX_MATCH))


def _winner(votes: Sequence[int]) -> int:
    """The most frequent one, the most recent among equals."""
    last = votes[-1]
    if votes.count(last) * 2 >= len(votes):
        return last
    counts = Counter(votes)
    return max(reversed(votes), key=lambda token: counts[token])


class NgramDrafter:
    """Proposes what followed the longest earlier occurrence of the last tokens; costs microseconds, decodes nothing.

    Its tokens are point masses, which are safe whatever they are.

    Args:
        stop_tokens: a draft ends with one of these.
        store: asked when fewer than three tokens agree in the text itself.
        num_vocab: number of ids that the target may produce; None trusts `store`.
    """

    decode_s = 0.0

    def __init__(
        self, stop_tokens: Collection[int] = (), store: Statistics | None = None, num_vocab: int | None = None
    ) -> None:
        self._stop_tokens = stop_tokens
        self._store = store
        self._num_vocab = num_vocab
        self._index = NgramIndex()

    def propose(self, tokens: Sequence[int], policy: LengthPolicy, limit: int) -> Draft:
        """The part of `lookup` that the policy finds worth scoring."""
        draft = self.lookup(tokens, limit)
        num = policy.of(NAME).best_length(draft.confidences)
        return Draft.chain(draft.tokens[:num], confidences=draft.confidences[:num], drafter=NAME)

    def lookup(self, tokens: Sequence[int], limit: int) -> Draft:
        """A chain of everything there is to propose after `tokens`: at most `limit` tokens, and 64."""
        if limit <= 0:
            return EMPTY_DRAFT
        self._index.sync(tokens)
        chain: list[Guess] = []
        for guess in self._guesses(tokens, min(limit, MAX_DRAFT_TOKENS)):
            chain.append(guess)
            if guess.token in self._stop_tokens:
                break
        confidences = [guess.confidence for guess in chain]
        return Draft.chain([guess.token for guess in chain], confidences=confidences, drafter=NAME)

    def _guesses(self, tokens: Sequence[int], limit: int) -> Iterator[Guess]:
        ends, length = self._index.longest()
        if length < _ENOUGH:
            stored = list(self._stored(tokens, min(limit, MAX_STORE_TOKENS)))
            if stored and stored[0].length > length:
                return iter(stored)
        return self._index.follow(ends, length, limit)

    def _stored(self, tokens: Sequence[int], limit: int) -> Iterator[Guess]:
        if self._store is None:
            return
        last = list(tokens[-_GRAMS[0] :])
        for _ in range(limit):
            found = self._store.best(last)
            if found is None or not self._is_known(found[0]):
                return
            yield Guess(*found)
            last = [*last, found[0]][-_GRAMS[0] :]

    def _is_known(self, token: int) -> bool:
        return token >= 0 and (self._num_vocab is None or token < self._num_vocab)
