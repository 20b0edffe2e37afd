"""Write docs/cli.md from what each command's `--help` says; with `--check` only tell whether it is up to date."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from specdec_cli.cli.app import app
from specdec_cli.cli.command import ALIASES

PAGE = Path(__file__).with_name("cli.md")

_HEAD = """# Command line

Made by `python docs/make_cli.py` from the `--help` of each command. A flag wins over its environment variable, that
over the user's `config.toml` (see `specdec config`), and that over the pair's entry in `models.toml`.
"""

_ALIAS_HEAD = """## Spellings of llama.cpp's tools

Understood by every command that has the option.

| typed | means |
|---|---|
"""


def page() -> str:
    """The whole page."""
    group = typer.main.get_command(app)
    with _context(group, "specdec") as context:
        parts = [_HEAD, *_sections(group, context)]
    aliases = "".join(f"| `{typed}` | `{meant}` |\n" for typed, meant in ALIASES.items())
    return "\n".join([*parts, _ALIAS_HEAD + aliases])


def _sections(command: Any, context: Any) -> Iterator[str]:
    """A command, then its subcommands."""
    yield _command(command, context)
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        inner = command.get_command(context, name)
        yield from _sections(inner, _context(inner, name, parent=context))


def _context(command: Any, name: str, parent: Any = None) -> Any:
    return command.make_context(name, [], parent=parent, resilient_parsing=True)


def _command(command: Any, context: Any) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    sections = [f"## {context.command_path}\n", f"{command.help.strip()}\n", f"```\n{usage}\n```\n"]
    panels: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        # Typer adds the completion options where it finds a shell that it knows.
        if record and "completion" not in record[0]:
            panels.setdefault(parameter.rich_help_panel or "", []).append(_row(*record))
    for panel, rows in panels.items():
        title = f"### {panel}\n\n" if panel else ""
        head = "| option | meaning | default | environment |\n|---|---|---|---|\n"
        sections.append(title + head + "".join(rows))
    return "\n".join([*sections, *_epilog(command.epilog or "")])


def _row(names: str, text: str) -> str:
    """One line of the table, from the two columns of `--help`."""
    notes = dict(_notes(text))
    meaning = re.sub(r"\s+\[(?:env var|default): [^]]*\]", "", text)
    default, variable = notes.get("default", ""), notes.get("env var", "")
    cells = [f"`{names}`", meaning, default, f"`{variable}`" if variable else ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _notes(text: str) -> Iterator[tuple[str, str]]:
    for bracket in re.findall(r"\[((?:env var|default): [^]]*)\]", text):
        for note in re.split(r"; (?=default: |env var: )", bracket):
            name, _, value = note.partition(": ")
            yield name, value


def _epilog(text: str) -> Iterator[str]:
    """Examples as a block, anything else as it is."""
    paragraphs = [paragraph.strip() for paragraph in text.strip().split("\n\n") if paragraph.strip()]
    if paragraphs and paragraphs[0] == "Examples:":
        yield "Examples:\n\n```sh\n" + "\n".join(paragraphs[1:]) + "\n```\n"
    else:
        yield from (f"{paragraph}\n" for paragraph in paragraphs)


def main(arguments: list[str]) -> int:
    """Write or check the page; the exit code."""
    made = page()
    if arguments != ["--check"]:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    found = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    lines = difflib.unified_diff(found.splitlines(True), made.splitlines(True), "docs/cli.md", "--help")
    sys.stdout.writelines(lines)
    return int(found != made)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
