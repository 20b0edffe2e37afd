"""Writing to a stream that may lack characters, or a reader."""

from __future__ import annotations

import codecs
import contextlib
import os
import queue
import select
import threading
from typing import IO, TextIO


class TextSink:
    """A text stream that shows each write at once and fails on no text.

    Args:
        stream: where the text goes; characters that its encoding lacks become "?".
        buffered: hold everything back until `release`.
    """

    def __init__(self, stream: TextIO, *, buffered: bool = False) -> None:
        self._stream = stream
        self._held: list[str] | None = [] if buffered else None

    def write(self, text: str) -> None:
        """Write and flush, or hold back.

        Raises:
            BrokenPipeError: the reader is gone; later writes are dropped silently, at the exit of Python too.
        """
        if self._held is not None:
            self._held.append(text)
            return
        self._put(text)

    def _put(self, text: str) -> None:
        try:
            self._write(text)
            self._stream.flush()
        except BrokenPipeError:
            silence(self._stream)
            raise

    def drain(self) -> None:
        """Everything is written already."""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            self._stream.write(text.encode(encoding, "replace").decode(encoding))

    def release(self) -> None:
        """Write what was held back; later writes are held back again.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        if self._held is None:
            return
        held, self._held = self._held, None
        try:
            self.write("".join(held))
        finally:
            self._held = []


class BackgroundSink(TextSink):
    """A sink whose writes return at once: a slow terminal or a blocked pipe must not hold up decoding.

    A thread writes to the stream's file descriptor, around Python's own buffer, whose lock a blocked write would hold
    until the end of the process. Streams without a descriptor are written to directly.

    Args:
        stream: where the text goes.
        buffered: hold everything back until `release`.
    """

    def __init__(self, stream: TextIO, *, buffered: bool = False) -> None:
        super().__init__(stream, buffered=buffered)
        self._descriptor = _descriptor(stream)
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        self._encoder: codecs.IncrementalEncoder | None = None

    def _put(self, text: str) -> None:
        if self._descriptor is None:
            super()._put(text)
            return
        self._raise_error()
        if self._thread is None:
            self._stream.flush()
            self._thread = threading.Thread(target=self._run, name="output", daemon=True)
            self._thread.start()
        # Each encoder once: some encodings begin with a mark.
        self._encoder = self._encoder or codecs.getincrementalencoder(self._stream.encoding or "utf-8")("replace")
        self._queue.put(self._encoder.encode(text))

    def drain(self) -> None:
        """Wait until everything is written; Ctrl-C interrupts that.

        Raises:
            BrokenPipeError: the reader is gone.
            OSError: it cannot be written.
        """
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            # Waits with a limit let signals through on every platform.
            while not written.wait(0.1):
                pass
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._write_all(item)
            except OSError as error:
                if isinstance(error, BrokenPipeError):
                    silence(self._stream)
                self._error = error

    def _write_all(self, data: bytes) -> None:
        assert self._descriptor is not None
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                # Whoever started this program may have left the pipe in that mode.
                select.select([], [self._descriptor], [])


def _descriptor(stream: TextIO) -> int | None:
    """The stream's file descriptor, where bytes written to it mean the same as text written to the stream."""
    if os.name != "posix":
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def can_encode(stream: TextIO, text: str) -> bool:
    """Whether a stream can write this text as it is."""
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def silence(stream: IO[str]) -> None:
    """Let a stream whose reader is gone write to nowhere.

    Python flushes its streams at exit, and would report the closed pipe once more.
    """
    with contextlib.suppress(OSError, ValueError):
        target = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)
