"""Sessions and the public API: on fakes for the manners, on tiny models for the real thing."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import CHATML, no_vocabulary, tiny

import specdec_cli
from specdec_cli import interrupt
from specdec_cli.constraint import Grammar
from specdec_cli.context import CachedContext
from specdec_cli.errors import (
    ContextFullError,
    IncompatibleModelsError,
    ModelLoadError,
    ModelMissingError,
    SpecdecError,
    UsageError,
)
from specdec_cli.limits import DrafterName
from specdec_cli.llama import Model
from specdec_cli.ngram_store import NgramStore, default_path, vocabulary_fingerprint
from specdec_cli.session import Result, Session, SessionOptions, Structure, load, with_seed
from specdec_cli.testing import FakeContext, FakeModel
from specdec_cli.tuned import Tuned
from specdec_cli.types import (
    PLAIN_DECODING,
    ContextOptions,
    Drafting,
    Finish,
    Prefill,
    Round,
    SamplingParams,
    Token,
)

GREEDY = SamplingParams(temperature=0)
BOLD = SessionOptions(Drafting("model", 5, 0.0))
"""Drafts of full length: a fake is rarely sure of itself."""


def endless(seed: int = 0, **kwargs: float) -> FakeModel:
    """A fake whose answers have no end."""
    model = FakeModel(seed, **kwargs)  # type: ignore[arg-type]
    model._table[..., model.eos] = -100.0
    return model


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(endless(), endless(sharpness=1.5), BOLD) as made:
        yield made


def drain(session: Session, prompt: str | list[int], **kwargs: object) -> str:
    return "".join(getattr(event, "text", "") for event in session.stream(prompt, **kwargs))  # type: ignore[arg-type]


# --- the public API ------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    assert set(specdec_cli.__all__) == {"Result", "SamplingParams", "Session", "SessionOptions", "load"}
    for name in specdec_cli.__all__:
        assert getattr(specdec_cli, name).__doc__
    assert specdec_cli.__version__
    with pytest.raises(AttributeError, match="nonsense"):
        _ = specdec_cli.nonsense


def test_load_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def opened(*arguments: object) -> Session:
        calls.append(arguments)
        return Session(endless())

    monkeypatch.setattr(Session, "open", opened)
    load(target="t.gguf", draft=Path("d.gguf"))
    load(target="t.gguf", options=SessionOptions(Drafting(num_draft_tokens=2)))
    assert calls == [
        (Path("t.gguf"), Path("d.gguf"), SessionOptions()),
        (Path("t.gguf"), None, SessionOptions(Drafting(num_draft_tokens=2))),
    ]


def test_load_unknown_pair() -> None:
    with pytest.raises(ModelMissingError, match="nowhere"):
        load("nowhere")


def test_load_offline_without_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelMissingError, match="downloads are off"):
        load(offline=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_ctx": 0},
        {"threads": 0},
        {"kv_type": "q9"},
    ],
)
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        SessionOptions(**wrong)  # type: ignore[arg-type]
    assert str(next(iter(wrong.values()))) in caught.value.message


def test_seed_is_drawn_once() -> None:
    assert with_seed(SamplingParams(seed=7)).seed == 7
    assert with_seed(SamplingParams(seed=0)).seed == 0
    assert len({with_seed(SamplingParams()).seed for _ in range(5)}) == 5


# --- on fakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3), SamplingParams(temperature=1.5, top_k=0, seed=4)])
def test_generate_is_stream_in_one_piece(session: Session, params: SamplingParams) -> None:
    result = session.generate("abc", sampling=params, max_tokens=30)
    events = list(session.stream("abc", sampling=params, max_tokens=30))
    assert isinstance(events[0], Prefill)
    assert events[-1] == Finish("length")
    assert result.tokens == tuple(event.id for event in events if isinstance(event, Token))
    assert result.text == "".join(event.text for event in events if isinstance(event, Token | Finish))
    assert result.stats.num_rounds == sum(isinstance(event, Round) for event in events)
    assert (len(result.tokens), result.reason) == (30, "length")
    assert result.stats.num_accepted > 0


def test_seed_of_the_result_repeats_it(session: Session) -> None:
    first = session.generate("abc", max_tokens=30)
    again = session.generate("abc", max_tokens=30, sampling=SamplingParams(seed=first.seed))
    assert (again.tokens, again.seed) == (first.tokens, first.seed)


def test_greedy_is_the_baseline(session: Session) -> None:
    for prompt in ("a", "gfedcba", "abc" * 30):
        drafted = session.generate(prompt, sampling=GREEDY, max_tokens=50)
        plain = session.generate(prompt, sampling=GREEDY, max_tokens=50, drafting=PLAIN_DECODING)
        assert drafted.tokens == plain.tokens
        assert plain.stats.num_drafted == 0 < drafted.stats.num_accepted


def test_without_statistics_nobody_looks_at_the_vocabulary(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    vars(session).pop("_fingerprint", None)
    assert session.ngrams is None
    assert "_fingerprint" not in vars(session)
    vocabulary = vocabulary_fingerprint(session.target)
    for name in ("0" * 16, vocabulary):
        # Of those for another tokenizer nothing is used.
        assert session.ngrams is None
        with NgramStore.open(default_path(name), name) as store:
            assert store.add([1, 2, 3] * 3)
    assert session.ngrams is not None
    session.use_ngrams(tmp_path / "none.sqlite")
    session.use_ngrams(None)


def test_prompt_forms_are_equal(session: Session) -> None:
    tokens = session.encode("abc")
    assert tokens == [0, 1, 2]
    texts = {
        drain(session, prompt, sampling=GREEDY, max_tokens=9)
        for prompt in ("abc", tokens, [{"role": "user", "content": "abc"}])
    }
    assert len(texts) == 1


def test_nothing_to_encode() -> None:
    session = Session(FakeModel(template=""))
    with pytest.raises(ModelLoadError, match="template makes an empty text"):
        session.encode("abc")
    with pytest.raises(UsageError, match="empty"):
        session.encode("", raw=True)


@pytest.mark.parametrize("options", [{"prompt": "a", "system": "s"}, {"prompt": [{"role": "user", "content": "a"}]}])
def test_raw_takes_a_bare_text(session: Session, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="--raw"):
        session.encode(**options, raw=True)  # type: ignore[arg-type]


def test_system_message_comes_first() -> None:
    session = Session(FakeModel(template="{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"))
    session.target.tokenize = lambda text, **_kwargs: [ord(letter) for letter in text]  # type: ignore[method-assign]
    assert bytes(session.encode("b", system="a")) == b"saub"


def test_contexts_are_reused_and_grow(session: Session) -> None:
    target: FakeModel = session.target  # type: ignore[assignment]
    assert session.num_ctx is None
    session.generate("abc", max_tokens=30)
    first = session.num_ctx
    session.generate("abc", max_tokens=10)
    session.generate("abcdef", max_tokens=27)
    assert (len(target.contexts), session.num_ctx) == (1, first)
    session.generate("abc", max_tokens=100)
    assert (len(target.contexts), session.num_ctx) == (2, 103)
    decoded = target.contexts[-1].num_decoded
    session.generate("abc", max_tokens=1)
    # The prompt is in the cache: its last token alone is decoded anew, with at most one draft token.
    assert target.contexts[-1].num_decoded - decoded <= 2


def test_context_size_that_was_asked_for() -> None:
    with Session(endless(), endless(1), SessionOptions(num_ctx=20)) as session:
        result = session.generate("abc", sampling=GREEDY, max_tokens=100)
        assert (session.num_ctx, result.reason) == (20, "context")
        assert len(result.tokens) == 18
        with pytest.raises(ContextFullError, match="20 tokens, which leaves no room in a context of 20"):
            session.generate("a" * 20)
        assert session.generate("abc", sampling=GREEDY, max_tokens=5).tokens == result.tokens[:5]


def test_model_limit_bounds_the_context(session: Session) -> None:
    session.target.max_ctx = 40  # type: ignore[misc]
    result = session.generate("abc", sampling=GREEDY, max_tokens=100)
    assert (session.num_ctx, result.reason) == (40, "context")
    with pytest.raises(ContextFullError):
        session.generate("a" * 41)


def test_draft_model_with_a_smaller_context() -> None:
    draft = endless(sharpness=1.5)
    draft.max_ctx = 16
    with Session(endless(), draft, BOLD) as session:
        drafted = session.generate("abc", sampling=GREEDY, max_tokens=60)
        plain = session.generate("abc", sampling=GREEDY, max_tokens=60, drafting=PLAIN_DECODING)
        assert drafted.tokens == plain.tokens
        assert len(drafted.tokens) == 60
        assert drafted.stats.num_accepted > 0
        # A prompt that fills the draft's context: no drafts, and the answer all the same.
        longer = session.generate("abcdefg" * 5, sampling=GREEDY, max_tokens=20)
        assert (len(longer.tokens), longer.stats.num_drafted) == (20, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("longer", ["target", "draft"])
def test_vocabularies_that_differ_in_padding(longer: str, temperature: float) -> None:
    models = {"target": endless(), "draft": endless(sharpness=1.5)}
    pad(models[longer], 3)
    with Session(models["target"], models["draft"], BOLD) as session:
        params = SamplingParams(temperature, top_k=0, top_p=1, min_p=0, seed=1)
        result = session.generate("abc", sampling=params, max_tokens=60)
        assert len(result.tokens) == 60
        assert max(result.tokens) < 8
        assert result.stats.num_accepted > 0


def pad(model: FakeModel, num: int) -> None:
    """Add tokens at the end of a fake's vocabulary that are never likely."""
    table = model._table
    model._table = np.pad(table, (0, num), constant_values=-1e9)
    model.num_vocab += num


