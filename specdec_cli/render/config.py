"""What `specdec config show` prints: a table, or a document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from specdec_cli.render.terminal import ColorMode, make_console, neutralize

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
    return {"path": str(path), "exists": path.exists(), "values": [asdict(value) for value in values]}


def print_config(values: list[Value], path: Path, stream: TextIO, color: ColorMode = "auto") -> None:
    """Write a line for each value; those that are no defaults stand out."""
    from rich.table import Table
    from rich.text import Text

    console = make_console(stream, color)
    table = Table(box=None, pad_edge=False)
    for column in ("option", "value", "from"):
        table.add_column(column, overflow="fold")
    for value in values:
        style = "dim" if value.origin == "default" else "bold"
        table.add_row(*(Text(cell, style) for cell in (value.name, _shown(value), _from(value, path))))
    console.print(table)
    console.print(Text(f"{path.name} is {path}" + ("" if path.exists() else ", which is not there yet"), "dim"))


def _from(value: Value, path: Path) -> str:
    # The folder is told once.
    return value.where.replace(str(path), path.name) or "default"


def _shown(value: Value) -> str:
    if value.value is None:
        return f"({value.note})" if value.note else "-"
    if isinstance(value.value, bool):
        return "yes" if value.value else "no"
    texts = value.value if isinstance(value.value, list) else [value.value]
    return neutralize(", ".join(map(str, texts)))
