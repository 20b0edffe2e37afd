"""`specdec pull`: put a pair's two files on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec_cli.cli import options as opt
from specdec_cli.registry import ModelSpec, Pair, load_registry

if TYPE_CHECKING:
    from specdec_cli.sources import Progress

SCHEMA = 1


def pull_pair(pair_name: str | None, *, offline: bool = False, quiet: bool = False) -> tuple[Pair, Path, Path]:
    """Look a pair up (None: the default one) and make both files present; says so when they already are.

    Raises:
        ModelMissingError: an unknown pair, or a file that is not here while downloads are forbidden.
        DownloadError: no source delivered a file.
    """
    # Inside, because the start of every command passes through this module.
    from specdec_cli.sources import SilentProgress, fetch, locate

    pair = load_registry().pair(pair_name)
    specs = (pair.target, pair.draft)
    present = all(locate(spec) for spec in specs)
    if present and not quiet:
        typer.echo(f"{pair.name}: already there", err=True)
    progress = SilentProgress() if present else _progress(quiet)
    target, draft = (fetch(spec, offline=offline, progress=progress, pair=pair.name) for spec in specs)
    return pair, target, draft


def _progress(quiet: bool) -> Progress:
    from specdec_cli.render.progress import make_progress

    return make_progress(quiet)


def pull(
    pair: Annotated[
        str | None, typer.Argument(help="pair to download; without it the default pair", envvar="SPECDEC_PAIR")
    ] = None,
    offline: opt.OfflineOption = False,
    quiet: opt.QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document instead of the paths")] = False,
    no_tune: Annotated[bool, typer.Option("--no-tune", help="do not look for a faster format of the draft")] = False,
) -> None:
    """Download a matched target and draft model, then make the draft fit this machine, see `specdec tune`."""
    found, target, draft = pull_pair(pair, offline=offline, quiet=quiet)
    if as_json:
        document = {
            "schema": SCHEMA,
            "pair": found.name,
            "target": _file_record(found.target, target),
            "draft": _file_record(found.draft, draft),
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(f"{target}\n{draft}")
    if not no_tune:
        # Inside, and last: who reads the paths has them.
        from specdec_cli.cli.tune import tune_after_pull

        tune_after_pull(target, draft, quiet=quiet or as_json)


def _file_record(spec: ModelSpec, path: Path) -> dict[str, str | int | None]:
    return {"path": str(path), "size": path.stat().st_size, "sha256": spec.sha256}
