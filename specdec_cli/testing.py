"""Public stand-ins for models: a small vocabulary with exact distributions and the manners of a real cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specdec_cli.context import CachedContext
from specdec_cli.types import MAX_BRANCHES, ContextOptions, Draft, Logits


class FakeContext(CachedContext):
    """A Markov chain over a small vocabulary, served through a cache that can be wrong in the ways real ones are.

    Logits are computed from what the simulated cache really holds, so a mistake in the bookkeeping changes them.

    Args:
        table: logits by previous tokens, shape (num_vocab,) * order + (num_vocab,): the next token's logits depend on
            the last `order` tokens (missing ones count as token 0).
        num_ctx: tokens the cache can hold.
        chunk: the most tokens of one decode call.
        can_forget: whether a tail can be dropped; recurrent models cannot.
        num_snapshots: a model that cannot may still take back so many tokens of its last call.
        can_save: whether it can save its state and go back to it.
        max_leaves: leaves of the widest draft.
    """

    def __init__(
        self,
        table: Logits,
        *,
        num_ctx: int = 256,
        chunk: int = 32,
        can_forget: bool = True,
        num_snapshots: int = 0,
        can_save: bool = False,
        max_leaves: int = MAX_BRANCHES,
    ) -> None:
        super().__init__(num_ctx, table.shape[-1], chunk, max_leaves if can_forget else 1)
        self._table = table
        self._cells: list[int] = []
        self._num_snapshots = None if can_forget else num_snapshots
        self._can_save = can_save
        self._state: list[int] = []
        self._num_last = 0
        self.fail_next: BaseException | None = None
        self.num_calls = 0

    @classmethod
    def random(
        cls, seed: int, *, num_vocab: int = 8, order: int = 2, sharpness: float = 2.0, **kwargs: int
    ) -> FakeContext:
        """A random table; a larger `sharpness` makes the distributions more peaked."""
        rng = np.random.default_rng(seed)
        return cls(sharpness * rng.standard_normal((num_vocab,) * (order + 1)), **kwargs)  # type: ignore[arg-type]

    def logits_after(self, tokens: Sequence[int]) -> Logits:
        """The exact logits after `tokens`, shape (num_vocab,)."""
        order = self._table.ndim - 1
        padded = [0] * order + list(tokens)
        return np.asarray(self._table[tuple(padded[len(padded) - order :])])

    def _decode(self, tokens: Sequence[int], draft: Draft, *, rows: bool, num_old: int = 0) -> Logits | None:
        if draft.num_leaves > self._max_leaves:
            raise ValueError(f"a draft with {draft.num_leaves} leaves; this context takes {self._max_leaves}")
        self.num_calls += 1
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            # Like an aborted decode: a part of the batch is in the cache already, and a state is none at all.
            self._cells += tokens[: len(tokens) // 2]
            if self._num_snapshots is not None:
                self._cells[-1:] = [self._num_vocab - 1] * 3
            raise error
        self._num_last = len(tokens) + len(draft)
        self._cells += tokens
        if not rows:
            return None
        # Nodes that were decoded before stand in the cells, whatever the draft says now.
        base, nodes = self._cells[: len(self._cells) - num_old], self._cells[len(self._cells) - num_old :]
        nodes += draft.tokens[num_old:]
        paths: list[list[int]] = []
        for token, parent in zip(nodes, draft.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        self._cells = base + nodes
        return np.stack([self.logits_after(base + path) for path in [*([[]] if tokens else []), *paths[num_old:]]])

    def _drop_tail(self, num_kept: int) -> bool:
        num_dropped = len(self._cells) - num_kept
        del self._cells[num_kept:]
        if self._num_snapshots is None or num_dropped <= 0:
            return True
        if num_dropped > self._num_snapshots:
            self._cells += [0] * num_dropped
            return False
        if num_dropped >= self._num_last:
            # Out of date, and nothing tells.
            self._cells = [self._num_vocab - 1] * num_kept
        self._num_last = 0
        return True

    def _keep_path(self, draft: Draft, path: Sequence[int], num_before: int) -> bool:
        if draft.is_chain:
            return self._drop_tail(num_before + len(path))
        self._cells[num_before:] = [draft.tokens[node] for node in path]
        return True

    def _save(self) -> bool:
        self._state = list(self._cells)
        return self._can_save

    def _restore(self) -> bool:
        self._cells = list(self._state)
        return self._can_save

    def _clear(self) -> None:
        self._cells.clear()

    def close(self) -> None:
        """Nothing to free."""


class FakeModel:
    """A `LanguageModel` around a `FakeContext` table: one token a letter, the last token ends an answer.

    Args:
        seed: of the random table.
        alphabet: the letters, ids 0..n-1; other letters of a text become the first one.
        sharpness: of the table's distributions.
        template: the chat template.
    """

    max_ctx = 4096
    bos = None
    is_recurrent = False

    def __init__(
        self,
        seed: int = 0,
        alphabet: str = "abcdefg",
        *,
        sharpness: float = 2.0,
        template: str | None = "{{ messages[-1].content }}",
    ) -> None:
        self.path = Path(f"fake-{seed}.gguf")
        self.chat_template = template
        self.num_vocab = len(alphabet) + 1
        self.eos = len(alphabet)
        self.stop_tokens = frozenset({self.eos})
        self.contexts: list[FakeContext] = []
        self.is_closed = False
        self._alphabet = alphabet
        table = sharpness * np.random.default_rng(seed).standard_normal((self.num_vocab,) * 3)
        # Rare, so that answers are long enough to look at.
        table[..., self.eos] -= 3.0
        self._table = table

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:  # noqa: ARG002
        """One id a letter."""
        return [max(0, self._alphabet.find(letter)) for letter in text]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The letter of a token; nothing for the end token unless `special`."""
        if token == self.eos:
            return b"<end>" if special else b""
        return self._alphabet[token].encode()

    def open_context(self, options: ContextOptions) -> FakeContext:
        """A new cache over the table; remembered in `contexts`."""
        self.contexts.append(FakeContext(self._table, num_ctx=options.num_ctx, max_leaves=options.max_leaves))
        return self.contexts[-1]

    def close(self) -> None:
        """Remember that it was closed."""
        self.is_closed = True
