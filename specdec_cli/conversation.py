"""Messages to token ids by the chat template that the GGUF carries."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec_cli.errors import ModelLoadError

Message = Mapping[str, str]


class Tokenizer(Protocol):
    """What encoding needs of a model."""

    @property
    def chat_template(self) -> str | None:
        """Jinja source, if the model has one."""

    @property
    def bos(self) -> int | None:
        """Beginning-of-sequence token."""

    @property
    def eos(self) -> int | None:
        """End-of-sequence token."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token."""


def encode_raw(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a bare text, with BOS where the model wants one; special tokens are recognized by their text."""
    return tokenizer.tokenize(text, add_special=True, parse_special=True)


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's next message begins.

    Args:
        tokenizer: the model.
        messages: mappings with "role" (system, user, assistant) and "content".

    Raises:
        ModelLoadError: the model has no template, or the template fails.
    """
    text = render_chat(tokenizer, messages)
    # A template that writes BOS itself must not get a second one from the tokenizer.
    bos = _text(tokenizer, tokenizer.bos)
    add_special = not (bos and text.startswith(bos))
    return tokenizer.tokenize(text, add_special=add_special, parse_special=True)


def render_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """The conversation as the template writes it.

    A template that refuses a system message gets it in front of the first user message.

    Raises:
        ModelLoadError: the model has no template, or the template fails.
    """
    if tokenizer.chat_template is None:
        raise ModelLoadError("the model has no chat template", "use `--raw` to complete the bare text")
    try:
        return _render(tokenizer, messages)
    except TemplateError as error:
        if messages and messages[0]["role"] == "system" and len(messages) > 1:
            return render_chat(tokenizer, _fold_system(messages))
        raise ModelLoadError(
            f"the model's chat template fails: {error}", "use `--raw` and write the template out"
        ) from error


def _render(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """Templates are code from a download: they run in Jinja's sandbox only."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
    environment.filters["tojson"] = _to_json
    template = environment.from_string(tokenizer.chat_template or "")
    return template.render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=True,
        bos_token=_text(tokenizer, tokenizer.bos),
        eos_token=_text(tokenizer, tokenizer.eos),
    )


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]


def _text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token, special=True).decode("utf-8", "replace")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which templates of chat models do not want.
    return json.dumps(value, ensure_ascii=False, indent=indent)
