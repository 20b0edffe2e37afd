"""A conversation as a file: what `/save`, `/load` and `--continue` write and read; docs/json.md describes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from specdec_cli import paths
from specdec_cli.chat import AnswerReason, Turn
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.files import write_whole

FORMAT, SCHEMA = "specdec chat", 1
MAX_BYTES = 1 << 26
"""More than any conversation; reading an endless stream must end."""

Value = str | int | float | bool | list[str] | None
_REASONS = frozenset(reason for kind in get_args(AnswerReason) for reason in (get_args(kind) or (kind,)))


@dataclass(frozen=True, slots=True)
class Transcript:
    """What is in such a file.

    Attributes:
        turns: the conversation.
        system: the system message.
        num_dropped: turns at its beginning that are no longer sent.
        settings: name -> value, what the user chose.
        pair: name of the pair; None when the target was named by path.
        target: path of the target, if it was named.
        draft: path of the draft model, if it was named.
    """

    turns: tuple[Turn, ...] = ()
    system: str | None = None
    num_dropped: int = 0
    settings: Mapping[str, Value] = field(default_factory=dict)
    pair: str | None = None
    target: str | None = None
    draft: str | None = None


def last_path() -> Path:
    """Where the last conversation is kept."""
    return paths.state_dir() / "chat" / "last.json"


def write_transcript(path: Path, transcript: Transcript) -> None:
    """Write a file as a whole; one that is not a conversation is left as it is.

    Raises:
        SpecdecError: there is another file, or nothing can be written.
    """
    try:
        _check_place(path)
        if path.exists() and path.stat().st_size and not _is_ours(path):
            raise UsageError(f"`{path}` is there and is not a conversation", "choose another name, or delete it first")
        write_whole(path, _document(transcript))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecdecError(f"cannot write `{path}`: {reason}", "choose another place") from None


def _check_place(path: Path) -> None:
    """Refuse what is neither a regular file nor a new name in a folder that is there."""
    if path.is_dir():
        raise UsageError(f"cannot write `{path}`: it is a directory", "name a file in it")
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write `{path}`: it is not a regular file", "choose another name")
    # For a link what counts is where it leads to.
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise UsageError(f"cannot write `{path}`: there is no folder `{folder}`", "make it, or choose another place")


def keep_last(transcript: Transcript) -> bool:
    """Write the conversation that `--continue` takes up; False where it cannot be written."""
    try:
        write_whole(last_path(), _document(transcript))
    except OSError:
        return False
    return True


def read_transcript(path: Path) -> Transcript:
    """Read and check a file.

    Raises:
        UsageError: it cannot be read, or is not such a file; the message names what is wrong.
    """
    data = _read(path)
    if data.get("format") != FORMAT:
        raise _bad(path, "it is not a conversation that specdec wrote")
    if data.get("schema") != SCHEMA:
        raise _bad(path, f"its schema is {data.get('schema')!r}, this version reads {SCHEMA}")
    check = _Checker(path)
    turns = check.turns(data.get("messages"))
    num_dropped = data.get("num_dropped", 0)
    if type(num_dropped) is not int or not 0 <= num_dropped <= len(turns):
        raise _bad(path, f"`num_dropped` is {num_dropped!r}")
    text = {name: check.text_or_none(data, name) for name in ("system", "pair", "target", "draft")}
    return Transcript(turns, text["system"], num_dropped, check.settings(data.get("settings", {})),
                      text["pair"], text["target"], text["draft"])  # fmt: skip


def _document(transcript: Transcript) -> str:
    messages: list[dict[str, str]] = []
    for turn in transcript.turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.answer, "reason": turn.reason})
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "pair": transcript.pair,
        "target": transcript.target,
        "draft": transcript.draft,
        "system": transcript.system,
        "settings": dict(transcript.settings),
        "num_dropped": transcript.num_dropped,
        "messages": messages,
    }
    # ASCII, because a message can hold what UTF-8 cannot: half a surrogate pair.
    return json.dumps(document, indent=1) + "\n"


def _is_ours(path: Path) -> bool:
    try:
        return _read(path).get("format") == FORMAT
    except UsageError:
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise _bad(path, f"it has more than {MAX_BYTES >> 20} MiB")
        data = json.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}", "check the path") from None
    except (ValueError, RecursionError):
        raise _bad(path, "it is not JSON, or only a part of it") from None
    if not isinstance(data, dict):
        raise _bad(path, "it is not a conversation that specdec wrote")
    return data


def _bad(path: Path, reason: str) -> UsageError:
    hint = "`/save FILE` writes what can be loaded"
    if path == last_path():
        hint = "start without `--continue`; the next answer writes the file anew"
    return UsageError(f"cannot load `{path}`: {reason}", hint)


@dataclass(frozen=True, slots=True)
class _Checker:
    """Parts of a file, each with the kind of value it must have."""

    path: Path

    def turns(self, messages: object) -> tuple[Turn, ...]:
        """User and assistant in turns."""
        if not isinstance(messages, list) or len(messages) % 2:
            raise _bad(self.path, "`messages` is not a list of messages, each with its answer")
        return tuple(self._turn(messages, place) for place in range(0, len(messages), 2))

    def _turn(self, messages: Sequence[object], place: int) -> Turn:
        user, answer = (
            self._message(messages[place + offset], place + offset, role)
            for offset, role in enumerate(("user", "assistant"))
        )
        reason = answer.get("reason", "eog")
        if not isinstance(reason, str) or reason not in _REASONS:
            raise _bad(self.path, f"message {place + 2} ended for the reason {reason!r}")
        return Turn(user["content"], answer["content"], reason)  # type: ignore[arg-type]

    def _message(self, message: object, place: int, role: str) -> Mapping[str, Any]:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise _bad(self.path, f"message {place + 1} has no text")
        if message.get("role") != role:
            raise _bad(self.path, f"message {place + 1} is by {message.get('role')!r}, not the {role}")
        return message

    def text_or_none(self, data: Mapping[str, Any], name: str) -> str | None:
        """A text, or nothing."""
        value = data.get(name)
        if value is None or isinstance(value, str):
            return value
        raise _bad(self.path, f"`{name}` is {value!r}, not a text")

    def settings(self, settings: object) -> dict[str, Value]:
        """Names and plain values; what they mean is checked by whoever knows the names."""
        if not isinstance(settings, dict):
            raise _bad(self.path, "`settings` is not an object")
        for name, value in settings.items():
            plain = isinstance(value, str | int | float | bool | None)
            if not plain and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
                raise _bad(self.path, f"the setting `{name}` is {value!r}")
        return settings
