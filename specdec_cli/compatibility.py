"""Whether a draft model's vocabulary fits a target's: compared token by token, and judged. Loads nothing.

Speculation passes token ids from one model to the other. Whatever an id means to the draft model, the output stays the
target's; but where ids mean different things, drafts are never right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Verdict = Literal["same tokenizer", "padding only", "differs in unused specials", "different"]
Role = Literal["padding", "special", "extra", "used"]

UNUSED, CONTROL, USER_DEFINED = 1 << 1, 1 << 3, 1 << 4
"""Attribute bits of a token, as llama.cpp counts them."""

MAX_LISTED = 10
"""Differing tokens that are named."""

_ROLES: tuple[Role, ...] = ("used", "special", "extra", "padding")


class Vocabulary(Protocol):
    """What is compared of a model; `specdec_cli.llama.Model` is one."""

    @property
    def num_vocab(self) -> int:
        """Number of token ids, padding included."""

    @property
    def tokenizer_kind(self) -> int:
        """llama.cpp's number for the kind of tokenizer."""

    @property
    def bos(self) -> int | None:
        """Beginning-of-sequence token."""

    @property
    def eos(self) -> int | None:
        """End-of-sequence token."""

    @property
    def adds_bos(self) -> bool:
        """Whether BOS is put in front of a text."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja source."""

    def token_entries(self) -> Sequence[bytes]:
        """The text of every token, shape (num_vocab,)."""

    def token_attr(self, token: int) -> int:
        """Attribute bits of a token."""

    def is_stop(self, token: int) -> bool:
        """Whether a token ends an answer."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """An id that stands for different texts.

    Attributes:
        token: the id.
        target: its text in the target; None beyond the end of the target's vocabulary.
        draft: the same for the draft model.
        role: "padding": one file calls it unused; "special": a control token in both that no text needs; "extra": only
            one model has it; "used": everything else, which is what decides.
    """

    token: int
    target: str | None
    draft: str | None
    role: Role


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What comparing two vocabularies found.

    Attributes:
        verdict: in the words of the documentation.
        num_shared: number of leading ids that both have.
        num_differences: ids that stand for different texts, whatever their role.
        differences: the first ten of those that led to the verdict.
        reason: why they do not fit; empty when they do.
    """

    verdict: Verdict
    num_shared: int
    num_differences: int = 0
    differences: tuple[TokenDifference, ...] = ()
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether the draft model can draft for the target."""
        return self.verdict != "different"


def compare(target: Vocabulary, draft: Vocabulary) -> Compatibility:
    """Compare two vocabularies; sizes may differ, because embedding matrices are padded."""
    entries = target.token_entries(), draft.token_entries()
    differing = [*_differing(*entries)]
    found = _by_role(target, draft, entries, differing)
    # The most serious role that occurs; only its tokens are named.
    role = next((role for role in _ROLES if found[role]), None)
    listed = () if role is None else tuple(found[role][:MAX_LISTED])
    reason = _reason(target, draft, listed)
    verdict: Verdict = "different"
    if not reason:
        verdict = "same tokenizer" if role is None else "differs in unused specials"
        verdict = "padding only" if role == "padding" else verdict
    return Compatibility(verdict, min(map(len, entries)), len(differing), listed, reason)


def _reason(target: Vocabulary, draft: Vocabulary, listed: Sequence[TokenDifference]) -> str:
    if target.tokenizer_kind != draft.tokenizer_kind:
        first = f" ({_words(listed[0])})" if listed else ""
        return f"target and draft have different kinds of tokenizer{first}"
    if listed and listed[0].role == "used":
        return f"target and draft have different vocabularies: {_words(listed[0])}"
    if target.adds_bos and draft.adds_bos and target.bos != draft.bos:
        return f"target and draft start a text differently: BOS {target.bos} and {draft.bos}"
    return ""


def _words(difference: TokenDifference) -> str:
    return f"token {difference.token} is {difference.target!r} in the target and {difference.draft!r} in the draft"


def _by_role(
    target: Vocabulary, draft: Vocabulary, entries: tuple[Sequence[bytes], Sequence[bytes]], differing: Sequence[int]
) -> dict[Role, list[TokenDifference]]:
    """Differing ids in order, by role; it ends where enough decisive ones are found."""
    found: dict[Role, list[TokenDifference]] = {role: [] for role in _ROLES}
    for token in differing:
        texts = [side[token].decode("utf-8", "replace") if token < len(side) else None for side in entries]
        role = _role(token, texts, target, draft)
        found[role].append(TokenDifference(token, texts[0], texts[1], role))
        if len(found["used"]) == MAX_LISTED:
            break
    return found


def _differing(first: Sequence[bytes], second: Sequence[bytes]) -> Iterator[int]:
    yield from (token for token, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    yield from range(min(len(first), len(second)), max(len(first), len(second)))


def _role(token: int, texts: Sequence[str | None], target: Vocabulary, draft: Vocabulary) -> Role:
    models = [model for model, text in zip((target, draft), texts, strict=True) if text is not None]
    attrs = [model.token_attr(token) for model in models]
    if any(attr & UNUSED for attr in attrs):
        return "padding"
    if len(models) == 1:
        return "extra"
    are_special = all(attr & (CONTROL | USER_DEFINED) for attr in attrs)
    return "special" if are_special and not any(_needs(model, token, texts) for model in models) else "used"


def _needs(model: Vocabulary, token: int, texts: Sequence[str | None]) -> bool:
    """Whether a special token begins or ends texts, or the chat template writes it."""
    template = model.chat_template or ""
    return token in (model.bos, model.eos) or model.is_stop(token) or any(text and text in template for text in texts)
