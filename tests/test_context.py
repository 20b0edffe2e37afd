"""The cache's bookkeeping: whatever happened, what is decoded next stands behind exactly the right tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lossless import random_tree

from specdec_cli.context import CachedContext, common_prefix
from specdec_cli.errors import BackendError
from specdec_cli.testing import FakeContext
from specdec_cli.types import EMPTY_DRAFT, Draft, Logits

NUM_VOCAB = 3
NUM_CTX = 24
kinds = st.one_of(
    st.just({"can_forget": True}),
    st.builds(
        dict,
        can_forget=st.just(False),
        num_snapshots=st.sampled_from([0, 0, 1, 3]),
        can_save=st.sampled_from([1, 1, 0]),
    ),
)
"""What caches can do: attention's can drop any tail, others go back by snapshots or a checkpoint, or cannot at all."""

tokens_lists = st.lists(st.integers(0, NUM_VOCAB - 1), min_size=1, max_size=NUM_CTX)


class ChainContext(FakeContext):
    """Keeps chains by dropping the tail, as contexts without trees do."""

    _keep_path = CachedContext._keep_path


def fake(seed: int = 0, *, trees: bool = True, **kwargs: Any) -> FakeContext:
    """Order 3: a token that is missing or too many in the cache shows in the logits."""
    table = np.random.default_rng(seed).standard_normal((NUM_VOCAB,) * 4)
    return (FakeContext if trees else ChainContext)(table, **{"num_ctx": NUM_CTX, **kwargs})


def paths_of(draft: Draft) -> list[list[int]]:
    """Token path to each node."""
    found: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def nodes_to(draft: Draft, leaf: int) -> list[int]:
    """Node indices from the root to a node."""
    return ([] if draft.parents[leaf] < 0 else nodes_to(draft, draft.parents[leaf])) + [leaf]


def check_rows(context: FakeContext, prefix: list[int], draft: Draft, rows: Logits) -> None:
    expected = [context.logits_after(prefix + path) for path in [[], *paths_of(draft)]]
    assert rows.tolist() == np.stack(expected).tolist()


