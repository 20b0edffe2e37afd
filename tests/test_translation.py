"""Tokens of one real tokenizer in those of another: tiny vocabularies of every kind, and the reference models'."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    CHATML,
    no_vocabulary,
    other_byte_level_vocabulary,
    sentencepiece_vocabulary,
    tiny,
    wordpiece_vocabulary,
)

from specdec_cli.context import CachedContext, common_prefix
from specdec_cli.draft_length import Fixed
from specdec_cli.drafters import Retokenized
from specdec_cli.drafters.retokenize import num_settled
from specdec_cli.errors import IncompatibleModelsError, ModelLoadError
from specdec_cli.llama import Model, find_translator
from specdec_cli.session import Session, SessionOptions, Structure
from specdec_cli.tiny import byte_level_vocabulary
from specdec_cli.translation import (
    SAMPLE,
    Efficiency,
    SharedTokens,
    Tokenizer,
    Translation,
    Translator,
    efficiency,
    num_complete,
)
from specdec_cli.types import PLAIN_DECODING, Draft, Drafting, Logits, SamplingParams

GREEDY = SamplingParams(temperature=0)
REAL = Path(os.environ.get("SPECDEC_REFERENCE", Path.home() / ".cache/specdec-reference"))
REAL_FILES = {
    "qwen 1.5b": "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "qwen 0.5b": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma 3": "gemma-3-270m-q4_k_m.gguf",
}
TINY = {
    "bytes": byte_level_vocabulary,
    "other bytes": other_byte_level_vocabulary,
    "sentencepiece": sentencepiece_vocabulary,
    "sentencepiece with a space": lambda: sentencepiece_vocabulary(add_space=True),
    "wordpiece": wordpiece_vocabulary,
}
EXACT = [name for name in TINY if name != "wordpiece"]
"""Tokenizers that lose nothing of a text."""

SCRIPTS = {
    "latin": "The quick brown fox, naïve café; straße, Ærøskøbing. It's 42% done!",
    "cyrillic": "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "greek": "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία — 3,14.",
    "arabic": "نصٌّ حكيمٌ لهُ سِرٌّ قاطِعٌ وَذُو شَأنٍ عَظيمٍ",
    "hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण",
    "chinese": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。",
    "japanese": "いろはにほへと チリヌルヲ 我が世誰ぞ常ならむ",
    "korean": "다람쥐 헌 쳇바퀴에 타고파 키스의 고유조건은",
    "thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 👍🏽👍🏿 ❤️ 👨🏻‍🚀 🤷🏾‍♀️ 1️⃣ 😀",
    "code": "def f(x):\n\tif x:\r\n        return  x[1:]\n\n\n    \t# ok\r\n\x0b\x00end\\n\t\t}\n",
    "special": "<|im_end|> <|im_start|>user\n</s> <s> <eos> [SEP] <0x0A> <end_of_turn> ▁the",
}

# Beyond the second plane there are no characters yet; SmolLM2's vocabulary lacks their first byte.
excerpts = st.sampled_from(list(SCRIPTS.values())).flatmap(
    lambda text: st.builds(
        lambda start, size: text[start : start + size], st.integers(0, len(text)), st.integers(1, 24)
    )
)
letters = st.text(st.characters(max_codepoint=0x1FFFF), max_size=6)
texts = st.lists(
    st.one_of(excerpts, letters, st.sampled_from([" ", "\n", "  ", "\t"])),
    max_size=6,
).map("".join)
damaged = st.lists(
    st.one_of(texts.map(lambda text: text.encode("utf-8", "replace")), st.binary(max_size=5)), max_size=4
).map(b"".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(folder: Path) -> Iterator[dict[str, Tokenizer]]:
    """Every tokenizer there is, by name."""
    opened = {name: Model(tiny(folder, name, vocabulary=make()), vocab_only=True) for name, make in TINY.items()}
    opened |= {name: Model(REAL / file, vocab_only=True) for name, file in REAL_FILES.items() if (REAL / file).exists()}
    yield {name: Tokenizer(model) for name, model in opened.items()}
    for model in opened.values():
        model.close()


def has_bytes(tokenizer: Tokenizer, data: bytes) -> bool:
    """Whether each byte is a token by itself: SmolLM2 lacks some, of controls and of planes without characters."""
    return all(any(tokenizer.piece(token) == bytes([byte]) for token in range(600)) for byte in data)


def exact(models: dict[str, Tokenizer]) -> list[Tokenizer]:
    return [tokenizer for name, tokenizer in models.items() if name != "wordpiece"]


def is_ordinary(tokenizer: Tokenizer, tokens: Sequence[int]) -> bool:
    """Inside the vocabulary, and no special token."""
    return all(0 <= token < tokenizer.model.num_vocab and tokenizer.piece(token) for token in tokens)


# --- one tokenizer -------------------------------------------------------------------------------------------------


@given(texts)
def test_a_text_keeps_its_bytes(models: dict[str, Tokenizer], text: str) -> None:
    data = text.encode("utf-8", "replace")
    for tokenizer in exact(models):
        tokens = tokenizer.encode(data)
        assert is_ordinary(tokenizer, tokens)
        # SentencePiece cannot write its own sign for a space.
        if tokenizer.decode(tokens) not in (data, data.replace("▁".encode(), b" ")):
            assert tokenizer is models.get("smollm2")
            assert not has_bytes(tokenizer, data)


@given(damaged)
def test_bytes_that_are_no_text_keep_their_value(models: dict[str, Tokenizer], data: bytes) -> None:
    for name in EXACT:
        tokenizer = models[name]
        assert tokenizer.decode(tokenizer.encode(data)) in (data, data.replace("▁".encode(), b" "))
    for tokenizer in models.values():
        found = tokenizer.encode_behind(b"", data)
        assert is_ordinary(tokenizer, found)
        assert data.startswith(tokenizer.decode(found))


@given(texts, texts)
def test_behind_a_text_tokens_are_those_of_both_together(models: dict[str, Tokenizer], before: str, text: str) -> None:
    first, second = before.encode("utf-8", "replace"), text.encode("utf-8", "replace")
    for tokenizer in models.values():
        found = tokenizer.encode_behind(first, second)
        assert second.startswith(tokenizer.decode(found))
        together = tokenizer.encode(first + second)
        if tokenizer.decode(found) == second and together[len(together) - len(found) :] != found:
            # Then a token of both together stands on the border.
            assert len(first) not in tokenizer.ends(together)


@pytest.mark.parametrize("name", [*SCRIPTS])
def test_half_a_character_at_the_border(models: dict[str, Tokenizer], name: str) -> None:
    data = SCRIPTS[name].encode()
    for tokenizer in exact(models):
        for place in range(0, len(data), 7):
            found = tokenizer.encode_behind(data[:place], data[place:])
            assert tokenizer.decode(found) == data[place:].replace("▁".encode(), b" ") or "▁" in SCRIPTS[name]


def test_no_space_is_added(models: dict[str, Tokenizer]) -> None:
    tokenizer = models["sentencepiece with a space"]
    for text in (b"the", b" the", b"  the", b"\nthe", b" ", b"a", b"an a", "é".encode()):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.piece(tokenizer.encode(b"then the")[-1]) == b" the"


def test_wordpiece_gives_what_it_has(models: dict[str, Tokenizer]) -> None:
    tokenizer = models["wordpiece"]
    assert tokenizer.decode(tokenizer.encode(b"Going,\n\nand")) == b"going , and"
    assert tokenizer.decode(tokenizer.encode_behind(b" the", b" and going")) == b" and going"
    assert tokenizer.encode_behind(b" the", b"\xff") == []


@given(damaged)
def test_whole_characters(data: bytes) -> None:
    size = num_complete(data)
    assert len(data) - 3 <= size <= len(data)
    # What is left could still become a character, and what is not, could not have become another one.
    whole, rest = data[:size], data[size:]
    assert len((data + b"a").decode("utf-8", "replace")) == len(whole.decode("utf-8", "replace")) + bool(rest) + 1


# --- a growing text ------------------------------------------------------------------------------------------------


@given(texts, st.lists(st.integers(1, 6), max_size=30), st.data())
def test_the_translation_of_a_growing_text(models: dict[str, Tokenizer], text: str, steps: list[int], data) -> None:
    name = data.draw(st.sampled_from(sorted(models)))
    target, draft = models[data.draw(st.sampled_from(sorted(models)))], models[name]
    translation = Translation(target, draft)
    tokens = target.encode(text.encode("utf-8", "replace"))
    first = draft.model.tokenize("", add_special=True, parse_special=False)[:1]
    place = 0
    for step in [*steps, len(tokens)]:
        place = min(place + step, len(tokens))
        ids = translation.ids(tokens[:place])
        assert ids[: len(first)] == first
        assert all(0 <= token < draft.model.num_vocab for token in ids)
        written = target.decode(tokens[:place])
        if name in EXACT:
            assert draft.decode(ids) in (written, written.replace("▁".encode(), b" "))


WORDS = ("the", "and", "then", "ten", "an", "a", "eat", "neat", "thing", "12", "x,y", "(on)")
words = st.lists(st.sampled_from(WORDS), max_size=20)


@given(words, st.data())
def test_a_text_of_words_is_translated_as_if_read_at_once(models: dict[str, Tokenizer], words: list[str], data) -> None:
    target, draft = (models[data.draw(st.sampled_from(sorted(models)))] for _ in range(2))
    translation = Translator(target.model, draft.model).translation()
    tokens = target.encode(" ".join(words).encode())
    for place in range(len(tokens) + 1):
        ids = translation.ids(tokens[:place])
    assert [token for token in ids if draft.piece(token)] == draft.encode(target.decode(tokens))


@given(words, words)
def test_what_stands_is_not_changed_by_more_text(
    models: dict[str, Tokenizer], first: list[str], more: list[str]
) -> None:
    text = " ".join(first).encode()
    for tokenizer in models.values():
        before = tokenizer.encode_behind(b"", text)
        # The draft model has written all of it at once, so that nothing stands for its sake.
        num = num_settled(text, tokenizer.ends(before), [len(text) + 1])
        after = tokenizer.encode_behind(b"", text + " ".join(more).encode())
        assert after[:num] == before[:num]


@functools.cache
def translator_of(target: Model, draft: Model) -> Translator:
    return Translator(target, draft)


# --- a draft -------------------------------------------------------------------------------------------------------


class Writing(CachedContext):
    """A draft model that writes fixed bytes after some tokens."""

    def __init__(self, tokenizer: Tokenizer, data: bytes, num_before: int) -> None:
        super().__init__(1 << 14, tokenizer.model.num_vocab, 512)
        self.script = [*tokenizer.encode(data), tokenizer.model.eos]
        self.num_before = num_before

    def _decode(self, tokens: Sequence[int], draft: Draft, *, rows: bool, num_old: int = 0) -> Logits | None:
        row = np.full(self.num_vocab, -20.0, np.float32)
        place = len(self._cached) + len(tokens) - self.num_before
        row[self.script[min(max(place, 0), len(self.script) - 1)]] = 5
        return row[None]

    def _drop_tail(self, num_kept: int) -> bool:
        return True

    def _clear(self) -> None:
        """Nothing is kept."""


@settings(max_examples=120)
@given(texts, damaged, st.integers(1, 40), st.data())
def test_proposals_are_the_drafts_own_text(
    models: dict[str, Tokenizer], before: str, data: bytes, num: int, choice
) -> None:
    """In ten scripts, with emoji, code, and bytes that are no text."""
    names = sorted(models)
    target, draft = (models[choice.draw(st.sampled_from(names))].model for _ in range(2))
    translator = translator_of(target, draft)
    start = translator.target.encode(b"say:" + before.encode("utf-8", "replace"))
    translation = translator.translation()
    context = Writing(translator.draft, data, len(translation.ids(start)))
    drafter = Retokenized(context, translator, translation)
    found = list(drafter.propose(start, Fixed(num), 64).tokens)
    has_ended = target.eos in found
    if has_ended:
        assert found.pop() == target.eos
    written = translator.draft.decode(context.script[:-1])
    text = translator.target.decode(found)
    assert is_ordinary(translator.target, found)
    assert written.startswith(text)
    assert not has_ended or text == written
    if num == 40 and len(translator.target.encode(written)) < 30 and target.tokenizer_kind in (1, 2):
        assert has_ended or "▁".encode() in written


def test_a_draft_is_read_behind_all_of_the_number_that_it_goes_on_with(folder: Path) -> None:
    """Llama 3 takes digits in threes: where these end is known from the first digit on, not from the last."""
    threes, other = (byte_level_vocabulary(merges=merges) for merges in (("3 4", "4 5"), ("4 5", "3 45")))
    threes = replace(threes, metadata={**threes.metadata, "tokenizer.ggml.pre": "llama-bpe"})
    with (
        Model(tiny(folder, "threes", vocabulary=threes), vocab_only=True) as target,
        Model(tiny(folder, "other", vocabulary=other), vocab_only=True) as draft,
    ):
        translator = Translator(target, draft)
        start, translation = translator.target.encode(b" 12"), translator.translation()
        context = Writing(translator.draft, b"345 and", len(translation.ids(start)))
        found = Retokenized(context, translator, translation).propose(start, Fixed(2), 9).tokens
        assert [target.piece(token) for token in found] == [b"3", b"45"]


@pytest.mark.skipif(not all((REAL / file).exists() for file in REAL_FILES.values()), reason="no reference models")
@pytest.mark.parametrize("draft", ["smollm2", "gemma 3"])
def test_a_draft_that_knows_the_text_is_accepted(models: dict[str, Tokenizer], draft: str) -> None:
    """Nearly every token that stands is what the target's tokenizer makes of the text, with few draft tokens for it."""
    translator = translator_of(models["qwen 1.5b"].model, models[draft].model)
    whole = translator.target.encode(SAMPLE.encode())
    place, counts = 3, [0, 0]
    while place < len(whole) - 10:
        rest = translator.target.decode(whole[place:])
        translation = Translation(translator.target, translator.draft)
        context = Writing(translator.draft, rest, len(translation.ids(whole[:place])))
        found = Retokenized(context, translator, translation).propose(whole[:place], Fixed(3), 3).tokens
        counts[0] += common_prefix(found, whole[place:])
        counts[1] += len(found)
        place += len(found) + 1
        assert len(found) == 3
    assert counts[0] > 0.95 * counts[1] > 100


