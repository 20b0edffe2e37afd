"""The user's own `models.toml`: pairs added and removed, with comments and everything else in the file kept."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec_cli.errors import ModelMissingError, SpecdecError, UsageError
from specdec_cli.files import expanded, locked, read_own_text, write_whole
from specdec_cli.registry import (
    Layer,
    ModelSpec,
    Registry,
    load_registry,
    looks_like_a_name,
    own_file,
    read_layer,
    with_shipped,
)
from specdec_cli.sources import SilentProgress, resolve, spec_of

_NAME = re.compile(r"\w[\w.+-]{0,79}")
_KINDS = ("hf:", "url:", "pypi:")


@dataclass(frozen=True, slots=True)
class Added:
    """What was written.

    Attributes:
        path: the file.
        models: names of the models that the pair uses, target first.
        replaced: whether a shipped pair has this name.
    """

    path: Path
    models: tuple[str, str]
    replaced: bool


def add_pair(name: str, target: str, draft: str, note: str = "") -> Added:
    """Write a pair into the user's own file.

    Args:
        name: of the pair.
        target: `hf:`, `url:` or `pypi:` source, a path, or the name of a model that is known.
        draft: the same for the draft model.
        note: what it is for.

    Raises:
        UsageError: a name that cannot be used or is taken, no source, or a file that has mistakes already.
        ModelMissingError: a path where nothing is.
        SpecdecError: the file cannot be written.
    """
    if not _NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        raise UsageError(f"`{name}` cannot be the name of a pair", "use letters, digits and . + - _, as in `my-pair`")
    _require_free(name, own_layer())
    # The hub may be asked: nobody else has to wait for that.
    registry = load_registry()
    entries = [_model_entry(f"{name}-{part}", text, registry) for part, text in (("target", target), ("draft", draft))]
    models = {key: table for key, table in entries if table}
    first, second = (key for key, _ in entries)
    pair = {"target": first, "draft": second} | ({"note": note} if note else {})
    with locked(own_file()):
        registry, layer = load_registry(), own_layer()
        _require_free(name, layer)
        for key in models:
            if key in registry.models:
                raise UsageError(f"there is a model `{key}` already", "choose another name for the pair")
        text = _inserted(read_own_text(own_file()), {"models": models, "pairs": {name: pair}})
        _save(text, models=[*layer.models, *models], pairs=[*layer.pairs, name])
    return Added(own_file(), (first, second), name in registry.pairs)


def _require_free(name: str, layer: Layer) -> None:
    if name in layer.pairs:
        raise UsageError(f"there is a pair `{name}` in {own_file()} already", f"`specdec models remove {name}` first")


def remove_pair(name: str) -> bool:
    """Take a pair out of the user's own file, and its models where no other pair needs them.

    Returns:
        Whether it was there.

    Raises:
        UsageError: the file has mistakes, or something in it needs the pair.
        SpecdecError: the file cannot be written.
    """
    with locked(own_file()):
        return _remove_pair(name)


def _remove_pair(name: str) -> bool:
    layer = own_layer()
    if name not in layer.pairs:
        return False
    gone = layer.pairs[name]
    registry = load_registry()
    needed = {part.name for pair in registry.pairs.values() if pair.name != name for part in (pair.target, pair.draft)}
    models = [key for key in dict.fromkeys((gone.target, gone.draft)) if key in layer.models and key not in needed]
    text = _deleted(read_own_text(own_file()), "pairs", name)
    for key in models:
        text = _deleted(text, "models", key)
    _save(text, models=set(layer.models) - set(models), pairs=set(layer.pairs) - {name})
    return True


def own_layer() -> Layer:
    """What the user's own file says.

    Raises:
        UsageError: it cannot be read, or has mistakes.
    """
    return read_layer(read_own_text(own_file()), str(own_file()))


# --- entries ---


def _model_entry(name: str, text: str, registry: Registry) -> tuple[str, dict[str, Any]]:
    """Name and table of the model that a source means; an empty table for one that is known."""
    if text.startswith(_KINDS):
        # What the hub has may change: the file that is chosen now is the one that is meant.
        spec = resolve(spec_of(_with_slash(text)), offline=False, progress=SilentProgress())
        return name, {"sources": list(spec.sources), **_files(spec)}
    if text in registry.models:
        return text, {}
    path = expanded(text.removeprefix("path:")).absolute()
    if not path.is_file():
        if looks_like_a_name(text):
            registry.model(text)
        hint = "write a path, `hf:OWNER/REPO/FILE`, or the name of a model that is known (`specdec models show PAIR`)"
        raise ModelMissingError(f"there is no file `{text}`", hint)
    spec = spec_of(f"path:{path}")
    return name, {"sources": list(spec.sources), **_files(spec)}


def _files(spec: ModelSpec) -> dict[str, Any]:
    """The file, or all shards of a split model, as far as they are known."""
    tables = [{key: value for key, value in asdict(file).items() if value is not None} for file in spec.files]
    return {"shards": tables} if spec.shards else tables[0]


def _with_slash(text: str) -> str:
    """`hf:OWNER/REPO:FILE.gguf` is `hf:OWNER/REPO/FILE.gguf`."""
    return re.sub(r"^(hf:[^/:]+/[^/:]+):(?=[^@]*\.gguf)", r"\1/", text)


# --- the file ---


def _inserted(text: str, rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The file with further tables: group -> name -> key -> value."""
    import tomlkit
    from tomlkit.items import InlineTable, Table

    document = tomlkit.parse(text)
    for group, entries in rows.items():
        for name, values in entries.items():
            parent: Any = document.setdefault(group, tomlkit.table(is_super_table=True))
            is_inline = isinstance(parent, InlineTable)
            table: Table | InlineTable = tomlkit.inline_table() if is_inline else tomlkit.table()
            for key, value in values.items():
                table[key] = value
            if isinstance(table, Table):
                # What follows in the file would stick to it.
                table.add(tomlkit.nl())
            parent[name] = table
    return tomlkit.dumps(document)


