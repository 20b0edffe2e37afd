"""A text in the user's own editor."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from specdec_cli.cli.prompt import read_file
from specdec_cli.errors import SpecdecError


def editor(environ: Mapping[str, str] = os.environ) -> str | None:
    """The editor that the user named, if any."""
    return next((found for name in ("VISUAL", "EDITOR") if (found := environ.get(name, "").strip())), None)


@contextlib.contextmanager
def _sigint_is_its_own() -> Iterator[None]:
    """Ctrl-C reaches everyone on the terminal: what it means now is for the editor to say.

    A handler that does nothing, because an ignored signal would be ignored by the editor as well.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, lambda _signal, _frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def edited(text: str, command: str) -> str:
    """The text after the editor was left; a newline that editors put at its end is no part of it.

    Raises:
        SpecdecError: the editor cannot be run, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
        path = Path(folder) / "message.md"
        path.write_bytes(text.encode("utf-8", "replace") + b"\n")
        try:
            with _sigint_is_its_own():
                done = subprocess.run([*shlex.split(command), str(path)], check=False)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SpecdecError(f"cannot run the editor `{command}`: {reason}", "set $VISUAL or $EDITOR") from None
        if done.returncode != 0:
            raise SpecdecError(f"the editor `{command}` ended with {done.returncode}; the message is unchanged")
        return read_file(path, "try it again").rstrip("\n")
