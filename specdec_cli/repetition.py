"""What came before counts: repetition penalties and DRY, as llama.cpp defines them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from specdec_cli.types import LanguageModel, Logits, SamplingParams

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""First token of a sequence breaker -> what may follow it to complete the breaker."""

HUGE = 1e30
"""Decides against any logit, and is still a float32."""

_MAX_BREAKER_BYTES = 40
_MAX_BREAKER_TAIL = 20
_LOG_FLOAT_MAX = 88.7228391


def penalize(row: Logits, history: Sequence[int], params: SamplingParams) -> None:
    """Apply repeat, frequency and presence penalties in place.

    Args:
        row: logits, shape (num_vocab,).
        history: the last tokens that count.
        params: the penalties.

    Source: Keskar et al. 2019 (CTRL), section 4.1, with negative logits multiplied instead of divided.
    """
    seen, counts = np.unique(np.asarray(history), return_counts=True)
    inside = seen < row.size
    seen, counts = seen[inside], counts[inside]
    values = row[seen].astype(np.float64)
    values = np.where(values <= 0, values * params.repeat_penalty, values / params.repeat_penalty)
    values -= counts * params.frequency_penalty + params.presence_penalty
    # What is impossible stays so; anything else stays a number in the row's own precision.
    row[seen] = np.where(values > -np.inf, np.clip(values, -HUGE, HUGE), values)


def dry_penalties(history: Sequence[int], params: SamplingParams, breakers: Breakers) -> dict[int, float]:
    """What DRY subtracts from the logits of tokens that would continue a repetition.

    Args:
        history: the last tokens that count.
        params: multiplier, base and allowed length.
        breakers: repetitions do not reach across these.

    Returns:
        Token id -> penalty.
    """
    backwards = list(reversed(history))
    limit = _reach(backwards, breakers)
    if len(backwards) <= params.dry_allowed_length or limit < params.dry_allowed_length:
        return {}
    longest: dict[int, int] = {}
    for offset, length in enumerate(_prefix_matches(backwards)):
        length = min(length, limit)
        if offset and length >= params.dry_allowed_length:
            following = backwards[offset - 1]
            longest[following] = max(longest.get(following, 0), length)
    exponent_limit = int(_LOG_FLOAT_MAX / math.log(params.dry_base)) if params.dry_base > 1.000001 else 0
    return {
        token: _penalty(params, _exponent(length - params.dry_allowed_length, exponent_limit))
        for token, length in longest.items()
        if () not in breakers.get(token, ())
    }


def _penalty(params: SamplingParams, exponent: int) -> float:
    return min(params.dry_multiplier * params.dry_base**exponent, HUGE)


def _exponent(excess: int, limit: int) -> int:
    return min(excess, limit) if limit > 0 else excess


def _reach(backwards: Sequence[int], breakers: Breakers) -> int:
    """How many of the last tokens come after the last complete breaker."""
    for index, token in enumerate(backwards):
        tails = [tail for tail in breakers.get(token, ()) if _follows(backwards, index, tail)]
        if tails:
            return index - max(map(len, tails))
    return len(backwards)


def _follows(backwards: Sequence[int], index: int, tail: tuple[int, ...]) -> bool:
    """Whether `tail` stands right after the token at `index`, which counts from the end."""
    return len(tail) <= index and all(backwards[index - 1 - i] == token for i, token in enumerate(tail))


def _prefix_matches(text: Sequence[int]) -> list[int]:
    """For each offset the length of the longest common prefix of `text` and `text[offset:]` (the Z-function)."""
    size = len(text)
    matches = [size] + [0] * (size - 1)
    left = right = 0
    for offset in range(1, size):
        length = min(right - offset, matches[offset - left]) if offset < right else 0
        while offset + length < size and text[length] == text[offset + length]:
            length += 1
        matches[offset] = length
        if offset + length > right:
            left, right = offset, offset + length
    return matches


def find_breakers(texts: Sequence[str], model: LanguageModel) -> dict[int, list[tuple[int, ...]]]:
    """Tokens with which a breaker text can begin, and the tokens that complete it.

    Args:
        texts: the breakers.
        model: its whole vocabulary is searched.
    """
    found: dict[int, list[tuple[int, ...]]] = {}
    pieces = [model.piece(token, special=True) for token in range(model.num_vocab)]
    for text in texts:
        breaker = text.encode()[:_MAX_BREAKER_BYTES]
        for token, piece in enumerate(pieces):
            for rest in _rests(breaker, piece):
                tail = model.tokenize(rest.decode("utf-8", "replace"), add_special=False, parse_special=False)
                entry = tuple(tail[:_MAX_BREAKER_TAIL])
                if entry not in found.setdefault(token, []):
                    found[token].append(entry)
    return found


def _rests(breaker: bytes, piece: bytes) -> list[bytes]:
    """What is missing of the breaker behind each of its beginnings in `piece`; b"" when it is complete."""
    if breaker in piece:
        return [b""]
    starts = [index for index in range(len(piece)) if breaker.startswith(piece[index:])]
    return [breaker[len(piece) - index :] for index in starts]
