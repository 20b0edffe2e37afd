"""Models whose cache cannot simply drop its tail: recurrent ones, hybrids, and those that look back a window only.

Whatever happened to a context, its logits are those of one that has seen nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import llama_cpp
import models
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from lossless import ScriptedDrafter
from models import ExactContext, fresh_logits, open_context, random_tokens, tiny

from specdec_cli import interrupt, llama
from specdec_cli.draft_length import Fixed
from specdec_cli.drafters import ModelDrafter, NoDrafter
from specdec_cli.engine import speculate
from specdec_cli.llama import CHUNK, LlamaContext, Model
from specdec_cli.sampling import Sampler
from specdec_cli.session import Session, SessionOptions
from specdec_cli.tiny import Architecture
from specdec_cli.types import (
    EMPTY_DRAFT,
    PLAIN_DECODING,
    ContextOptions,
    Draft,
    Drafter,
    Drafting,
    Round,
    SamplingParams,
    Token,
)

GREEDY = SamplingParams(temperature=0)
ARCHITECTURES: tuple[Architecture, ...] = tuple(name for name in get_args(Architecture) if name != "llama")
RECURRENT = ("mamba", "jamba", "lfm2", "qwen35")
WITH_SNAPSHOTS = ("lfm2", "qwen35")
WITH_CHECKPOINTS = ("mamba", "jamba")
WINDOW = 64


TOLERANCE, WRONG = 0.01, 0.1
"""A wrong state changes some logit by more than 0.1, another order of additions all by less than 0.01."""

assert_logits = functools.partial(models.assert_logits, tolerance=TOLERANCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memories")


_models: dict[tuple[Any, ...], Model] = {}


@pytest.fixture(scope="module", autouse=True)
def _closing() -> Iterator[None]:
    yield
    models._fresh_logits.cache_clear()
    for model in _models.values():
        model.close()
    _models.clear()
    _answers.clear()


@pytest.fixture(autouse=True)
def _no_stop() -> Iterator[None]:
    yield
    interrupt.clear_stop()


def load(folder: Path, architecture: str, **kwargs: Any) -> Model:
    """In full precision, written and loaded once."""
    key = (architecture, *kwargs.items())
    if key not in _models:
        name = f"{architecture}{len(_models)}"
        _models[key] = Model(tiny(folder, name, architecture=architecture, **{"quant": "f32", **kwargs}))
    return _models[key]


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    return load(folder, request.param)


@pytest.fixture(params=RECURRENT)
def recurrent(request: pytest.FixtureRequest, folder: Path) -> Model:
    return load(folder, request.param)


def architecture_of(model: Model) -> str:
    return model.metadata("general.architecture") or ""


class Counting(ExactContext):
    """Remembers the size of each decode call."""

    def __init__(self, model: Model, num_ctx: int = 512) -> None:
        self.sizes: list[int] = []
        super().__init__(model, ContextOptions(num_ctx, threads=1, kv_type="f32"))

    def _decode(self, tokens: Sequence[int], draft: Draft, *, rows: bool, num_old: int = 0) -> Any:
        self.sizes.append(len(tokens) + len(draft))
        return super()._decode(tokens, draft, rows=rows, num_old=num_old)


def generate(
    target: LlamaContext, drafter: Drafter, prompt: Sequence[int], num_draft_tokens: int, max_tokens: int = 300
) -> tuple[list[int], list[Round]]:
    rng, policy = np.random.default_rng(0), Fixed(num_draft_tokens)
    sampler = Sampler(GREEDY, target.num_vocab)
    events = list(speculate(target, drafter, policy, sampler, rng, prompt, max_tokens=max_tokens))
    rounds = [event for event in events if isinstance(event, Round)]
    return [event.id for event in events if isinstance(event, Token)], rounds


_answers: dict[tuple[Model, tuple[int, ...]], list[int]] = {}


def plain_answer(model: Model, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Made once, or again when a longer one is wanted."""
    key = (model, tuple(prompt))
    if len(_answers.get(key, ())) < max_tokens:
        with open_context(model, 512) as target:
            _answers[key] = generate(target, NoDrafter(), prompt, 0, max_tokens)[0]
    return _answers[key][:max_tokens]


def assert_same(model: Model, prompt: Sequence[int], tokens: Sequence[int], expected: Sequence[int]) -> None:
    """Greedy answers are equal up to a near tie, which a batch may round the other way."""
    parted = next((i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), None)
    if parted is not None:
        text = [*prompt, *expected[:parted]]
        row = fresh_logits(model, text, len(text))
        logits = row[tokens[parted]], row[expected[parted]]
        assert abs(logits[0] - logits[1]) < TOLERANCE, f"part at {parted} with logits {logits}"


