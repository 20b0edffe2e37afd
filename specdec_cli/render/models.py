"""What `specdec models` prints: tables that follow the terminal's width, in a pipe as wide as their text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from specdec_cli.render.terminal import neutralize
from specdec_cli.wording import format_size

if TYPE_CHECKING:
    from rich.console import Console

Row = Sequence[str]


def print_table(columns: Row, rows: Iterable[Row], stream: TextIO, *, right: Sequence[int] = ()) -> None:
    """Write a table: styled and folded to the width on a terminal, elsewhere plain and never cut.

    Args:
        columns: their headings.
        rows: as many cells each.
        stream: where it goes.
        right: numbers of the columns that are flush right.
    """
    cells = [[_line(cell, stream) for cell in row] for row in rows]
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        _print_styled([*columns], cells, stream, right)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in ([*columns], *cells):
        padded = [cell.rjust(width) if number in right else cell.ljust(width) for number, (cell, width) in
                  enumerate(zip(row, widths, strict=True))]  # fmt: skip
        stream.write("  ".join(padded).rstrip() + "\n")


def _print_styled(columns: Row, rows: Sequence[Row], stream: TextIO, right: Sequence[int]) -> None:
    from rich.table import Table
    from rich.text import Text

    from specdec_cli.render.terminal import make_console

    console = make_console(stream)
    widths = _least_widths(columns, rows, right)
    if sum(widths) + 2 * (len(widths) - 1) > console.width:
        _print_stacked(columns, rows, console)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    console.print(table)


def _least_widths(columns: Row, rows: Sequence[Row], right: Sequence[int]) -> list[int]:
    """Of each column, so that no name, no number and hardly a word is broken."""
    from rich.cells import cell_len

    def least(number: int, cells: Sequence[str]) -> int:
        if not number or number in right:
            return min(_LONG_NAME, max(map(cell_len, cells)))
        return min(_LONG_WORD, max((cell_len(word) for cell in cells for word in cell.split()), default=0))

    return [least(number, cells) for number, cells in enumerate(zip(columns, *rows, strict=True))]


def _print_stacked(columns: Row, rows: Sequence[Row], console: Console) -> None:
    """For narrow terminals: each row as a name, and below it what the columns say."""
    from rich.padding import Padding
    from rich.text import Text

    for name, *cells in rows:
        console.print(Text(name, "bold"), soft_wrap=True)
        said = [Text.assemble(f"{column} ", (cell, _STYLES.get(cell, ""))) for column, cell in
                zip(columns[1:], cells, strict=True) if cell]  # fmt: skip
        console.print(Padding(Text(", ").join(said), (0, 0, 0, 2), expand=False))


_LONG_NAME, _LONG_WORD = 44, 12
"""What is longer may be folded: file names, and paths."""

_STYLES = {"yes": "green", "no": "yellow", "unverified": "yellow", "same tokenizer": "green", "different": "red"}


def print_fields(fields: Mapping[str, str], stream: TextIO) -> None:
    """Write names and values below each other; what is empty is left out. Values are never folded: they are copied."""
    shown = {name: value for name, value in fields.items() if value}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        stream.write(f"{name.ljust(width)}  {_line(value, stream)}\n")


def _line(text: str, stream: TextIO) -> str:
    """A text that stays in its line, does nothing to a terminal, and that the stream can take."""
    encoding = stream.encoding or "utf-8"
    return neutralize(" ".join(text.split())).encode(encoding, "replace").decode(encoding)


def pair_row(document: Mapping[str, Any], default: str) -> Row:
    """One pair of the table of all pairs, from its JSON object."""
    installed = document["installed"]
    state = {(True, True): "yes", (True, False): "target", (False, True): "draft"}
    here = state.get((installed["target"], installed["draft"]), "no")
    return (
        f"{document['name']}{' *' if document['name'] == default else ''}",
        size_text(document["size_bytes"]),
        here,
        _fits(document["fits"]),
        _advice(document),
    )


def _advice(document: Mapping[str, Any]) -> str:
    if not document["recommended"]:
        return "no"
    return "yes" if document["verified"] else "unverified"


def size_text(num_bytes: int | None) -> str:
    """A size for a column."""
    return "?" if num_bytes is None else format_size(num_bytes)


def _fits(fits: bool | None) -> str:
    return {True: "yes", False: "no", None: "?"}[fits]


def ratio_text(ratio: float | None) -> str:
    """A draft's cost for a column."""
    return "?" if ratio is None else f"{ratio:.2f}"


def translation_text(translation: Mapping[str, float]) -> str:
    """How well two tokenizers go together."""
    return f"{translation['draft_tokens']:.2f} draft tokens a target token, shared {translation['shared']:.0%}"


