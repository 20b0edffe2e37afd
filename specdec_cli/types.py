"""The values that travel between the parts (drafts, verdicts, sampling settings, events), and the three seams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from specdec_cli.distribution import Distribution, Ids
from specdec_cli.errors import UsageError
from specdec_cli.limits import DrafterName

Logits = NDArray[np.floating[Any]]

Source = Literal["draft", "bonus", "recovered", "target", "closing"]
Reason = Literal["cost", "off", "probe", "check", "end"]
FinishReason = Literal["eog", "length", "context", "stop"]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed in one round: a chain or a tree, parents before children.

    Attributes:
        tokens: ids, shape (n,).
        parents: index of each node's parent, -1 for "after the last committed token", shape (n,).
        probs: the distribution each token was **sampled** from, or None for a point mass (n-gram, greedy, top-k
            children). Attaching a distribution that a token was not sampled from makes the output biased.
        confidences: the drafter's own estimate in [0, 1] that each token is accepted, shape (n,).
        drafters: names of the drafters that proposed each token, shape (n,), or empty when nobody asks.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: tuple[Distribution | None, ...] = ()
    confidences: tuple[float, ...] = ()
    drafters: tuple[str, ...] = ()

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        probs: Sequence[Distribution | None] | None = None,
        confidences: Sequence[float] | None = None,
        drafter: str = "",
    ) -> Draft:
        """A draft in which each token follows the one before, all of them proposed by `drafter`."""
        num = len(tokens)
        return cls(
            tuple(tokens),
            tuple(range(-1, num - 1)),
            (None,) * num if probs is None else tuple(probs),
            (1.0,) * num if confidences is None else tuple(confidences),
            (drafter,) * num if drafter else (),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, num: int) -> Draft:
        """The first so many nodes."""
        return Draft(*(getattr(self, name)[:num] for name in _DRAFT_FIELDS))

    @property
    def is_chain(self) -> bool:
        """Whether every token follows the one before."""
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    @property
    def depths(self) -> list[int]:
        """Position of each node in its branch, from 1, shape (n,)."""
        return _depths(self.parents)

    @property
    def num_leaves(self) -> int:
        """Nodes without children: the branches of a tree."""
        return _num_leaves(self.parents)

    def children(self) -> dict[int, list[int]]:
        """Parent index -> indices of its children, in order."""
        found: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(index)
        return found


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


def _num_leaves(parents: Sequence[int]) -> int:
    return len(parents) - len({parent for parent in parents if parent >= 0})


_DRAFT_FIELDS = tuple(field.name for field in fields(Draft))
EMPTY_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided about a draft.

    Attributes:
        path: indices of the accepted nodes, root to leaf.
        token: the target's own token after them; None when the path ends in a stop token.
        source: "bonus" after a whole path, "recovered" after a rejection, "target" when nothing was drafted.
    """

    path: tuple[int, ...]
    token: int | None
    source: Source


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings; names, order of application and defaults are llama.cpp's.

    Attributes:
        temperature: 0 is greedy decoding.
        top_k: number of likeliest tokens kept, 0 is off.
        top_p: nucleus mass kept, 1 is off.
        min_p: kept when at least this share of the likeliest token's probability, 0 is off.
        typical_p: mass of the locally typical tokens kept, 1 is off.
        top_n_sigma: kept within so many standard deviations of the best logit, 0 (or less) is off.
        xtc_probability: chance that of all tokens above `xtc_threshold` only the least likely stays, 0 is off.
        xtc_threshold: above 0.5 it is off.
        dynatemp_range: the temperature varies by so much with the entropy, 0 is off.
        dynatemp_exponent: how the normalized entropy becomes a place in that range.
        repeat_last_n: number of last tokens that penalties look at, 0 is off, -1 is all.
        repeat_penalty: 1 is off.
        presence_penalty: 0 is off.
        frequency_penalty: 0 is off.
        dry_multiplier: 0 is off.
        dry_base: growth of the penalty a repeated token.
        dry_allowed_length: repetitions up to this length are free.
        dry_last_n: number of last tokens that DRY looks at, 0 is off, -1 is all.
        dry_breakers: texts that DRY does not look across.
        mirostat: 1 or 2 in place of all truncations above, 0 is off.
        mirostat_tau: surprise aimed at, in bits.
        mirostat_eta: learning rate.
        logit_bias: (token id, added to its logit) pairs.
        seed: of the one random generator of an answer; None draws one.

    Raises:
        UsageError: a value outside its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = 64
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high, allowed) in _RANGES.items():
            value = getattr(self, name)
            if value is not None:
                _require(name.replace("_", "-"), value, low <= value <= high, allowed)
        _require("top-p", self.top_p, self.top_p > 0, "above 0 and up to 1 (off)")
        _require("typical-p", self.typical_p, self.typical_p > 0, "above 0 and up to 1 (off)")
        for token, bias in self.logit_bias:
            _require(f"logit-bias of token {token}", bias, not math.isnan(bias) and bias < math.inf, "a number")
        if "" in self.dry_breakers:
            raise UsageError("--dry-breaker must not be empty", "`--dry-breaker none` means no breakers")

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the likeliest one."""
        return self.temperature == 0 and self.dynatemp_range == 0

    @property
    def can_drop_best(self) -> bool:
        """Whether a truncation may exclude the likeliest token."""
        return self.mirostat == 0 and (self.typical_p < 1 or self.xtc_probability > 0)

    @property
    def penalty_window(self) -> int | None:
        """How many last tokens the penalties look at; 0 when they are off, None for all."""
        off = self.repeat_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return _window(self.repeat_last_n, off=off or self.mirostat > 0)

    @property
    def dry_window(self) -> int | None:
        """How many last tokens DRY looks at; 0 when it is off, None for all."""
        off = self.dry_multiplier == 0 or self.dry_base < 1
        return _window(self.dry_last_n, off=off or self.mirostat > 0)


_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 1e308, "0 (greedy) or more"),
    "top_k": (0, 2**31 - 1, "0 (off) or more"),
    "top_p": (0, 1, "above 0 and up to 1 (off)"),
    "min_p": (0, 1, "from 0 (off) to 1"),
    "typical_p": (0, 1, "above 0 and up to 1 (off)"),
    "top_n_sigma": (-1, 1000, "0 (off) or more"),
    "xtc_probability": (0, 1, "from 0 (off) to 1"),
    "xtc_threshold": (0, 1, "from 0 to 1"),
    "dynatemp_range": (0, 100, "from 0 (off) to 100"),
    "dynatemp_exponent": (0, 100, "from 0 to 100"),
    "repeat_last_n": (-1, 2**31 - 1, "-1 (all), 0 (off) or more"),
    "repeat_penalty": (0.01, 100, "from 0.01 to 100"),
    "presence_penalty": (-100, 100, "from -100 to 100"),
    "frequency_penalty": (-100, 100, "from -100 to 100"),
    "dry_multiplier": (0, 100, "from 0 (off) to 100"),
    "dry_base": (0, 100, "from 0 to 100"),
    "dry_allowed_length": (1, 2**31 - 1, "1 or more"),
    "dry_last_n": (-1, 2**31 - 1, "-1 (all), 0 (off) or more"),
    "mirostat": (0, 2, "0 (off), 1 or 2"),
    "mirostat_tau": (0, 100, "from 0 to 100"),
    "mirostat_eta": (0, 100, "from 0 to 100"),
    "seed": (0, 2**64 - 1, "from 0 to 2^64 - 1"),
}


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        hint = f"see `specdec run --help` for `--{name.split()[0]}`"
        raise UsageError(f"{name} must be {allowed}, not {value}", hint)


def _window(last_n: int, *, off: bool) -> int | None:
    if off:
        return 0
    return None if last_n < 0 else last_n


MAX_DRAFT_TOKENS = 64
"""The largest draft, in nodes, that a context scores: it bounds the logits buffer."""

MAX_BRANCHES = 32
"""The most leaves of a draft tree: each is a sequence of the cache."""

DEFAULT_BRANCHES = 8


@dataclass(frozen=True, slots=True)
class Drafting:
    """What proposes tokens, and how many.

    Attributes:
        drafter: "model" for chains of the draft model, "tree" for trees, "ngram", "auto" for whichever of n-grams and
            trees is worth more in a round, "none" for plain decoding.
        num_draft_tokens: the most draft tokens of a round; None is what pays by the measured costs, 0 plain decoding.
        min_confidence: with a number of tokens, a token drafted with less ends the draft.
        max_branches: the most leaves of a tree; 1 is chains only.

    Raises:
        UsageError: a value outside its range.
    """

    drafter: DrafterName = "auto"
    num_draft_tokens: int | None = None
    min_confidence: float = 0.5
    max_branches: int = DEFAULT_BRANCHES

    def __post_init__(self) -> None:
        names = get_args(DrafterName)
        _require("drafter", self.drafter, self.drafter in names, f"one of {', '.join(names)}")
        num, allowed = self.num_draft_tokens, f"from 0 to {MAX_DRAFT_TOKENS}, or auto"
        _require("draft-tokens", num, num is None or 0 <= num <= MAX_DRAFT_TOKENS, allowed)
        _require("draft-confidence", self.min_confidence, 0 <= self.min_confidence <= 1, "from 0 to 1")
        allowed = f"from 1 (chains) to {MAX_BRANCHES}"
        _require("draft-branches", self.max_branches, 1 <= self.max_branches <= MAX_BRANCHES, allowed)

    @property
    def is_off(self) -> bool:
        """Whether this is plain decoding."""
        return self.drafter == "none" or self.num_draft_tokens == 0

    @property
    def uses_model(self) -> bool:
        """Whether a draft model has a part in it."""
        return self.drafter in {"auto", "model", "tree"} and not self.is_off

    @property
    def num_branches(self) -> int:
        """Leaves of the widest tree that may be drafted; 1 where only chains are."""
        return self.max_branches if self.drafter in {"auto", "tree"} and not self.is_off else 1


AUTO_DRAFTING = Drafting()
PLAIN_DECODING = Drafting("none")


class Constraint(Protocol):
    """Which tokens may come next in an answer: a grammar, with its state."""

    def allowed(self, tokens: Sequence[int], path: Sequence[int]) -> Ids:
        """Ascending ids of the tokens that may follow `tokens` (prompt included) and the drafted `path`."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer, in order.

    Attributes:
        id: token id.
        source: where it came from; "closing" tokens complete a grammar's sentence that was cut at its limit.
        text: text that became complete with it; may be empty in the middle of a character. Filled in by a session.
    """

    id: int
    source: Source
    text: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a draft got its length: the numbers that the cost rule compared when it stopped.

    Attributes:
        reason: "cost": one more token did not pay; "off": drafting does not pay now; "probe": it did not pay, and was
            tried to see whether that is still so; "check": it pays by little, and was left out to see what a plain
            round takes; "end": nothing more to propose, or no room for it.
        reach: probability that all drafted tokens are accepted (A), of a tree that one of those drafted last is; 1.0
            without any.
        acceptance: expected acceptance of one more token.
        rate: tokens per second that time is worth (R).
        step_s: seconds of one more draft step (d).
        pass_s: seconds of the target's pass over the draft, t(n).
        next_pass_s: the same with one more token, t(n + 1).
    """

    reason: Reason
    reach: float
    acceptance: float
    rate: float
    step_s: float
    pass_s: float
    next_pass_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-verify cycle, reported after its tokens.

    Attributes:
        index: number of the round, from 0.
        num_drafted: draft tokens that the target scored.
        num_accepted: draft tokens accepted.
        num_tokens: tokens committed to the answer, bonus or recovered one included.
        draft_s: seconds inside the draft model's decode calls.
        verify_s: seconds inside the target's decode calls.
        total_s: seconds of the whole round.
        propose_s: seconds that proposing took, decode calls and sampling.
        num_reread: tokens that the target decoded beyond the last committed one and the draft: in the first round the
            last part of the prompt, later what was accepted before a rejection that its cache could not take back.
        drafters: names of the drafters that proposed each draft token.
        confidences: the drafters' estimates that each draft token is accepted.
        outcomes: for each draft token that was tried, in order, the overlap of target and draft distribution there:
            the probability of its acceptance; 1.0 or 0.0 for a greedy target.
        target_confidence: without a draft and where the policy watches, the probability of the target's likeliest
            token; else 0.0.
        decision: why the draft got its length; None when the policy does not tell.
        parents: of a tree, the index of each draft token's parent, -1 for the root; empty for a chain.
        tried: of a tree, the draft tokens that `outcomes` belong to; empty for a chain, whose first ones are tried.
        path: of a tree, the draft tokens on the accepted path; empty for a chain.
    """

    index: int
    num_drafted: int
    num_accepted: int
    num_tokens: int
    draft_s: float
    verify_s: float
    total_s: float
    propose_s: float = 0.0
    num_reread: int = 0
    drafters: tuple[str, ...] = ()
    confidences: tuple[float, ...] = ()
    outcomes: tuple[float, ...] = ()
    target_confidence: float = 0.0
    decision: Decision | None = None
    parents: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()
    path: tuple[int, ...] = ()

    @property
    def depths(self) -> Sequence[int]:
        """Position of each draft token in its branch, from 1."""
        return _depths(self.parents) if self.parents else range(1, self.num_drafted + 1)

    @property
    def ranks(self) -> Sequence[int]:
        """How many siblings each draft token has before it."""
        if not self.parents:
            return (0,) * self.num_drafted
        return [self.parents[:index].count(parent) for index, parent in enumerate(self.parents)]

    @property
    def num_leaves(self) -> int:
        """Branches of the draft."""
        return _num_leaves(self.parents) if self.parents else min(self.num_drafted, 1)

    @property
    def accepted_nodes(self) -> Sequence[int]:
        """Indices of the accepted draft tokens."""
        return self.path[: self.num_accepted] if self.parents else range(self.num_accepted)

    @property
    def tried_nodes(self) -> Sequence[int]:
        """Indices of the draft tokens that `outcomes` belong to."""
        return self.tried if self.parents else range(len(self.outcomes))


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt was read by the target, reported once before the first token.

    Attributes:
        num_tokens: length of the prompt.
        verify_s: seconds inside the target's decode calls; the last part of the prompt is decoded with the first round.
    """

    num_tokens: int
    verify_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of an answer: why it ended, and text that was still held back."""

    reason: FinishReason
    text: str = ""


Event = Prefill | Token | Round | Finish


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context is set up.

    Attributes:
        num_ctx: tokens the cache holds.
        threads: for decoding; None is every physical core.
        kv_type: type of the cache, a name of `specdec_cli.llama.KV_TYPES`.
        max_leaves: leaves of the widest draft tree; a model that cannot drop a branch takes 1 whatever is asked for.
        flash_attention: None leaves the choice to llama.cpp; a quantized cache needs it.
    """

    num_ctx: int
    threads: int | None = None
    kv_type: str = "f16"
    max_leaves: int = 1
    flash_attention: bool | None = None


