"""Where a value comes from: flag, environment, the user's config, or the option's own default; who yields to whom."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.config import Setting

_LEVELS = ("DEFAULT", "DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")

_TARGETS = {"name", "pair", "target"}
_FORMS = {"grammar", "json_schema", "json_object", "ignore_eos"}
_YIELDS = {
    **dict.fromkeys((*_TARGETS, "draft"), _TARGETS),
    **dict.fromkeys(_FORMS, _FORMS),
    "no_draft": {"drafter", "draft_tokens", "draft_confidence"},
    "system": {"raw"},
    "raw": {"system"},
}
"""Parameter -> those that take its place: a pair in the config must not meet the target on the command line."""

_NOT_SETTINGS = {"file", "help"}


class ConfigDefaults(dict[str, Any]):
    """Parameter name -> value in the user's config, read when the first value is wanted: not for help or completion.

    Args:
        context: of the command.
        tolerant: take a file with mistakes for an empty one.
    """

    def __init__(self, context: Any, *, tolerant: bool = False) -> None:
        super().__init__()
        self._context, self._tolerant = context, tolerant
        self.settings: dict[str, Setting] | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """The value for a parameter, as text or a list of texts; None without any."""
        if self._context.resilient_parsing:
            return default
        if self.settings is None:
            self.settings = self._read()
            parameters = {parameter.name: parameter for parameter in self._context.command.params}
            self.update(
                {name: given_text(parameters[name], found, self._context) for name, found in self.settings.items()}
            )
        return super().get(name, default)

    def _read(self) -> dict[str, Setting]:
        """By parameter."""
        try:
            return read_settings(self._context.command)
        except UsageError:
            if self._tolerant:
                return {}
            raise


def read_settings(command: Any) -> dict[str, Setting]:
    """What the config says about the parameters of a command.

    Raises:
        UsageError: the config file cannot be read, or has an unknown key.
    """
    from specdec_cli.config import config_file, load_settings

    # Most have no file, and some commands no option that could be in it.
    if not config_file().exists():
        return {}
    names = {parameter.name: name for parameter in command.params if (name := setting_name(parameter))}
    found = load_settings(known_options(), setting_aliases()) if names else {}
    return {parameter: found[name] for parameter, name in names.items() if name in found}


@cache
def known_options() -> Mapping[str, Any]:
    """The options that the config can have a default for: those of `specdec run`, by name."""
    from specdec_cli.cli.app import COMMANDS

    options = [parameter for parameter in COMMANDS["run"].load("run").params if parameter.param_type_name == "option"]
    return {_long_name(option): option for option in options if option.name not in _NOT_SETTINGS}


def setting_aliases() -> Mapping[str, str]:
    """Other names that an option may have in the config -> its name: llama.cpp's long flags."""
    from specdec_cli.cli.command import ALIASES

    names = {alias.removeprefix("--"): name.removeprefix("--") for alias, name in ALIASES.items() if alias[1] == "-"}
    return {alias: name for alias, name in names.items() if alias not in known_options()}


def setting_name(parameter: Any) -> str | None:
    """The setting for a parameter of any command: that of the option of `run` with the same variable, or same help."""
    for name, option in known_options().items():
        if parameter.envvar is not None and parameter.envvar == option.envvar:
            return name
        if parameter.envvar is None and (parameter.opts, parameter.help) == (option.opts, option.help):
            return name
    return None


def _long_name(option: Any) -> str:
    return str(next(name for name in option.opts if name.startswith("--")).removeprefix("--"))


def given_text(parameter: Any, setting: Setting, context: Any) -> str | list[str]:
    """A value of the config as it would stand on the command line.

    Raises:
        UsageError: the flag would not take it; it names file and line.
    """
    value, is_flag = setting.value, bool(getattr(parameter, "is_flag", False))
    values = value if isinstance(value, list) else [value]
    try:
        if is_flag != isinstance(value, bool):
            raise typer.BadParameter("it must be true or false" if is_flag else "it takes a value, not true or false")
        if isinstance(value, dict) or (len(values) != 1 and not parameter.multiple):
            raise typer.BadParameter("it takes one value")
        texts = [_expanded(str(value), parameter) for value in values]
        text = texts if parameter.multiple else texts[0]
        converted(parameter, text, context)
    except typer.BadParameter as error:
        name = setting_name(parameter)
        hint = f"correct the file, or `specdec config set {name} --unset`"
        from specdec_cli.wording import scrub

        # As TOML spells it.
        shown = str(value).lower() if isinstance(value, bool) else scrub(str(value))
        raise UsageError(f"{setting.where}: `{name}` cannot be `{shown}`: {scrub(error.message)}", hint) from None
    return text


def _expanded(text: str, parameter: Any) -> str:
    """No shell has seen the file."""
    return str(Path(text).expanduser()) if names_a_file(parameter, text) else text


def names_a_file(parameter: Any, text: str) -> bool:
    """Whether a value is a path; models may be named by a source or a known name too."""
    if parameter.name not in {"target", "draft"}:
        return bool(parameter.type_descriptor.is_path)
    from specdec_cli.choice import is_known, is_source

    return not (is_source(text) or is_known(text))


def converted(parameter: Any, text: str | list[str], context: Any) -> Any:
    """What the command would get for a text on the command line.

    Raises:
        typer.BadParameter: the option does not take it.
    """
    try:
        return type(parameter).process_value(parameter, context, text)
    except typer.BadParameter as error:
        error.message = error.message.removeprefix("Value error, ").rstrip(".")
        raise


def drop_outranked(context: Any) -> None:
    """Give parameters their own defaults again that a higher source replaced by another parameter."""
    ranks = {parameter.name: _rank(context, parameter.name) for parameter in context.command.params}
    for parameter in context.command.params:
        others = _YIELDS.get(parameter.name, set()) - {parameter.name}
        if 0 < ranks[parameter.name] < max((ranks.get(other, 0) for other in others), default=0):
            source = context.get_parameter_source(parameter.name)
            context.params[parameter.name] = parameter.default
            context.set_parameter_source(parameter.name, type(source).DEFAULT)


def _rank(context: Any, name: str) -> int:
    source = context.get_parameter_source(name)
    return _LEVELS.index(source.name) if source is not None and source.name in _LEVELS else 0


def name_origin(error: UsageError, context: Any) -> None:
    """Where an option with a wrong value was set, when it was not on the command line: in place of the hint."""
    for parameter in context.command.params:
        names = "|".join(re.escape(name.lstrip("-")) for name in parameter.opts)
        origin = origin_of(context, parameter)
        if origin and re.match(rf"(--)?({names})(?![\w-])", error.message):
            error.hint = f"it is set by {origin}"


def origin_of(context: Any, parameter: Any) -> str:
    """The environment variable, or file and line, that a value is from; empty for flags and defaults."""
    source = context.get_parameter_source(parameter.name)
    if source is not None and source.name == "ENVIRONMENT":
        return str(parameter.envvar)
    if source is not None and source.name == "DEFAULT_MAP":
        return str(context.default_map.settings[parameter.name].where)
    return ""