def _deleted(text: str, group: str, name: str) -> str:
    """The file without one table; comments behind it stay, because they belong to what follows."""
    import tomlkit

    document = tomlkit.parse(text)
    parent: Any = document[group]
    comments = _tail(parent[name])
    del parent[name]
    if not parent:
        del document[group]
    rest = tomlkit.dumps(document)
    same = next((place for place, (old, new) in enumerate(zip(text, rest, strict=False)) if old != new), len(rest))
    place = rest.rfind("\n", 0, same) + 1
    return rest[:place] + (f"{comments}\n\n" if comments else "") + rest[place:]


def _tail(item: Any) -> str:
    """Comments behind the last value of a table."""
    from tomlkit.items import AoT, Table

    if isinstance(item, AoT):
        return _tail(item.body[-1]) if item.body else ""
    if not isinstance(item, Table):
        return ""
    lines: list[str] = []
    for key, value in reversed(item.value.body):
        if key is not None:
            lines.append(_tail(value))
            break
        lines.append(value.as_string())
    return "".join(reversed(lines)).strip()


def _save(text: str, *, models: Iterable[str], pairs: Iterable[str]) -> None:
    """Write the file if it says what it should, and nothing is missing that it names."""
    # tomlkit loses entries of some spellings, such as dotted keys.
    layer = None
    with contextlib.suppress(UsageError):
        layer = read_layer(text, str(own_file()))
    if layer is None or (set(layer.models), set(layer.pairs)) != (set(models), set(pairs)):
        raise SpecdecError(f"cannot change `{own_file()}` without losing something", "change it by hand")
    with_shipped(layer)
    _write(text)


def _write(text: str) -> None:
    # A link into a folder of dotfiles stays one.
    path = own_file().resolve()
    try:
        write_whole(path, text.rstrip("\n") + "\n" if text.strip() else "")
    except OSError as error:
        hint = "check the rights of its folder, or set SPECDEC_HOME"
        raise SpecdecError(f"cannot write `{path}`: {error.strerror}", hint) from None
