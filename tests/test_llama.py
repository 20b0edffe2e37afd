from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import (
    ExactContext,
    assert_logits,
    fresh_logits,
    open_context,
    random_tokens,
    sentencepiece_vocabulary,
    tiny,
)

from specdec_cli import interrupt
from specdec_cli.draft_length import Fixed
from specdec_cli.drafters import ModelDrafter, NoDrafter
from specdec_cli.engine import speculate
from specdec_cli.errors import BackendError, IncompatibleModelsError, ModelLoadError
from specdec_cli.llama import CHUNK, MAX_DRAFT_TOKENS, ContextOptions, LlamaContext, Model, check_vocabularies
from specdec_cli.sampling import Sampler
from specdec_cli.tiny import byte_level_vocabulary
from specdec_cli.types import Draft, Finish, Round, SamplingParams, Token

TEXTS = [
    "",
    "plain text, and the theme of it\n\n\tindented",
    "Grüße, naïve café",
    "Привет, мир",
    "你好,世界。日本語のテキスト 한국어",
    "שלום עולם مرحبا بالعالم",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \U0001f9d1\U0001f3fd‍🚀",
    "a\x00b\x1b[31m\x7f\ufeff\u2028",
    "<|im_end|> <s> </s> <0x0A>",
    "    def f(x):\r\n        return x ** 2  # spaces   ",
]


@pytest.fixture(autouse=True)
def _no_stop():
    yield
    interrupt.clear_stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder):
    """In full precision, so that one decode call and many agree to the fifth digit."""
    with Model(tiny(folder, "f32", quant="f32")) as loaded:
        yield loaded


