"""Chat templates are code from a download: rendered in a sandbox, in a child process with bounds on time and memory.

Jinja's sandbox keeps a template from reaching anything, not from filling the memory or running for ever: `'x' * 10**10`
and `10**10**10` are single operations that nothing in their own process can stop, and hashing a deeply nested tuple
overflows the C stack. Bounds put around each operator, method and filter would have to be complete; a child that may be
killed is. It starts while the models load and stays for the next turn, so that a conversation costs a millisecond, and
it runs the plain sandbox, so that ordinary templates come out as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from specdec_cli.child import python_path
from specdec_cli.errors import ModelLoadError, TemplateRefusedError

CPU_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 1 << 30
MAX_CHARS = 1 << 25
_MAX_SOURCE = 1 << 20
# For platforms that cannot count computing time, and for machines that are very busy.
_LIMIT_S = 20.0
_START_LIMIT_S = 60.0
_POLL_S = 0.05
_HINT = "`specdec run --raw` completes bare text with it"
# What the interpreter and the clock need; no access token is among it.
_VARIABLES = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "LANG", "LC_ALL")


class _Worker:
    """The child process."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        environment |= {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"}
        limits = map(str, (MEMORY_LIMIT_BYTES, CPU_LIMIT_S, MAX_CHARS))
        pipe = subprocess.PIPE
        # In a session of its own the terminal's Ctrl-C does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specdec_cli.template_worker", *limits], stdin=pipe, stdout=pipe,
            stderr=subprocess.DEVNULL, env=environment, cwd=Path(sys.executable).anchor, start_new_session=True,
        )  # fmt: skip
        self._killed_for = ""
        self.num_answers = -1

    def ask(self, request: bytes) -> bytes:
        """The answer to one request; empty when the process is gone, see `ending`."""
        if self.num_answers < 0:
            # Its first line says that it is there.
            self._exchange(b"", _START_LIMIT_S)
        return self._exchange(request, _LIMIT_S)

    def _exchange(self, request: bytes, limit_s: float) -> bytes:
        line = b""
        with self._watched(limit_s), contextlib.suppress(OSError):
            self._stdin.write(request)
            self._stdin.flush()
            line = self._stdout.readline()
        self.num_answers += bool(line)
        return line

    def ending(self) -> str:
        """Why there was no answer; empty when the process was ended from outside or never began."""
        code = self._process.wait()
        if code == -getattr(signal, "SIGPROF", 0):
            return f"it takes more than {CPU_LIMIT_S:g} s"
        crashes = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
        crashed = next((name for name in crashes if code == -getattr(signal, name, 0)), "")
        return self._killed_for or (f"it crashes its process ({crashed})" if crashed else "")

    @property
    def _stdin(self) -> IO[bytes]:
        return cast(IO[bytes], self._process.stdin)

    @property
    def _stdout(self) -> IO[bytes]:
        return cast(IO[bytes], self._process.stdout)

    @contextlib.contextmanager
    def _watched(self, limit_s: float) -> Iterator[None]:
        """Kill the process when it takes too long, or more memory than the platform held it to."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done, limit_s), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _watch(self, done: threading.Event, limit_s: float) -> None:
        began_s = time.monotonic()
        while not done.wait(_POLL_S):
            if time.monotonic() - began_s > limit_s:
                self._killed_for = f"it takes more than {limit_s:g} s"
            elif _memory(self._process.pid) > MEMORY_LIMIT_BYTES:
                self._killed_for = "it takes too much memory"
            if self._killed_for:
                self._process.kill()
                return

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        for stream in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                stream.close()
        self._process.wait()


def _memory(pid: int) -> int:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


_worker: _Worker | None = None
_lock = threading.Lock()


def prepare() -> None:
    """Start the child process, so that it is there when the models are; what goes wrong comes to light in `render`."""
    with _lock, contextlib.suppress(OSError):
        _start()


def _start() -> _Worker:
    global _worker
    if _worker is None:
        _worker = _Worker()
    return _worker


def stop() -> None:
    """End the child process; the next template starts another."""
    global _worker
    if _worker is not None:
        _worker.close()
        _worker = None


atexit.register(stop)


def render(source: str, variables: Mapping[str, Any]) -> str:
    """What a template writes.

    Args:
        source: the template.
        variables: what it is given; JSON values.

    Raises:
        TemplateRefusal: it refuses these messages, or is no template.
        ModelLoadError: it fails otherwise, takes too much time or memory, or cannot be rendered here.
    """
    if len(source) > _MAX_SOURCE:
        raise ModelLoadError(f"the model's chat template is too large: {len(source)} characters", _HINT)
    answer = _ask(json.dumps({"template": source, "variables": variables}).encode() + b"\n")
    if "error" in answer:
        kind = TemplateRefusedError if answer["refuses"] else ModelLoadError
        raise kind(f"the model's chat template fails: {answer['error']}", _HINT)
    return str(answer["text"])


def _ask(request: bytes) -> dict[str, Any]:
    with _lock:
        while True:
            try:
                worker = _start()
            except OSError as error:
                raise ModelLoadError(f"no process for the chat template: {error.strerror}", _HINT) from None
            was_idle = worker.num_answers > 0
            try:
                line = worker.ask(request)
                reason = "" if line else worker.ending()
            except BaseException:
                # After Ctrl-C nobody would read its answer.
                stop()
                raise
            if line:
                return cast(dict[str, Any], json.loads(line))
            stop()
            # A child that was there for long may have been ended by someone else: another one is asked.
            if reason or not was_idle:
                raise ModelLoadError(f"the model's chat template was stopped: {reason or 'its process ends'}", _HINT)
