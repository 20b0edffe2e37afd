"""A benchmark's results for other programs: CSV for spreadsheets, Markdown for an issue or a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from specdec_cli.render.bench import ALL, Fields, chosen_result, headline, interval_text, seconds, speed

CSV_COLUMNS = (
    "setting",
    "drafter",
    "num_draft_tokens",
    "draft_confidence",
    "category",
    "num_prompts",
    "num_pairs",
    "baseline_tokens_per_s",
    "tokens_per_s",
    "speedup",
    "interval_low",
    "interval_high",
    "oracle_speedup",
    "acceptance_rate",
    "mean_acceptance_length",
    "draft_share",
    "verify_share",
    "other_share",
    "first_token_s",
    "baseline_first_token_s",
)


def csv_text(document: Fields) -> str:
    """One row for each setting and category, `all` first; numbers in full, nothing where there is none."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(document))
    return out.getvalue()


def _rows(document: Fields) -> Iterator[dict[str, object]]:
    for result in document["results"]:
        for category, part in result["parts"].items():
            low, high = part["interval"] or (None, None)
            shares = {f"{name}_share": share for name, share in (part["time_shares"] or {}).items()}
            tokens = "auto" if result["num_draft_tokens"] is None else result["num_draft_tokens"]
            row = {**result, **part, **shares, "interval_low": low, "interval_high": high}
            yield {**row, "category": category, "num_draft_tokens": tokens}


def markdown_text(document: Fields) -> str:
    """Tables with what a reader needs to believe them: machine, versions, models, doubts."""
    parts = [f"**{headline(document)}**", ""]
    if len(document["results"]) > 1:
        parts += [_markdown_table("setting", [(r["setting"], r["parts"][ALL]) for r in document["results"]])]
        parts += [f"Best: {document['best'] or chosen_result(document)['setting']}", ""]
    result = chosen_result(document)
    names = [*(name for name in result["parts"] if name != ALL), ALL]
    parts += [_markdown_table(result["setting"], [(name, result["parts"][name]) for name in names])]
    parts += [f"- {line}" for line in _provenance(document)]
    return "\n".join(parts) + "\n"


def _markdown_table(first: str, rows: list[tuple[str, Fields]]) -> str:
    head = [first, "baseline tok/s", "tok/s", "speed-up", "95 %", "accepted", "length", "oracle", "first token"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *(_cells(name, part) for name, part in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _cells(name: str, part: Fields) -> list[str]:
    return [
        name, f"{part['baseline_tokens_per_s']:.1f}", f"{part['tokens_per_s']:.1f}", speed(part["speedup"]),
        interval_text(part["interval"]), f"{part['acceptance_rate']:.0%}", f"{part['mean_acceptance_length']:.2f}",
        speed(part["oracle_speedup"]), seconds(part["first_token_s"]),
    ]  # fmt: skip


def _provenance(document: Fields) -> Iterator[str]:
    machine, versions = document["machine"], document["versions"]
    yield f"{machine['cpu']}, {machine['num_cores']} cores, {machine['platform']}"
    yield f"specdec {versions['specdec']}, llama-cpp-python {versions['llama_cpp_python']}, {document['date']}"
    for role, model in document["models"].items():
        if model:
            yield f"{role}: {model['file']}, sha256 {(model['sha256'] or 'unknown')[:16]}"
    yield from (f"Note: {note}" for note in document["notes"])
