"""What `/set` changes in a conversation: the options of `specdec run`, read by the same parser and checks."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import typer

from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli.command import ALIASES, Command, parse_error
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.chat import ChatSettings
    from specdec_cli.choice import ModelChoice
    from specdec_cli.session import SessionOptions
    from specdec_cli.transcript import Value

DraftMode = Literal["on", "off", "auto"]

_TRUE, _FALSE = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
_DEFAULT = "default"
_DEFAULT_DRAFT_TOKENS = "5"
"""With `/draft on` where no number was given."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a conversation that can change.

    Attributes:
        drafting: what proposes tokens.
        sampling: how the next token is chosen.
        structure: where an answer ends and what form it has.
        chat: what a conversation has beside its answers.
        given: fields of all of them that the user chose.
    """

    drafting: groups.DraftingFlags
    sampling: groups.SamplingFlags
    structure: groups.StructureFlags
    chat: groups.ChatFlags
    given: frozenset[str] = frozenset()

    def session_options(self, choice: ModelChoice, model: groups.ModelFlags) -> SessionOptions:
        """How to load and draft.

        Raises:
            UsageError: a value outside its range, or a draft model is wanted and there is none.
        """
        return self.drafting.session_options(choice, model, self.given)

    def chat_settings(
        self, choice: ModelChoice, model: groups.ModelFlags, target: Path | None, *, tells: bool = True
    ) -> ChatSettings:
        """How to answer.

        Args:
            choice: which models.
            model: how they are loaded.
            target: the target's file; None checks without it.
            tells: say which sampling settings come from the file.

        Raises:
            UsageError: a value that cannot be.
            ModelLoadError: the file is not a model.
        """
        from specdec_cli.chat import ChatSettings

        params = self.sampling.params() if target is None else self.sampling.params_for(target, self.given, tells=tells)
        drafting = self.session_options(choice, model).drafting
        return ChatSettings(params, self.structure.structure(), drafting, self.chat.max_tokens, self.chat.on_full)

    def with_value(self, name: str, text: str) -> Settings:
        """Another value for one setting, as it would follow the option; `default` takes the choice back.

        Raises:
            UsageError: an unknown name, or a value that the option does not take.
        """
        option = _option(name)
        if text == _DEFAULT:
            return self._replaced(option.name, None, is_given=False)
        return self._replaced(option.name, _parsed(option, _words(option, text)), is_given=True)

    def with_values(self, values: Mapping[str, Value]) -> Settings:
        """Several values, as `chosen` gives them.

        Raises:
            UsageError: an unknown name, or a value that the option does not take.
        """
        settings = self
        for name, value in values.items():
            option = _option(name)
            words = value if isinstance(value, list) else [str(value).lower() if option.is_flag else str(value)]
            settings = settings._replaced(option.name, _parsed(option, words), is_given=True)
        return settings

    def with_file(
        self, path: Path, values: Mapping[str, Value], *, trusted: bool = False
    ) -> tuple[Settings, list[str]]:
        """What a conversation's file brings, where nothing is chosen yet by the command line.

        A file that came from somewhere else must not decide what is read or written: settings that name files are
        left out.

        Args:
            path: the file.
            values: its settings.
            trusted: this program wrote it for itself.

        Returns:
            The settings, and what to tell about them.

        Raises:
            UsageError: an unknown name, or a value that the option does not take; the message names the file.
        """
        left_out = [] if trusted else [name for name, value in values.items() if _names_a_file(name, value)]
        brought = {name: value for name, value in values.items() if name not in left_out}
        try:
            settings = self.with_values(brought)
        except UsageError as error:
            raise UsageError(f"cannot load `{path}`: {error.message}", error.hint) from None
        notes = [f"settings of the file: {', '.join(f'{name} {settings.value(name)}' for name in brought)}"]
        if left_out:
            notes.append(f"left out, as a file must not name others: {', '.join(left_out)}; `/set` sets them")
        return settings, notes if brought else notes[1:]

    def with_drafting(self, mode: DraftMode) -> Settings:
        """Drafts in every round, never, or where they pay."""
        flags = self.drafting
        if mode == "off":
            return dataclasses.replace(
                self, drafting=dataclasses.replace(flags, no_draft=True), given=self.given | {"no_draft"}
            )
        drafter = "auto" if flags.drafter == "none" else flags.drafter
        number = flags.draft_tokens if flags.num_draft_tokens else _DEFAULT_DRAFT_TOKENS
        tokens = "auto" if mode == "auto" else number
        flags = dataclasses.replace(flags, no_draft=False, drafter=drafter, draft_tokens=tokens)
        given = self.given - {"no_draft"} | {"drafter", "draft_tokens"}
        return dataclasses.replace(self, drafting=flags, given=given)

    def value(self, name: str) -> str:
        """What a setting is, in words.

        Raises:
            UsageError: an unknown name.
        """
        option = _option(name)
        value = self._value(option.name)
        if value in (None, [], ()):
            return option.show_default if isinstance(option.show_default, str) else "none"
        if isinstance(value, bool):
            return "on" if value else "off"
        return " ".join(map(shlex.quote, value)) if isinstance(value, list) else str(value)

    def chosen(self) -> dict[str, Value]:
        """What the user chose: name -> value."""
        found: dict[str, Value] = {}
        for option in _command().params:
            value = self._value(option.name)
            if option.name in self.given and value is not None:
                found[_name(option)] = str(value) if isinstance(value, Path) else value
        return found

    def _value(self, field: str) -> Any:
        return getattr(getattr(self, _group_of(field)), field)

    def _replaced(self, field: str, parsed: Settings | None, *, is_given: bool) -> Settings:
        name = _group_of(field)
        group = getattr(self, name)
        default = next(item.default for item in dataclasses.fields(group) if item.name == field)
        changed = dataclasses.replace(group, **{field: default if parsed is None else parsed._value(field)})
        given = self.given | {field} if is_given else self.given - {field}
        return dataclasses.replace(self, given=given, **{name: changed})


_GROUPS: dict[str, Any] = {
    "drafting": groups.DraftingFlags,
    "sampling": groups.SamplingFlags,
    "structure": groups.StructureFlags,
    "chat": groups.ChatFlags,
}


def names() -> list[str]:
    """All settings."""
    return [_name(option) for option in _command().params]


def values_of(name: str) -> list[str]:
    """Words to choose from, where a setting has such; none for an unknown one."""
    option = _options().get(name)
    if option is None:
        return []
    if option.is_flag:
        return [_TRUE[0], _FALSE[0]]
    kind = get_type_hints(_GROUPS[_group_of(option.name)])[option.name]
    return list(get_args(kind)) if get_origin(kind) is Literal else []


@groups.with_flag_groups
def _settings(
    drafting: groups.DraftingFlags,
    sampling: groups.SamplingFlags,
    structure: groups.StructureFlags,
    chat: groups.ChatFlags,
) -> Settings:
    return Settings(drafting, sampling, structure, chat)


@functools.cache
def _command() -> Any:
    """A command with these options alone: its parser turns words into values."""
    parser = typer.Typer(add_completion=False)
    parser.command(cls=Command)(_settings)
    return typer.main.get_command(parser)


@functools.cache
def _options() -> dict[str, Any]:
    """Name, without dashes -> option; with the short names and the spellings of llama.cpp's tools."""
    found = {name.lstrip("-"): option for option in _command().params for name in option.opts}
    aliases = {alias.lstrip("-"): found.get(name.lstrip("-")) for alias, name in ALIASES.items()}
    return {name: option for name, option in {**aliases, **found}.items() if option is not None}


