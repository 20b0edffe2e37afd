"""A conversation over a session: what was said, what of it is sent, how it goes on. It shows nothing."""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from specdec_cli import conversation, interrupt
from specdec_cli.conversation import Message
from specdec_cli.errors import ContextFullError, ModelLoadError, UsageError
from specdec_cli.session import DEFAULT_MAX_TOKENS, Session, Structure, with_seed
from specdec_cli.stats import Stats
from specdec_cli.text import THINK_CLOSE, THINK_OPEN, Thinking
from specdec_cli.types import Drafting, Event, Finish, FinishReason, Prefill, Round, SamplingParams, Token

DEFAULT_CTX = 8192
"""Tokens of context where nobody asked for another size: one cache for the whole conversation."""

OnFull = Literal["drop", "stop", "error"]
AnswerReason = FinishReason | Literal["interrupted"]

_OPENING = re.compile(rf"{THINK_OPEN}\s*\Z")


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its answer.

    Attributes:
        user: the message.
        answer: as it was generated, a thought included.
        reason: why the answer ended.
    """

    user: str
    answer: str
    reason: AnswerReason = "eog"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How answers are generated, from the next one on.

    Attributes:
        sampling: settings; each answer draws a seed when there is none.
        structure: where an answer ends and what form it has.
        drafting: what proposes tokens; None is the session's own.
        max_tokens: the most tokens of an answer.
        on_full: where the context is full, "drop" the oldest turns, "stop" the answer, or "error", which is the
            caller's to act on.

    Raises:
        UsageError: a value outside its range.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    structure: Structure = field(default_factory=Structure)
    drafting: Drafting | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    on_full: OnFull = "drop"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"--max-tokens must be 1 or more, not {self.max_tokens}", "see `specdec chat --help`")
        if self.on_full not in get_args(OnFull):
            raise UsageError(f"--on-full must be drop, stop or error, not {self.on_full}", "see `specdec chat --help`")


@dataclass(slots=True)
class _Answer:
    """An answer under way.

    Attributes:
        num_before: turns in front of it; later ones it replaces.
        num_dropped: of these, how many were no longer sent before it.
        fallback: how many are not, should nothing come of it.
        user: the message.
        prompt: what is sent.
        params: sampling settings with their seed.
        opening: the tag of a thought with which the prompt ended, or nothing.
        tokens: of the answer so far, closing ones left out.
        texts: of the answer so far.
        reason: why it ended, "interrupted" until it does.
        stats: counts and times.
    """

    num_before: int
    num_dropped: int
    fallback: int
    user: str
    prompt: list[int]
    params: SamplingParams
    opening: str
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reason: AnswerReason = "interrupted"
    stats: Stats = field(default_factory=Stats)

    def take(self, event: Event) -> None:
        """Remember what belongs to the answer."""
        self.stats.add(event)
        if isinstance(event, Token | Finish):
            self.texts.append(event.text)
        if isinstance(event, Token) and event.source != "closing":
            self.tokens.append(event.id)
        elif isinstance(event, Finish):
            self.reason = event.reason

    @property
    def text(self) -> str:
        """The answer; a thought that was cut off is closed, so that templates leave it out later."""
        whole = self.opening + "".join(self.texts)
        thinking = Thinking()
        thinking.push(whole)
        return f"{whole}\n{THINK_CLOSE}\n\n" if thinking.is_thinking else whole


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A prompt that fits: the first turn it has, its tokens, and the tag of a thought that it ends with."""

    first: int
    prompt: list[int]
    opening: str