# ------------------------------------------------------------------ the target


def every_rejection(longest: int) -> Iterator[tuple[int, int]]:
    """(length of the draft, tokens that are right), over and over."""
    return itertools.cycle([(size, right) for size in range(longest + 1) for right in range(size + 1)])


def mistaken(answer: Sequence[int], num_prompt: int, plan: Iterator[tuple[int, int]]) -> ScriptedDrafter:
    """Right for as many tokens as planned, then wrong."""

    def script(tokens: Sequence[int], limit: int) -> Draft:
        size, num_right = next(plan)
        place = len(tokens) - num_prompt
        right = list(answer[place : place + min(num_right, limit)])
        wrong = [(token + 1) % 270 for token in answer[place + len(right) : place + min(size, limit)]]
        return Draft.chain([*right, *wrong])

    return ScriptedDrafter(script)


def test_greedy_answers_survive_rejections_at_every_position(model: Model) -> None:
    """Drafts up to 10 tokens: longer ones than there are snapshots among them."""
    longest = llama.MAX_SNAPSHOTS + 2
    prompt = random_tokens(20)
    answer = plain_answer(model, prompt, 300)
    rounds: list[Round] = []
    with Counting(model) as target:
        for start in (0, 7, 40):
            held = [*prompt, *answer[:start]]
            drafter = mistaken(answer[start:], len(held), every_rejection(longest))
            tokens, more = generate(target, drafter, held, longest, 300 - start)
            assert_same(model, held, tokens, answer[start:])
            rounds += more
    assert len(rounds) > 150
    rejected = {(record.num_drafted, record.num_accepted) for record in rounds}
    assert rejected >= {(size, right) for size in range(longest + 1) for right in range(size + 1)}
    assert len(target.sizes) <= 2 * len(rounds) + 3


def test_rows_of_a_rejected_and_the_next_draft(model: Model) -> None:
    tokens = random_tokens(21)
    with open_context(model) as context:
        for num_kept in (0, 1, 2, 4, 9, 10):
            context.sync(tokens)
            drafted = random_tokens(10, seed=num_kept)
            rows = context.score(Draft.chain(drafted))
            for place in (0, 1, 5, 10):
                assert_logits(rows[place], model, tokens + drafted[:place])
            context.keep(range(num_kept))
            tokens = [*tokens, *drafted[:num_kept], 99]
    assert context.num_decoded < 21 + 6 * 10 + 60


@pytest.mark.parametrize("architecture", WITH_SNAPSHOTS)
def test_short_drafts_are_taken_back_by_snapshots(folder: Path, architecture: str) -> None:
    """Nothing is decoded again, and no state is copied."""
    model, tokens = load(folder, architecture), random_tokens(20)
    with Counting(model) as context:
        context._save = None  # type: ignore[assignment, method-assign]
        for num_kept in (0, 3, 7):
            context.sync(tokens)
            drafted = random_tokens(llama.MAX_SNAPSHOTS, seed=num_kept)
            context.score(Draft.chain(drafted))
            context.keep(range(num_kept))
            tokens = [*tokens, *drafted[:num_kept], 99]
            assert list(context.tokens) == tokens[:-1]
    assert context.sizes == [28, 9, 9]


@pytest.mark.parametrize("architecture", WITH_CHECKPOINTS)
def test_what_a_checkpoint_lost_is_read_again_with_the_next_draft(folder: Path, architecture: str) -> None:
    model, tokens = load(folder, architecture), random_tokens(30)
    with Counting(model) as context:
        for num_kept in (2, 1, 0, 4, 0):
            context.sync(tokens)
            context.score(Draft.chain([1, 2, 3, 4, 5]))
            context.keep(range(num_kept))
            tokens = [*tokens, *range(1, num_kept + 1), 99]
    # The prompt's last token, 3 more, 2 more, 1 more; 5 more are too many to be read with a draft once more.
    assert context.sizes == [29, 6, 9, 11, 12, 11, 6]


def test_a_text_is_needed_whole(recurrent: Model) -> None:
    """Or the tests here could not fail."""
    tokens = random_tokens(40)
    differing = tokens.copy()
    differing[1] += 1
    rows = [fresh_logits(recurrent, text) for text in (tokens, differing)]
    assert np.abs(rows[0] - rows[1]).max() > WRONG


