"""Model files on this machine: where they lie, whether they are whole; never the network."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from specdec_cli import hub_cache, paths
from specdec_cli.files import file_digest, known_digest
from specdec_cli.registry import HubRepo, HubSource, ModelSpec, PathSource, Shard, parse_source


def locate(spec: ModelSpec) -> Path | None:
    """Where the model lies on this machine, None when it is not here; never uses the network.

    A split model is there when all its parts are; the path is that of the first.
    """
    found = _located(spec)
    return found[0] if found else None


def verify(spec: ModelSpec) -> Path | None:
    """The same, but its content is compared with the SHA-256 that it should have; hashed once, and remembered.

    A file of the hub's cache that is not what its own name says is removed, and so is one of specdec's own.
    """
    found = _located(spec)
    for path, file in zip(found, spec.files, strict=False):
        if file.sha256 and file_digest(path) != file.sha256:
            blob = path.resolve()
            if blob.name == file.sha256 or path == stored_path(spec, file):
                blob.unlink(missing_ok=True)
            return None
    return found[0] if found else None


def _located(spec: ModelSpec) -> list[Path]:
    if (repo := repo_of(spec)) is not None:
        from specdec_cli.hub_files import resolve_here

        found = resolve_here(repo, spec.name, settle_for_any=True)
        return _located(found) if found else []
    return next((found for found in _places(spec) if all(map(is_whole, found, spec.files))), [])


def _places(spec: ModelSpec) -> Iterator[list[Path]]:
    """Where its files may lie, in the order in which they are looked for."""
    yield [stored_path(spec, file) for file in spec.files]
    for source in map(parse_source, spec.sources):
        if isinstance(source, HubSource):
            yield [hub_cache.snapshot(one) for one in _file_sources(spec, source)]
        elif isinstance(source, PathSource):
            yield [source.path.with_name(file.file) if spec.shards else source.path for file in spec.files]


def repo_of(spec: ModelSpec) -> HubRepo | None:
    """The repository where it is still open which of its files is meant; None for other models."""
    source = parse_source(spec.sources[0])
    return source if isinstance(source, HubRepo) else None


def cached_files(spec: ModelSpec) -> list[Path]:
    """Every file that holds this model or a part of its download; never a file of the user's own."""
    stored = [stored_path(spec, file) for file in spec.files]
    found = [
        path for own in stored for path in (own, origin_path(own), *own.parent.glob(f"{glob.escape(own.name)}.*part"))
    ]
    found += [path for own in stored for path in own.with_name(f"{own.name}.parts").rglob("*")]
    for source in map(parse_source, spec.sources):
        if isinstance(source, HubSource):
            for one, file in zip(_file_sources(spec, source), spec.files, strict=True):
                found += hub_cache.cached_files(one, file)
    return [path for path in dict.fromkeys(found) if path.is_symlink() or path.is_file()]


def _file_sources(spec: ModelSpec, source: HubSource) -> list[HubSource]:
    return [hub_cache.shard_source(source, file.file) if spec.shards else source for file in spec.files]


def stored_path(spec: ModelSpec, file: Shard) -> Path:
    """Where specdec's own cache keeps a file of the model; nothing need be there."""
    folder = paths.cache_dir() / "models"
    if spec.sources[0].startswith("url:"):
        # Two servers may have different files of the same name.
        folder /= hashlib.sha256(re.sub(r"//[^/]*@", "//", spec.sources[0]).encode()).hexdigest()[:16]
    return folder / file.file


def origin_path(final: Path) -> Path:
    """The note beside a file that tells which content its address had when it came."""
    return final.with_name(f"{final.name}.origin")


def is_whole(path: Path, file: Shard) -> bool:
    """Whether a file is there in its size, and not known to have another content."""
    try:
        fits = path.is_file() and file.size in (None, path.stat().st_size)
        return fits and (file.sha256 is None or known_digest(path) in (None, file.sha256))
    except OSError:
        return False
