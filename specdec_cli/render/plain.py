"""The answer for a pipe or a file: the text exactly as it was generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TextIO

from specdec_cli.render.sink import BackgroundSink, TextSink
from specdec_cli.render.terminal import DIM_SGR, RESET_SGR, ColorMode, Thoughts, color_level
from specdec_cli.stats import Comparison, Stats
from specdec_cli.text import Thinking
from specdec_cli.types import Event, Finish, Round, Token


class PlainRenderer:
    """Text to stdout with one newline at its end, the summary to stderr.

    Args:
        stdout: takes the answer.
        stderr: takes the summary; None for none.
        color: the `--color` flag, for the summary.
        stream: write each token as it arrives, not all of them at the end.
        explain: a line for each round before the summary.
        brief: one line in place of the summary.
        thoughts: what becomes of a reasoning model's thoughts; None does not look for them.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO | None,
        *,
        color: ColorMode = "auto",
        stream: bool = True,
        explain: bool = False,
        brief: bool = False,
        thoughts: Thoughts | None = None,
    ) -> None:
        self._brief = brief
        self._thoughts = thoughts
        self._thinking: Thinking | None = None
        self._was_thought = False
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
        self._was_thought = False
        self._thinking = Thinking(opened=bool(info.get("thinking"))) if self._thoughts else None

    def event(self, event: Event) -> None:
        """Write the text of a token, or what was held back until the end."""
        if isinstance(event, (Token, Finish)) and event.text:
            is_draft = isinstance(event, Token) and event.source == "draft"
            parts = [(event.text, False)] if self._thinking is None else self._thinking.push(event.text)
            self._write(parts, is_draft=is_draft)
        elif self._explain and isinstance(event, Round):
            self._rounds.append(event)

    def _write(self, parts: Iterable[tuple[str, bool]], *, is_draft: bool) -> None:
        for text, is_thought in parts:
            if is_thought and self._thoughts == "hide":
                self._note_thought()
                continue
            if self._was_thought:
                # The empty lines between a hidden thought and the answer go with it.
                text = text.lstrip()
                self._was_thought = not text
            if text:
                self._at_line_start = text.endswith("\n")
                self._out.write(self._shown(text, is_draft=is_draft, is_thought=is_thought))

    def _note_thought(self) -> None:
        if not self._was_thought and self._stderr is not None:
            level = color_level(self._stderr, self._color)
            TextSink(self._stderr).write(f"{DIM_SGR[level]}(thinking){RESET_SGR[level]}\n")
        self._was_thought = True

    def _shown(self, text: str, *, is_draft: bool, is_thought: bool) -> str:  # noqa: ARG002
        return text

    def end(self, stats: Stats, finish_reason: str | None, comparison: Comparison | None = None) -> None:
        """End the last line and write the summary."""
        self.end_text()
        if self._stderr is None:
            return
        from specdec_cli.render import summary  # brings Rich, which the answer does not need

        if self._brief:
            text = summary.turn_text(self._stderr, self._color, self._info, stats, finish_reason)
        else:
            text = summary.summary_text(self._stderr, self._color, self._info, stats, finish_reason, comparison)
        if self._explain:
            from specdec_cli.render.explain import explain_text

            text = explain_text(self._rounds) + text
        TextSink(self._stderr).write(self._before_summary() + text)

    def end_text(self) -> None:
        """End the last line of the answer, unless it is ended already."""
        if self._thinking is not None:
            self._write(self._thinking.flush(), is_draft=False)
        if not self._at_line_start:
            self._out.write("\n")
            self._at_line_start = True
        self._out.release()
        self._out.drain()

    def _before_summary(self) -> str:
        return ""
