"""Token ids -> text, without ever cutting a character in half."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


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


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
