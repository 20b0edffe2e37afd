"""A child process for what may crash inside llama.cpp: it dies instead of this one, and what it died of is told."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_SOURCE_FOLDER = re.compile(r"^\S*/(?=[^/\s]+:\d+: )")
_MAX_WORDS = 200


def failure(command: Sequence[str], time_limit_s: float, folder: str) -> str:
    """Run a command to its end.

    Args:
        command: the program and its arguments.
        time_limit_s: seconds after which it is killed; it is killed too when this call is interrupted.
        folder: the directory it runs in.

    Returns:
        How it failed, in words; empty when it did not.
    """
    # With a backtrace a debugger would be started, and its lines would hide llama.cpp's own.
    environment = os.environ | {"PYTHONPATH": python_path(), "GGML_NO_BACKTRACE": "1"}
    try:
        code, errors = _run(command, time_limit_s, folder, environment)
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
    last_line = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    # llama.cpp names its own source file by the path on the machine where it was built.
    words = f": {_SOURCE_FOLDER.sub('', last_line)[:_MAX_WORDS]}" if last_line else ""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}{words}"
    return f"ended with code {code}{words}"


def forbid_core_dump() -> None:
    """Called by the child: its crash is expected, and a core dump would be as large as the model."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(num_bytes: int) -> None:
    """Called by the child: a request for more is refused to it, and does not take the memory of others.

    Args:
        num_bytes: of its own data; files mapped into memory do not count.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))