def pair_fields(document: Mapping[str, Any]) -> dict[str, str]:
    """A pair as names and values, from its JSON object."""
    memory, ratio = document["memory_bytes"], document["cost_ratio"]
    fit = {True: "fits", False: "more than is free", None: ""}[document["fits"]]
    return {
        "pair": document["name"],
        "note": document["note"],
        "recommended": f"no: {document['reason']}" if document["reason"] else _advice(document),
        "verified": "" if document["verified"] else "no: a file was seen by name only",
        "size": size_text(document["size_bytes"]),
        "memory": "" if memory is None else f"about {format_size(memory)}, {fit}",
        "draft step": "" if ratio is None else f"{ratio_text(ratio)} target steps, by the bytes read",
        "draft tokens": "" if document["draft_tokens"] is None else str(document["draft_tokens"]),
        "from": document["origin"],
    }


def model_fields(document: Mapping[str, Any], label: str) -> dict[str, str]:
    """A model as names and values, from its JSON object."""
    files = document["files"]
    active = f" ({document['active_params']} active)" if document["active_params"] else ""
    fields = {
        label: document["name"],
        "file": files[0]["file"] + (f" and {len(files) - 1} more shards" if len(files) > 1 else ""),
        "size": size_text(document["size_bytes"]),
        "weights": " ".join(filter(None, (document["params"] + active, document["quant"], document["architecture"]))),
        "tokens": "" if document["num_vocab"] is None else str(document["num_vocab"]),
        "license": document["license"] + (" (to be accepted on the hub first)" if document["gated"] else ""),
        "note": document["note"],
        "verified": "" if document["verified"] else "no: it was seen by name only",
        "sha256": files[0]["sha256"] or "" if len(files) == 1 else "",
        "path": document["path"] or "not on this machine",
    }
    sources = {"source" if not number else f"source {number + 1}": text for number, text in
               enumerate(document["sources"])}  # fmt: skip
    return fields | sources


def print_check(document: Mapping[str, Any], stream: TextIO) -> None:
    """Write how two models compare, from the JSON document of `specdec models check`."""
    target, draft = document["target"], document["draft"]
    print_table(("", "target", "draft"), _sides(target, draft), stream)
    if document["differences"]:
        first = f", the first {len(document['differences'])}" if document["num_differences"] > 10 else ""
        stream.write(f"\ndiffering tokens: {document['num_differences']}{first}\n")
        rows = [(str(item["token"]), _quoted(item["target"]), _quoted(item["draft"]), item["role"]) for item in
                document["differences"]]  # fmt: skip
        print_table(("token", "target", "draft", "kind"), rows, stream, right=(0,))
    stream.write("\n")
    verdict = document["verdict"] + (f": {document['reason']}" if document["reason"] else "")
    fit = "fits" if document["fits"] else "more than is free"
    fields = {
        "draft step": f"{document['cost_ratio']:.2f} target steps, by the bytes read",
        "memory": f"about {format_size(document['memory_bytes'])}, {fit}",
        "note": document["note"],
        "verdict": verdict,
    }
    if found := document["translation"]:
        fields["translation"] = (
            f"drafts can be translated: {translation_text(found)};"
            f" a token of the target costs {found['draft_tokens'] * document['cost_ratio']:.2f} target steps to draft"
        )
    print_fields(fields, stream)


def _sides(target: Mapping[str, Any], draft: Mapping[str, Any]) -> list[Row]:
    def tokens(side: Mapping[str, Any], name: str) -> str:
        if side[name] is None:
            return "none"
        adds = "added" if side[f"adds_{name}"] else "not added"
        return f"{side[name]} {side[f'{name}_text']!r}, {adds}"

    templates = target["template_sha256"], draft["template_sha256"]
    second = "none" if templates[1] is None else "the same" if templates[0] == templates[1] else "another one"
    return [
        ("file", Path(target["file"]).name, Path(draft["file"]).name),
        ("size", format_size(target["size_bytes"]), format_size(draft["size_bytes"])),
        ("tokenizer", target["tokenizer"], draft["tokenizer"]),
        ("tokens", str(target["num_vocab"]), str(draft["num_vocab"])),
        ("BOS", tokens(target, "bos"), tokens(draft, "bos")),
        ("EOS", tokens(target, "eos"), tokens(draft, "eos")),
        (
            "chat template",
            "none" if templates[0] is None else "yes",
            second if templates[0] or not templates[1] else "yes",
        ),
    ]


def _quoted(text: str | None) -> str:
    return "none" if text is None else repr(text)
