"""Sampling settings that depend on a model file: biases on tokens named by text, defaults stored in the file."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol

from specdec_cli.errors import UsageError
from specdec_cli.types import LanguageModel, SamplingParams

_KEYS: dict[str, str] = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "penalty_repeat",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
"""Field of `SamplingParams` -> key below `general.sampling.` in a GGUF file."""


class HasMetadata(Protocol):
    """A model whose file's metadata can be read."""

    def metadata(self, key: str) -> str | None:
        """The value of a key as text; None when the file has no such key."""


def split_bias(text: str) -> tuple[str, float]:
    """`TOKEN=BIAS` in its two parts; the token may contain equals signs.

    Raises:
        UsageError: another form.
    """
    token, _, number = text.rpartition("=")
    try:
        if token:
            return token, float(number)
    except ValueError:
        pass
    raise UsageError(f"--logit-bias takes TOKEN=BIAS, not `{text}`", "e.g. `--logit-bias 15043=-2.5`")


def resolve_biases(texts: Sequence[str], model: LanguageModel) -> tuple[tuple[int, float], ...]:
    """Token ids and biases; a token is named by its id or by its exact text.

    Raises:
        UsageError: an unknown token.
    """
    return tuple((_token_id(token, model), bias) for token, bias in map(split_bias, texts))


def _token_id(token: str, model: LanguageModel) -> int:
    if token.isascii() and token.isdigit():
        if int(token) < model.num_vocab:
            return int(token)
        raise UsageError(
            f"--logit-bias: there is no token {token}; the model has {model.num_vocab}", "token ids begin with 0"
        )
    ids = model.tokenize(token, add_special=False, parse_special=True)
    if len(ids) != 1:
        parts = ", ".join(f"{model.piece(i, special=True).decode('utf-8', 'replace')!r} = {i}" for i in ids)
        raise UsageError(f"--logit-bias: {token!r} is no single token but {parts or 'nothing'}", "name one of these")
    return ids[0]


def with_model_defaults(
    params: SamplingParams, model: HasMetadata, given: Collection[str]
) -> tuple[SamplingParams, dict[str, float]]:
    """The settings with the file's own where the user gave none.

    Args:
        params: the user's settings.
        model: read for its `general.sampling.*` entries.
        given: fields of `params` that the user chose.

    Returns:
        The settings, and which fields the file changed to what.

    Raises:
        UsageError: the file holds a value outside its range.
    """
    found: dict[str, float] = {}
    for field, key in _KEYS.items():
        text = model.metadata(f"general.sampling.{key}")
        if field not in given and text is not None:
            found[field] = _number(text, type(getattr(params, field)), f"general.sampling.{key}")
    return dataclasses.replace(params, **found), found  # type: ignore[arg-type]


def _number(text: str, kind: type[float], key: str) -> float:
    try:
        return kind(float(text))
    except (ValueError, OverflowError):
        hint = "leave out `--sampler-defaults model`"
        raise UsageError(f"the model's `{key}` is no usable number: `{text}`", hint) from None
