"""The drafts made for this machine: one record for each pair of files, beside the files that records name.

A record's name holds everything that it depends on: both source files by path, size and time, llama.cpp's build and
the CPU. Where one of them changes, another record is looked for, and nothing has to be hashed at the start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_cli import paths, selfcheck
from specdec_cli.errors import BackendError
from specdec_cli.files import try_lock, write_whole
from specdec_cli.llama import KV_TYPES, default_threads, versions

PUBLISHED = "as published"
"""The label of the file that was downloaded."""

_SCHEMA = 1
_BLOCK = 1 << 20
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What to draft with on this machine.

    Attributes:
        path: the draft model's file; the published one when no other is faster.
        label: its format, such as "Q4_0 pure", or `PUBLISHED`.
        threads: for decoding; None is every physical core.
        kv_type: type of the draft model's cache.
        flash_attention: None leaves the choice to llama.cpp.
    """

    path: Path
    label: str = PUBLISHED
    threads: int | None = None
    kv_type: str = "f16"
    flash_attention: bool | None = None


def find_tuned(target: Path, draft: Path) -> Tuned | None:
    """What tuning found best for two files on this machine; never raises, and reads one small file.

    Returns:
        None when they were never tuned here, or when anything has changed since.
    """
    try:
        record = _read(folder() / _record_name(target, draft))
        chosen = record["chosen"]
        tuned = Tuned(
            _file_of(record) or draft,
            str(chosen["label"]),
            chosen["threads"],
            str(chosen["kv_type"]),
            chosen["flash_attention"],
        )
        return tuned if _is_sound(tuned) else None
    except _UNREADABLE:
        return None


def _is_sound(tuned: Tuned) -> bool:
    return (
        tuned.kv_type in KV_TYPES
        and (tuned.threads is None or (type(tuned.threads) is int and tuned.threads > 0))
        and tuned.flash_attention in (None, True, False)
    )


def _file_of(record: Mapping[str, Any]) -> Path | None:
    """The file that a record names, None for the published one.

    Raises:
        ValueError: it is not the file that was measured.
        OSError: it is gone.
    """
    name = record["chosen"]["file"]
    if name is None:
        return None
    path = folder() / Path(name).name
    if path.stat().st_size != record["chosen"]["size"]:
        raise ValueError("another size")
    return path


def remember(target: Path, draft: Path, tuned: Tuned, sha256: str, measured: Mapping[str, object]) -> None:
    """Write the record for two files, and delete the files that no record names any longer.

    Args:
        target: the target.
        draft: the draft model as published.
        tuned: what to use from now on; a file of `folder()`, or `draft`.
        sha256: of `draft`.
        measured: what led to the choice, in plain values.

    Raises:
        OSError: the record could not be written.
    """
    own = tuned.path.parent == folder()
    record = {
        "schema": _SCHEMA,
        "target": _identity(target),
        "draft": _identity(draft) | {"sha256": sha256},
        "build": versions(),
        "cpu": selfcheck.machine()[1],
        "chosen": {
            "label": tuned.label,
            "file": tuned.path.name if own else None,
            "size": tuned.path.stat().st_size if own else None,
            "threads": tuned.threads,
            "kv_type": tuned.kv_type,
            "flash_attention": tuned.flash_attention,
        },
        "measured": measured,
    }
    path = folder() / _record_name(target, draft)
    _forget_older(path, record)
    write_whole(path, json.dumps(record, indent=1))
    sweep()


def forget(target: Path, draft: Path) -> bool:
    """Go back to the published draft: delete what was tuned for these two files, on any machine.

    Returns:
        Whether there was anything.

    Raises:
        BackendError: another process is tuning.
        OSError: something could not be deleted.
    """
    wanted = (_identity(target)["path"], _identity(draft)["path"])
    with locked():
        found = [path for path, record in _records() if (record["target"]["path"], record["draft"]["path"]) == wanted]
        for path in found:
            path.unlink(missing_ok=True)
        sweep()
    return bool(found)


def sweep() -> None:
    """Delete the model files that no record names: other candidates, and what an interruption left."""
    named = {record["chosen"]["file"] for _, record in _records()}
    for path in folder().glob("*.gguf"):
        if path.name not in named:
            path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Hash of a file, taken from a record when one has it for this path, size and time.

    Raises:
        OSError: the file cannot be read.
    """
    identity = _identity(path)
    for _, record in _records():
        if record["draft"].items() >= identity.items():
            return str(record["draft"]["sha256"])
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def folder() -> Path:
    """Where records and files are kept; it need not exist."""
    return paths.cache_dir() / "tuned"


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Make the folder and hold its lock: two processes would delete each other's candidates.

    Raises:
        BackendError: another process holds it, or the folder cannot be made.
    """
    try:
        folder().mkdir(parents=True, exist_ok=True)
        lock = (folder() / ".lock").open("w")
    except OSError as error:
        reason = f"cannot write to `{folder()}`: {error.strerror}"
        raise BackendError(reason, "set SPECDEC_HOME to a folder that can be written") from None
    with lock as stream:
        if not try_lock(stream):
            raise BackendError("another process is tuning a draft", "wait until it has finished")
        yield


# --- names and files ---------------------------------------------------------------------------------------------


def _identity(path: Path) -> dict[str, str | int]:
    resolved = path.resolve()
    status = resolved.stat()
    return {"path": str(resolved), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _record_name(target: Path, draft: Path) -> str:
    build = versions()
    known = (selfcheck.machine(), default_threads(), build["llama.cpp"], build["llama-cpp-python"])
    parts = [_identity(target), _identity(draft), *known]
    return f"{hashlib.sha256(json.dumps([_SCHEMA, parts]).encode()).hexdigest()[:32]}.json"


def _records() -> Iterator[tuple[Path, dict[str, Any]]]:
    """All records that can be read, with the parts that other functions look at."""
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(*_UNREADABLE):
            record = _read(path)
            _ = record["chosen"]["file"], record["target"]["path"], record["draft"]["path"], record["draft"]["sha256"]
            _ = record["draft"].items()
            yield path, record


def _read(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text("utf-8"))
    if record["schema"] != _SCHEMA:
        raise ValueError("another schema")
    return dict(record)


def _forget_older(path: Path, record: Mapping[str, Any]) -> None:
    """Drop what is there for other files under the same paths: nothing will look for it again."""
    for other, known in list(_records()):
        same = all(known[part]["path"] == record[part]["path"] for part in ("target", "draft"))
        if other != path and same and any(known[part] != record[part] for part in ("target", "draft")):
            other.unlink(missing_ok=True)
