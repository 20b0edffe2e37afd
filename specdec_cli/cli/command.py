"""What Typer is extended by: commands imported when asked for, further spellings, help in sections, a quick start.

Rich would draw nicer boxes around the help, and take longer for it than everything else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import CompletionItem, TyperCommand, TyperGroup  # type: ignore[attr-defined]

from specdec_cli.cli.defaults import ConfigDefaults, drop_outranked, name_origin
from specdec_cli.errors import UsageError
from specdec_cli.render.terminal import color_level

# Spellings of llama.cpp's own tools that people type from habit; accepted, not shown.
ALIASES = {
    "--model-draft": "--draft",
    "-md": "--draft",
    "--model": "--pair",
    "--temp": "--temperature",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "-c": "--ctx",
    "--ctx-size": "--ctx",
    "-ngl": "--gpu-layers",
    "--n-gpu-layers": "--gpu-layers",
    "-ngld": "--draft-gpu-layers",
    "--gpu-layers-draft": "--draft-gpu-layers",
    "--n-gpu-layers-draft": "--draft-gpu-layers",
    "-sys": "--system",
    "--system-prompt": "--system",
    "--draft-max": "--draft-tokens",
    "--spec-draft-n-max": "--draft-tokens",
    "--draft-p-min": "--draft-confidence",
    "--spec-draft-p-min": "--draft-confidence",
    "--typical": "--typical-p",
    "--top-nsigma": "--top-n-sigma",
    "--dynatemp-exp": "--dynatemp-exponent",
    "--mirostat-lr": "--mirostat-eta",
    "--mirostat-ent": "--mirostat-tau",
    "--dry-penalty-last-n": "--dry-last-n",
    "--dry-sequence-breaker": "--dry-breaker",
    "-r": "--stop",
    "--reverse-prompt": "--stop",
    "--grammar-file": "--grammar",
    "-j": "--json-schema",
    "-jf": "--json-schema",
    "--json-schema-file": "--json-schema",
    "-l": "--logit-bias",
    "-ctk": "--kv-type",
    "--cache-type-k": "--kv-type",
}


# --- parameters ------------------------------------------------------------------------------------------------------


def _quick(parameters: list[Any]) -> list[Any]:
    """Convert only what was given, and is no text: Typer's converters take longer to load than Typer itself."""
    for parameter in parameters:
        # On the object, because Typer makes them and takes no class for them.
        parameter.process_value = functools.partial(_process_value, parameter)
    return parameters


def _process_value(parameter: Any, ctx: Any, value: Any) -> Any:
    is_text = isinstance(value, str) and parameter.type_descriptor.annotation in (str, str | None)
    is_default = value is parameter.default and not parameter.required
    if not (ctx.resilient_parsing or is_text or is_default):
        return type(parameter).process_value(parameter, ctx, value)
    if value is None and (parameter.multiple or parameter.nargs == -1):
        value = ()
    return parameter.callback(ctx, parameter, value) if parameter.callback else value


def parse_error() -> type[Any]:
    """The base of Typer's parsing errors; Typer bundles its parser, so there is no public name for it."""
    return next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


# --- commands --------------------------------------------------------------------------------------------------------


class Command(TyperCommand):
    """A command that also takes the spellings of `ALIASES` and defaults from the user's config; help comes in panels.

    Attributes:
        is_tolerant: whether it runs without these defaults where the config has a mistake.
    """

    is_tolerant = False

    def make_parser(self, ctx: Any) -> Any:
        """The parser with further names for the options that it has."""
        parser = super().make_parser(ctx)
        for alias, name in ALIASES.items():
            if name in parser._long_opt:
                short = len(alias) == 2
                (parser._short_opt if short else parser._long_opt)[alias] = parser._long_opt[name]
        return parser

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options, `--help` among them."""
        return _quick(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill the context: from the command line, the environment, the user's config, the defaults."""
        ctx.default_map = ConfigDefaults(ctx, tolerant=self.is_tolerant)
        rest = super().parse_args(ctx, args)
        drop_outranked(ctx)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; where it refuses a value that no flag gave, say what did."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            name_origin(error, ctx)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """A section for each panel, in the order of the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(parameter.rich_help_panel or kind, []).append(record)
        # What belongs to this command alone comes first, as it does in the usage line.
        for name in sorted(sections, key=lambda name: ("Arguments", "Options", name).index(name)):
            with formatter.section(_heading(name)):
                formatter.write_dl(sections[name])


class TolerantCommand(Command):
    """A command that is wanted most when something is wrong, be it the config."""

    is_tolerant = True


def _heading(text: str) -> str:
    return text if color_level(sys.stdout) == "none" else typer.style(text, bold=True)


# --- groups, and commands that are imported when they are asked for ---------------------------------------------------


class Group(TyperGroup):
    """Commands below a common name, each with the first line of its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Options, `--help` among them."""
        return _quick(super().get_params(ctx))

    def lines(self) -> dict[str, str]:
        """Name of each command -> what it does."""
        return {name: first_line(command) for name, command in self.commands.items() if not command.hidden}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options, then commands."""
        records = [record for parameter in self.get_params(ctx) if (record := parameter.get_help_record(ctx))]
        for title, rows in (("Options", records), ("Commands", [*self.lines().items()])):
            with formatter.section(_heading(title)):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Names of commands and options that begin like this."""
        found = [CompletionItem(name, help=line) for name, line in self.lines().items() if name.startswith(incomplete)]
        return found + super(TyperGroup, self).shell_complete(ctx, incomplete)


def first_line(command: Any) -> str:
    """What a command does, as a list of commands says it."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command is.

    Attributes:
        module: below `specdec_cli.cli`; it has a function of the command's name, or a `typer.Typer` called `app`.
        line: what the list of commands says of it; the first line of its own help.
        epilog: stands below its help.
        kind: of command.
    """

    module: str
    line: str
    epilog: str = ""
    kind: type[Command] = Command

    def load(self, name: str) -> Any:
        """The command itself."""
        module = import_module(f"specdec_cli.cli.{self.module}")
        holder = typer.Typer(rich_markup_mode=None)
        if hasattr(module, "app"):
            for info in module.app.registered_commands:
                info.cls = Command
            holder.add_typer(module.app, name=name, cls=Group)
        else:
            holder.command(name, cls=self.kind, epilog=self.epilog or None)(getattr(module, name))
        return typer.main.get_group(holder).commands[name]


class _Commands(MutableMapping[str, Any]):
    """Name -> command; its module is imported when the command is looked up, not when the names are."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._entries[name].load(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        raise TypeError("commands stay")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class LazyGroup(Group):
    """A group that knows of its commands only what stands in `entries`, until one is asked for."""

    entries: Mapping[str, Entry] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(self.entries)

    def lines(self) -> dict[str, str]:
        """Name of each command -> what it does."""
        return {name: entry.line for name, entry in self.entries.items()}
