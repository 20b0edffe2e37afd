"""What a stream can show: color or not, and model text that cannot harm a terminal. Does not import Rich by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console

ColorMode = Literal["auto", "always", "never"]
ColorLevel = Literal["none", "mono", "full"]
Thoughts = Literal["show", "hide"]

DRAFT_SGR: dict[ColorLevel, str] = {"none": "", "mono": "\x1b[4m", "full": "\x1b[4;32m"}
DIM_SGR: dict[ColorLevel, str] = {"none": "", "mono": "\x1b[2m", "full": "\x1b[2m"}
RESET_SGR: dict[ColorLevel, str] = {"none": "", "mono": "\x1b[0m", "full": "\x1b[0m"}

# Controls (C0 without tab and newline, DEL, C1), overrides of the writing direction, lone surrogates.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def color_level(stream: TextIO, mode: ColorMode = "auto", environ: Mapping[str, str] = os.environ) -> ColorLevel:
    """How much styling a stream gets.

    Args:
        stream: where the text goes.
        mode: the `--color` flag; anything but "auto" wins over the environment.
        environ: NO_COLOR wins over FORCE_COLOR, and that over TERM=dumb; both count when not empty.

    Returns:
        "full", "mono" (bold and underline but no color: NO_COLOR on a terminal), or "none".
    """
    if mode != "auto":
        return "full" if mode == "always" else "none"
    able = stream.isatty() and environ.get("TERM") != "dumb"
    if environ.get("NO_COLOR"):
        return "mono" if able else "none"
    return "full" if able or environ.get("FORCE_COLOR") else "none"


def make_console(stream: TextIO, mode: ColorMode = "auto") -> Console:
    """A Rich console that follows `color_level`: one for stdout, one for stderr.

    Markup, emoji codes and highlighting are off, so text is shown as it is. A closed pipe raises BrokenPipeError.
    """
    from specdec_cli.render.console import StreamConsole

    return StreamConsole(stream, color_level(stream, mode))


def neutralize(text: str) -> str:
    """Model text with everything that a terminal would obey made visible instead.

    Newline and tab stay, and so do letters of all scripts and emoji.
    """
    return UNSAFE.sub(_visible, text)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else f"<U+{code:04X}>"
