"""Models in several files: llama.cpp's shards, which it loads by the first, and pieces that other tools cut."""

from __future__ import annotations

import re
from difflib import get_close_matches
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
        if error := _something_else(path):
            raise error
        return
    if is_piece(path.name):
        raise ModelLoadError(f"`{path}` is a piece of a file that was cut", _how_to_join(path))
    if (found := shard_number(path.name)) is not None and path.is_file():
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


def repository_in(text: str) -> str | None:
    """OWNER/REPO[:QUANT] where a text looks like that and like no path of a model file."""
    match = _REPO.fullmatch(text)
    return match[1] if match and not text.lower().endswith(".gguf") else None


def missing_file(path: Path) -> ModelMissingError:
    """The error for a path where nothing is: pieces of the file, a repository of the hub, a similar name beside it."""
    if error := _something_else(path):
        return error
    if similar := _similar(path):
        hint = f"did you mean `{similar}`?"
    elif not path.parent.is_dir():
        hint = f"there is no directory `{path.parent}`; `specdec models scan` lists the GGUF files on this machine"
    else:
        hint = "`specdec models scan` lists the GGUF files on this machine, `specdec pull` fetches models"
    return ModelMissingError(f"no model file `{path}`", hint)


def _something_else(path: Path) -> ModelMissingError | None:
    if pieces := sorted(entry for entry in _siblings(path) if is_piece(entry.name)):
        return ModelMissingError(f"no model file `{path}`, only pieces of it", _how_to_join(pieces[0]))
    if (repo := repository_in(path.as_posix())) and not path.parent.exists():
        return ModelMissingError(f"no model file `{path}`", f"for a repository on the hub write `hf:{repo}`")
    return None


def _similar(path: Path) -> Path | None:
    try:
        names = {entry.stem.lower(): entry.name for entry in path.parent.iterdir() if entry.suffix.lower() == ".gguf"}
    except OSError:
        return None
    stem = path.stem if path.suffix.lower() == ".gguf" else path.name
    close = get_close_matches(stem.lower(), names, n=1, cutoff=0.8)
    return path.with_name(names[close[0]]) if close else None


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
    if missing := _missing_pieces(names):
        return f"get {' and '.join(f'`{name}`' for name in missing)} too, then join all in order into `{whole}`"
    return f"join them in order: `cat {' '.join(names)} > {whole}`, and name that file"


def _missing_pieces(names: list[str]) -> list[str]:
    """Up to three that are not here, where the names tell: by their count, or by a gap in their numbers."""
    parts = [(match, name) for name in names if (match := re.fullmatch(r"(.*?)(\d+)(of(\d+))?", name, re.IGNORECASE))]
    if not parts or len(parts) != len(names):
        return []
    first, (match, _) = min(int(match[2]) for match, _ in parts), parts[0]
    width = len(match[2]) if match[2].startswith("0") else 1
    last = min(int(match[4]), 1000) if match[4] else max(int(match[2]) for match, _ in parts)
    wanted = (f"{match[1]}{number:0{width}}{match[3] or ''}" for number in range(min(first, 1), last + 1))
    return [name for name in wanted if name not in names][:3]


def _in_order(name: str) -> list[tuple[int, str]]:
    """Numbers by value: part10 comes after part9."""
    return [(int(word), "") if word.isdigit() else (0, word) for word in re.split(r"(\d+)", name)]
