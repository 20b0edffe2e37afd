"""Options that commands share, declared once: same names, help and environment variables everywhere."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specdec_cli.errors import UsageError

ColorChoice = Literal["auto", "always", "never"]


def _option(*names: str, panel: str | None = None, **settings: Any) -> Any:
    """An option with the environment variable that its long name gives."""
    long_name = next(name for name in names if name.startswith("--")).partition("/")[0]
    settings.setdefault("envvar", f"SPECDEC_{long_name[2:].replace('-', '_').upper()}")
    return typer.Option(*names, rich_help_panel=panel, **settings)


model_option = functools.partial(_option, panel="Model")
drafting_option = functools.partial(_option, panel="Drafting")
sampling_option = functools.partial(_option, panel="Sampling")
structure_option = functools.partial(_option, panel="Structure")
output_option = functools.partial(_option, panel="Output")
chat_option = functools.partial(_option, panel="Conversation")


def complete_pair(incomplete: str) -> list[str]:
    """Names of pairs for the shell, from the TOML files alone."""
    from specdec_cli.registry import known_names

    return [name for name in known_names("pairs") if name.startswith(incomplete)]


def complete_name(incomplete: str) -> list[str]:
    """Names of pairs and models for the shell."""
    from specdec_cli.registry import known_names

    models = [name for name in known_names("models") if name.startswith(incomplete)]
    return list(dict.fromkeys([*complete_pair(incomplete), *models]))


PairArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[PAIR]",
        help="pair from `models.toml`",
        envvar="SPECDEC_PAIR",
        show_default="the default pair",
        autocompletion=complete_pair,
    ),
]
PromptArgument = Annotated[
    str | None, typer.Argument(help="the question; `-` reads standard input only", show_default=False)
]
FileOption = Annotated[
    list[Path] | None,
    typer.Option("--file", "-f", metavar="FILE", help="read the prompt from a file, `-` is standard input; repeatable"),
]
RawOption = Annotated[bool, typer.Option("--raw", help="complete the bare text, without the chat template")]
SystemOption = Annotated[str | None, _option("--system", "-s", metavar="TEXT", help="system message")]
MaxTokensOption = Annotated[int, _option("--max-tokens", "-n", metavar="N", help="most tokens of the answer")]
CompareOption = Annotated[
    bool, typer.Option("--compare", rich_help_panel="Output", help="run the baseline too and print both speeds")
]
TargetOption = Annotated[
    str | None,
    model_option(
        "--target",
        metavar="MODEL",
        help="target: a .gguf file, `hf:OWNER/REPO[:QUANT]`, `url:…`, `pypi:…`, or a known model",
    ),
]
DraftOption = Annotated[
    str | None, model_option("--draft", "-d", metavar="MODEL", help="draft model, named in the same ways")
]
OfflineOption = Annotated[bool, model_option("--offline", help="do not download anything")]
ColorOption = Annotated[ColorChoice, output_option("--color", help="when to color the output")]
LoadOption = Annotated[
    Path | None, chat_option("--load", metavar="FILE", envvar=None, help="go on with a conversation that `/save` wrote")
]
ContinueOption = Annotated[bool, chat_option("--continue", envvar=None, help="go on with the last conversation")]
NoHistoryOption = Annotated[bool, chat_option("--no-history", help="keep neither what is typed nor the conversation")]
PlainOption = Annotated[bool, output_option("--plain", envvar=None, help="no styling, as `--color never`")]
QuietOption = Annotated[bool, output_option("--quiet", "-q", help="no summary, no progress")]


def one_pair(argument: str | None, option: str | None) -> str | None:
    """The pair, which may be named either way.

    Raises:
        UsageError: it is named both ways, differently.
    """
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"two pairs are named: `{argument}` and `{option}`", "leave out `--pair`")
    return argument if argument is not None else option


def require_positive(*values: tuple[str, int | None], command: str) -> None:
    """Raise a UsageError for a flag of a command whose number is below 1; None is none."""
    for name, value in values:
        if value is not None and value < 1:
            raise UsageError(f"{name} must be 1 or more, not {value}", f"see `specdec {command} --help`")


def is_configured(context: typer.Context, name: str) -> bool:
    """Whether a parameter has its value from the user's config."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"
