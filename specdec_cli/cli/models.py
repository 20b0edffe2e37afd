"""`specdec models`: what is known, what is here, what fits together."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_cli.cli import options as opt
from specdec_cli.errors import ExitCode, SpecdecError, UsageError
from specdec_cli.registry import ModelSpec, Pair, Registry, load_registry, own_file
from specdec_cli.wording import format_size, scrub

if TYPE_CHECKING:
    from specdec_cli.compatibility import Compatibility
    from specdec_cli.gguf import Header
    from specdec_cli.local_files import LocalModel
    from specdec_cli.matching import Candidate, Measured
    from specdec_cli.removal import Removal
    from specdec_cli.translation import Efficiency

SCHEMA = 1

app = typer.Typer(
    name="models",
    help="List the known pairs: what is here, what fits this machine, what is worth it.",
    invoke_without_command=True,
)

JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document, see docs/json.md")]
InstalledOption = Annotated[bool, typer.Option("--installed", help="only pairs that are on this machine")]
NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="pair, or one model", autocompletion=opt.complete_name, show_default=False),
]
NewNameArgument = Annotated[str, typer.Argument(metavar="NAME", help="of the pair", show_default=False)]
_FILE = ".gguf file, or a source or the name of a pair or model that is on this machine"
TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help=f"target: {_FILE}", autocompletion=opt.complete_name, show_default=False),
]
DraftArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[DRAFT]", help=f"draft model: {_FILE}", autocompletion=opt.complete_name,
        show_default="the draft model of the pair",
    ),
]  # fmt: skip
_SOURCE = "`hf:OWNER/REPO/FILE[@REVISION]`, another source, a path, or the name of a known model"
TargetSource = Annotated[str, typer.Option("--target", metavar="SPEC", help=f"target: {_SOURCE}", show_default=False)]
DraftSource = Annotated[
    str, typer.Option("--draft", "-d", metavar="SPEC", help="draft model, named likewise", show_default=False)
]
NoteOption = Annotated[str, typer.Option("--note", metavar="TEXT", help="what it is for", show_default=False)]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]


@app.callback()
def models(context: typer.Context, installed: InstalledOption = False, as_json: JsonOption = False) -> None:
    """List the known pairs: what is here, what fits this machine, what is worth it."""
    if context.invoked_subcommand is not None:
        if as_json or installed:
            flag = "--json" if as_json else "--installed"
            raise UsageError(f"{flag} belongs behind `{context.invoked_subcommand}`", "see `specdec models --help`")
        return
    registry = load_registry()
    free = _free()
    pairs = [_pair_document(pair, free) for pair in registry.pairs.values()]
    if installed:
        pairs = [pair for pair in pairs if all(pair["installed"].values())]
    if as_json:
        own = {"default": registry.default, "own_file": str(own_file()), "memory_bytes": free}
        _print_json({**own, "pairs": pairs})
        return
    from specdec_cli.render.models import pair_row, print_table

    rows = [pair_row(pair, registry.default) for pair in pairs]
    print_table(("pair", "size", "installed", "fits", "recommended"), rows, sys.stdout, right=(1,))
    if sys.stderr.isatty():
        typer.echo("* the default; `specdec models show NAME` says more", err=True)


@app.command()
def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show everything that is known of a pair or a model."""
    registry = load_registry()
    found = registry.find(name)
    if isinstance(found, Pair):
        document = {**_pair_document(found, _free()), "target": _model_document(registry, found.target)}
        document["draft"] = _model_document(registry, found.draft)
    else:
        document = _model_document(registry, found)
    if as_json:
        _print_json(document)
        return
    from specdec_cli.render.models import model_fields, pair_fields, print_fields

    if isinstance(found, ModelSpec):
        print_fields(model_fields(document, "model") | {"pairs": ", ".join(document["pairs"])}, sys.stdout)
        return
    print_fields(pair_fields(document), sys.stdout)
    for part in ("target", "draft"):
        typer.echo()
        print_fields(model_fields(document[part], part), sys.stdout)