# --- pairs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Path:
    """Whole models: one seed, hence of some likeness, in several vocabularies."""
    template = {"chat_template": CHATML, "num_layers": 1}
    tiny(folder, "target", **template)
    tiny(folder, "byte draft", vocabulary=other_byte_level_vocabulary(), **template)
    tiny(folder, "plain draft", vocabulary=other_byte_level_vocabulary(), num_layers=1)
    tiny(folder, "sp draft", vocabulary=sentencepiece_vocabulary(add_space=True), **template)
    tiny(folder, "wp draft", vocabulary=wordpiece_vocabulary(), **template)
    tiny(folder, "none", vocabulary=no_vocabulary(), **template)
    return folder


def opened(pairs: Path, target: str, draft: str, drafting: Drafting | None = None) -> Session:
    options = SessionOptions(drafting or Drafting("model", 4, 0.0), num_ctx=512)
    return Session.open(pairs / f"{target}.gguf", pairs / f"{draft}.gguf", options)


DRAFTS = ["byte draft", "plain draft", "sp draft", "wp draft"]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("method", ["string-level", "token-level"])
def test_greedy_answers_are_the_targets_own(
    pairs: Path, draft: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "draft_method", lambda self, params, is_constrained=False: method)
    with opened(pairs, "target", draft) as session:
        prompt = session.encode("hello there, and then?")
        drafted = session.generate(prompt, sampling=GREEDY, max_tokens=80)
        plain = session.generate(prompt, sampling=GREEDY, max_tokens=80, drafting=PLAIN_DECODING)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.num_drafted > 0
        assert drafted.stats.num_rounds > 30


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_other_way_round(pairs: Path, draft: str) -> None:
    if draft == "wp draft":
        pytest.skip("llama.cpp puts an end token behind every text of such a target")
    with opened(pairs, draft, "target", Drafting("auto")) as session:
        prompt = session.encode("hello", raw=True)
        for params in (GREEDY, SamplingParams(seed=3)):
            drafted = session.generate(prompt, sampling=params, max_tokens=60)
            again = session.generate(prompt, sampling=params, max_tokens=60)
            assert drafted.tokens == again.tokens
        plain = session.generate(prompt, sampling=GREEDY, max_tokens=60, drafting=PLAIN_DECODING)
        assert session.generate(prompt, sampling=GREEDY, max_tokens=60).tokens == plain.tokens


