"""A word on the terminal while something takes a moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TextIO

_ERASE_LINE = "\r\x1b[2K"


@contextlib.contextmanager
def status(stream: TextIO, text: str, *, quiet: bool) -> Iterator[None]:
    """Show `text` on a terminal until the block ends; nothing elsewhere."""
    shown = not quiet and stream.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        stream.write(f"{text} …")
        stream.flush()
    try:
        yield
    finally:
        if shown:
            stream.write(_ERASE_LINE)
            stream.flush()
