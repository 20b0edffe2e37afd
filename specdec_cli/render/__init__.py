"""How the events of an answer are shown: live on a terminal, plain in a pipe, as JSON Lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

from specdec_cli.render.terminal import ColorMode, Thoughts, color_level

if TYPE_CHECKING:  # these bring NumPy, which a command that only prints a table or an error can do without
    from specdec_cli.stats import Comparison, Stats
    from specdec_cli.types import Event

__all__ = ["ColorMode", "Renderer", "Thoughts", "make_renderer"]


class Renderer(Protocol):
    """Shows one answer after the other: `start`, an `event` each, perhaps `end_text`, `end`.

    Every method raises BrokenPipeError when the reader of the output is gone; what is written after that is dropped.
    """

    def start(self, info: Mapping[str, object]) -> None:
        """Begin an answer with these settings (the fields of the `start` line in docs/json.md)."""

    def event(self, event: Event) -> None:
        """Show the next event."""

    def end_text(self) -> None:
        """The text of the answer is complete; something else may be shown before `end`."""

    def end(self, stats: Stats, finish_reason: str | None, comparison: Comparison | None = None) -> None:
        """Complete the answer; `finish_reason` is that of the `Finish` event, or "interrupted"."""


def make_renderer(
    *,
    stdout: TextIO,
    stderr: TextIO,
    color: ColorMode = "auto",
    json: bool = False,
    quiet: bool = False,
    stream: bool = True,
    explain: bool = False,
    brief: bool = False,
    thoughts: Thoughts | None = None,
) -> Renderer:
    """The renderer that fits the streams and the flags.

    Args:
        stdout: takes the answer or the JSON Lines, and nothing else.
        stderr: takes the color legend and the summary.
        color: the `--color` flag.
        json: JSON Lines; each line is written at once whatever `stream` says.
        quiet: nothing on stderr.
        stream: write tokens as they arrive, not all of them at the end.
        explain: before the summary, a line for each round; JSON has these numbers anyway.
        brief: one line in place of the summary.
        thoughts: what becomes of a reasoning model's thoughts; None does not look for them.
    """
    # Each renderer is imported where it is needed: a pipe or JSON should not pay for the terminal's.
    if json:
        from specdec_cli.render.jsonl import JsonRenderer

        return JsonRenderer(stdout)
    notes = None if quiet else stderr
    if stdout.isatty() or color_level(stdout, color) != "none":
        from specdec_cli.render.live import LiveRenderer

        return LiveRenderer(stdout, notes, color=color, stream=stream, explain=explain, brief=brief, thoughts=thoughts)
    from specdec_cli.render.plain import PlainRenderer

    return PlainRenderer(stdout, notes, color=color, stream=stream, explain=explain, brief=brief, thoughts=thoughts)
