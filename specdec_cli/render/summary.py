"""The few lines after an answer: how fast it was, what the draft was worth, why it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from specdec_cli.render.memory import peak_memory_bytes
from specdec_cli.render.sink import can_encode
from specdec_cli.render.terminal import ColorMode, make_console, neutralize
from specdec_cli.stats import Comparison, NearTie, Stats


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters that an encoding may lack.

    Attributes:
        bars: from an empty to a full bar.
        separator: between two parts of a line.
        ellipsis: where something is left out.
    """

    bars: str
    separator: str
    ellipsis: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", " · ", "…")
ASCII = Glyphs("_.:-=+*#", " | ", "...")

_MAX_ROWS = 10
"""Of the histogram; the last row has all longer drafts."""

Line = list[Text]


def summary_text(
    stream: TextIO,
    color: ColorMode,
    info: Mapping[str, object],
    stats: Stats,
    finish_reason: str | None,
    comparison: Comparison | None,
) -> str:
    """The summary as it has to be written to `stream`, for its width, encoding and color.

    Args:
        stream: where the text will be written.
        color: the `--color` flag.
        info: settings of the answer, see docs/json.md.
        stats: counts and times of the answer.
        finish_reason: why it ended.
        comparison: with the baseline, when one was made.
    """
    console = make_console(stream, color)
    glyphs = UNICODE if can_encode(stream, UNICODE.bars + UNICODE.separator + UNICODE.ellipsis) else ASCII
    lines = [_totals(stats), *_draft_lines(stats, console.width, glyphs), *_drafter_lines(stats, info)]
    lines.append(_resources(stats, info))
    if comparison is not None:
        lines += _comparison_lines(comparison, info, ascii if glyphs is ASCII else repr)
    lines += _reason_lines(finish_reason, stats, info)
    return _printed(console, lines, glyphs)


def _printed(console: Console, lines: Iterable[Line], glyphs: Glyphs) -> str:
    with console.capture() as captured:
        for parts in lines:
            for line in _flow(parts, console.width, glyphs.separator).wrap(console, console.width):
                line.rstrip()
                console.print(line)
    return captured.get()


def session_text(stream: TextIO, color: ColorMode, stats: Stats, num_answers: int) -> str:
    """All answers of a conversation together.

    Args:
        stream: where the text will be written.
        color: the `--color` flag.
        stats: counts and times of all answers.
        num_answers: how many they are.
    """
    console = make_console(stream, color)
    glyphs = UNICODE if can_encode(stream, UNICODE.bars + UNICODE.separator + UNICODE.ellipsis) else ASCII
    answers = _part("", str(num_answers), " answer" if num_answers == 1 else " answers")
    lines = [[answers, *_totals(dataclasses.replace(stats, first_token_s=None))]]
    lines += _draft_lines(stats, console.width, glyphs)
    lines += [[line] for line in _histogram(stats, console.width, glyphs)]
    lines += _drafter_lines(stats, {"drafter": "auto"})
    lines += [_saved(stats), _decoded(stats)]
    return _printed(console, lines, glyphs)


def _histogram(stats: Stats, width: int, glyphs: Glyphs) -> list[Text]:
    """How many rounds had 0, 1, 2, ... of their draft tokens accepted."""
    if not stats.num_drafted:
        return []
    counts = stats.accepted_lengths
    while not counts[-1]:
        counts.pop()
    labels = [str(accepted) for accepted in range(len(counts))]
    if len(counts) > _MAX_ROWS:
        counts[_MAX_ROWS - 1 :] = [sum(counts[_MAX_ROWS - 1 :])]
        labels[_MAX_ROWS - 1 :] = [f"{_MAX_ROWS - 1}+"]
    longest, room = max(counts), max(1, min(40, width - 24))
    rows = [Text("rounds by number of accepted draft tokens")]
    for label, count in zip(labels, counts, strict=True):
        bar = glyphs.bars[-1] * max(round(room * count / longest), int(count > 0))
        rows.append(Text.assemble(f"{label:>4} ", (bar, "green"), f" {count}"))
    return rows


def _saved(stats: Stats) -> Line:
    shares = stats.time_shares
    line = [_part("time ", f"{stats.wall_s:.2f}", " s")]
    line += [_part(f"{name} ", f"{share:.0%}") for name, share in shares.items() if stats.num_rounds]
    if stats.saved_s is not None and stats.num_drafted:
        word = "saved" if stats.saved_s >= 0 else "lost"
        line.append(_part(f"{word} ", f"{abs(stats.saved_s):.2f}", " s against plain decoding"))
    return line