def test_near_tie(session: Session) -> None:
    prompt = session.encode("abc")
    answer = list(session.generate(prompt, sampling=GREEDY, max_tokens=10).tokens)
    assert session.near_tie(prompt, answer, answer) is None
    context: FakeContext = session.target.open_context(ContextOptions(64))  # type: ignore[assignment]
    row = np.sort(context.logits_after([*prompt, *answer[:4]]))
    other = [*answer[:4], (answer[4] + 1) % 7, *answer[5:]]
    tie = session.near_tie(prompt, other, answer)
    assert tie is not None
    assert (tie.position, tie.texts[0]) == (4, "abcdefg"[answer[4]])
    assert tie.logits == (row[-1], row[-2])
    assert tie.gap == pytest.approx(row[-1] - row[-2])


def test_near_tie_where_one_answer_ends(session: Session) -> None:
    tie = session.near_tie([0, 1], [2, 3], [2, 3, 4])
    assert tie is not None
    assert tie.position == 2


def test_clear_forgets_the_prompt(session: Session) -> None:
    session.clear()
    prompt = "abcdefg" * 4
    first = session.generate(prompt, sampling=GREEDY, max_tokens=4)
    context = session.target.contexts[0]  # type: ignore[attr-defined]
    session.clear()
    assert list(context.tokens) == []
    before = context.num_decoded
    assert session.generate(prompt, sampling=GREEDY, max_tokens=4).tokens == first.tokens
    assert context.num_decoded - before >= 28


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [0, 3])
def test_next_answer_is_right_after_a_failure(session: Session, error: type[BaseException], at: int) -> None:
    session.generate("abc", sampling=GREEDY, max_tokens=40)
    expected = session.generate("gfe" * 20, sampling=GREEDY, max_tokens=40).tokens
    for model in (session.target, session.draft_model):
        context = model.contexts[-1]  # type: ignore[union-attr]
        events = session.stream("cba" * 20, sampling=GREEDY, max_tokens=30)
        for _ in range(at):
            next(events)
        context.fail_next = error()
        with pytest.raises(error):
            list(events)
        assert session.generate("gfe" * 20, sampling=GREEDY, max_tokens=40).tokens == expected


