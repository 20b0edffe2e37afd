"""How far a long measurement is, and how long it still takes: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_SHARE = 0.1
_LINE_EVERY_S = 15.0


class Countdown:
    """Shows steps done, and the time left; use it as a context manager and call it with (done, all).

    It draws only when it is called: a thread that redraws would take time from what is measured.

    Args:
        stream: where it shows.
        title: what is under way.
        quiet: show nothing.
    """

    def __init__(self, stream: TextIO, title: str, *, quiet: bool) -> None:
        self._stream, self._title = stream, title
        self._quiet = quiet or bool(os.environ.get("SPECDEC_NO_PROGRESS"))
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started_s = self._shown_s = time.monotonic()
        self._shown = 0

    def __enter__(self) -> Countdown:
        if not self._quiet and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn(self._title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            console = Console(file=self._stream)
            self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
            self._bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        """So many steps are done."""
        if self._quiet:
            return
        if self._bar is None:
            self._maybe_line(done, total)
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, refresh=True)

    def _maybe_line(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if not done:
            # What came before, a warm-up perhaps, says nothing about the steps.
            self._started_s = self._shown_s = now_s
        if not 0 < done < total or now_s - self._shown_s < _LINE_EVERY_S or done - self._shown < _LINE_SHARE * total:
            return
        self._shown, self._shown_s = done, now_s
        left_s = (now_s - self._started_s) / done * (total - done)
        # Whoever no longer reads must not end the measurement.
        with contextlib.suppress(OSError):
            self._stream.write(f"{self._title}: {done} of {total}, {left_s / 60:.1f} min left\n")
            self._stream.flush()

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
