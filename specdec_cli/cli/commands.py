"""The slash commands of a conversation, and what completes them."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from specdec_cli.cli import chat_settings, clipboard
from specdec_cli.cli.editor import edited, editor
from specdec_cli.cli.lines import joined
from specdec_cli.cli.prompt import read_file
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.render.summary import session_text, table_text
from specdec_cli.text import without_thinking
from specdec_cli.transcript import read_transcript, write_transcript

if TYPE_CHECKING:
    from specdec_cli.cli.repl import Repl

_MAX_ENTRIES = 500
_FENCE = re.compile(r"`{3,}")
_COMMAND = re.compile(r"/([A-Za-z?]+)(?:\s+(.*))?\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A slash command: what follows it, and what it does."""

    argument: str
    help: str


COMMANDS = {
    "help": Command("", "this list"),
    "bye": Command("", "leave, as Ctrl-D does"),
    "clear": Command("", "begin a new conversation; the system message stays"),
    "retry": Command("", "answer the last message again"),
    "undo": Command("", "take the last message and its answer back"),
    "edit": Command("[TEXT]", "change the last message, in your editor or to TEXT, and send it again"),
    "system": Command("[TEXT]", "set the system message; `none` removes it"),
    "set": Command("[NAME [VALUE]]", "show or change a setting; VALUE `default` takes the change back"),
    "show": Command("", "models, context and settings"),
    "stats": Command("", "what drafts were worth so far, and what was decoded"),
    "save": Command("FILE", "write the conversation"),
    "load": Command("FILE", "go on with a conversation that was written"),
    "draft": Command("[on|off|auto]", "draft in every round, never, or where it pays"),
    "file": Command("PATH", "put a file's text in front of the next message"),
    "model": Command("[PAIR]", "go on with other models: a pair, or a target's .gguf file"),
    "copy": Command("", "copy the last answer"),
}
_TAKES_TEXT = {"edit", "system"}
_ALIASES = {"exit": "bye", "quit": "bye", "q": "bye", "?": "help", "h": "help"}


def split_command(line: str) -> tuple[str, str] | None:
    """Name and argument of a slash command; None for a message, also one like `/etc/hosts` or behind a space."""
    match = _COMMAND.match(line)
    return None if match is None else (match[1].lower(), (match[2] or "").strip())


class Commands:
    """What slash commands do to a conversation.

    Args:
        repl: the conversation and what is around it.
    """

    def __init__(self, repl: Repl) -> None:
        self._repl = repl

    def run(self, name: str, argument: str) -> None:
        """Do what a command says.

        Raises:
            UsageError: there is no such command, or it needs something else behind it.
            SpecdecError: it failed.
            EOFError: the user wants to leave.
        """
        name = _ALIASES.get(name, name)
        command = COMMANDS.get(name)
        if command is None:
            close = difflib.get_close_matches(name, [*COMMANDS, *_ALIASES], n=3, cutoff=0.5)
            names = dict.fromkeys(_ALIASES.get(match, match) for match in close)
            listed = f"perhaps {joined(f'/{match}' for match in names)}" if close else "`/help` lists them"
            raise UsageError(f"there is no command `/{name}`", f"{listed}; behind a space it is a message")
        if argument and not command.argument:
            raise UsageError(f"`/{name}` takes nothing behind it, not `{argument}`")
        if not argument and command.argument and not command.argument.startswith("["):
            raise UsageError(f"`/{name}` needs a {command.argument}", f"`/{name} {command.argument}`")
        if "\0" in argument and name not in _TAKES_TEXT:
            raise UsageError(f"`/{name}` takes no null character")
        cast(Callable[[str], None], getattr(self, f"_{name}"))(argument)

    def _help(self, _argument: str) -> None:
        rows = [(f"/{name} {command.argument}".rstrip(), command.help) for name, command in COMMANDS.items()]
        rows += [("Alt-Enter", 'another line; so does Enter between """ and """'), ("Ctrl-C", "stop the answer")]
        self._table(rows)

    def _bye(self, _argument: str) -> None:
        raise EOFError

    def _clear(self, _argument: str) -> None:
        self._repl.chat.clear()
        self._repl.attached.clear()
        self._repl.note("a new conversation")

    def _retry(self, _argument: str) -> None:
        self._repl.answer(self._repl.chat.retry)

    def _undo(self, _argument: str) -> None:
        num_dropped = self._repl.chat.num_dropped
        message = self._repl.chat.undo()
        self._repl.keep()
        self._repl.note(f"taken back: {shortened(message)}")
        self._repl.tell_dropped(num_dropped)

    def _edit(self, argument: str) -> None:
        last = self._repl.chat.last_message
        if last is None:
            raise UsageError("there is no message to change")
        text = argument or self._edited(last)
        if not text.strip() or text == last:
            self._repl.note("unchanged; `/retry` sends it again")
        else:
            self._repl.answer(lambda: self._repl.chat.edit(text))

    def _edited(self, text: str) -> str:
        if not self._repl.is_interactive:
            raise UsageError("`/edit` needs a terminal", "`/edit TEXT` sends TEXT in place of the last message")
        command = editor()
        return self._repl.reader.read(text) if command is None else edited(text, command)

    def _system(self, argument: str) -> None:
        chat = self._repl.chat
        if argument:
            chat.system = None if argument == "none" else argument
            self._repl.note("no system message" if chat.system is None else "the system message is set")
        else:
            self._table([("system", chat.system or "none")])

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        settings = self._repl.settings
        if not name:
            self._table([(each, settings.value(each)) for each in chat_settings.names()])
        elif not value.strip():
            self._table([(name, settings.value(name))])
        else:
            try:
                self._repl.change(settings.with_value(name, value.strip()))
            except UsageError as error:
                # Help of the command line is of no use inside a conversation.
                hint = "`/set` shows all settings" if not error.hint or "--help" in error.hint else error.hint
                raise UsageError(error.message.removeprefix("--"), hint) from None
            self._repl.note(f"{name} {self._repl.settings.value(name)}")

    def _draft(self, argument: str) -> None:
        modes = chat_settings.draft_modes()
        if argument and argument not in modes:
            raise UsageError(f"`/draft` takes {joined(modes)}, not `{argument}`")
        if argument:
            self._repl.change(self._repl.settings.with_drafting(cast(chat_settings.DraftMode, argument)))
        self._repl.note(f"drafts: {self._repl.drafts()}")

    def _show(self, _argument: str) -> None:
        self._table(self._repl.overview())

    def _stats(self, _argument: str) -> None:
        chat = self._repl.chat
        self._repl.say(session_text(sys.stderr, self._repl.color, chat.stats, chat.num_answers))

    def _save(self, argument: str) -> None:
        path = _path(argument)
        write_transcript(path, self._repl.transcript())
        self._repl.note(f"saved {path}, {counted(len(self._repl.chat.turns))}")

    def _load(self, argument: str) -> None:
        path = _path(argument)
        transcript = read_transcript(path)
        settings, notes = self._repl.settings.with_file(path, transcript.settings)
        self._repl.change(settings)
        self._repl.chat.replace(transcript.turns, transcript.system, transcript.num_dropped)
        self._repl.note(f"loaded {path}, {counted(len(transcript.turns))}")
        for text in notes:
            self._repl.note(text)
        names = transcript.pair, transcript.target, transcript.draft
        if any(names) and names != self._repl.loaded.names:
            self._repl.note(f"it was with other models: {_way_to(names)} goes on with them")

    def _file(self, argument: str) -> None:
        path = _path(argument)
        text = read_file(path, "`/file PATH` takes a text file")
        if "\0" in text:
            raise UsageError(f"`{path}` is not a text file", "`/file PATH` takes a text file")
        self._repl.attached.append(quoted(path.name, text))
        num = len(text.splitlines())
        self._repl.note(f"{path.name}, {num} {'line' if num == 1 else 'lines'}, goes in front of the next message")

    def _model(self, argument: str) -> None:
        if argument:
            self._repl.switch(argument)
        self._repl.note(self._repl.title())

    def _copy(self, _argument: str) -> None:
        turns = self._repl.chat.turns
        if not turns:
            raise UsageError("there is no answer to copy")
        self._repl.note(clipboard.copy(without_thinking(turns[-1].answer).strip(), sys.stderr))

    def _table(self, rows: list[tuple[str, str]]) -> None:
        self._repl.say(table_text(sys.stderr, self._repl.color, rows))


