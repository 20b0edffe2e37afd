"""Drafts in another tokenizer's tokens, on toy tokenizers and exact fakes; real tokenizers: test_translation.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import Alternating, RandomPolicy, collect, distance, outcomes, reference_answers, reference_probs

from specdec_cli.acceptance import Acceptance, foreign_prior
from specdec_cli.context import CachedContext
from specdec_cli.cost import CostModel, Timing
from specdec_cli.draft_length import CostRule, Fixed
from specdec_cli.drafters import AutoDrafter, Intersected, NgramDrafter, NoDrafter, Retokenized
from specdec_cli.drafters.retokenize import num_settled
from specdec_cli.engine import speculate
from specdec_cli.sampling import Sampler
from specdec_cli.testing import FakeContext
from specdec_cli.translation import SAMPLE, SharedTokens, Tokenizer, Translation, Translator
from specdec_cli.types import (
    Candidate,
    ContextOptions,
    Draft,
    Drafter,
    LengthPolicy,
    Logits,
    Round,
    SamplingParams,
    Token,
)

PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
GREEDY = SamplingParams(temperature=0)


class Toy:
    """A model with a vocabulary of whole texts, of which the longest is taken first; special tokens have none."""

    chat_template = None
    max_ctx = 4096

    def __init__(self, pieces: Sequence[str | bytes], special: Sequence[str] = ("<end>",), bos: bool = False) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.special = [name.encode() for name in special]
        self.num_vocab = len(pieces) + len(special)
        self.eos = len(pieces)
        self.bos = self.num_vocab - 1 if bos else None
        self.stop_tokens = frozenset({self.eos})
        self.path = FilePath("toy.gguf")
        self.longest = max(map(len, self.pieces))
        self.texts: list[str] = []

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert not parse_special
        self.texts.append(text)
        found = [self.bos] if add_special and self.bos is not None else []
        data = text.encode()
        while data:
            sizes = [size for size in range(self.longest, 0, -1) if data[:size] in self.pieces]
            if sizes:
                found.append(self.pieces.index(data[: sizes[0]]))
            data = data[sizes[0] if sizes else 1 :]
        return found

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < len(self.pieces):
            return self.pieces[token]
        return self.special[token - len(self.pieces)] if special else b""

    def open_context(self, options: ContextOptions) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to free."""


class Writing(CachedContext):
    """A draft model that writes a fixed text, each token with a probability of 0.75; then its end, or "c" for ever."""

    def __init__(self, text: str, model: Toy, end: bool = False, num_ctx: int = 1024) -> None:
        super().__init__(num_ctx, model.num_vocab, 64)
        self.text = text.encode()
        self.tokenizer = Tokenizer(model)
        self.last = model.eos if end else model.pieces.index(b"c")
        self.fed: list[int] = []

    def _decode(self, tokens: Sequence[int], draft: Draft, *, rows: bool, num_old: int = 0) -> Logits | None:
        self.fed += tokens
        written = self.tokenizer.decode([*self._cached, *tokens])
        rest = self.text[len(written) :] if self.text.startswith(written) else b""
        row = np.full(self.num_vocab, np.log(0.25 / (self.num_vocab - 1)))
        row[self.tokenizer.encode(rest)[0] if rest else self.last] = np.log(0.75)
        return row[None]

    def _drop_tail(self, num_kept: int) -> bool:
        return True

    def _clear(self) -> None:
        """Nothing is kept."""


WORDS = Toy(["a", "b", " ", "ab", " ab", "abb", " abab", "c"])
LETTERS = Toy(["c", " ", "b", "a", "ba", "aab", " a"], ("<stop>", "<turn>"))


def writer(
    text: str, *, draft: Toy = LETTERS, target: Toy = WORDS, before: str = "ab ", end: bool = False, **kwargs: Any
) -> tuple[Retokenized, list[int], Writing]:
    """A drafter whose draft model goes on with `text`, tokens to begin with, and the draft model."""
    translator = Translator(target, draft)
    context = Writing(before + text, draft, end)
    drafter = Retokenized(context, translator, translator.translation(), **kwargs)
    return drafter, translator.target.encode(before.encode()), context


