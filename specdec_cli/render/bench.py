"""The report of `specdec bench`: one JSON document, and the tables that show it, also when it was read from a file."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_cli.bench import OFF, Answer, Disagreement, Measurement, Part, Setting
from specdec_cli.errors import UsageError
from specdec_cli.interval import Ratio
from specdec_cli.render.jsonl import near_tie_fields, stats_fields
from specdec_cli.render.sink import TextSink, can_encode
from specdec_cli.render.summary import ASCII, UNICODE, Glyphs
from specdec_cli.render.terminal import ColorMode, make_console

SCHEMA = 1

ALL = "all"
"""Name of the part that has every category."""

Document = dict[str, Any]
Fields = Mapping[str, Any]

# --- the document ----------------------------------------------------------------------------------------------------


def bench_document(measurement: Measurement, info: Fields, notes: Sequence[str], *, swept: bool) -> Document:
    """Everything in plain values, as docs/json.md describes it.

    Args:
        measurement: what was measured.
        info: where it comes from: `date`, `pair`, `versions`, `machine`, `models`, `settings`.
        notes: why the numbers are doubtful.
        swept: whether the settings were tried to find the best.
    """
    best = measurement.best
    return {
        "schema": SCHEMA,
        **info,
        "interrupted": measurement.interrupted,
        "notes": list(notes),
        "baseline_spread": measurement.baseline_spread,
        "costs": _cost_fields(measurement),
        "best": (best.name if best else OFF) if swept else None,
        "results": [_result(measurement, setting) for setting in measurement.plan.settings],
        "checks": None,
        "comparison": None,
        "answers": [_answer_fields(answer, measurement) for answer in measurement.answers],
    }


def _cost_fields(measurement: Measurement) -> Document:
    costs = measurement.costs
    return {
        "step_s": {drafter: costs.step_s(drafter) for drafter in costs.drafts},
        "pass_s": [costs.target(num) for num in range(1, 10)],
    }


def _result(measurement: Measurement, setting: Setting) -> Document:
    drafting = setting.drafting
    parts = {ALL: None, **dict.fromkeys(measurement.categories)}
    for name in parts:
        parts[name] = _part_fields(measurement.part(setting.name, None if name == ALL else name))
    return {
        "setting": setting.name,
        "drafter": drafting.drafter,
        "num_draft_tokens": drafting.num_draft_tokens,
        "draft_confidence": drafting.min_confidence,
        "draft_branches": drafting.num_branches,
        "parts": parts,
    }


def _part_fields(part: Part) -> Document:
    base, spec = part.baseline, part.speculative
    return {
        "num_prompts": part.num_prompts,
        "num_pairs": part.num_pairs,
        "num_short": part.num_short,
        "num_equal": part.num_equal,
        "baseline_tokens_per_s": base.tokens_per_s,
        "tokens_per_s": spec.tokens_per_s,
        "speedup": part.speedup.mean if part.speedup else None,
        "interval": _interval(part.speedup),
        "oracle_speedup": part.oracle.mean if part.oracle else None,
        "acceptance_rate": spec.acceptance_rate,
        "mean_acceptance_length": spec.mean_acceptance_length,
        "drafted_by_position": spec.drafted_by_position,
        "acceptance_by_position": spec.acceptance_by_position,
        "time_shares": spec.time_shares if part.num_pairs else None,
        "first_token_s": part.first_token_s[1],
        "baseline_first_token_s": part.first_token_s[0],
    }


def _interval(ratio: Ratio | None) -> list[float] | None:
    return None if ratio is None or ratio.interval is None else list(ratio.interval)


def _answer_fields(answer: Answer, measurement: Measurement) -> Document:
    rounds = [[r.num_drafted, r.num_accepted, r.num_tokens, r.total_s] for r in answer.rounds]
    names = ("setting", "prompt", "category", "repeat", "seed", "reason")
    return {
        **{name: getattr(answer, name) for name in names},
        **stats_fields(answer.stats),
        "oracle_tokens_per_s": answer.oracle_per_s(measurement.costs),
        "rounds": rounds,
    }


def document_text(document: Fields) -> str:
    """The document as JSON, indented, but with each answer on one line."""
    head = json.dumps({**document, "answers": []}, indent=2)
    lines = ",\n".join(f"    {json.dumps(answer)}" for answer in document["answers"])
    return head.removesuffix("[]\n}") + f"[\n{lines}\n  ]\n}}\n"


def disagreement_fields(found: Disagreement) -> Document:
    """One greedy answer that differs from the baseline's."""
    own = {name: getattr(found, name) for name in ("setting", "prompt", "category")}
    return {**own, "explained": found.near_tie.is_explained, "near_tie": near_tie_fields(found.near_tie)}


