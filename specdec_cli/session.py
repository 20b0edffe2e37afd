"""Target and drafter, loaded and ready: what the commands and the Python API work with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from specdec_cli import conversation, interrupt, measuring, selfcheck
from specdec_cli.acceptance import Acceptance, foreign_prior, match_prior, model_prior, sibling_prior
from specdec_cli.choice import choose_models, fetch_files
from specdec_cli.constraint import Grammar, GrammarConstraint, Vocabulary
from specdec_cli.conversation import Message
from specdec_cli.cost import CostModel
from specdec_cli.draft_length import SIBLING, CostRule, Fixed
from specdec_cli.drafters import AutoDrafter, Intersected, ModelDrafter, NgramDrafter, NoDrafter, Retokenized
from specdec_cli.engine import speculate
from specdec_cli.errors import BackendError, ContextFullError, ModelLoadError, SpecdecError, UsageError
from specdec_cli.llama import (
    KV_TYPES,
    Model,
    default_threads,
    find_translator,
    require_tokenizer,
    supports_gpu_offload,
)
from specdec_cli.memory import LEAST_CTX, Fit, Headers, Placement, free_here, max_ctx
from specdec_cli.ngram_store import NgramStore, default_path, has_default, vocabulary_fingerprint
from specdec_cli.repetition import Breakers, find_breakers
from specdec_cli.sampling import Sampler, top_two
from specdec_cli.sources import SilentProgress
from specdec_cli.stats import NearTie, Stats
from specdec_cli.text import StopStrings, TextDecoder
from specdec_cli.translation import BothPrompts, Translator
from specdec_cli.trial import admit
from specdec_cli.tuned import Tuned, find_tuned
from specdec_cli.types import (
    AUTO_DRAFTING,
    MAX_DRAFT_TOKENS,
    Context,
    ContextOptions,
    Draft,
    Drafter,
    Drafting,
    Event,
    Finish,
    FinishReason,
    LanguageModel,
    LengthPolicy,
    Logits,
    Round,
    SamplingParams,
    Token,
)
from specdec_cli.verify import OnTrial

DEFAULT_MAX_TOKENS = 2048

_MAX_CHANGE = 1.3
"""Costs that a session finds to be off by more were measured while something else was running."""

_ALL_LAYERS = 1000
"""More than any model has."""

_MAX_BYTES_PER_TOKEN = 32
"""No text comes near this average."""

DraftMethod = Literal["same-tokens", "string-level", "token-level"]
"""How a draft model's tokens become the target's: they are the same ones, or see `specdec_cli.drafters.retokenize`."""

_ENOUGH_SHARED, _ALL_SHARED = 0.9, 0.99
"""Shares of the target's tokens in a text above which drafting in shared tokens is better: sampled, and always."""

_SPARE_DRAFT_CTX = 1.5
"""Texts in other scripts than the sample's may take many more draft tokens."""

