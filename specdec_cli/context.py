"""The bookkeeping every model cache shares: which tokens it holds, what must be dropped, what must be decoded.

Rollback after a rejection, recovery after an interruption and prefix reuse between turns are all `sync`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from specdec_cli.types import EMPTY_DRAFT, Draft, Logits


class CachedContext(ABC):
    """A model with its cache.

    The order of calls is `sync(tokens)`, `score(draft)`, `keep(path)`; `sync` may follow anything, an exception
    included. Invariant: whenever no call is running, the cache holds `tokens`, a prefix of what was synced last plus
    the kept path; what a failed or abandoned call left behind is dropped before the next decode.

    Args:
        num_ctx: tokens the cache can hold.
        num_vocab: length of a logits row.
        chunk: the most tokens decoded by one call; interruptions are noticed in between.
    """

    def __init__(self, num_ctx: int, num_vocab: int, chunk: int) -> None:
        self._num_ctx = num_ctx
        self._num_vocab = num_vocab
        self._chunk = chunk
        self._cached: list[int] = []
        self._pending: list[int] = []
        self._draft = EMPTY_DRAFT
        self._unsure = False
        self.decode_s = 0.0
        self.num_decoded = 0

    @property
    def num_ctx(self) -> int:
        """Tokens the cache can hold."""
        return self._num_ctx

    @property
    def num_vocab(self) -> int:
        """Length of a logits row."""
        return self._num_vocab

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens the cache holds."""
        return self._cached

    def sync(self, tokens: Sequence[int]) -> None:
        """Make cache and pending part hold exactly `tokens`, decoding only what differs.

        The last chunk stays pending: it is decoded together with the next draft.

        Args:
            tokens: at least one and at most `num_ctx` token ids.
        """
        if not 0 < len(tokens) <= self._num_ctx:
            raise ValueError(f"{len(tokens)} tokens do not fit a context of {self._num_ctx}")
        # The last token is always decoded anew: its logits are what score() starts from.
        self._truncate(min(common_prefix(self._cached, tokens), len(tokens) - 1))
        pending = list(tokens[len(self._cached) :])
        while len(pending) > self._chunk:
            self._forward(pending[: self._chunk], EMPTY_DRAFT, rows=False)
            self._cached += pending[: self._chunk]
            self._unsure = False
            del pending[: self._chunk]
        self._pending = pending

    def score(self, draft: Draft = EMPTY_DRAFT) -> Logits:
        """Decode the pending tokens and the draft in one call.

        Args:
            draft: must fit behind the synced tokens.

        Returns:
            Logits after the last synced token and after each draft node, shape (1 + len(draft), num_vocab); valid
            until the next call on this context.
        """
        if not self._pending:
            raise ValueError("score() needs a sync() before it")
        if len(self._cached) + len(self._pending) + len(draft) > self._num_ctx:
            raise ValueError("the draft does not fit into the context")
        # Taken out first: after a failed call only sync() knows what to drop.
        pending, self._pending = self._pending, []
        rows = self._forward(pending, draft, rows=True)
        assert rows is not None
        self._cached += pending
        self._draft = draft
        self._unsure = len(draft) > 0
        return rows

    def keep(self, path: Sequence[int]) -> None:
        """Keep the draft nodes on `path` (root to leaf) in the cache, drop the others."""
        if not len(self._draft):
            return
        if len(path) < len(self._draft) and not self._keep_path(self._draft, path, len(self._cached)):
            self._forget()
        else:
            self._cached += [self._draft.tokens[node] for node in path]
        self._draft = EMPTY_DRAFT
        self._unsure = False

    def clear(self) -> None:
        """Empty the cache."""
        self._forget()
        self._pending, self._draft, self._unsure = [], EMPTY_DRAFT, False

    def _truncate(self, num_kept: int) -> None:
        """Drop everything after the first `num_kept` tokens; a cache that cannot drop a tail forgets all."""
        if num_kept < len(self._cached) or self._unsure:
            if self._drop_tail(num_kept):
                del self._cached[num_kept:]
            else:
                self._forget()
        self._draft = EMPTY_DRAFT
        self._pending = []
        self._unsure = False

    def _forget(self) -> None:
        self._clear()
        self._cached.clear()

    def _forward(self, tokens: Sequence[int], draft: Draft, *, rows: bool) -> Logits | None:
        # Until the call returned, nobody knows how much of it the cache holds.
        self._unsure = True
        self.num_decoded += len(tokens) + len(draft)
        started = time.perf_counter()
        try:
            result = self._decode(tokens, draft, rows=rows)
        finally:
            self.decode_s += time.perf_counter() - started
        return result

    def _keep_path(self, draft: Draft, path: Sequence[int], num_before: int) -> bool:
        """Reduce the draft nodes behind `num_before` tokens to `path`; False when the model cannot."""
        if not draft.is_chain:
            raise NotImplementedError("this context keeps chains only")
        return self._drop_tail(num_before + len(path))

    @abstractmethod
    def _decode(self, tokens: Sequence[int], draft: Draft, *, rows: bool) -> Logits | None:
        """Decode `tokens` behind the cached ones, then the draft nodes.

        Returns:
            With `rows`, logits after the last token and after each node, shape (1 + len(draft), num_vocab).
        """

    @abstractmethod
    def _drop_tail(self, num_kept: int) -> bool:
        """Drop all but the first `num_kept` tokens; False when the model cannot."""

    @abstractmethod
    def _clear(self) -> None:
        """Empty the cache."""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])
