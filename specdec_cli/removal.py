"""Freeing the space of a pair: its files that no other pair uses, and its entry where that is the user's own."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.local_files import shards
from specdec_cli.own_registry import own_layer, remove_pair
from specdec_cli.registry import ModelSpec, Pair, PathSource, Registry, parse_source
from specdec_cli.stored import cached_files, locate

_BOOKKEEPING = {"refs", ".no_exist"}


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing a pair or a model means.

    Attributes:
        name: what was named.
        files: what is deleted, links of the hub's cache included.
        num_bytes: how much that frees.
        kept: file that stays -> why.
        has_entry: whether an entry of the user's own file goes too.
        tuned: target and draft whose tuned copy goes too; None without one.
    """

    name: str
    files: tuple[Path, ...]
    num_bytes: int
    kept: dict[str, str]
    has_entry: bool
    tuned: tuple[Path, Path] | None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.files and not self.has_entry


def plan_removal(registry: Registry, name: str) -> Removal:
    """What can be freed; changes nothing.

    Raises:
        ModelMissingError: no pair or model has this name.
        UsageError: a model that a pair on this machine uses.
    """
    found = registry.find(name)
    models = (found.target, found.draft) if isinstance(found, Pair) else (found,)
    in_use = _in_use(registry, name)
    files: list[Path] = []
    kept: dict[str, str] = {}
    for model in models:
        users = sorted({user for path in _paths(model) for user in in_use.get(path, ())})
        if users and not isinstance(found, Pair):
            raise UsageError(f"`{name}` is used by {', '.join(users)}", f"`specdec models remove {users[0]}`")
        if users:
            kept[model.file] = f"used by {', '.join(users)}"
        # Other names of a file in use, and other downloads of it, go nevertheless.
        files += [path for path in cached_files(model) if _place(path) not in in_use]
        kept |= {} if users else _own_files(model)
    tuned = _tuned(found) if isinstance(found, Pair) and files else None
    unique = tuple(dict.fromkeys(files))
    size = sum(path.lstat().st_size for path in unique if not path.is_symlink())
    return Removal(name, unique, size, kept, isinstance(found, Pair) and name in own_layer().pairs, tuned)


def remove(removal: Removal) -> None:
    """Do it.

    Raises:
        SpecdecError: a file cannot be deleted, or the user's own file not be written.
    """
    # First what may be refused: afterwards the files would be gone.
    if removal.has_entry:
        remove_pair(removal.name)
    if removal.tuned is not None:
        from specdec_cli.tuned import forget

        forget(*removal.tuned)
    for path in removal.files:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SpecdecError(f"cannot delete `{path}`: {error.strerror}", "check the rights of its folder") from None
    for folder in {path.parent for path in removal.files}:
        _prune(folder)


def _is_here(pair: Pair) -> bool:
    return locate(pair.target) is not None and locate(pair.draft) is not None


def _in_use(registry: Registry, name: str) -> dict[Path, list[str]]:
    """Each file on this machine that other pairs need, whatever they call it, and which pairs these are."""
    found: dict[Path, list[str]] = {}
    for pair in registry.pairs.values():
        if pair.name != name and _is_here(pair):
            for path in _paths(pair.target) | _paths(pair.draft):
                found.setdefault(path, []).append(pair.name)
    return found


def _paths(model: ModelSpec) -> set[Path]:
    """The names of a model's files here, and what they lead to."""
    first = locate(model)
    files = [] if first is None else shards(first)
    return {place for path in files for place in (_place(path), path.resolve())}


def _place(path: Path) -> Path:
    """A name by which links can be compared without following the last one."""
    return path.parent.resolve() / path.name


def _own_files(model: ModelSpec) -> dict[str, str]:
    sources = [parse_source(source) for source in model.sources]
    return {str(source.path): "your own file" for source in sources if isinstance(source, PathSource)}


def _tuned(pair: Pair) -> tuple[Path, Path] | None:
    target, draft = locate(pair.target), locate(pair.draft)
    return (target, draft) if target is not None and draft is not None else None


def _prune(folder: Path) -> None:
    """Delete directories that became empty, and a repository of the hub's cache without any file."""
    with suppress(OSError):
        while True:
            if folder.name.startswith("models--") and {entry.name for entry in folder.iterdir()} <= _BOOKKEEPING:
                shutil.rmtree(folder)
                return
            folder.rmdir()
            folder = folder.parent
