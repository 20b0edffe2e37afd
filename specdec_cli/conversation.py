"""Messages to token ids by the chat template that the GGUF carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec_cli import template
from specdec_cli.errors import ModelLoadError, TemplateRefusedError
from specdec_cli.types import LanguageModel

Message = Mapping[str, str]


def encode_raw(model: LanguageModel, text: str) -> list[int]:
    """Token ids of a bare text, with BOS where the model wants one; special tokens are recognized by their text."""
    return model.tokenize(text, add_special=True, parse_special=True)


def encode_chat(model: LanguageModel, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to where the assistant's next message begins.

    Args:
        model: has tokenizer and template.
        messages: mappings with "role" (system, user, assistant) and "content".

    Raises:
        ModelLoadError: the model has no template, or the template fails.
    """
    text = render_chat(model, messages)
    # A template that writes BOS itself must not get a second one from the model.
    bos = _text(model, model.bos)
    add_special = not (bos and text.startswith(bos))
    return model.tokenize(text, add_special=add_special, parse_special=True)


def render_chat(model: LanguageModel, messages: Sequence[Message]) -> str:
    """The conversation as the template writes it.

    A template that refuses a system message gets it in front of the first user message.

    Raises:
        ModelLoadError: the model has no template, or the template fails.
    """
    if model.chat_template is None:
        raise ModelLoadError("the model has no chat template", "use `--raw` to complete the bare text")
    try:
        return _render(model, messages)
    except TemplateRefusedError:
        if len(messages) > 1 and messages[0]["role"] == "system":
            return render_chat(model, _fold_system(messages))
        raise


def _render(model: LanguageModel, messages: Sequence[Message]) -> str:
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "bos_token": _text(model, model.bos),
        "eos_token": _text(model, model.eos),
    }
    return template.render(model.chat_template or "", variables)


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]


def _text(model: LanguageModel, token: int | None) -> str:
    return "" if token is None else model.piece(token, special=True).decode("utf-8", "replace")