def decoded(draft: Draft, model: Toy = WORDS) -> str:
    return Tokenizer(model).decode(draft.tokens).decode()


# --- one draft -----------------------------------------------------------------------------------------------------


def test_what_is_proposed_is_the_drafts_text_in_the_targets_tokens() -> None:
    drafter, start, _ = writer("abab ab abb ab ")
    draft = drafter.propose(start, Fixed(5), 9)
    assert decoded(draft) == "abab ab abb"
    assert list(draft.tokens) == Tokenizer(WORDS).encode(b"abab ab abb")
    assert draft.probs == (None,) * len(draft)
    assert set(draft.drafters) == {"model"}


def test_nothing_is_proposed_that_becomes_another_token() -> None:
    text = "ab abba" * 3
    whole = Tokenizer(WORDS).encode(text.encode())
    for num in range(1, 9):
        drafter, start, _ = writer(text)
        draft = drafter.propose(start, Fixed(num), num)
        assert len(draft) == num
        # The last one may be what the draft model itself took for a whole token.
        assert list(draft.tokens[:-1]) == whole[: num - 1]
        assert draft.tokens[-1] == whole[num - 1] or WORDS.piece(draft.tokens[-1]) in LETTERS.pieces


def test_merges_across_the_border_are_left_alone() -> None:
    drafter, start, _ = writer("b ab c", before="a")
    assert start == [0]
    # The target would have written "ab" as one token, but it wrote "a".
    assert drafter.propose(start, Fixed(2), 2).tokens == (1, 4)


