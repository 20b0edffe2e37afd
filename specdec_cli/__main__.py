"""The `specdec` command, and `python -m specdec_cli`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code; Ctrl-C counts from the first import on."""
    try:
        from specdec_cli.cli.app import invoke

        code = invoke(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted\n")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