@pytest.mark.parametrize("architecture", WITH_SNAPSHOTS)
def test_llama_cpp_itself_would_go_back_to_a_wrong_state(folder: Path, architecture: str) -> None:
    """Which is why it is not asked to: snapshots are of the last call only."""
    model, tokens = load(folder, architecture), random_tokens(30)
    with open_context(model) as context:
        for num in range(20, 31):
            context.sync(tokens[:num])
            context.score()
        assert llama_cpp.llama_memory_seq_rm(context._memory, 0, 26, -1)
        del context._cached[26:]
        context._held = 26
        context.sync([*tokens[:26], 99])
        row = context.score()[0].copy()
    assert np.abs(row - fresh_logits(model, [*tokens[:26], 99])).max() > WRONG


def test_without_checkpoints_everything_is_read_again(recurrent: Model) -> None:
    tokens = random_tokens(30)
    with Counting(recurrent) as context:
        context._save = lambda: False  # type: ignore[method-assign]
        context.sync(tokens)
        context.score(Draft.chain([1] * 9))
        context.keep(range(0))
        assert list(context.tokens) == []
        assert_logits(sync_and_score(context, [*tokens, 99]), recurrent, [*tokens, 99])


def test_a_checkpoint_that_cannot_be_restored_is_not_believed(recurrent: Model) -> None:
    tokens = random_tokens(30)
    with Counting(recurrent) as context:
        context.sync(tokens)
        context.score(Draft.chain([1] * 9))
        assert context._num_saved
        context._state[0] ^= 0xFF
        context.keep(range(0))
        assert list(context.tokens) == []
        assert_logits(sync_and_score(context, [*tokens, 99]), recurrent, [*tokens, 99])


def sync_and_score(context: LlamaContext, tokens: Sequence[int]) -> Any:
    context.sync(tokens)
    return context.score()[0]


# ------------------------------------------------------------------ the draft model


class Checked(ExactContext):
    """Compares every row with one by a context that has seen nothing else."""

    num_checked = 0

    def score(self, draft: Draft = EMPTY_DRAFT) -> Any:
        tokens = [*self.tokens, *self._pending]
        rows = super().score(draft)
        assert_logits(rows[0], self.model, tokens, 512)
        self.num_checked += 1
        return rows

    def __init__(self, model: Model) -> None:
        self.model = model
        super().__init__(model, ContextOptions(512, threads=1, kv_type="f32"))


def test_a_draft_model_of_this_kind_drafts_as_if_fresh(folder: Path, model: Model) -> None:
    """Its target is an unrelated model in every other answer: rejections at once, and after a few tokens."""
    architecture = architecture_of(model)
    targets = [load(folder, architecture, quant="q4_0"), load(folder, "llama")]
    outcomes = set()
    with Checked(model) as draft:
        for target_model, num_draft_tokens in zip(targets, (6, 3), strict=True):
            prompt = random_tokens(10)
            drafter = ModelDrafter(draft, Sampler(GREEDY, model.num_vocab), np.random.default_rng(0))
            with open_context(target_model, 512) as target:
                tokens, rounds = generate(target, drafter, prompt, num_draft_tokens, 30)
            assert_same(target_model, prompt, tokens, plain_answer(target_model, prompt, 30))
            outcomes |= {"all" if r.num_accepted == r.num_drafted else min(r.num_accepted, 1) for r in rounds}
    assert outcomes >= {0, 1}
    assert draft.num_checked > 60


def test_a_draft_model_reads_little_twice(recurrent: Model, folder: Path) -> None:
    """Per round: what was accepted of its draft, and some tokens when the checkpoint is an older one."""
    with Counting(recurrent) as draft, open_context(load(folder, "llama"), 512) as target:
        drafter = ModelDrafter(draft, Sampler(GREEDY, draft.num_vocab), np.random.default_rng(0))
        _, rounds = generate(target, drafter, random_tokens(50), 4, 100)
        assert draft.num_decoded <= 50 + 5 * len(rounds) + 32
        assert max(draft.sizes[1:]) <= 6


