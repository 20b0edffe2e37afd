"""A model file in another format, made by llama.cpp's own quantizer in a child process: whole, or not there at all.

A process of its own, because the quantizer aborts on what it does not know, and because Ctrl-C cannot reach into it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from specdec_cli.child import failure, forbid_core_dump
from specdec_cli.errors import BackendError

TIME_LIMIT_S = 1800.0
"""Half a billion weights take 2-4 s on two cores."""

TEMPORARY = ".part"
"""How a file that is not whole yet ends; what an ended process left behind is found by it."""

Command = Callable[[Path, Path, str, bool, int], Sequence[str]]
"""Source, destination, format, whether pure, threads -> the child's command line."""


def requantize(
    source: Path, destination: Path, ftype: str, *, pure: bool, threads: int, command: Command | None = None
) -> None:
    """Write `source` in another format to `destination`, which appears when it is whole.

    Args:
        source: a GGUF file.
        destination: its folder exists.
        ftype: a name of `specdec_cli.llama.FORMATS`.
        pure: the same format for every matrix.
        threads: how many to use.
        command: builds the child's command line; exit code 0 is success.

    Raises:
        BackendError: the quantizer failed or crashed.
        OSError: the finished file could not be put in its place.
    """
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}{TEMPORARY}")
    try:
        arguments = (command or _child_command)(source.absolute(), temporary.absolute(), ftype, pure, threads)
        if reason := failure(arguments, TIME_LIMIT_S, str(destination.parent)):
            raise BackendError(f"the quantizer {reason}")
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(destination)
    finally:
        temporary.unlink(missing_ok=True)


def _child_command(source: Path, destination: Path, ftype: str, pure: bool, threads: int) -> Sequence[str]:
    module = [sys.executable, "-m", "specdec_cli.requantize"]
    return [*module, str(source), str(destination), ftype, str(int(pure)), str(threads)]


def _child_main(arguments: Sequence[str]) -> int:
    """`SOURCE DESTINATION FORMAT 0|1 THREADS`: what `requantize` runs."""
    from specdec_cli.llama import quantize

    forbid_core_dump()
    source, destination, ftype, pure, threads = arguments
    try:
        quantize(Path(source), Path(destination), ftype, pure=pure == "1", threads=int(threads))
    except BackendError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_child_main(sys.argv[1:]))
