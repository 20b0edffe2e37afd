"""The Hugging Face hub: which file of a repository is meant, and that file in the hub's standard cache."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specdec_cli import download
from specdec_cli.download import Progress, Remote, format_size, scrub
from specdec_cli.errors import DownloadError, ModelLoadError, ModelMissingError, SpecdecError, UsageError
from specdec_cli.registry import HubRepo, HubSource, ModelSpec, Shard
from specdec_cli.split import is_piece, shard_names, stem_of

_Result = TypeVar("_Result")
_DEFAULT_QUANT = "Q4_K_M"
_SHA256 = re.compile(r"[0-9a-f]{64}")
# At the end of a file name: what the publishers of GGUF files call a quantization.
_QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP\d\w*|NVFP\d\w*|B?F16|FP16|F32|FP32))$", re.I | re.A)
# Parts of other models that lie beside a model: an image encoder, statistics for the quantizer.
_NO_MODEL = re.compile(r"mmproj|imatrix", re.I)
_MAX_LISTED = 25


# --- which file ---


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model of a repository: its files in order, by their paths there."""

    files: tuple[Shard, ...]

    @property
    def path(self) -> str:
        """Path of the first file."""
        return self.files[0].file

    @property
    def stem(self) -> str:
        """File name without ending and shard numbers."""
        return stem_of(self.path.rpartition("/")[2])

    @property
    def quant(self) -> str:
        """The quantization that the name tells; empty when it tells none."""
        match = _QUANT.search(self.stem)
        return _canonical(match[1]) if match else ""

    @property
    def size(self) -> int | None:
        """Bytes of all files."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def is_complete(self) -> bool:
        """Whether no shard is missing."""
        return len(self.files) == len(shard_names(self.path))

    @property
    def line(self) -> str:
        """For a list: name, size, number of parts."""
        parts = f", {len(self.files)} parts" if len(self.files) > 1 else ""
        return f"{self.path}  {format_size(self.size)}{parts}"


def _canonical(quant: str) -> str:
    return re.sub(r"^FP(?=16|32)", "F", quant.upper())


def candidates(files: Sequence[Shard]) -> list[Candidate]:
    """The models among a repository's files, each with all its shards."""
    models: dict[str, list[Shard]] = {}
    for file in sorted(files, key=lambda file: file.file):
        folder, _, name = file.file.rpartition("/")
        if name.lower().endswith(".gguf") and not _NO_MODEL.search(name):
            first = shard_names(name)[0]
            models.setdefault(f"{folder}/{first}", []).append(file)
    return [Candidate(tuple(shards)) for shards in models.values()]


def choose(repo: HubRepo, files: Sequence[Shard]) -> Candidate:
    """The model that is meant.

    Args:
        repo: with a file's name or a quantization, in any case of letters; with neither, Q4_K_M or the only model.
        files: what the repository has.

    Raises:
        ModelMissingError: there is none, or it lacks a shard.
        ModelLoadError: only pieces of it that have to be joined.
        UsageError: several fit.
    """
    models = candidates(files)
    if not models:
        raise _no_models(repo, files)
    found = _matching(repo.wanted or _DEFAULT_QUANT, models)
    if repo.wanted is None and not found and len(models) == 1:
        found = models
    if len(found) > 1 or (not found and repo.wanted is None):
        what = f"more than one model for `{repo.wanted}`" if repo.wanted else "more than one model"
        raise UsageError(f"`{repo.repo}` has {what}:{_listed(found or models)}", _name_one(repo, found or models))
    if not found:
        raise _absent(repo, models, files)
    if not found[0].is_complete:
        have = {file.file.rpartition("/")[2] for file in found[0].files}
        missing = next(name for name in shard_names(found[0].path.rpartition("/")[2]) if name not in have)
        raise ModelMissingError(f"`{repo.repo}` lacks a part of that model: `{missing}`", "take another repository")
    return found[0]


def _matching(wanted: str, models: Sequence[Candidate]) -> list[Candidate]:
    """By path, by file name, by quantization, by a word of the path: the first of these that fits any."""
    word = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?:$|[-._/])", re.I)
    low = wanted.lower()
    tests: tuple[Callable[[Candidate], bool], ...] = (
        lambda model: any(low == file.file.lower() for file in model.files),
        lambda model: any(low == file.file.rpartition("/")[2].lower() for file in model.files),
        lambda model: low == model.stem.lower(),
        lambda model: _canonical(wanted) == model.quant,
        lambda model: word.search(model.path.removesuffix(".gguf")) is not None,
    )
    return next((found for test in tests if (found := [model for model in models if test(model)])), [])


def _no_models(repo: HubRepo, files: Sequence[Shard]) -> SpecdecError:
    pieces = [file.file for file in files if is_piece(file.file)]
    if pieces:
        hint = f"download these yourself and join them: `cat {' '.join(pieces[:4])} > model.gguf`"
        return ModelLoadError(f"`{repo.repo}` has only pieces of a cut file", hint)
    names = ", ".join(sorted(file.file for file in files)[:5])
    had = f"; it has {names}" if names else ""
    hint = f"look for a repository with GGUF files, often called `{repo.repo.rpartition('/')[2]}-GGUF`"
    return ModelMissingError(f"`{repo.repo}` has no GGUF model{had}", hint)


def _absent(repo: HubRepo, models: Sequence[Candidate], files: Sequence[Shard]) -> SpecdecError:
    pieces = [file.file for file in files if is_piece(file.file) and str(repo.wanted).lower() in file.file.lower()]
    if pieces:
        hint = f"download these yourself and join them: `cat {' '.join(pieces[:4])} > model.gguf`"
        return ModelLoadError(f"`{repo.repo}` has `{repo.wanted}` only in pieces of a cut file", hint)
    return ModelMissingError(
        f"`{repo.repo}` has no model `{repo.wanted}`; it has{_listed(models)}", _name_one(repo, models)
    )


