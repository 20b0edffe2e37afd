"""Lines edited on a terminal: history, several lines, completion, the keys of the user's other programs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from specdec_cli.cli.lines import CONTINUATION, PROMPT, is_open_block, unquoted

Complete = Callable[[str], Iterable[tuple[str, int]]]
"""From the text before the cursor to what may stand there, each with how many characters it replaces."""

_EDITING_MODE = re.compile(r"^\s*set\s+editing-mode\s+(vi|emacs)\b", re.MULTILINE | re.IGNORECASE)
_MAX_INPUTRC_BYTES = 1 << 20


class LineEditor:
    """Reads messages from the terminal; see `specdec_cli.cli.lines.Reader`.

    Args:
        history: the file of earlier messages; None keeps them for this time only.
        complete: what may be typed.
    """

    def __init__(self, history: Path | None, complete: Complete) -> None:
        # A terminal that does not answer the question for the cursor's place would make us wait, and warn.
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUATION,
            history=_history(history),
            completer=_Completer(complete),
            complete_while_typing=False,
            key_bindings=_key_bindings(),
            vi_mode=wants_vi(),
            enable_suspend=True,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            output=create_output(_terminal()),
        )

    def read(self, default: str = "") -> str:
        """The next message."""
        return unquoted(_with_characters(self._session.prompt(default=default)))


def _with_characters(text: str) -> str:
    """The text with bytes that the locale's encoding lacks, which come as surrogates, read as UTF-8 or replaced."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")


class _Completer(Completer):
    """Completions from a function."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """What may stand at the cursor."""
        del complete_event
        for text, num_replaced in self._complete(document.text_before_cursor):
            yield Completion(text, -num_replaced)


class _PrivateHistory(FileHistory):
    """A history file that only its owner reads; where it cannot be written, nothing is kept."""

    def load_history_strings(self) -> Iterable[str]:
        """The messages, latest first."""
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append a message."""
        try:
            path = Path(os.fsdecode(self.filename))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            super().store_string(string)
        except OSError:
            return


def _history(path: Path | None) -> History:
    return InMemoryHistory() if path is None else _PrivateHistory(str(path))


def _terminal() -> TextIO | None:
    """Where prompts go: not to stdout, which may be a file that takes the answers alone."""
    for stream in (sys.stderr, sys.stdout):
        if stream is not None and stream.isatty():
            return stream
    try:
        return Path("/dev/tty").open("w", encoding="utf-8")
    except OSError:
        return sys.stderr


def wants_vi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the user's readline settings ask for vi keys."""
    try:
        path = Path(environ.get("INPUTRC") or Path("~/.inputrc").expanduser())
        with path.open("rb") as file:
            text = file.read(_MAX_INPUTRC_BYTES).decode("utf-8", "replace")
    except (OSError, RuntimeError):
        return False
    modes = _EDITING_MODE.findall(text)
    return bool(modes) and modes[-1].lower() == "vi"


def _key_bindings() -> KeyBindings:
    keys = KeyBindings()
    typing: Any = has_focus(DEFAULT_BUFFER)

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        """Send, unless a block is open."""
        buffer = event.current_buffer
        if is_open_block(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        """Alt-Enter: another line."""
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", filter=typing)
    @keys.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        """Clear what was typed; with nothing there, tell the program."""
        if event.app.current_buffer.text:
            event.app.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys
