"""A conversation without a terminal: what it sends, what it decodes, what it keeps, what its file holds."""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import CHATML, sentencepiece_vocabulary, tiny

from specdec_cli.chat import Chat, ChatSettings, Turn
from specdec_cli.constraint import Grammar
from specdec_cli.errors import ContextFullError, ModelLoadError, SpecdecError, UsageError
from specdec_cli.session import Session, SessionOptions, Structure
from specdec_cli.testing import FakeContext, FakeModel
from specdec_cli.text import THINK_CLOSE, TextDecoder, without_thinking
from specdec_cli.tiny import Vocabulary, byte_level_vocabulary
from specdec_cli.transcript import Transcript, keep_last, last_path, read_transcript, write_transcript
from specdec_cli.types import PLAIN_DECODING, Drafting, Event, Finish, Prefill, Round, SamplingParams, Token

GREEDY = SamplingParams(temperature=0)
LETTERS = string.ascii_lowercase + string.digits + ": \n<>/"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
THINKING = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content.split('</think>')[-1].lstrip() }}\n{% endfor %}"
    "{{ 'a:<think>\\n' }}"
)


def fake_chat(
    num_ctx: int = 512,
    *,
    template: str = TEMPLATE,
    drafting: Drafting = PLAIN_DECODING,
    max_tokens: int = 12,
    **kwargs: Any,
) -> Chat:
    models = [FakeModel(seed, LETTERS, template=template) for seed in (0, 1)]
    session = Session(*models, SessionOptions(drafting, num_ctx=num_ctx))
    on_full = kwargs.pop("on_full", "drop")
    return Chat(session, ChatSettings(GREEDY, max_tokens=max_tokens, on_full=on_full), **kwargs)


def answer(events: Iterator[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token | Finish))


def token_ids(events: Iterator[Event]) -> list[int]:
    return [event.id for event in events if isinstance(event, Token)]


def contexts(chat: Chat) -> tuple[FakeContext, FakeContext]:
    models = (chat.session.target, chat.session.draft_model)
    assert all(isinstance(model, FakeModel) for model in models)
    return models[0].contexts[-1], models[1].contexts[-1]  # type: ignore[union-attr]


def fresh(chat: Chat) -> Chat:
    """A new process with the messages that this one would send."""
    models = [FakeModel(seed, LETTERS, template=chat.session.target.chat_template) for seed in (0, 1)]
    session = Session(*models, chat.session.options)
    return Chat(session, chat.settings, chat.system, chat.turns[chat.num_dropped :])


def test_a_draft_model_of_another_family_reads_the_conversation_in_its_own_form(tmp_path: Path) -> None:
    own = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"
    target = tiny(tmp_path, "target", chat_template=CHATML)
    draft = tiny(tmp_path, "draft", chat_template=own, vocabulary=sentencepiece_vocabulary())
    with Session.open(target, draft, SessionOptions(Drafting("model", 2, 0.0), num_ctx=512)) as session:
        chat = Chat(session, ChatSettings(GREEDY, max_tokens=6), "be brief")
        for text in ("hello", "and again"):
            answer(chat.send(text))
            assert session.draft_model is not None
            assert session._contexts is not None
            context = session._contexts[1]
            assert context is not None
            read = b"".join(map(session.draft_model.piece, context.tokens)).decode("utf-8", "replace")
            assert read.startswith("[system] be brief [user] hello [assistant]")
            assert "<|im_start|>" not in read
        assert f" [user] {text} [assistant]" in read
        first = Chat(session, ChatSettings(GREEDY, max_tokens=6, drafting=PLAIN_DECODING), "be brief")
        for turn in chat.turns:
            answer(first.send(turn.user))
        assert [turn.answer for turn in first.turns] == [turn.answer for turn in chat.turns]