class Chat:
    """A conversation with one pair of models.

    A turn is sent by `send`, `retry` or `edit`. They check and fit the prompt at once, and return the events of the
    answer; however these end, by Ctrl-C too, what was generated is part of the conversation. A message that got no
    token of an answer is not; it is `unanswered`.

    Both caches hold the conversation: a turn decodes what is new. Tokens of an answer stay as they were sampled for as
    long as the template writes the text that they stand for.

    Args:
        session: the models; whoever opened it closes it. Its context is made here, once.
        settings: how to answer.
        system: the system message.
        turns: an earlier conversation.
        num_dropped: of these, the oldest that are no longer sent.

    Raises:
        ModelLoadError: the target has no chat template.
        SpecdecError: the context cannot be made.
    """

    params: SamplingParams
    """Those of the last answer, with its seed."""

    opens_thinking: bool
    """Whether the prompt of the last answer began the thought of a reasoning model."""

    def __init__(
        self,
        session: Session,
        settings: ChatSettings | None = None,
        system: str | None = None,
        turns: Iterable[Turn] = (),
        num_dropped: int = 0,
    ) -> None:
        self.settings = settings or ChatSettings()
        self.system = system
        self.turns = list(turns)
        self.num_dropped = num_dropped
        self._dropped_before = [0] * len(self.turns)
        self.unanswered: str | None = None
        self.answers: list[Stats] = []
        self._num_readings = 0
        self.params = self.settings.sampling
        self.opens_thinking = False
        self.use(session)

    def use(self, session: Session) -> None:
        """Go on with these models.

        Raises:
            ModelLoadError: the target has no chat template.
            SpecdecError: the context cannot be made.
        """
        if session.target.chat_template is None:
            name = session.target.path.name
            raise ModelLoadError(f"`{name}` has no chat template", "`specdec run --raw` completes bare text with it")
        # One size for good: caches of another one would have to be filled anew.
        num_ctx = session.options.num_ctx or min(session.target.max_ctx, DEFAULT_CTX)
        session.options = dataclasses.replace(session.options, num_ctx=num_ctx)
        session.prepare(1, 1)
        self.session = session
        self._held: list[int] = []
        # What was dropped for another context may fit here.
        self._is_new = True

    @property
    def num_ctx(self) -> int:
        """Tokens of context."""
        assert self.session.options.num_ctx is not None
        return self.session.options.num_ctx

    @property
    def num_used(self) -> int:
        """Tokens of the turns that are sent, and of the system message with them; at most the size of the context."""
        if self.num_dropped >= len(self.turns):
            return 0
        text = conversation.render_chat(self.session.target, self.sent, to_answer=False)
        return min(len(conversation.encode_rendered(self.session.target, text, self._held)), self.num_ctx)

    @property
    def num_answers(self) -> int:
        """Answers so far; one that was stopped before its first token is none."""
        return len(self.answers) - self._num_readings

    @property
    def drafting(self) -> Drafting:
        """What proposes tokens."""
        return self.settings.drafting or self.session.options.drafting

    @property
    def stats(self) -> Stats:
        """All answers together."""
        return Stats.total(self.answers)

    @property
    def last_message(self) -> str | None:
        """What `retry` would send again."""
        if self.unanswered is not None:
            return self.unanswered
        return self.turns[-1].user if self.turns else None

    @property
    def sent(self) -> list[Message]:
        """The messages that the next one follows: the system message, and the turns that were not dropped."""
        return self._messages(self.num_dropped, len(self.turns))

    def send(self, text: str) -> Iterator[Event]:
        """A message; the events of its answer.

        Raises:
            UsageError: an empty message.
            ContextFullError: it does not fit.
            ModelLoadError: the chat template fails.
        """
        return self._send(len(self.turns), text)

    def retry(self) -> Iterator[Event]:
        """The last message again; its answer is replaced by what is generated now.

        Raises:
            UsageError: there is none.
            ContextFullError: it does not fit any more.
        """
        if self.last_message is None:
            raise UsageError("there is no message to send again")
        return self.edit(self.last_message)

    def edit(self, text: str) -> Iterator[Event]:
        """A message in place of the last one.

        Raises:
            UsageError: an empty message.
            ContextFullError: it does not fit.
        """
        return self._send(len(self.turns) - (self.unanswered is None and bool(self.turns)), text)

    def undo(self) -> str:
        """Take the last message and its answer back; the message.

        Raises:
            UsageError: there is none.
        """
        message = self.last_message
        if message is None:
            raise UsageError("there is nothing to undo")
        if self.unanswered is None:
            self._cut(len(self.turns) - 1)
        self.unanswered = None
        return message

    def clear(self) -> None:
        """Begin a new conversation; the system message stays."""
        self._cut(0)
        self.unanswered = None

    def replace(self, turns: Sequence[Turn], system: str | None, num_dropped: int = 0) -> None:
        """Go on with another conversation."""
        self.turns, self.system, self.num_dropped, self.unanswered = list(turns), system, num_dropped, None
        self._dropped_before, self._is_new = [0] * len(turns), True

    def _cut(self, num_turns: int) -> None:
        self.num_dropped = self._num_dropped(num_turns)
        del self.turns[num_turns:], self._dropped_before[num_turns:]

    def _num_dropped(self, num_turns: int) -> int:
        """Turns no longer sent, of the first so many: as it was when these were all."""
        before = self._dropped_before[num_turns:] if num_turns < len(self.turns) else []
        return min(before[0] if before else self.num_dropped, num_turns)

    def _send(self, num_before: int, text: str) -> Iterator[Event]:
        self.session.check_text(text)
        self._warm()
        before = self._num_dropped(num_before)
        fitted = self._fit(num_before, text, before)
        if len(fitted.prompt) >= self.num_ctx:
            raise ContextFullError(
                f"the conversation with this message has {len(fitted.prompt)} tokens, the context {self.num_ctx}",
                self._way_out(fitted.first < num_before),
            )
        fallback, self.num_dropped, self._is_new = self.num_dropped, fitted.first, False
        self.params = with_seed(self.settings.sampling)
        self.opens_thinking = bool(fitted.opening)
        return self._run(_Answer(num_before, before, fallback, text, fitted.prompt, self.params, fitted.opening))

    def _way_out(self, has_turns: bool) -> str:
        if has_turns:
            return "`/clear` or `/undo` make room, `--on-full drop` does so by itself, `--ctx` makes the context larger"
        shorter = "a shorter message" if self.system is None else "a shorter message or `/system` message"
        return f"use {shorter}, or start with a larger `--ctx`"

    def _warm(self) -> None:
        """What is measured on first use must not count as decoding for an answer."""
        self.session.prepare(1, 1)
        if not self.drafting.is_off and self.drafting.num_draft_tokens is None:
            _ = self.session.costs

    def _fit(self, num_before: int, user: str, first: int, num_answered: int = 0) -> _Fitted:
        """The prompt, with as few of the oldest turns left out as must be.

        Reading what remains takes a while. So that it does not happen in every turn, half of the context is free
        afterwards.
        """
        room = self.num_ctx - num_answered
        reserve = min(self.settings.max_tokens - num_answered, self.num_ctx // 4)
        fitted = self._fitted(0 if self._is_new else first, num_before, user)
        if fitted.first < first and len(fitted.prompt) + reserve > room:
            fitted = self._fitted(first, num_before, user)
        if self.settings.on_full != "drop" or first == num_before or len(fitted.prompt) + reserve <= room:
            return fitted
        limit = room - max(reserve, self.num_ctx // 2)
        tried = range(first + 1, num_before)
        found = bisect_left(tried, True, key=lambda place: len(self._fitted(place, num_before, user).prompt) <= limit)
        return self._fitted(first + 1 + found, num_before, user)

    def _fitted(self, first: int, num_before: int, user: str) -> _Fitted:
        messages = [*self._messages(first, num_before), {"role": "user", "content": user}]
        text = conversation.render_chat(self.session.target, messages)
        opening = _OPENING.search(text)
        prompt = conversation.encode_rendered(self.session.target, text, self._held)
        return _Fitted(first, prompt, opening[0] if opening else "")

    def _messages(self, first: int, end: int) -> list[Message]:
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[first:end]:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def _run(self, answer: _Answer) -> Iterator[Event]:
        decoded = self.session.num_decoded
        answer.stats = Stats()
        try:
            for event in self._events(answer):
                # What is kept must have been shown.
                with interrupt.hold():
                    answer.take(event)
                    yield event
        finally:
            self._commit(answer, decoded)

    def _commit(self, answer: _Answer, decoded: tuple[int, int]) -> None:
        """However the answer ended: what there is of it belongs to the conversation."""
        self._held = [*answer.prompt, *answer.tokens]
        if answer.tokens or answer.reason != "interrupted":
            num_dropped = self.num_dropped
            self._cut(answer.num_before)
            self.turns.append(Turn(answer.user, answer.text, answer.reason))
            self._dropped_before.append(answer.num_dropped)
            self.num_dropped = num_dropped
            self.unanswered = None
        else:
            self.num_dropped = answer.fallback
            if answer.num_before == len(self.turns):
                self.unanswered = answer.user
        self._count(answer, decoded)

    def _count(self, answer: _Answer, decoded: tuple[int, int]) -> None:
        stats, now = answer.stats, self.session.num_decoded
        if answer.reason == "interrupted":
            stats.stop()
            stats.num_prompt_tokens = len(answer.prompt)
            self._num_readings += not answer.tokens
        stats.num_target_decoded, stats.num_draft_decoded = now[0] - decoded[0], now[1] - decoded[1]
        plain_s = self.session.plain_step_s
        if plain_s is not None and not self.drafting.is_off:
            stats.saved_s = stats.saved_against(plain_s)
        self.answers.append(stats)

    def _events(self, answer: _Answer) -> Iterator[Event]:
        """Of the whole answer: where the context fills, the oldest turns go and it goes on."""
        num_prompt, num_segments, more = len(answer.prompt), 0, True
        while more:
            more, num_rounds = False, answer.stats.num_rounds
            for event in self._segment(answer, num_segments):
                if self._is_full(answer, event) and self._make_room(answer):
                    more, num_segments = True, num_segments + 1
                    break
                if isinstance(event, Prefill):
                    event = dataclasses.replace(event, num_tokens=num_prompt)
                elif isinstance(event, Round):
                    event = dataclasses.replace(event, index=num_rounds + event.index)
                yield event

    def _segment(self, answer: _Answer, index: int) -> Iterator[Event]:
        """From the prompt and what there is of the answer on."""
        seed = answer.params.seed
        # The same seed would draw the same numbers again.
        params = dataclasses.replace(answer.params, seed=None if seed is None else (seed + index) % 2**64)
        settings = self.settings
        messages = [*self._messages(self.num_dropped, answer.num_before), {"role": "user", "content": answer.user}]
        self.session.remember_conversation(answer.prompt, messages)
        return self.session.stream(
            [*answer.prompt, *answer.tokens],
            sampling=params,
            max_tokens=settings.max_tokens - len(answer.tokens),
            structure=settings.structure,
            drafting=settings.drafting,
            num_answered=len(answer.tokens),
        )

    def _is_full(self, answer: _Answer, event: Event) -> bool:
        """Whether this is how an answer ends for want of context: perhaps with tokens that close it."""
        if isinstance(event, Finish):
            return event.reason == "context"
        closes = isinstance(event, Token) and event.source == "closing"
        return closes and len(answer.tokens) < self.settings.max_tokens

    def _make_room(self, answer: _Answer) -> bool:
        """Drop the oldest turns for the rest of an answer; False when nothing helps."""
        if self.settings.on_full != "drop" or self.num_dropped >= answer.num_before:
            return False
        fitted = self._fit(answer.num_before, answer.user, self.num_dropped, len(answer.tokens))
        if fitted.first == self.num_dropped or len(fitted.prompt) + len(answer.tokens) >= self.num_ctx:
            return False
        self.num_dropped, answer.prompt = fitted.first, fitted.prompt
        return True
