"""The report of `specdec tune` as a table."""

from __future__ import annotations

from typing import TextIO

from rich.table import Table
from rich.text import Text

from specdec_cli.render.terminal import ColorMode, make_console
from specdec_cli.tuning import TuneReport
from specdec_cli.wording import format_size


def print_tune(report: TuneReport, stream: TextIO, color: ColorMode = "auto", *, dry_run: bool = False) -> None:
    """Write what was measured, and what is used from now on."""
    console = make_console(stream, color)
    if report.measurements:
        console.print(_file_table(report))
        console.print(_target_line(report))
    if report.settings:
        console.print(_settings_line(report))
    for label, reason in report.failures:
        console.print(Text(f"{label} could not be made: {reason}", "yellow"))
    if report.is_crowded:
        console.print(Text(f"Warning: {report.reason}; tune again when they are done", "bold yellow"))
        return
    verb = "would use" if dry_run else "from now on"
    console.print(Text.assemble(f"{verb}: ", (report.chosen.label, "bold green"), f" ({report.reason})"))


def _file_table(report: TuneReport) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(("draft", "size", "step", "agreement", "predicted", "at best")):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in report.measurements:
        table.add_row(
            Text(row.label, "bold" if row.label == report.chosen.label else ""),
            format_size(row.size),
            f"{1000 * row.step_s:.1f} ms",
            f"{row.agreement:.3f}",
            _rate(row.rate, report),
            _rate(row.best_rate, report),
        )
    return table


def _rate(rate: float, report: TuneReport) -> str:
    return f"{rate:.1f} tok/s ({rate / (report.baseline_rate or rate):.2f}x)"


def _target_line(report: TuneReport) -> Text:
    times = ", ".join(f"{size}: {1000 * seconds:.0f} ms" for size, seconds in (report.pass_s or {}).items())
    return Text(
        f"target alone {report.baseline_rate or 0:.1f} tok/s; a pass over {times}; "
        f"{report.num_positions} tokens of its own text; {report.wall_s:.0f} s in all"
    )


def _settings_line(report: TuneReport) -> Text:
    return Text("draft steps: " + ", ".join(f"{row.label} {row.gain:.2f}x" for row in report.settings))
