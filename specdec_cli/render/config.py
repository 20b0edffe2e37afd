"""What `specdec config show` prints: a table, or a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from specdec_cli.render.terminal import ColorMode, make_console, neutralize

if TYPE_CHECKING:
    from rich.table import Table

Origin = Literal["environment", "config", "pair", "default"]


@dataclass(frozen=True, slots=True)
class Value:
    """The value of an option.

    Attributes:
        name: as its flag.
        value: in force when there is no flag; None where something else decides, see `note`.
        origin: what kind of place it comes from.
        where: the variable, file and line, or pair; empty for a default.
        note: what decides in place of a default.
    """

    name: str
    value: Any
    origin: Origin
    where: str = ""
    note: str = ""


def config_document(values: list[Value], path: Path) -> dict[str, Any]:
    """The fields of `specdec config show --json`, apart from `schema`."""
    shown = [{**asdict(value), "value": without_secrets(value.value)} for value in values]
    return {"path": str(path), "exists": path.exists(), "values": shown}


def without_secrets(value: Any) -> Any:
    """A value without passwords and tokens, as addresses of models can have them."""
    from specdec_cli.wording import scrub

    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return scrub(value) if isinstance(value, str) else value


def print_config(values: list[Value], path: Path, stream: TextIO, color: ColorMode = "auto") -> None:
    """Write a line for each value; those that are no defaults stand out. Only a terminal folds them."""
    from rich.text import Text

    console = make_console(stream, color)
    rows = [(value.name, _shown(value), _from(value, path)) for value in values]
    styles = ["dim" if value.origin == "default" else "bold" for value in values]
    if stream.isatty():
        console.print(_table(rows, styles))
    else:
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
        for row, style in zip([_COLUMNS, *rows], ["", *styles], strict=True):
            line = " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            console.print(Text(line, style), soft_wrap=True)
    text = f"{path.name} is {path}" + ("" if path.exists() else ", which is not there yet")
    console.print(Text(text, "dim"), soft_wrap=not stream.isatty())


_COLUMNS = ("option", "value", "from")


def _table(rows: Iterable[Sequence[str]], styles: Iterable[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*(Text(cell, style) for cell in row))
    return table


def _from(value: Value, path: Path) -> str:
    # The folder is told once.
    return value.where.replace(str(path), path.name) or "default"


def _shown(value: Value) -> str:
    if value.value is None:
        return f"({value.note})" if value.note else "-"
    if isinstance(value.value, bool):
        return "true" if value.value else "false"
    texts = value.value if isinstance(value.value, list) else [value.value]
    # A value stays in its line.
    text = ", ".join(str(without_secrets(text)) for text in texts)
    return neutralize(text.replace("\n", "\\n").replace("\t", "\\t"))
