"""GGUF files that are on this machine already: where other programs keep theirs, and in specdec's own cache.

Nothing is written, and whatever stands in those directories is survived: broken links, loops, directories that may not
be read, manifests that are none, more files than anyone can look at.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from specdec_cli.files import expanded
from specdec_cli.paths import cache_dir
from specdec_cli.registry import ModelSpec
from specdec_cli.split import shard_names, shard_number

_MAX_DEPTH, _MAX_ENTRIES = 8, 20_000
_MAX_MANIFEST_BYTES = 1 << 20
_MAGIC = b"GGUF"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_HUB_FILE = re.compile(r"models--(.+?)--(.+)/snapshots/[^/]+/(.+)")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that some program has put on this machine.

    Attributes:
        place: whose directory it is in.
        name: what that program calls it.
        path: the file; of a split model the first shard.
        size: bytes of all its files.
        is_complete: whether all shards are there.
    """

    place: str
    name: str
    path: Path
    size: int
    is_complete: bool = True


def scan() -> list[LocalModel]:
    """All local models, by place and name; a file with several names is listed once."""
    found: dict[tuple[int, int], LocalModel] = {}
    for model in _all():
        with suppress(OSError):
            status = model.path.stat()
            found.setdefault((status.st_dev, status.st_ino), model)
    return list(found.values())


def size_of(path: Path) -> int:
    """Bytes of a model file, the other shards of a split model included.

    Raises:
        OSError: the file is not there.
    """
    return sum(shard.stat().st_size for shard in shards(path) if shard == path or shard.exists())


def sized(spec: ModelSpec, path: Path | None) -> ModelSpec:
    """The model with the size that its file has here, where the registry knows none."""
    if path is None or spec.size is not None:
        return spec
    with suppress(OSError):
        return replace(spec, size=size_of(path))
    return spec


def _all() -> Iterator[LocalModel]:
    for place, folder in _folders():
        models = (_model(place, path, _name(place, path, folder)) for path in _gguf_files(folder))
        yield from sorted((model for model in models if model), key=lambda model: model.name.lower())
    for folder in _ollama_folders():
        yield from sorted(_ollama_models(folder), key=lambda model: model.name.lower())


# --- places ---


def _folders() -> Iterator[tuple[str, Path]]:
    """Whose directory, and where; it need not exist."""
    # The constants alone: they follow HF_HOME, HF_HUB_CACHE and XDG_CACHE_HOME.
    from huggingface_hub import constants

    yield "specdec", cache_dir() / "models"
    yield "Hugging Face", Path(constants.HF_HUB_CACHE)
    yield from (("LM Studio", folder) for folder in _lm_studio_folders())
    yield from (("llama.cpp", folder) for folder in _llama_folders())


def _lm_studio_folders() -> Iterator[Path]:
    home = expanded("~")
    # Who moved its home has this file.
    with suppress(OSError, ValueError):
        moved = (home / ".lmstudio-home-pointer").read_text("utf-8")[:4096].strip()
        if Path(moved).is_absolute():
            yield Path(moved) / "models"
    yield home / ".lmstudio" / "models"
    yield home / ".cache" / "lm-studio" / "models"


def _llama_folders() -> Iterator[Path]:
    if own := os.environ.get("LLAMA_CACHE"):
        yield expanded(own)
        return
    yield expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llama.cpp"
    if sys.platform == "darwin":
        yield expanded("~") / "Library" / "Caches" / "llama.cpp"
    if local := os.environ.get("LOCALAPPDATA"):
        yield Path(local) / "llama.cpp"


def _ollama_folders() -> Iterator[Path]:
    if own := os.environ.get("OLLAMA_MODELS"):
        yield expanded(own)
        return
    yield expanded("~") / ".ollama" / "models"
    if sys.platform == "linux":
        # Where its installer lets the service keep them.
        yield Path("/usr/share/ollama/.ollama/models")


# --- files ---


def _gguf_files(folder: Path) -> Iterator[Path]:
    for path in _files(folder):
        name = path.name.lower()
        # Projectors belong to a model with images; alone they are none.
        if name.endswith(".gguf") and "mmproj" not in name and _is_first(path) and _has_magic(path):
            yield path


def _files(folder: Path) -> Iterator[Path]:
    """Regular files below a directory, near ones first; links are followed, each directory is read once."""
    waiting, seen, num_left = deque([(folder, 0)]), set(), _MAX_ENTRIES
    while waiting:
        directory, depth = waiting.popleft()
        for entry in _entries(directory):
            num_left -= 1
            if num_left < 0:
                return
            with suppress(OSError):
                if entry.is_file():
                    yield Path(entry.path)
                elif entry.is_dir() and depth < _MAX_DEPTH:
                    status = entry.stat()
                    if (status.st_dev, status.st_ino) not in seen:
                        seen.add((status.st_dev, status.st_ino))
                        waiting.append((Path(entry.path), depth + 1))


def _entries(directory: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            # Not sorted: a directory may hold millions, of which only so many are looked at.
            return [entry for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False)]
    except OSError:
        return []


def _has_magic(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC
    return False


def _is_first(path: Path) -> bool:
    return (shard_number(path.name) or (1, 1))[0] == 1


def shards(path: Path) -> list[Path]:
    """All files that a model must have: itself, and the other shards of a split one."""
    return [path.with_name(name) for name in shard_names(path.name)] if _is_first(path) else [path]


def _model(place: str, path: Path, name: str) -> LocalModel | None:
    with suppress(OSError):
        return LocalModel(place, name, path, size_of(path), all(shard.exists() for shard in shards(path)))
    return None


def _name(place: str, path: Path, folder: Path) -> str:
    inside = path.relative_to(folder).as_posix()
    match = _HUB_FILE.fullmatch(inside) if place == "Hugging Face" else None
    return "/".join(match.groups()) if match else inside


# --- Ollama: manifests name blobs ---


def _ollama_models(folder: Path) -> Iterator[LocalModel]:
    manifests = folder / "manifests"
    for path in _files(manifests):
        blob = _model_blob(path, folder / "blobs")
        if blob is not None and _has_magic(blob):
            model = _model("Ollama", blob, _ollama_name(path.relative_to(manifests).parts))
            if model is not None:
                yield model


def _model_blob(manifest: Path, blobs: Path) -> Path | None:
    """The weights that a manifest names; None for what cannot be understood."""
    try:
        with manifest.open("rb") as stream:
            data = json.loads(stream.read(_MAX_MANIFEST_BYTES))
        for layer in data["layers"]:
            if layer["mediaType"] == _OLLAMA_MODEL and (match := _DIGEST.fullmatch(layer["digest"])):
                return blobs / f"sha256-{match[1]}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return None


def _ollama_name(parts: tuple[str, ...]) -> str:
    """`registry.ollama.ai/library/llama3/latest` is `llama3:latest`."""
    for prefix in (("registry.ollama.ai", "library"), ("registry.ollama.ai",)):
        if parts[: len(prefix)] == prefix:
            parts = parts[len(prefix) :]
            break
    return f"{'/'.join(parts[:-1])}:{parts[-1]}" if len(parts) > 1 else "/".join(parts)
