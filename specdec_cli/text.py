"""Token ids -> text, without ever cutting a character in half."""

from __future__ import annotations

import codecs
from collections.abc import Callable


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
