"""`specdec doctor`: what this machine can do, and what speculation is worth on it."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli import options as opt
from specdec_cli.cli.status import status
from specdec_cli.errors import ExitCode, SpecdecError

if TYPE_CHECKING:
    from specdec_cli.doctor import Finding, LocalPair, Measurement


@groups.with_flag_groups
def doctor(
    model: groups.ModelFlags,
    name: opt.PairArgument = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="load no model, measure nothing")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON document for a bug report, see docs/json.md")
    ] = False,
    color: opt.ColorOption = "auto",
) -> int:
    """Look at library, devices, files and network, measure the pair, and say what speed-up to expect here."""
    with status(sys.stderr, "Looking", quiet=as_json):
        from specdec_cli.render.doctor import doctor_document, print_finding, print_measurement

    pair = opt.one_pair(name, model.pair)
    findings: list[Finding] = []
    files: LocalPair | None = None
    for finding, found in _look(model, pair, color):
        findings.append(finding)
        files = found or files
        if not as_json:
            print_finding(finding, sys.stdout, color)
            sys.stdout.flush()
    measured = None
    if files is not None and not no_measure and not _is_broken(findings):
        measured = _measure(files, model, findings, quiet=as_json)
    if as_json:
        models = [model.target, model.draft, *([files.target, files.draft] if files else [])]
        typer.echo(json.dumps(doctor_document(findings, measured, models), indent=2))
    elif measured is not None:
        print_measurement(measured, sys.stdout, color)
    elif findings[-1].name == "measure":
        print_finding(findings[-1], sys.stdout, color)
    return next((finding.exit_code for finding in findings if finding.status == "problem"), ExitCode.OK)


def _look(
    model: groups.ModelFlags, pair: str | None, color: opt.ColorChoice
) -> Iterator[tuple[Finding, LocalPair | None]]:
    """The findings one by one, with the pair's files where it is about them."""
    from specdec_cli import doctor as look
    from specdec_cli.render.doctor import look_at_terminal

    yield look.looked_at("specdec", look.look_at_program), None
    library = look.looked_at("llama.cpp", look.look_at_library)
    yield library, None
    if library.status != "problem":
        yield look.looked_at("build", look.look_at_build), None
        yield look.looked_at("devices", look.look_at_devices), None
    for name, what in (
        ("cpu", functools.partial(look.look_at_cpu, model.threads)),
        ("memory", look.look_at_memory),
        ("terminal", functools.partial(look_at_terminal, color)),
        ("config", lambda: look.look_at_config(_mistake())),
        ("files", look.look_at_files),
        ("hub", functools.partial(look.look_at_hub, offline=model.offline)),
    ):
        yield look.looked_at(name, what), None
    found: list[LocalPair | None] = []

    def look_at_pair() -> Finding:
        finding, files = look.look_at_pair(pair, model.target, model.draft)
        found.append(files)
        return finding

    finding = look.looked_at("pair", look_at_pair)
    yield finding, found[0] if found else None


def _mistake() -> SpecdecError | None:
    """What every other command would say of the user's config."""
    from specdec_cli.cli.app import COMMANDS
    from specdec_cli.cli.defaults import ConfigDefaults

    command = COMMANDS["run"].load("run")
    try:
        ConfigDefaults(command.context_class(command, info_name="run")).get("")
    except SpecdecError as error:
        return error
    return None


def _is_broken(findings: list[Finding]) -> bool:
    return any(finding.name == "llama.cpp" and finding.status == "problem" for finding in findings)


def _measure(files: LocalPair, model: groups.ModelFlags, findings: list[Finding], *, quiet: bool) -> Measurement | None:
    """The measurement; what keeps it from being made is one more finding."""
    from specdec_cli import interrupt
    from specdec_cli.choice import ModelChoice
    from specdec_cli.doctor import Finding, measure

    try:
        options = groups.DraftingFlags().session_options(ModelChoice(None, files.target, files.draft), model)
        with interrupt.stop_on_sigint(), status(sys.stderr, f"Measuring {files.target.name}", quiet=quiet):
            return measure(files, options)
    except SpecdecError as error:
        findings.append(Finding.of_error("measure", error))
        return None
