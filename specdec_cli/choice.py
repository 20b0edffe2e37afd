"""Which two files: named by path or source, by a pair, or by both."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdec_cli.errors import ModelMissingError, UsageError
from specdec_cli.files import expanded
from specdec_cli.registry import ModelSpec, Pair, Registry, load_registry, looks_like_a_name
from specdec_cli.sources import Progress, fetch, spec_of
from specdec_cli.split import check_path, repository_in
from specdec_cli.stored import locate
from specdec_cli.wording import describe

_SOURCE = re.compile(r"(?:hf|url|pypi):|https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What a user named.

    Attributes:
        pair: the pair's name; None when the target was named itself.
        target: path of the target, or the model to have.
        draft: the same for the draft model; None for plain decoding.
        num_draft_tokens: the pair's own setting; None is by measured costs.
    """

    pair: str | None
    target: Path | ModelSpec
    draft: Path | ModelSpec | None
    num_draft_tokens: int | None = None

    @property
    def name(self) -> str:
        """What to call it on the screen."""
        return self.pair or self.target.name


def named_model(text: str | Path) -> Path | ModelSpec:
    """The model that a user names: `hf:OWNER/REPO[:QUANT]`, `url:https://...`, `pypi:...`, a known name, or a path.

    A path may have the `path:` in front that the registry's files have.

    Raises:
        ModelMissingError: neither a file nor a known name.
        UsageError: a source that is malformed.
    """
    if isinstance(text, Path):
        return text
    if text.lower().startswith("path:"):
        return expanded(text[len("path:") :])
    if not is_source(text):
        is_name = looks_like_a_name(text) and not Path(text).exists()
        return load_registry().model(text) if is_name else Path(text)
    if text.lower().startswith("http"):
        text = f"url:{text}"
    kind, _, rest = text.partition(":")
    return spec_of(f"{kind.lower()}:{rest}")


def is_source(text: str) -> bool:
    """Whether a text names a model by where it can be had, and not by a path."""
    return bool(_SOURCE.match(text))


def is_known(text: str) -> bool:
    """Whether a text is the name of a model in the registry, and no file."""
    return looks_like_a_name(text) and not Path(text).exists() and text in load_registry().models


def choose_models(
    pair: str | None, target: str | Path | None, draft: str | Path | None, *, no_draft: bool = False
) -> ModelChoice:
    """Models named themselves, the others from the pair; a target alone means no draft model.

    Raises:
        ModelMissingError: an unknown pair.
        UsageError: two targets, or a malformed source.
    """
    is_model = pair is not None and (pair.lower().endswith(".gguf") or is_source(pair))
    if target is not None and is_model:
        raise UsageError(
            f"two targets are named: `{describe(str(pair))}` and `{describe(str(target))}`", "leave out `--pair`"
        )
    # `-m` is the model file in llama.cpp's tools.
    if is_model:
        target, pair = pair, None
    chosen_draft = None if draft is None or no_draft else named_model(draft)
    if target is not None and pair is None:
        return ModelChoice(None, named_model(target), chosen_draft)
    registry = load_registry()
    if pair is not None and pair not in registry.pairs and (repo := repository_in(pair)):
        raise ModelMissingError(f"no pair is called `{pair}`", f"for a repository on the hub write `hf:{repo}`")
    found = registry.pair(pair)
    chosen = found.target if target is None else named_model(target)
    return ModelChoice(found.name, chosen, None if no_draft else chosen_draft or found.draft, found.draft_tokens)


def fetch_files(choice: ModelChoice, *, offline: bool, progress: Progress) -> tuple[Path, Path | None]:
    """Paths of target and draft model, after downloading what is missing; of a split model the first part's.

    Args:
        choice: what to have.
        offline: forbid downloads.
        progress: told about every download.

    Raises:
        ModelMissingError: a file is not here while downloads are forbidden, or is nowhere.
        ModelLoadError: a path of a later part of a split model, or of a piece to be joined.
        DownloadError: no source delivered a file.
        UsageError: several models of a repository fit.
    """

    def path_of(model: Path | ModelSpec) -> Path:
        if isinstance(model, Path):
            check_path(model)
            return model
        return fetch(model, offline=offline, progress=progress, pair=choice.pair or "")

    # Paths first: nothing is downloaded when one of them is wrong.
    for model in (choice.target, choice.draft):
        if isinstance(model, Path):
            path_of(model)
    return path_of(choice.target), None if choice.draft is None else path_of(choice.draft)


def file_of(registry: Registry, text: str, part: Literal["target", "draft"]) -> Path:
    """The file that a path, a source, a model's or a pair's name means; nothing is downloaded.

    Args:
        registry: what is known by name.
        text: what the user wrote.
        part: which one of a pair.

    Raises:
        ModelMissingError: nothing is known by that name, or it is not on this machine.
        UsageError: a source that is malformed.
    """
    if is_source(text):
        return _cached(named_model(text))
    if text not in registry.pairs and (text.lower().endswith(".gguf") or os.sep in text):
        return Path(text)
    found = registry.find(text)
    if isinstance(found, ModelSpec):
        return present_file(registry, found)
    return present_file(registry, found.target if part == "target" else found.draft, found)


def _cached(model: Path | ModelSpec) -> Path:
    if isinstance(model, Path):
        return model
    path = locate(model)
    if path is None:
        source = describe(model.sources[0])
        raise ModelMissingError(f"`{source}` is not on this machine", f"`specdec pull --target {source}` first")
    return path


def present_file(registry: Registry, spec: ModelSpec, pair: Pair | None = None) -> Path:
    """Where a model is.

    Raises:
        ModelMissingError: it is not on this machine; the hint names the pair, or one that it belongs to.
    """
    path = locate(spec)
    if path is None:
        pairs = [pair] if pair is not None else registry.pairs_with(spec.name)
        hint = f"run `specdec pull {pairs[0].name}`" if pairs else "name it in a pair: `specdec models add`"
        raise ModelMissingError(f"`{spec.name}` is not on this machine", hint)
    return path