def test_abandoned_stream_does_no_harm(session: Session) -> None:
    expected = session.generate("abc", sampling=GREEDY, max_tokens=40).tokens
    for count in (1, 2, 5, 9):
        events = session.stream("abcg", sampling=GREEDY, max_tokens=40)
        for _ in range(count):
            next(events)
        events.close()  # type: ignore[attr-defined]
        assert session.generate("abc", sampling=GREEDY, max_tokens=40).tokens == expected


def test_both_models_are_closed() -> None:
    target, draft = endless(), endless(1)
    with Session(target, draft) as session:
        session.generate("abc", max_tokens=3)
        assert not target.is_closed
    assert target.is_closed
    assert draft.is_closed
    assert session.num_ctx is None
    session.close()


def test_closed_on_an_error() -> None:
    target, draft = endless(), endless(1)
    with pytest.raises(ZeroDivisionError), Session(target, draft):
        raise ZeroDivisionError
    assert target.is_closed
    assert draft.is_closed


def test_target_context_is_closed_when_the_drafts_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[FakeContext] = []
    monkeypatch.setattr(FakeContext, "close", lambda context: closed.append(context))
    target, draft = endless(), endless(1)

    def fail(_options: ContextOptions) -> FakeContext:
        raise SpecdecError("no memory")

    draft.open_context = fail  # type: ignore[method-assign]
    with Session(target, draft) as session:
        for _ in range(2):
            with pytest.raises(SpecdecError, match="no memory"):
                session.generate("abc")
        assert session.num_ctx is None
    assert closed == target.contexts
    assert len(closed) == 2