def test_an_answer_that_may_not_end(pairs: Path) -> None:
    with opened(pairs, "target", "byte draft") as session:
        structure = Structure(ignore_eos=True)
        drafted = session.generate("hello", sampling=GREEDY, max_tokens=60, structure=structure)
        assert len(drafted.tokens) == 60


def test_the_draft_model_reads_a_conversation_in_its_own_form(pairs: Path) -> None:
    with opened(pairs, "target", "sp draft") as session:
        assert session.draft_model is not None
        prompt = session.encode("hello")
        given, own = session._draft_prompt(prompt) or ([], [])
        assert list(given) == prompt
        assert own[0] == session.draft_model.bos
        assert session._draft_prompt(prompt[:-1]) is None
        assert session._draft_prompt(session.encode("hello", raw=True)) is None
    with opened(pairs, "target", "plain draft") as session:
        # Without a template it reads the target's prompt, special tokens left out.
        prompt = session.encode("hello <|im_end|>")
        assert session._draft_prompt(prompt) is None
        assert session.translator is not None
        ids = session.translator.translation().ids(prompt)
        assert session.translator.draft.decode(ids) == b"user\nhello \nassistant\n"


def test_which_method(pairs: Path) -> None:
    hot = SamplingParams(temperature=1)
    with opened(pairs, "target", "byte draft") as session:
        assert session.translator is not None
        assert session.translator.efficiency is not None
        assert session.draft_method(GREEDY) == "string-level"
        assert session.draft_method(hot) == "token-level"
        assert session.draft_method(GREEDY, is_constrained=True) == "token-level"
        session.translator.efficiency = Efficiency(shared=0.8, draft_tokens=1.1)
        assert session.draft_method(hot) == "string-level"
        session.translator.efficiency = Efficiency(shared=1.0, draft_tokens=1.0)
        assert session.draft_method(GREEDY) == "token-level"
    with opened(pairs, "target", "target") as session:
        assert session.translator is None
        assert session.draft_method(hot) == "same-tokens"
    with Session.open(pairs / "target.gguf") as session:
        assert session.draft_method(hot) is None


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1, seed=1)], ids=["string", "token"])
def test_a_prompt_of_special_tokens_alone(pairs: Path, params: SamplingParams) -> None:
    with opened(pairs, "target", "byte draft") as session:
        prompt = session.encode("<|im_start|>", raw=True)
        assert session.draft_method(params) == ("string-level" if params is GREEDY else "token-level")
        assert (
            len(session.generate(prompt, sampling=params, max_tokens=8, structure=Structure(ignore_eos=True)).tokens)
            == 8
        )