def _decoded(stats: Stats) -> Line:
    """What was decoded, beside what was sent and answered: a conversation is read once."""
    line = [
        _part("tokens of prompts ", str(stats.num_prompt_tokens)),
        _part("of answers ", str(stats.num_tokens)),
        _part("decoded by the target ", str(stats.num_target_decoded)),
    ]
    if stats.num_draft_decoded:
        line.append(_part("by the draft ", str(stats.num_draft_decoded)))
    return line


def turn_text(
    stream: TextIO, color: ColorMode, info: Mapping[str, object], stats: Stats, finish_reason: str | None
) -> str:
    """One dim line for an answer among others; the arguments are those of `summary_text`."""
    console = make_console(stream, color)
    glyphs = UNICODE if can_encode(stream, UNICODE.separator) else ASCII
    unit = "token" if stats.num_tokens == 1 else "tokens"
    words = [f"{stats.num_tokens} {unit}"]
    if stats.tokens_per_s:
        words.append(f"{stats.tokens_per_s:.1f} tok/s")
    if stats.num_drafted:
        words.append(f"{stats.acceptance_rate:.0%} of {stats.num_drafted} accepted")
    if stats.saved_s is not None and stats.num_drafted:
        words.append(f"{'saved' if stats.saved_s >= 0 else 'lost'} {abs(stats.saved_s):.1f} s")
    known = {
        "length": "the limit of `-n`",
        "context": f"the context of {info.get('num_ctx')} is full",
        "interrupted": "(stopped)" if stats.num_tokens else "(stopped while reading)",
    }
    if finish_reason in known:
        words.append(known[finish_reason])
    line = _flow([Text(word) for word in words], console.width, glyphs.separator)
    line.stylize("dim")
    with console.capture() as captured:
        console.print(line)
    return captured.get()


