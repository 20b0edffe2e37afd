"""Small files that several processes may read and write: never half-written, never in the way."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from specdec_cli.errors import UsageError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a file that cannot be understood is as good as none."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def expanded(path: str) -> Path:
    """A path with `~` filled in; as it is where there is no such home."""
    with contextlib.suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def read_own_text(path: Path) -> str:
    """The text of a file that the user may have written; empty when there is none.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read `{path}`: {reason}", "check the file, or set SPECDEC_HOME") from None


def replace_text(path: Path, text: str) -> bool:
    """Write a file as a whole, its directory included; False where nothing can be written."""
    with contextlib.suppress(OSError):
        write_whole(path, text)
        return True
    return False


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole, its directory included.

    Raises:
        OSError: nothing can be written; what was there is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
