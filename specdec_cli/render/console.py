"""Rich's console with this program's rules."""

from __future__ import annotations

from io import TextIOWrapper
from typing import TextIO

from rich.console import Console

from specdec_cli.render.sink import silence
from specdec_cli.render.terminal import ColorLevel


class StreamConsole(Console):
    """A console on one stream; text is literal, a closed pipe is the caller's to handle.

    Args:
        stream: where it prints.
        level: how much styling it uses.
    """

    def __init__(self, stream: TextIO, level: ColorLevel) -> None:
        if isinstance(stream, TextIOWrapper):
            # A character that the encoding lacks must not cost the table.
            stream.reconfigure(errors="replace")
        super().__init__(
            file=stream,
            force_terminal=level != "none",
            color_system=None if level == "none" else "standard",  # 16 colors: they follow the user's own palette
            no_color=level != "full",
            force_jupyter=False,
            markup=False,
            emoji=False,
            highlight=False,
        )

    def on_broken_pipe(self) -> None:
        """Called by Rich while it handles the BrokenPipeError: silence the stream, raise it again.

        Raises:
            BrokenPipeError: always; Rich alone would exit the program.
        """
        silence(self.file)
        raise  # noqa: PLE0704