class CacheMachine(RuleBasedStateMachine):
    """Rounds, abandoned rounds, failures and other prompts in any order."""

    @initialize(kind=kinds, trees=st.booleans(), chunk=st.integers(1, 12), seed=st.integers(0, 99))
    def start(self, kind: dict[str, Any], trees: bool, chunk: int, seed: int) -> None:
        trees = trees and kind["can_forget"]
        self.context = fake(seed, trees=trees, chunk=chunk, **kind)
        self.trees = trees
        self.synced: list[int] = []
        self.committed: list[int] = []
        self.quiet = True

    def fail(self, error: type[BaseException] | None) -> None:
        self.context.fail_next = None if error is None else error("stopped")

    def begin(self, tokens: list[int], error: type[BaseException] | None) -> bool:
        """Sync; whether it succeeded."""
        self.synced, self.committed, self.quiet = tokens, tokens, False
        self.fail(error)
        try:
            self.context.sync(tokens)
        except (KeyboardInterrupt, BackendError):
            self.context.fail_next = None
            return False
        return True

    def room(self) -> int:
        return NUM_CTX - len(self.synced)

    def draft(self, seed: int) -> Draft:
        # The script proposes up to one node more than its limit.
        draft = random_tree(seed, NUM_VOCAB)(self.synced, min(self.room(), 6) - 1) if self.room() else EMPTY_DRAFT
        return draft if self.trees else Draft.chain(draft.tokens)

    errors = st.sampled_from([None, None, None, KeyboardInterrupt, BackendError])

    @rule(tokens=tokens_lists, error=errors)
    def sync_elsewhere(self, tokens: list[int], error: type[BaseException] | None) -> None:
        self.begin(tokens, error)

    @rule(num_kept=st.integers(1, NUM_CTX), more=st.lists(st.integers(0, NUM_VOCAB - 1), max_size=5))
    def sync_nearby(self, num_kept: int, more: list[int]) -> None:
        """A common beginning, as between two turns of a chat; also exactly the same or fewer tokens."""
        self.begin(([*self.committed[:num_kept], *more] or [0])[:NUM_CTX], None)

    @rule(
        seed=st.integers(0, 999),
        error=errors,
        kept=st.integers(-2, 6),
        bonus=st.integers(0, NUM_VOCAB - 1),
        steps=st.lists(st.integers(0, 3), max_size=3),
    )
    def whole_round(
        self, seed: int, error: type[BaseException] | None, kept: int, bonus: int, steps: list[int]
    ) -> None:
        """Sync to what is committed, score, perhaps grow, and mostly keep a path; -2 abandons the round."""
        if not self.begin((self.committed or [0])[:NUM_CTX], None):
            return
        draft = self.draft(seed)
        sizes = sorted({min(size, len(draft)) for size in np.cumsum([0, *steps]).tolist()} if steps else {len(draft)})
        draft = draft.first(sizes[-1])
        try:
            rows = [self.context.score(draft.first(sizes[0]))]
            self.fail(error)
            rows += [self.context.grow(draft.first(size)) for size in sizes[1:]]
            self.context.fail_next = None
        except (KeyboardInterrupt, BackendError):
            return
        check_rows(self.context, self.synced, draft, np.concatenate(rows))
        if kept == -2:
            return
        path = nodes_to(draft, kept) if 0 <= kept < len(draft) else []
        self.context.keep(path)
        kept_tokens = [draft.tokens[node] for node in path]
        whole = self.synced + kept_tokens
        # Snapshots are of the last call.
        reach = self.context._num_snapshots if len(sizes) == 1 else 0
        if self.context._num_snapshots is None or len(draft) - len(path) <= (reach or 0):
            assert list(self.context.tokens) == whole
        assert self.context.num_missing([*whole, bonus]) == len(whole) + 1 - len(self.context.tokens)
        self.synced = self.synced + kept_tokens
        self.committed = [*self.synced, bonus]
        self.quiet = True

    @rule(seed=st.integers(0, 999), node=st.integers(0, 6), more=st.lists(st.integers(0, NUM_VOCAB - 1), max_size=3))
    def sync_along_a_branch(self, seed: int, node: int, more: list[int]) -> None:
        """Instead of `keep`: what the tokens followed of the draft is not decoded again."""
        if not self.begin((self.committed or [0])[:NUM_CTX], None):
            return
        draft = self.draft(seed)
        self.context.score()
        self.context.grow(draft)
        path = nodes_to(draft, node) if node < len(draft) else []
        tokens = [*self.synced, *(draft.tokens[index] for index in path), *more][:NUM_CTX]
        missing = self.context.num_missing(tokens)
        is_distinct = all(
            len({draft.tokens[child] for child in nodes}) == len(nodes) for nodes in draft.children().values()
        )
        if is_distinct and self.context._num_snapshots is None:
            assert missing <= max(1, len(tokens) - len(self.synced) - len(path))
        before = self.context.num_decoded
        if self.begin(tokens, None):
            check_rows(self.context, tokens, EMPTY_DRAFT, self.context.score())
            assert self.context.num_decoded - before == missing
        self.quiet = True

    @precondition(lambda self: self.quiet and self.committed)
    @rule()
    def baseline_step(self) -> None:
        self.begin(self.committed[:NUM_CTX], None)
        check_rows(self.context, self.synced, EMPTY_DRAFT, self.context.score())

    @invariant()
    def tokens_are_a_prefix_of_what_was_synced_and_kept(self) -> None:
        if hasattr(self, "context"):
            held = list(self.context.tokens)
            assert held == self.synced[: len(held)]

    @invariant()
    def cells_are_the_tokens(self) -> None:
        """What a failed or abandoned call left behind comes after them and is dropped before the next decode."""
        if hasattr(self, "context"):
            held = list(self.context.tokens)
            if self.context._num_snapshots is None or self.context._held is not None:
                assert self.context._cells[: len(held)] == held
            if self.quiet or not self.context._unsure:
                assert self.context._cells == held


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=25)


@given(tokens_lists, tokens_lists, st.integers(1, 9), st.booleans())
def test_sync_decodes_only_what_differs(first: list[int], second: list[int], chunk: int, can_forget: bool) -> None:
    context = fake(chunk=chunk, can_forget=can_forget)
    for tokens in (first, second):
        held, before = list(context.tokens), context.num_decoded
        missing = context.num_missing(tokens)
        context.sync(tokens)
        check_rows(context, tokens, EMPTY_DRAFT, context.score())
        shared = min(common_prefix(held, tokens), len(tokens) - 1)
        if not can_forget and shared < len(held):
            shared = 0
        assert context.num_decoded - before == len(tokens) - shared == missing


