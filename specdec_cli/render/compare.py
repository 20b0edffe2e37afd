"""Two benchmark reports side by side: what changed, and whether it is more than chance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from specdec_cli.render.bench import ALL, Document, Fields, speed, write_lines
from specdec_cli.render.terminal import ColorMode, make_console

_INCOMPARABLE = ("prompts", "max_tokens", "num_repeats", "threads", "kv_type", "gpu_layers", "draft_gpu_layers")


def compare_documents(old: Fields, new: Fields) -> Document:
    """What changed from one report to another, as docs/json.md describes it.

    Settings are matched by name; where each report has one only, these two. A change is within chance when the
    difference of the logarithms is no larger than both intervals allow together (their half widths added in squares).
    """
    pairs = _matched(old["results"], new["results"])
    return {
        "old_date": old.get("date"),
        "warnings": [*_differences(old, new, pairs)],
        "rows": [row for before, after in pairs for row in _rows(before, after, overall_only=len(pairs) > 1)],
    }


def _matched(old: Sequence[Fields], new: Sequence[Fields]) -> list[tuple[Fields, Fields]]:
    if len(old) == len(new) == 1:
        return [(old[0], new[0])]
    known = {result["setting"]: result for result in old}
    return [(known[result["setting"]], result) for result in new if result["setting"] in known]


def _rows(old: Fields, new: Fields, *, overall_only: bool) -> Iterator[Document]:
    names = [name for name in new["parts"] if name in old["parts"] and (name == ALL or not overall_only)]
    for name in sorted(names, key=lambda name: name == ALL):
        before, after = old["parts"][name], new["parts"][name]
        if before["speedup"] and after["speedup"]:
            ratio = after["speedup"] / before["speedup"]
            within = _is_chance(ratio, before["interval"], after["interval"])
            values = {"old": before["speedup"], "new": after["speedup"], "ratio": ratio, "within": within}
            yield {"setting": new["setting"], "category": name, **values}


def _is_chance(ratio: float, *intervals: Sequence[float] | None) -> bool | None:
    """None where an interval is missing."""
    halves = [math.log(interval[1] / interval[0]) / 2 for interval in intervals if interval]
    return abs(math.log(ratio)) <= math.hypot(*halves) if len(halves) == len(intervals) else None


def _differences(old: Fields, new: Fields, pairs: Sequence[tuple[Fields, Fields]]) -> Iterator[str]:
    """What makes the two reports hard to compare."""
    if not pairs:
        yield "the reports have no setting in common"
    for before, after in pairs:
        if before["setting"] != after["setting"]:
            yield f"the setting differs: {before['setting']}, now {after['setting']}"
    for name in ("cpu", "num_cores", "build"):
        if old["machine"].get(name) != new["machine"].get(name):
            yield f"the machine differs: {name} {old['machine'].get(name)}, now {new['machine'].get(name)}"
    for role in ("target", "draft"):
        before, after = (document["models"].get(role) or {} for document in (old, new))
        if (before.get("file"), before.get("sha256")) != (after.get("file"), after.get("sha256")):
            yield f"the {role} model differs: {before.get('file')}, now {after.get('file')}"
    yield from _changed("", {n: old["settings"].get(n) for n in _INCOMPARABLE}, new["settings"])
    yield from _changed("sampling ", old["settings"].get("sampling", {}), new["settings"].get("sampling", {}))
    for name, version in old.get("versions", {}).items():
        if name in ("llama_cpp_python", "llama_cpp") and version != new.get("versions", {}).get(name):
            yield f"{name.replace('_', '-')} differs: {version}, now {new.get('versions', {}).get(name)}"


def _changed(kind: str, old: Fields, new: Fields) -> Iterator[str]:
    for name, value in old.items():
        if name != "seed" and value != new.get(name):
            shown = f": {value}, now {new.get(name)}" if name != "prompts" else ""
            yield f"the {kind}setting `{name}` differs{shown}"


def print_comparison(comparison: Fields, stream: TextIO, color: ColorMode) -> None:
    """Write what changed, and the warnings."""
    console = make_console(stream, color)
    with console.capture() as captured:
        console.print(Text(f"Against the report of {comparison['old_date']}", "bold"))
        if comparison["rows"]:
            console.print(_table(comparison["rows"]))
        for warning in comparison["warnings"]:
            console.print(Text.assemble(("Warning: ", "bold yellow"), warning))
    write_lines(stream, captured.get())


def _table(rows: Sequence[Fields]) -> Table:
    table = Table(box=None, pad_edge=False)
    several = len({row["setting"] for row in rows}) > 1
    for number, column in enumerate(("setting" if several else "category", "old", "new", "new / old", "")):
        table.add_column(column, justify="right" if 0 < number < 4 else "left", overflow="fold")
    for row in rows:
        name = row["setting"] if several else row["category"]
        table.add_row(name, speed(row["old"]), speed(row["new"]), f"{row['ratio']:.3f}", _verdict(row))
    return table


def _verdict(row: Fields) -> Text:
    if row["within"] is None:
        return Text("no interval")
    if row["within"]:
        return Text("within the intervals", "dim")
    return Text("faster", "bold green") if row["ratio"] > 1 else Text("slower", "bold red")
