"""The `specdec` command: registration, errors to messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from specdec_cli.cli.command import Entry, LazyGroup, TolerantCommand, parse_error
from specdec_cli.errors import ExitCode, SpecdecError
from specdec_cli.render.terminal import neutralize

_EPILOG = (
    "Exit codes: 0 done, 1 failure, 2 usage, 3 model missing, 4 models do not fit together, "
    "5 a requested check failed, 130 interrupted."
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

# In the order of the help. The lines are those of the commands themselves, which a test compares.
COMMANDS = {
    "run": Entry("run", "Answer one prompt, live, with acceptance statistics.", RUN_EXAMPLES),
    "chat": Entry(
        "chat", "Talk with a pair; each turn decodes only what is new in it. `/help` lists the commands.", CHAT_EXAMPLES
    ),
    "pull": Entry(
        "pull", "Download a matched target and draft model, then make the draft fit this machine, see `specdec tune`."
    ),
    "tune": Entry(
        "tune",
        "Make the draft model in other formats, measure them here, and keep the fastest; answers stay the target's.",
    ),
    "check": Entry(
        "check", "Check that speculation changes nothing: greedy agreement, acceptance against theory, first tokens."
    ),
    "models": Entry("models", "List the known pairs: what is here, what fits this machine, what is worth it."),
    "ngram": Entry("ngram", "Statistics of your own text that drafts are made from."),
    "bench": Entry(
        "bench",
        "Measure the gain over plain decoding, interleaved and repeated; greedy unless a temperature is given.",
        BENCH_EXAMPLES,
    ),
    "doctor": Entry(
        "doctor",
        "Look at library, devices, files and network, measure the pair, and say what speed-up to expect here.",
        kind=TolerantCommand,
    ),
    "config": Entry("config", "Your own defaults for options, and where each value comes from."),
}


class _Program(LazyGroup):
    entries = COMMANDS


app = typer.Typer(
    name="specdec",
    cls=_Program,
    help="Make local GGUF models answer faster without changing what they say.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


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
    except parse_error() as error:
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
    return [argument for argument in arguments if argument in COMMANDS][:1]


def _report(message: str, hint: str, code: int, error: BaseException | None = None) -> int:
    # Libraries put addresses, with what is secret in them, into their messages.
    from specdec_cli.wording import scrub

    # Names from files may hold what a terminal would obey.
    message, hint = neutralize(message), neutralize(hint)
    text = f"Error: {message}\n" if code != ExitCode.INTERRUPTED else "Interrupted\n"
    if hint:
        text += f"\nHint: {hint}\n"
    if error is not None and os.environ.get("SPECDEC_DEBUG"):
        import traceback

        text = "".join(traceback.format_exception(error)) + text
    typer.echo(scrub(text), err=True, nl=False)
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
