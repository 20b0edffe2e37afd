"""Ctrl-C inside a decode call: llama.cpp polls a flag between graph nodes, a watcher thread sets it.

Python's signal handlers wait until a C call returns, which takes seconds while a prompt is read. The C part of
the interpreter's handler, however, writes to a file descriptor at once (`signal.set_wakeup_fd`), and a decode call
releases the interpreter lock, so a thread that reads the descriptor can raise the flag in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import signal
import socket
import sys
import threading
from collections.abc import Iterator

_flag = ctypes.create_string_buffer(2)


def request_stop() -> None:
    """Make running and later decode calls give up, from any thread, until `clear_stop`."""
    _flag[0] = b"\x01"


def clear_stop() -> None:
    """Allow decode calls again."""
    _flag[0] = b"\x00"


def stop_requested() -> bool:
    """Whether decode calls give up."""
    return bool(_flag[0] != b"\x00")


def abort_callback() -> tuple[int, int]:
    """Addresses of a C function `bool (*)(void *)` and of its argument, for `llama_context_params`.

    The function is libc's strlen over a string that is empty until a stop is requested: a Python callback would cost
    1-2 ms a pass, because it is called for every graph node.
    """
    libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
    strlen = ctypes.cast(libc.strlen, ctypes.c_void_p).value
    assert strlen is not None
    return strlen, ctypes.addressof(_flag)


@contextlib.contextmanager
def stop_on_sigint() -> Iterator[None]:
    """While active, Ctrl-C ends a running decode call within milliseconds; KeyboardInterrupt follows as usual.

    Outside the main thread, where signals cannot be watched, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    clear_stop()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reader,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        writer.close()
        watcher.join()
        reader.close()


def _watch(reader: socket.socket) -> None:
    while received := reader.recv(64):
        if signal.SIGINT in received:
            request_stop()
