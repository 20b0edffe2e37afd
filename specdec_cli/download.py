"""One file over HTTP into a part: continued where it broke off, tried again within bounds, refused when it is no model.

The session, proxies and certificates are huggingface_hub's, for the hub and for other servers alike.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specdec_cli.errors import DownloadError
from specdec_cli.files import file_size
from specdec_cli.gguf import what_it_is
from specdec_cli.wording import format_size, scrub

_Result = TypeVar("_Result")
_GGUF_MAGIC = b"GGUF"
_NO_MODEL_HINT = "check the name: specdec loads GGUF files only"
_BLOCK = 1 << 20
_CHUNK = 1 << 18
# A server may fail so many times in a row; whoever asks for a longer wait than the last number is not waited for.
_RETRY_WAITS_S = (0.5, 1.0, 2.0)
_LONGEST_WAIT_S = 60.0
# Bytes, or a fiftieth of a file, between two failures that do not count as failures in a row.
_ENOUGH = 8 << 20
_PASSING_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))
# One request for a file's description may take this long; name look-up, all addresses and redirects a little more.
ANSWER_S = 5.0
_REACH_S = 8.0


class Progress(Protocol):
    """Hears what a fetch does. Bytes may be taken back (a negative advance) when a download starts over."""

    def start(self, name: str, size: int | None, source: str) -> None:
        """A source is being tried for this model; `size` in bytes, None when unknown."""

    def expect(self, size: int) -> None:
        """The size in bytes came to light after the start."""

    def advance(self, num_bytes: int, *, kept: bool = False) -> None:
        """So many bytes more are on disk; `kept` ones were there before and say nothing about the speed."""

    def note(self, text: str) -> None:
        """One line that the user should see."""

    def finish(self) -> None:
        """The source has delivered, or has failed."""


class SilentProgress:
    """Hears everything and shows nothing."""

    def start(self, name: str, size: int | None, source: str) -> None:
        """Show nothing."""

    def expect(self, size: int) -> None:
        """Show nothing."""

    def advance(self, num_bytes: int, *, kept: bool = False) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def finish(self) -> None:
        """Show nothing."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A file as its server describes it.

    Attributes:
        url: where it is.
        size: bytes; None when the server does not say.
        tag: differs between two contents; None when the server gives nothing of the kind.
        sha256: what the content must hash to, None when nobody says.
        if_range: the entity tag that the server itself compares before it sends the rest; None where the address
            alone names the content.
        headers: to send with every request.
    """

    url: str
    size: int | None
    tag: str | None
    sha256: str | None = None
    if_range: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def check_space(directory: Path, num_bytes: int) -> None:
    """Before gigabytes are moved.

    Raises:
        DownloadError: the disk that holds this directory has not so many bytes left.
    """
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise DownloadError(
            f"needs {format_size(num_bytes)}, but only {format_size(free)} are free at {directory}",
            hint="free some space, or move the directories with `SPECDEC_HOME` and `HF_HOME`",
        )


# --- servers that fail ---


class Patience:
    """How often a server may fail in a row before it is left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._waits_s = list(_RETRY_WAITS_S)

    def renew(self) -> None:
        """Something was delivered: begin to count anew."""
        self._waits_s = list(_RETRY_WAITS_S)

    def wait(self, error: Exception) -> None:
        """Let some time pass before the next try.

        Raises:
            Exception: the error itself, when it will not pass, came too often, or the server wants a long pause.
        """
        status = status_of(error)
        passes = status in _PASSING_STATUSES if status is not None else is_broken_connection(error)
        if not passes or not self._waits_s:
            raise error
        wait_s = max(self._waits_s.pop(0), asked_wait_s(error))
        if wait_s > _LONGEST_WAIT_S:
            raise error
        what = f"the server answered HTTP {status}" if status else "the connection broke off"
        self._progress.note(f"{what}; trying again in {wait_s:g} s")
        time.sleep(wait_s)


def patiently(call: Callable[[], _Result], progress: Progress) -> _Result:
    """The call's result, after a few tries where the server says that it cannot answer just now."""
    patience = Patience(progress)
    while True:
        try:
            return call()
        except Exception as error:
            # A host that cannot be reached at all is left at once: another source may be near.
            if status_of(error) is None:
                raise
            patience.wait(error)