def read_document(path: Path, option: str) -> Document:
    """A report that `specdec bench --json` has written.

    Args:
        path: the file.
        option: that named it, for messages.

    Raises:
        UsageError: it cannot be read, or is something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}", f"check the path given to `{option}`") from None
    except (ValueError, RecursionError):
        document = None
    try:
        right = document["schema"] == SCHEMA and all(result["parts"][ALL] for result in document["results"])
        right = right and bool(document["results"]) and all(name in document for name in ("settings", "machine"))
    except (KeyError, TypeError):
        right = False
    if not (right and _can_be_shown(document)):
        hint = "make one with `specdec bench --json > FILE`"
        raise UsageError(f"`{path}` is not a report of `specdec bench --json`", hint)
    return dict(document)


def _can_be_shown(document: Document) -> bool:
    """Whether all that reports show is there: somebody may have changed the file."""
    try:
        print_bench(document, io.StringIO(), "never")
        return {"target", "draft"} <= document["models"].keys() and bool(document["settings"].keys())
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False


def chosen_result(document: Fields) -> Document:
    """The result to look at closely: the best one, or else the one with the largest speed-up."""
    results: list[Document] = document["results"]
    named = [result for result in results if result["setting"] == document["best"]]
    return named[0] if named else max(results, key=lambda result: result["parts"][ALL]["speedup"] or 0.0)


# --- in words --------------------------------------------------------------------------------------------------------


def speed(value: float | None) -> str:
    """A speed-up; "-" for none."""
    return "-" if value is None else f"{value:.2f}x"


def interval_text(interval: Sequence[float] | None) -> str:
    """Both ends of an interval, "10+" for one that means nothing; "-" for none."""
    return "-" if interval is None else "-".join(f"{end:.2f}" if end < 10 else "10+" for end in interval)


def seconds(value: float | None) -> str:
    """Seconds with their unit; "-" for none."""
    return "-" if value is None else f"{value:.2f} s"


def headline(document: Fields) -> str:
    """What was measured, in a few words."""
    settings, models = document["settings"], document["models"]
    names = [models["target"]["file"], *([models["draft"]["file"]] if models["draft"] else [])]
    return ", ".join(
        [
            document["pair"] or " + ".join(names),
            f"{_counted(settings['num_prompts'], 'prompt')}, {_counted(settings['num_repeats'], 'repeat')}",
            f"up to {_counted(settings['max_tokens'], 'token')}",
            f"temperature {settings['sampling']['temperature']:g}",
            _counted(settings["threads"], "thread"),
        ]
    )


def _counted(num: int, unit: str) -> str:
    return f"{num} {unit}{'' if num == 1 else 's'}"


# --- tables ----------------------------------------------------------------------------------------------------------

_BAR_WIDTH, _WIDE, _MEDIUM = 10, 79, 66
_MAX_POSITIONS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """What the output stream allows."""

    width: int
    glyphs: Glyphs

    def bar(self, value: float | None, largest: float) -> str:
        """A bar of this share of the whole width."""
        full = self.glyphs.bars[-1]
        return full * max(1, round(_BAR_WIDTH * value / largest)) if value and largest else ""


def print_bench(document: Fields, stream: TextIO, color: ColorMode) -> None:
    """Write the report as tables, for the stream's width, encoding and color."""
    console = make_console(stream, color)
    glyphs = UNICODE if can_encode(stream, UNICODE.bars + UNICODE.separator + UNICODE.ellipsis) else ASCII
    look = _Look(console.width, glyphs)
    with console.capture() as captured:
        console.print(Text(headline(document), "bold"))
        if len(document["results"]) > 1:
            console.print(_settings_table(document, look))
            console.print(_best_line(document))
        result = chosen_result(document)
        console.print(Text(f"by category, {result['setting']}", "bold"))
        console.print(_categories_table(result, look))
        _print_details(console, result["parts"][ALL], glyphs)
        _print_ending(console, document)
    write_lines(stream, captured.get())