# --- where an answer ends --------------------------------------------------------------------------------------------


class TestStop:
    @given(st.integers(0, 5), st.data())
    def test_text_is_the_answer_before_the_first_stop_string(self, seed: int, data: st.DataObject) -> None:
        with Session(endless(), endless(sharpness=1.5), BOLD) as session:
            params = SamplingParams(seed=seed, top_k=0, top_p=1, min_p=0) if seed else GREEDY
            whole = session.generate("abc", sampling=params, max_tokens=60)
            begin, size = data.draw(st.integers(0, 55)), data.draw(st.integers(1, 5))
            stops = (whole.text[begin : begin + size], data.draw(st.sampled_from(["gfgfgf", "h", "abcabca"])))
            end = min((place + len(stop), place) for stop in stops for place in [whole.text.find(stop)] if place >= 0)[
                1
            ]
            result = session.generate("abc", sampling=params, max_tokens=60, structure=Structure(stop=stops))
            assert (result.text, result.reason) == (whole.text[:end], "stop")
            assert whole.tokens[: len(result.tokens)] == result.tokens
            plain = session.generate(
                "abc", sampling=params, max_tokens=60, structure=Structure(stop=stops), drafting=PLAIN_DECODING
            )
            if params is GREEDY:
                assert (plain.text, plain.tokens) == (result.text, result.tokens)

    def test_found_at_every_place_of_a_round(self, session: Session) -> None:
        """Inside an accepted draft, at its end, straddling two rounds; the events and the counts add up."""
        params = SamplingParams(temperature=3, seed=5, top_k=0, top_p=1, min_p=0)
        events = list(session.stream("abc", sampling=params, max_tokens=60))
        text = "".join(getattr(event, "text", "") for event in events)
        round_of = [index for index, tokens in enumerate(rounds_of(events)) for _ in tokens]
        seen = set[str]()
        for begin in range(55):
            stop = text[begin : begin + 3]
            first = text.find(stop)
            structure = Structure(stop=(stop,))
            answer = list(session.stream("abc", sampling=params, max_tokens=60, structure=structure))
            assert "".join(getattr(event, "text", "") for event in answer) == text[:first]
            assert answer[-1] == Finish("stop")
            # What gave the stop string is part of the answer's tokens; its round is reported all the same.
            tokens = [event for event in answer if isinstance(event, Token)]
            assert len(tokens) == first + 3
            assert isinstance(answer[-2], Round)
            straddles = round_of[first] < round_of[first + 2]
            seen.add("straddles" if straddles else "inside" if tokens[-1].source == "draft" else "end")
            result = session.generate("abc", sampling=params, max_tokens=60, structure=structure)
            assert result.stats.num_tokens == len(result.tokens) == len(tokens)
            assert result.stats.num_rounds == round_of[first + 2] + 1
        assert seen == {"straddles", "inside", "end"}

    def test_nothing_held_back_is_lost(self, session: Session) -> None:
        whole = session.generate("abc", sampling=GREEDY, max_tokens=20).text
        stop = whole[-3:] + "gg#"
        result = session.generate("abc", sampling=GREEDY, max_tokens=20, structure=Structure(stop=(stop,)))
        assert (result.text, result.reason) == (whole, "length")

    def test_half_characters(self) -> None:
        model = endless()
        model._table[:, 0, 1] += 3
        halves = {0: "漢".encode()[:2], 1: "漢".encode()[2:], 2: b"<"}
        model.piece = lambda token, special=False: halves.get(token, b"x")  # type: ignore[method-assign]
        with Session(model, options=BOLD) as session:
            whole = session.generate("abc", sampling=SamplingParams(seed=1), max_tokens=80).text
            assert "漢" in whole
            assert "\ufffd" in whole
            for stop in ("漢", "\ufffdx", "x漢"):
                result = session.generate(
                    "abc", sampling=SamplingParams(seed=1), max_tokens=80, structure=Structure(stop=(stop,))
                )
                place = whole.find(stop)
                assert result.text == (whole[:place] if place >= 0 else whole)

    def test_next_answer_is_right_after_a_stop(self, session: Session) -> None:
        whole = session.generate("abc", sampling=GREEDY, max_tokens=40)
        session.generate("abc", sampling=GREEDY, max_tokens=40, structure=Structure(stop=(whole.text[7:9],)))
        assert session.generate("abc", sampling=GREEDY, max_tokens=40).tokens == whole.tokens

    def test_empty_stop_string(self) -> None:
        with pytest.raises(UsageError, match="--stop must not be empty"):
            Structure(stop=("a", ""))

    def test_stop_string_in_a_schema_ends_the_answer(self, session: Session) -> None:
        letters = FakeModel(2, '{}[]":,abc123 ')
        structure = Structure(stop=('"',), grammar=Grammar.json_object())
        with Session(letters) as made:
            result = made.generate([1], sampling=GREEDY, max_tokens=30, structure=structure)
        assert (result.reason, '"' in result.text, result.stats.num_closing) == ("stop", False, 0)


