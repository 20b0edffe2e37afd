"""The hub's standard cache on the disk, which other programs share: where it keeps what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from specdec_cli.registry import HubSource, Shard


def repo_folder(repo: str) -> Path:
    """Where the hub's cache keeps a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def snapshot(source: HubSource) -> Path:
    """Where the hub's cache shows a file; nothing need be there."""
    # The documented layout of the hub's cache. Its own try_to_load_from_cache does the same, after half a second
    # of imports that every start would pay.
    folder = repo_folder(source.repo)
    commit = source.revision
    with suppress(OSError):
        commit = (folder / "refs" / source.revision).read_text().strip()
    return folder / "snapshots" / commit / source.file


def cached_files(source: HubSource, file: Shard) -> Iterator[Path]:
    """The name of a file in the hub's cache, its content unless that has another name there, and what it began as."""
    name, folder = snapshot(source), repo_folder(source.repo)
    yield name
    others = (path for path in (folder / "snapshots").rglob("*") if path.is_symlink() and path != name)
    content = name.resolve()
    if content.parent == (folder / "blobs").resolve() and all(path.resolve() != content for path in others):
        yield content
    if file.sha256:
        yield part_path(source, file.sha256)


def shard_source(source: HubSource, file: str) -> HubSource:
    """The source of another file in the same folder of the repository."""
    folder, slash, _ = source.file.rpartition("/")
    return HubSource(source.repo, f"{folder}{slash}{file}", source.revision)


def part_path(source: HubSource, etag: str) -> Path:
    """Where a download of one content is begun."""
    # hf_hub_download throws a broken download away since its 2.0; this part is continued by the next pull. The
    # entity tag in its name ties it to one content, the rest to the name that it had.
    return repo_folder(source.repo) / "blobs" / f"{etag}.{part_ending(source)}"


def part_ending(source: HubSource) -> str:
    """How the names of all that was begun under a file's name end."""
    name = f"{source.file}@{source.revision}"
    return f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.specdec.part"
