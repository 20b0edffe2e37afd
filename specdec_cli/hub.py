"""The Hugging Face hub: which file of a repository is meant, and that file in the hub's standard cache."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from specdec_cli import download
from specdec_cli.download import Progress, Remote
from specdec_cli.errors import DownloadError, ModelMissingError, SpecdecError, UsageError
from specdec_cli.files import file_size
from specdec_cli.hub_cache import part_ending, part_path, repo_folder, shard_source
from specdec_cli.hub_files import choose, spec_for
from specdec_cli.registry import HubRepo, HubSource, ModelSpec, Shard
from specdec_cli.wording import scrub

_Result = TypeVar("_Result")
_SHA256 = re.compile(r"[0-9a-f]{64}")


# --- asking ---


def resolve(repo: HubRepo, name: str, progress: Progress) -> ModelSpec:
    """Ask the hub which files are meant.

    Args:
        repo: the repository and what is wanted of it.
        name: what to call the model.
        progress: told when the hub has to be asked again.

    Raises:
        DownloadError: the hub cannot be asked.
        SpecdecError: what `choose` raises.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint())

    def ask() -> Any:
        return api.model_info(repo.repo, revision=repo.revision, files_metadata=True, timeout=download.ANSWER_S)

    with _silent_hub(), _explained(repo.repo, repo.revision):
        info = patiently_in_time(ask, progress)
    return spec_for(repo, choose(repo, [_shard(entry) for entry in info.siblings or ()]), name)


def _shard(entry: Any) -> Shard:
    lfs = entry.lfs
    sha256 = (lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)) if lfs else None
    return Shard(entry.rfilename, entry.size, sha256)


def endpoint() -> str:
    """The hub's address."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


# --- downloads ---


def fetch_files(files: Sequence[Shard], source: HubSource, progress: Progress) -> list[tuple[Path, str | None]]:
    """Download what of a model's files is not in the hub's cache.

    Args:
        files: one file, or all shards.
        source: where the first one is.
        progress: told about every block.

    Returns:
        For each file its path and, if it was hashed on the way, its SHA-256.

    Raises:
        DownloadError: the hub does not deliver what was asked for.
        ModelMissingError: it has no such file.
        OSError: nothing can be written.
    """
    folder = repo_folder(source.repo)
    sources = [shard_source(source, file.file) if len(files) > 1 else source for file in files]
    if all(file.size and file.sha256 for file in files):
        missing = (_missing(one, file.size, file.sha256) for one, file in zip(sources, files, strict=True))
        download.check_space(folder, sum(missing))
    with _silent_hub(), _explained(source.repo, source.revision, source.file):
        found = [_metadata(one, progress) for one in sources]
        for file, metadata in zip(files, found, strict=True):
            _check_metadata(file, metadata)
        if all(metadata.size for metadata in found):
            progress.expect(sum(metadata.size for metadata in found))
        missing = (_missing(one, metadata.size, metadata.etag) for one, metadata in zip(sources, found, strict=True))
        download.check_space(folder, sum(missing))
        return [_fetch_one(*both, progress) for both in zip(files, sources, found, strict=True)]


def describe_files(files: Sequence[Shard], source: HubSource, progress: Progress) -> tuple[Shard, ...]:
    """The files with the size and SHA-256 that the hub tells now; nothing is downloaded.

    Args:
        files: one file, or all shards.
        source: where the first one is.
        progress: told when the hub has to be asked again.

    Raises:
        DownloadError: the hub cannot be asked, or has other files than these.
        ModelMissingError: there is no such file.
    """
    sources = [shard_source(source, file.file) if len(files) > 1 else source for file in files]
    with _silent_hub(), _explained(source.repo, source.revision, source.file):
        return tuple(_described(file, _metadata(one, progress)) for file, one in zip(files, sources, strict=True))


def _described(file: Shard, metadata: Any) -> Shard:
    _check_metadata(file, metadata)
    told = metadata.etag if _SHA256.fullmatch(metadata.etag) else None
    return Shard(file.file, file.size if file.size is not None else metadata.size, file.sha256 or told)


def _missing(source: HubSource, size: int | None, etag: str | None) -> int:
    """Bytes that are still to come."""
    blob = repo_folder(source.repo) / "blobs" / str(etag)
    return 0 if _has_size(blob, size) else max(0, (size or 0) - file_size(part_path(source, str(etag))))


def _has_size(path: Path, size: int | None) -> bool:
    # Other programs write here too, and a full disk or a crash leaves files that end early.
    return path.is_file() and size in (None, file_size(path))


def _fetch_one(file: Shard, source: HubSource, metadata: Any, progress: Progress) -> tuple[Path, str | None]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    blob, sha256 = repo_folder(source.repo) / "blobs" / metadata.etag, None
    if _has_size(blob, metadata.size):
        progress.advance(file_size(blob), kept=True)
    else:
        expected = file.sha256 or (metadata.etag if _SHA256.fullmatch(metadata.etag) else None)
        address = f"{endpoint()}/{source.repo}/resolve/{metadata.commit_hash}/{_quoted(source.file)}"
        size = metadata.size if file.size is None else file.size
        remote = Remote(address, size, metadata.etag, expected, headers=build_hf_headers())
        sha256 = download.fetch_remote(remote, part_path(source, metadata.etag), blob, progress)
    # What began as a content that the name no longer stands for.
    for old in blob.parent.glob(f"*.{part_ending(source)}"):
        old.unlink(missing_ok=True)

    def add_names() -> str:
        # With the blob in place this only adds the names under which other programs find it.
        return hf_hub_download(
            source.repo, source.file, revision=source.revision, endpoint=endpoint(), etag_timeout=download.ANSWER_S
        )

    path = Path(download.patiently(add_names, progress))
    if not _has_size(path, metadata.size) or (path.is_symlink() and path.resolve() != blob.resolve()):
        # A damaged copy of the blob, as on file systems without links, or the link to another content.
        path.unlink()
        path = Path(download.patiently(add_names, progress))
    return path, sha256


def _quoted(path: str) -> str:
    from urllib.parse import quote

    return quote(path)


def patiently_in_time(call: Callable[[], _Result], progress: Progress) -> _Result:
    """The call's result, within seconds, or after a few tries where the server says that it cannot answer just now."""
    return download.patiently(lambda: download.in_time(call), progress)


