"""The answer on a terminal: append-only text in which accepted draft tokens stand out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from specdec_cli.render.plain import PlainRenderer
from specdec_cli.render.sink import TextSink
from specdec_cli.render.terminal import (
    DIM_SGR,
    DRAFT_SGR,
    RESET_SGR,
    ColorLevel,
    ColorMode,
    Thoughts,
    color_level,
    neutralize,
)


class LiveRenderer(PlainRenderer):
    """Tokens as they arrive; the draft's are underlined and green, the target's own plain.

    Nothing that was written is ever redrawn, and lines are left to the terminal to wrap.

    Args:
        stdout: takes the answer; on a terminal its control characters are made visible.
        stderr: takes the color legend and the summary; None for neither.
        color: the `--color` flag.
        stream: write each token as it arrives, not all of them at the end.
        explain: a line for each round before the summary.
        brief: one line in place of the summary, and the legend only once.
        thoughts: what becomes of a reasoning model's thoughts: dimmed or hidden; None does not look for them.
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
        super().__init__(stdout, stderr, color=color, stream=stream, explain=explain, brief=brief, thoughts=thoughts)
        self._wants_legend = True
        self._level = color_level(stdout, color)
        self._on_terminal = stdout.isatty()
        # Made once, not by Rich for each token: this runs between two rounds.
        self._open, self._close = DRAFT_SGR[self._level], RESET_SGR[self._level]

    def start(self, info: Mapping[str, object]) -> None:
        """Begin an answer; the legend comes first when there is something to tell apart."""
        super().start(info)
        drafts = self._level != "none" and info.get("drafter") != "none"
        if self._stderr is not None and drafts and self._wants_legend:
            self._wants_legend = not self._brief
            TextSink(self._stderr).write(legend(self._level, color_level(self._stderr, self._color)))

    def _shown(self, text: str, *, is_draft: bool, is_thought: bool) -> str:
        text = neutralize(text) if self._on_terminal else text
        opened = (DIM_SGR[self._level] if is_thought else "") + (self._open if is_draft else "")
        return opened + text + self._close if opened else text

    def _before_summary(self) -> str:
        if self._brief:
            return ""
        both = self._on_terminal and self._stderr is not None and self._stderr.isatty()
        return "\n" if both else ""


def legend(shown: ColorLevel, own: ColorLevel) -> str:
    """One line that explains the styles of the answer.

    Args:
        shown: how much styling the answer has.
        own: how much the legend itself may have.
    """
    name = "underlined green" if shown == "full" else "underlined"
    dim, reset = DIM_SGR[own], RESET_SGR[own]
    return f"{DRAFT_SGR[own]}{name}{reset}{dim}: accepted draft tokens; plain: the target's own{reset}\n"
