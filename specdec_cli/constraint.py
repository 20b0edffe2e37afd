"""Grammars and JSON schemas: which tokens may come next, for target and draft model alike.

The state is a function of the tokens of the answer, moved by their common prefix like a cache: rollback after a
rejection costs nothing. Parsing and token masks are llguidance's.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_cli.distribution import Ids
from specdec_cli.errors import BackendError, UsageError
from specdec_cli.types import LanguageModel

_JSON_OBJECT: dict[str, Any] = {"type": "object"}
_MAX_TRIES = 3000
"""Tokens tried in search of an end: a second or two in the worst case."""

_MAX_BYTES = 1 << 22
"""Of a grammar or schema: far more than any that could be compiled."""

_WHITESPACE = r" |\n( {0,48}|\t{0,12})"
"""Between two JSON tokens: enough for indentation; free white space lets a model that is unsure fill the answer."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that parses, in llguidance's form.

    Attributes:
        name: what to call it in messages.
        source: the grammar.
    """

    name: str
    source: str

    @classmethod
    def from_file(cls, path: Path) -> Grammar:
        """A grammar file: `.lark` for Lark, anything else is GBNF, the form of llama.cpp.

        Raises:
            UsageError: it cannot be read, or does not parse; with the parser's message.
        """
        text = _read(path, "--grammar")
        source = text if path.suffix.lower() == ".lark" else _gbnf_to_lark(path.name, text)
        return cls._checked(path.name, _matcher_class().grammar_from_lark(source))

    @classmethod
    def from_schema(cls, text: str) -> Grammar:
        """A JSON schema, inline or as the path of a file.

        Raises:
            UsageError: it cannot be read, is not JSON, or uses a keyword that cannot be enforced.
        """
        inline = is_inline_schema(text)
        name = "the JSON schema" if inline else text
        try:
            schema = json.loads(text if inline else _read(Path(text), "--json-schema"))
        except json.JSONDecodeError as error:
            raise _invalid(name, f"not JSON: {error}") from None
        except RecursionError:
            raise _invalid(name, "it is nested too deeply") from None
        return cls._from_parsed(name, schema)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls._from_parsed("--json-object", _JSON_OBJECT)

    @classmethod
    def _from_parsed(cls, name: str, schema: Any) -> Grammar:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _invalid(name, f"a schema is an object, not {json.dumps(schema)[:40]}")
        options: Any = {"whitespace_pattern": _WHITESPACE}
        try:
            text = _matcher_class().grammar_from_json_schema(json.dumps(schema), defaults=options)
        except (ValueError, RecursionError) as error:
            raise _invalid(name, str(error)) from None
        return cls._checked(name, text)

    @classmethod
    def _checked(cls, name: str, source: str) -> Grammar:
        problem = _matcher_class().validate_grammar(source)
        if problem and not problem.startswith("WARNING"):
            raise _invalid(name, problem)
        matcher = _matcher_class()(_bytes_tokenizer(), source, log_level=0)
        mask = np.zeros((1, 9), dtype=np.int32)
        # The mask first: it is what finds the error.
        nothing_fits = not matcher.is_error() and not _allowed_ids(matcher, mask, _NUM_BYTES + 1).size
        if nothing_fits or matcher.is_error():
            error = matcher.get_error()
            raise _invalid(name, "no text fits it" if not error or error.startswith("NoExtension") else error)
        return cls(name, source)


def is_inline_schema(text: str) -> bool:
    """Whether this is a JSON schema, not the path of one."""
    return re.match(r"""\s*([{\["\d-]|(true|false|null)\s*$)""", text) is not None


def _matcher_class() -> Any:
    from llguidance import LLMatcher

    return LLMatcher


def _invalid(name: str, problem: str) -> UsageError:
    message = f"{name} is not usable: {_one_line(problem)}"
    return UsageError(message, "docs/sampling.md says what is supported")


def _one_line(problem: str) -> str:
    """The parser's message without its own state."""
    words = " ".join(re.split("<backtrace>|<state>", problem)[0].split())
    return words if len(words) <= 400 else words[:400] + " ..."


def _read(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            # A device may never end, nor let go of the process.
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_BYTES + 1) if stat.S_ISREG(mode) or stat.S_ISFIFO(mode) else None
        if data is None:
            raise ValueError("it is neither a file nor a pipe")
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES >> 20} MiB")
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        is_binary = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8 text" if is_binary else getattr(error, "strerror", None) or str(error)
        shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]} ..."
        raise UsageError(f"cannot read `{shown}`: {reason}", f"check the path given to `{option}`") from None


