"""`specdec tune`: the draft model in the format that this machine runs fastest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from specdec_cli.cli import options as opt
from specdec_cli.cli.status import status
from specdec_cli.errors import UsageError

SCHEMA = 1

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="print the table, keep and change nothing")]
UndoOption = Annotated[bool, typer.Option("--undo", help="go back to the published draft")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document, see docs/json.md")]


def tune(
    name: opt.PairArgument = None,
    target: opt.TargetOption = None,
    draft: opt.DraftOption = None,
    offline: opt.OfflineOption = False,
    dry_run: DryRunOption = False,
    undo: UndoOption = False,
    quiet: opt.QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the draft model in other formats, measure them here, and keep the fastest; answers stay the target's."""
    if dry_run and undo:
        raise UsageError("--dry-run and --undo exclude each other", "leave one of them out")
    silent = quiet or as_json
    with status(sys.stderr, "Starting", quiet=silent):
        from specdec_cli.choice import choose_models, fetch_files
        from specdec_cli.render.progress import make_progress
        from specdec_cli.tuning import forget

    choice = choose_models(name, target, draft)
    if choice.draft is None:
        raise UsageError("there is no draft model to tune", "name one with `--draft MODEL`")
    target_file, draft_file = fetch_files(choice, offline=offline or undo, progress=make_progress(silent))
    assert draft_file is not None
    if not undo:
        _tune_and_show(choice.pair, (target_file, draft_file), dry_run=dry_run, quiet=quiet, as_json=as_json)
        return
    undone = forget(target_file, draft_file)
    if as_json:
        typer.echo(json.dumps({"schema": SCHEMA, "pair": choice.pair, "undone": undone}, indent=2))
    elif not quiet:
        typer.echo("back to the published draft" if undone else "nothing was tuned", err=True)


def _tune_and_show(pair: str | None, files: tuple[Path, Path], *, dry_run: bool, quiet: bool, as_json: bool) -> None:
    from specdec_cli.render.progress import make_steps
    from specdec_cli.render.tune import print_tune
    from specdec_cli.tuning import tune as run_tune

    with make_steps(quiet or as_json) as on_progress:
        report = run_tune(*files, dry_run=dry_run, on_progress=on_progress)
    if as_json:
        document = {"schema": SCHEMA, "pair": pair, "dry_run": dry_run, **report.document()}
        typer.echo(json.dumps(document, indent=2))
    else:
        print_tune(report, sys.stdout, dry_run=dry_run)


def tune_after_pull(target: Path, draft: Path, *, quiet: bool) -> None:
    """Tune what was downloaded, unless that was done before; what goes wrong is a warning.

    Args:
        target: the target.
        draft: the draft model as published.
        quiet: show no progress.
    """
    from specdec_cli.errors import SpecdecError
    from specdec_cli.gguf import check_header

    try:
        for path in (target, draft):
            check_header(path)
    except SpecdecError:
        # Whatever was fetched, it is no model: loading it will say so.
        return
    from specdec_cli.render.progress import make_steps
    from specdec_cli.tuning import find_tuned
    from specdec_cli.tuning import tune as run_tune

    if find_tuned(target, draft) is not None:
        return
    try:
        with make_steps(quiet) as on_progress:
            report = run_tune(target, draft, on_progress=on_progress)
    except (SpecdecError, OSError) as error:
        reason = error.message if isinstance(error, SpecdecError) else str(error)
        typer.echo(f"Warning: the draft was not tuned: {reason}; `specdec tune` tries again", err=True)
        return
    if report.is_crowded:
        typer.echo(f"Warning: {report.reason}; `specdec tune` tries again", err=True)
    elif not quiet:
        typer.echo(f"draft for this machine: {report.chosen.label} ({report.reason})", err=True)