class TestPrefix:
    @pytest.mark.parametrize("drafting", [PLAIN_DECODING, Drafting("model", 3, 0.0), Drafting("ngram", 4, 0.0)])
    def test_each_token_is_decoded_once(self, drafting: Drafting) -> None:
        chat = fake_chat(2048, drafting=drafting, system="be brief")
        for place in range(20):
            answer(chat.send(f"message {place} of many"))
            target, draft = contexts(chat)
            stats = chat.stats
            # Beside the conversation only what was drafted in vain.
            assert stats.num_target_decoded == len(target.tokens) + stats.num_drafted - stats.num_accepted
            if drafting.uses_model:
                assert stats.num_draft_decoded <= len(target.tokens) + stats.num_drafted - stats.num_accepted + 2
            else:
                assert draft.num_decoded == 0
        assert len(target.tokens) >= 20 * 12
        assert len(chat.answers) == 20
        assert chat.stats.num_prompt_tokens > 5 * chat.stats.num_target_decoded - chat.stats.num_drafted * 5

    def test_a_turn_costs_what_is_new_in_it(self) -> None:
        chat = fake_chat()
        answer(chat.send("first"))
        for _ in range(5):
            answer(chat.send("next"))
            # "\nu:next\na:", the twelve tokens of the answer, and the last one of the answer before, but not of this.
            assert chat.answers[-1].num_target_decoded == len("\nu:next\na:") + 12

    def test_undo_rolls_back(self) -> None:
        chat = fake_chat()
        answer(chat.send("first"))
        answer(chat.send("a long second message"))
        assert chat.undo() == "a long second message"
        assert [turn.user for turn in chat.turns] == ["first"]
        text = answer(chat.send("third"))
        # The end of the answer before was decoded already.
        assert chat.answers[-1].num_target_decoded == len("third\na:") + 11
        other = fresh(before_last_turn(chat))
        assert answer(other.send("third")) == text

    def test_retry_reads_one_token(self) -> None:
        chat = fake_chat()
        first = answer(chat.send("first"))
        assert answer(chat.retry()) == first
        assert len(chat.turns) == 1
        assert chat.answers[-1].num_target_decoded == 12

    def test_edit_replaces_the_last_message(self) -> None:
        chat = fake_chat()
        answer(chat.send("first"))
        answer(chat.send("what is a house"))
        text = answer(chat.edit("what is a mouse"))
        assert [turn.user for turn in chat.turns] == ["first", "what is a mouse"]
        assert chat.answers[-1].num_target_decoded == len("mouse\na:") + 11
        chat.undo()
        assert answer(fresh(chat).send("what is a mouse")) == text

    def test_another_system_message_is_read_with_what_follows_it(self) -> None:
        chat = fake_chat(system="be brief")
        answer(chat.send("first"))
        chat.system = "be bold"
        text = answer(chat.send("second"))
        assert chat.answers[-1].num_target_decoded == chat.answers[-1].num_prompt_tokens - len("s:be b") + 11
        chat.undo()
        assert answer(fresh(chat).send("second")) == text
        chat.system = None
        answer(chat.send("third"))
        assert chat.answers[-1].num_target_decoded == chat.answers[-1].num_prompt_tokens + 11

    def test_other_models_read_everything(self) -> None:
        chat = fake_chat()
        answer(chat.send("first"))
        chat.use(fake_chat().session)
        answer(chat.send("second"))
        assert chat.answers[-1].num_target_decoded == chat.answers[-1].num_prompt_tokens + 11

    def test_one_context_for_all(self) -> None:
        model = FakeModel(0, LETTERS, template=TEMPLATE)
        chat = Chat(Session(model), ChatSettings(GREEDY, max_tokens=20))
        for _ in range(3):
            answer(chat.send("hello"))
        assert len(model.contexts) == 1
        assert chat.num_ctx == model.max_ctx

    def test_measuring_is_not_counted(self) -> None:
        chat = fake_chat(drafting=PLAIN_DECODING)
        chat.settings = dataclasses.replace(chat.settings, drafting=Drafting())
        answer(chat.send("hello"))
        stats = chat.answers[0]
        assert stats.num_target_decoded == len("u:hello\na:") + 11 + stats.num_drafted - stats.num_accepted
        assert stats.saved_s is not None