@app.command()
def path(name: NameArgument, as_json: JsonOption = False) -> None:
    """Print where the files are: target, then draft model."""
    from specdec_cli.choice import present_file

    registry = load_registry()
    found = registry.find(name)
    pair = found if isinstance(found, Pair) else None
    specs = {"target": found.target, "draft": found.draft} if isinstance(found, Pair) else {"model": found}
    paths = {part: str(present_file(registry, spec, pair)) for part, spec in specs.items()}
    if as_json:
        _print_json({"name": name, **paths})
    else:
        for file in paths.values():
            _say_path(file)


@app.command()
def add(
    name: NewNameArgument, target: TargetSource, draft: DraftSource, note: NoteOption = "", as_json: JsonOption = False
) -> None:
    """Add a pair of your own, which every command then knows; nothing is downloaded."""
    from specdec_cli.own_registry import add_pair

    added = add_pair(name, target, draft, note)
    if as_json:
        own = {"target": added.models[0], "draft": added.models[1], "replaced": added.replaced}
        _print_json({"name": name, "path": str(added.path), **own})
        return
    if added.replaced:
        typer.echo(f"{name}: replaces the pair that specdec ships", err=True)
    _say_path(str(added.path))


@app.command()
def remove(name: NameArgument, yes: YesOption = False, as_json: JsonOption = False) -> None:
    """Delete the files of a pair that no other pair on this machine uses; a pair of your own is forgotten too."""
    from specdec_cli.removal import plan_removal
    from specdec_cli.removal import remove as remove_files

    removal = plan_removal(load_registry(), name)
    if not removal.is_empty and not yes:
        _ask(removal)
    remove_files(removal)
    if as_json:
        files = [str(path) for path in removal.files]
        _print_json({"name": name, "removed": files, "freed_bytes": removal.num_bytes, "kept": removal.kept,
                     "entry_removed": removal.has_entry})  # fmt: skip
        return
    for file, reason in removal.kept.items():
        typer.echo(f"kept {_plain(file)}: {reason}", err=True)
    typer.echo(_done(removal), err=True)


@app.command()
def check(target: TargetArgument, draft: DraftArgument = None, as_json: JsonOption = False) -> int:
    """Compare two models without loading their weights; exit code 4 where drafts would have to be translated."""
    from specdec_cli.choice import file_of
    from specdec_cli.compatibility import compare
    from specdec_cli.matching import open_vocabulary

    registry = load_registry()
    if draft is None:
        if target not in registry.pairs:
            raise UsageError("no draft model is named", "`specdec models check TARGET DRAFT`, or the name of a pair")
        draft = target
    files = file_of(registry, target, "target"), file_of(registry, draft, "draft")
    first = open_vocabulary(files[0])
    with first.model:
        second = open_vocabulary(files[1])
        with second.model:
            found = compare(first.model, second.model)
            document = _check_document(first, second, found)
    if as_json:
        _print_json(document)
    else:
        from specdec_cli.render.models import print_check

        print_check(document, sys.stdout)
    return ExitCode.OK if found.fits else ExitCode.INCOMPATIBLE


@app.command()
def find(target: TargetArgument, quiet: opt.QuietOption = False, as_json: JsonOption = False) -> None:
    """List which models can draft for a target: on this machine and among the known ones, and why the others cannot."""
    from specdec_cli.choice import file_of
    from specdec_cli.matching import find_drafts
    from specdec_cli.render.progress import make_steps

    registry = load_registry()
    file = file_of(registry, target, "target")
    with make_steps(quiet or as_json) as on_step:
        found = find_drafts(registry, file, on_step)
    if as_json:
        _print_json({"target": str(file), "candidates": [_candidate_document(candidate) for candidate in found]})
        return
    from specdec_cli.render.models import print_table

    columns = ("model", "size", "cost", "drafts", "where", "remark")
    print_table(columns, [_candidate_row(candidate) for candidate in found], sys.stdout, right=(1, 2))
    if not any(candidate.fits or candidate.is_foreign for candidate in found):
        typer.echo("no known model can draft for it; `--drafter ngram` drafts without one", err=True)