def _metadata(source: HubSource, progress: Progress) -> Any:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(source.repo, source.file, revision=source.revision, endpoint=endpoint())
    metadata: Any = patiently_in_time(lambda: get_hf_file_metadata(url, timeout=download.ANSWER_S), progress)
    # The tag becomes a file name.
    if not metadata.commit_hash or not metadata.etag or not re.fullmatch(r"[\w.+=-]+", metadata.etag):
        raise _not_a_hub()
    return metadata


def _check_metadata(file: Shard, metadata: Any) -> None:
    """Refuse before gigabytes are moved what would not pass afterwards."""
    hint = "the file was replaced at its source, or belongs to another version of the model"
    if file.size is not None and metadata.size not in (None, file.size):
        raise DownloadError(f"offers {metadata.size} bytes instead of {file.size}", hint)
    # The entity tag of a large file is its SHA-256.
    if file.sha256 and _SHA256.fullmatch(metadata.etag) and metadata.etag != file.sha256:
        raise DownloadError(f"offers other content: sha256 {metadata.etag[:12]}… instead of {file.sha256[:12]}…", hint)


@contextmanager
def _silent_hub() -> Iterator[None]:
    """Keep the hub's progress bars and log lines off the terminal, and its library from asking for more than files."""
    import logging

    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, had_bars = logger.level, not are_progress_bars_disabled()
    # What the library would tell of the caller it looks up at the hub first, and fails on an answer of another form.
    tells, constants.HF_HUB_DISABLE_TELEMETRY = constants.HF_HUB_DISABLE_TELEMETRY, True
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disable_progress_bars()
        try:
            yield
        finally:
            logger.setLevel(level)
            constants.HF_HUB_DISABLE_TELEMETRY = tells
            if had_bars:
                enable_progress_bars()


# --- errors ---


@contextmanager
def _explained(repo: str, revision: str, file: str = "") -> Iterator[None]:
    """Turn what the hub's library raises into a message with a next step; files that cannot be written pass."""
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:  # which HTTP library lies below, and its exceptions, differs between hub versions
        # Errors of some of these libraries are OSErrors too, those of the file system carry a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if type(error).__name__ == "HFValidationError":
            raise UsageError(f"`{repo}` cannot be a repository: {error}", "write OWNER/REPO") from error
        if isinstance(error, (ValueError, KeyError, TypeError)):
            raise _not_a_hub() from error
        raise _refusal(error, repo, revision, file) or download.explain(error, "the hub") from error


def _not_a_hub() -> DownloadError:
    return DownloadError(
        "the answer does not come from a hub; a proxy or a login page may stand in between",
        f"open {scrub(endpoint())} in a browser to see what answers there",
    )


def _refusal(error: Exception, repo: str, revision: str, file: str) -> SpecdecError | None:
    """What the hub's error codes mean; None for anything else."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    code, said = headers.get("x-error-code", ""), headers.get("x-error-message", "")
    status, page = download.status_of(error), scrub(f"{endpoint()}/{repo}")
    tokens = scrub(f"{endpoint()}/settings/tokens")
    if code == "GatedRepo":
        hint = f"accept the license at {page}, then set `HF_TOKEN` to an access token of that account ({tokens})"
        return DownloadError(f"access refused (HTTP {status}): `{repo}` is gated, its license must be accepted", hint)
    if "Invalid credentials" in said:
        hint = f"set `HF_TOKEN` to a new one from {tokens}, or unset it: public models need none"
        return DownloadError(f"access refused (HTTP {status}): the hub does not know the access token", hint)
    if said == "Access to this resource is disabled.":
        return DownloadError(f"`{repo}` has been disabled by the hub (HTTP {status})", f"see {page}")
    if code == "RevisionNotFound":
        return ModelMissingError(
            f"`{repo}` has no revision `{revision}` (HTTP {status})", "leave out `@…` for the newest"
        )
    if code == "EntryNotFound":
        hint = f"{page}/tree/{revision} lists what it has"
        return ModelMissingError(f"there is no {file} at revision {revision} of `{repo}` (HTTP {status})", hint)
    if code == "RepoNotFound" or status == 404:
        return _not_found(status, repo, revision, file)
    if status in (401, 403):
        hint = f"accept the license at {page}, then set `HF_TOKEN` to an access token of that account"
        return DownloadError(f"access refused (HTTP {status}): the repository is gated, private or gone", hint)
    return None


def _not_found(status: int | None, repo: str, revision: str, file: str) -> ModelMissingError:
    hint = (
        f"check the spelling of `{repo}`; for a private repository set `HF_TOKEN` to an access token that may read it"
    )
    if file:
        what = f"there is no {file} at revision {revision} of `{repo}`, or the repository is private"
        return ModelMissingError(f"{what} (HTTP {status})", hint)
    return ModelMissingError(f"there is no repository `{repo}`, or it is private (HTTP {status})", hint)
