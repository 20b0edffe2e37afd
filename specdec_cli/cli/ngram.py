"""`specdec ngram`: statistics of the user's own text, from which the n-gram drafter proposes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from specdec_cli.cli import options as opt
from specdec_cli.errors import SpecdecError, UsageError

if TYPE_CHECKING:
    from specdec_cli.ngram_store import NgramStore
    from specdec_cli.types import LanguageModel

SCHEMA = 1
CHUNK = 1 << 20
"""Bytes of a file that are counted at once, in one transaction."""

_HEAD = 1 << 13

app = typer.Typer(name="ngram", help="Statistics of your own text that drafts are made from.", no_args_is_help=True)

FilesArgument = Annotated[list[Path], typer.Argument(metavar="FILES", help="text files", show_default=False)]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--ngram-cache", metavar="FILE", envvar="SPECDEC_NGRAM_CACHE", help="where the statistics are kept",
        show_default="one a vocabulary, in the state directory",
    ),
]  # fmt: skip
PairOption = Annotated[
    str | None,
    typer.Option(
        "--pair", "-m", metavar="NAME", envvar="SPECDEC_PAIR", help="pair whose target the text is for",
        show_default="the default pair", autocompletion=opt.complete_pair,
    ),
]  # fmt: skip


@dataclass(slots=True)
class Built:
    """What `ngram build` did.

    Attributes:
        num_tokens: tokens counted.
        files: files they came from.
        skipped: files that are not text.
    """

    num_tokens: int = 0
    files: list[Path] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)


@app.command()
def build(
    files: FilesArgument,
    ngram_cache: CacheOption = None,
    pair: PairOption = None,
    target: opt.TargetOption = None,
    offline: opt.OfflineOption = False,
    quiet: opt.QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document instead of a line")] = False,
) -> None:
    """Learn from text files which tokens follow which; what was learned before stays."""
    from specdec_cli.choice import choose_models, fetch_files
    from specdec_cli.llama import Model
    from specdec_cli.ngram_store import NgramStore, default_path, vocabulary_fingerprint
    from specdec_cli.render.progress import make_progress
    from specdec_cli.trial import admit

    check_files(files)
    choice = choose_models(pair, target, None, no_draft=True)
    path, _ = fetch_files(choice, offline=offline, progress=make_progress(quiet or as_json))
    admit(path)
    with Model(path, vocab_only=True) as model:
        vocabulary = vocabulary_fingerprint(model)
        with NgramStore.open(ngram_cache or default_path(vocabulary), vocabulary, wait_s=30) as store:
            _require_usable(store)
            built = add_files(files, model, store, quiet=quiet or as_json)
            _show(built, store, as_json=as_json)
    if not built.files:
        raise SpecdecError("nothing was learned: no file is a text in UTF-8", "convert the files, or name others")


def check_files(files: Sequence[Path]) -> None:
    """Before any of them is counted.

    Raises:
        UsageError: a directory, or a file that is not there.
    """
    for path in files:
        if path.is_dir():
            hint = f"name the files in it, as in `specdec ngram build {path}/*.txt`"
            raise UsageError(f"`{path}` is a directory", hint)
        if not path.exists():
            raise UsageError(f"no file `{path}`", "check the path")


def add_files(files: Sequence[Path], model: LanguageModel, store: NgramStore, *, quiet: bool) -> Built:
    """Count the tokens of the text files; says which ones are left out.

    Raises:
        UsageError: a file cannot be read.
        SpecdecError: the statistics cannot be written.
    """
    built = Built()
    for path in files:
        try:
            with path.open("rb") as stream:
                texts = read_text(stream)
                if texts is None:
                    built.skipped.append(path)
                    if not quiet:
                        typer.echo(f"skipped `{path}`: not a text in UTF-8", err=True)
                    continue
                built.files.append(path)
                for text in texts:
                    built.num_tokens += _add(text, model, store)
        except OSError as error:
            raise UsageError(f"cannot read `{path}`: {error.strerror}", "check its permissions") from None
    return built


def read_text(stream: BinaryIO) -> Iterator[str] | None:
    """Parts of about a mebibyte that end with a line where they can; None for what does not begin as text in UTF-8."""
    head = stream.read(_HEAD)
    if b"\0" in head:
        return None
    try:
        # The last character may be cut off.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _HEAD)
    except UnicodeDecodeError:
        return None
    return _parts(stream, head)


def _parts(stream: BinaryIO, head: bytes) -> Iterator[str]:
    while data := head + stream.read(CHUNK - len(head)):
        data += stream.readline(CHUNK)
        yield data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
        head = b""


def _add(text: str, model: LanguageModel, store: NgramStore) -> int:
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    if not store.add(tokens):
        _require_usable(store)
    return len(tokens)


def _require_usable(store: NgramStore) -> None:
    if store.problem:
        raise SpecdecError(store.problem, "name another file with `--ngram-cache`, or move this one away")


def _show(built: Built, store: NgramStore, *, as_json: bool) -> None:
    if as_json:
        document = {
            "schema": SCHEMA,
            "path": str(store.path),
            "files": len(built.files),
            "skipped": [str(path) for path in built.skipped],
            "tokens": built.num_tokens,
            "entries": store.num_entries,
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        files = "1 file" if len(built.files) == 1 else f"{len(built.files)} files"
        typer.echo(f"{built.num_tokens} tokens from {files} · {store.num_entries} entries in {store.path}")
