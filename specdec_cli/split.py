"""Models in several files: llama.cpp's shards, which it loads by the first, and pieces that other tools cut."""

from __future__ import annotations

import re
from pathlib import Path

from specdec_cli.errors import ModelLoadError, ModelMissingError

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)", re.DOTALL | re.IGNORECASE)
# mradermacher's, TheBloke's, and what `split` makes.
_PIECE = re.compile(
    r".*\.gguf(?:\.part\d+of\d+|[.-]split-?[a-z0-9]{1,3}|\.part[-_.]?[a-z0-9]{1,3}|\.\d{2,3}|\.?a[a-z])",
    re.DOTALL | re.IGNORECASE,
)
_MAX_SHARDS = 1000
_REPO = re.compile(r"(?:(?:hf\.co|huggingface\.co)/)?(\w[\w.-]*/\w[\w.-]*(?::[\w.-]+)?)", re.ASCII)


def shard_number(name: str) -> tuple[int, int] | None:
    """(number, count) of one file of a split model, numbers from 1; None for other names."""
    match = _SHARD.fullmatch(name)
    return (int(match["number"]), int(match["count"])) if match else None


def shard_names(name: str) -> list[str]:
    """All files of a model, by the name of any of them; the name alone when it is not split."""
    match = _SHARD.fullmatch(name)
    if match is None or not 0 < int(match["count"]) <= _MAX_SHARDS:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{number:05}-of-{count:05}{match['end']}" for number in range(1, count + 1)]


def stem_of(name: str) -> str:
    """A model's file name without the ending, and without the numbers of a split one."""
    match = _SHARD.fullmatch(name)
    return match["stem"] if match else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)


def is_piece(name: str) -> bool:
    """Whether a name is that of a piece to be joined, such as `model.gguf.part1of2` or `model.gguf-split-a`."""
    return _PIECE.fullmatch(name) is not None


def check_path(path: Path) -> None:
    """Look at what a user named as a model's file before anything is loaded.

    Raises:
        ModelMissingError: it is not there and looks like something else, or one of its shards is not there.
        ModelLoadError: a later shard, or a piece of a file.
    """
    if not path.exists():
        _explain_missing(path)
    elif is_piece(path.name):
        raise ModelLoadError(f"`{path}` is a piece of a file that was cut", _how_to_join(path))
    elif (found := shard_number(path.name)) is not None and path.is_file():
        _check_shards(path, *found)


def _check_shards(path: Path, number: int, count: int) -> None:
    names = shard_names(path.name)
    if number != 1:
        raise ModelLoadError(f"`{path}` is part {number} of {count} of a split model", f"name the first: `{names[0]}`")
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = f"put all {count} parts into {path.parent.absolute()}"
        raise ModelMissingError(f"the split model `{path.name}` is not complete: no `{missing[0]}`{more}", hint)


def _explain_missing(path: Path) -> None:
    if pieces := sorted(entry for entry in _siblings(path) if is_piece(entry.name)):
        raise ModelMissingError(f"no model file `{path}`, only pieces of it", _how_to_join(pieces[0]))
    match = _REPO.fullmatch(path.as_posix())
    if match and path.suffix.lower() != ".gguf" and not path.parent.exists():
        hint = f"for a repository on the hub write `hf:{match[1]}`"
        raise ModelMissingError(f"no model file `{path}`", hint)


def _siblings(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.parent.iterdir() if entry.name.startswith(path.name) and entry != path]
    except OSError:
        return []


def _how_to_join(piece: Path) -> str:
    whole = re.sub(r"(?<=\.gguf).*$", "", piece.name, count=1, flags=re.IGNORECASE | re.DOTALL)
    try:
        names = sorted(
            (entry.name for entry in piece.parent.iterdir() if is_piece(entry.name) and entry.name.startswith(whole)),
            key=_in_order,
        )
    except OSError:
        names = [piece.name]
    return f"join them in order: `cat {' '.join(names)} > {whole}`, and name that file"


def _in_order(name: str) -> list[tuple[int, str]]:
    """Numbers by value: part10 comes after part9."""
    return [(int(word), "") if word.isdigit() else (0, word) for word in re.split(r"(\d+)", name)]