_MAX_CONVERSATIONS = 32


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a pair is loaded and drafted with.

    Attributes:
        drafting: what proposes tokens, and how many.
        num_ctx: tokens of context; None is what prompt and answer need, up to the model's own limit.
        gpu_layers: target layers on the GPU; None is all when the build supports offload.
        draft_gpu_layers: the same for the draft model.
        threads: for decoding; None is every physical core.
        kv_type: type of both caches, a name of `specdec_cli.llama.KV_TYPES`.
        use_tuned: draft with the file and settings that `specdec tune` found, where it did.
        ngram_cache: n-gram statistics to draft from and to add answers to; None reads what `specdec ngram build` made.
        force: load also where the memory seems too small.

    Raises:
        UsageError: a value outside its range.
    """

    drafting: Drafting = AUTO_DRAFTING
    num_ctx: int | None = None
    gpu_layers: int | None = None
    draft_gpu_layers: int | None = None
    threads: int | None = None
    kv_type: str = "f16"
    use_tuned: bool = True
    ngram_cache: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        _require("ctx", self.num_ctx, self.num_ctx is None or 0 < self.num_ctx < 2**31, "from 1 to 2^31 - 1")
        _require("threads", self.threads, self.threads is None or 0 < self.threads <= 512, "from 1 to 512")
        _require("kv-type", self.kv_type, self.kv_type in KV_TYPES, f"one of {', '.join(KV_TYPES)}")


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise UsageError(f"--{name} must be {allowed}, not {value}", "see `specdec run --help`")


@dataclass(frozen=True, slots=True)
class Structure:
    """Where an answer ends and what form it has.

    Attributes:
        stop: the answer ends before the first of these texts.
        ignore_eos: the model cannot end the answer.
        grammar: what the answer keeps to.

    Raises:
        UsageError: an empty stop text, or settings that exclude each other.
    """

    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether the answer has a form."""
        return self.grammar is not None

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise UsageError("--stop must not be empty", "leave it out to stop where the model does")
        if self.ignore_eos and self.grammar:
            raise UsageError(f"--ignore-eos and {self.grammar.name} exclude each other", "leave one of them out")


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer.

    Attributes:
        text: the answer.
        tokens: its token ids.
        reason: why it ended.
        seed: of the random generator used.
        stats: what it took.
    """

    text: str
    tokens: tuple[int, ...]
    reason: FinishReason
    seed: int
    stats: Stats


class Session:
    """A loaded target and, with a draft model, speculation on top of it.

    Use it as a context manager: both models are freed at the end of the block. `Session.open` loads files. Several
    threads, or several streams that are read in turns, may use one session; their rounds follow one another.

    Args:
        target: the target; owned by the session.
        draft_model: the draft model, or None for plain decoding; owned too.
        options: how to draft.
        warning: something the user should be told about the backend.
        tuned: what tuning found for the draft model; None when it was not tuned.
        fit: against what caches are checked before they are made; None checks nothing.
        translator: between the two tokenizers; None for models that share a vocabulary.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft_model: LanguageModel | None = None,
        options: SessionOptions | None = None,
        warning: str = "",
        tuned: Tuned | None = None,
        fit: Fit | None = None,
        translator: Translator | None = None,
    ) -> None:
        self.target = target
        self.draft_model = draft_model
        self.options = options or SessionOptions()
        self.warning = warning
        self.tuned = tuned
        self._fit = fit
        self.translator = translator
        self._contexts: tuple[Context, Context | None] | None = None
        self._owned: list[Context] = []
        self._num_streams = 0
        self._lock = threading.RLock()
        models = [model for model in (draft_model, target) if model is not None]
        # Also when nobody closes it: gigabytes must not wait for the end of the program.
        self._free = weakref.finalize(self, _free, self._owned, models)
        self._costs: CostModel | None = None
        self._measured: CostModel | None = None
        self._ngrams: NgramStore | None = None
        self._acceptances: dict[SamplingParams, dict[str, Acceptance]] = {}
        self._vocabulary: Vocabulary | None = None
        self._breakers: dict[tuple[str, ...], Breakers] = {}
        self._conversations: OrderedDict[tuple[int, ...], list[Message]] = OrderedDict()

    @classmethod
    def open(cls, target: Path, draft: Path | None = None, options: SessionOptions | None = None) -> Session:
        """Load two GGUF files; where their tokenizers differ, drafts are translated.

        Args:
            target: path of the target.
            draft: path of the draft model, or None for plain decoding.
            options: how to load and draft.

        Raises:
            ModelMissingError: a file is not there.
            ModelLoadError: a file is not a model that this llama.cpp can load.
            IncompatibleModelsError: the draft model's tokens cannot be translated.
            OutOfMemoryError: they do not fit into the memory of this machine.
            BackendError: llama.cpp does not work on this machine.
        """
        options = options or SessionOptions()
        draft = draft if options.drafting.uses_model else None
        tuned = find_tuned(target, draft) if draft is not None and options.use_tuned else None
        if tuned is not None and not _is_loadable(tuned.path):
            tuned = None
        draft = draft if tuned is None else tuned.path
        fit = _fit(admit(target), None if draft is None else admit(draft), options, tuned)
        if not options.force:
            fit.check(min(options.num_ctx or LEAST_CTX, max_ctx(fit.target)))
        verdict = selfcheck.check()
        extra = verdict.use_extra_bufts
        wanted = [functools.partial(Model, target, gpu_layers=options.gpu_layers, use_extra_bufts=extra)]
        if draft is not None:
            wanted.append(functools.partial(Model, draft, gpu_layers=options.draft_gpu_layers, use_extra_bufts=extra))
        with contextlib.ExitStack() as stack:
            target_model, *rest = [stack.enter_context(model) for model in _load_all(wanted)]
            draft_model = rest[0] if rest else None
            require_tokenizer(target_model)
            translator = None if draft_model is None else find_translator(target_model, draft_model)
            # Looked up over the whole vocabulary, once: now and not within the first answer.
            _ = target_model.stop_tokens
            stack.pop_all()
        fit = fit.with_draft_ctx(_draft_ctx_ratio(translator))
        warning = verdict.warning if verdict.is_new else ""
        return cls(target_model, draft_model, options, warning, tuned, None if options.force else fit, translator)

    def close(self) -> None:
        """Free caches and models."""
        with self._lock:
            self._contexts = None
            try:
                self._review_costs()
                if self._ngrams is not None:
                    self._ngrams.close()
            finally:
                self._free()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def decode_s(self) -> tuple[float, float]:
        """Seconds in decode calls of the present contexts: the target's and the draft model's."""
        target, draft = self._contexts or (None, None)
        return (target.decode_s if target else 0.0), (draft.decode_s if draft else 0.0)

    @property
    def num_decoded(self) -> tuple[int, int]:
        """Tokens given to decode calls of the present contexts: the target's and the draft model's."""
        target, draft = self._contexts or (None, None)
        return (target.num_decoded if target else 0), (draft.num_decoded if draft else 0)

    @property
    def plain_step_s(self) -> float | None:
        """Seconds of a plain decoding step, as far as it was measured; None before."""
        return None if self._costs is None else self._costs.target(1)

    @property
    def num_ctx(self) -> int | None:
        """Tokens of context of the last answer; None before the first."""
        return self._contexts[0].num_ctx if self._contexts else None

    def encode(
        self, prompt: str | Sequence[Message], *, system: str | None = None, raw: bool | None = False
    ) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: a user message, or a whole conversation.
            system: a system message in front of it.
            raw: take the prompt as bare text, without the chat template; None does where the target has none.

        Raises:
            UsageError: nothing to encode.
            ContextFullError: far more text than the model takes.
            ModelLoadError: the chat template is missing or fails.
        """
        self._check_open()
        if isinstance(prompt, str):
            self.check_text(prompt)
        if self.target.chat_template is None if raw is None else raw:
            if not isinstance(prompt, str) or system is not None:
                raise UsageError("--raw takes a bare text: no messages and no --system", "leave out `--system`")
            tokens = conversation.encode_raw(self.target, prompt)
        else:
            messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            tokens = conversation.encode_chat(self.target, messages)
            self.remember_conversation(tokens, messages)
        if not tokens:
            raise UsageError("the prompt is empty", 'try `specdec run "your question"`')
        return tokens

    def remember_conversation(self, tokens: Sequence[int], messages: list[Message]) -> None:
        """Tell which conversation a prompt stands for: a draft model of another family reads its own form.

        Args:
            tokens: of the prompt, without an answer that it may go on with.
            messages: the conversation.
        """
        if self.translator is not None:
            self._conversations[tuple(tokens)] = messages
            while len(self._conversations) > _MAX_CONVERSATIONS:
                self._conversations.popitem(last=False)

    def stream(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        structure: Structure | None = None,
        drafting: Drafting | None = None,
        num_answered: int = 0,
        on_trial: OnTrial | None = None,
    ) -> Iterator[Event]:
        """Generate an answer.

        Args:
            prompt: a user message, a conversation, or token ids from `encode`.
            sampling: settings; the seed is drawn when it has none.
            max_tokens: the most tokens of the answer.
            structure: stop strings and the form of the answer.
            drafting: in place of the session's own; `PLAIN_DECODING` is the baseline.
            num_answered: of the prompt's tokens, the last ones that are the beginning of the answer, which goes on.
            on_trial: told about every draft token that was tried; for checks.

        Yields:
            The engine's events; `Token.text` is the text that became complete, `Finish.text` what was left.

        Raises:
            ContextFullError: the prompt does not fit.
        """
        if max_tokens < 1:
            raise UsageError(f"max_tokens must be 1 or more, not {max_tokens}")
        params = with_seed(sampling or SamplingParams())
        structure, drafting = structure or Structure(), drafting or self.options.drafting
        tokens = self._tokens(prompt)
        params = self._without_eos(params) if structure.ignore_eos else params
        constraint = self._constraint(structure, len(tokens) - num_answered)
        rng = np.random.default_rng(params.seed)
        # Whoever prepares may measure, and must not lose the contexts to another stream that needs larger ones.
        with self._lock:
            target, draft = self.prepare(len(tokens), max_tokens)
            events = speculate(
                target,
                self._drafter(drafting, draft, params, rng, constraint, tokens[: len(tokens) - num_answered]),
                self._policy(drafting, params),
                Sampler(params, self.target.num_vocab, constraint, self._breakers_for(params)),
                rng,
                tokens,
                max_tokens=max_tokens,
                stop_tokens=self.target.stop_tokens,
                on_trial=on_trial,
            )
            self._num_streams += 1
        answer: list[int] = []
        try:
            for event in self._with_text(self._locked(events), tokens, structure, constraint, num_answered):
                if isinstance(event, Token):
                    answer.append(event.id)
                yield event
        finally:
            with self._lock:
                self._num_streams -= 1
                if self.options.ngram_cache is not None and self._ngrams is not None:
                    self._ngrams.add(answer)

    def _locked(self, events: Iterator[Event]) -> Iterator[Event]:
        """One round at a time: the caches are brought in line at its beginning, whoever used them before."""
        while True:
            with self._lock:
                self._check_open()
                event = next(events, None)
            if event is None:
                return
            yield event

    def _with_text(
        self,
        events: Iterator[Event],
        prompt: Sequence[int],
        structure: Structure,
        constraint: GrammarConstraint | None,
        num_answered: int,
    ) -> Iterator[Event]:
        """The events with their text, up to a stop string, and closed where a grammar's sentence was cut."""
        decoder, stops = TextDecoder(self.target.piece), StopStrings(structure.stop)
        tokens = list(prompt)
        for token in tokens[len(tokens) - num_answered :]:
            # Half a character, or half a stop string, goes on too.
            stops.push(decoder.push(token))
        num_shown = 0
        for event in events:
            if isinstance(event, Token):
                if stops.found:
                    continue
                tokens.append(event.id)
                num_shown += 1
                event = dataclasses.replace(event, text=stops.push(decoder.push(event.id)))
            elif isinstance(event, Finish):
                for closer in constraint.closing(tokens) if constraint and event.reason != "eog" else ():
                    yield Token(closer, "closing", stops.push(decoder.push(closer)))
                event = dataclasses.replace(event, text=stops.push(decoder.flush()) + stops.flush())
            elif isinstance(event, Round):
                # What a round gave beyond a stop string is no part of the answer.
                num_accepted = min(event.num_accepted, num_shown) if stops.found else event.num_accepted
                event = dataclasses.replace(event, num_tokens=num_shown, num_accepted=num_accepted)
                num_shown = 0
            yield event
            if stops.found and isinstance(event, Round):
                yield Finish("stop")
                return

    def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        structure: Structure | None = None,
        drafting: Drafting | None = None,
    ) -> Result:
        """Like `stream`, in one piece.

        Raises:
            ContextFullError: the prompt does not fit.
        """
        params = with_seed(sampling or SamplingParams())
        stats, tokens, text = Stats(), list[int](), list[str]()
        reason: FinishReason = "length"
        with interrupt.stop_on_sigint():
            for event in self.stream(
                prompt, sampling=params, max_tokens=max_tokens, structure=structure, drafting=drafting
            ):
                stats.add(event)
                if isinstance(event, Token) and event.source != "closing":
                    tokens.append(event.id)
                if isinstance(event, Token | Finish):
                    text.append(event.text)
                if isinstance(event, Finish):
                    reason = event.reason
        assert params.seed is not None
        return Result("".join(text), tuple(tokens), reason, params.seed, stats)

    def clear(self) -> None:
        """Empty both caches, and forget what answers taught about drafters: the next one is as in a new process."""
        self._acceptances.clear()
        for context in self._contexts or ():
            if context is not None:
                context.clear()

    def near_tie(
        self,
        prompt: Sequence[int],
        first: Sequence[int],
        second: Sequence[int],
        sampling: SamplingParams | None = None,
        structure: Structure | None = None,
    ) -> NearTie | None:
        """Where two greedy answers to the same prompt part, with the target's two best logits in plain decoding there.

        What they have in common is decoded once more, token by token from an empty cache: that is plain decoding.

        Returns:
            None when they are equal.
        """
        shorter = min(len(first), len(second))
        position = next((i for i in range(shorter) if first[i] != second[i]), shorter)
        if position == len(first) == len(second):
            return None
        params, structure = sampling or SamplingParams(), structure or Structure()
        params = self._without_eos(params) if structure.ignore_eos else params
        constraint = self._constraint(structure, len(prompt))
        sampler = Sampler(params, self.target.num_vocab, constraint, self._breakers_for(params))
        target, _ = self.prepare(len(prompt), position + 1)
        tokens = [*prompt, *first[:position]]
        target.clear()
        for size in range(len(prompt), len(tokens) + 1):
            target.sync(tokens[:size])
            row = target.score()[0]
        row = row.copy()
        best = top_two(*sampler.candidates(row, tokens))
        texts = [self.target.piece(token, special=True).decode("utf-8", "replace") for token, _ in best]
        return NearTie(position, (texts[0], texts[1]), (best[0][1], best[1][1]), _batch_noise(target, tokens, row))

    def _check_open(self) -> None:
        if not self._free.alive:
            raise UsageError("the session is closed", "load the models again")

    def check_text(self, text: str) -> None:
        """Look at a message before it is tokenized, which takes minutes for what cannot fit anyway.

        Raises:
            UsageError: nothing in it.
            ContextFullError: far more text than the model takes.
        """
        if not text.strip():
            raise UsageError("the prompt is empty", 'try `specdec run "your question"`')
        limit = _MAX_BYTES_PER_TOKEN * self.target.max_ctx
        if len(text) > limit:
            raise ContextFullError(
                f"the prompt has {len(text)} characters, the model takes {self.target.max_ctx} tokens",
                "use a shorter prompt",
            )

    def _tokens(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        tokens = [item for item in prompt if isinstance(item, int)]
        return tokens or self.encode([item for item in prompt if not isinstance(item, int)])

    def _drafter(
        self,
        drafting: Drafting,
        context: Context | None,
        params: SamplingParams,
        rng: np.random.Generator,
        constraint: GrammarConstraint | None,
        prompt: Sequence[int],
    ) -> Drafter:
        if drafting.is_off:
            return NoDrafter()
        stop_tokens = self.target.stop_tokens
        ngram = NgramDrafter(stop_tokens, self.ngrams, self.target.num_vocab)
        if context is None or not drafting.uses_model:
            return NoDrafter() if drafting.drafter in {"model", "tree"} else ngram
        model = self._model_drafter(drafting, context, params, rng, constraint, prompt)
        return AutoDrafter(ngram, model) if drafting.drafter == "auto" else model

    def _model_drafter(
        self,
        drafting: Drafting,
        context: Context,
        params: SamplingParams,
        rng: np.random.Generator,
        constraint: GrammarConstraint | None,
        prompt: Sequence[int],
    ) -> ModelDrafter | Retokenized:
        translator, num_vocab = self.translator, self.target.num_vocab
        if translator is None:
            # Vocabularies of a pair can differ in padding: draft what both have.
            num_vocab = min(num_vocab, context.num_vocab)
            sampler = Sampler(params, num_vocab, constraint, self._breakers_for(params))
            return ModelDrafter(context, sampler, rng, self.target.stop_tokens, self._num_leaves(drafting, params))
        translation = translator.translation(functools.partial(self._draft_prompt, prompt))
        if self.draft_method(params, is_constrained=constraint is not None) == "token-level":
            sampler = Sampler(params, num_vocab, constraint, self._breakers_for(params))
            return Intersected(
                context, translation, translator.shared, sampler, num_vocab, rng, self.target.stop_tokens
            )
        may_end = (self.target.eos, -np.inf) not in params.logit_bias
        return Retokenized(context, translator, translation, may_end=may_end, constraint=constraint)

    def draft_method(self, params: SamplingParams, *, is_constrained: bool = False) -> DraftMethod | None:
        """How the draft model's tokens become the target's in an answer; None without a draft model.

        Args:
            params: settings of the answer.
            is_constrained: whether it keeps to a grammar, which only drafts in the target's tokens can follow.
        """
        if self.draft_model is None:
            return None
        if self.translator is None:
            return "same-tokens"
        enough = _ALL_SHARED if params.is_greedy and not is_constrained else _ENOUGH_SHARED
        return "token-level" if self.translator.efficiency.shared >= enough else "string-level"

    def _draft_prompt(self, prompt: Sequence[int]) -> BothPrompts | None:
        """A conversation as the target's and as the draft model's own template write it; None for other prompts."""
        messages = self._conversations.get(tuple(prompt))
        if messages is None or self.draft_model is None:
            return None
        try:
            return prompt, conversation.encode_chat(self.draft_model, messages)
        except ModelLoadError:
            # Without a template of its own it reads the target's prompt as text.
            return None

    def _policy(self, drafting: Drafting, params: SamplingParams) -> LengthPolicy:
        if drafting.is_off:
            return Fixed(0)
        if drafting.num_draft_tokens is not None:
            return Fixed(drafting.num_draft_tokens, drafting.min_confidence)
        leaves = self._num_leaves(drafting, params)
        if not params.is_greedy or params.can_drop_best:
            # Sampled answers depend on where drafts end: by costs that stay the same, and with nothing left of the
            # answers before, a seed repeats its answer.
            observed = self.costs
            assert self._measured is not None
            return CostRule(self._measured, self._new_acceptances(), MAX_DRAFT_TOKENS, observed, leaves)
        setting = dataclasses.replace(params, seed=None)
        if setting not in self._acceptances:
            self._acceptances[setting] = self._new_acceptances()
        return CostRule(self.costs, self._acceptances[setting], MAX_DRAFT_TOKENS, max_leaves=leaves)

    def _new_acceptances(self) -> dict[str, Acceptance]:
        """What confidences are worth, as far as known before anything was drafted."""
        is_foreign = self.translator is not None
        # Of a token of the target all its draft tokens have to be sure.
        model = Acceptance(foreign_prior if is_foreign else model_prior, is_sure=not is_foreign)
        return {"model": model, SIBLING: Acceptance(sibling_prior), "ngram": Acceptance(match_prior)}

    def _num_leaves(self, drafting: Drafting, params: SamplingParams) -> int:
        # Mirostat's budget follows one path, and would be another at each turn to a branch.
        return 1 if params.mirostat else min(drafting.num_branches, self.num_branches)

    @property
    def num_branches(self) -> int:
        """Leaves of the widest tree that both contexts take; 1 where only chains are drafted."""
        contexts = [context for context in self._contexts or () if context is not None]
        return min((context.max_leaves for context in contexts), default=1)

    @property
    def ngrams(self) -> NgramStore | None:
        """N-gram statistics of the user's own text, opened on first use; None without any."""
        if self._ngrams is None:
            path = self.options.ngram_cache
            if path is None:
                # Most users have none, and a fingerprint takes as long as a token of the answer.
                path = default_path(self._fingerprint) if has_default() else None
                if path is None or not path.exists():
                    return None
            self._ngrams = NgramStore.open(path, self._fingerprint)
        return self._ngrams

    @functools.cached_property
    def _fingerprint(self) -> str:
        return vocabulary_fingerprint(self.target)

    def use_ngrams(self, path: Path | None) -> None:
        """Draft from these n-gram statistics from now on, see `SessionOptions.ngram_cache`."""
        if path != self.options.ngram_cache:
            if self._ngrams is not None:
                self._ngrams.close()
            self._ngrams, self.options = None, dataclasses.replace(self.options, ngram_cache=path)

    @property
    def costs(self) -> CostModel:
        """What decoding costs here; measured on first use, unless it is remembered for machine, files and settings."""
        contexts = self._contexts or self.prepare(1, 1)
        if self._costs is None:
            (target, draft), key = contexts, self._costs_key
            measured = measuring.recall(key)
            if measured is None or (draft is not None and "model" not in measured.drafts):
                load = measuring.Load()
                measured = measuring.measure(target, {} if draft is None else {"model": draft})
                self.scale(measured)
                fits = all(measuring.fits(context) for context in contexts if context is not None)
                # Times that other programs have stretched would be believed for good.
                if fits and not load.is_crowded():
                    measuring.remember(key, measured)
            # Copied, so that they are the same numbers as those that will be remembered.
            self._measured, self._costs = measured.copy(), measured.copy()
        return self._costs

    def scale(self, measured: CostModel) -> None:
        """Let a draft step count for one token of the target, which may take more or fewer draft tokens."""
        if self.translator is not None:
            factor = self.translator.efficiency.draft_tokens
            measured.drafts = {name: timing.scaled(factor) for name, timing in measured.drafts.items()}

    def _review_costs(self) -> None:
        """Remember what was seen instead of what was measured, where that is something else."""
        if self._costs is not None and self._measured is not None:
            change = self._costs.ratios() / self._measured.ratios()
            if change.min() < 1 / _MAX_CHANGE or change.max() > _MAX_CHANGE:
                measuring.remember(self._costs_key, self._costs)

    @property
    def _costs_key(self) -> str | None:
        files = [self.target.path, None if self.draft_model is None else self.draft_model.path]
        options = self.options
        settings = {"threads": options.threads or default_threads(), "kv": options.kv_type, "gpu": options.gpu_layers}
        return measuring.key(files, {**settings, "draft gpu": options.draft_gpu_layers, "tuned": self.tuned})

    def _without_eos(self, params: SamplingParams) -> SamplingParams:
        never = tuple((token, -np.inf) for token in sorted(self.target.stop_tokens))
        return dataclasses.replace(params, logit_bias=params.logit_bias + never)

    def _constraint(self, structure: Structure, num_prompt: int) -> GrammarConstraint | None:
        if structure.grammar is None:
            return None
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self.target)
        return GrammarConstraint(structure.grammar, self._vocabulary, num_prompt)

    def _breakers_for(self, params: SamplingParams) -> Breakers:
        if params.dry_window == 0:
            return {}
        if params.dry_breakers not in self._breakers:
            self._breakers[params.dry_breakers] = find_breakers(params.dry_breakers, self.target)
        return self._breakers[params.dry_breakers]

    def prepare(self, num_prompt: int, max_tokens: int) -> tuple[Context, Context | None]:
        """Contexts of target and draft model that hold prompt and answer; large enough ones are kept, caches included.

        Args:
            num_prompt: tokens of the prompt.
            max_tokens: the most tokens of the answer.

        Raises:
            ContextFullError: the prompt is longer than the model takes.
            UsageError: more context was asked for than the model was trained for.
            OutOfMemoryError: the caches would not fit into the memory.
            BackendError: no context of this size could be made.
        """
        self._check_open()
        limit = self.target.max_ctx
        if num_prompt >= limit:
            raise ContextFullError(
                f"the prompt has {num_prompt} tokens, the model takes {limit}", "use a shorter prompt"
            )
        wanted = self.options.num_ctx or min(num_prompt + max_tokens, limit)
        if wanted > limit:
            raise UsageError(f"--ctx {wanted} is more than the model was trained for ({limit})", f"use `--ctx {limit}`")
        if self._contexts and self._contexts[0].num_ctx >= wanted:
            return self._contexts
        if self._fit is not None:
            self._fit.check(wanted, num_prompt + 1)
        self._close_contexts()
        target = self._open(self.target, wanted)
        self._contexts = target, self._open_draft(wanted)
        if not self.options.drafting.is_off:
            # Now and not within the first answer.
            _ = self.ngrams
            if self.options.drafting.num_draft_tokens is None:
                _ = self.costs
        return self._contexts

    def _open_draft(self, num_ctx: int) -> Context | None:
        """The draft model's context, which comes last: what is missing then is told as what it is."""
        model = self.draft_model
        if model is None:
            return None
        try:
            return self._open(model, min(self._draft_ctx(num_ctx), model.max_ctx), self.tuned)
        except BackendError as error:
            self._close_contexts()
            raise BackendError(
                f"the target took the memory, and none was left for the draft model: {error.message}",
                "use a smaller `--ctx`, `--kv-type q8_0`, `--draft-gpu-layers 0` where a GPU is used, or `--no-draft`",
            ) from None

    def _draft_ctx(self, num_ctx: int) -> int:
        """Tokens that the draft model may need for a text of so many tokens of the target."""
        return int(num_ctx * _draft_ctx_ratio(self.translator))

    def _open(self, model: LanguageModel, num_ctx: int, tuned: Tuned | None = None) -> Context:
        # Translated drafts are chains.
        takes_trees = self.draft_model is not None and self.translator is None
        leaves = self.options.drafting.num_branches if takes_trees else 1
        options = ContextOptions(num_ctx, self.options.threads, self.options.kv_type, leaves)
        if tuned is not None:
            # What the user chose comes first; llama.cpp takes quantized caches with flash attention only.
            options = dataclasses.replace(options, threads=options.threads or tuned.threads)
            if options.kv_type == "f16":
                options = dataclasses.replace(options, kv_type=tuned.kv_type, flash_attention=tuned.flash_attention)
        context = model.open_context(options)
        self._owned.append(context)
        return context

    def _close_contexts(self) -> None:
        """Free the caches, unless an answer that is still being generated needs them: those go with the session."""
        if self._num_streams == 0:
            while self._owned:
                self._owned.pop().close()
        self._contexts = None


