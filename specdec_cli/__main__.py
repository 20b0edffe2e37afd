"""The `specdec` command, and `python -m specdec_cli`."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command line and exit with its code; Ctrl-C counts from the first import on."""
    _replace_closed_streams()
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
    sys.exit(code)


def _replace_closed_streams() -> None:
    """A stream that the parent closed is None; what goes there is lost, and nothing else may be."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


if __name__ == "__main__":
    main()
