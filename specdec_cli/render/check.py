"""The report of `specdec check` as a table, and as one JSON document."""

from __future__ import annotations

from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from specdec_cli.check import Acceptance, CheckReport, FirstToken, GreedyCase
from specdec_cli.render.jsonl import near_tie_fields
from specdec_cli.render.terminal import ColorMode, make_console

SCHEMA = 1


def print_check(report: CheckReport, stream: TextIO, color: ColorMode) -> None:
    """Write the three parts and the verdict."""
    console = make_console(stream, color)
    console.print(Text("Greedy answers against the baseline", "bold"))
    console.print(_greedy_table(report.greedy))
    console.print(Text("Draft tokens accepted, against 1 - total variation at the same positions", "bold"))
    console.print(_acceptance_table(report))
    if report.first_token is not None:
        console.print(_first_line(report.first_token))
    console.print(Text.assemble("check ", _verdict(report.passed)))


def check_document(report: CheckReport, info: dict[str, object]) -> dict[str, Any]:
    """Everything in plain values, as docs/json.md describes it."""
    first = report.first_token
    return {
        "schema": SCHEMA,
        **info,
        "passed": report.passed,
        "greedy": [_greedy_fields(case) for case in report.greedy],
        "acceptance": {
            "all": _acceptance_fields(report.total),
            **{category: _acceptance_fields(part) for category, part in report.acceptance.items()},
        },
        "first_token": None
        if first is None
        else {
            "num_samples": first.num_samples,
            "num_bins": first.num_bins,
            "statistic": first.statistic,
            "p_value": first.p_value,
            "passed": first.passed,
        },
    }


def _verdict(passed: bool) -> tuple[str, str]:
    return ("passed", "bold green") if passed else ("FAILED", "bold red")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _greedy_table(cases: list[GreedyCase]) -> Table:
    table = _table("prompt", "tokens", "agreement", "")
    for case in cases:
        tie = case.near_tie
        agreement = "equal"
        if tie is not None:
            best, other = (f"{text!r} {logit:.4f}" for text, logit in zip(tie.texts, tie.logits, strict=True))
            agreement = f"differs from token {tie.position}: {best}, {other}, gap {tie.gap:.2g}"
            agreement += f"; batching moves logits by {tie.noise:.2g}"
        table.add_row(case.category, str(case.num_tokens), agreement, Text(*_verdict(case.passed)))
    return table


def _acceptance_table(report: CheckReport) -> Table:
    table = _table("prompt", "tried", "accepted", "1 - TV", "99.9 % interval", "argmax and match", "")
    for category, part in [*report.acceptance.items(), ("all", report.total)]:
        low, high = part.interval
        verdict = Text(*_verdict(part.passed)) if category == "all" else Text("")
        figures = (f"{part.rate:.3f}", f"{part.expected:.3f}", f"{low:.3f}-{high:.3f}", f"{part.match_rate:.3f}")
        table.add_row(category, str(part.num_tried), *figures, verdict)
    return table


def _first_line(first: FirstToken) -> Text:
    text = f"First tokens of {first.num_samples} answers: chi-squared {first.statistic:.2f} in {first.num_bins} bins, "
    return Text.assemble(text, f"p = {first.p_value:.3f} ", _verdict(first.passed))


def _greedy_fields(case: GreedyCase) -> dict[str, Any]:
    tie = None if case.near_tie is None else near_tie_fields(case.near_tie)
    return {"category": case.category, "num_tokens": case.num_tokens, "passed": case.passed, "near_tie": tie}


def _acceptance_fields(part: Acceptance) -> dict[str, Any]:
    return {
        "num_tried": part.num_tried,
        "num_accepted": part.num_accepted,
        "rate": part.rate,
        "expected": part.expected,
        "interval": list(part.interval),
        "match_rate": part.match_rate,
        "passed": part.passed,
    }