def before_last_turn(chat: Chat) -> Chat:
    """The same conversation before its last turn."""
    chat.turns = chat.turns[:-1]
    return chat


def test_a_reading_that_was_stopped_is_no_answer_but_decoding() -> None:
    chat = fake_chat()
    answer(chat.send("hello"))
    before = chat.stats.num_target_decoded
    events = chat.send("and more")
    contexts(chat)[0].fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        answer(events)
    assert (chat.num_answers, len(chat.answers)) == (1, 2)
    assert chat.stats.num_target_decoded > before


def test_used_context() -> None:
    chat = fake_chat(system="be brief")
    assert chat.num_used == 0
    text = answer(chat.send("hello"))
    # What stands in front of the next answer is part of this template however it is asked.
    assert chat.num_used == len(f"s:be brief\nu:hello\na:{text}\na:")
    chat.undo()
    assert chat.num_used == 0
    full = fake_chat(48, max_tokens=100)
    answer(full.send("hello"))
    assert full.num_used == 48


class TestDropped:
    def test_what_a_turn_pushed_out_comes_back_with_undo(self) -> None:
        chat = fake_chat(128)
        dropped = [0]
        for place in range(12):
            answer(chat.send(f"message {place}"))
            dropped.append(chat.num_dropped)
        assert dropped[-1] > dropped[6] > 0
        for num in reversed(dropped[:-1]):
            chat.undo()
            assert chat.num_dropped == num

    @pytest.mark.parametrize("way", ["edit", "retry"])
    def test_a_message_in_place_of_the_last_is_fitted_as_that_was(self, way: str) -> None:
        chat = fake_chat(128)
        while not chat.num_dropped:
            before = chat.sent
            answer(chat.send("a message"))
        num_dropped = chat.num_dropped
        answer(chat.retry() if way == "retry" else chat.edit("a massage"))
        assert chat.num_dropped == num_dropped
        answer(chat.edit("short"))
        chat.undo()
        assert chat.sent == before

    def test_no_answer_no_dropping(self) -> None:
        chat = fake_chat(128)
        for place in range(3):
            answer(chat.send(f"message {place}"))
        while True:
            before = chat.num_dropped
            events = chat.send("one more")
            if chat.num_dropped > before:
                break
            answer(events)
        contexts(chat)[0].fail_next = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            answer(events)
        assert chat.unanswered == "one more"
        assert chat.num_dropped == before

    def test_a_conversation_of_another_context_is_fitted_anew(self) -> None:
        turns = [Turn("hello", "there")] * 4
        chat = fake_chat(512, turns=turns, num_dropped=3)
        answer(chat.send("now"))
        assert chat.num_dropped == 0
        small = fake_chat(80, turns=turns, num_dropped=3)
        answer(small.send("now"))
        assert small.num_dropped == 3
        chat.replace(turns, None, 2)
        answer(chat.send("now"))
        assert chat.num_dropped == 0
        chat.clear()
        assert chat.num_dropped == 0