def table_text(stream: TextIO, color: ColorMode, rows: Sequence[tuple[str, str]]) -> str:
    """Names in bold, each with what it means or has; a long text goes on below itself, or below a long name.

    Args:
        stream: where the text will be written.
        color: the `--color` flag.
        rows: name and text.
    """
    console = make_console(stream, color)
    indent = min(max((cell_len(name) for name, _ in rows), default=0) + 2, 28, max(2, console.width // 2))
    with console.capture() as captured:
        for name, text in rows:
            lines = Text(neutralize(text)).wrap(console, max(8, console.width - indent)) or [Text()]
            gap = indent - cell_len(name)
            head = Text.assemble((name, "bold"), " " * gap, lines.pop(0) if gap > 0 else "")
            for line in [head, *(Text(" " * indent).append_text(line) for line in lines)]:
                line.rstrip()
                console.print(line, soft_wrap=True)
    return captured.get()


def _flow(parts: Sequence[Text], width: int, separator: str) -> Text:
    """The parts of a line, broken between two of them where it gets too long."""
    flowed, used = Text(), 0
    for part in parts:
        if used and used + len(separator) + part.cell_len > width:
            flowed.append("\n")
            used = 0
        elif used:
            flowed.append(separator, "dim")
            used += len(separator)
        flowed.append_text(part)
        used += part.cell_len
    return flowed


def _part(before: str, value: str, after: str = "", style: str = "bold") -> Text:
    return Text.assemble(before, (value, style), after)


def _totals(stats: Stats) -> Line:
    line = [_part("", str(stats.num_tokens), " token" if stats.num_tokens == 1 else " tokens")]
    if stats.tokens_per_s:
        line.append(_part("", f"{stats.tokens_per_s:.1f}", " tok/s", "bold cyan"))
    if stats.first_token_s is not None:
        line.append(_part("first token after ", f"{stats.first_token_s:.2f}", " s"))
    if stats.num_drafted:
        line.append(_part("", str(stats.num_rounds), " round" if stats.num_rounds == 1 else " rounds"))
    return line


def _draft_lines(stats: Stats, width: int, glyphs: Glyphs) -> list[Line]:
    if not stats.num_drafted:
        return []
    counts = f" ({stats.num_accepted} of {stats.num_drafted})"
    rates = [
        _part("acceptance rate ", f"{stats.acceptance_rate:.0%}", counts, "bold green"),
        _part("mean acceptance length ", f"{stats.mean_acceptance_length:.2f}"),
    ]
    if stats.num_trees:
        trees = f" {'tree' if stats.num_trees == 1 else 'trees'} of {stats.num_branches / stats.num_trees:.1f} branches"
        rates.append(_part("", str(stats.num_trees), trees))
    return [rates, [_by_position(stats.acceptance_by_position, width, glyphs)]]


def _drafter_lines(stats: Stats, info: Mapping[str, object]) -> list[Line]:
    """What proposed how much, when more than one could; and the draft's file, when it is not the published one."""
    line = []
    if info.get("drafter") in {"auto", "ngram"}:
        for name, num in stats.drafted_by_drafter.items():
            line.append(_part(f"{name} ", f"{stats.accepted_by_drafter[name]} of {num}", " accepted"))
    if info.get("draft") and stats.num_rounds:
        line.append(_part("draft ", str(info.get("draft"))))
    return [line] if line else []


def _by_position(rates: Sequence[float], width: int, glyphs: Glyphs) -> Text:
    label = "by position "
    shown = rates[: max(1, (width - len(label)) // 2)]
    bars = "".join(glyphs.bars[round(rate * (len(glyphs.bars) - 1))] for rate in shown)
    room = width - len(label) - len(bars)
    return Text.assemble(label, (bars, "green"), _fitting((f" {rate:.0%}" for rate in rates), room, glyphs.ellipsis))


def _fitting(words: Iterable[str], room: int, ellipsis: str) -> str:
    """As many of the words as fit, and the ellipsis when some do not."""
    words = list(words)
    whole = "".join(words)
    if len(whole) <= room:
        return whole
    fitting = ""
    for word in words:
        if len(fitting + word) + 1 + len(ellipsis) > room:
            break
        fitting += word
    return f"{fitting} {ellipsis}"


def _resources(stats: Stats, info: Mapping[str, object]) -> Line:
    shares = stats.time_shares
    if not stats.draft_s:
        del shares["draft"]
    line = [_part("time ", f"{stats.wall_s:.2f}", " s")]
    if stats.num_rounds:
        line += [_part(f"{name} ", f"{share:.0%}") for name, share in shares.items()]
    line.append(_part("peak memory ", _size(peak_memory_bytes())))
    if info.get("seed_drawn") and not _is_greedy(info):
        line.append(_part("seed ", str(info.get("seed"))))
    return line


def _is_greedy(info: Mapping[str, object]) -> bool:
    """Whether the seed decided nothing."""
    sampling = info.get("sampling")
    return info.get("temperature") == 0 and not (isinstance(sampling, Mapping) and sampling.get("dynatemp_range"))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _comparison_lines(comparison: Comparison, info: Mapping[str, object], quote: Callable[[str], str]) -> list[Line]:
    speedup = comparison.speedup
    speeds = [
        _part("speculative ", f"{comparison.speculative.tokens_per_s:.1f}", " tok/s"),
        _part("baseline ", f"{comparison.baseline.tokens_per_s:.1f}", " tok/s"),
    ]
    if speedup:
        speeds.append(_part("speed-up ", f"{speedup:.2f}x", style="bold green" if speedup >= 1 else "bold yellow"))
    else:
        speeds.append(Text("too short for a speed-up"))
    lines = [speeds]
    if comparison.agree is not None:
        lines.append(_agreement(comparison.agree, comparison.near_tie, quote))
    return [*lines, *_slow_lines(speedup, info)]


def _agreement(agree: bool, tie: NearTie | None, quote: Callable[[str], str]) -> Line:
    if agree:
        return [_part("greedy outputs ", "agree", style="bold green")]
    if tie is None:
        return [_part("greedy outputs ", "differ", style="bold yellow")]
    # Quoted by Python, so that a token that is a newline or a control character can be read.
    best, other = (f"{quote(text)} {logit:.4f}" for text, logit in zip(tie.texts, tie.logits, strict=True))
    return [
        _part("greedy outputs ", "differ", f" from position {tie.position}", "bold yellow"),
        Text(f"logits {best} and {other}"),
        _part("gap ", f"{tie.gap:.2g}"),
        Text(f"batched decoding moves logits by {tie.noise:.2g} here"),
    ]


def _slow_lines(speedup: float, info: Mapping[str, object]) -> list[Line]:
    if not 0 < speedup < 1:
        return []
    num_draft_tokens = info.get("num_draft_tokens")
    tries = "`-k auto` or `--no-draft`" if isinstance(num_draft_tokens, int) else "`specdec bench`"
    return [[_part("", "Warning:", f" slower than plain decoding here ({speedup:.2f}x); try {tries}", "bold yellow")]]


def _reason_lines(reason: str | None, stats: Stats, info: Mapping[str, object]) -> list[Line]:
    closed = f", closed with {stats.num_closing} more to keep to the grammar" if stats.num_closing else ""
    unit = "token" if stats.num_tokens == 1 else "tokens"
    known = {
        "length": f"at the limit of {stats.num_tokens} {unit}{closed}; `-n` raises it",
        "context": f"the context of {info.get('num_ctx')} tokens is full{closed}; `--ctx` makes it larger",
        "interrupted": "interrupted" if stats.num_tokens else "interrupted while reading the prompt",
    }
    return [[_part("stopped: ", known[reason], style="yellow")]] if reason in known else []