def test_chunks_are_never_larger_than_allowed() -> None:
    context = fake(chunk=4)
    context.sync([0] * 11)
    assert (context.num_calls, list(context.tokens)) == (2, [0] * 8)
    context.score(Draft.chain([1, 2]))
    assert (context.num_calls, list(context.tokens)) == (3, [0] * 11)


@pytest.mark.parametrize("can_forget", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, BackendError])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_failing_call_leaves_a_cache_that_the_next_sync_repairs(call: int, error: type, can_forget: bool) -> None:
    context = fake(chunk=4, can_forget=can_forget)
    tokens = [0, 1, 2, 1, 0, 2, 2, 1, 1, 0]

    def attempt() -> Logits:
        context.sync(tokens)
        return context.score(Draft.chain([2, 0]))

    original, calls = context._decode, iter(range(1, 99))

    def decode(*args: object, **kwargs: object) -> object:
        if next(calls) == call:
            context.fail_next = error("stopped")
        return original(*args, **kwargs)  # type: ignore[arg-type]

    context._decode = decode  # type: ignore[method-assign, assignment]
    with pytest.raises(error):
        attempt()
    assert list(context.tokens) == tokens[: 4 * (call - 1)]
    check_rows(context, tokens, Draft.chain([2, 0]), attempt())


def test_score_after_a_failed_score_never_builds_on_leftovers() -> None:
    """Without a `sync` in between it may refuse or repair, but not answer from a cache nobody knows."""
    context = fake()
    context.sync([0, 1, 2, 1])
    context.fail_next = BackendError("stopped")
    with pytest.raises(BackendError):
        context.score()
    try:
        rows = context.score()
    except ValueError:
        return
    assert context._cells == [0, 1, 2, 1]
    check_rows(context, [0, 1, 2, 1], EMPTY_DRAFT, rows)


def test_order_of_calls_is_checked() -> None:
    context = fake()
    with pytest.raises(ValueError, match="sync"):
        context.score()
    context.sync([0])
    context.score()
    with pytest.raises(ValueError, match="sync"):
        context.score()
    context.sync([1] * (NUM_CTX - 1))
    with pytest.raises(ValueError, match="fit"):
        context.score(Draft.chain([0, 0]))
    context.score(Draft.chain([0]))


@pytest.mark.parametrize("size", [0, NUM_CTX + 1])
def test_sync_refuses_what_cannot_be_held(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} tokens do not fit a context of {NUM_CTX}"):
        fake().sync([0] * size)


def test_growing_decodes_new_nodes_only_and_checks_what_it_is_given() -> None:
    context = fake(max_leaves=2)
    draft = Draft((0, 1, 2, 0), (-1, -1, 1, 2), (None,) * 4, (1.0,) * 4)
    context.sync([0, 1])
    with pytest.raises(ValueError, match="score"):
        context.grow(draft)
    context.score(draft.first(1))
    assert context.grow(draft.first(3)).shape == (2, NUM_VOCAB)
    assert context.grow(draft.first(3)).shape == (0, NUM_VOCAB)
    for other in (Draft.chain([0, 1]), Draft((0, 1, 2), (-1, 0, 1)), draft.first(2)):
        with pytest.raises(ValueError, match="goes on"):
            context.grow(other)
    before = context.num_decoded
    context.grow(draft)
    assert context.num_decoded == before + 1
    with pytest.raises(ValueError, match="3 leaves; this context takes 2"):
        context.grow(Draft((0, 1, 2, 0, 2), (-1, -1, 1, 2, 0 - 1)))
    with pytest.raises(ValueError, match="score"):
        context.grow(draft)
    context.sync([0, 1, 1, 2])
    check_rows(context, [0, 1, 1, 2], EMPTY_DRAFT, context.score())
    with pytest.raises(ValueError, match="fit"):
        context.grow(Draft.chain([0] * NUM_CTX))