def rounds_of(events: list[object]) -> list[list[Token]]:
    rounds: list[list[Token]] = [[]]
    for event in events:
        if isinstance(event, Token):
            rounds[-1].append(event)
        elif isinstance(event, Round):
            rounds.append([])
    return rounds[:-1]


class TestIgnoreEos:
    def test_only_a_limit_ends_the_answer(self) -> None:
        target, draft = FakeModel(0), FakeModel(0, sharpness=1.5)
        for model in (target, draft):
            model._table[..., model.eos] += 6
        with Session(target, draft, BOLD) as session:
            assert session.generate("abc", sampling=GREEDY, max_tokens=50).reason == "eog"
            for drafting in (None, PLAIN_DECODING):
                result = session.generate(
                    "abc", sampling=GREEDY, max_tokens=50, structure=Structure(ignore_eos=True), drafting=drafting
                )
                assert (result.reason, len(result.tokens), target.eos in result.tokens) == ("length", 50, False)
            assert session.near_tie([0], result.tokens, result.tokens, structure=Structure(ignore_eos=True)) is None

    def test_grammar_excludes_it(self) -> None:
        with pytest.raises(UsageError, match="--ignore-eos and --json-object exclude each other"):
            Structure(ignore_eos=True, grammar=Grammar.json_object())


# --- on tiny models through llama.cpp --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny(folder, "target", quant="q8_0", chat_template=CHATML)
    tiny(folder, "draft", quant="q4_0", chat_template=CHATML, context_length=128)
    tiny(folder, "padded", quant="q4_0", num_vocab=384, chat_template=CHATML)
    tiny(folder, "none", vocabulary=no_vocabulary())
    (folder / "text.gguf").write_text("hello")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared-home")


@pytest.fixture
def _checked_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(home))