def in_time(call: Callable[[], _Result]) -> _Result:
    """Run a call that must answer in time; a library's own timeouts hold for each address, not for their sum.

    Raises:
        TimeoutError: no answer in time; the call is left behind in its thread.
    """
    results: list[_Result] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(_REACH_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {_REACH_S:.0f} s")
    return results[0]


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an exception of the HTTP library carries."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def asked_wait_s(error: BaseException) -> float:
    """Seconds that a refusing server asks to wait, 0 when it does not."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", headers.get("ratelimit", ""))
    asked = headers.get("retry-after") or (limit[1] if limit else "0")
    with contextlib.suppress(ValueError, OverflowError):
        if re.fullmatch(r"\d+", asked):
            return float(asked)
        from email.utils import parsedate_to_datetime

        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    return 0.0


def is_broken_connection(error: BaseException) -> bool:
    """Whether bytes stopped coming; told by name, because the HTTP library differs between versions of the hub's."""
    return isinstance(error, _EndedEarlyError) or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


class _EndedEarlyError(Exception):
    """The server ended an answer that was not complete."""


def explain(error: Exception, owner: str, reach_hint: str = "") -> DownloadError:
    """What an exception of the HTTP library means to a user.

    Args:
        error: the exception.
        owner: who did not answer, e.g. "the hub".
        reach_hint: what to do where it cannot be reached; empty is for the hub.
    """
    status, wait_s = status_of(error), asked_wait_s(error)
    if status == 429:
        hint = f"repeat the command in {wait_s:.0f} s" if wait_s else "repeat the command later"
        return DownloadError(f"{owner} allows no more requests for now (HTTP 429)", f"{hint}; what is there is kept")
    again = "run the same command again: it continues where this one stopped"
    if status is not None:
        return DownloadError(f"{owner} answered HTTP {status}", again)
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    first_line = scrub((str(error).strip().splitlines() or [type(error).__name__])[0])
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "name your certificates with `SSL_CERT_FILE`"
        return DownloadError(f"{owner} shows a certificate that is not trusted here", hint)
    if "Timeout" in names:
        return DownloadError(f"{owner} does not answer", again)
    if "TooManyRedirects" in names:
        return DownloadError(f"{owner} redirects without end", "open the address in a browser")
    if "Connect" in names or "Proxy" in names:
        hint = "check the network, and `HTTPS_PROXY` behind a proxy; `HF_ENDPOINT` names another hub"
        return DownloadError(f"{owner} cannot be reached ({first_line})", reach_hint or hint)
    return DownloadError(f"the download broke off ({first_line})", again)


def explain_os_error(error: OSError, directory: Path) -> DownloadError:
    """A failure of the file system, with the directory it happened in."""
    where = error.filename or directory
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
        hint = "free some space and run the same command again: it continues where this one stopped"
        return DownloadError(f"the disk is full at {where}", hint)
    if error.errno == errno.EFBIG:
        hint = "`SPECDEC_HOME` and `HF_HOME` move the directories to another disk"
        return DownloadError(f"the file system at {where} takes no file of this size", hint)
    hint = "`SPECDEC_HOME` and `HF_HOME` move the directories"
    return DownloadError(scrub(f"{error.strerror or error}: {where}"), hint)


# --- parts ---


class PartFile:
    """A growing model file that knows its SHA-256; what an earlier run left in it counts as written.

    Raises:
        DownloadError: what is written is no GGUF file, or more than `limit` bytes.
    """

    def __init__(self, path: Path, limit: int | None, progress: Progress) -> None:
        path.touch()
        self._stream = path.open("r+b")
        self._limit, self._progress = limit, progress
        self._digest, self._head, self.size = hashlib.sha256(), b"", 0
        while block := self._stream.read(_BLOCK):
            self._count(block, kept=True)
        self.num_kept = self.size

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, block: bytes) -> int:
        """Append a block, hash it and report it."""
        head = (self._head + block)[: len(_GGUF_MAGIC)]
        if not _GGUF_MAGIC.startswith(head):
            raise DownloadError(_no_model(self._head + block[:64]), _NO_MODEL_HINT)
        if self._limit is not None and self.size + len(block) > self._limit:
            self.restart()
            raise DownloadError(f"delivers more than the {self._limit} bytes that it promised")
        self._stream.write(block)
        self._count(block, kept=False)
        return len(block)

    def _count(self, block: bytes, *, kept: bool) -> None:
        self._head = (self._head + block)[: len(_GGUF_MAGIC)]
        self._digest.update(block)
        self.size += len(block)
        self._progress.advance(len(block), kept=kept)

    def restart(self) -> None:
        """Forget everything: the content comes from its start."""
        self._stream.seek(0)
        self._stream.truncate()
        self._progress.advance(-self.size, kept=True)
        self._digest, self._head, self.size, self.num_kept = hashlib.sha256(), b"", 0, 0

    def seal(self) -> str:
        """Write everything through to the disk and return the SHA-256 in hexadecimal."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._digest.hexdigest()


def _no_model(head: bytes) -> str:
    if head.lstrip()[:1] == b"<":
        return "an HTML page came in place of the file; a login page or a proxy may stand in between"
    return f"delivered something that is not a GGUF file: {what_it_is(head)}"


def starts_as_gguf(path: Path) -> bool:
    """Whether a file begins as a model does."""
    with path.open("rb") as stream:
        return stream.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


def settle(part: Path, final: Path, size: int | None, expected: str | None, sha256: str) -> Path:
    """Give a checked part its final name; remove it when a check fails.

    Args:
        part: what was written.
        final: its name from now on.
        size: bytes it must have; None is unknown.
        expected: the SHA-256 it must have; None is unknown.
        sha256: the one it has.

    Raises:
        DownloadError: a check failed.
    """
    problem = ""
    if size not in (None, file_size(part)):
        problem = f"delivered {file_size(part)} bytes instead of {size}"
    elif expected not in (None, sha256):
        problem = f"delivered other content: sha256 {sha256[:12]}… instead of {str(expected)[:12]}…"
    elif not starts_as_gguf(part):
        with part.open("rb") as stream:
            problem = _no_model(stream.read(64))
    if problem:
        part.unlink()
        raise DownloadError(problem, "run the same command again; if that repeats, the file was replaced at its source")
    part.replace(final)
    return final


def fetch_remote(remote: Remote, part: Path, final: Path, progress: Progress) -> str:
    """Download a file, beginning with what an earlier run left of it, and put it in place.

    Args:
        remote: the file.
        part: where it grows; stays after a failure that a further try can mend.
        final: its name when it is whole and checked.
        progress: told about every block.

    Returns:
        Its SHA-256.

    Raises:
        DownloadError: it is no model, or not the one that was promised.
        OSError: nothing can be written.
        Exception: of the HTTP library, see `explain`.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    if part.exists() and (remote.tag is None or not _may_go_on(part, remote.size)):
        part.unlink()
    try:
        with PartFile(part, remote.size, progress) as out:
            sha256 = _fill(remote, out, progress)
            if out.num_kept and remote.sha256 not in (None, sha256):
                progress.note("what an earlier download left was damaged; starting over")
                out.restart()
                sha256 = _fill(remote, out, progress)
    except DownloadError:
        # What an earlier run left is still good when only this server's answer was not.
        if not starts_as_gguf(part):
            part.unlink()
        raise
    settle(part, final, remote.size, remote.sha256, sha256)
    return sha256


