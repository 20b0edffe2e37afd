"""Make the pictures of the README from what the program has written.

    specdec run --json --compare "Name the planets" > run.jsonl
    specdec bench --json > bench.json
    python docs/make_pictures.py --run run.jsonl --bench bench.json

`--run -` reads standard input, so that a live answer can be piped in. Either picture can be made alone.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from specdec_cli.render import summary
from specdec_cli.render.bench import read_document
from specdec_cli.render.live import LiveRenderer
from specdec_cli.render.plot import check_plot, save_plot
from specdec_cli.stats import Comparison, NearTie, Stats
from specdec_cli.types import Finish, Token

FOLDER = Path(__file__).with_name("pictures")
WIDTH = 96
_NEAR_TIE_FIELDS = ("position", "texts", "logits", "noise")


class _Terminal(io.StringIO):
    """Takes what the renderer writes to stdout and stderr, in order."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        """The renderer styles its text for a terminal only."""
        return True


def run_picture(lines: Iterable[str], command: str, width: int = WIDTH) -> str:
    """SVG of an answer as a terminal shows it, with the summary below.

    Args:
        lines: of `specdec run --json`.
        command: shown above it; may be empty.
        width: columns.
    """
    records = [json.loads(line) for line in lines if line.strip()]
    start, end = (next(record for record in records if record["type"] == kind) for kind in ("start", "end"))
    # The renderer asks the surroundings: for the width, and what this process, not that one, has used.
    os.environ.update(COLUMNS=str(width), TERM="xterm-256color")
    summary.peak_memory_bytes = lambda: end["peak_memory_bytes"]
    terminal = _Terminal()
    renderer = LiveRenderer(terminal, terminal, color="always")
    renderer.start(start)
    shown = ""
    for record in records:
        if record["type"] == "token":
            renderer.event(Token(record["id"], record["source"], record["text"]))
            shown += record["text"]
    renderer.event(
        Finish(end["reason"], end["text"][len(shown) :]) if end["reason"] != "interrupted" else Finish("eog")
    )
    renderer.end(_stats(end), end["reason"], _comparison(end["comparison"]))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="standard")
    if command:
        console.print(Text(f"$ {command}", "bold"))
    console.print(Text.from_ansi(terminal.getvalue()))
    return console.export_svg(title="specdec", theme=MONOKAI)


def _stats(record: Mapping[str, Any]) -> Stats:
    names = [field.name for field in fields(Stats) if field.name in record]
    return Stats(**{name: record[name] for name in names})


def _comparison(record: Mapping[str, Any] | None) -> Comparison | None:
    if record is None:
        return None
    tie = record["near_tie"]
    near_tie = NearTie(**{name: tie[name] for name in _NEAR_TIE_FIELDS}) if tie else None
    return Comparison(_stats(record["speculative"]), _stats(record["baseline"]), record["agree"], near_tie)


def main(arguments: list[str]) -> int:
    """Write the pictures that were asked for; the exit code."""
    parser = argparse.ArgumentParser(description="Make docs/pictures from recorded output.")
    parser.add_argument("--run", metavar="FILE", help="JSON Lines of `specdec run --json`, - for standard input")
    parser.add_argument("--command", default="", help="command line to show above the answer")
    parser.add_argument("--bench", metavar="FILE", type=Path, help="document of `specdec bench --json`")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=FOLDER, help="where the pictures go")
    parser.add_argument("--width", metavar="N", type=int, default=WIDTH, help="columns of the terminal")
    given = parser.parse_args(arguments)
    if not given.run and not given.bench:
        parser.error("give --run, --bench or both")
    given.out.mkdir(parents=True, exist_ok=True)
    if given.run:
        text = sys.stdin.read() if given.run == "-" else Path(given.run).read_text(encoding="utf-8")
        picture = run_picture(text.splitlines(), given.command, given.width)
        (given.out / "run.svg").write_text(picture, encoding="utf-8")
    if given.bench:
        chart = given.out / "bench.svg"
        check_plot(chart)
        save_plot(read_document(given.bench, "--bench"), chart)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
