"""The answer for a pipe or a file: the text exactly as it was generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from specdec_cli.render.sink import BackgroundSink, TextSink
from specdec_cli.render.terminal import ColorMode
from specdec_cli.stats import Comparison, Stats
from specdec_cli.types import Event, Finish, Round, Token


class PlainRenderer:
    """Text to stdout with one newline at its end, the summary to stderr.

    Args:
        stdout: takes the answer.
        stderr: takes the summary; None for none.
        color: the `--color` flag, for the summary.
        stream: write each token as it arrives, not all of them at the end.
        explain: a line for each round before the summary.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO | None,
        *,
        color: ColorMode = "auto",
        stream: bool = True,
        explain: bool = False,
    ) -> None:
        self._out = BackgroundSink(stdout, buffered=not stream)
        self._stderr = stderr
        self._color = color
        self._explain = explain
        self._rounds: list[Round] = []
        self._info: Mapping[str, object] = {}
        self._at_line_start = False

    def start(self, info: Mapping[str, object]) -> None:
        """Begin an answer with these settings."""
        self._info = info
        self._at_line_start = False
        self._rounds = []

    def event(self, event: Event) -> None:
        """Write the text of a token, or what was held back until the end."""
        if isinstance(event, (Token, Finish)) and event.text:
            self._at_line_start = event.text.endswith("\n")
            self._out.write(self._shown(event))
        elif self._explain and isinstance(event, Round):
            self._rounds.append(event)

    def _shown(self, event: Token | Finish) -> str:
        return event.text

    def end(self, stats: Stats, finish_reason: str | None, comparison: Comparison | None = None) -> None:
        """End the last line and write the summary."""
        self.end_text()
        if self._stderr is None:
            return
        from specdec_cli.render.summary import summary_text  # brings Rich, which the answer does not need

        text = summary_text(self._stderr, self._color, self._info, stats, finish_reason, comparison)
        if self._explain:
            from specdec_cli.render.explain import explain_text

            text = explain_text(self._rounds) + text
        TextSink(self._stderr).write(self._before_summary() + text)

    def end_text(self) -> None:
        """End the last line of the answer, unless it is ended already."""
        if not self._at_line_start:
            self._out.write("\n")
            self._at_line_start = True
        self._out.release()
        self._out.drain()

    def _before_summary(self) -> str:
        return ""
