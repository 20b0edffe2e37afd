"""Between two tokenizers: texts as bytes, one model's tokens in another's, and how well two vocabularies go together.

A token is translated by its bytes, never by its name: what looks like a special token in a text stays text.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specdec_cli.context import common_prefix
from specdec_cli.distribution import Ids
from specdec_cli.types import LanguageModel

_GUARDS = ("\n", "a", ".")
"""Written in front where a tokenizer would add a space to the beginning of a text."""

_EARLY = 4096
"""Vocabularies have their bytes, and the first merges of them, among the first ids."""

_LOOK_BACK = 32
"""Draft tokens among which a place is looked for from where the text is read anew."""

_FEWEST = 4
"""Where no place is safe, so many draft tokens are read anew at least."""

SAMPLE = '''\
The harbor was quiet when the first boats came back, and nobody had expected them before noon. "How many are missing?"
she asked. He counted again: 12 of 47 had left on Tuesday, at 5:30 in the morning, and only 9 were in sight.

```python
def moving_average(values: list[float], size: int = 3) -> list[float]:
    """Mean of each window; the result is shorter by size - 1."""
    if not 0 < size <= len(values):
        raise ValueError(f"size must be from 1 to {len(values)}, not {size}")
    total = sum(values[:size])
    result = [total / size]
    for index in range(size, len(values)):
        total += values[index] - values[index - size]
        result.append(total / size)
    return result
```

- **Speed**: about 1.8 times as fast; it's measured, not estimated.
- **Memory**: 0.5 GB more.

{"name": "Elisabeth Weiß", "city": "Zürich", "tags": ["new", "paid"], "score": 0.75, "active": true}

To install it, run `pip install --upgrade example`, then set the environment variable and start the server again. In
most cases this doesn't take longer than a minute; otherwise, look at https://example.org/help?topic=install.
'''
"""What answers look like: prose, code, lists, JSON."""


class Tokenizer:
    """A model's tokenizer between bytes and ids: without special tokens, added spaces and lost bytes.

    Args:
        model: has a vocabulary.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._pieces: dict[int, bytes] = {}
        self._adds_space = self.decode(self._tokenize("a")) == b" a"

    def piece(self, token: int) -> bytes:
        """Bytes of a token in a text; nothing for special and unused ones."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self.model.piece(token)
        return found

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Bytes of several tokens."""
        return b"".join(map(self.piece, tokens))

    def ends(self, tokens: Sequence[int]) -> list[int]:
        """Where each token ends in the bytes of all of them."""
        return list(itertools.accumulate(len(self.piece(token)) for token in tokens))

    def encode(self, data: bytes) -> list[int]:
        """Ids of a text, the text of special tokens as text.

        Bytes that are no UTF-8 become tokens of these bytes, or are left out where there are none. Tokenizers that
        change a text, as WordPiece does, give what they make of it.
        """
        found: list[int] = []
        for part, is_text in _parts(data):
            found += self._encode_text(part.decode()) if is_text else self._encode_bytes(part)
        return found

    def is_single(self, data: bytes) -> bool:
        """Whether one token is all of these bytes."""
        found = self.encode(data)
        return len(found) == 1 and self.piece(found[0]) == data

    def encode_behind(self, before: bytes, data: bytes) -> list[int]:
        """Ids of `data` as they are behind `before`, where no token stands on both sides of that border; else alone.

        Returns:
            Tokens whose bytes are those of `data`, or of a first part of it: there is nothing in the vocabulary for
            the rest.
        """
        if before:
            whole = self.encode(before + data)
            num = self._num_first(whole, before)
            if num is not None:
                return self._exact(whole[num:], data)
        return self._exact(self.encode(data), data)

    def _exact(self, tokens: Sequence[int], data: bytes) -> list[int]:
        """The first tokens that are really the first bytes of `data`."""
        kept: list[int] = []
        position = 0
        for token in tokens:
            piece = self.piece(token)
            if not piece or data[position : position + len(piece)] != piece:
                break
            kept.append(token)
            position += len(piece)
        return kept

    def _tokenize(self, text: str) -> list[int]:
        return self.model.tokenize(text, add_special=False, parse_special=False)

    def _encode_text(self, text: str) -> list[int]:
        if not self._adds_space:
            return self._tokenize(text)
        if text.startswith(" ") and self.decode(found := self._tokenize(text[1:])) == text.encode():
            return found
        for guard in _GUARDS:
            whole = self._tokenize(guard + text)
            num = self._num_first(whole, f" {guard}".encode())
            if num is not None:
                return whole[num:]
        return self._tokenize(text)

    def _num_first(self, tokens: Sequence[int], data: bytes) -> int | None:
        """How many of the first tokens are exactly these bytes; None where no token ends there."""
        ends = self.ends(tokens)
        num = ends.index(len(data)) + 1 if len(data) in ends else 0
        return num if num and self.decode(tokens[:num]) == data else None

    def _encode_bytes(self, data: bytes) -> list[int]:
        """Bytes that are no text, by the longest tokens that there are for them."""
        found: list[int] = []
        start = 0
        while start < len(data):
            sizes = range(min(4, len(data) - start), 0, -1)
            size = next((size for size in sizes if data[start : start + size] in self._fragments), 0)
            if size:
                found.append(self._fragments[data[start : start + size]])
            start += size or 1
        return found

    @functools.cached_property
    def _fragments(self) -> dict[bytes, int]:
        """Pieces that are no UTF-8 by themselves."""
        found: dict[bytes, int] = {}
        for token in range(min(_EARLY, self.model.num_vocab)):
            piece = self.piece(token)
            if piece and not _is_text(piece):
                found.setdefault(piece, token)
        return found


