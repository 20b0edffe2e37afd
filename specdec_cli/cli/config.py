"""`specdec config`: defaults of options in the user's own file, and where each value in force comes from."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli import options as opt
from specdec_cli.cli.defaults import converted, known_options, names_a_file, origin_of, setting_aliases
from specdec_cli.errors import ModelMissingError, SpecdecError, UsageError

if TYPE_CHECKING:
    from specdec_cli.render.config import Origin, Value

SCHEMA = 1

app = typer.Typer(
    name="config", help="Your own defaults for options, and where each value comes from.", no_args_is_help=True
)


def _names(incomplete: str) -> list[str]:
    """For the shell."""
    return [name for name in known_options() if name.startswith(incomplete)]


@app.command()
def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="one option", show_default="all of them", autocompletion=_names),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document, see docs/json.md")] = False,
    color: opt.ColorOption = "auto",
) -> None:
    """Print the value of every option of `specdec run` when no flag is given, and where it comes from."""
    from specdec_cli.config import config_file, unknown_pairs
    from specdec_cli.render.config import config_document, print_config

    wanted = None if name is None else _known_name(name)
    values = [value for value in effective_values() if wanted in (None, value.name)]
    for mistake in unknown_pairs():
        typer.echo(f"Warning: {mistake}", err=True)
    if as_json:
        typer.echo(json.dumps({"schema": SCHEMA, **config_document(values, config_file())}, indent=2))
    else:
        print_config(values, config_file(), sys.stdout, color)


@app.command("set", context_settings={"ignore_unknown_options": True})
def set_value(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="an option of `specdec run`, as temperature or ctx", autocompletion=_names),
    ],
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[VALUE]", help="its value; several for a repeatable option")
    ] = None,
    unset: Annotated[bool, typer.Option("--unset", help="remove it from the file")] = False,
) -> None:
    """Make a value the default of an option, in `run`, `bench`, `check` and wherever else there is this option."""
    from specdec_cli.config import option_name, save_setting
    from specdec_cli.render.config import without_secrets

    if unset:
        if values:
            raise UsageError("--unset takes no value", f"`specdec config set {name} --unset`")
        typer.echo(f"removed {name} from {save_setting(option_name(name), None, setting_aliases())}", err=True)
        return
    name = _known_name(name)
    if not values:
        raise UsageError(f"there is no value for `{name}`", f"`specdec config set {name} VALUE`, or `--unset`")
    value = checked_value(name, values)
    path = save_setting(name, value, setting_aliases())
    typer.echo(f"{name} = {json.dumps(without_secrets(value), ensure_ascii=False)}, in {path}", err=True)
    _warn(name)


@app.command()
def path() -> None:
    """Print where the file is, or would be."""
    from specdec_cli.config import config_file

    typer.echo(config_file())


def _known_name(name: str) -> str:
    """The option of this name; llama.cpp's spellings count.

    Raises:
        UsageError: there is none.
    """
    import difflib

    from specdec_cli.config import option_name

    plain = option_name(name)
    known = known_options()
    wanted = setting_aliases().get(plain, plain)
    if wanted not in known:
        close = difflib.get_close_matches(plain, list(known), n=1, cutoff=0.5)
        guess = f"; did you mean `{close[0]}`?" if close else ""
        raise UsageError(f"there is no option `{plain}`{guess}", "see `specdec config show`")
    return wanted


# --- one value -------------------------------------------------------------------------------------------------------


def checked_value(name: str, texts: list[str]) -> Any:
    """A value as the file will hold it, once everything that checks the flag has seen it.

    Args:
        name: of the option.
        texts: as on the command line.

    Raises:
        UsageError: the flag would not take it.
        ModelMissingError: an unknown pair.
    """
    option, command = known_options()[name], _run_command()
    if len(texts) > 1 and not option.multiple:
        raise UsageError(f"`{name}` takes one value, not {len(texts)}", f"`specdec config set {name} VALUE`")
    try:
        # In a context of its own: the present file may be what is wrong.
        value = converted(option, texts if option.multiple else texts[0], command.context_class(command))
    except typer.BadParameter as error:
        from specdec_cli.wording import scrub

        message = scrub(f"`{name}` cannot be `{' '.join(texts)}`: {error.message}")
        raise UsageError(message, "see `specdec run --help`") from None
    if name == "pair":
        from specdec_cli.choice import choose_models

        choose_models(value, None, None)
    _check(option.name, value)
    # The same file from wherever specdec is called.
    is_file = isinstance(value, str | Path) and names_a_file(option, str(value))
    return _plain(name, Path(value).expanduser().absolute() if is_file else value)


def _check(field: str, value: Any) -> None:
    """What happens to the value in a command, before anything is loaded."""
    if field == "max_tokens":
        opt.require_positive(("--max-tokens", value), command="run")
    for group in (groups.ModelFlags(), groups.DraftingFlags(), groups.SamplingFlags(), groups.StructureFlags()):
        if hasattr(group, field):
            _check_group(replace(group, **{field: value}))


def _check_group(group: Any) -> None:
    if isinstance(group, groups.SamplingFlags):
        group.params()
    elif isinstance(group, groups.StructureFlags):
        group.structure()
    elif isinstance(group, groups.DraftingFlags):
        group.drafting(None, None)
    else:
        from specdec_cli.choice import ModelChoice

        groups.DraftingFlags().session_options(ModelChoice(None, Path(), None), group)


def _warn(name: str) -> None:
    """Say when the new value will not count: a variable wins, or something else in the file is wrong."""
    try:
        values = {value.name: value for value in effective_values()}
    except SpecdecError as error:
        typer.echo(f"Warning: {error.message}", err=True)
        return
    if values[name].origin == "environment":
        typer.echo(f"Warning: {values[name].where} is set, and wins over it", err=True)
    elif values[name].origin == "default":
        typer.echo("Warning: another setting takes its place, see `specdec config show`", err=True)


# --- all values ------------------------------------------------------------------------------------------------------


def effective_values() -> list[Value]:
    """The value of every option when there are no flags.

    Raises:
        UsageError: an environment variable or the config file has a value that cannot be.
    """
    from specdec_cli.render.config import Value

    context = _run_command().make_context("run", [])
    values = []
    for name, option in known_options().items():
        value = context.params[option.name]
        where = origin_of(context, option)
        if where:
            _check_set(option.name, value, where)
        origin: Origin = "default" if not where else "environment" if where == option.envvar else "config"
        note = option.show_default if isinstance(option.show_default, str) else ""
        values.append(Value(name, _plain(name, value), origin, where, note))
    return _with_pair(values, context)


def _check_set(field: str, value: Any, where: str) -> None:
    """What the flag's type lets through and a command refuses."""
    try:
        _check(field, value)
    except UsageError as error:
        raise UsageError(error.message, f"it is set by {where}") from None


def _plain(name: str, value: Any) -> Any:
    """A value as TOML and JSON have it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [*value] or None
    return int(value) if name == "draft-tokens" and value and value.isdecimal() else value


def _with_pair(values: list[Value], context: Any) -> list[Value]:
    """The same with what is known of the pair: saved by `specdec bench --save`, or in `models.toml`."""
    from specdec_cli.config import load_pair_settings, pair_setting_lines
    from specdec_cli.registry import load_registry

    if context.params["target"] is not None:
        return values
    try:
        pair = load_registry().pair(context.params["pair"])
    except ModelMissingError:
        return values
    saved, lines = load_pair_settings(pair.name), pair_setting_lines(pair.name)
    result = []
    for value in values:
        key = value.name.replace("-", "_")
        if key in lines and value.origin != "environment":
            value = replace(value, value=getattr(saved, key), origin="config", where=f"{lines[key]}, for {pair.name}")
        elif key == "draft_tokens" and value.origin == "default" and pair.draft_tokens is not None:
            value = replace(value, value=pair.draft_tokens, origin="pair", where=f"{pair.name} in models.toml")
        result.append(value)
    return result


def _run_command() -> Any:
    from specdec_cli.cli.app import COMMANDS

    return COMMANDS["run"].load("run")
