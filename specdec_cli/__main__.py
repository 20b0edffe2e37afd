"""The `specdec` command, and `python -m specdec_cli`."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import sys
from pathlib import Path
from typing import Any

_NUM_STREAMS = 3
_MANY_OBJECTS = 100_000


def main() -> None:
    """Run the command line and exit with its code; Ctrl-C counts from the first import on."""
    _prepare_streams()
    # Imports make many objects and few cycles: the collector would pass over them a dozen times, a tenth of a start.
    gc.set_threshold(_MANY_OBJECTS)
    try:
        from specdec_cli.cli.app import invoke

        code = invoke(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted\n")
        code = 130
    if code == 130:
        # Everything is said and flushed: whoever pressed Ctrl-C need not wait for the interpreter to take itself apart.
        sys.stderr.flush()
        os._exit(code)
    # What is left goes with the process; nobody need look for cycles in it.
    gc.freeze()
    sys.exit(code)


class _Messages(io.TextIOWrapper):
    """Standard error: what cannot be written is lost, and nothing else may be."""

    def write(self, text: str) -> int:
        """Write what can be written."""
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write out what can be written."""
        with contextlib.suppress(OSError):
            super().flush()


class _Closed(io.TextIOBase):
    """A standard output that the parent closed: whoever has an answer for it must not believe it written."""

    encoding = "utf-8"

    def write(self, text: str) -> int:  # noqa: ARG002
        """Fail."""
        raise OSError(errno.EBADF, "standard output is closed")


def _prepare_streams() -> None:
    """A stream that the parent closed is None; no other file may take its number."""
    if sys.stdout is None or sys.stderr is None:
        while os.open(os.devnull, os.O_RDWR) < _NUM_STREAMS - 1:
            continue
    if sys.stdout is None:
        sys.stdout = _Closed()
    stream: Any = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - for the life of the process
    sys.stderr = _Messages(stream.detach(), stream.encoding, stream.errors, "\n", line_buffering=True)


if __name__ == "__main__":
    main()