def _listed(models: Sequence[Candidate]) -> str:
    lines = "".join(f"\n  {model.line}" for model in models[:_MAX_LISTED])
    return lines + (f"\n  and {len(models) - _MAX_LISTED} more" if len(models) > _MAX_LISTED else "")


def _name_one(repo: HubRepo, models: Sequence[Candidate]) -> str:
    quants = [model.quant for model in models]
    first = quants[0] if quants[0] and quants.count(quants[0]) == 1 else models[0].path.rpartition("/")[2]
    revision = "" if repo.revision == "main" else f"@{repo.revision}"
    return f"name one, e.g. `hf:{repo.repo}:{first}{revision}`"


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
    return _spec(repo, choose(repo, [_shard(entry) for entry in info.siblings or ()]), name)


def resolve_here(repo: HubRepo, name: str, *, settle_for_any: bool) -> ModelSpec | None:
    """The same from the hub's cache alone; None when it does not hold what the hub would be asked for.

    Args:
        repo: the repository and what is wanted of it.
        name: what to call the model.
        settle_for_any: where no quantization is wanted, take the only model that is here.
    """
    folder = snapshot(HubSource(repo.repo, "", repo.revision))
    files = [Shard(path.relative_to(folder).as_posix(), download.file_size(path)) for path in _ggufs(folder)]
    try:
        found = choose(repo, files)
    except SpecdecError:
        return None
    if repo.wanted is None and not settle_for_any and found.quant != _DEFAULT_QUANT:
        return None
    return _spec(repo, found, name)


def _ggufs(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (path for path in folder.rglob("*") if path.suffix.lower() == ".gguf" and path.is_file())


def _shard(entry: Any) -> Shard:
    lfs = entry.lfs
    sha256 = (lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)) if lfs else None
    return Shard(entry.rfilename, entry.size, sha256)


def _spec(repo: HubRepo, model: Candidate, name: str) -> ModelSpec:
    source = f"hf:{repo.repo}/{model.path}" + ("" if repo.revision == "main" else f"@{repo.revision}")
    shards = tuple(Shard(file.file.rpartition("/")[2], file.size, file.sha256) for file in model.files)
    first = shards[0]
    if len(shards) == 1:
        return ModelSpec(name, first.file, (source,), first.size, first.sha256)
    return ModelSpec(name, first.file, (source,), model.size, None, shards=shards)


# --- the cache ---


def repo_folder(repo: str) -> Path:
    """Where the hub's cache keeps a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def snapshot(source: HubSource) -> Path:
    """Where the hub's cache shows a file; nothing need be there."""
    # The documented layout of the hub's cache. Its own try_to_load_from_cache does the same, after half a second
    # of imports that every start would pay.
    folder = repo_folder(source.repo)
    commit = source.revision
    with suppress(OSError):
        commit = (folder / "refs" / source.revision).read_text().strip()
    return folder / "snapshots" / commit / source.file


def cached_files(source: HubSource, file: Shard) -> Iterator[Path]:
    """The name of a file in the hub's cache, its content unless that has another name there, and what it began as."""
    name, folder = snapshot(source), repo_folder(source.repo)
    yield name
    others = (path for path in (folder / "snapshots").rglob("*") if path.is_symlink() and path != name)
    content = name.resolve()
    if content.parent == (folder / "blobs").resolve() and all(path.resolve() != content for path in others):
        yield content
    if file.sha256:
        yield _part(source, file.sha256)


def shard_source(source: HubSource, file: str) -> HubSource:
    """The source of another file in the same folder of the repository."""
    folder, slash, _ = source.file.rpartition("/")
    return HubSource(source.repo, f"{folder}{slash}{file}", source.revision)


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
    return 0 if _has_size(blob, size) else max(0, (size or 0) - download.file_size(_part(source, str(etag))))


def _has_size(path: Path, size: int | None) -> bool:
    # Other programs write here too, and a full disk or a crash leaves files that end early.
    return path.is_file() and size in (None, download.file_size(path))


def _part(source: HubSource, etag: str) -> Path:
    # hf_hub_download throws a broken download away since its 2.0; this part is continued by the next pull. The
    # entity tag in its name ties it to one content, the rest to the name that it had.
    return repo_folder(source.repo) / "blobs" / f"{etag}.{_part_ending(source)}"


def _part_ending(source: HubSource) -> str:
    name = f"{source.file}@{source.revision}"
    return f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.specdec.part"


def _fetch_one(file: Shard, source: HubSource, metadata: Any, progress: Progress) -> tuple[Path, str | None]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    blob, sha256 = repo_folder(source.repo) / "blobs" / metadata.etag, None
    if _has_size(blob, metadata.size):
        progress.advance(download.file_size(blob), kept=True)
    else:
        expected = file.sha256 or (metadata.etag if _SHA256.fullmatch(metadata.etag) else None)
        address = f"{endpoint()}/{source.repo}/resolve/{metadata.commit_hash}/{_quoted(source.file)}"
        size = metadata.size if file.size is None else file.size
        remote = Remote(address, size, metadata.etag, expected, headers=build_hf_headers())
        sha256 = download.fetch_remote(remote, _part(source, metadata.etag), blob, progress)
    # What began as a content that the name no longer stands for.
    for old in blob.parent.glob(f"*.{_part_ending(source)}"):
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
