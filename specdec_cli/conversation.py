"""Messages to token ids by the chat template that the GGUF carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec_cli import template
from specdec_cli.context import common_prefix
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
    return encode_rendered(model, render_chat(model, messages))


def encode_rendered(model: LanguageModel, text: str, held: Sequence[int] = ()) -> list[int]:
    """Token ids of a conversation that `render_chat` wrote.

    Args:
        model: has the tokenizer.
        text: the conversation.
        held: tokens of an earlier state of it with the answer as it was sampled, which a cache still holds: a model
            may cut its answer in other ways than the tokenizer. They are kept as far as `text` begins with what they
            stand for and the tokenizer has a boundary there.
    """
    tokens = _tokenize(model, text)
    if common_prefix(held, tokens) == min(len(held), len(tokens)):
        return tokens
    data = text.encode("utf-8", "replace")
    num_after = {end: index + 1 for index, end in enumerate(_ends(model, tokens, data))}
    ends = _ends(model, held, data)
    for num_kept in range(len(ends), 0, -1):
        if ends[num_kept - 1] in num_after:
            return [*held[:num_kept], *tokens[num_after[ends[num_kept - 1]] :]]
    return tokens


def _ends(model: LanguageModel, tokens: Sequence[int], data: bytes) -> list[int]:
    """Where in the text each token ends, up to the first one that stands for something else."""
    ends: list[int] = []
    place, after_special = 0, True
    for token in tokens:
        piece = model.piece(token, special=True)
        if after_special and piece.startswith(b" ") and not data.startswith(piece, place):
            # SentencePiece puts a space in front of a text, and behind special tokens.
            piece = piece[1:]
        if data.startswith(piece, place):
            place += len(piece)
        elif ends or token != model.bos:
            break
        ends.append(place)
        after_special = not model.piece(token)
    return ends


def _tokenize(model: LanguageModel, text: str) -> list[int]:
    # A template that writes BOS itself must not get a second one from the model.
    bos = _text(model, model.bos)
    add_special = not (bos and text.startswith(bos))
    return model.tokenize(text, add_special=add_special, parse_special=True)


def render_chat(model: LanguageModel, messages: Sequence[Message], *, to_answer: bool = True) -> str:
    """The conversation as the template writes it.

    A template that refuses a system message gets it in front of the first user message.

    Args:
        model: has the template.
        messages: the conversation.
        to_answer: end with the beginning of an answer.

    Raises:
        ModelLoadError: the model has no template, or the template fails.
    """
    if model.chat_template is None:
        raise ModelLoadError("the model has no chat template", "`specdec run --raw` completes bare text with it")
    try:
        return _render(model, messages, to_answer=to_answer)
    except TemplateRefusedError:
        if len(messages) > 1 and messages[0]["role"] == "system":
            return render_chat(model, _fold_system(messages), to_answer=to_answer)
        raise


def _render(model: LanguageModel, messages: Sequence[Message], *, to_answer: bool) -> str:
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": to_answer,
        "bos_token": _text(model, model.bos),
        "eos_token": _text(model, model.eos),
    }
    text = template.render(model.chat_template or "", variables)
    if not text.strip():
        hint = "use `--raw` to complete the bare text, or take another file of the model"
        raise ModelLoadError("the model's chat template makes an empty text of the conversation", hint)
    return text


def _fold_system(messages: Sequence[Message]) -> list[Message]:
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]


def _text(model: LanguageModel, token: int | None) -> str:
    return "" if token is None else model.piece(token, special=True).decode("utf-8", "replace")
