"""Which file of a hub repository is meant, by the names of those that it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specdec_cli.errors import ModelLoadError, ModelMissingError, SpecdecError, UsageError
from specdec_cli.files import file_size
from specdec_cli.hub_cache import snapshot
from specdec_cli.registry import HubRepo, HubSource, ModelSpec, Shard
from specdec_cli.split import is_piece, shard_names, stem_of
from specdec_cli.wording import format_size

_DEFAULT_QUANT = "Q4_K_M"
# At the end of a file name: what the publishers of GGUF files call a quantization.
_QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP\d\w*|NVFP\d\w*|B?F16|FP16|F32|FP32))$", re.I | re.A)
# Parts of other models that lie beside a model: an image encoder, statistics for the quantizer.
_NO_MODEL = re.compile(r"mmproj|imatrix", re.I)
_MAX_LISTED = 25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model of a repository: its files in order, by their paths there."""

    files: tuple[Shard, ...]

    @property
    def path(self) -> str:
        """Path of the first file."""
        return self.files[0].file

    @property
    def stem(self) -> str:
        """File name without ending and shard numbers."""
        return stem_of(self.path.rpartition("/")[2])

    @property
    def quant(self) -> str:
        """The quantization that the name tells; empty when it tells none."""
        match = _QUANT.search(self.stem)
        return _canonical(match[1]) if match else ""

    @property
    def size(self) -> int | None:
        """Bytes of all files."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def is_complete(self) -> bool:
        """Whether no shard is missing."""
        return len(self.files) == len(shard_names(self.path))

    @property
    def line(self) -> str:
        """For a list: name, size, number of parts."""
        parts = f", {len(self.files)} parts" if len(self.files) > 1 else ""
        return f"{self.path}  {format_size(self.size)}{parts}"


def _canonical(quant: str) -> str:
    return re.sub(r"^FP(?=16|32)", "F", quant.upper())


def candidates(files: Sequence[Shard]) -> list[Candidate]:
    """The models among a repository's files, each with all its shards."""
    models: dict[str, list[Shard]] = {}
    for file in sorted(files, key=lambda file: file.file):
        folder, _, name = file.file.rpartition("/")
        if name.lower().endswith(".gguf") and not _NO_MODEL.search(name):
            first = shard_names(name)[0]
            models.setdefault(f"{folder}/{first}", []).append(file)
    return [Candidate(tuple(shards)) for shards in models.values()]


def choose(repo: HubRepo, files: Sequence[Shard]) -> Candidate:
    """The model that is meant.

    Args:
        repo: with a file's name or a quantization, in any case of letters; with neither, Q4_K_M or the only model.
        files: what the repository has.

    Raises:
        ModelMissingError: there is none, or it lacks a shard.
        ModelLoadError: only pieces of it that have to be joined.
        UsageError: several fit.
    """
    models = candidates(files)
    if not models:
        raise _no_models(repo, files)
    found = _matching(repo.wanted or _DEFAULT_QUANT, models)
    if repo.wanted is None and not found and len(models) == 1:
        found = models
    if len(found) > 1 or (not found and repo.wanted is None):
        what = f"more than one model for `{repo.wanted}`" if repo.wanted else "more than one model"
        raise UsageError(f"`{repo.repo}` has {what}:{_listed(found or models)}", _name_one(repo, found or models))
    if not found:
        raise _absent(repo, models, files)
    if not found[0].is_complete:
        have = {file.file.rpartition("/")[2] for file in found[0].files}
        missing = next(name for name in shard_names(found[0].path.rpartition("/")[2]) if name not in have)
        raise ModelMissingError(f"`{repo.repo}` lacks a part of that model: `{missing}`", "take another repository")
    return found[0]


