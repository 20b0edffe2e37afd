"""The `specdec` command: registration, errors to messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from specdec_cli.cli import options as opt
from specdec_cli.cli.bench import bench
from specdec_cli.cli.chat import chat
from specdec_cli.cli.check import check
from specdec_cli.cli.ngram import app as ngram_app
from specdec_cli.cli.options import AliasCommand
from specdec_cli.cli.pull import pull
from specdec_cli.cli.run import run
from specdec_cli.cli.tune import tune
from specdec_cli.errors import ExitCode, SpecdecError

_EPILOG = (
    "Exit codes: 0 done, 1 failure, 2 usage, 3 model missing, 4 models do not fit together, "
    "5 a requested check failed, 130 interrupted."
)

app = typer.Typer(
    name="specdec",
    help="Make local GGUF models answer faster without changing what they say.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RUN_EXAMPLES = """
Examples:

specdec run "Write a Python function that merges two sorted lists"

git diff | specdec run "Write a commit message"

specdec run -t 0 --compare "Name the planets"

specdec run --target big.gguf --draft small.gguf -f prompt.txt
"""

BENCH_EXAMPLES = """
Examples:

specdec bench --limit 1 --repeat 2

specdec bench --json > before.json

specdec bench --compare before.json

specdec bench qwen2.5-coder-1.5b --sweep --save
"""

CHAT_EXAMPLES = """
Examples:

specdec chat

specdec chat qwen2.5-coder-1.5b -s "You review Python code" --ctx 16384

specdec chat --continue

echo "What is a monad?" | specdec chat -n 40
"""

app.command(cls=AliasCommand, epilog=RUN_EXAMPLES)(run)
app.command(cls=AliasCommand, epilog=CHAT_EXAMPLES)(chat)
app.command()(pull)
app.command()(tune)
app.command(cls=AliasCommand)(check)
app.add_typer(ngram_app)
app.command(cls=AliasCommand, epilog=BENCH_EXAMPLES)(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from specdec_cli import __version__
        from specdec_cli.llama import versions

        build = versions()
        typer.echo(f"specdec {__version__}")
        typer.echo(f"llama-cpp-python {version('llama-cpp-python')}")
        typer.echo(f"llama.cpp {build['llama.cpp']}  ({build['system']})")
        raise typer.Exit


@app.callback()
def _callback(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="show versions and exit")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", envvar="SPECDEC_DEBUG", help="show tracebacks")] = False,
) -> None:
    if debug:
        os.environ["SPECDEC_DEBUG"] = "1"


def invoke(arguments: list[str]) -> int:
    """Run one command line.

    Returns:
        The exit code; every expected error was printed.
    """
    arguments = _take_debug(arguments)
    try:
        result = app(args=arguments, prog_name="specdec", standalone_mode=False)
        code = result if isinstance(result, int) else ExitCode.OK
        # A plain number is the framework's answer to Ctrl-C before a command could say anything.
        if code == ExitCode.INTERRUPTED and not isinstance(code, ExitCode):
            code = _report("interrupted", "", ExitCode.INTERRUPTED)
    except SpecdecError as error:
        code = _report(error.message, error.hint, error.exit_code, error)
    except KeyboardInterrupt:
        code = _report("interrupted", "", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        code = ExitCode.FAILURE
    except typer.Exit as error:
        code = error.exit_code
    except typer.Abort:
        code = ExitCode.INTERRUPTED
    except opt.parse_error() as error:
        return _report_usage(error, arguments)
    except OSError as error:
        reason = error.strerror or str(error)
        code = _report(f"{error.filename}: {reason}" if error.filename else f"cannot write the output: {reason}", "", 1)
    except Exception as error:
        hint = "run it again with `--debug` and report what that prints"
        code = _report(f"internal error: {type(error).__name__}: {error}", hint, ExitCode.FAILURE, error)
    return _close_stdout(code)


def _take_debug(arguments: list[str]) -> list[str]:
    """`--debug` counts wherever it stands in front of `--`: that is how the hint is followed."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" not in arguments[:end]:
        return arguments
    os.environ["SPECDEC_DEBUG"] = "1"
    return [argument for argument in arguments[:end] if argument != "--debug"] + arguments[end:]


def _report_usage(error: Any, arguments: list[str]) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else " ".join(["specdec", *_command_name(arguments)])
    message = error.format_message()
    if not message.strip() or type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return ExitCode.USAGE
    return _report(message.rstrip("."), f"see `{command} --help`", ExitCode.USAGE)


def _command_name(arguments: list[str]) -> list[str]:
    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    return [argument for argument in arguments if argument in names][:1]


def _report(message: str, hint: str, code: int, error: BaseException | None = None) -> int:
    if error is not None and os.environ.get("SPECDEC_DEBUG"):
        import traceback

        traceback.print_exception(error)
    text = f"Error: {message}\n" if code != ExitCode.INTERRUPTED else "Interrupted\n"
    if hint:
        text += f"\nHint: {hint}\n"
    typer.echo(text, err=True, nl=False)
    return code


def _close_stdout(code: int) -> int:
    """Flush now: a reader that is gone must not become a message of the interpreter's shutdown."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        code = code or ExitCode.FAILURE
    except OSError as error:
        return _report(f"cannot write the output: {error.strerror}", "", ExitCode.FAILURE)
    if code and sys.stdout is not None and not sys.stdout.isatty():
        from specdec_cli.render.sink import silence

        silence(sys.stdout)
    return code