class TestStopped:
    def test_a_partial_answer_is_kept(self) -> None:
        chat = fake_chat(drafting=Drafting("model", 2, 0.0), max_tokens=40)
        events = chat.send("hello")
        shown = []
        for event in events:
            shown.append(event.text if isinstance(event, Token) else "")
            if len("".join(shown)) >= 5:
                break
        events.close()  # type: ignore[attr-defined]
        [turn] = chat.turns
        assert (turn.answer, turn.reason) == ("".join(shown), "interrupted")
        text = answer(chat.send("more"))
        chat.undo()
        assert answer(fresh(chat).send("more")) == text

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SpecdecError("no")])
    @pytest.mark.parametrize("model", ["target", "draft"])
    def test_an_answer_cut_by_a_failing_call_is_kept(self, error: BaseException, model: str) -> None:
        chat = fake_chat(drafting=Drafting("model", 3, 0.0), max_tokens=40)
        answer(chat.send("hello"))
        shown = ""

        def fail_in_the_fourth_round() -> None:
            nonlocal shown
            for event in chat.send("more"):
                shown += event.text if isinstance(event, Token) else ""
                if isinstance(event, Round) and event.index == 2:
                    contexts(chat)[model == "draft"].fail_next = error

        with pytest.raises(type(error)):
            fail_in_the_fourth_round()
        assert (chat.turns[-1].answer, chat.turns[-1].reason) == (shown, "interrupted")
        assert shown
        text = answer(chat.send("and now"))
        chat.undo()
        assert answer(fresh(chat).send("and now")) == text

    def test_a_message_without_an_answer_is_no_turn(self) -> None:
        chat = fake_chat()
        answer(chat.send("hello"))
        contexts(chat)[0].fail_next = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            answer(chat.send("more"))
        assert [turn.user for turn in chat.turns] == ["hello"]
        assert (chat.unanswered, chat.last_message) == ("more", "more")
        text = answer(chat.retry())
        assert [turn.user for turn in chat.turns] == ["hello", "more"]
        assert chat.unanswered is None
        chat.undo()
        assert answer(fresh(chat).send("more")) == text

    def test_undo_forgets_it_first(self) -> None:
        chat = fake_chat()
        answer(chat.send("hello"))
        contexts(chat)[0].fail_next = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            answer(chat.send("more"))
        assert chat.undo() == "more"
        assert chat.undo() == "hello"
        with pytest.raises(UsageError, match="nothing to undo"):
            chat.undo()

    def test_a_retry_that_gives_nothing_keeps_the_answer(self) -> None:
        chat = fake_chat()
        first = answer(chat.send("hello"))
        contexts(chat)[0].fail_next = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            answer(chat.retry())
        assert [turn.answer for turn in chat.turns] == [first]
        assert chat.unanswered is None

    def test_events_that_nobody_reads_change_nothing(self) -> None:
        chat = fake_chat()
        events = chat.send("hello")
        del events
        assert chat.turns == []
        assert answer(chat.send("hello"))


class TestThinking:
    def test_template_decides_what_is_sent_again(self) -> None:
        chat = fake_chat(template=THINKING)
        chat.turns = [Turn("hello", "<think>\nwell\n</think>\n\nhi")]
        assert chat.turns[0].answer in [message["content"] for message in chat.sent]
        answer(chat.send("again"))
        prompt = bytes(b"".join(chat.session.target.piece(token) for token in contexts(chat)[0].tokens)).decode()
        assert prompt.startswith("u:hello\na:hi\nu:again\na:<think>\n")

    def test_opening_tag_of_the_prompt_belongs_to_the_answer(self) -> None:
        chat = fake_chat(template=THINKING)
        text = answer(chat.send("hello"))
        assert chat.opens_thinking
        # The thought did not end within its twelve tokens: it is closed, so that the template leaves it out.
        assert chat.turns[0].answer == f"<think>\n{text}\n{THINK_CLOSE}\n\n"
        assert without_thinking(chat.turns[0].answer) == ""
        assert not fake_chat().opens_thinking

    def test_only_what_is_left_out_is_read_again(self) -> None:
        chat = fake_chat(template=THINKING)
        answer(chat.send("hello"))
        answer(chat.send("again"))
        kept = len("u:hello\na:")
        assert chat.answers[-1].num_target_decoded == chat.answers[-1].num_prompt_tokens - kept + 11


