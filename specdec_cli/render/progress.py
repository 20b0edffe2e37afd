"""Progress on stderr, of downloads and other work: a bar on a terminal, a few lines elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from specdec_cli.sources import Progress, SilentProgress
from specdec_cli.wording import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_LINE_SHARE = 0.1
_LINE_EVERY_S = 5.0


def make_progress(quiet: bool = False) -> Progress:
    """Return the progress display that fits stderr, `quiet` and `SPECDEC_NO_PROGRESS`."""
    if quiet or os.environ.get("SPECDEC_NO_PROGRESS"):
        return SilentProgress()
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return BarProgress()
    return LineProgress()


@contextlib.contextmanager
def make_steps(quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """A function to tell what is being done and the share that is done; it shows that where it fits."""
    if quiet or os.environ.get("SPECDEC_NO_PROGRESS"):
        yield lambda _text, _share: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _step_bar() as show:
            yield show
    else:
        yield _step_lines()


@contextlib.contextmanager
def _step_bar() -> Iterator[Callable[[str, float], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(task, description=text, completed=share)


def _step_lines() -> Callable[[str, float], None]:
    """One line for each thing that is begun."""
    shown = [""]

    def show(text: str, _share: float) -> None:
        if text != shown[0]:
            shown[0] = text
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    return show


def _headline(name: str, size: int | None, source: str) -> str:
    return f"{name}: {format_size(size)} from {source}" if size else f"{name}: from {source}"


class LineProgress:
    """Plain lines for logs: at most one per tenth of the file, and at most one in five seconds."""

    def __init__(self) -> None:
        self._name, self._size = "", 0
        self._done, self._shown, self._shown_at_s = 0, 0, 0.0

    def start(self, name: str, size: int | None, source: str) -> None:
        """Print what is fetched, its size and the source."""
        self._name, self._size = name, size or 0
        self._done, self._shown, self._shown_at_s = 0, 0, time.monotonic()
        self.note(_headline(name, size, source))

    def expect(self, size: int) -> None:
        """Lines tell shares from now on."""
        self._size = size

    def advance(self, num_bytes: int, *, kept: bool = False) -> None:
        """Count bytes; print a line when enough bytes and seconds have passed since the last one."""
        self._done += num_bytes
        if kept:
            # Read from the disk: neither speed nor news.
            self._shown, self._shown_at_s = self._done, time.monotonic()
            return
        elapsed_s = time.monotonic() - self._shown_at_s
        if elapsed_s < _LINE_EVERY_S or self._done - self._shown < _LINE_SHARE * self._size:
            return
        rate = (self._done - self._shown) / elapsed_s
        self._shown, self._shown_at_s = self._done, time.monotonic()
        share = f" ({min(100, 100 * self._done // self._size)} %)" if self._size else ""
        self.note(f"{self._name}: {format_size(self._done)}{share}, {format_size(int(rate))}/s")

    def note(self, text: str) -> None:
        """Print one line."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """Show nothing: the command says where the file is."""


class BarProgress:
    """A Rich bar with bytes, rate and time left."""

    def __init__(self) -> None:
        self._console: Console | None = None
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._done = 0

    def start(self, name: str, size: int | None, source: str) -> None:
        """Print what is fetched, its size and the source, and open the bar."""
        # Written before Rich is imported, so that the first line stands at once.
        sys.stderr.write(f"{_headline(name, size, source)}\n")
        sys.stderr.flush()
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        self._console = Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task, self._done = self._bar.add_task("", total=size), 0
        self._bar.start()

    def expect(self, size: int) -> None:
        """Give the bar its length."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=size)

    def advance(self, num_bytes: int, *, kept: bool = False) -> None:
        """Move the bar."""
        self._done += num_bytes
        if self._bar is None or self._task is None:
            return
        if kept:
            # Begins the measurement of speed anew.
            self._bar.reset(self._task, completed=self._done)
        else:
            self._bar.update(self._task, completed=self._done)

    def note(self, text: str) -> None:
        """Print one line, above the bar when there is one."""
        if self._bar is not None and self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def finish(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
