"""Token ids -> text, without ever cutting a character in half."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Literal


class TextDecoder:
    """Turns the tokens of one answer into text as they arrive.

    Bytes that can no longer become a character turn into U+FFFD at once; the rest of an unfinished character is held
    back until it is complete. All pushed and flushed text together is `bytes.decode("utf-8", "replace")`.

    Args:
        piece: the bytes of a token id; may be empty, or end in the middle of a character.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; may be empty."""
        text = self._decoder.decode(self._piece(token_id))
        held = self._decoder.getstate()[0]
        # Python's decoder waits for a third byte of a surrogate (ED A0..BF), which UTF-8 does not have.
        return text + self.flush() if len(held) == 2 and b"\xed\xa0" <= held < b"\xee" else text

    def flush(self) -> str:
        """What is left at the end, U+FFFD for an unfinished character; the decoder can then be used anew."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Holds text back as long as it could begin a stop string, and ends before the one that is complete first.

    How the text is cut into pushes makes no difference.

    Args:
        texts: the stop strings, none of them empty.
    """

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that can be shown now; nothing any more once a stop string was found."""
        if self.found or not self._texts:
            return "" if self.found else text
        whole = self._held + text
        places = [(whole.find(stop) + len(stop), -len(stop)) for stop in self._texts if stop in whole]
        if places:
            self.found, self._held = True, ""
            return whole[: sum(min(places))]
        keep = max(_overlap(whole, stop) for stop in self._texts)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Thinking:
    """Tells what a reasoning model thinks from what it answers, in text that arrives in pieces.

    Only thinking at the very beginning counts: later on the tags may be what the answer is about.

    Args:
        opened: the prompt ended with the opening tag.
    """

    def __init__(self, *, opened: bool = False) -> None:
        self._place: Literal["start", "thought", "answer"] = "thought" if opened else "start"
        self._held = ""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Text that can be told, in parts: each with whether it is a thought; the tags belong to the thought."""
        whole, self._held = self._held + text, ""
        if self._place == "start":
            begun = whole.lstrip()
            if begun.startswith(THINK_OPEN):
                self._place = "thought"
            elif THINK_OPEN.startswith(begun):
                self._held = whole
                return []
            else:
                self._place = "answer"
        parts = self._thought(whole) if self._place == "thought" else [(whole, False)]
        return [part for part in parts if part[0]]

    def _thought(self, whole: str) -> list[tuple[str, bool]]:
        before, tag, after = whole.partition(THINK_CLOSE)
        if tag:
            self._place = "answer"
            return [(before + tag, True), (after, False)]
        size = len(whole) - _overlap(whole, THINK_CLOSE)
        self._held = whole[size:]
        return [(whole[:size], True)]

    def flush(self) -> list[tuple[str, bool]]:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return [(held, self._place == "thought")] if held else []

    @property
    def is_thinking(self) -> bool:
        """Whether the thought has begun and not ended."""
        return self._place == "thought"


def without_thinking(answer: str) -> str:
    """A whole answer without what the model thought before it."""
    thinking = Thinking()
    parts = [*thinking.push(answer), *thinking.flush()]
    if not any(is_thought for _, is_thought in parts):
        return answer
    return "".join(text for text, is_thought in parts if not is_thought).lstrip()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