@app.command()
def scan(as_json: JsonOption = False) -> None:
    """List the GGUF files that other programs keep on this machine; nothing is changed."""
    from specdec_cli.local_files import scan as scan_files

    found = scan_files()
    if as_json:
        _print_json({"models": [_local_document(model) for model in found]})
        return
    from specdec_cli.render.models import print_table

    rows = [(model.place, model.name if model.is_complete else f"{model.name} (shards missing)",
             format_size(model.size), str(model.path)) for model in found]  # fmt: skip
    print_table(("place", "name", "size", "path"), rows, sys.stdout, right=(2,))
    if not found:
        typer.echo("no GGUF files in the caches of Hugging Face, LM Studio, Ollama and llama.cpp", err=True)


# --- documents ---


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps({"schema": SCHEMA, **document}, indent=2))


def _pair_document(pair: Pair, free: int) -> dict[str, Any]:
    from specdec_cli.estimates import cost_ratio, objection
    from specdec_cli.local_files import sized
    from specdec_cli.stored import locate

    paths = locate(pair.target), locate(pair.draft)
    target, draft = sized(pair.target, paths[0]), sized(pair.draft, paths[1])
    size = replace(pair, target=target, draft=draft).size
    memory = _needed(*paths, size)
    ratio = cost_ratio(target, draft)
    reason = pair.reason or objection(ratio)
    return {
        "name": pair.name,
        "target": pair.target.name,
        "draft": pair.draft.name,
        "size_bytes": size,
        "installed": {"target": paths[0] is not None, "draft": paths[1] is not None},
        "memory_bytes": memory,
        "fits": None if memory is None else memory <= free,
        "cost_ratio": ratio,
        "recommended": not reason,
        "reason": reason,
        "verified": pair.verified,
        "note": pair.note,
        "draft_tokens": pair.draft_tokens,
        "origin": pair.origin,
    }


def _free() -> int:
    """Bytes of memory that can be had; those of GPUs are not asked for, which would take llama.cpp."""
    from specdec_cli.memory import available

    return available().ram


def _needed(target: Path | None, draft: Path | None, size: int | None) -> int | None:
    """Bytes that a pair takes: as `specdec run` reckons with its files, else by their size; None when not known."""
    from specdec_cli.estimates import memory_needed
    from specdec_cli.memory import LEAST_CTX, estimate, max_ctx

    # A file that is none is told when it is used.
    with suppress(SpecdecError):
        if target is not None and draft is not None:
            headers = _headers(target), _headers(draft)
            return estimate(*headers, min(LEAST_CTX, max_ctx(headers[0]))).needed
    return None if size is None else memory_needed(size)


@cache
def _headers(path: Path) -> tuple[Header, ...]:
    """Read once, however many pairs have the file."""
    from specdec_cli.gguf import check_header

    return check_header(path)


def _model_document(registry: Registry, spec: ModelSpec) -> dict[str, Any]:
    from specdec_cli.local_files import sized
    from specdec_cli.stored import locate

    found = locate(spec)
    return {
        "name": spec.name,
        "files": [{"file": part.file, "size_bytes": part.size, "sha256": part.sha256} for part in spec.files],
        "size_bytes": sized(spec, found).size,
        "params": spec.params,
        "active_params": spec.active_params,
        "quant": spec.quant,
        "architecture": spec.architecture,
        "num_vocab": spec.num_vocab,
        "license": spec.license,
        "gated": spec.gated,
        "verified": spec.verified,
        "note": spec.note,
        "sources": [scrub(source) for source in spec.sources],
        "path": None if found is None else str(found),
        "pairs": [pair.name for pair in registry.pairs_with(spec.name)],
    }