class TestFullContext:
    def test_thirty_turns(self) -> None:
        chat = fake_chat(96, max_tokens=12, system="be brief")
        for place in range(30):
            text = answer(chat.send(f"message {place}"))
            assert chat.turns[-1].reason in ("length", "eog")
            if place % 5 == 4:
                chat_before = before_last_turn(chat)
                assert answer(fresh(chat_before).send(f"message {place}")) == text
                chat.turns.append(Turn(f"message {place}", text, "length"))
        assert chat.num_dropped > 20
        assert chat.sent[0] == {"role": "system", "content": "be brief"}
        # Not in every turn: what remains has to be read anew.
        num_read_anew = sum(stats.num_target_decoded > 12 + 20 for stats in chat.answers)
        assert num_read_anew <= 12

    def test_an_answer_goes_on_where_the_context_fills(self) -> None:
        chat = fake_chat(96, max_tokens=20)
        chat.session.target.stop_tokens = frozenset()  # type: ignore[misc]
        answer(chat.send("one"))
        answer(chat.send("two"))
        chat.settings = dataclasses.replace(chat.settings, max_tokens=80)
        stream = chat.send("three")
        assert chat.num_dropped == 0
        events = list(stream)
        assert chat.num_dropped == 2
        assert (chat.turns[-1].reason, len(chat.turns)) == ("length", 3)
        rounds = [event.index for event in events if isinstance(event, Round)]
        assert rounds == list(range(len(rounds)))
        assert sum(isinstance(event, Finish) for event in events) == 1
        assert len({event.num_tokens for event in events if isinstance(event, Prefill)}) == 1
        tokens = [event.id for event in events if isinstance(event, Token)]
        assert len(tokens) == 80
        decoder = TextDecoder(chat.session.target.piece)
        assert chat.turns[-1].answer == "".join(map(decoder.push, tokens)) + decoder.flush()

    def test_with_only_this_turn_left_the_answer_ends(self) -> None:
        chat = fake_chat(64, max_tokens=200)
        chat.session.target.stop_tokens = frozenset()  # type: ignore[misc]
        answer(chat.send("hello"))
        assert chat.turns[-1].reason == "context"
        answer(chat.send("again"))
        assert chat.num_dropped == 1
        assert chat.turns[-1].reason == "context"

    @pytest.mark.parametrize("on_full", ["stop", "error"])
    def test_nothing_is_dropped_otherwise(self, on_full: str) -> None:
        chat = fake_chat(64, max_tokens=30, on_full=on_full)
        chat.session.target.stop_tokens = frozenset()  # type: ignore[misc]
        answer(chat.send("hello"))
        answer(chat.send("again"))
        assert (chat.turns[-1].reason, chat.num_dropped) == ("context", 0)
        with pytest.raises(ContextFullError, match="the context 64") as error:
            chat.send("more")
        assert "/clear" in error.value.hint
        assert len(chat.turns) == 2
        chat.undo()
        answer(chat.send("short"))
        assert len(chat.turns) == 2

    def test_a_message_that_never_fits(self) -> None:
        chat = fake_chat(64)
        answer(chat.send("hello"))
        with pytest.raises(ContextFullError, match="tokens, the context 64") as error:
            chat.send("x" * 80)
        assert "shorter message" in error.value.hint
        assert (len(chat.turns), chat.num_dropped) == (1, 0)
        assert answer(chat.send("again"))
        with pytest.raises(ContextFullError, match="characters"):
            chat.send("x" * 10_000_000)
        with pytest.raises(UsageError, match="empty"):
            chat.send(" \n")

    def test_undo_beyond_what_was_dropped(self) -> None:
        chat = fake_chat(96)
        for _ in range(12):
            answer(chat.send("a message"))
        while chat.turns:
            chat.undo()
        assert chat.num_dropped == 0
        assert answer(chat.send("a message"))


# --- real models -------------------------------------------------------------------------------------------------


def letters_alone() -> Vocabulary:
    """Every text has only one way to be cut into tokens: a byte each."""
    plain = byte_level_vocabulary()
    first, second = plain.tokens[0], plain.tokens[1]
    tokens = [f"[OLD{index}]" if 256 <= index < 272 else token for index, token in enumerate(plain.tokens)]
    tokens[256] = first + second
    metadata = dict(plain.metadata) | {"tokenizer.ggml.merges": (f"{first} {second}",)}
    favored = frozenset(range(0x20, 0x7F))
    return Vocabulary(tuple(tokens), plain.types, metadata, favored)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    words = letters_alone()
    return (
        tiny(folder, "target", chat_template=CHATML, vocabulary=words, quant="f32"),
        tiny(folder, "draft", chat_template=CHATML, vocabulary=words, quant="q8_0"),
    )