def tree(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    num = len(tokens)
    return Draft(tuple(tokens), tuple(parents), (None,) * num, (1.0,) * num)


def path_to(draft: Draft, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = draft.parents[node]
    return path[::-1]


def run_python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Where a mistake may crash the process, it must not be this one."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


# --- sync, score, keep ---------------------------------------------------------------------------------------------


def test_incremental_decoding_equals_a_full_one(model):
    tokens = random_tokens(10)
    with open_context(model) as context:
        for _ in range(20):
            context.sync(tokens)
            row = context.score()[0]
            assert_logits(row, model, tokens)
            tokens.append(int(row.argmax()))
        assert context.num_decoded == 29
        assert list(context.tokens) == tokens[:-1]


def test_score_twice_needs_a_sync(model):
    with open_context(model) as context:
        with pytest.raises(ValueError, match="sync"):
            context.score()
        context.sync([1, 2])
        context.score()
        with pytest.raises(ValueError, match="sync"):
            context.score()


def test_same_tokens_again(model):
    with open_context(model) as context:
        for _ in range(3):
            context.sync([5, 6, 7])
            assert_logits(context.score()[0], model, [5, 6, 7])
        assert context.num_decoded == 5


@pytest.mark.parametrize("num_kept", [0, 1, 3, 4])
def test_chain_rows_and_keep(model, num_kept):
    tokens, drafted = random_tokens(12), [40, 41, 42, 43]
    with open_context(model) as context:
        context.sync(tokens)
        rows = context.score(Draft.chain(drafted))
        assert rows.shape == (5, model.num_vocab)
        for index, row in enumerate(rows):
            assert_logits(row, model, tokens + drafted[:index])
        context.keep(range(num_kept))
        assert list(context.tokens) == tokens + drafted[:num_kept]
        following = [*tokens, *drafted[:num_kept], 99]
        decoded = context.num_decoded
        context.sync(following)
        assert_logits(context.score()[0], model, following)
        assert context.num_decoded == decoded + 1


TREES = {
    "two leaves": [-1, -1],
    "four leaves": [-1, -1, -1, -1],
    "branch behind the root": [-1, 0, 0, 1, 2],
    "branches at two depths": [-1, 0, 1, 0, -1, 4],
    "interleaved": [-1, -1, 0, 1, 2, 3, 4],
    "branches of a branch": [-1, -1, 1, 1, 3, 3],
}


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES.keys())
def test_tree_rows_and_every_path(model, parents):
    tokens = random_tokens(9)
    draft = tree(range(60, 60 + len(parents)), parents)
    with open_context(model, max_leaves=4) as context:
        for last in range(-1, len(draft)):
            path = path_to(draft, last)
            context.sync(tokens)
            rows = context.score(draft)
            assert_logits(rows[last + 1], model, tokens + [draft.tokens[node] for node in path])
            context.keep(path)
            following = [*tokens, *(draft.tokens[node] for node in path), 99]
            assert list(context.tokens) == following[:-1]
            context.sync(following)
            assert_logits(context.score(Draft.chain([98]))[1], model, [*following, 98])


@pytest.mark.parametrize("parents", [*TREES.values(), [-1, 0, 1, 2]], ids=[*TREES.keys(), "chain"])
@pytest.mark.parametrize("sizes", [[1] * 7, [2, 1, 3, 1], [1, 6]], ids=["one by one", "mixed", "one and the rest"])
def test_a_tree_that_grows_has_the_logits_of_its_branches(model, parents, sizes):
    """Children of nodes in the cache and of nodes in the same batch; kept by what was taken, or by what is synced."""
    tokens = random_tokens(9)
    draft = tree(range(60, 60 + len(parents)), parents)
    with open_context(model, max_leaves=4) as context:
        for last in range(-1, len(draft)):
            following = [*tokens, *(draft.tokens[node] for node in path_to(draft, last)), 99]
            context.sync(tokens)
            context.score()
            before, size = context.num_decoded, 0
            for num in sizes:
                rows = context.grow(draft.first(size + num))
                for node in range(size, min(size + num, len(draft))):
                    path = [draft.tokens[index] for index in path_to(draft, node)]
                    assert_logits(rows[node - size], model, tokens + path)
                size = min(size + num, len(draft))
            assert context.num_decoded == before + size
            if last % 2:
                context.keep([node for node in path_to(draft, last) if node < size])
            decoded = context.num_decoded
            context.sync(following)
            assert_logits(context.score(Draft.chain([98]))[1], model, [*following, 98])
            num_new = sum(node >= size for node in path_to(draft, last))
            assert context.num_decoded == decoded + 2 + num_new


def test_a_scored_tree_can_grow(model):
    tokens = random_tokens(5)
    draft = tree([60, 61, 62, 63, 64, 65, 66], [-1, -1, 0, 1, 0, 2, 3])
    with open_context(model, max_leaves=4) as context:
        context.sync(tokens)
        context.score(draft.first(3))
        rows = context.grow(draft)
        for node in range(3, 7):
            path = [draft.tokens[index] for index in path_to(draft, node)]
            assert_logits(rows[node - 3], model, tokens + path)
        context.keep([1, 3])
        context.sync([*tokens, 61, 63, 5])
        assert_logits(context.score()[0], model, [*tokens, 61, 63, 5])


def test_growing_beyond_the_leaves_is_refused(model):
    with open_context(model, max_leaves=2) as context:
        context.sync([1, 2])
        context.score()
        context.grow(tree([5, 6], [-1, -1]))
        with pytest.raises(ValueError, match="3 leaves; this context takes 2"):
            context.grow(tree([5, 6, 7], [-1, -1, -1]))
        context.sync([1, 2, 6, 4])
        assert_logits(context.score()[0], model, [1, 2, 6, 4])


def test_chain_behind_a_tree_in_the_same_slots(model):
    with open_context(model, max_leaves=2) as context:
        context.sync([1])
        context.score(tree([2, 3], [-1, -1]))
        context.keep([0])
        context.sync([1, 2, 4, 5])
        assert_logits(context.score(Draft.chain([6]))[1], model, [1, 2, 4, 5, 6])


def test_tree_behind_nothing_cached_and_long_pending(model):
    draft = tree([60, 61, 62], [-1, -1, 1])
    for tokens in ([7], random_tokens(300)):
        with open_context(model, 512, max_leaves=2) as context:
            context.sync(tokens)
            rows = context.score(draft)
            assert_logits(rows[1], model, [*tokens, 60], 512)
            assert_logits(rows[3], model, [*tokens, 61, 62], 512)
            context.keep([1])
            context.sync([*tokens, 61, 5])
            assert_logits(context.score()[0], model, [*tokens, 61, 5], 512)


@st.composite
def drafts(draw) -> Draft:
    parents = [draw(st.integers(-1, index - 1)) for index in range(draw(st.integers(0, 6)))]
    assume(len(set(range(len(parents))) - set(parents)) <= 4)
    return tree([draw(st.integers(0, 270)) for _ in parents], parents)


NEW_TOKENS = st.lists(st.integers(0, 270), min_size=1, max_size=20)
STEP = st.tuples(st.integers(0, 40), NEW_TOKENS, drafts(), st.integers(-1, 5), st.integers(0, 7))


@settings(max_examples=40)
@given(st.lists(STEP, min_size=1, max_size=5))
def test_any_order_of_calls(model, steps):
    with open_context(model, 128, max_leaves=4) as context:
        tokens: list[int] = []
        for num_same, new, draft, last, action in steps:
            tokens = [*tokens[:num_same], *new]
            context.sync(tokens)
            if action == 0:
                continue
            if action == 1:
                interrupt.request_stop()
                with pytest.raises(KeyboardInterrupt):
                    context.score(draft)
                interrupt.clear_stop()
                continue
            if action % 2:
                rows = context.score(draft)
            else:
                rows = context.score(draft.first(len(draft) // 2)).copy()
                rows = np.concatenate([rows, context.grow(draft)])
            node = min(last, len(draft) - 1)
            path = path_to(draft, node)
            following = tokens + [draft.tokens[index] for index in path]
            assert_logits(rows[node + 1], model, following, 128)
            if action > 2:
                context.keep(path)
                assert list(context.tokens) == following
                tokens = following
        context.sync([*tokens, 3])
        assert_logits(context.score()[0], model, [*tokens, 3], 128)


def test_prompt_longer_than_a_chunk(model):
    tokens = random_tokens(2 * CHUNK + 100)
    with open_context(model, 1500) as context:
        context.sync(tokens)
        assert len(context.tokens) == 2 * CHUNK
        row = context.score(Draft.chain([1]))[0].copy()
        assert context.num_decoded == len(tokens) + 1
        steps = open_context(model, 1500)
        for start in range(0, len(tokens), 100):
            steps.sync(tokens[: start + 100])
            other = steps.score()[0]
        np.testing.assert_allclose(row, other, atol=1e-3)
        steps.close()


# --- sizes and misuse ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ctx", [16, 100, 256])
@pytest.mark.parametrize("max_leaves", [1, 4])
def test_exactly_full(model, num_ctx, max_leaves):
    tokens = random_tokens(num_ctx)
    with open_context(model, num_ctx, max_leaves) as context:
        assert context.num_ctx == num_ctx
        context.sync(tokens)
        assert_logits(context.score()[0], model, tokens, 512)
        with pytest.raises(ValueError, match="do not fit"):
            context.sync([*tokens, 1])
        context.sync(tokens)
        with pytest.raises(ValueError, match="does not fit"):
            context.score(Draft.chain([1]))
        assert_logits(context.score()[0], model, tokens, 512)
        context.sync(tokens[:-3])
        rows = context.score(Draft.chain(tokens[-3:]))
        assert_logits(rows[3], model, tokens, 512)
        if max_leaves > 1:
            context.sync(tokens[:-3])
            context.score(tree([1, 2, 3], [-1, -1, -1]))
            context.keep([2])
            context.sync([*tokens[:-3], 3, 4, 5])
            assert_logits(context.score()[0], model, [*tokens[:-3], 3, 4, 5], 512)


def test_empty_sync(model):
    with open_context(model) as context, pytest.raises(ValueError, match="0 tokens"):
        context.sync([])


def test_longest_draft_and_one_more(model):
    tokens = random_tokens(5)
    with open_context(model) as context:
        context.sync(tokens)
        with pytest.raises(ValueError, match=str(MAX_DRAFT_TOKENS)):
            context.score(Draft.chain([1] * (MAX_DRAFT_TOKENS + 1)))
        context.sync(tokens)
        drafted = random_tokens(MAX_DRAFT_TOKENS, seed=1)
        rows = context.score(Draft.chain(drafted))
        assert_logits(rows[-1], model, tokens + drafted)


def test_longest_draft_behind_a_full_chunk(model):
    tokens, drafted = random_tokens(CHUNK), random_tokens(MAX_DRAFT_TOKENS, seed=1)
    with open_context(model, 600) as context:
        context.sync(tokens)
        rows = context.score(Draft.chain(drafted))
        assert_logits(rows[0], model, tokens, 600)
        assert_logits(rows[-1], model, tokens + drafted, 600)


def test_draft_with_too_many_leaves(model):
    with open_context(model, max_leaves=2) as context:
        context.sync([1, 2])
        with pytest.raises(ValueError, match="3 leaves; this context takes 2"):
            context.score(tree([1, 2, 3], [-1, -1, -1]))
        context.sync([1, 2])
        assert_logits(context.score(Draft.chain([3]))[1], model, [1, 2, 3])


PREAMBLE = """
import sys
from pathlib import Path
from specdec_cli.llama import Model, LlamaContext, ContextOptions, MAX_DRAFT_TOKENS
from specdec_cli.types import Draft
model = Model(Path(sys.argv[1]))
def refuses(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ValueError:
        return
    raise AssertionError(f"{call.__name__} was not refused")
"""


def test_far_too_many_leaves_write_nothing(model):
    script = """
for _ in range(20):
    context = LlamaContext(model, ContextOptions(256, threads=1))
    context.sync([1, 2])
    num = MAX_DRAFT_TOKENS
    refuses(context.score, Draft((1,) * num, (-1,) * num, (None,) * num, (1.0,) * num))
    context.close()
"""
    done = run_python(PREAMBLE + script, model.path)
    assert done.returncode == 0, done.stderr


def test_closed_context(model):
    script = """
for call, arguments in [
    ("sync", [[1, 2, 3]]), ("sync", [[1]]), ("sync", [[1, 2, 3, 4, 5, 6]]), ("sync", [list(range(200)) * 4]),
    ("score", []), ("keep", [[0]]), ("clear", []),
]:
    print(call, arguments, file=sys.stderr, flush=True)
    context = LlamaContext(model, ContextOptions(1024, threads=1))
    context.sync([1, 2, 3, 4])
    context.score(Draft.chain([5, 6]))
    context.close()
    context.close()
    refuses(getattr(context, call), *arguments)
"""
    done = run_python(PREAMBLE + script, model.path)
    assert done.returncode == 0, done.stderr


def test_closed_model(model):
    script = """
model.close()
model.close()
print("tokenize", file=sys.stderr, flush=True)
refuses(model.tokenize, "text", add_special=True, parse_special=True)
for call in ["piece", "token_text", "token_attr"]:
    print(call, file=sys.stderr, flush=True)
    refuses(getattr(model, call), 5)
for name in ["handle", "chat_template", "num_vocab", "stop_tokens", "bos", "adds_bos", "max_ctx", "description"]:
    print(name, file=sys.stderr, flush=True)
    refuses(getattr, model, name)
refuses(LlamaContext, model, ContextOptions(256))
"""
    done = run_python(PREAMBLE + script, model.path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("token", [-1, 320, 2**31 - 1])
def test_token_outside_the_vocabulary(model, token):
    with open_context(model) as context:
        context.sync([1, 2, token])
        with pytest.raises((ValueError, BackendError)):
            context.score()
        context.sync([1, 2, 3])
        assert_logits(context.score()[0], model, [1, 2, 3])


# --- text ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bpe", "sentencepiece"])
def tokenizer(request, folder):
    vocabulary = sentencepiece_vocabulary() if request.param == "sentencepiece" else None
    with Model(tiny(folder, request.param, vocabulary=vocabulary), vocab_only=True) as loaded:
        yield loaded


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_give_back_the_text(tokenizer, text):
    tokens = tokenizer.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(tokenizer.piece(token) for token in tokens) == text.encode()


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
def test_tokens_give_back_any_text(tokenizer, text):
    tokens = tokenizer.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(tokenizer.piece(token) for token in tokens) == text.encode()


def test_lone_surrogate_is_replaced(tokenizer):
    tokens = tokenizer.tokenize("a\ud800b", add_special=False, parse_special=False)
    assert b"".join(map(tokenizer.piece, tokens)) == b"a?b"


def test_special_tokens(folder):
    with Model(tiny(folder, "special", add_bos=True), vocab_only=True) as model:
        tokens = model.tokenize("<|im_start|>the<|im_end|>", add_special=True, parse_special=True)
        texts = [model.token_text(token) for token in tokens]
        assert texts == ["<|endoftext|>", "<|im_start|>", "t", "he", "<|im_end|>"]
        assert b"".join(map(model.piece, tokens)) == b"the"
        assert model.piece(tokens[-1], special=True) == b"<|im_end|>"
        assert tokens[-1] in model.stop_tokens
        assert model.tokenize("<|im_end|>", add_special=False, parse_special=False) != [tokens[-1]]


def test_long_piece(folder):
    vocabulary = byte_level_vocabulary()
    tokens = list(vocabulary.tokens)
    tokens[200] = "x" * 5000
    changed = dataclasses.replace(vocabulary, tokens=tuple(tokens))
    with Model(tiny(folder, "long", vocabulary=changed), vocab_only=True) as model:
        assert model.piece(200) == b"x" * 5000
        assert model.piece(ord("a")) == b"a"


# --- pairs ---------------------------------------------------------------------------------------------------------


def altered(folder: Path, name: str, token: int, text: str) -> Path:
    vocabulary = byte_level_vocabulary()
    tokens = list(vocabulary.tokens)
    tokens[token] = text
    return tiny(folder, name, vocabulary=dataclasses.replace(vocabulary, tokens=tuple(tokens)))


def compare(target: Path, draft: Path) -> int:
    with Model(target, vocab_only=True) as first, Model(draft, vocab_only=True) as second:
        return check_vocabularies(first, second)


def test_equal_vocabularies(folder, model):
    assert compare(model.path, tiny(folder, "equal", seed=1)) == 320


def test_padding_may_differ(folder, model):
    longer = tiny(folder, "longer", num_vocab=384)
    assert compare(model.path, longer) == compare(longer, model.path) == 320
    assert compare(model.path, altered(folder, "padding", 300, "[reserved]")) == 320


def test_differing_vocabularies(folder, model):
    other = altered(folder, "differing", 139, "somewhat")
    with pytest.raises(IncompatibleModelsError, match=r"token 139 .*'somewhat'") as caught:
        compare(model.path, other)
    assert repr(byte_level_vocabulary().tokens[139]) in caught.value.message
    assert caught.value.hint


def test_different_kinds_of_tokenizer(folder, model):
    other = tiny(folder, "kind", vocabulary=sentencepiece_vocabulary())
    with pytest.raises(IncompatibleModelsError, match="kinds of tokenizer"):
        compare(model.path, other)


# --- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"GGUF", b"<html><body>sign in</body></html>\n" * 50, bytes(4096)])
def test_not_a_model(tmp_path, content):
    path = tmp_path / "not-a-model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"not-a-model\.gguf") as caught:
        Model(path)
    assert caught.value.hint


def test_directory_and_missing_file(tmp_path):
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(ModelLoadError, match=str(path)):
            Model(path)


def test_cut_off_files(tmp_path, model):
    script = """
import sys
from pathlib import Path
from specdec_cli.errors import ModelLoadError
from specdec_cli.llama import Model
path = Path(sys.argv[1])
data = path.read_bytes()
lengths = [*range(0, 400, 23), *range(400, 16000, 997), *range(16000, len(data), len(data) // 8), len(data) - 1]
for length in lengths:
    path.write_bytes(data[:length])
    for vocab_only in (False, True):
        try:
            Model(path, vocab_only=vocab_only).close()
        except ModelLoadError as error:
            assert "gave no reason" not in error.message, (length, error.message)
        else:
            assert vocab_only, length
"""
    done = run_python(script, tiny(tmp_path, num_layers=1))
    assert done.returncode == 0, done.stderr


def test_without_repacking(folder):
    path = tiny(folder, "mixed")
    rows = []
    for use_extra_bufts in (True, False):
        with Model(path, use_extra_bufts=use_extra_bufts) as loaded:
            rows.append(fresh_logits(loaded, random_tokens(20)))
    assert np.corrcoef(*rows)[0, 1] > 0.999


# --- speculation ---------------------------------------------------------------------------------------------------


class Recording(ExactContext):
    """Remembers behind which tokens each token was decoded."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.decoded: list[tuple[int, ...]] = []

    def _decode(self, tokens, draft, **kwargs):
        whole = [*self.tokens, *tokens]
        self.decoded += [tuple(whole[:end]) for end in range(len(self.tokens) + 1, len(whole) + 1)]
        return super()._decode(tokens, draft, **kwargs)


def generate(target, drafter, params, *, prompt, num_draft_tokens=4, num_vocab=None, max_tokens=300, seed=7):
    rng = np.random.default_rng(seed)
    sampler = Sampler(params, num_vocab or target.num_vocab)
    make = drafter or (lambda *_: NoDrafter())
    policy = Fixed(num_draft_tokens)
    events = list(speculate(target, make(sampler, rng), policy, sampler, rng, prompt, max_tokens=max_tokens))
    return [event.id for event in events if isinstance(event, Token)], events


GREEDY = SamplingParams(temperature=0)
DRAFTS = {
    "the same model": {"quant": "f32"},
    "requantized": {"quant": "q4_0"},
    "without the last layer": {"quant": "f32", "num_layers": 1},
    "unrelated": {"quant": "f32", "seed": 1},
    "shorter vocabulary": {"quant": "f32", "num_vocab": 275},
    "longer vocabulary": {"quant": "q8_0", "num_vocab": 384},
}


@pytest.fixture(scope="module")
def baseline(model):
    with open_context(model, 512) as target:
        tokens, events = generate(target, None, GREEDY, prompt=random_tokens(20))
        assert events[-1] == Finish("length")
        assert len(tokens) == 300
        return tokens


@pytest.mark.parametrize("options", DRAFTS.values(), ids=DRAFTS.keys())
def test_greedy_speculation_says_what_the_target_says(folder, model, baseline, options):
    with Model(tiny(folder, "draft", **options)) as draft_model, open_context(model, 512) as target:
        shared = check_vocabularies(model, draft_model)
        draft = Recording(draft_model, ContextOptions(512, threads=1, kv_type="f32"))
        sampler = Sampler(GREEDY, shared)
        tokens, events = generate(
            target, lambda _, rng: ModelDrafter(draft, sampler, rng), GREEDY, prompt=random_tokens(20), num_vocab=shared
        )
        draft.close()
    assert tokens == baseline
    assert len(draft.decoded) == draft.num_decoded
    assert len(set(draft.decoded)) == len(draft.decoded)
    rounds = [event for event in events if isinstance(event, Round)]
    rate = sum(r.num_accepted for r in rounds) / sum(r.num_drafted for r in rounds)
    if options in ({"quant": "f32"}, DRAFTS["shorter vocabulary"]):
        assert rate == 1
        assert len(rounds) == 60
    else:
        assert rate < 1


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)])
def test_sampled_speculation_repeats_itself(folder, model, params):
    runs = []
    with Model(tiny(folder, "draft", quant="q4_0")) as draft_model:
        for _ in range(2):
            with open_context(model, 512) as target, open_context(draft_model, 512) as draft:
                make = lambda sampler, rng, draft=draft: ModelDrafter(draft, sampler, rng)  # noqa: E731
                tokens, events = generate(target, make, params, prompt=[1, 2, 3])
                runs.append(tokens)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 300
    assert any(event.num_accepted for event in events if isinstance(event, Round))


@pytest.mark.parametrize("num_ctx", [16, 100])
def test_speculation_until_the_context_is_full(model, num_ctx):
    with open_context(model, num_ctx) as target, open_context(model, num_ctx) as draft:
        plain, _ = generate(target, None, GREEDY, prompt=[1, 2, 3])
        tokens, events = generate(target, lambda s, rng: ModelDrafter(draft, s, rng), GREEDY, prompt=[1, 2, 3])
    assert events[-1] == Finish("context")
    assert tokens == plain
    assert len(tokens) == num_ctx - 3 + 1


# --- interruption --------------------------------------------------------------------------------------------------


def read_again_and_again(context: LlamaContext, tokens: Sequence[int]) -> None:
    while True:
        context.sync(tokens)
        context.score()
        context.sync([0])


def test_stop_while_a_prompt_is_read(model):
    tokens = random_tokens(1400)
    with open_context(model, 1500) as context:
        timer = threading.Timer(0.05, interrupt.request_stop)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            read_again_and_again(context, tokens)
        timer.join()
        interrupt.clear_stop()
        assert list(context.tokens) == tokens[: len(context.tokens)]
        context.sync(tokens)
        row = context.score()[0]
        assert_logits(row, model, tokens, 1500)


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
def test_ctrl_c_while_a_prompt_is_read(folder):
    tokens = random_tokens(4000)
    path = tiny(folder, "slow", quant="f32", num_layers=8)
    interrupted_at = 0.0

    def press() -> None:
        nonlocal interrupted_at
        interrupted_at = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    with Model(path) as slow, open_context(slow, 4096) as context:
        timer = threading.Timer(0.1, press)
        timer.start()
        with pytest.raises(KeyboardInterrupt), interrupt.stop_on_sigint():
            read_again_and_again(context, tokens)
        assert time.monotonic() - interrupted_at < 0.5
        timer.join()
        with interrupt.stop_on_sigint():
            context.sync(tokens[:30])
            assert_logits(context.score()[0], slow, tokens[:30])