def _batch_noise(target: Context, tokens: Sequence[int], row: Logits) -> float:
    """Root mean square change of a row when its last tokens, or all, are decoded in one batch, or behind a tree."""
    size = min(4, len(tokens) - 1)
    if size < 1:
        return 0.0
    target.sync(tokens[:-size])
    noise = _difference(row, target.score(Draft.chain(tokens[-size:]))[-1])
    # A first round decodes the end of the prompt together with a draft, and every later row reads what that left.
    target.clear()
    target.sync(tokens)
    noise = max(noise, _difference(row, target.score()[0]))
    if target.max_leaves > 1:
        # At one place nothing may change by chance.
        noise = max(noise, *(_order_noise(target, tokens, row, size) for size in (4, 8, 12)))
    return noise


def _order_noise(target: Context, tokens: Sequence[int], row: Logits, size: int) -> float:
    """What a tree leaves behind stands in another order in the cache, and sums are rounded in that order."""
    if not 1 < size < len(tokens):
        return 0.0
    other = (tokens[-size] + 1) % target.num_vocab
    target.sync(tokens[:-size])
    target.score(Draft((other, *tokens[-size:-1]), (-1, -1, *range(1, size - 1)), (None,) * size, (1.0,) * size))
    target.keep(range(1, size))
    target.sync(tokens)
    return _difference(row, target.score()[0])


