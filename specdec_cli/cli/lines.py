"""Where the messages of a conversation come from when no line can be edited: a pipe, a file, a dumb terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Protocol, TextIO

from specdec_cli.cli.prompt import MAX_BYTES, decode

PROMPT, CONTINUATION = ">>> ", "... "
QUOTES = '"""'


class Reader(Protocol):
    """Gives one message after the other."""

    def read(self, default: str = "") -> str:
        """The next message, without quotes of a block around it.

        Args:
            default: what can be changed, where lines can be edited.

        Raises:
            EOFError: there is no further one.
            KeyboardInterrupt: Ctrl-C while there was nothing to clear.
            UsageError: far too long a line.
        """


class LineReader:
    """A line is a message; on a terminal with a prompt, and with blocks of several lines.

    Args:
        prompts: where to write prompts; None is for a pipe, in which every line is a message.
    """

    def __init__(self, prompts: TextIO | None) -> None:
        self._prompts = prompts

    def read(self, default: str = "") -> str:  # noqa: ARG002
        """The next message."""
        text = self._line(PROMPT)
        while self._prompts is not None and is_open_block(text):
            text += "\n" + self._line(CONTINUATION)
        return text if self._prompts is None else unquoted(text)

    def _line(self, prompt: str) -> str:
        if self._prompts is not None:
            self._prompts.write(prompt)
            self._prompts.flush()
        if sys.stdin is None or sys.stdin.closed:
            raise EOFError
        line = sys.stdin.buffer.readline(MAX_BYTES + 1)
        if not line:
            raise EOFError
        if len(line) > MAX_BYTES:
            while line and not line.endswith(b"\n"):
                line = sys.stdin.buffer.readline(MAX_BYTES)
            line = bytes(MAX_BYTES + 1)
        return decode(line).rstrip("\r\n")


def is_open_block(text: str) -> bool:
    """Whether a text began with three quotes and has no closing ones yet."""
    begun = text.lstrip()
    return begun.startswith(QUOTES) and (len(begun) < 2 * len(QUOTES) or not begun.rstrip().endswith(QUOTES))


def unquoted(text: str) -> str:
    """A message without the quotes of a block."""
    if not text.lstrip().startswith(QUOTES) or is_open_block(text):
        return text
    return text.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def joined(words: Iterable[str]) -> str:
    """Names for a sentence."""
    return ", ".join(f"`{word}`" for word in words)