def _parts(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """The bytes in order, as text and as what is no UTF-8."""
    while data:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start], True
            yield data[error.start : error.end], False
            data = data[error.end :]
        else:
            yield data, True
            return


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_cut(data: bytes | bytearray, place: int) -> bool:
    """Whether a character goes on at `place`."""
    return place < len(data) and data[place] & 0xC0 == 0x80


def num_complete(data: bytes) -> int:
    """Bytes without the beginning of a character at the end, of which the rest may still come."""
    for size in range(1, min(4, len(data) + 1)):
        lead = data[-size]
        if lead & 0xC0 != 0x80:
            length = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 1
            return len(data) - size if size < length else len(data)
    return len(data)


BothPrompts = tuple[Sequence[int], Sequence[int]]


class Translation:
    """A text by its tokens of the target, as tokens of the draft model; kept up to date as the text grows.

    Only what is new is read, with a few tokens before it, so that merges across the border come out as the draft
    model's tokenizer makes them. Special tokens have no text: of a prompt they are left out, unless it is given in
    the draft model's own form.

    Args:
        target: the tokenizer of what comes in.
        draft: the tokenizer of what goes out.
        prompt: tells, when the first text is asked for, a prompt in both forms, if there is one: the target's tokens,
            and what the draft model reads in their place.
    """

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, prompt: Callable[[], BothPrompts | None] = lambda: None
    ) -> None:
        self._target = target
        self._draft = draft
        self._ask_prompt = prompt
        self._begin((), _opening(draft.model))

    @functools.cached_property
    def _prompt(self) -> BothPrompts | None:
        # A template runs in a child: a tenth of a second, in vain where nothing is ever drafted.
        return self._ask_prompt()

    def _begin(self, known: Sequence[int], first: Sequence[int]) -> None:
        self._tokens = list(known)
        self._text = bytearray()
        # For each token of the target the end of its text; for each draft token too, -1 where nobody knows.
        self._ends = [0] * len(known)
        self._first = list(first)
        self._ids: list[int] = []
        self._id_ends: list[int] = []

    @property
    def has_begun(self) -> bool:
        """Whether anything was translated."""
        return bool(self._tokens)

    def about(self, tokens: Sequence[int], ratio: float) -> int:
        """About how many `ids(tokens)` are: counted as far as they are known, the rest by draft tokens for a token."""
        new = len(tokens) - len(self._tokens)
        return len(self._first) + len(self._ids) + round(max(0, new) * ratio)

    def ids(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's tokens for the target's."""
        size = len(self._tokens)
        # Comparing lists takes 2 ns a token.
        if list(tokens[:size]) != self._tokens:
            self._shorten(common_prefix(self._tokens, tokens))
        if not self._tokens and self._prompt is not None:
            given, own = self._prompt
            if list(tokens[: len(given)]) == list(given):
                self._begin(given, own)
        if len(tokens) > len(self._tokens) or len(tokens) < size:
            self._extend(tokens[len(self._tokens) :])
        return self._first + self._ids

    def _shorten(self, size: int) -> None:
        """Back to the first `size` tokens of the target."""
        if self._prompt is not None and size < len(self._prompt[0]):
            self._begin((), _opening(self._draft.model))
            return
        del self._tokens[size:], self._ends[size:]
        del self._text[self._ends[-1] if self._ends else 0 :]
        while self._id_ends and not 0 <= self._id_ends[-1] <= len(self._text):
            self._id_ends.pop()

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text += self._target.piece(token)
            self._tokens.append(token)
            self._ends.append(len(self._text))
        kept = self._num_safe()
        start = self._id_ends[kept - 1] if kept else 0
        data = bytes(self._text[start:])
        found = self._draft.encode(data)
        ends = [start + end for end in self._draft.ends(found)]
        if found and self._draft.decode(found) != data:
            # Whatever the tokenizer made of it: only the end of all is known.
            ends = [-1] * (len(found) - 1) + [len(self._text)]
        self._ids[kept:] = found
        self._id_ends[kept:] = ends

    def _num_safe(self) -> int:
        """Draft tokens that stay as they are: up to a place where a word ended before the text grew."""
        text, ends = self._text, self._id_ends
        for kept in range(len(ends), max(0, len(ends) - _LOOK_BACK), -1):
            end = ends[kept - 1]
            if end > 0 and text[end : end + 1] == b" " and text[end - 1] not in b" \t\r\n":
                return kept
        # A script without spaces.
        near = range(max(0, len(ends) - _FEWEST), 0, -1)
        return next((kept for kept in near if ends[kept - 1] >= 0 and not is_cut(text, ends[kept - 1])), 0)


def _opening(model: LanguageModel) -> list[int]:
    """What the tokenizer puts in front of every text."""
    return [token for token in model.tokenize("", add_special=True, parse_special=False)[:1] if token == model.bos]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How well two tokenizers go together on a text.

    Attributes:
        shared: share of the target's tokens that are one token for the draft model as well, from 0 to 1.
        draft_tokens: tokens of the draft model for one of the target.
    """

    shared: float
    draft_tokens: float


def efficiency(target: Tokenizer, draft: Tokenizer, text: str = SAMPLE) -> Efficiency | None:
    """Measure on a text how well two tokenizers go together; None where one of the two has no tokens for it.

    Args:
        target: the target's tokenizer.
        draft: the draft model's.
        text: what is to be written.
    """
    data = text.encode()
    wanted, given = target.encode(data), draft.encode(data)
    if not wanted or not draft.decode(given):
        return None
    single = {token for token in set(wanted) if draft.is_single(target.piece(token))}
    return Efficiency(sum(token in single for token in wanted) / len(wanted), len(given) / len(wanted))


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Tokens with the same bytes in both vocabularies, and the end of an answer.

    Attributes:
        target: their ids in the target, ascending, shape (n,).
        draft: the ids of the same tokens in the draft model, shape (n,).
    """

    target: Ids
    draft: Ids

    @classmethod
    def of(cls, target: Tokenizer, draft: Tokenizer) -> SharedTokens:
        """All of them; takes microseconds a token, which is a second for large vocabularies."""
        theirs = _by_bytes(draft)
        pairs = {token: theirs[piece] for piece, token in _by_bytes(target).items() if piece in theirs}
        if target.model.eos is not None and draft.model.eos is not None:
            # The same role, whatever it is called.
            pairs[target.model.eos] = draft.model.eos
        ids = np.array(sorted(pairs), dtype=np.int64)
        return cls(ids, np.array([pairs[token] for token in sorted(pairs)], dtype=np.int64))


def _by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Bytes -> the token for them; of several, the one that the tokenizer itself would write."""
    found: dict[bytes, int] = {}
    for token in range(tokenizer.model.num_vocab):
        piece = tokenizer.model.piece(token)
        if not piece or token in tokenizer.model.stop_tokens:
            continue
        if piece in found and tokenizer.encode(piece) != [token]:
            continue
        found[piece] = token
    return found


class Translator:
    """The two tokenizers of a pair, and what is known about them.

    Args:
        target: the target.
        draft: the draft model.

    Attributes:
        is_possible: whether both have tokens for plain text.
        efficiency: measured on a sample text.
    """

    def __init__(self, target: LanguageModel, draft: LanguageModel) -> None:
        self.target = Tokenizer(target)
        self.draft = Tokenizer(draft)
        found = efficiency(self.target, self.draft)
        self.is_possible = found is not None
        self.efficiency = found or Efficiency(shared=0.0, draft_tokens=1.0)

    @functools.cached_property
    def shared(self) -> SharedTokens:
        """Tokens that both have."""
        return SharedTokens.of(self.target, self.draft)

    def translation(self, prompt: Callable[[], BothPrompts | None] = lambda: None) -> Translation:
        """For one answer; see `Translation`."""
        return Translation(self.target, self.draft, prompt)