def _difference(row: Logits, other: Logits) -> float:
    both = np.isfinite(row) & np.isfinite(other)
    return float(np.sqrt(np.mean((row[both] - other[both]) ** 2, dtype=np.float64)))


def _fit(target: Headers, draft: Headers | None, options: SessionOptions, tuned: Tuned | None) -> Fit:
    """A pair against the memory that is free now, before anything is loaded."""
    placement = Placement(
        options.kv_type,
        tuned.kv_type if tuned is not None and options.kv_type == "f16" else None,
        _layers_on_gpu(options.gpu_layers),
        _layers_on_gpu(options.draft_gpu_layers),
        keeps_windows=draft is None or options.drafting.num_branches == 1,
    )
    return Fit(target, draft, placement, free_here())


def _draft_ctx_ratio(translator: Translator | None) -> float:
    """Tokens of the draft model's context for each of the target's."""
    return 1.0 if translator is None else _SPARE_DRAFT_CTX * max(1.0, translator.efficiency.draft_tokens)


def _layers_on_gpu(wanted: int | None) -> int:
    if not supports_gpu_offload():
        return 0
    return _ALL_LAYERS if wanted is None or wanted < 0 else wanted


def _is_loadable(path: Path) -> bool:
    """Whether a tuned file is still there and whole as far as its header tells; another process may have dropped it."""
    try:
        admit(path)
    except SpecdecError:
        return False
    return True