def write_lines(stream: TextIO, text: str) -> None:
    """Write lines without the spaces that a table leaves at their ends."""
    TextSink(stream).write("".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def _table(first: str, columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="left" if column == " " else "right", overflow="fold")
    return table


def _speedup_cells(part: Fields, look: _Look, largest: float) -> list[Text]:
    style = _style(part)
    cells = [Text(speed(part["speedup"]), style), Text(interval_text(part["interval"]))]
    if look.width >= _WIDE:
        cells.append(Text(look.bar(part["speedup"], largest), style))
    return cells


def _style(part: Fields) -> str:
    """Green and red where the interval says so, yellow where it does not."""
    low, high = part["interval"] or (0.0, 2.0)
    return "green" if low > 1 else "red" if high < 1 else "yellow"


def _speedup_columns(look: _Look) -> list[str]:
    return ["speed-up", "95 %", *([" "] if look.width >= _WIDE else [])]


def _draft_columns(look: _Look) -> list[str]:
    return ["accepted", "length", "oracle"] if look.width >= _MEDIUM else []


def _draft_cells(part: Fields, look: _Look) -> list[Text]:
    if look.width < _MEDIUM:
        return []
    texts = f"{part['acceptance_rate']:.0%}", f"{part['mean_acceptance_length']:.2f}", speed(part["oracle_speedup"])
    return [Text(text) for text in texts]


def _largest(parts: Sequence[Fields]) -> float:
    return max((part["speedup"] or 0.0 for part in parts), default=0.0)


def _settings_table(document: Fields, look: _Look) -> Table:
    table = _table("setting", ["tok/s", *_speedup_columns(look), *_draft_columns(look)])
    parts = [result["parts"][ALL] for result in document["results"]]
    for result, part in zip(document["results"], parts, strict=True):
        cells = _speedup_cells(part, look, _largest(parts))
        table.add_row(result["setting"], f"{part['tokens_per_s']:.1f}", *cells, *_draft_cells(part, look))
    return table


def _best_line(document: Fields) -> Text:
    if document["best"] == OFF:
        return Text.assemble("best: ", (OFF, "bold yellow"), ", none is faster than plain decoding beyond chance")
    part = chosen_result(document)["parts"][ALL]
    style = "bold green" if document["best"] else "bold"
    return Text.assemble("best: ", (chosen_result(document)["setting"], style), f", {speed(part['speedup'])}")


def _categories_table(result: Fields, look: _Look) -> Table:
    table = _table("category", ["baseline", "tok/s", *_speedup_columns(look), *_draft_columns(look)])
    parts = {**{name: part for name, part in result["parts"].items() if name != ALL}, ALL: result["parts"][ALL]}
    for name, part in parts.items():
        speeds = f"{part['baseline_tokens_per_s']:.1f}", f"{part['tokens_per_s']:.1f}"
        cells = _speedup_cells(part, look, _largest([*parts.values()]))
        table.add_row(Text(name, "bold" if name == ALL else ""), *speeds, *cells, *_draft_cells(part, look))
    return table


def _print_details(console: Console, part: Fields, glyphs: Glyphs) -> None:
    rates = part["acceptance_by_position"][:_MAX_POSITIONS]
    if rates:
        bars = "".join(glyphs.bars[round(rate * (len(glyphs.bars) - 1))] for rate in rates)
        text = " ".join(f"{rate:.0%}" for rate in rates[:8])
        console.print(Text.assemble("by position ", (bars, "green"), f" {text}"))
    if part["time_shares"]:
        shares = glyphs.separator.join(f"{name} {share:.0%}" for name, share in part["time_shares"].items())
        console.print(Text(f"time {shares}"))
    first, base = seconds(part["first_token_s"]), seconds(part["baseline_first_token_s"])
    console.print(Text(f"first token after {first}{glyphs.separator}baseline {base}"))
    num = part["num_pairs"] + part["num_short"]
    console.print(Text(f"answers equal to the baseline's: {part['num_equal']} of {num}"))


def _print_ending(console: Console, document: Fields) -> None:
    for note in document["notes"]:
        console.print(Text.assemble(("Note: ", "bold yellow"), note))
    if document["interrupted"]:
        console.print(Text("interrupted: only the answers up to there are counted", "yellow"))
    lossless = (document["checks"] or {}).get("lossless") or {"disagreements": ()}
    for found in lossless["disagreements"]:
        console.print(_disagreement_line(found, ascii if console.encoding == "ascii" else repr))


def _disagreement_line(found: Fields, quote: Any) -> Text:
    tie = found["near_tie"]
    best, other = (f"{quote(text)} {logit:.4f}" for text, logit in zip(tie["texts"], tie["logits"], strict=True))
    verdict = ("a near-tie", "green") if found["explained"] else ("NOT a near-tie", "bold red")
    where = f"{found['category']}, {found['setting']}: differs from token {tie['position']}: {best}, {other}, "
    return Text.assemble(where, f"gap {tie['gap']:.2g}, batching moves logits by {tie['noise']:.2g}: ", verdict)
