"""The user's own settings, `config.toml`: read with checks, written with their comments kept.

At the top stand defaults of options, by the names of the flags; below them, in tables, what was decided about pairs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import tomli

from specdec_cli import paths
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.files import locked, read_own_text, write_whole
from specdec_cli.limits import DrafterName
from specdec_cli.registry import load_registry
from specdec_cli.types import MAX_DRAFT_TOKENS, Drafting

_PAIRS = "pairs"
_PAIR_KEYS = ("drafter", "draft_tokens", "draft_confidence")
_NO_ALIASES: Mapping[str, str] = MappingProxyType({})
_HINT = "correct the file, or delete the line"


@dataclass(frozen=True, slots=True)
class PairSettings:
    """What the user decided about one pair; None where the file says nothing.

    Attributes:
        drafter: what proposes tokens.
        draft_tokens: the most draft tokens of a round, or "auto" for what pays.
        draft_confidence: with a number of tokens, a token drafted with less ends the draft.
    """

    drafter: DrafterName | None = None
    draft_tokens: int | Literal["auto"] | None = None
    draft_confidence: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """The default of an option.

    Attributes:
        value: as TOML has it.
        where: file and line.
    """

    value: Any
    where: str


def config_file() -> Path:
    """Where the file is, or would be."""
    return paths.config_dir() / "config.toml"


def load_settings(known: Collection[str], aliases: Mapping[str, str] = _NO_ALIASES) -> dict[str, Setting]:
    """Defaults that the user gave to options, by the names of the flags.

    Args:
        known: names of the options, with dashes between their words; underscores in the file mean the same.
        aliases: other name -> name.

    Raises:
        UsageError: the file cannot be read, or has a key that is unknown or there twice; it names file and line.
    """
    path = config_file()
    text = read_own_text(path)
    found: dict[str, Setting] = {}
    for key, value in _parsed(path, text).items():
        if key == _PAIRS:
            continue
        name, where = option_name(key, aliases), f"{path}:{_line_of(text, key)}"
        if name not in known:
            guess = _did_you_mean(name, [*known, _PAIRS])
            hint = f"correct the file, or remove the line with `specdec config set {key} --unset`"
            raise UsageError(f"{where}: unknown key `{key}`{guess}", hint)
        if name in found:
            raise UsageError(f"{where}: `{name}` is set twice", _HINT)
        found[name] = Setting(value, where)
    return found


def option_name(key: str, aliases: Mapping[str, str] = _NO_ALIASES) -> str:
    """The name of an option as its flag has it."""
    name = key.lstrip("-").replace("_", "-")
    return aliases.get(name, name)


def unknown_pairs() -> list[str]:
    """What is wrong with settings of pairs that are nowhere, each in a line with file and line number.

    Raises:
        UsageError: the config or the user's `models.toml` has a mistake.
    """
    path = config_file()
    text = read_own_text(path)
    pairs = _parsed(path, text).get(_PAIRS, {})
    if not pairs:
        return []
    known = load_registry().pairs
    return [
        f"{path}:{_line_of(text, _PAIRS, name)}: no pair is called `{name}`{_did_you_mean(name, known)}"
        for name in pairs if name not in known
    ]  # fmt: skip


def pair_setting_lines(pair: str) -> dict[str, str]:
    """Key of `PairSettings` -> file and line, for those that the file has.

    Raises:
        UsageError: what `load_pair_settings` raises.
    """
    path = config_file()
    text = read_own_text(path)
    table = _parsed(path, text).get(_PAIRS, {}).get(pair, {})
    return {key: f"{path}:{_line_of(text, _PAIRS, pair, key)}" for key in table}


def save_setting(name: str, value: Any, aliases: Mapping[str, str] = _NO_ALIASES) -> Path:
    """Make a value the default of an option, and leave everything else in the file as it is.

    Args:
        name: of the option.
        value: what TOML can hold; None removes it.
        aliases: other name -> name, for keys that the file may have.

    Returns:
        The file.

    Raises:
        UsageError: the present file is not valid TOML, or there is nothing to remove.
        SpecdecError: it cannot be written.
    """
    path = config_file().resolve()
    with locked(path):
        new = _with_setting(path, read_own_text(path), name, value, aliases)
        # What would not be read again must not replace what is.
        _parsed(path, new)
        _replace(path, new)
    return path


def _with_setting(path: Path, text: str, name: str, value: Any, aliases: Mapping[str, str]) -> str:
    import tomlkit

    _parsed(path, text)
    document = tomlkit.parse(text)
    keys = [key for key in document if key != _PAIRS and option_name(key, aliases) == option_name(name, aliases)]
    if value is None:
        if not keys:
            raise UsageError(f"`{name}` is not set in {path}", "see `specdec config show`")
        for key in keys:
            document.remove(key)
    elif keys:
        document[keys[0]] = value
    else:
        return _with_line(text, tomlkit.dumps({option_name(name): value}))
    return tomlkit.dumps(document)


def _with_line(text: str, line: str) -> str:
    """The file with a new key behind the other ones: a comment in front of the first table stays in front of it."""
    keys = [key for key, value in tomli.loads(text).items() if not isinstance(value, dict)]
    behind = max((_line_of(text, key) for key in keys), default=0)
    lines = text.splitlines(keepends=True)
    if behind and not lines[behind - 1].endswith("\n"):
        lines[behind - 1] += "\n"
    gap = "\n" if lines and not behind else ""
    return "".join([*lines[:behind], line, gap, *lines[behind:]])


def _line_of(text: str, *keys: str) -> int:
    """The line where a value ends, from 1: there the text up to it begins to have the key."""
    lines = text.splitlines()
    for number in range(1, len(lines) + 1):
        try:
            value: Any = tomli.loads("\n".join(lines[:number]))
            for key in keys:
                value = value[key]
        except (tomli.TOMLDecodeError, KeyError, TypeError):
            continue
        return number
    return len(lines)


def load_pair_settings(pair: str | None) -> PairSettings:
    """The settings of one pair; empty ones without a file, a name or an entry.

    Raises:
        UsageError: the file cannot be read, or has an unknown key or a value that cannot be; it names file and key.
    """
    path = config_file()
    if pair is None:
        return PairSettings()
    data = _parsed(path, read_own_text(path))
    table = data.get("pairs", {}).get(pair, {})
    return _pair_settings(table)


def save_pair_settings(pair: str, drafting: Drafting) -> Path:
    """Write the settings of one pair into the file, and leave everything else in it as it is.

    Args:
        pair: its name.
        drafting: what to use from now on; plain decoding becomes `drafter = "none"`.

    Returns:
        The file.

    Raises:
        UsageError: the present file is not what `load_pair_settings` takes.
        SpecdecError: it cannot be written.
    """
    # A link into a folder of dotfiles stays one.
    path = config_file().resolve()
    with locked(path):
        new = _with_pair_settings(path, read_own_text(path), pair, drafting)
        # What would not be read again must not replace what is.
        _parsed(path, new)
        _replace(path, new)
    return path


def _with_pair_settings(path: Path, text: str, pair: str, drafting: Drafting) -> str:
    import tomlkit
    from tomlkit.items import Table

    _parsed(path, text)
    document = tomlkit.parse(text)
    pairs = document.setdefault("pairs", tomlkit.table(is_super_table=True))
    table = pairs.setdefault(pair, tomlkit.table())
    assert isinstance(table, (Table, tomlkit.items.InlineTable))
    for key, value in _entries(drafting).items():
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    return tomlkit.dumps(document)


def _replace(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        message = f"cannot write `{path}`: {error.strerror or error}"
        raise SpecdecError(message, "check the rights of its folder, or set SPECDEC_HOME") from None


def _entries(drafting: Drafting) -> dict[str, Any]:
    """Key -> value, None for one that has no meaning."""
    if drafting.is_off:
        return {"drafter": "none", "draft_tokens": None, "draft_confidence": None}
    num = drafting.num_draft_tokens
    confidence = None if num is None else drafting.min_confidence
    return {"drafter": drafting.drafter, "draft_tokens": "auto" if num is None else num, "draft_confidence": confidence}


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        data: dict[str, Any] = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}", _HINT) from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply", _HINT) from None
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    for key in tables:
        _check_key(key, (_PAIRS,), lambda key=key: f"{path}:{_line_of(text, key)}")  # type: ignore[misc]
    pairs = data.get(_PAIRS, {})
    if not isinstance(pairs, dict):
        _refuse(f"{path}:{_line_of(text, _PAIRS)}: `pairs`", 'tables like [pairs."NAME"]', pairs)
    for name, table in pairs.items():
        if not isinstance(table, dict):
            _refuse(f'{path}:{_line_of(text, _PAIRS, name)}: [pairs."{name}"]', "a table", table)
        for key, value in table.items():
            # The line is looked for where there is a mistake only: that takes time.
            def where(name: str = name, key: str = key) -> str:
                return f'{path}:{_line_of(text, _PAIRS, name, key)}: [pairs."{name}"]'

            _check_key(key, _PAIR_KEYS, where)
            _check_pair_value(key, value, where)
    return data


def _pair_settings(table: Mapping[str, Any]) -> PairSettings:
    """Of a table that was checked."""
    drafter, num, confidence = (table.get(key) for key in _PAIR_KEYS)
    return PairSettings(drafter, num, None if confidence is None else float(confidence))


def _check_pair_value(key: str, value: Any, where: Callable[[], str]) -> None:
    names, is_number = get_args(DrafterName), isinstance(value, (int, float)) and not isinstance(value, bool)
    if key == "drafter" and value not in names:
        guess = _did_you_mean(value, names) if isinstance(value, str) else ""
        raise UsageError(f"{where()}: `drafter` must be one of {', '.join(names)}, not `{value}`{guess}", _HINT)
    whole = is_number and isinstance(value, int) and 0 <= value <= MAX_DRAFT_TOKENS
    if key == "draft_tokens" and value != "auto" and not whole:
        _refuse(f"{where()}: `draft_tokens`", f'from 0 to {MAX_DRAFT_TOKENS}, or "auto"', value)
    if key == "draft_confidence" and not (is_number and 0 <= value <= 1):
        _refuse(f"{where()}: `draft_confidence`", "from 0 to 1", value)


def _refuse(what: str, allowed: str, value: object) -> None:
    raise UsageError(f"{what} must be {allowed}, not `{value}`", _HINT)


def _check_key(key: str, known: Iterable[str], where: Callable[[], str]) -> None:
    if key not in known:
        raise UsageError(f"{where()}: unknown key `{key}`{_did_you_mean(key, known)}", _HINT)


def _did_you_mean(wanted: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else ""