def _load_all(wanted: Sequence[Callable[[], Model]]) -> list[Model]:
    """Load models side by side: one reads its file while another repacks its weights.

    Raises:
        ModelLoadError: the first of them that cannot be loaded, with its own reason.
    """
    with ThreadPoolExecutor(len(wanted)) as pool:
        futures = [pool.submit(load) for load in wanted]
        interrupted = False
        try:
            wait(futures)
        except KeyboardInterrupt:
            interrupted = True
            interrupt.request_stop()
            wait(futures)
            interrupt.clear_stop()
    failures: list[BaseException | None] = [future.exception() for future in futures]
    if interrupted and not any(failures):
        failures[0] = KeyboardInterrupt()
        futures[0].result().close()
    if not any(failures):
        return [future.result() for future in futures]
    for future, failure in zip(futures, failures, strict=True):
        if failure is None:
            future.result().close()
    if any(isinstance(failure, KeyboardInterrupt) for failure in failures):
        raise KeyboardInterrupt
    # Alone, because both wrote their reasons into one log.
    next(load for load, failure in zip(wanted, failures, strict=True) if failure)().close()
    raise next(failure for failure in failures if failure)


def _free(contexts: list[Context], models: list[LanguageModel]) -> None:
    """Contexts first: they point into the models. Unmapping gigabytes takes a moment, so the models go side by side."""
    while contexts:
        contexts.pop().close()
    threads = [threading.Thread(target=model.close) for model in models]
    for thread, model in zip(threads, models, strict=True):
        try:
            thread.start()
        except RuntimeError:
            # At the end of the interpreter no thread can be started.
            model.close()
    for thread in threads:
        if thread.ident is not None:
            thread.join()


def with_seed(params: SamplingParams) -> SamplingParams:
    """The same settings with a seed, drawn when there is none."""
    return params if params.seed is not None else dataclasses.replace(params, seed=secrets.randbits(32))


def load(
    pair: str | None = None,
    *,
    target: Path | str | None = None,
    draft: Path | str | None = None,
    options: SessionOptions | None = None,
    offline: bool = False,
) -> Session:
    """Load a pair, downloading what is missing.

    Args:
        pair: a name from `models.toml`; None is the default pair.
        target: path of a target instead of the pair's, or a source such as `hf:OWNER/REPO:Q4_K_M`; without `pair` it
            comes with the given `draft` only.
        draft: the same for a draft model instead of the pair's.
        options: how to load and draft.
        offline: forbid downloads.

    Returns:
        A session to use as a context manager.

    Raises:
        ModelMissingError: an unknown pair, or a file that is not here while downloads are forbidden.
        DownloadError: no source delivered a file.
        SpecdecError: what `Session` raises.
    """
    choice = choose_models(pair, target, draft)
    options = options or SessionOptions(Drafting(num_draft_tokens=choice.num_draft_tokens))
    progress = SilentProgress()
    return Session.open(*fetch_files(choice, offline=offline, progress=progress), options)