def quoted(name: str, text: str) -> str:
    """A file's text for a message, between fences longer than any in it."""
    fence = "`" * max([3, *(len(found) + 1 for found in _FENCE.findall(text))])
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}\n\n"


def shortened(message: str) -> str:
    """The beginning of a message, on one line."""
    line = " ".join(message.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def counted(num_turns: int) -> str:
    """Turns, in words."""
    return f"{num_turns} message and its answer" if num_turns == 1 else f"{num_turns} messages and their answers"


def _way_to(names: Sequence[str | None]) -> str:
    """What loads these models; a draft model can be named on the command line alone."""
    pair, target, draft = names
    if draft is None and (pair is None or target is None):
        return f"`/model {pair or target}`"
    flags = (f"--target {target}" if target else "", f"--draft {draft}" if draft else "")
    return f"`{' '.join(word for word in ('specdec chat', pair, *flags) if word)}`"


def _path(argument: str) -> Path:
    if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "\"'":
        argument = argument[1:-1]
    try:
        return Path(argument).expanduser()
    except RuntimeError:
        return Path(argument)


# --- completion --------------------------------------------------------------------------------------------------


def completions(before: str) -> list[tuple[str, int]]:
    """What may stand at the cursor: texts, each with how many characters before the cursor it replaces."""
    if "\n" in before or not before.startswith("/"):
        return []
    name, space, rest = before[1:].partition(" ")
    if not space:
        return _matching((f"/{command}" for command in COMMANDS), before)
    complete: dict[str, Callable[[str], list[tuple[str, int]]]] = {
        "set": _settings,
        "draft": lambda text: _matching(chat_settings.draft_modes(), text),
        "model": lambda text: _matching(_pairs(), text) + _paths(text),
        "file": _paths,
        "save": _paths,
        "load": _paths,
    }
    return complete[name](rest) if name in complete else []


def _settings(rest: str) -> list[tuple[str, int]]:
    name, space, value = rest.partition(" ")
    if not space:
        return _matching(chat_settings.names(), name)
    return _matching(chat_settings.values_of(name), value)


def _matching(words: Iterable[str], begun: str) -> list[tuple[str, int]]:
    return [(word, len(begun)) for word in words if word.startswith(begun)]


def _pairs() -> list[str]:
    from specdec_cli.registry import load_registry

    try:
        return list(load_registry().pairs)
    except SpecdecError:
        return []


def _paths(text: str) -> list[tuple[str, int]]:
    folder, _, begun = text.rpartition("/")
    folder = f"{folder}/" if "/" in text else ""
    try:
        found = sorted(_entries(Path(folder or ".").expanduser()))
    except (OSError, RuntimeError, ValueError):
        return []
    shown = [name for name in found if name.startswith(begun) and (begun or not name.startswith("."))]
    return [(name, len(begun)) for name in shown[:_MAX_ENTRIES]]


def _entries(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield f"{entry.name}/" if entry.is_dir() else entry.name