class Context(Protocol):
    """A model with its cache; see `specdec_cli.context.CachedContext` for the contract."""

    @property
    def num_ctx(self) -> int:
        """Tokens the cache can hold."""

    @property
    def num_vocab(self) -> int:
        """Length of a logits row."""

    @property
    def max_leaves(self) -> int:
        """Leaves of the widest draft that `score` takes; 1 is chains only."""

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens the cache holds."""

    @property
    def decode_s(self) -> float:
        """Seconds spent in decode calls so far."""

    @property
    def num_decoded(self) -> int:
        """Tokens given to decode calls so far."""

    def num_missing(self, tokens: Sequence[int]) -> int:
        """Tokens that would be decoded for the logits after `tokens`: those in the cache need not be."""

    def sync(self, tokens: Sequence[int]) -> None:
        """Make the cache hold exactly `tokens`; the last part may be decoded with the next `score`."""

    def score(self, draft: Draft = EMPTY_DRAFT) -> Logits:
        """Logits after the last synced token and after each draft node, shape (1 + len(draft), num_vocab)."""

    def grow(self, draft: Draft) -> Logits:
        """Logits after each node of `draft` that the last `score` and `grow` did not have, shape (new, num_vocab)."""

    def keep(self, path: Sequence[int]) -> None:
        """Keep the draft nodes on `path` in the cache, drop the others."""

    def clear(self) -> None:
        """Empty the cache."""

    def close(self) -> None:
        """Free the cache; the context is of no use afterwards."""


class LanguageModel(Protocol):
    """A loaded model: its vocabulary, its chat template, and contexts made from it."""

    @property
    def path(self) -> Path:
        """The file it came from."""

    @property
    def num_vocab(self) -> int:
        """Number of token ids, padding included."""

    @property
    def max_ctx(self) -> int:
        """Tokens of context that it was trained for."""

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers have a state instead of a cell for each token: it takes chains only."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """All end-of-generation tokens."""

    @property
    def bos(self) -> int | None:
        """Beginning-of-sequence token, if it has one."""

    @property
    def eos(self) -> int | None:
        """End-of-sequence token, if it has one."""

    @property
    def chat_template(self) -> str | None:
        """Jinja source, if it has one."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text, with or without BOS and the like, taking the text of special tokens for them or not."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token as they appear in an answer; special tokens are empty unless `special`."""

    def open_context(self, options: ContextOptions) -> Context:
        """A new cache for it."""

    def close(self) -> None:
        """Free the weights."""


class Candidate(NamedTuple):
    """A token that could be drawn next, not drawn yet.

    Attributes:
        confidence: the drafter's estimate that it is accepted, given its parent and not its earlier siblings.
        reach: probability that it and everything before it in its branch is accepted.
        depth: its position in the branch, from 1.
    """

    confidence: float
    reach: float
    depth: int


class LengthPolicy(Protocol):
    """Decides how long a draft gets; learns from each round.

    A class that derives from this protocol needs only `draft_more`, `keep_last` and `learn`.
    """

    @property
    def watches(self) -> bool:
        """Whether a round without a draft should tell how sure the target was."""
        return False

    def draft_more(self, confidences: Sequence[float]) -> bool:
        """Whether to draft one more token after those with these confidences (none yet: whether to draft at all)."""

    def keep_last(self, confidences: Sequence[float]) -> bool:
        """Whether the token drafted last, now with its own confidence known, is worth scoring."""

    def learn(self, record: Round) -> None:
        """Take a finished round into account."""

    def of(self, drafter: str, num_behind: int, limit: int) -> LengthPolicy:
        """The policy for one drafter in this round.

        Args:
            drafter: its name.
            num_behind: tokens that it has to read for its first proposal.
            limit: the most tokens it may propose.
        """
        del drafter, num_behind, limit
        return self

    def acceptance(self, confidence: float, rank: int) -> float:
        """Probability that a token is accepted that came up, given its parent and not its `rank` earlier siblings."""
        del rank
        return confidence

    def branch(self, confidences: Sequence[float], candidates: Sequence[Candidate]) -> tuple[int, bool]:
        """What to draw next: with one candidate at a time a chain, with several a tree, the best first.

        Args:
            confidences: of the tokens drawn so far.
            candidates: at least one, by descending reach.

        Returns:
            How many of the candidates to draw, and whether to go on behind them with one more draft step; the draft
            ends with them otherwise.
        """
        shown = [*confidences, candidates[0].confidence]
        return (1, self.draft_more(shown)) if self.keep_last(shown) else (0, False)

    def is_promising(self, confidences: Sequence[float], confidence: float) -> bool:
        """Whether `branch` might take one more token of a chain, whose confidence is this at the most."""
        return self.keep_last([*confidences, confidence])

    def best_length(self, confidences: Sequence[float]) -> int:
        """How many tokens to score of a chain that is ready and cost nothing; only for point masses."""
        num = 0
        while num < len(confidences) and self.draft_more(confidences[:num]) and self.keep_last(confidences[: num + 1]):
            num += 1
        return num

    def gain(self, confidences: Sequence[float] | None = None) -> float:
        """Tokens a round is expected to be worth more than plain decoding, the time it takes counted as tokens.

        Args:
            confidences: of a chain that is ready; None before anything is drafted.
        """
        return 1.0 if confidences is None else math.fsum(confidences[: self.best_length(confidences)])

    def spent(self, num_tokens: int, seconds: float) -> None:
        """Take a draft step into account: tokens decoded by it, and how long it took."""
        del num_tokens, seconds

    @property
    def decision(self) -> Decision | None:
        """Why the last draft got its length."""
        return None


class Drafter(Protocol):
    """Anything that proposes tokens."""

    @property
    def decode_s(self) -> float:
        """Seconds spent in a draft model's decode calls so far; 0.0 without one."""

    def propose(self, tokens: Sequence[int], policy: LengthPolicy, limit: int) -> Draft:
        """Propose what follows `tokens`: at most `limit` tokens deep, as long as the policy wants more."""
