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
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_flag = ctypes.create_string_buffer(2)
_callbacks: set[CodeType] = set()
_num_holds = 0
_is_waiting = False


def callback_from_c(function: Function) -> Function:
    """Mark a function that C code calls: an exception cannot pass through it, so Ctrl-C is not raised inside."""
    _callbacks.add(cast(FunctionType, function).__code__)
    return function


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
    """While active, Ctrl-C ends a running decode or load call within milliseconds; KeyboardInterrupt follows.

    Outside the main thread, where signals cannot be watched, inside another such block, and in a background job, which
    the shell started with SIGINT ignored, it does nothing.
    """
    nothing_to_do = signal.getsignal(signal.SIGINT) in (_on_sigint, signal.SIG_IGN)
    if nothing_to_do or threading.current_thread() is not threading.main_thread():
        yield
        return
    clear_stop()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reader,), daemon=True)
    watcher.start()
    handler = signal.signal(signal.SIGINT, _on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(previous)
        writer.close()
        watcher.join()
        reader.close()
        clear_stop()


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """What is done inside is done whole: the KeyboardInterrupt of `stop_on_sigint` comes at its end.

    A second Ctrl-C does not wait.
    """
    global _num_holds, _is_waiting
    _num_holds += 1
    try:
        yield
    finally:
        _num_holds -= 1
        if _is_waiting and not _num_holds:
            _is_waiting = False
            raise KeyboardInterrupt


def _on_sigint(_signal: int, frame: FrameType | None) -> None:
    global _is_waiting
    request_stop()
    if _num_holds and not _is_waiting:
        _is_waiting = True
        return
    _is_waiting = False
    # Inside a callback the C call notices the flag and its caller raises.
    if frame is None or frame.f_code not in _callbacks:
        raise KeyboardInterrupt


def _watch(reader: socket.socket) -> None:
    while received := reader.recv(64):
        if signal.SIGINT in received:
            request_stop()