def _gbnf_to_lark(name: str, text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    # The converter takes neither line ends of Windows nor these escapes, which llama.cpp's own grammars have.
    text = re.sub(r"\\\\|" + _CODE_POINT, _literal, text.replace("\r\n", "\n"))
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise _invalid(name, "it is nested too deeply") from None
    except Exception as error:
        raise _invalid(name, str(error)) from None


_CODE_POINT = r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})"


def _literal(match: re.Match[str]) -> str:
    """The character in place of its number; an invisible or special ASCII one keeps a number that regexes know."""
    digits = next((digits for digits in match.groups() if digits), "")
    code = int(digits, 16) if digits else 0
    if not digits or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return match[0]
    if code < 0x20 or chr(code) in " -^/\x7f":
        return f"\\x{code:02x}"
    return f"\\{chr(code)}" if chr(code) in '"\\[]' else chr(code)


_NUM_BYTES = 256


class _Bytes:
    """A vocabulary of all bytes, in the form that llguidance reads: grammars are checked before a model is loaded."""

    bos_token_id = None
    unk_token_id = None
    eos_token_id = _NUM_BYTES
    tokens = (*(bytes([byte]) for byte in range(_NUM_BYTES)), b"<end>")
    special_token_ids = (_NUM_BYTES,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _bytes_tokenizer() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


class Vocabulary:
    """A model's vocabulary in the form that masks are computed over; one serves all answers of a model.

    Args:
        model: the target.

    Raises:
        UsageError: the model has no token that ends an answer.
    """

    def __init__(self, model: LanguageModel) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.num_vocab = model.num_vocab
        self.stop_tokens = sorted(model.stop_tokens)
        if not self.stop_tokens:
            raise UsageError("a grammar needs a model with an end token; this one has none", "leave the grammar out")
        words = _Wrapped(model, self.stop_tokens[0])
        self.closers = _closers(words.tokens)
        wrapped = TokenizerWrapper(words)
        self.tokenizer = LLTokenizer(
            wrapped, n_vocab=model.num_vocab, eos_token=self.stop_tokens, slices=LLTokenizer.json_slices()
        )


class _Wrapped:
    """The attributes that llguidance reads."""

    bos_token_id = None
    unk_token_id = None

    def __init__(self, model: LanguageModel, eos: int) -> None:
        self._model = model
        self.eos_token_id = eos
        self.tokens = [model.piece(token) for token in range(model.num_vocab)]
        self.special_token_ids = [token for token, piece in enumerate(self.tokens) if not piece]
        self._ids = {piece: token for token, piece in enumerate(self.tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        tokens = self._model.tokenize(data.decode("utf-8", "replace"), add_special=False, parse_special=False)
        # Some tokenizers put a space in front or lack characters; a forced token must be what the grammar forces.
        return tokens if b"".join(self.tokens[token] for token in tokens) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token each time, as far as the vocabulary reaches."""
        found: list[int] = []
        while data:
            size = next((n for n in range(min(len(data), 64), 0, -1) if data[:n] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[data[:size]])
            data = data[size:]
        return found


class GrammarConstraint:
    """The state of a grammar in one answer; see `specdec_cli.types.Constraint`.

    Args:
        grammar: what the answer keeps to.
        vocabulary: the target's.
        num_prompt: the answer begins after so many tokens.

    Raises:
        UsageError: the grammar cannot be used with this vocabulary.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, num_prompt: int) -> None:
        self._matcher = _matcher_class()(vocabulary.tokenizer, grammar.source, log_level=0)
        if self._matcher.is_error():
            raise _invalid(grammar.name, self._matcher.get_error())
        self._name = grammar.name
        self._vocabulary = vocabulary
        self._num_prompt = num_prompt
        self._consumed: list[int] = []
        self._num_tries = 0
        self._mask = np.zeros((1, (vocabulary.num_vocab + 31) // 32), dtype=np.int32)
        # Draft and target ask for the same state one after the other.
        self._known: dict[tuple[int, ...], Ids] = {}

    def allowed(self, tokens: Sequence[int], path: Sequence[int] = ()) -> Ids:
        """Ascending ids of the tokens that may come next; the stop tokens where the answer may end or must."""
        answer = (*tokens[self._num_prompt :], *path)
        if answer not in self._known:
            if len(self._known) > 2 * len(path) + 64:
                self._known.clear()
            self._known[answer] = self._compute(answer)
        return self._known[answer]

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Whether the answer so far is a whole sentence of the grammar."""
        return self._move(tokens[self._num_prompt :]) and bool(self._matcher.is_accepting())

    def closing(self, tokens: Sequence[int]) -> list[int]:
        """Few tokens that complete the answer, for one that was cut at its limit; empty when none were found."""
        if not self._move(tokens[self._num_prompt :]):
            return []
        # Brackets that close one level after the other look like a loop, and so does text that never ends.
        return self._search(trusting=True) or self._search(trusting=False)

    def _search(self, *, trusting: bool) -> list[int]:
        """Depth first for a whole sentence; the matcher is left as it was."""
        self._num_tries = 0
        path = [self._state()]
        visits = Counter(path)
        found: list[int] = []
        choices = [self._next_closers(visits, trusting)]
        limit = _MAX_TRIES if not trusting else _MAX_TRIES // 5
        while choices and self._num_tries < limit and not self._matcher.is_accepting():
            token = next(choices[-1], None)
            if token is None:
                choices.pop()
                visits[path.pop()] -= 1
                self._matcher.rollback(bool(found))
                del found[-1:]
            elif self._try(token):
                found.append(token)
                path.append(self._state())
                visits[path[-1]] += 1
                choices.append(self._next_closers(visits, trusting))
        complete = bool(self._matcher.is_accepting())
        self._matcher.rollback(len(found))
        return found if complete else []

    def _try(self, token: int) -> bool:
        self._num_tries += 1
        return bool(self._matcher.try_consume_tokens([token]))

    def _state(self) -> bytes:
        """What tells states of the grammar apart, nearly: the tokens that may follow."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._mask)
        return self._mask.tobytes()

    def _next_closers(self, visits: Mapping[bytes, int], trusting: bool) -> Iterator[int]:
        """Next tokens on the way to an end; those that lead back to where the path often was come last."""
        bits = _bits(self._mask, self._vocabulary.num_vocab)
        yield from self._matcher.compute_ff_tokens()[:1]
        later: list[tuple[int, int]] = []
        for token in self._promising(bits, few=trusting):
            trusted = trusting and token in self._vocabulary.closers.marks
            num_visits = 0 if trusted else self._visits_of(token, visits)
            if num_visits == 0:
                yield token
            else:
                later.append((num_visits, token))
        yield from (token for _, token in sorted(later, key=lambda pair: pair[0]))

    def _promising(self, bits: NDArray[np.uint8], *, few: bool) -> Iterator[int]:
        """The tokens most likely to lead to an end, best first; of letters, digits and the like some of each kind."""
        closers = self._vocabulary.closers
        allowed = {kind: ids[bits[ids] > 0] for kind, ids in closers.ids.items()}
        chosen = [ids[: _FEW[kind] if few else _MANY].tolist() for kind, ids in allowed.items()]
        return iter(sorted((token for some in chosen for token in some), key=closers.ranks.__getitem__))

    def _visits_of(self, token: int, visits: Mapping[bytes, int]) -> int:
        """How often the path already was where the token leads; 0 for an end."""
        if not self._try(token):
            return 0
        num_visits = 0 if self._matcher.is_accepting() else visits.get(self._state(), 0)
        self._matcher.rollback(1)
        return num_visits

    def _compute(self, answer: Sequence[int]) -> Ids:
        stop = np.asarray(self._vocabulary.stop_tokens)
        if not self._move(answer) or self._matcher.is_stopped():
            self._raise_if(self._matcher.is_error())
            return stop
        ids = _allowed_ids(self._matcher, self._mask, self._vocabulary.num_vocab)
        self._raise_if(self._matcher.is_error() or not (ids.size or self._matcher.is_accepting()))
        return ids if ids.size else stop

    def _raise_if(self, stuck: bool) -> None:
        """A dead end, or too much for the parser in the middle of an answer: neither must look like an end."""
        if stuck:
            problem = _one_line(self._matcher.get_error())
            if not problem or problem.startswith("NoExtension"):
                problem = "no token of this model fits"
            raise BackendError(f"{self._name} cannot be kept to any further: {problem}", "use a simpler grammar")

    def _move(self, answer: Sequence[int]) -> bool:
        """Bring the matcher to the state after `answer`; False when the grammar refuses it."""
        shared = 0
        for old, new in zip(self._consumed, answer, strict=False):
            if old != new:
                break
            shared += 1
        if shared < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - shared)
            del self._consumed[shared:]
        for token in answer[shared:]:
            if token in self._vocabulary.stop_tokens or not self._matcher.try_consume_tokens([token]):
                return False
            self._consumed.append(token)
        return True


def _allowed_ids(matcher: Any, mask: NDArray[np.int32], num_vocab: int) -> Ids:
    from llguidance.numpy import fill_next_token_bitmask

    fill_next_token_bitmask(matcher, mask)
    return np.flatnonzero(_bits(mask, num_vocab))


def _bits(mask: NDArray[np.int32], num_vocab: int) -> NDArray[np.uint8]:
    return np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:num_vocab]


# --- the way to an end -------------------------------------------------------------------------------------------

_MARKS = (b'"', b"}", b"]", b")")
_ENDINGS = b'"}]):,>.;1n0tf'
_FEW = {"blank": 6, "digit": 3, "lower": 3, "upper": 3, "punctuation": 32, "other": 6}
_MANY = 100
_MAX_PIECE = 4


@dataclass(frozen=True, slots=True)
class _Closers:
    """The short tokens of a vocabulary, in the order in which they are tried to complete an answer.

    Attributes:
        ids: token ids by kind, most promising first.
        ranks: place of each token among all kinds.
        marks: tokens that begin with what closes a string, an object, an array or a parenthesis.
    """

    ids: Mapping[str, Ids]
    ranks: Mapping[int, int]
    marks: frozenset[int]


def _closers(pieces: Sequence[bytes]) -> _Closers:
    short = [token for token, piece in enumerate(pieces) if 0 < len(piece) <= _MAX_PIECE]
    order = sorted(short, key=lambda token: _closing_rank(pieces[token]))
    kinds: dict[str, list[int]] = {kind: [] for kind in _FEW}
    for token in order:
        kinds[_kind(pieces[token])].append(token)
    return _Closers(
        {kind: np.asarray(tokens, dtype=np.intp) for kind, tokens in kinds.items()},
        {token: rank for rank, token in enumerate(order)},
        frozenset(token for token in order if pieces[token].strip()[:1] in _MARKS),
    )


def _kind(piece: bytes) -> str:
    first = piece.strip()[:1]
    kinds = {
        "blank": not first,
        "digit": first.isdigit(),
        "lower": first.islower(),
        "upper": first.isupper(),
        "punctuation": b" " < first < b"\x7f",
    }
    return next((kind for kind, holds in kinds.items() if holds), "other")


def _closing_rank(piece: bytes) -> tuple[int, int, bytes]:
    """Endings first, then separators and short values, what opens something new, white space, parts of characters."""
    first = piece.strip()[:1]
    kind = _kind(piece)
    place = _ENDINGS.find(first) if first else len(_ENDINGS) + 1
    if kind == "other":
        place = len(_ENDINGS) + 2
    return (place if place >= 0 else len(_ENDINGS), len(piece), piece)
