"""The report of `specdec doctor`: a line for each finding, what to expect here in words, or one document."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from specdec_cli.doctor import Finding, Status, private_words
from specdec_cli.render.terminal import ColorMode, color_level, make_console, neutralize

if TYPE_CHECKING:
    from rich.console import Console

    from specdec_cli.doctor import Expectation, Measurement

SCHEMA = 1

_NONE = 1.03
"""A smaller gain is none: probing takes a part of it."""

_INDENT, _NARROW = 20, 50
"""Columns in front of the text; a narrower terminal has no room for them."""

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def look_at_terminal(color: ColorMode) -> Finding:
    """What the standard streams can show."""
    facts: dict[str, Any] = {
        "stdin": sys.stdin is not None and sys.stdin.isatty(), "stdout": sys.stdout.isatty(),
        "stderr": sys.stderr.isatty(), "color": color_level(sys.stdout, color),
        "encoding": sys.stdout.encoding, "columns": shutil.get_terminal_size().columns,
    }  # fmt: skip
    kind = "a terminal" if facts["stdout"] else "no terminal"
    text = f"stdout is {kind}, {facts['columns']} columns, {facts['encoding']}, color: {facts['color']}"
    if facts["stdout"] and not str(facts["encoding"]).lower().startswith("utf"):
        return Finding(
            "terminal", "warning", text, "set `PYTHONUTF8=1` or a UTF-8 locale to see every character", facts
        )
    return Finding("terminal", "ok", text, facts=facts)


# --- lines -----------------------------------------------------------------------------------------------------------


def print_finding(finding: Finding, stream: TextIO, color: ColorMode = "auto") -> None:
    """Write what was found, with the next step below it."""
    from rich.text import Text

    console = make_console(stream, color)
    head = Text.assemble((f"{finding.status:7}", _STYLES[finding.status]), f"  {finding.name:9}  ")
    width = _width(stream, console)
    indent = 2 if width and width < _NARROW else _INDENT
    lines = _filled(_short(finding.text), width - indent if width else 0)
    if indent < _INDENT:
        console.print(Text(head.plain.rstrip(), _STYLES[finding.status]), soft_wrap=True)
        head = Text(" " * indent)
    for number, line in enumerate(lines):
        console.print(Text.assemble(Text(" " * indent) if number else head, line), soft_wrap=True)
    if finding.hint:
        _print_step(finding.hint, console, indent, width)


def print_measurement(found: Measurement, stream: TextIO, color: ColorMode = "auto") -> None:
    """Write times, and what to expect of them."""
    from rich.text import Text

    console = make_console(stream, color)
    console.print()
    width = _width(stream, console)
    for line in _filled(_times(found), width):
        console.print(Text(line), soft_wrap=True)
    if found.is_doubtful:
        share = f"{100 * found.others:.0f} %"
        warning = f"Other programs took {share} of the cores meanwhile: measure again when they are done"
        for line in _filled(warning, width):
            console.print(Text(line, "yellow"), soft_wrap=True)
    for line in _filled(sentence(found), width):
        console.print(Text(line, "bold"), soft_wrap=True)
    for line in _filled(reason(found), width):
        console.print(Text(line), soft_wrap=True)
    for advice in found.advice:
        _print_step(advice, console, 0, width)


def _width(stream: TextIO, console: Console) -> int:
    """Columns to fold text to; 0 where there is no terminal."""
    return console.width if stream.isatty() else 0


def _print_step(text: str, console: Console, indent: int, width: int) -> None:
    from rich.text import Text

    for number, line in enumerate(_filled(_short(text), width - indent - 2 if width else 0)):
        console.print(Text(f"{'':{indent}}{' ' if number else '→'} {line}"), soft_wrap=True)


def _filled(text: str, width: int) -> list[str]:
    """Lines of at most so many columns, one line for 0; a command in backticks stays whole, to be copied."""
    if not text or not width:
        return [text] if text else []
    lines = [""]
    for word in re.findall(r"(?:`[^`]*`|\S)+", text):
        longer = f"{lines[-1]} {word}".lstrip()
        lines = [*lines[:-1], longer] if len(longer) <= width or not lines[-1] else [*lines, word]
    return lines


def _times(found: Measurement) -> str:
    names = found.target if found.draft is None else f"{found.target} with {found.draft}"
    tuned = f" ({found.draft_format})" if found.draft_format else ""
    text = f"{names}{tuned}: {1 / found.pass_s[1]:.1f} tokens/s without drafts; a pass over "
    text += ", ".join(f"{size}: {_time(seconds)}" for size, seconds in found.pass_s.items())
    return text if found.step_s is None else f"{text}; a draft step: {_time(found.step_s)}"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def sentence(found: Measurement) -> str:
    """What speed-up to expect, on which kind of text."""
    gains = [expectation for expectation in found.expectations if expectation.speedup >= _NONE]
    none = [expectation.kind.examples for expectation in found.expectations if expectation.speedup < _NONE]
    if not gains:
        return "Expect no gain on this machine with this pair: drafting switches itself off, and nothing gets slower."
    text = f"Expect on this machine: {', '.join(map(_gain, gains))}"
    if none:
        text += f"; {', '.join(none)}: none, there drafting switches itself off"
    return f"{text}."


def _gain(expectation: Expectation) -> str:
    best = "up to " if expectation.kind.name in ("predictable", "repeated") else ""
    return f"{expectation.kind.examples} {best}{expectation.speedup:.1f}x"


def reason(found: Measurement) -> str:
    """Why drafts do not pay, in the numbers that decide it; empty where they do on ordinary text."""
    speedups = {expectation.kind.name: expectation.speedup for expectation in found.expectations}
    if speedups.get("ordinary", 0.0) >= _NONE:
        return ""
    text = f"a pass over 5 tokens takes as long as {found.in_passes(found.pass_s[5]):.1f} single ones"
    if found.step_s is not None:
        text += f", and a draft step {found.in_passes(found.step_s):.2f} of one"
    return f"Why no more: {text}."


# --- document --------------------------------------------------------------------------------------------------------


def doctor_document(
    findings: Sequence[Finding], found: Measurement | None, models: Sequence[str | Path | None] = ()
) -> dict[str, Any]:
    """Everything for a bug report, with nothing in it that tells whose machine it is.

    Args:
        findings: all of them.
        found: what was measured.
        models: as the user named them; of paths only the last part is told.
    """
    document = {
        "schema": SCHEMA,
        "usable": is_usable(findings),
        "checks": [
            {
                "name": item.name,
                "status": item.status,
                "text": _public(item),
                "hint": item.hint,
                "facts": dict(item.facts),
            }
            for item in findings
        ],
        "measurement": None if found is None else _measurement_fields(found),
    }
    words = _folders(models)
    return {name: _anonymous(value, words) for name, value in document.items()}


def _folders(models: Sequence[str | Path | None]) -> list[str]:
    """The folders of models, as messages may have them, longest first."""
    from specdec_cli.choice import is_source

    named = [Path(model) for model in models if model is not None and not is_source(str(model))]
    parents = [path.parent for path in named if path.name]
    folders = {anonymous(str(form)) for parent in parents for form in (parent, parent.absolute(), parent.resolve())}
    outside = (folder for folder in folders if folder not in (".", os.sep) and folder[0] not in "~$")
    return sorted(outside, key=len, reverse=True)


def _public(finding: Finding) -> str:
    """The text; of a mistake in the config without the value."""
    if finding.name != "config" or finding.status != "problem":
        return finding.text
    text = re.sub(r" cannot be `.*", " has a value that it cannot have", finding.text, flags=re.DOTALL)
    return re.sub(r", not `.*", "", text, flags=re.DOTALL)


def is_usable(findings: Sequence[Finding]) -> bool:
    """Whether nothing keeps specdec from working."""
    return all(finding.status != "problem" for finding in findings)


def _measurement_fields(found: Measurement) -> dict[str, Any]:
    return {
        "pair": found.pair,
        "target": found.target,
        "draft": found.draft,
        "draft_format": found.draft_format,
        "pass_s": {str(size): seconds for size, seconds in found.pass_s.items()},
        "step_s": found.step_s,
        "other_load": found.others,
        "expectations": [
            {
                "text": expectation.kind.name,
                "drafter": expectation.kind.drafter,
                "acceptance": expectation.kind.acceptance,
                "speedup": expectation.speedup,
            }
            for expectation in found.expectations
        ],
        "sentence": sentence(found),
        "reason": reason(found),
        "advice": [*found.advice],
    }


def _anonymous(value: Any, folders: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _anonymous(item, folders) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_anonymous(item, folders) for item in value]
    if not isinstance(value, str):
        return value
    text = anonymous(value)
    for folder in folders:
        text = re.sub(rf"(?<![\w.~$/-]){re.escape(folder + os.sep)}", lambda _: f"...{os.sep}", text)
    return text


def anonymous(text: str) -> str:
    """Text without names of the user and the machine, without access tokens, and with short paths."""
    from specdec_cli.wording import scrub

    for word, short in private_words().items():
        # Not the beginning of a longer name.
        text = re.sub(rf"{re.escape(word)}(?![\w-])", lambda _, short=short: short, text)  # type: ignore[misc]
    for name, short in ((_user(), "USER"), (platform.node(), "HOST")):
        if len(name) > 2:
            # In paths and addresses only: a name may be an ordinary word.
            part = rf"(?<![\w]){re.escape(name)}(?![\w])"
            text = re.sub(r"\S*[/@\\]\S*", lambda path, part=part, short=short: re.sub(part, short, path[0]), text)  # type: ignore[misc]
    return scrub(text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return os.environ.get("USER", "")


def _short(text: str) -> str:
    home = str(Path.home())
    return neutralize(text.replace(home, "~") if len(home) > 1 else text)
