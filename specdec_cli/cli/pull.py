"""`specdec pull`: put a pair's two files on this machine, or any other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec_cli.cli import options as opt
from specdec_cli.registry import ModelSpec

if TYPE_CHECKING:
    from specdec_cli.choice import ModelChoice
    from specdec_cli.sources import Progress

SCHEMA = 1

PullArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[PAIR|MODEL]", help="pair from `models.toml`, or a model as in `--target`",
        show_default="the default pair", autocompletion=opt.complete_pair, envvar="SPECDEC_PAIR",
    ),
]  # fmt: skip


def pull_models(choice: ModelChoice, *, offline: bool = False, quiet: bool = False) -> list[tuple[Path, str | None]]:
    """Make the models present and whole; says so when they already are.

    Args:
        choice: target, and draft model if there is one.
        offline: forbid downloads.
        quiet: show nothing.

    Returns:
        Path and SHA-256, as far as it is known, of target and draft model.

    Raises:
        ModelMissingError: a file is not here while downloads are forbidden, or is nowhere.
        DownloadError: no source delivered a file.
        SpecdecError: a model that cannot be used, see `fetch_files`.
    """
    # Inside, because the start of every command passes through this module.
    from dataclasses import replace

    from specdec_cli.choice import fetch_files
    from specdec_cli.gguf import check_header
    from specdec_cli.sources import resolve
    from specdec_cli.split import check_path
    from specdec_cli.stored import verify

    for model in (choice.target, choice.draft):
        if isinstance(model, Path):
            # Nothing will be fetched for these: what a run would refuse is refused here.
            check_path(model)
            check_header(model)
    progress = _progress(quiet)
    before = _stamps(choice)

    def resolved(model: Path | ModelSpec) -> Path | ModelSpec:
        return model if isinstance(model, Path) else resolve(model, offline=offline, progress=progress, refresh=True)

    draft = None if choice.draft is None else resolved(choice.draft)
    choice = replace(choice, target=resolved(choice.target), draft=draft)
    models = [choice.target] if draft is None else [choice.target, draft]
    # A file that is damaged is found here, and removed.
    present = [verify(model) is not None for model in models if isinstance(model, ModelSpec)]
    if present and all(present) and _stamps(choice) == before and not quiet:
        typer.echo(f"{choice.name}: already there", err=True)
    paths = [path for path in fetch_files(choice, offline=offline, progress=progress) if path is not None]
    known = [model.sha256 if isinstance(model, ModelSpec) else None for model in models]
    return list(zip(paths, known, strict=True))


def _stamps(choice: ModelChoice) -> list[int | None]:
    """When the files were written that are here."""
    from specdec_cli.stored import locate

    models = (choice.target, choice.draft)
    found = [locate(model) if isinstance(model, ModelSpec) else None for model in models]
    return [path.stat().st_mtime_ns if path else None for path in found]


def _progress(quiet: bool) -> Progress:
    from specdec_cli.render.progress import make_progress

    return make_progress(quiet)


def pull(
    pair: PullArgument = None,
    target: opt.TargetOption = None,
    draft: opt.DraftOption = None,
    offline: opt.OfflineOption = False,
    quiet: opt.QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document instead of the paths")] = False,
    no_tune: Annotated[bool, typer.Option("--no-tune", help="do not look for a faster format of the draft")] = False,
) -> None:
    """Download a matched target and draft model, then make the draft fit this machine, see `specdec tune`.

    What is interrupted is continued by the same command.
    """
    from specdec_cli.choice import choose_models

    choice = choose_models(pair, target, draft)
    pulled = pull_models(choice, offline=offline, quiet=quiet)
    if as_json:
        records = [_file_record(*file) for file in pulled]
        document = {
            "schema": SCHEMA,
            "pair": choice.pair,
            "target": records[0],
            "draft": records[1] if len(records) > 1 else None,
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo("\n".join(str(path) for path, _ in pulled))
    if not no_tune and len(pulled) > 1:
        # Inside, and last: who reads the paths has them.
        from specdec_cli.cli.tune import tune_after_pull

        tune_after_pull(pulled[0][0], pulled[1][0], quiet=quiet or as_json)


def _file_record(path: Path, sha256: str | None) -> dict[str, str | int | list[str] | None]:
    from specdec_cli.split import shard_names

    files = [path.with_name(name) for name in shard_names(path.name)]
    size = sum(file.stat().st_size for file in files)
    record: dict[str, str | int | list[str] | None] = {"path": str(path), "size": size, "sha256": sha256}
    return record if len(files) == 1 else {**record, "files": [str(file) for file in files]}