def _option(name: str) -> Any:
    name = name.lstrip("-").replace("_", "-")
    if name in _options():
        return _options()[name]
    if name in {item.name.replace("_", "-") for item in dataclasses.fields(groups.ModelFlags)}:
        raise UsageError(f"`{name}` is fixed once the models are loaded", f"start again with `--{name}`")
    close = difflib.get_close_matches(name, _options(), n=3, cutoff=0.5)
    listed = " or ".join(f"`{match}`" for match in close)
    raise UsageError(f"there is no setting `{name}`", f"did you mean {listed}?" if close else "`/set` lists them")


def _name(option: Any) -> str:
    return str(next(name for name in option.opts if name.startswith("--"))[2:])


def _names_a_file(name: str, value: Value) -> bool:
    from specdec_cli.constraint import is_inline_schema

    option = _options().get(name)
    if option is None:
        return False
    if option.name == "json_schema":
        return not is_inline_schema(str(value))
    return Path in get_args(get_type_hints(_GROUPS[_group_of(option.name)])[option.name])


def _group_of(field: str) -> str:
    return next(name for name, kind in _GROUPS.items() if field in kind.__dataclass_fields__)


def _words(option: Any, text: str) -> list[str]:
    """One value as it stands, unless it is quoted as a whole; several where the option can be repeated."""
    try:
        words = shlex.split(text)
    except ValueError:
        return [text]
    return words if option.multiple or (len(words) == 1 and text[0] in "\"'") else [text]


def _parsed(option: Any, words: list[str]) -> Settings:
    name = f"--{_name(option)}"
    if option.is_flag:
        [word] = words
        if word not in (*_TRUE, *_FALSE):
            raise UsageError(f"{name[2:]} is on or off, not `{word}`")
        arguments = [name] if word in _TRUE else option.secondary_opts[:1]
    else:
        arguments = [f"{name}={word}" for word in words]
    try:
        parsed = _command().main(arguments, prog_name="/set", standalone_mode=False)
    except parse_error() as error:
        raise UsageError(_refusal(option, words) or error.format_message().rstrip(".")) from None
    assert isinstance(parsed, Settings)
    return parsed


def _refusal(option: Any, words: list[str]) -> str:
    """What the option takes, in the words of this program; empty where its own check says so."""
    name, given = _name(option), " ".join(words)
    kind = get_type_hints(_GROUPS[_group_of(option.name)])[option.name]
    if choices := values_of(name):
        return f"{name} must be one of {', '.join(f'`{choice}`' for choice in choices)}, not `{given}`"
    wanted = {int: "a whole number", float: "a number"}.get(next(iter(get_args(kind)), kind))
    return f"{name} must be {wanted}, not `{given}`" if wanted else ""


def draft_modes() -> tuple[str, ...]:
    """What `/draft` takes."""
    return get_args(DraftMode)
