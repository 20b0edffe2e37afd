"""A child process for what may crash inside llama.cpp: it dies instead of this one, and what it died of is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def failure(command: Sequence[str], time_limit_s: float, folder: str) -> str:
    """Run a command to its end.

    Args:
        command: the program and its arguments.
        time_limit_s: seconds after which it is killed; it is killed too when this call is interrupted.
        folder: the directory it runs in.

    Returns:
        How it failed, in words; empty when it did not.
    """
    try:
        code, errors = _run(command, time_limit_s, folder, os.environ | {"PYTHONPATH": python_path()})
    except subprocess.TimeoutExpired:
        return f"did not answer within {time_limit_s:g} s"
    except OSError as error:
        return f"could not be started: {error}"
    return _ending(code, errors.decode("utf-8", "replace"))


def python_path() -> str:
    """`PYTHONPATH` for a child in another directory: what this process can import, the child can import all the same.

    Its own current directory must not be the user's, because Python would import modules from there.
    """
    return os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)


def _run(command: Sequence[str], time_limit_s: float, folder: str, environment: dict[str, str]) -> tuple[int, bytes]:
    """Exit code and standard error of a process that is gone when this returns or raises."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=null, stdout=null, stderr=pipe, cwd=folder, env=environment) as child:
        try:
            _, errors = child.communicate(timeout=time_limit_s)
        except BaseException:
            # subprocess.run would not wait for it after Ctrl-C.
            child.kill()
            child.wait()
            raise
        return child.returncode, errors


def _ending(code: int, errors: str) -> str:
    if code == 0:
        return ""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
    last_line = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    return f"ended with code {code}" + (f": {last_line}" if last_line else "")


def forbid_core_dump() -> None:
    """Called by the child: its crash is expected, and a core dump would be as large as the model."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
