"""Where the prompt comes from: the argument, files, a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specdec_cli.errors import UsageError

MAX_BYTES = 1 << 25
"""More than any context holds; reading an endless stream must end."""

_WAYS = 'try `specdec run "question"`, `specdec run -f FILE`, or `command | specdec run "question"`'


def read_prompt(argument: str | None, files: Sequence[Path]) -> str:
    """The whole prompt: piped text first, then the files, then the argument.

    Args:
        argument: the command line's; `-` means standard input only.
        files: read in order; `-` is standard input.

    Raises:
        UsageError: nothing was given, or a file cannot be read.
    """
    from_stdin = argument == "-" or Path("-") in files
    parts = [] if Path("-") in files else [_read_stdin(wanted=from_stdin)]
    parts += [_read_stdin(wanted=True) if path == Path("-") else read_file(path) for path in files]
    if argument is not None and argument != "-":
        parts.append(argument)
    elif not files and not from_stdin and _is_terminal():
        raise UsageError("no prompt", _WAYS)
    prompt = "\n\n".join(part.strip("\n") for part in parts if part.strip())
    if not prompt:
        raise UsageError("the prompt is empty", _WAYS)
    return prompt


def _is_terminal() -> bool:
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()


def _read_stdin(*, wanted: bool) -> str:
    """Standard input when it is a pipe or a file; on a terminal only when asked for by `-`."""
    if sys.stdin is None or sys.stdin.closed or (sys.stdin.isatty() and not wanted):
        return ""
    try:
        return decode(sys.stdin.buffer.read(MAX_BYTES + 1))
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror}") from None


def read_file(path: Path, hint: str = "check the path given to `-f`") -> str:
    """The text of a file.

    Args:
        path: the file.
        hint: what to do where it cannot be read.

    Raises:
        UsageError: it cannot be read, or has far too much in it.
    """
    try:
        with path.open("rb") as stream:
            return decode(stream.read(MAX_BYTES + 1))
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}", hint) from None


def decode(data: bytes) -> str:
    """Text from outside; what is no UTF-8 is replaced.

    Raises:
        UsageError: far too much of it.
    """
    if len(data) > MAX_BYTES:
        raise UsageError(f"the prompt has more than {MAX_BYTES >> 20} MiB", "give a part of it")
    return data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
