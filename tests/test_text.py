from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_cli.text import StopStrings, TextDecoder, Thinking, without_thinking

tricky = st.one_of(st.binary(max_size=12), st.text(max_size=6).map(str.encode)).map(bytes)
byte_strings = st.lists(tricky, max_size=6).map(b"".join)


@st.composite
def cut_bytes(draw: st.DrawFn) -> list[bytes]:
    whole = draw(byte_strings)
    cuts = draw(st.lists(st.integers(0, len(whole)), max_size=8))
    return [whole[a:b] for a, b in pairwise([0, *sorted(cuts), len(whole)])]


def can_become_character(start: bytes) -> bool:
    """Whether some bytes after `start` make it one valid character."""
    if not start:
        return True
    tails = [b"\x80" * n for n in range(4)] + [b"\xbf" * n for n in range(4)]
    tails += [b"\x9f" + b"\xbf" * n for n in range(3)] + [b"\xa0" + b"\x80" * n for n in range(3)]
    return any(_is_character(start + tail) for tail in tails)


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@given(cut_bytes())
def test_any_cut_gives_the_whole_text(pieces: list[bytes]) -> None:
    decoder = TextDecoder(pieces.__getitem__)
    text = "".join(decoder.push(index) for index in range(len(pieces))) + decoder.flush()
    assert text == b"".join(pieces).decode("utf-8", "replace")


@given(st.binary(max_size=12))
def test_only_what_can_become_a_character_is_held_back(data: bytes) -> None:
    decoder = TextDecoder(lambda token: bytes([token]))
    given_out = ""
    for end, token in enumerate(data, 1):
        given_out += decoder.push(token)
        whole = data[:end].decode("utf-8", "replace")
        held = next(n for n in range(5) if data[: end - n].decode("utf-8", "replace") == given_out)
        assert can_become_character(data[end - held : end])
        assert whole.startswith(given_out)


def test_every_two_bytes_are_held_back_rightly() -> None:
    for data in (bytes([first, second]) for first in range(0x80, 256) for second in range(0x80, 256)):
        decoder = TextDecoder([data].__getitem__)
        text = decoder.push(0)
        assert (text == "") == (can_become_character(data) and not _is_character(data)), data
        assert text + decoder.flush() == data.decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["😀", "漢字", "e\u0301", "שלום", "👩\u200d💻"])
def test_characters_are_never_halved(text: str) -> None:
    decoder = TextDecoder(lambda token: bytes([token]))
    steps = [decoder.push(token) for token in text.encode()]
    assert "".join(steps) == text
    assert decoder.flush() == ""
    assert all(len(step) <= 1 for step in steps)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xff"], ["\ufffd"]),
        ([b"\xc3", b"("], ["", "\ufffd("]),
        ([b"\xed", b"\xa0", b"\x80"], ["", "\ufffd\ufffd", "\ufffd"]),
        ([b"\xf0\x9f", b"\x98", b"ab"], ["", "", "\ufffdab"]),
        ([b"", b"a", b""], ["", "a", ""]),
    ],
)
def test_invalid_bytes_show_at_once(pieces: list[bytes], expected: list[str]) -> None:
    decoder = TextDecoder(pieces.__getitem__)
    assert [decoder.push(index) for index in range(len(pieces))] == expected


def test_flush_ends_the_text_and_starts_anew() -> None:
    decoder = TextDecoder([b"a\xe6\xbc", b"b"].__getitem__)
    assert decoder.push(0) == "a"
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert decoder.push(1) == "b"


# --- stop strings ----------------------------------------------------------------------------------------------------

stop_texts = st.lists(st.text("ab漢\n", min_size=1, max_size=4), min_size=1, max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Stop strings, and the parts of a text in which they may well occur."""
    stops = draw(stop_texts)
    whole = "".join(draw(st.lists(st.one_of(st.text("ab漢\n", max_size=4), st.sampled_from(stops)), max_size=6)))
    cuts = draw(st.lists(st.integers(0, len(whole)), max_size=10))
    return stops, [whole[a:b] for a, b in pairwise([0, *sorted(cuts), len(whole)])]


def before_first(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, read letter by letter."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@settings(max_examples=300)
@given(cut_texts())
def test_shown_is_the_text_before_the_first_stop_string(case: tuple[list[str], list[str]]) -> None:
    stops, parts = case
    strings, shown, whole = StopStrings(stops), "", ""
    for part in parts:
        shown += strings.push(part)
        whole += part
        # Nothing of a stop string, whole or begun, is ever shown: whatever comes next, it cannot be taken back.
        assert before_first(whole, stops).startswith(shown)
        assert all(before_first(whole + stop[1:], stops).startswith(shown) for stop in stops)
        assert strings.found == (before_first(whole, stops) != whole)
    shown += strings.flush()
    assert shown == before_first(whole, stops)
    assert strings.push("more") == ("" if strings.found else "more")


@settings(max_examples=100)
@given(cut_texts())
def test_only_what_can_begin_a_stop_string_is_held_back(case: tuple[list[str], list[str]]) -> None:
    stops, parts = case
    strings, shown, whole = StopStrings(stops), "", ""
    for part in parts:
        shown, whole = shown + strings.push(part), whole + part
        if strings.found:
            break
        held = whole[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "parts", "expected"),
    [
        (["</a>"], ["x<", "/", "a", ">y"], ["x", "", "", ""]),
        (["aab"], ["aa", "aab"], ["", "aa"]),
        (["abc", "b"], ["a", "bc"], ["", "a"]),
        (["bc", "abcd"], ["abc", "d"], ["a", ""]),
        (["bc", "abcd"], ["abcd"], ["a"]),
        (["bc", "abc"], ["ab", "c"], ["", ""]),
        (["abcd", "bc"], ["abx", "y"], ["abx", "y"]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_stop_strings_share_beginnings(stops: list[str], parts: list[str], expected: list[str]) -> None:
    strings = StopStrings(stops)
    assert [strings.push(part) for part in parts] == expected


def test_half_a_character_before_a_stop_string() -> None:
    pieces = ["漢".encode()[:2], "漢".encode()[2:] + b"<", b"e>", b"no"]
    decoder, strings = TextDecoder(pieces.__getitem__), StopStrings(["<e>"])
    assert [strings.push(decoder.push(index)) for index in range(4)] == ["", "漢", "", ""]
    assert strings.found
    assert strings.flush() == ""


# --- thoughts ------------------------------------------------------------------------------------------------------


def thought_and_answer(pieces: list[str], *, opened: bool = False) -> tuple[str, str]:
    thinking = Thinking(opened=opened)
    parts = [part for piece in pieces for part in thinking.push(piece)] + thinking.flush()
    return "".join(text for text, thought in parts if thought), "".join(text for text, thought in parts if not thought)


@pytest.mark.parametrize(
    ("text", "opened", "thought"),
    [
        ("<think>\nwell\n</think>\n\nyes", False, "<think>\nwell\n</think>"),
        ("\n <think>x</think>yes </think>", False, "\n <think>x</think>"),
        ("well</think>yes", True, "well</think>"),
        ("well", True, "well"),
        ("<think>well </thi", False, "<think>well </thi"),
        ("yes <think>x</think>", False, ""),
        ("<thin", False, ""),
        ("< think>", False, ""),
        ("  ", False, ""),
        ("", False, ""),
    ],
)
def test_thoughts_are_told_from_the_answer(text: str, opened: bool, thought: str) -> None:
    assert thought_and_answer([text], opened=opened) == (thought, text[len(thought) :])
    assert thought_and_answer(list(text), opened=opened) == (thought, text[len(thought) :])


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "x", "\n", " ", "<"]), max_size=8), st.data()
)
def test_any_cut_gives_the_same_thought(words: list[str], data: st.DataObject) -> None:
    whole = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in pairwise([0, *cuts, len(whole)])]
    thought, answer = thought_and_answer(pieces)
    assert thought + answer == whole
    assert (thought, answer) == thought_and_answer([whole])


def test_nothing_is_held_back_but_what_could_be_a_tag() -> None:
    thinking = Thinking(opened=True)
    assert thinking.push("a <b </thi") == [("a <b ", True)]
    assert thinking.push("s") == [("</this", True)]
    assert thinking.push("</think>c") == [("</think>", True), ("c", False)]
    assert thinking.push("</think") == [("</think", False)]


def test_without_thinking() -> None:
    assert without_thinking("<think>a</think>\n\nb\n") == "b\n"
    assert without_thinking(" b ") == " b "