def test_a_target_and_a_draft_of_these_kinds(folder: Path) -> None:
    pairs = [(target, draft) for target in ("mamba", "qwen35") for draft in ("gemma3", "lfm2")]
    for target_name, draft_name in pairs:
        target_model, prompt = load(folder, target_name), random_tokens(20)
        with open_context(target_model, 512) as target, open_context(load(folder, draft_name), 512) as draft:
            drafter = ModelDrafter(draft, Sampler(GREEDY, draft.num_vocab), np.random.default_rng(0))
            tokens, _ = generate(target, drafter, prompt, 3, 40)
        assert_same(target_model, prompt, tokens, plain_answer(target_model, prompt, 40))


# ------------------------------------------------------------------ interruptions


class Interruptible(ExactContext):
    """Its decode calls can be made to give up at any node of the graph, as Ctrl-C does."""

    def __init__(self, model: Model, num_ctx: int = 512) -> None:
        self.nodes_left = -1
        super().__init__(model, ContextOptions(num_ctx, threads=1, kv_type="f32"))

    def _params(self, options: ContextOptions, capacity: int) -> Any:  # type: ignore[override]
        params = ExactContext._params(options, capacity)
        # Kept alive by the attribute; C has its address only.
        self._poll = llama_cpp.ggml_abort_callback(self._gives_up)
        params.abort_callback, params.abort_callback_data = self._poll, None
        return params

    def _gives_up(self, _user_data: ctypes.c_void_p) -> bool:
        self.nodes_left -= 1
        return self.nodes_left == 0


@pytest.mark.parametrize("nodes", [1, 30, 75])
def test_an_answer_goes_on_after_an_interrupted_call(model: Model, nodes: int) -> None:
    """In the middle of a graph some layers have gone on and others have not."""
    prompt = random_tokens(20)
    answer = plain_answer(model, prompt, 80)
    plan, tokens, num_stopped = every_rejection(5), list(prompt), 0
    with Interruptible(model) as target:
        while len(tokens) < len(prompt) + 60:
            drafter = mistaken(answer, len(prompt), plan)
            rng, policy, sampler = np.random.default_rng(0), Fixed(5), Sampler(GREEDY, target.num_vocab)
            events = speculate(target, drafter, policy, sampler, rng, tokens, max_tokens=20)
            calls = itertools.count()
            try:
                for event in events:
                    if isinstance(event, Token):
                        tokens.append(event.id)
                    elif next(calls) == 3:
                        target.nodes_left = nodes
            except KeyboardInterrupt:
                num_stopped += 1
            target.nodes_left = -1
        assert num_stopped >= 2
        assert_same(model, prompt, tokens[len(prompt) :][:60], answer[:60])


def test_a_broken_checkpoint_is_not_believed_after_an_interruption(recurrent: Model) -> None:
    """llama.cpp has taken the positions off by itself then, and the state looks as if it were of the right length."""
    tokens = random_tokens(30)
    with Interruptible(recurrent) as context:
        sync_and_score(context, tokens)
        context.sync([*tokens, 1])
        context.nodes_left = 20
        with pytest.raises(KeyboardInterrupt):
            context.score()
        context.nodes_left = -1
        assert context._num_saved == 30
        context._state[0] ^= 0xFF
        assert_logits(sync_and_score(context, [*tokens, 1]), recurrent, [*tokens, 1])


def test_a_prompt_is_not_read_from_its_start_after_an_interruption(recurrent: Model) -> None:
    tokens = random_tokens(3 * CHUNK + 100)
    with Interruptible(recurrent, 2048) as context:
        context.sync(tokens)
        context.score()
        before = context.num_decoded
        context.nodes_left = 20
        with pytest.raises(KeyboardInterrupt):
            sync_and_score(context, [*tokens, 1])
        context.nodes_left = -1
        row = sync_and_score(context, [*tokens, 1])
        assert context.num_decoded - before <= CHUNK
        assert_logits(row, recurrent, [*tokens, 1], 2048)


# ------------------------------------------------------------------ anything, in any order