@pytest.mark.parametrize("error", [KeyboardInterrupt, BackendError])
def test_after_failing_to_grow_only_sync_helps(error: type[BaseException]) -> None:
    context = fake()
    context.sync([0, 1])
    context.score(Draft.chain([2]))
    context.fail_next = error("stopped")
    with pytest.raises(error):
        context.grow(Draft((2, 0, 1), (-1, 0, 0)))
    with pytest.raises(ValueError, match="score"):
        context.grow(Draft((2, 0, 1), (-1, 0, 0)))
    context.keep([0])
    context.sync([0, 1, 2, 1])
    check_rows(context, [0, 1, 2, 1], EMPTY_DRAFT, context.score())
    assert context._cells == [0, 1, 2, 1]


def test_keep_everything_needs_no_dropping() -> None:
    """A recurrent model loses nothing while drafts are accepted whole."""
    context = fake(can_forget=False)
    context.sync([0, 1])
    context.score(Draft.chain([2, 0]))
    context.keep([0, 1])
    before = context.num_decoded
    context.sync([0, 1, 2, 0, 1])
    context.score()
    assert context.num_decoded - before == 1


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("num_kept", range(4))
def test_keep_drops_exactly_the_rejected(num_kept: int, trees: bool) -> None:
    context = fake(trees=trees)
    context.sync([0, 1])
    context.score(Draft.chain([2, 0, 1]))
    context.keep(list(range(num_kept)))
    assert list(context.tokens) == context._cells == [0, 1, 2, 0, 1][: 2 + num_kept]
    before = context.num_decoded
    context.sync([*context.tokens, 2])
    context.score()
    assert context.num_decoded == before + 1


def test_a_context_without_trees_says_so() -> None:
    context = fake(trees=False)
    context.sync([0, 1])
    context.score(Draft((0, 1), (-1, -1), (None,) * 2, (1.0,) * 2))
    with pytest.raises(NotImplementedError):
        context.keep([1])


def test_keep_of_a_tree_path() -> None:
    context = fake()
    context.sync([0, 1])
    context.score(Draft((0, 1, 2, 0), (-1, -1, 1, 2), (None,) * 4, (1.0,) * 4))
    context.keep([1, 2])
    assert list(context.tokens) == context._cells == [0, 1, 1, 2]


@given(tokens_lists, tokens_lists)
def test_common_prefix(first: list[int], second: list[int]) -> None:
    length = common_prefix(first, second)
    assert first[:length] == second[:length]
    assert first[length : length + 1] != second[length : length + 1] or length in (len(first), len(second))


# ------------------------------------------------------------------ models that cannot drop a tail


def recurrent(num_snapshots: int = 0, **kwargs: Any) -> FakeContext:
    return fake(can_forget=False, can_save=True, num_snapshots=num_snapshots, **kwargs)


def test_a_checkpoint_is_gone_back_to() -> None:
    """Of a long text the last token is decoded with the draft, behind the checkpoint: one extra call at most."""
    context, tokens, sizes = recurrent(), [0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2], []
    for num_kept in (1, 0, 2, 0):
        context.sync(tokens)
        draft, before, num_calls = Draft.chain([2, 0, 1]), context.num_decoded, context.num_calls
        check_rows(context, tokens, draft, context.score(draft))
        sizes.append((context.num_decoded - before, context.num_calls - num_calls))
        context.keep(range(num_kept))
        tokens = [*tokens, *draft.tokens[:num_kept], 1]
    # 11 + 1 + 3; then two more than 1 + 3, three more, six more.
    assert sizes == [(15, 2), (6, 1), (7, 1), (10, 1)]
    assert list(context.tokens) == context._cells == tokens[:11]
    context.sync(tokens)
    check_rows(context, tokens, EMPTY_DRAFT, context.score())


def test_what_is_to_be_read_again_does_not_grow_for_ever() -> None:
    context, tokens, sizes = recurrent(num_ctx=99), [0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2], []
    for _ in range(20):
        context.sync(tokens)
        before = context.num_decoded
        context.score(Draft.chain([2]))
        sizes.append(context.num_decoded - before)
        context.keep([])
        tokens = [*tokens, 1]
    assert sizes[1:] == [*range(3, 10), 10, *range(3, 10), 10, *range(3, 6)]


