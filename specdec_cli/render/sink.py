"""Writing to a stream that may lack characters, or a reader."""

from __future__ import annotations

import contextlib
import os
from typing import IO, TextIO


class TextSink:
    """A text stream that shows each write at once and fails on no text.

    Args:
        stream: where the text goes; characters that its encoding lacks become "?".
        buffered: hold everything back until `release`.
    """

    def __init__(self, stream: TextIO, *, buffered: bool = False) -> None:
        self._stream = stream
        self._held: list[str] | None = [] if buffered else None

    def write(self, text: str) -> None:
        """Write and flush, or hold back.

        Raises:
            BrokenPipeError: the reader is gone; later writes are dropped silently, at the exit of Python too.
        """
        if self._held is not None:
            self._held.append(text)
            return
        try:
            self._write(text)
            self._stream.flush()
        except BrokenPipeError:
            silence(self._stream)
            raise

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self._stream.write(text.encode(encoding, "replace").decode(encoding))

    def release(self) -> None:
        """Write what was held back; later writes are held back again.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        if self._held is None:
            return
        held, self._held = self._held, None
        try:
            self.write("".join(held))
        finally:
            self._held = []


def can_encode(stream: TextIO, text: str) -> bool:
    """Whether a stream can write this text as it is."""
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def silence(stream: IO[str]) -> None:
    """Let a stream whose reader is gone write to nowhere.

    Python flushes its streams at exit, and would report the closed pipe once more.
    """
    with contextlib.suppress(OSError, ValueError):
        target = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)