class Splitting(Toy):
    """The first token of a text is one letter: what stands before a text matters."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        rest = super().tokenize(text[1:], add_special=add_special, parse_special=parse_special)
        return [self.pieces.index(text[:1].encode()), *rest] if text[:1].encode() in self.pieces else rest


def test_a_draft_is_read_together_with_the_last_committed_word() -> None:
    target = Splitting([piece.decode() for piece in WORDS.pieces])
    drafter, start, _ = writer("ab abb ab", target=target, before="c ")
    draft = drafter.propose(start, Fixed(2), 2)
    assert [target.piece(token) for token in draft.tokens] == [b"ab", b" ab"]


def test_what_the_target_cannot_write_is_not_proposed() -> None:
    draft = Toy(["c", " ", "b", "a", "x"], ("<stop>",))
    drafter, start, _ = writer("ab abx ab ab ab", draft=draft)
    found = drafter.propose(start, Fixed(9), 9)
    assert decoded(found) in {"ab", "ab ab"}


def test_no_end_behind_what_the_target_cannot_write() -> None:
    drafter, start, _ = writer("ab abx", draft=Toy(["c", " ", "b", "a", "x"], ("<stop>",)), end=True)
    draft = drafter.propose(start, Fixed(9), 9)
    assert decoded(draft) == "ab ab"
    assert WORDS.eos not in draft.tokens


@pytest.mark.parametrize("num", [1, 2, 3])
def test_no_part_of_a_character_is_proposed_that_the_target_has_whole(num: int) -> None:
    halves = "é".encode()[:1], "é".encode()[1:]
    draft, target = Toy(["c", " ", "a", *halves], ("<stop>",)), Toy(["c", " ", "a", "é", *halves])
    drafter, start, _ = writer("aéa c", draft=draft, target=target, before="c ")
    assert list(drafter.propose(start, Fixed(num), 9).tokens) == Tokenizer(target).encode("aéa".encode())[:num]


def test_an_end_is_the_targets_end_and_settles_what_was_written() -> None:
    drafter, start, _ = writer("ab", end=True)
    word = WORDS.pieces.index(b"ab")
    assert drafter.propose(start, Fixed(9), 9).tokens == (word, WORDS.eos)
    assert drafter.propose([*start, word], Fixed(9), 9).tokens == (WORDS.eos,)


def test_no_end_where_the_target_may_not_end() -> None:
    drafter, start, _ = writer("ab", end=True, may_end=False)
    draft = drafter.propose(start, Fixed(4), 4)
    assert WORDS.eos not in draft.tokens
    assert len(draft) == 4


def test_other_special_tokens_cut_a_draft() -> None:
    drafter, start, context = writer("ab ab ")
    context.last = LETTERS.num_vocab - 1
    assert LETTERS.piece(context.last) == b""
    draft = drafter.propose(start, Fixed(9), 9)
    assert decoded(draft) == "ab ab"
    assert drafter.propose([*start, *draft.tokens], Fixed(9), 9).tokens == ()


def test_the_text_of_a_special_token_stays_text() -> None:
    letters = [*"<end>ab ", "ab"]
    target, draft = Toy(letters), Toy([*reversed(letters), "c"])
    drafter, start, context = writer("<end> ab", draft=draft, target=target, end=True)
    tokens = drafter.propose(start, Fixed(20), 20).tokens
    assert Tokenizer(target).decode(tokens[:-1]) == b"<end> ab"
    assert tokens.index(target.eos) == len(tokens) - 1
    assert draft.eos not in context.fed


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_no_more_than_asked_for(limit: int) -> None:
    drafter, start, _ = writer("ab " * 9)
    assert len(drafter.propose(start, Fixed(9), limit)) == limit
    assert len(drafter.propose(start, Fixed(limit), 9)) == limit


def test_a_small_context_of_the_draft_model() -> None:
    lengths = []
    for num_ctx in range(1, 20):
        drafter, start, context = writer("ab " * 9)
        context._num_ctx = num_ctx
        lengths.append(len(drafter.propose(start, Fixed(9), 9)))
        assert len(context.tokens) <= num_ctx
    assert lengths[0] == 0
    assert lengths[-1] > 3


def test_nothing_to_read() -> None:
    translator = Translator(WORDS, LETTERS)
    drafter = Retokenized(Writing("ab", LETTERS), translator, translator.translation())
    assert drafter.propose([WORDS.eos], Fixed(3), 3).tokens == ()


def test_no_token_outside_a_grammar() -> None:
    drafter, start, _ = writer("ab ab ab ab ", constraint=Alternating(WORDS.num_vocab, 2))
    draft = drafter.propose(start, Fixed(9), 9)
    # " ab" may not follow itself.
    assert decoded(draft) == "ab ab"


# --- what the policy is told ---------------------------------------------------------------------------------------


class Recording(LengthPolicy):
    """Wants a number of tokens; remembers what it was told."""

    def __init__(self, num: int, needed: float = 0.0) -> None:
        self.num = num
        self.needed = needed
        self.highest: list[float] = []
        self.seen: list[float] = []
        self.kept: list[tuple[float, ...]] = []
        self.steps: list[int] = []
        self.behind = 0

    def of(self, drafter: str, num_behind: int, limit: int) -> LengthPolicy:
        assert drafter == "model"
        self.behind = num_behind
        return self

    def draft_more(self, confidences: Sequence[float]) -> bool:
        return len(confidences) < self.num

    def keep_last(self, confidences: Sequence[float]) -> bool:
        self.kept.append(tuple(confidences))
        return True

    def is_promising(self, confidences: Sequence[float], confidence: float) -> bool:
        assert len(confidences) < self.num
        self.highest.append(confidence)
        return confidence >= self.needed

    def acceptance(self, confidence: float, rank: int) -> float:
        self.seen.append(confidence)
        return confidence

    def learn(self, record: Round) -> None:
        """Nothing."""

    def spent(self, num_tokens: int, seconds: float) -> None:
        assert seconds > 0
        self.steps.append(num_tokens)


def test_confidences_are_products_of_the_draft_tokens_that_begin_in_a_token() -> None:
    # The draft model writes " a", "b", " a", "ba", "b" for the target's " ab", " abab".
    drafter, start, _ = writer(" ab abab c", before="a")
    policy = Recording(2)
    draft = drafter.propose(start, policy, 9)
    assert decoded(draft) == " ab abab"
    assert draft.confidences == pytest.approx((0.75**2, 0.75**3))
    assert policy.kept == [draft.confidences[:1], draft.confidences]


def test_a_token_that_begins_too_unlikely_is_not_finished() -> None:
    """Each further draft step could only lower its confidence."""
    drafter, start, _ = writer(" ab abab c", before="a")
    patient, strict = Recording(2), Recording(2, needed=0.8)
    assert drafter.propose(start, patient, 9).tokens
    # Where a draft token begins, its own confidence is the most that the token can have.
    assert patient.highest == pytest.approx([0.75] * len(patient.highest))
    drafter._last = None
    assert not drafter.propose(start, strict, 9).tokens
    assert len(strict.steps) == 1 < len(patient.steps)
    # It was seen all the same, or drafts would look surer than they are.
    assert strict.seen == pytest.approx([0.75])


def test_what_could_pay_when_likely_is_promising_and_nothing_unlikely_is() -> None:
    costs = CostModel(Timing({1: 0.06, 2: 0.1, 4: 0.17, 8: 0.35}), {"model": Timing({1: 0.01, 64: 0.4})})
    turn = CostRule(costs, {"model": Acceptance(foreign_prior)}).of("model", 1, 90)
    assert turn.is_promising((), 0.99)
    assert not turn.is_promising((), 0.3)
    assert turn.branch((), [Candidate(0.3, turn.acceptance(0.3, 0), 1)])[0] == 0


def test_every_decode_call_is_told() -> None:
    drafter, start, _ = writer("ab ab ab ")
    policy = Recording(2)
    drafter.propose(start, policy, 9)
    assert drafter._last is not None
    assert len(policy.steps) == len(drafter._last.tokens) > 2
    # The first one has read the prompt, counted in the target's tokens.
    ratio = len(Tokenizer(LETTERS).encode(SAMPLE.encode())) / len(Tokenizer(WORDS).encode(SAMPLE.encode()))
    assert policy.steps[0] == max(1, round(3 / ratio))
    # Nobody had counted them before.
    assert policy.behind == len(start)
    assert set(policy.steps[1:]) == {1}


def test_what_the_draft_model_has_to_read_is_reckoned_without_reading_it() -> None:
    drafter, start, _ = writer("ab ab ab ")
    assert (drafter.num_behind(start), drafter._translation.has_begun) == (len(start), False)
    drafter.propose(start, Recording(2), 9)
    later = [*start, *Tokenizer(WORDS).encode(SAMPLE.encode())]
    reckoned = drafter.num_behind(later)
    exact = drafter._context.num_missing(drafter._translation.ids(later)) / drafter._ratio
    # This text is written in fewer tokens than the sample.
    assert exact < reckoned < 1.3 * exact
    # What another answer left in the cache counts when it is the beginning of this one.
    translator = Translator(WORDS, LETTERS)
    again = Retokenized(drafter._context, translator, translator.translation())
    assert again.num_behind(start) == 1
    assert again.num_behind(later) > 1


def test_a_step_counts_for_all_steps_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, start, _ = writer("ab ab ab ab ab ab ")
    told: list[float] = []
    monkeypatch.setattr(Recording, "spent", lambda self, num, seconds: told.append(seconds))
    clock = iter(range(10**6))
    monkeypatch.setattr("specdec_cli.drafters.retokenize.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for _ in range(150):
        drafter.propose(start, Recording(4), 9)
        drafter._last = None
    # " ab" takes two tokens of the draft model's, and one more is written until it stands.
    assert told[-1] == pytest.approx(2, rel=0.3)


@pytest.mark.parametrize("num_bonus", [0, 1])
def test_what_was_not_proposed_is_used_in_the_next_round(num_bonus: int) -> None:
    text = " ab ab abb ab ab abb ab ab"
    drafter, tokens, context = writer(text, before="ab")
    whole = Tokenizer(WORDS).encode(text.encode())
    written: list[int] = []
    while len(written) < 6:
        # Everything is accepted, and a bonus token, if any, comes as foreseen.
        draft = drafter.propose([*tokens, *written], Fixed(2), 2)
        assert list(draft.tokens) == whole[len(written) : len(written) + 2]
        written = whole[: len(written) + 2 + num_bonus]
    # No token was decoded twice.
    assert context.fed == Tokenizer(LETTERS).encode(b"ab" + text.encode())[: len(context.fed)]


def test_another_text_forgets_what_was_drafted() -> None:
    drafter, start, context = writer("ab ab abb ab ")
    drafter.propose(start, Fixed(4), 4)
    context.text = b"ab cb ab "
    assert decoded(drafter.propose([*start, WORDS.pieces.index(b"c")], Fixed(3), 3)) == "b ab "


# --- which tokens stand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ends", "draft_ends", "expected"),
    [
        ("", [], [], 0),
        ("word", [4], [4], 1),
        ("word", [4], [2, 4], 0),
        ("two words", [3, 9], [3, 6, 9], 1),
        ("two words", [3, 9], [3, 9], 2),
        ("two words", [2, 3, 6, 9], [9], 2),
        ("item,", [4, 5], [4, 5], 1),
        ("line\n", [4, 5], [4, 5], 1),
        ("f(x1)", [1, 2, 3, 4, 5], [5], 4),
        ("f((", [1, 2, 3], [3], 1),
        ("abcdefgh", [1, 2, 3, 4, 5, 6, 7, 8], [8], 5),
        ("été là", [3, 5, 9], [9], 2),
        ("aé", [1, 2, 3], [1, 3], 0),
        ("हिन्दी में", [12, 18, 28], [28], 2),
        ("हिन्दी", [3, 18], [18], 0),
        ("a  b", [1, 2, 4], [4], 1),
        ("...\n", [3, 4], [4], 0),
        ("... a", [3, 5], [5], 1),
    ],
)
def test_what_stands(text: str, ends: list[int], draft_ends: list[int], expected: int) -> None:
    assert num_settled(text.encode(), ends, draft_ends) == expected


# --- whole answers -------------------------------------------------------------------------------------------------


def fake(model: Toy, seed: int, **kwargs: Any) -> FakeContext:
    return FakeContext.random(seed, num_vocab=model.num_vocab, **kwargs)


SMALL = Toy(["a", "b", "ab"])
OTHER = Toy(["ba", "b", "a", "c"], ("<stop>", "<turn>"))


def small(kind: str, params: SamplingParams, rng: Any, seed: int, constraint: Any = None) -> Drafter:
    translator = Translator(SMALL, OTHER)
    translation, context = translator.translation(), fake(OTHER, seed, sharpness=1)
    if kind == "string-level":
        return Retokenized(context, translator, translation, constraint=constraint)
    sampler = Sampler(params, SMALL.num_vocab, constraint)
    return Intersected(context, translation, translator.shared, sampler, SMALL.num_vocab, rng, SMALL.stop_tokens)


SETTINGS = {
    "plain": PLAIN,
    "top-k": replace(PLAIN, top_k=2),
    "penalties": replace(PLAIN, repeat_last_n=2, repeat_penalty=1.5, presence_penalty=0.7),
    "bias": replace(PLAIN, logit_bias=((0, -np.inf), (1, 0.7))),
    "greedy": GREEDY,
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["string-level", "token-level"])
@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_answers_have_exactly_the_targets_distribution(kind: str, name: str, constrained: bool) -> None:
    params, prompt, target = SETTINGS[name], [1, 0], fake(SMALL, 1)
    num_tokens = 3 if kind == "string-level" else 2

    def constraint() -> Alternating | None:
        return Alternating(SMALL.num_vocab, len(prompt)) if constrained else None

    def run(rng: Any) -> Any:
        sampler = Sampler(params, SMALL.num_vocab, constraint())
        drafter = small(kind, params, rng, 7, constraint())
        events = speculate(
            fake(SMALL, 1),
            drafter,
            Fixed(2),
            sampler,
            rng,
            prompt,
            max_tokens=num_tokens,
            stop_tokens=SMALL.stop_tokens,
        )
        return collect(events)

    def next_probs(tokens: list[int]) -> dict[int, float]:
        rule = constraint()
        allowed = None if rule is None else rule.allowed(tokens).tolist()
        return reference_probs(target.logits_after(tokens), params, tokens, allowed=allowed)

    expected = reference_answers(next_probs, prompt, num_tokens, SMALL.stop_tokens)
    assert distance(outcomes(run), expected) < 1e-12


def test_attached_distributions_have_shared_tokens_only() -> None:
    rng = np.random.default_rng(1)
    drafter = small("token-level", PLAIN, rng, 3)
    draft = drafter.propose([1, 0], Fixed(5), 5)
    shared = [SMALL.pieces.index(b"a"), SMALL.pieces.index(b"b"), SMALL.eos]
    assert len(draft) > 0
    for token, probs in zip(draft.tokens, draft.probs, strict=True):
        assert probs is not None
        assert token in shared
        assert set(np.flatnonzero(probs.probs)) == set(shared)


def test_a_draft_model_equal_to_the_target_is_always_accepted() -> None:
    """The same distribution under other ids: token by token nothing is left to reject."""
    mixed = Toy(["ab", "b", "a"], ("<stop>",))
    translator = Translator(SMALL, mixed)
    order = [2, 1, 0, 3]
    table = fake(SMALL, 6)._table
    context = FakeContext(table[np.ix_(order, order, order)])
    rng = np.random.default_rng(2)
    sampler = Sampler(PLAIN, SMALL.num_vocab)
    drafter = Intersected(context, Translation(translator.target, translator.draft), translator.shared, sampler, 4, rng)
    events = list(speculate(fake(SMALL, 6), drafter, Fixed(1), sampler, rng, [1, 0, 1], max_tokens=40))
    rounds = [event for event in events if isinstance(event, Round)]
    # Where a text reads as other tokens, the draft model sees another one.
    same = [event for event in rounds if event.outcomes and event.outcomes[0] > 1 - 1e-9]
    assert len(same) > len(rounds) / 3


def test_shared_tokens() -> None:
    shared = SharedTokens.of(Tokenizer(SMALL), Tokenizer(OTHER))
    pairs = dict(zip(shared.target.tolist(), shared.draft.tolist(), strict=True))
    assert pairs == {0: 2, 1: 1, SMALL.eos: OTHER.eos}
    assert list(shared.target) == sorted(shared.target)


def greedy(drafter: Drafter, target: FakeContext, policy: LengthPolicy, stop: Collection[int], num: int = 300) -> Any:
    rng = np.random.default_rng(0)
    sampler = Sampler(GREEDY, target.num_vocab)
    return list(speculate(target, drafter, policy, sampler, rng, [0, 2], max_tokens=num, stop_tokens=stop))


@settings(max_examples=40)
@given(st.integers(0, 2**20), st.sampled_from(["auto", "string-level", "token-level"]), st.booleans())
def test_greedy_answers_are_the_targets_own(seed: int, kind: str, ends: bool) -> None:
    stop = WORDS.stop_tokens if ends else frozenset()
    translator = Translator(WORDS, LETTERS)
    context = fake(LETTERS, seed + 1, sharpness=4, num_ctx=1024)
    model: Any = Retokenized(context, translator, translator.translation())
    if kind == "token-level":
        sampler = Sampler(GREEDY, WORDS.num_vocab)
        model = Intersected(
            context, translator.translation(), translator.shared, sampler, WORDS.num_vocab, np.random.default_rng(0)
        )
    drafter = AutoDrafter(NgramDrafter(stop), model) if kind == "auto" else model
    drafted = greedy(drafter, fake(WORDS, seed), RandomPolicy(seed), stop, 50)
    plain = greedy(NoDrafter(), fake(WORDS, seed), Fixed(0), stop, 50)
    assert collect(iter(drafted)) == collect(iter(plain))


def test_a_draft_that_knows_the_answer_is_accepted() -> None:
    """Hundreds of tokens in a few rounds: the translation keeps its place in both directions."""
    target = fake(WORDS, 4, sharpness=6, num_ctx=1024)
    target._table[..., WORDS.eos] = -99
    plain = [e.id for e in greedy(NoDrafter(), target, Fixed(0), ()) if isinstance(e, Token)]
    text = Tokenizer(WORDS).decode([0, 2, *plain]).decode()
    drafter, _, _ = writer(text, before="")
    events = greedy(drafter, target, Fixed(6), ())
    assert [e.id for e in events if isinstance(e, Token)] == plain
    rounds = [e for e in events if isinstance(e, Round)]
    drafted, accepted = (sum(getattr(e, name) for e in rounds) for name in ("num_drafted", "num_accepted"))
    print(f"{accepted} of {drafted} in {len(rounds)} rounds, {plain[:20]}")
    # A target that knows nothing does not write a text in the tokens that its tokenizer would take.
    assert accepted > 0.4 * drafted
    assert drafted > 100


# --- the translation -----------------------------------------------------------------------------------------------


def test_only_what_is_new_is_read() -> None:
    translation = Translator(WORDS, LETTERS).translation()
    tokens = Tokenizer(WORDS).encode(b"ab abb " * 200)
    translation.ids(tokens)
    LETTERS.texts.clear()
    for token in [3, 4, 2, 0, 5, 1, 1, 4] * 4:
        tokens.append(token)
        assert Tokenizer(LETTERS).decode(translation.ids(tokens)) == Tokenizer(WORDS).decode(tokens)
    assert len(LETTERS.texts) >= 32
    assert max(map(len, LETTERS.texts)) < 40


def test_a_long_word_is_read_anew_until_it_ends() -> None:
    """It is one token, which no part of it foretells."""
    target, draft = Tokenizer(Toy([*"abcdefgh "])), Tokenizer(Toy([*"abcdefgh ", "abcdefgh"]))
    translation, tokens = Translation(target, draft), target.encode(b"a abcdefgh a")
    for num in range(1, len(tokens)):
        translation.ids(tokens[:num])
    assert translation.ids(tokens) == draft.encode(b"a abcdefgh a")


@given(st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 8), max_size=8)), max_size=8))
def test_any_change_of_the_text_is_followed(changes: list[tuple[int, list[int]]]) -> None:
    prompt, own = [3, 8, 4], [6, 8, 2, 2]
    for given_prompt in (None, (prompt, own)):
        ask = mock.Mock(return_value=given_prompt)
        translation = Translation(Tokenizer(WORDS), Tokenizer(LETTERS), ask)
        assert not ask.called
        tokens = list(prompt)
        for size, new in changes:
            tokens = [*tokens[:size], *new]
            found = translation.ids(tokens)
            if given_prompt and tokens[:3] == prompt:
                assert found[:4] == own
                assert Tokenizer(LETTERS).decode(found[4:]) == Tokenizer(WORDS).decode(tokens[3:])
            else:
                assert Tokenizer(LETTERS).decode(found) == Tokenizer(WORDS).decode(tokens)


def test_the_draft_model_begins_a_text_in_its_own_way() -> None:
    draft = Toy(["a", "b", " ", "c"], ("<stop>", "<begin>"), bos=True)
    assert Translator(WORDS, draft).translation().ids([0]) == [draft.bos, 0]
