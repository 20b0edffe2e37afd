"""Two vocabularies compared: the verdict, what it rests on, and that llama.cpp's files are judged the same way."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import CHATML, sentencepiece_vocabulary, tiny

from specdec_cli import compatibility
from specdec_cli.compatibility import CONTROL, MAX_LISTED, UNUSED, USER_DEFINED, Compatibility, compare
from specdec_cli.errors import IncompatibleModelsError
from specdec_cli.llama import Model, check_vocabularies
from specdec_cli.tiny import Vocabulary, byte_level_vocabulary

NORMAL = 1 << 2


@dataclass
class Words:
    """A vocabulary of so many words; a word that begins with `<` is a control token, with `[` padding."""

    words: list[str]
    bos: int | None = None
    eos: int | None = None
    adds_bos: bool = False
    chat_template: str | None = None
    stops: set[int] = field(default_factory=set)
    tokenizer_kind: int = 2
    num_asked: int = 0

    @property
    def num_vocab(self) -> int:
        return len(self.words)

    def token_entries(self) -> list[bytes]:
        return [word.encode() for word in self.words]

    def token_attr(self, token: int) -> int:
        self.num_asked += 1
        return {"<": CONTROL, "[": UNUSED}.get(self.words[token][0], NORMAL)

    def is_stop(self, token: int) -> bool:
        return token in self.stops


WORDS = ["a", "b", "c", "<s>", "<e>", "<r0>", "<r1>"]


def judged(draft: list[str], target: list[str] = WORDS, **settings: object) -> Compatibility:
    return compare(Words(target, **settings), Words(draft, **settings))  # type: ignore[arg-type]


def roles(found: Compatibility) -> list[tuple[int, str]]:
    return [(difference.token, difference.role) for difference in found.differences]


def test_the_bits_are_those_of_llama() -> None:
    assert UNUSED == llama_cpp.LLAMA_TOKEN_ATTR_UNUSED
    assert CONTROL == llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
    assert USER_DEFINED == llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED


def test_equal() -> None:
    assert judged([*WORDS]) == Compatibility("same tokenizer", 7)


@pytest.mark.parametrize("swap", [False, True])
def test_padding(swap: bool) -> None:
    longer = [*WORDS, "[0]", "[1]"]
    found = judged(WORDS, longer) if swap else judged(longer)
    assert (found.verdict, found.num_shared, found.num_differences) == ("padding only", 7, 2)
    assert roles(found) == [(7, "padding"), (8, "padding")]
    assert [found.differences[0].target, found.differences[0].draft] == ([None, "[0]"], ["[0]", None])[swap]


def test_an_unused_id_in_the_middle_is_padding() -> None:
    assert judged([*WORDS[:5], "[x]", "<r1>"]).verdict == "padding only"


def test_an_unused_special_token() -> None:
    found = judged([*WORDS[:6], "<think>"])
    assert (found.verdict, roles(found), found.reason, found.fits) == (
        "differs in unused specials", [(6, "special")], "", True,
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"bos": 6},
        {"eos": 6},
        {"stops": {6}},
        {"chat_template": "{{ '<r1>' }}"},
        {"chat_template": "say <think> first"},
    ],
)
def test_a_special_token_that_is_needed(settings: dict[str, object]) -> None:
    found = judged([*WORDS[:6], "<think>"], **settings)
    assert (found.verdict, roles(found)) == ("different", [(6, "used")])
    assert found.reason == (
        "target and draft have different vocabularies: token 6 is '<r1>' in the target and '<think>' in the draft"
    )


def test_a_control_token_against_a_word() -> None:
    assert judged([*WORDS[:6], "word"]).verdict == "different"


def test_tokens_that_only_one_has() -> None:
    found = judged([*WORDS, "<image>", "word"])
    assert (found.verdict, roles(found)) == ("differs in unused specials", [(7, "extra"), (8, "extra")])


def test_what_decides_is_named_first_and_ten_at_most() -> None:
    words = [f"w{number}" for number in range(100)]
    other = ["[pad]", *words[1:50], *(f"x{number}" for number in range(50)), "<more>"]
    target = Words(words)
    found = compare(target, Words(other))
    assert (found.verdict, found.num_differences) == ("different", 52)
    assert roles(found) == [(token, "used") for token in range(50, 50 + MAX_LISTED)]
    # a vocabulary of a quarter of a million must not be walked through for ten names
    assert target.num_asked <= MAX_LISTED + 1


def test_begin_of_text() -> None:
    target, draft = Words(WORDS, bos=3, adds_bos=True), Words(WORDS, bos=4, adds_bos=True)
    found = compare(target, draft)
    assert (found.verdict, found.reason) == ("different", "target and draft start a text differently: BOS 3 and 4")
    draft.adds_bos = False
    assert compare(target, draft).verdict == "same tokenizer"


def test_kinds_of_tokenizer() -> None:
    found = compare(Words(WORDS), Words(["z", *WORDS[1:]], tokenizer_kind=1))
    assert found.reason == (
        "target and draft have different kinds of tokenizer (token 0 is 'a' in the target and 'z' in the draft)"
    )
    same = compare(Words(WORDS), Words(WORDS, tokenizer_kind=1))
    assert (same.fits, same.reason) == (False, "target and draft have different kinds of tokenizer")


VOCABULARIES = st.lists(st.sampled_from(["a", "b", "<r>", "<s>", "[0]", "[1]"]), min_size=1, max_size=6).map(Words)


@given(VOCABULARIES, VOCABULARIES)
def test_verdict_and_differences_agree(target: Words, draft: Words) -> None:
    found = compare(target, draft)
    assert found.num_shared == min(target.num_vocab, draft.num_vocab)
    assert (found.verdict == "same tokenizer") == (target.words == draft.words)
    assert found.fits == (not found.reason)
    decisive = [
        token
        for token, (one, other) in enumerate(zip(target.words, draft.words, strict=False))
        if one != other and "[" not in one + other and not (one[0] == other[0] == "<")
    ]
    assert found.fits == (not decisive)
    if decisive:
        assert [difference.token for difference in found.differences] == decisive
    assert compare(draft, target).verdict == found.verdict


# ------------------------------------------------------------------ files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compatibility")


def compared(target: Path, draft: Path) -> Compatibility:
    with Model(target, vocab_only=True) as first, Model(draft, vocab_only=True) as second:
        found = compatibility.compare(first, second)
        if found.fits:
            assert check_vocabularies(first, second) == found.num_shared
        else:
            with pytest.raises(IncompatibleModelsError) as caught:
                check_vocabularies(first, second)
            assert caught.value.message == found.reason
        return found


def renamed(token: int, text: str) -> Vocabulary:
    vocabulary = byte_level_vocabulary()
    tokens = [*vocabulary.tokens]
    tokens[token] = text
    return dataclasses.replace(vocabulary, tokens=tuple(tokens))


def test_files(folder: Path) -> None:
    target = tiny(folder, "target")
    assert compared(target, tiny(folder, "seed", seed=1)).verdict == "same tokenizer"
    longer = compared(target, tiny(folder, "longer", num_vocab=384))
    assert (longer.verdict, longer.num_differences) == ("padding only", 64)
    other = compared(target, tiny(folder, "other", vocabulary=renamed(139, "somewhat")))
    assert (other.verdict, other.differences[0].draft, other.differences[0].token) == ("different", "somewhat", 139)
    kind = compared(target, tiny(folder, "kind", vocabulary=sentencepiece_vocabulary()))
    assert kind.reason.startswith("target and draft have different kinds of tokenizer (token 0 is ")


def test_special_tokens_of_files(folder: Path) -> None:
    special = byte_level_vocabulary().tokens.index("<|im_start|>")
    plain, with_template = tiny(folder, "plain"), tiny(folder, "template", chat_template=CHATML)
    changed = tiny(folder, "changed", vocabulary=renamed(special, "<|reserved|>"))
    assert compared(plain, changed).verdict == "differs in unused specials"
    assert compared(with_template, changed).verdict == "different"