def _may_go_on(part: Path, size: int | None) -> bool:
    return (size is None or file_size(part) <= size) and starts_as_gguf(part)


def _fill(remote: Remote, out: PartFile, progress: Progress) -> str:
    patience, whole = Patience(progress), out.size == remote.size
    while not whole:
        before = out.size
        try:
            _stream(remote, out)
            if out.size < (remote.size or 0):
                raise _EndedEarlyError(f"after {out.size} of {remote.size} bytes")
            whole = True
        except DownloadError:
            raise
        except Exception as error:
            # A server that promised too much in its Content-Length: everything is here all the same.
            whole = out.size == remote.size
            if whole:
                break
            if remote.tag is None:
                out.restart()
            elif out.size - before >= min(_ENOUGH, (remote.size or _ENOUGH) // 50):
                patience.renew()
            patience.wait(error)
    return out.seal()


def _stream(remote: Remote, out: PartFile) -> None:
    """One request for what is missing."""
    from huggingface_hub import constants, get_session

    headers = {**remote.headers, "Accept-Encoding": "identity"}
    if out.size:
        headers["Range"] = f"bytes={out.size}-"
        if remote.if_range:
            headers["If-Range"] = remote.if_range
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", remote.url, headers=headers, timeout=timeout) as response:
        if response.status_code == 416:
            out.restart()
            raise _EndedEarlyError("the server has no such range")
        response.raise_for_status()
        if "text/html" in response.headers.get("content-type", ""):
            raise DownloadError(_no_model(b"<"), "open the address in a browser to see that page")
        first = _first_byte(response)
        if first not in (0, out.size):
            raise DownloadError(f"the server sends the file from byte {first} on, not from {out.size}")
        if first != out.size:
            out.restart()
        for block in response.iter_bytes(chunk_size=_CHUNK):
            out.write(block)


def _first_byte(response: Any) -> int:
    """Where an answer begins in the file.

    Raises:
        DownloadError: a part of the file that does not say which.
    """
    if response.status_code != 206:
        return 0
    match = re.fullmatch(r"bytes (\d+)-\d*/.*", response.headers.get("content-range", ""))
    if match is None:
        raise DownloadError("the server sends a part of the file without saying which")
    return int(match[1])