class MemoryMachine(RuleBasedStateMachine):
    """Rounds, abandoned rounds, interruptions, and texts that share a beginning of any length."""

    architecture: Architecture
    folder: Path

    @initialize()
    def start(self) -> None:
        self.model = load(self.folder, self.architecture)
        self.context = Interruptible(self.model, 256)
        self.tokens = random_tokens(12)

    def teardown(self) -> None:
        if hasattr(self, "context"):
            self.context.close()

    stops = st.sampled_from([0, 0, 0, 1, 9, 33, 57, 70])

    def decode(self, draft: Draft, nodes: int) -> Any:
        """Rows, or None after an interruption."""
        self.context.nodes_left = nodes or -1
        try:
            self.context.sync(self.tokens)
            return self.context.score(draft)
        except KeyboardInterrupt:
            return None
        finally:
            self.context.nodes_left = -1

    @rule(share=st.floats(0, 1), num_more=st.integers(1, 40), seed=st.integers(0, 9), nodes=stops)
    def another_text(self, share: float, num_more: int, seed: int, nodes: int) -> None:
        kept = self.tokens[: int(share * len(self.tokens))]
        self.tokens = [*kept, *random_tokens(num_more, seed)][:200]
        rows = self.decode(EMPTY_DRAFT, nodes)
        if rows is not None:
            assert_logits(rows[0], self.model, self.tokens)

    @rule(size=st.integers(0, 12), kept=st.integers(-1, 12), seed=st.integers(0, 9), nodes=stops)
    def round(self, size: int, kept: int, seed: int, nodes: int) -> None:
        draft = Draft.chain(random_tokens(size, seed))
        rows = self.decode(draft, nodes)
        if rows is None:
            return
        last = min(max(kept, 0), size)
        assert_logits(rows[last], self.model, [*self.tokens, *draft.tokens[:last]])
        if kept >= 0:
            self.context.keep(range(last))
            self.tokens = [*self.tokens, *draft.tokens[:last], seed][:200]

    @rule(num=st.integers(1, 6))
    def steps(self, num: int) -> None:
        """As a draft model goes on: token by token."""
        for _ in range(num):
            row = self.decode(EMPTY_DRAFT, 0)[0]
            assert_logits(row, self.model, self.tokens)
            self.tokens = [*self.tokens, int(row.argmax())][:200]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_anything_in_any_order(folder: Path, architecture: Architecture) -> None:
    machine = type("Machine", (MemoryMachine,), {"architecture": architecture, "folder": folder})
    case = machine.TestCase
    case.settings = settings(settings.get_profile("specdec"), max_examples=8, stateful_step_count=12)
    case("runTest").runTest()


# ------------------------------------------------------------------ sliding windows


def test_what_has_left_the_window_is_read_again(folder: Path) -> None:
    model, tokens = load(folder, "gemma3"), random_tokens(1500)
    with open_context(model, 2048) as context:
        context.sync(tokens)
        context.score()
        for num_kept, is_there in ((1450, True), (1100, True), (300, False), (250, True)):
            before = context.num_decoded
            text = [*tokens[:num_kept], 99]
            assert_logits(sync_and_score(context, text), model, text, 2048)
            assert context.num_decoded - before == (1 if is_there else num_kept + 1)


def test_a_window_that_is_not_looked_after_shows(folder: Path) -> None:
    """Or the test before could not fail."""
    model, tokens = load(folder, "gemma3"), random_tokens(1500)
    with open_context(model, 2048) as context:
        context._window = 0
        context.sync(tokens)
        context.score()
        text = [*tokens[:300], 99]
        row = sync_and_score(context, text).copy()
    assert np.abs(row - fresh_logits(model, text, 2048)).max() > WRONG


def test_speculation_far_beyond_the_window(folder: Path) -> None:
    """And the window is smaller than its cache, so that cells are used again."""
    model, prompt = load(folder, "gemma3"), random_tokens(850)
    assert model.window == WINDOW
    with open_context(model, 2048) as target:
        answer, _ = generate(target, NoDrafter(), prompt, 0, 300)
    with open_context(model, 2048) as target, open_context(load(folder, "gemma3", quant="q8_0"), 2048) as draft:
        tokens, _ = generate(target, mistaken(answer, 850, every_rejection(9)), prompt, 9, 300)
        assert_same(model, prompt, tokens, answer)
        drafter = ModelDrafter(draft, Sampler(GREEDY, model.num_vocab), np.random.default_rng(0))
        tokens, rounds = generate(target, drafter, prompt, 5, 300)
        assert_same(model, prompt, tokens, answer)
        assert len(rounds) < 200


def test_a_tree_behind_a_text_that_has_left_the_window(folder: Path) -> None:
    """Cells that several sequences share are never used again, so the cache keeps room for all."""
    model, tokens = load(folder, "gemma3"), random_tokens(1400)
    draft = Draft((60, 61, 62, 63, 64), (-1, -1, 0, 1, 1), (None,) * 5, (1.0,) * 5)
    with open_context(model, 1500, max_leaves=4) as context:
        for _ in range(12):
            context.sync(tokens)
            rows = context.score(draft)
            context.keep([1, 3])
            tokens = [*tokens, 61, 63, 99]
        assert_logits(rows[4], model, [*tokens[:-3], 61, 63], 1500)
        assert_logits(sync_and_score(context, tokens), model, tokens, 1500)