@pytest.mark.usefixtures("_checked_once")
class TestTiny:
    options = SessionOptions(Drafting("model", 4, 0.0), threads=1)

    def open(self, folder: Path, draft: str | None = "draft") -> Session:
        path = None if draft is None else folder / f"{draft}.gguf"
        return specdec_cli.load(target=folder / "target.gguf", draft=path, options=self.options)

    @pytest.mark.parametrize("draft", ["draft", "padded"])
    def test_greedy_answer_is_the_baselines(self, folder: Path, draft: str) -> None:
        with self.open(folder, draft) as session:
            prompt = session.encode("Name the planets", system="Be brief")
            drafted = session.generate(prompt, sampling=GREEDY, max_tokens=80)
            session.clear()
            plain = session.generate(prompt, sampling=GREEDY, max_tokens=80, drafting=PLAIN_DECODING)
            tie = session.near_tie(prompt, drafted.tokens, plain.tokens)
            assert tie is None or tie.gap < 0.05
            assert drafted.stats.num_accepted > 0
            assert isinstance(drafted, Result)

    @pytest.mark.parametrize("drafter", ["auto", "ngram", "model", "tree"])
    def test_every_drafter_gives_the_baselines_answer(self, folder: Path, drafter: DrafterName) -> None:
        with self.open(folder) as session:
            prompt = session.encode("one two three one two three one two")
            plain = session.generate(prompt, sampling=GREEDY, max_tokens=60, drafting=PLAIN_DECODING)
            session.clear()
            drafted = session.generate(prompt, sampling=GREEDY, max_tokens=60, drafting=Drafting(drafter))
            tie = session.near_tie(prompt, drafted.tokens, plain.tokens)
            assert tie is None or tie.gap < 0.05
            assert set(drafted.stats.drafted_by_drafter) <= {"model", "ngram"}

    @pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3), SamplingParams(seed=3, mirostat=2)])
    def test_trees_of_real_models(self, folder: Path, params: SamplingParams) -> None:
        """Greedy answers are the baseline's, a seed repeats an answer, and one branch is a chain."""
        tree = Drafting("tree", 12, 0.0)
        options = SessionOptions(tree, threads=1)
        with specdec_cli.load(target=folder / "target.gguf", draft=folder / "draft.gguf", options=options) as session:
            prompt = session.encode("one two three one two three one two")
            answers = []
            for drafting in (tree, tree, Drafting("tree", 12, 0.0, max_branches=1), Drafting("model", 12, 0.0)):
                session.clear()
                answers.append(session.generate(prompt, sampling=params, max_tokens=60, drafting=drafting))
            assert session.num_branches == 8
            assert answers[0].tokens == answers[1].tokens
            assert answers[2].tokens == answers[3].tokens
            assert (answers[0].stats.num_trees > 0) == (params.mirostat == 0)
            assert answers[2].stats.num_trees == answers[3].stats.num_trees == 0
            if params.is_greedy:
                session.clear()
                plain = session.generate(prompt, sampling=params, max_tokens=60, drafting=PLAIN_DECODING)
                tie = session.near_tie(prompt, answers[0].tokens, plain.tokens)
                assert tie is None or tie.is_explained

    def test_chains_need_no_room_for_branches(self, folder: Path) -> None:
        with self.open(folder) as session:
            session.prepare(1, 1)
            assert session.num_branches == 1

    def test_the_tuned_file_and_its_settings_are_used(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tuned = Tuned(folder / "padded.gguf", "Q4_0 pure", threads=1, kv_type="q8_0", flash_attention=True)
        monkeypatch.setattr("specdec_cli.session.find_tuned", lambda *_: tuned)
        opened: list[tuple[str, ContextOptions]] = []
        open_context = Model.open_context
        monkeypatch.setattr(Model, "open_context", lambda m, o: opened.append((m.path.stem, o)) or open_context(m, o))
        with self.open(folder) as session:
            assert session.draft_model is not None
            assert (session.draft_model.path, session.tuned) == (tuned.path, tuned)
            session.generate("Name the planets", sampling=GREEDY, max_tokens=20)
        by_name = dict(opened)
        assert (by_name["padded"].kv_type, by_name["padded"].flash_attention) == ("q8_0", True)
        assert (by_name["target"].kv_type, by_name["target"].flash_attention) == ("f16", None)
        options = dataclasses.replace(self.options, use_tuned=False)
        with specdec_cli.load(target=folder / "target.gguf", draft=folder / "draft.gguf", options=options) as session:
            assert session.draft_model is not None
            assert session.draft_model.path == folder / "draft.gguf"

    @pytest.mark.parametrize("broken", ["target", "draft"])
    def test_the_model_that_cannot_be_loaded_is_named(self, folder: Path, broken: str, tmp_path: Path) -> None:
        paths = {name: folder / f"{name}.gguf" for name in ("target", "draft")}
        data = paths[broken].read_bytes()
        paths[broken] = tmp_path / f"cut-{broken}.gguf"
        paths[broken].write_bytes(data[: len(data) // 2])
        with pytest.raises(ModelLoadError, match=f"cut-{broken}"):
            specdec_cli.load(target=paths["target"], draft=paths["draft"], options=self.options)

    def test_seed_repeats_an_answer(self, folder: Path) -> None:
        with self.open(folder) as session:
            params = SamplingParams(seed=11)
            texts = []
            for _ in range(2):
                session.clear()
                texts.append(session.generate("hello", sampling=params, max_tokens=40).text)
            assert texts[0] == texts[1] == drain(session, "hello", sampling=params, max_tokens=40)

    def test_draft_with_a_shorter_context(self, folder: Path) -> None:
        with self.open(folder) as session:
            result = session.generate("word " * 20, sampling=GREEDY, max_tokens=200)
            assert len(result.tokens) == 200

    def test_draft_model_decodes_no_token_twice(self, folder: Path) -> None:
        with self.open(folder) as session:
            prompt = session.encode("hello")
            result = session.generate(prompt, sampling=GREEDY, max_tokens=60)
            assert session._contexts is not None
            draft = session._contexts[1]
            assert isinstance(draft, CachedContext)
            # Each drafted token needs the pass that gave it; after a whole draft was accepted its last token and the
            # bonus token are decoded together.
            committed = len(prompt) + len(result.tokens)
            assert draft.num_decoded <= committed + result.stats.num_drafted - result.stats.num_accepted

    def test_ctrl_c_ends_one_answer_only(self, folder: Path) -> None:
        with self.open(folder) as session:
            expected = session.generate("hello", sampling=GREEDY, max_tokens=20).tokens
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                session.generate("word " * 10, sampling=SamplingParams(seed=1), max_tokens=1 << 20)
            timer.join()
            # No `stop_on_sigint` around this one: what the last answer left behind must not end it.
            try:
                events = list(session.stream("hello", sampling=GREEDY, max_tokens=20))
            except KeyboardInterrupt:  # would end the whole test run
                interrupt.clear_stop()
                pytest.fail("an old Ctrl-C ended a new answer")
            assert tuple(event.id for event in events if isinstance(event, Token)) == expected

    def test_without_draft_model(self, folder: Path) -> None:
        with self.open(folder, None) as session:
            assert session.draft_model is None
            result = session.generate("hello", sampling=GREEDY, max_tokens=10)
            assert (result.stats.num_drafted, len(result.tokens)) == (0, 10)

    def test_no_draft_tokens_loads_no_draft_model(self, folder: Path) -> None:
        options = SessionOptions(PLAIN_DECODING)
        with Session.open(folder / "target.gguf", folder / "missing.gguf", options) as session:
            assert session.draft_model is None

    def test_what_cannot_be_opened(self, folder: Path) -> None:
        with pytest.raises(IncompatibleModelsError, match="no tokenizer"):
            self.open(folder, "none")
        with pytest.raises(ModelMissingError, match=r"nowhere\.gguf"):
            self.open(folder, "nowhere")
        with pytest.raises(ModelLoadError, match="not a GGUF file"):
            self.open(folder, "text")

    def test_second_session_after_the_first(self, folder: Path) -> None:
        texts = []
        for _ in range(2):
            with self.open(folder) as session:
                texts.append(session.generate("hello", sampling=GREEDY, max_tokens=10).text)
        assert texts[0] == texts[1]