def test_what_cannot_be_translated(pairs: Path) -> None:
    with pytest.raises(IncompatibleModelsError, match=r"none\.gguf` has no tokenizer") as caught:
        opened(pairs, "target", "none")
    assert caught.value.exit_code == 4
    with pytest.raises(ModelLoadError, match=r"none\.gguf` has no tokenizer"):
        opened(pairs, "none", "target")
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        Session.open(pairs / "none.gguf")


def test_padding_needs_no_translation(folder: Path) -> None:
    with (
        Model(tiny(folder, "a"), vocab_only=True) as first,
        Model(tiny(folder, "b", num_vocab=384), vocab_only=True) as second,
    ):
        assert find_translator(first, second) is None


def test_of_tokens_with_the_same_bytes_the_one_that_is_written_is_shared(models: dict[str, Tokenizer]) -> None:
    pieces, letters = models["sentencepiece"], models["bytes"]
    byte, own = (token for token in range(pieces.model.num_vocab) if pieces.piece(token) == b"a")
    assert pieces.encode(b"a") == [own]
    for shared in (SharedTokens.of(pieces, letters).target, SharedTokens.of(letters, pieces).draft):
        assert own in shared
        assert byte not in shared


def test_efficiency(models: dict[str, Tokenizer]) -> None:
    same = efficiency(models["bytes"], models["bytes"])
    assert same is not None
    assert (same.shared, same.draft_tokens) == (1, 1)
    fewer = efficiency(models["sentencepiece"], models["bytes"], "then the th")
    # "th", "e", "n", "▁the", "▁th" are "t", "he", "n", "Ġthe", "Ġt", "h".
    assert fewer == Efficiency(shared=3 / 5, draft_tokens=6 / 5)
    assert efficiency(models["bytes"], models["wordpiece"], "漢字") is None


@pytest.mark.skipif(not all((REAL / file).exists() for file in REAL_FILES.values()), reason="no reference models")
def test_efficiency_of_the_reference_models(models: dict[str, Tokenizer]) -> None:
    found = efficiency(models["qwen 1.5b"], models["smollm2"])
    assert found is not None
    assert 0.8 < found.shared < 0.95
    assert 1 < found.draft_tokens < 1.3
    shared = Translator(models["qwen 1.5b"].model, models["smollm2"].model).shared
    assert len(shared.target) == len(set(shared.target.tolist())) == len(set(shared.draft.tolist())) > 30_000
    for target, draft in list(zip(shared.target.tolist(), shared.draft.tolist(), strict=True))[::997]:
        assert models["qwen 1.5b"].piece(target) == models["smollm2"].piece(draft)