def _matching(wanted: str, models: Sequence[Candidate]) -> list[Candidate]:
    """By path, by file name, by quantization, by a word of the path: the first of these that fits any."""
    word = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?:$|[-._/])", re.I)
    low = wanted.lower()
    tests: tuple[Callable[[Candidate], bool], ...] = (
        lambda model: any(low == file.file.lower() for file in model.files),
        lambda model: any(low == file.file.rpartition("/")[2].lower() for file in model.files),
        lambda model: low == model.stem.lower(),
        lambda model: _canonical(wanted) == model.quant,
        lambda model: word.search(model.path.removesuffix(".gguf")) is not None,
    )
    return next((found for test in tests if (found := [model for model in models if test(model)])), [])


def _no_models(repo: HubRepo, files: Sequence[Shard]) -> SpecdecError:
    pieces = [file.file for file in files if is_piece(file.file)]
    if pieces:
        hint = f"download these yourself and join them: `cat {' '.join(pieces[:4])} > model.gguf`"
        return ModelLoadError(f"`{repo.repo}` has only pieces of a cut file", hint)
    names = ", ".join(sorted(file.file for file in files)[:5])
    had = f"; it has {names}" if names else ""
    hint = f"look for a repository with GGUF files, often called `{repo.repo.rpartition('/')[2]}-GGUF`"
    return ModelMissingError(f"`{repo.repo}` has no GGUF model{had}", hint)


def _absent(repo: HubRepo, models: Sequence[Candidate], files: Sequence[Shard]) -> SpecdecError:
    pieces = [file.file for file in files if is_piece(file.file) and str(repo.wanted).lower() in file.file.lower()]
    if pieces:
        hint = f"download these yourself and join them: `cat {' '.join(pieces[:4])} > model.gguf`"
        return ModelLoadError(f"`{repo.repo}` has `{repo.wanted}` only in pieces of a cut file", hint)
    return ModelMissingError(
        f"`{repo.repo}` has no model `{repo.wanted}`; it has{_listed(models)}", _name_one(repo, models)
    )


def _listed(models: Sequence[Candidate]) -> str:
    lines = "".join(f"\n  {model.line}" for model in models[:_MAX_LISTED])
    return lines + (f"\n  and {len(models) - _MAX_LISTED} more" if len(models) > _MAX_LISTED else "")


def _name_one(repo: HubRepo, models: Sequence[Candidate]) -> str:
    quants = [model.quant for model in models]
    first = quants[0] if quants[0] and quants.count(quants[0]) == 1 else models[0].path.rpartition("/")[2]
    revision = "" if repo.revision == "main" else f"@{repo.revision}"
    return f"name one, e.g. `hf:{repo.repo}:{first}{revision}`"


def resolve_here(repo: HubRepo, name: str, *, settle_for_any: bool) -> ModelSpec | None:
    """The same from the hub's cache alone; None when it does not hold what the hub would be asked for.

    Args:
        repo: the repository and what is wanted of it.
        name: what to call the model.
        settle_for_any: where no quantization is wanted, take the only model that is here.
    """
    folder = snapshot(HubSource(repo.repo, "", repo.revision))
    files = [Shard(path.relative_to(folder).as_posix(), file_size(path)) for path in _ggufs(folder)]
    try:
        found = choose(repo, files)
    except SpecdecError:
        return None
    if repo.wanted is None and not settle_for_any and found.quant != _DEFAULT_QUANT:
        return None
    return spec_for(repo, found, name)


def _ggufs(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (path for path in folder.rglob("*") if path.suffix.lower() == ".gguf" and path.is_file())


def spec_for(repo: HubRepo, model: Candidate, name: str) -> ModelSpec:
    """The model that a candidate is, under a name."""
    source = f"hf:{repo.repo}/{model.path}" + ("" if repo.revision == "main" else f"@{repo.revision}")
    shards = tuple(Shard(file.file.rpartition("/")[2], file.size, file.sha256) for file in model.files)
    first = shards[0]
    if len(shards) == 1:
        return ModelSpec(name, first.file, (source,), first.size, first.sha256)
    return ModelSpec(name, first.file, (source,), model.size, None, shards=shards)
