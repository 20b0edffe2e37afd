"""Charts of a benchmark report; the only module that imports matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.render.bench import ALL, Fields, chosen_result, headline

SUFFIXES = (".png", ".svg")
_BLUE, _GREEN, _GRAY = "#3465a4", "#4e9a06", "#888a85"
_MAX_POSITIONS = 16


_TITLE_WIDTH = 110


def check_plot(path: Path) -> None:
    """See that a chart can be made later, before anything is measured.

    Raises:
        UsageError: another kind of file, or matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot makes {' or '.join(SUFFIXES)} files, not `{path}`", "give the file such a name")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed", f"{sys.executable} -m pip install matplotlib"
        )


def save_plot(document: Fields, path: Path) -> None:
    """Speed-up by category, speed against K when lengths were tried, acceptance by position.

    Args:
        document: the report.
        path: a .png or .svg file.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    result, lengths = chosen_result(document), _lengths(document["results"])
    rates = result["parts"][ALL]["acceptance_by_position"][:_MAX_POSITIONS]
    panels = 1 + bool(lengths) + bool(rates)
    figure = Figure(figsize=(4.2 * panels, 3.6), layout="constrained")
    axes = iter(figure.subplots(1, panels, squeeze=False)[0])
    _speedups(next(axes), result)
    if lengths:
        _speed_by_length(next(axes), lengths)
    if rates:
        _acceptance(next(axes), rates)
    # Long file names would be cut off at both sides.
    figure.suptitle("\n".join(textwrap.wrap(headline(document), _TITLE_WIDTH)), fontsize="small")
    # Without a date the same report makes the same file.
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _lengths(results: Sequence[Fields]) -> list[tuple[int, float, Fields]]:
    """(K, baseline's tok/s, part) of the results that differ from one another in nothing but K."""
    groups: dict[tuple[str, float], list[tuple[int, float, Fields]]] = {}
    for result in results:
        part, num = result["parts"][ALL], result["num_draft_tokens"]
        if num is not None:
            group = groups.setdefault((result["drafter"], result["draft_confidence"]), [])
            group.append((num, part["baseline_tokens_per_s"], part))
    largest = max(groups.values(), key=len, default=[])
    return sorted(largest, key=lambda item: item[0]) if len(largest) > 1 else []


def _speedups(axes: Any, result: Fields) -> None:
    names = [*(name for name in result["parts"] if name != ALL), ALL]
    parts = [result["parts"][name] for name in names]
    means = [part["speedup"] or 0.0 for part in parts]
    ends = [part["interval"] or (mean, mean) for part, mean in zip(parts, means, strict=True)]
    errors = [
        [m - e[0] for m, e in zip(means, ends, strict=True)],
        [e[1] - m for m, e in zip(means, ends, strict=True)],
    ]
    colors = [_GREEN if name == ALL else _BLUE for name in names]
    axes.bar(range(len(names)), means, yerr=errors, color=colors, capsize=3)
    # An interval that says nothing must not make the bars too small to see.
    axes.set_ylim(0, 1.7 * max(1.0, *means))
    axes.axhline(1.0, color=_GRAY, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(names)), names, rotation=30)
    _label(axes, f"speed-up, {result['setting']}", "", "times the baseline (95 %)")


def _speed_by_length(axes: Any, lengths: Sequence[tuple[int, float, Fields]]) -> None:
    numbers = [num for num, _, _ in lengths]
    axes.plot(numbers, [part["tokens_per_s"] for _, _, part in lengths], "o-", color=_BLUE, label="speculative")
    axes.plot(numbers, [base for _, base, _ in lengths], "--", color=_GRAY, label="baseline")
    axes.set_xticks(numbers)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    _label(axes, "speed by draft length", "most draft tokens a round (K)", "tokens per second")


def _acceptance(axes: Any, rates: Sequence[float]) -> None:
    axes.bar(range(1, len(rates) + 1), rates, color=_GREEN)
    axes.set_xticks(range(1, len(rates) + 1))
    axes.set_ylim(0, 1)
    _label(axes, "acceptance by position", "draft position", "accepted / drafted")


def _label(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(up, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