def test_a_hybrid_with_a_window_goes_back_to_its_checkpoint(folder: Path) -> None:
    """Past more tokens than a cache of the window alone would hold."""
    path = tiny(folder, "hybrid", architecture="lfm2", quant="f32", metadata={"lfm2.attention.sliding_window": 256})
    tokens = random_tokens(1030 + CHUNK)
    with Model(path) as model, open_context(model, 2048) as context:
        assert (model.is_recurrent, model.window) == (True, 256)
        for num in (*range(1000, 1031), len(tokens)):
            sync_and_score(context, tokens[:num])
        assert context._num_saved == 1000
        before, text = context.num_decoded, [*tokens[:1001], 99]
        assert_logits(sync_and_score(context, text), model, text, 2048)
        assert context.num_decoded - before == 2


def test_a_sliding_window_takes_little_memory(folder: Path) -> None:
    """What every other layer keeps is the window and one chunk, not the whole context."""
    model, text = load(folder, "gemma3"), random_tokens(2500)
    firsts = []
    for max_leaves in (1, 2):
        with open_context(model, 2560, max_leaves=max_leaves) as context:
            sync_and_score(context, text)
            firsts.append(llama_cpp.llama_memory_seq_pos_min(context._memory, 0))
    assert firsts[0] >= 2500 - (WINDOW + CHUNK + 256)
    assert firsts[1] == 0


# ------------------------------------------------------------------ limits


def test_recurrent_models_take_chains_only(recurrent: Model) -> None:
    with open_context(recurrent, max_leaves=4) as context:
        assert context.max_leaves == 1
        context.sync([1, 2])
        with pytest.raises(ValueError, match="2 leaves; this context takes 1"):
            context.score(Draft((3, 4), (-1, -1), (None,) * 2, (1.0,) * 2))
        assert_logits(sync_and_score(context, [1, 2, 3]), recurrent, [1, 2, 3])


def test_attention_takes_trees(folder: Path) -> None:
    for architecture in ("llama", "gemma3"):
        with open_context(load(folder, architecture), max_leaves=4) as context:
            assert context.max_leaves == 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_snapshots_take_a_small_share_of_the_models_memory(folder: Path, architecture: str) -> None:
    model = load(folder, architecture)
    expected = llama.MAX_SNAPSHOTS if architecture in WITH_SNAPSHOTS else 0
    assert model.num_snapshots == expected
    assert expected * llama._snapshot_size(model) <= model.path.stat().st_size / 16
    with open_context(model) as context:
        assert context._num_snapshots == (expected if architecture in RECURRENT else None)


def test_fewer_snapshots_where_states_are_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then the longer drafts are covered by a checkpoint."""
    path = tiny(folder, "large-states", architecture="qwen35", quant="f32")
    monkeypatch.setattr(llama, "_snapshot_size", lambda _: path.stat().st_size // 50)
    with Model(path) as model, open_context(model, 512) as target:
        assert model.num_snapshots == 3
        prompt = random_tokens(20)
        answer = plain_answer(model, prompt, 200)
        tokens, _ = generate(target, mistaken(answer, 20, every_rejection(6)), prompt, 6, 200)
        assert_same(model, prompt, tokens, answer)


# ------------------------------------------------------------------ sessions


@pytest.mark.parametrize("drafting", [Drafting("model", 4), Drafting()], ids=["four tokens", "by costs"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_session_says_what_the_target_says(folder: Path, architecture: str, drafting: Drafting) -> None:
    """For one prompt after the other, with beginnings in common; and by costs that were measured with these caches."""
    files = load(folder, architecture).path, load(folder, architecture, quant="q4_0").path
    with Session.open(*files, SessionOptions(drafting, num_ctx=256, threads=1)) as session:
        for prompt in (random_tokens(30), random_tokens(60), [*random_tokens(20), 1, 2, 3]):
            first = session.generate(prompt, sampling=GREEDY, max_tokens=30)
            session.clear()
            plain = session.generate(prompt, sampling=GREEDY, max_tokens=30, drafting=PLAIN_DECODING)
            tie = session.near_tie(prompt, first.tokens, plain.tokens)
            assert tie is None or tie.is_explained
        if drafting.num_draft_tokens is None:
            assert architecture in WITH_CHECKPOINTS or session.costs.rejected_s == 0