def _check_document(target: Measured, draft: Measured, found: Compatibility) -> dict[str, Any]:
    from specdec_cli.matching import note_on, ratio, translation

    memory, cost = _needed(target.path, draft.path, target.size + draft.size), ratio(target, draft)
    return {
        "target": _side_document(target),
        "draft": _side_document(draft),
        "verdict": found.verdict,
        "reason": found.reason,
        "note": note_on(found, cost),
        "translation": _translation_document(translation(target.model, draft.model, found)),
        "num_shared": found.num_shared,
        "num_differences": found.num_differences,
        "differences": [{"token": item.token, "target": item.target, "draft": item.draft, "role": item.role}
                        for item in found.differences],
        "cost_ratio": cost,
        "memory_bytes": memory,
        "fits": memory is not None and memory <= _free(),
    }  # fmt: skip


def _translation_document(found: Efficiency | None) -> dict[str, float] | None:
    return None if found is None else {"shared": found.shared, "draft_tokens": found.draft_tokens}


def _side_document(side: Measured) -> dict[str, Any]:
    import hashlib

    model, template = side.model, side.model.chat_template
    tokens = {
        name: None if token is None else model.token_text(token)
        for name, token in (("bos_text", model.bos), ("eos_text", model.eos))
    }
    return {
        "file": str(side.path),
        "size_bytes": side.size,
        "active_share": side.active_share,
        "tokenizer": model.tokenizer_name,
        "num_vocab": model.num_vocab,
        "bos": model.bos,
        "eos": model.eos,
        **tokens,
        "adds_bos": model.adds_bos,
        "adds_eos": model.adds_eos,
        "template_sha256": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    }


def _local_document(model: LocalModel) -> dict[str, Any]:
    return {
        "place": model.place,
        "name": model.name,
        "path": str(model.path),
        "size_bytes": model.size,
        "complete": model.is_complete,
    }


def _candidate_document(candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "place": candidate.place or None,
        "path": None if candidate.path is None else str(candidate.path),
        "size_bytes": candidate.size,
        "cost_ratio": candidate.cost_ratio,
        "fits": candidate.fits,
        "verdict": candidate.verdict,
        "reason": candidate.reason,
        "pair": candidate.pair or None,
        "translation": _translation_document(candidate.translation),
    }


def _candidate_row(candidate: Candidate) -> tuple[str, ...]:
    from specdec_cli.render.models import ratio_text, size_text, translation_text

    where = candidate.place or (f"specdec pull {candidate.pair}" if candidate.pair else "not here")
    cost = ratio_text(candidate.cost_ratio) if candidate.fits is not False else ""
    fits, reason = {True: "yes", False: "no", None: "perhaps"}[candidate.fits], candidate.reason
    if candidate.is_foreign:
        fits, cost = "translated", ratio_text(candidate.cost_ratio)
    if found := _translation_document(candidate.translation):
        reason = f"{translation_text(found)}: {reason}"
    return candidate.name, size_text(candidate.size), cost, fits, where, reason


# --- removing ---


def _ask(removal: Removal) -> None:
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"removing `{removal.name}` needs a confirmation", "add `--yes`")
    for file in removal.files:
        typer.echo(f"  {_plain(str(file))}", err=True)
    what = [f"these files, {format_size(removal.num_bytes)}"] if removal.files else []
    what += [f"the entry in {own_file()}"] if removal.has_entry else []
    if not typer.confirm(f"Remove {' and '.join(what)}?", err=True):
        typer.echo("nothing was removed", err=True)
        raise typer.Exit(ExitCode.FAILURE)


def _done(removal: Removal) -> str:
    if removal.is_empty:
        return f"{removal.name}: nothing to remove"
    done = [f"freed {format_size(removal.num_bytes)}"] if removal.files else []
    done += [f"taken out of {own_file()}"] if removal.has_entry else []
    return f"{removal.name}: {', '.join(done)}"


def _say_path(path: str) -> None:
    """A path on stdout: byte for byte for a program, harmless on a terminal."""
    typer.echo(_plain(path) if sys.stdout.isatty() else os.fsencode(path))


def _plain(text: str) -> str:
    from specdec_cli.render.terminal import neutralize

    return neutralize(text)
