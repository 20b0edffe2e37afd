"""Keys that are pressed while an answer is written: not shown, and kept for the next prompt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def unseen_keys(terminal: TextIO | None) -> Iterator[None]:
    """While active, a terminal does not echo what is typed, and keeps it, also after Ctrl-C.

    Args:
        terminal: the program's standard input; nothing happens where it is something else.
    """
    if terminal is None or terminal.closed or not terminal.isatty() or sys.platform == "win32":
        yield
        return
    import termios

    number = terminal.fileno()
    try:
        before = termios.tcgetattr(number)
        changed = [*before]
        changed[3] = before[3] & ~termios.ECHO | termios.NOFLSH
        # At once: neither wait for output, nor throw away what was typed ahead.
        termios.tcsetattr(number, termios.TCSANOW, changed)
    except termios.error:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(number, termios.TCSANOW, before)
