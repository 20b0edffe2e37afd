"""The bookkeeping every model cache shares: which tokens it holds, what must be dropped, what must be decoded.

Rollback after a rejection, recovery after an interruption and prefix reuse between turns are all `sync`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from specdec_cli.types import EMPTY_DRAFT, Draft, Logits

_MOST_REREAD = 8
"""More tokens than these are not decoded again with every draft: they get a pass of their own and are then saved."""

_MOST_UNSAVED = 32
"""An interruption costs a model that cannot drop a tail no more than so many tokens, beyond what was being decoded."""


class CachedContext(ABC):
    """A model with its cache.

    The order of calls is `sync(tokens)`, `score(draft)`, perhaps `grow(draft)` a few times, `keep(path)`; `sync` may
    follow anything, an exception included. Invariant: whenever no call is running, the cache holds `tokens`, a prefix
    of what was synced last plus the kept path; what a failed or abandoned call left behind is dropped before the next
    decode.

    A recurrent model has one state, not a cell for each token: its tail cannot be dropped. It sets `_num_snapshots`,
    and then a rejected draft is taken back by snapshots of the last call, if they reach that far, else by a checkpoint
    that was saved before; what was accepted behind the checkpoint is decoded again with the next pass. Where neither
    helps everything is read again.

    Args:
        num_ctx: tokens the cache can hold.
        num_vocab: length of a logits row.
        chunk: the most tokens decoded by one call; interruptions are noticed in between.
        max_leaves: leaves of the widest draft that it takes.
    """

    _num_snapshots: int | None = None
    """Tokens at the end of a call that can be dropped; None where any tail can."""

    def __init__(self, num_ctx: int, num_vocab: int, chunk: int, max_leaves: int = 1) -> None:
        self._num_ctx = num_ctx
        self._num_vocab = num_vocab
        self._chunk = chunk
        self._max_leaves = max_leaves
        self._cached: list[int] = []
        self._pending: list[int] = []
        self._draft = EMPTY_DRAFT
        self._unsure = False
        # Of a model that cannot drop a tail: tokens in its state, None when nobody knows; how many of them snapshots
        # can take back; tokens in the checkpoint, 0 being the empty state; whether a new one is due.
        self._held: int | None = 0
        self._num_droppable = 0
        self._num_saved = 0
        self._save_next = False
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
    def max_leaves(self) -> int:
        """Leaves of the widest draft that it takes; 1 is chains only."""
        return self._max_leaves

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens the cache holds."""
        return self._cached

    def num_missing(self, tokens: Sequence[int]) -> int:
        """Tokens that would be decoded for the logits after `tokens`: those in the cache need not be."""
        kept = self._num_shared(tokens)
        if (kept < len(self._cached) or self._unsure) and not self._can_drop(kept):
            kept = self._num_restorable(kept)
        return len(tokens) - kept

    def sync(self, tokens: Sequence[int]) -> None:
        """Make cache and pending part hold exactly `tokens`, decoding only what differs.

        Of a draft that was not kept the branch stays that `tokens` followed. The last chunk stays pending: it is
        decoded together with the next draft.

        Args:
            tokens: at least one and at most `num_ctx` token ids.
        """
        if not 0 < len(tokens) <= self._num_ctx:
            raise ValueError(f"{len(tokens)} tokens do not fit a context of {self._num_ctx}")
        # The last token is decoded anew.
        if path := self._followed(tokens[:-1]):
            self.keep(path)
        self._truncate(self._num_shared(tokens))
        pending = list(tokens[len(self._cached) :])
        while len(pending) > self._chunk:
            self._advance(pending[: self._chunk])
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
        if self._needs_checkpoint(draft) and len(pending) > _MOST_REREAD:
            self._advance(pending[:-1])
            del pending[:-1]
        rows = self._forward(pending, draft, rows=True)
        assert rows is not None
        self._cached += pending
        self._draft = draft
        self._unsure = len(draft) > 0
        return rows

    def grow(self, draft: Draft) -> Logits:
        """Decode the nodes that were added to the draft since the last `score` or `grow`, all in one call.

        Args:
            draft: begins with the nodes that were decoded before.

        Returns:
            Logits after each new node, shape (num_new, num_vocab); valid until the next call on this context.

        Raises:
            ValueError: it is another draft, does not fit, or nothing was scored since the last `sync`.
        """
        old, num_old = self._draft, len(self._draft)
        if self._pending or (self._unsure and not num_old):
            raise ValueError("grow() needs a score() before it")
        if (draft.tokens[:num_old], draft.parents[:num_old]) != (old.tokens, old.parents):
            raise ValueError("grow() takes a draft that goes on from the one before")
        if len(self._cached) + len(draft) > self._num_ctx:
            raise ValueError("the draft does not fit into the context")
        if len(draft) == num_old:
            return np.empty((0, self._num_vocab), np.float32)
        # As in score(): after a failed call only sync() knows what to drop.
        self._draft = EMPTY_DRAFT
        rows = self._forward([], draft, rows=True, num_old=num_old)
        assert rows is not None
        self._draft = draft
        return rows

    def keep(self, path: Sequence[int]) -> None:
        """Keep the draft nodes on `path` (root to leaf) in the cache, drop the others."""
        if not len(self._draft):
            return
        # Taken out first, as in score(): when this is interrupted nobody knows what is left of it.
        draft, self._draft = self._draft, EMPTY_DRAFT
        num_before = len(self._cached)
        left = num_before + len(path)
        if len(path) < len(draft):
            left = self._rewind(left, lambda: self._keep_path(draft, path, num_before))
        self._cached += [draft.tokens[node] for node in path]
        del self._cached[left:]
        self._unsure = False

    def clear(self) -> None:
        """Empty the cache."""
        self._clear()
        self._cached.clear()
        self._held, self._num_droppable, self._num_saved = 0, 0, 0
        self._pending, self._draft, self._unsure = [], EMPTY_DRAFT, False

    def _num_shared(self, tokens: Sequence[int]) -> int:
        # The last token is always decoded anew: its logits are what score() starts from.
        return min(common_prefix(self._cached, tokens) + len(self._followed(tokens)), len(tokens) - 1)

    def _followed(self, tokens: Sequence[int]) -> list[int]:
        """The path of the draft, as far as it was not kept yet, that `tokens` took."""
        size, path, node = len(self._cached), list[int](), -1
        if not len(self._draft) or list(tokens[:size]) != self._cached:
            return path
        children = self._draft.children()
        for token in tokens[size:]:
            node = next((child for child in children.get(node, ()) if self._draft.tokens[child] == token), -1)
            if node < 0:
                break
            path.append(node)
        return path

    def _truncate(self, num_kept: int) -> None:
        """Drop everything after the first `num_kept` tokens; more where the model cannot drop just that."""
        if num_kept < len(self._cached) or self._unsure:
            del self._cached[self._rewind(num_kept, lambda: self._drop_tail(num_kept)) :]
            self._save_next = True
        self._draft = EMPTY_DRAFT
        self._pending = []
        self._unsure = False

    def _rewind(self, num_kept: int, drop: Callable[[], bool]) -> int:
        """Take the cache back to its first `num_kept` tokens by `drop`, or to fewer; how many are left."""
        can_drop = self._can_drop(num_kept)
        # Should this be interrupted, nobody knows what is left.
        self._unsure, self._held = True, None
        with self._timed():
            if can_drop and drop():
                left = num_kept
            elif (left := self._num_restorable(num_kept)) and not self._restore():
                left = 0
            if not left:
                self._clear()
        if left < self._num_saved:
            self._num_saved = 0
        self._held, self._num_droppable = left, 0
        return left

    def _can_drop(self, num_kept: int) -> bool:
        if self._num_snapshots is None:
            return True
        # llama.cpp would go back further than its snapshots are up to date, and go on from a wrong state.
        return self._held is not None and 0 <= self._held - num_kept <= self._num_droppable

    def _num_restorable(self, num_kept: int) -> int:
        return self._num_saved if self._num_saved <= num_kept else 0

    def _needs_checkpoint(self, draft: Draft) -> bool:
        """Whether a rejection could not be taken back otherwise."""
        return self._num_snapshots is not None and len(draft) > self._num_snapshots

    def _save_if_due(self, draft: Draft) -> None:
        """Save the state where it may have to be gone back to.

        That is before a draft that snapshots do not cover, and behind the committed tokens when a draft model begins to
        draft. It does so one token a call, after a call that took back or caught up.
        """
        num_unsaved = len(self._cached) - self._num_saved
        if self._num_snapshots is None or num_unsaved <= 0:
            return
        begins = self._save_next and not len(draft)
        if not (begins or self._needs_checkpoint(draft) or num_unsaved >= _MOST_UNSAVED):
            return
        # Not valid any more while it is being overwritten.
        self._num_saved = 0
        if self._save():
            self._num_saved, self._save_next = len(self._cached), False

    def _advance(self, tokens: Sequence[int]) -> None:
        """Decode tokens that stay, without logits."""
        self._forward(tokens, EMPTY_DRAFT, rows=False)
        self._cached += tokens
        self._unsure = False

    def _forward(self, tokens: Sequence[int], draft: Draft, *, rows: bool, num_old: int = 0) -> Logits | None:
        with self._timed():
            if not num_old:
                self._save_if_due(draft)
            num = len(tokens) + len(draft) - num_old
            self.num_decoded += num
            # Until the call returned, nobody knows how much of it the cache holds.
            self._unsure, self._held = True, None
            result = self._decode(tokens, draft, rows=rows, num_old=num_old)
        self._held = len(self._cached) + num_old + num
        self._num_droppable = min(self._num_snapshots or 0, num - 1)
        self._save_next |= num > 1 and not len(draft)
        return result

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.decode_s += time.perf_counter() - started

    def _keep_path(self, draft: Draft, path: Sequence[int], num_before: int) -> bool:
        """Reduce the draft nodes behind `num_before` tokens to `path`; False when the model cannot."""
        if not draft.is_chain:
            raise NotImplementedError("this context keeps chains only")
        return self._drop_tail(num_before + len(path))

    @abstractmethod
    def _decode(self, tokens: Sequence[int], draft: Draft, *, rows: bool, num_old: int = 0) -> Logits | None:
        """Decode `tokens` behind the cached ones, then the draft nodes; the first `num_old` of them are in the cache.

        Returns:
            With `rows`, logits after the last token (where there is one) and after each decoded node, shape
            (bool(tokens) + len(draft) - num_old, num_vocab).
        """

    @abstractmethod
    def _drop_tail(self, num_kept: int) -> bool:
        """Drop all but the first `num_kept` tokens; False when the model cannot."""

    def _save(self) -> bool:
        """Save the state, of the cached tokens, in place of what was saved before; False when the model cannot."""
        return False

    def _restore(self) -> bool:
        """Go back to the saved state, whatever happened since; False when that failed."""
        return False

    @abstractmethod
    def _clear(self) -> None:
        """Empty the cache."""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])
