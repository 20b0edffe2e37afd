"""Small files that several processes may read and write, never half-written; and remembered digests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.paths import state_dir

_BLOCK = 1 << 22
_MAX_FILES = 64
_POLL_S, _PATIENCE_S = 0.01, 20.0


def file_size(path: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


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
        # Some editors put a mark in front of the text.
        return path.read_text(encoding="utf-8-sig")
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
    """Write a file as a whole, its directory included; what a link leads to, and into devices as they are.

    Raises:
        OSError: nothing can be written; what was there is still there.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be alone with a file while it is read, changed and written: another process waits for its turn.

    Raises:
        SpecdecError: another process does not let go of it.
    """
    lock = state_dir() / f"{path.name}.lock"
    with contextlib.ExitStack() as stack:
        # Where nothing can be written there is nothing to lock either, and the caller will find out.
        with contextlib.suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(lock.open("w"))
            end = time.monotonic() + _PATIENCE_S
            while not try_lock(stream):
                if time.monotonic() > end:
                    raise SpecdecError(f"another process is changing `{path}`", "run the command again")
                time.sleep(_POLL_S)
        yield


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal; remembered for its path, size and time of change.

    Raises:
        OSError: the file cannot be read.
    """
    if known := known_digest(path):
        return known
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    remember_digest(path, digest.hexdigest())
    return digest.hexdigest()


def known_digest(path: Path) -> str | None:
    """The SHA-256 that the file had when it was hashed; None when it never was, or has changed."""
    known = known_of(path, "digests")
    return known if isinstance(known, str) else None


def remember_digest(path: Path, sha256: str) -> None:
    """Note what a file was just hashed to."""
    remember_of(path, "digests", sha256)


def known_of(path: Path, name: str) -> Any:
    """What was remembered of a file as it is, by path, size and time of change; None when nothing was.

    Args:
        path: of the file.
        name: of what is remembered, such as "digests".

    Raises:
        OSError: there is no such file.
    """
    return read_object(state_dir() / f"{name}.json").get(_identity(path))


def remember_of(path: Path, name: str, value: Any) -> None:
    """Remember something of a file as it is; without a place to write to it is found out again.

    Raises:
        OSError: there is no such file.
    """
    store, identity = state_dir() / f"{name}.json", _identity(path)
    known = read_object(store)
    known.pop(identity, None)
    kept = [*known.items(), (identity, value)][-_MAX_FILES:]
    replace_text(store, json.dumps(dict(kept)))


def _identity(path: Path) -> str:
    status = path.stat()
    return json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns])


if sys.platform == "win32":
    import msvcrt

    def try_lock(stream: IO[str]) -> bool:
        """Lock an open file; False while another process holds it."""
        try:
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def try_lock(stream: IO[str]) -> bool:
        """Lock an open file; False while another process holds it."""
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            # Some network file systems have no locks; a second download is then only waste.
            return True
        return True
