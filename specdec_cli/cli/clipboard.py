"""The platform's clipboard, by its own tools or by the terminal."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import TextIO

from specdec_cli.errors import SpecdecError

_TIMEOUT_S = 5
_MAX_OSC_BYTES = 74_994
"""What terminals take at most in one sequence."""


def copy(text: str, terminal: TextIO, environ: Mapping[str, str] = os.environ) -> str:
    """Put a text on the clipboard.

    Args:
        text: what to copy.
        terminal: asked to do it where there is no tool.
        environ: says which display there is.

    Returns:
        What was done.

    Raises:
        SpecdecError: nothing could.
    """
    data = text.encode("utf-8", "replace")
    failed = ""
    for command in _tools(environ):
        if shutil.which(command[0]):
            if _ran(command, data):
                return f"copied by {command[0]}"
            failed += f"`{command[0]}` failed; "
    if terminal.isatty() and environ.get("TERM") != "dumb" and len(data) <= _MAX_OSC_BYTES:
        terminal.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
        terminal.flush()
        return f"{failed}sent to the terminal's clipboard (OSC 52); not every terminal takes it"
    message = f"{failed}no other way to the clipboard was found" if failed else "no way to the clipboard was found"
    raise SpecdecError(message, "install xclip, xsel or wl-clipboard, or use `/save FILE`")


def _tools(environ: Mapping[str, str]) -> Iterator[list[str]]:
    yield ["pbcopy"]
    if environ.get("WAYLAND_DISPLAY"):
        yield ["wl-copy"]
    if environ.get("DISPLAY"):
        yield ["xclip", "-selection", "clipboard"]
        yield ["xsel", "--clipboard", "--input"]
    yield ["clip.exe"]


def _ran(command: list[str], data: bytes) -> bool:
    if command[0] == "clip.exe":
        data = data.decode().encode("utf-16-le")
    try:
        # Some of them stay behind to serve the text: they must not hold our streams.
        done = subprocess.run(
            command, input=data, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