Opened = Callable[..., Chat]


@pytest.fixture
def opened(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    sessions: list[Session] = []

    def call(num_ctx: int = 512, drafting: Drafting | None = None, **kwargs: Any) -> Chat:
        drafting = drafting or Drafting("model", 4, 0.0)
        sessions.append(Session.open(*pair, SessionOptions(drafting, num_ctx=num_ctx, threads=1)))
        settings = kwargs.pop("settings", ChatSettings(GREEDY, max_tokens=24))
        return Chat(sessions[-1], settings, **kwargs)

    yield call
    for session in sessions:
        session.close()


class TestTinyModels:
    def test_thirty_turns_through_512_tokens_equal_fresh_processes(self, opened: Opened) -> None:
        chat, other = opened(system="Be brief"), opened()
        num_ties = 0
        for place in range(30):
            tokens = token_ids(chat.send(f"This is message number {place}; what follows?"))
            assert chat.turns[-1].reason == "length"
            other.session.clear()
            other.replace(chat.turns[chat.num_dropped : -1], chat.system)
            others = token_ids(other.send(chat.turns[-1].user))
            assert other.num_dropped == 0
            prompt = other._held[: len(other._held) - len(others)]
            assert [*prompt, *tokens] == chat._held
            # Decoding in batches of other sizes changes logits a little.
            tie = other.session.near_tie(prompt, tokens, others, GREEDY)
            assert tie is None or tie.is_explained
            num_ties += tie is not None
        assert num_ties <= 5
        assert chat.num_dropped > 15
        assert chat.stats.num_accepted > 0

    def test_decoded_are_new_tokens_only(self, opened: Opened) -> None:
        chat = opened(2048)
        for place in range(8):
            answer(chat.send(f"message {place}"))
        stats = chat.stats
        target, draft = chat.session._contexts or (None, None)
        assert target is not None
        assert draft is not None
        in_vain = stats.num_drafted - stats.num_accepted
        assert stats.num_target_decoded == len(target.tokens) + in_vain
        assert stats.num_draft_decoded <= len(target.tokens) + in_vain + len(chat.turns)

    def test_an_answer_to_a_grammar_survives_a_full_context(self, opened: Opened) -> None:
        chat = opened(160)
        answer(chat.send("one"))
        answer(chat.send("two"))
        schema = {"type": "string", "minLength": 90, "maxLength": 95}
        structure = Structure(grammar=Grammar.from_schema(json.dumps(schema)))
        chat.settings = dataclasses.replace(chat.settings, structure=structure, max_tokens=120)
        dropped = chat.num_dropped
        text = answer(chat.send("three"))
        assert chat.num_dropped > dropped
        assert 90 <= len(json.loads(text)) <= 95
        assert chat.turns[-1].reason == "eog"

    @pytest.mark.parametrize(
        "text",
        [
            "\x1b[2J\x1b]0;title\x07",
            "[bold]x[/bold]",
            "\ud800 alone",
            "👩‍👩‍👧 🏳️‍🌈",
            "漢字かな",
            "שלום مرحبا",
            "\0",
            "<|im_end|>",
            "a" * 300,
        ],
        ids=ascii,
    )
    def test_any_text(self, opened: Opened, text: str, tmp_path: Path) -> None:
        chat = opened()
        answer(chat.send(text))
        answer(chat.send("and again"))
        path = tmp_path / "chat.json"
        write_transcript(path, Transcript(tuple(chat.turns)))
        assert read_transcript(path).turns == tuple(chat.turns)


def test_a_model_without_a_template() -> None:
    with pytest.raises(ModelLoadError, match=r"`fake-0.gguf` has no chat template"):
        Chat(Session(FakeModel(0, template=None)))


@pytest.mark.parametrize("values", [{"max_tokens": 0}, {"on_full": "burst"}])
def test_settings_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ChatSettings(**values)


def test_each_sampled_answer_draws_its_own_seed() -> None:
    chat = fake_chat()
    chat.settings = dataclasses.replace(chat.settings, sampling=SamplingParams())
    seeds = set()
    for _ in range(4):
        answer(chat.send("hello"))
        seeds.add(chat.params.seed)
    assert len(seeds) == 4
    assert None not in seeds


# --- files -------------------------------------------------------------------------------------------------------

WHOLE = Transcript(
    (Turn("hi", "hello", "eog"), Turn("näh\ud800", "<think>x</think>y", "interrupted")),
    "be brief", 1, {"temperature": 0.5, "stop": ["a", "b"], "ignore-eos": True, "seed": 7}, None, "/a.gguf", "/b.gguf",
)  # fmt: skip


class TestFiles:
    def test_round_trip(self, tmp_path: Path) -> None:
        path = tmp_path / "chat.json"
        write_transcript(path, WHOLE)
        assert read_transcript(path) == WHOLE
        assert path.read_bytes().isascii()
        write_transcript(path, dataclasses.replace(WHOLE, system=None))
        assert read_transcript(path).system is None
        assert [item.name for item in path.parent.iterdir()] == ["chat.json"]

    def test_last(self) -> None:
        assert keep_last(WHOLE)
        assert read_transcript(last_path()) == WHOLE

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "not JSON"),
            (b"{", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b"\xff\xfe\x00", "not JSON"),
            (b"[]", "not a conversation"),
            (b'{"messages": []}', "not a conversation"),
            (b'{"format": "specdec chat", "schema": 2}', "its schema is 2, this version reads 1"),
            (b'{"format": "specdec chat"}', "its schema is None"),
        ],
        ids=repr,
    )
    def test_foreign_or_corrupt(self, tmp_path: Path, content: bytes, reason: str) -> None:
        path = tmp_path / "chat.json"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=reason):
            read_transcript(path)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"messages": None}, "`messages` is not a list"),
            ({"messages": [{"role": "user", "content": "x"}]}, "each with its answer"),
            ({"messages": [1, 2]}, "message 1 has no text"),
            (
                {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]},
                "message 2 is by 'user'",
            ),
            ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}, "message 2 has no text"),
            ({"system": 3}, "`system` is 3"),
            ({"pair": []}, "`pair` is"),
            ({"settings": []}, "`settings` is not an object"),
            ({"settings": {"temperature": {}}}, "the setting `temperature` is"),
            ({"settings": {"stop": [1]}}, "the setting `stop` is"),
            ({"num_dropped": 3}, "`num_dropped` is 3"),
            ({"num_dropped": True}, "`num_dropped` is True"),
            ({"num_dropped": -1}, "`num_dropped` is -1"),
        ],
        ids=str,
    )
    def test_a_part_is_wrong(self, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
        path = tmp_path / "chat.json"
        write_transcript(path, WHOLE)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        with pytest.raises(UsageError, match=reason):
            read_transcript(path)

    def test_a_reason_that_does_not_exist(self, tmp_path: Path) -> None:
        path = tmp_path / "chat.json"
        write_transcript(path, WHOLE)
        path.write_text(path.read_text().replace('"interrupted"', '"tired"'))
        with pytest.raises(UsageError, match="message 4 ended for the reason 'tired'"):
            read_transcript(path)

    def test_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="No such file"):
            read_transcript(tmp_path / "nowhere.json")
        with pytest.raises(UsageError, match="directory"):
            read_transcript(tmp_path)

    def test_other_files_stay(self, tmp_path: Path) -> None:
        path = tmp_path / "main.py"
        path.write_text("print()")
        with pytest.raises(UsageError, match="not a conversation"):
            write_transcript(path, WHOLE)
        assert path.read_text() == "print()"
        with pytest.raises(UsageError, match="is a directory"):
            write_transcript(tmp_path, WHOLE)
        with pytest.raises(SpecdecError, match="cannot write"):
            write_transcript(path / "below", WHOLE)
        with pytest.raises(SpecdecError, match="cannot write"):
            write_transcript(Path("a\0b"), WHOLE)