def test_snapshots_are_of_the_last_call_only() -> None:
    """What they held before is of other tokens, though it is there."""
    context, tokens = recurrent(num_snapshots=3), [0, 1, 2, 0, 1, 2]
    for num in (5, 6):
        context.sync(tokens[:num])
        context.score()
    for num in (4, 3):
        context.sync([*tokens[:num], 1])
        check_rows(context, [*tokens[:num], 1], EMPTY_DRAFT, context.score())


def test_snapshots_serve_once() -> None:
    """After going back they are counted from another state."""
    context = recurrent(num_snapshots=3)
    context.sync([0, 1])
    context.score(Draft.chain([2, 0, 1]))
    context.keep([0, 1])
    assert list(context.tokens) == [0, 1, 2, 0]
    context.sync([0, 1, 2, 1])
    check_rows(context, [0, 1, 2, 1], EMPTY_DRAFT, context.score())


@pytest.mark.parametrize("num_snapshots", [0, 3])
def test_a_checkpoint_goes_with_its_text(num_snapshots: int) -> None:
    context, tokens = recurrent(num_snapshots), [0, 1, 2, 0, 1, 2, 2, 1, 0]
    for text in (tokens, [*tokens, 1]):
        context.sync(text)
        context.score()
    other = [1] * 12
    context.sync(other)
    context.score(Draft.chain([2]))
    context.keep([0])
    context.fail_next = KeyboardInterrupt()
    context.sync([*other, 2, 0])
    with pytest.raises(KeyboardInterrupt):
        context.score(Draft.chain([1]))
    context.sync([*other, 2, 0])
    check_rows(context, [*other, 2, 0], EMPTY_DRAFT, context.score())
    assert context._cells == [*other, 2, 0]


@pytest.mark.parametrize("num_kept", range(6))
def test_snapshots_take_a_short_rejection_back(num_kept: int) -> None:
    context = recurrent(num_snapshots=3)
    context.sync([0, 1])
    context.score(Draft.chain([2, 0, 1, 1, 0]))
    context.keep(range(num_kept))
    assert list(context.tokens) == ([0, 1, 2, 0, 1, 1, 0][: 2 + num_kept] if num_kept >= 2 else [])
    tokens = [*context.tokens, 2]
    context.sync(tokens)
    check_rows(context, tokens, EMPTY_DRAFT, context.score())


def test_an_interrupted_call_goes_back_to_a_checkpoint() -> None:
    context, tokens = recurrent(chunk=4), [0, 1, 2, 1, 0, 2, 2, 1, 1, 0]
    context.sync(tokens)
    context.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        context.score()
    assert context.num_missing(tokens) == 2
    context.sync(tokens)
    check_rows(context, tokens, EMPTY_DRAFT, context.score())
    # The two tokens of the call that failed count as well.
    assert context.num_decoded == 12


def test_an_interruption_costs_few_of_the_tokens_that_came_one_by_one() -> None:
    missing = []
    for num in range(12, 100):
        context, tokens = recurrent(num_ctx=128), [0, 1, 2] * 40
        for size in range(12, num):
            context.sync(tokens[:size])
            context.score()
        context.sync(tokens[:num])
        context.fail_next = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            context.score()
        missing.append(context.num_missing(tokens[:num]))
    # Up to 32 since the last checkpoint, and the one that was being decoded.
    assert 30 < max(missing) <= 33


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_checkpoint_that_was_half_overwritten_is_not_gone_back_to(is_interrupted: bool) -> None:
    context, tokens = recurrent(), [0, 1, 2, 0, 1, 2, 2, 1, 0, 0]
    for text in (tokens, [*tokens, 1]):
        context.sync(text)
        context.score()
    assert context._num_saved == 10

    def save() -> bool:
        context._state = [NUM_VOCAB - 1] * 3
        if is_interrupted:
            raise KeyboardInterrupt
        return False

    original, context._save = context._save, save  # type: ignore[method-assign]
    context.sync([*tokens, 1, 2])
    with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext():
        context.score(Draft.chain([2, 0]))
    context._save = original  # type: ignore[method-assign]
    context.sync([*tokens, 2, 1])
    check_rows(context, [*tokens, 2, 1], EMPTY_DRAFT, context.score())


def test_decode_seconds_are_counted_also_when_it_fails() -> None:
    context = fake()
    context.sync([0])
    context.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        context.score()
    assert context.decode_s > 0
    assert context.num_decoded == 1
