"""The loop of a conversation: a message or a command, an answer, what is kept of it, Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec_cli import interrupt, paths
from specdec_cli.chat import Chat
from specdec_cli.choice import ModelChoice, choose_models, fetch_files
from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli.chat_settings import Settings
from specdec_cli.cli.commands import Commands, counted, shortened, split_command
from specdec_cli.cli.job import (
    View,
    answer_info,
    hint_at_tuning,
    method_line,
    ngram_problem,
    warn_of_lost_answer,
    warn_of_ngrams,
)
from specdec_cli.cli.keys import unseen_keys
from specdec_cli.cli.lines import Reader
from specdec_cli.cli.loaded import Loaded, describe
from specdec_cli.errors import ContextFullError, ExitCode, SpecdecError, UsageError
from specdec_cli.files import expanded
from specdec_cli.gguf import check_header
from specdec_cli.registry import load_registry
from specdec_cli.render import ColorMode, Renderer
from specdec_cli.render.progress import make_progress
from specdec_cli.render.sink import TextSink
from specdec_cli.render.terminal import DIM_SGR, RESET_SGR, color_level, neutralize
from specdec_cli.transcript import Transcript, keep_last
from specdec_cli.types import Event

_TWICE_S = 1.0
"""A second Ctrl-C within so many seconds leaves."""


@dataclass(slots=True)
class Repl:
    """A conversation on the command line.

    Attributes:
        loaded: the models.
        chat: the conversation.
        settings: what `/set` changes.
        model: how models are loaded.
        output: how answers are shown.
        reader: where messages come from.
        is_interactive: someone sits there; a pipe has no banner, no editor, and ends at Ctrl-C.
        keeps: write the conversation after every turn, for `--continue`.
        notes: what to tell first.
        attached: files' texts for the next message.
    """

    loaded: Loaded
    chat: Chat
    settings: Settings
    model: groups.ModelFlags
    output: groups.OutputFlags
    reader: Reader
    is_interactive: bool
    keeps: bool
    notes: Sequence[str] = ()
    attached: list[str] = field(default_factory=list)
    _view: View = field(init=False)
    _renderer: Renderer = field(init=False)
    _stopped_s: float = field(init=False, default=float("-inf"))
    _is_stopping: bool = field(init=False, default=False)
    _method: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._view = self._wanted_view()
        self._renderer = self._view.renderer()

    @property
    def color(self) -> ColorMode:
        """The `--color` flag."""
        return self.output.color

    def run(self) -> int:
        """Answer until the end of the input.

        Returns:
            The exit code.

        Raises:
            ContextFullError: the context is full and `--on-full` is `error`.
            SpecdecError: no models can be loaded any more.
        """
        self._greet()
        code: int | None = None
        while code is None:
            try:
                code = self._step(self.reader.read())
            except EOFError:
                code = ExitCode.OK
            except KeyboardInterrupt:
                if not self.is_interactive or time.monotonic() - self._stopped_s < _TWICE_S:
                    return ExitCode.INTERRUPTED
                self.say("Ctrl-D or /bye leaves\n")
            except UsageError as error:
                self.say(describe(error))
        return code

    def _greet(self) -> None:
        if self.is_interactive:
            self.note(self.title())
            self.note('/help lists commands; Ctrl-D or /bye leaves; Alt-Enter or """ for several lines')
        self._tell_method()
        if self.chat.turns:
            self.note(f"{counted(len(self.chat.turns))} so far; the last one: {shortened(self.chat.turns[-1].user)}")
        for text in self.notes:
            self.note(text)

    def _tell_method(self) -> None:
        """How drafts of another tokenizer are translated, when that is new."""
        settings = self.chat.settings
        is_constrained = settings.structure.is_constrained
        line = method_line(self.loaded.session, settings.sampling, self.chat.drafting, is_constrained=is_constrained)
        if line and line != self._method:
            self.note(line)
        self._method = line

    def _step(self, line: str) -> int | None:
        """Do what a line says; the exit code when it was the last one."""
        try:
            self._take(line)
        except KeyboardInterrupt:
            if not self.is_interactive or self._is_stopping:
                return ExitCode.INTERRUPTED
            self.note("(stopped)")
        return None

    def _take(self, line: str) -> None:
        """One line: a command, a message, or nothing."""
        command = split_command(line)
        try:
            if command is not None:
                Commands(self).run(*command)
            elif line.strip():
                text = "".join(self.attached) + line
                # Whether or not it fits: a file that is too long must not come with the next message again.
                self.attached.clear()
                self.answer(lambda: self.chat.send(text))
        except _LostModels as error:
            raise error.cause from None
        except ContextFullError as error:
            if self.settings.chat.on_full == "error":
                raise
            self.say(describe(error))
        except SpecdecError as error:
            self.say(describe(error))

    def answer(self, begin: Callable[[], Iterator[Event]]) -> None:
        """Show an answer; Ctrl-C ends it and keeps what there is, also of what is typed meanwhile.

        Raises:
            ContextFullError: the message does not fit.
            SpecdecError: the models failed; what they said is kept.
            KeyboardInterrupt: Ctrl-C in a pipe, or a second one.
        """
        with unseen_keys(sys.stdin if self.is_interactive else None):
            self._answer(begin)

    def _answer(self, begin: Callable[[], Iterator[Event]]) -> None:
        num_dropped, num_answers, shown, stopped = self.chat.num_dropped, len(self.chat.answers), False, False
        problem = ngram_problem(self.loaded.session)
        try:
            with interrupt.stop_on_sigint(), contextlib.closing(begin()) as events:  # type: ignore[type-var]
                num_dropped = self.tell_dropped(num_dropped)
                self._renderer.start(self._info())
                shown = True
                for event in events:
                    self._renderer.event(event)
        except KeyboardInterrupt:
            stopped = self._is_stopping = True
        except SpecdecError:
            if shown:
                self._renderer.end_text()
            raise
        finally:
            is_kept = len(self.chat.answers) == num_answers or self._is_kept()
        self._end(stopped=stopped, shown=shown and len(self.chat.answers) > num_answers)
        self._tell_kept(is_kept)
        warn_of_lost_answer(self.loaded.session, problem)
        self.tell_dropped(num_dropped)
        if stopped and not self.is_interactive:
            raise KeyboardInterrupt
        self._is_stopping = False

    def _end(self, *, stopped: bool, shown: bool) -> None:
        """What comes after the text."""
        on_screen = shown and sys.stdout.isatty()
        if stopped and not (self.is_interactive or on_screen) and sys.stderr.isatty():
            # The terminal shows ^C; what is said of it gets its own line.
            self.say("\n")
        stats = self.chat.answers[-1] if shown else None
        reason = self.chat.turns[-1].reason if self.chat.turns else None
        if stats is not None:
            self._renderer.end(stats, "interrupted" if stopped else reason)
        elif stopped:
            self.note("(stopped)")
        if stopped:
            if self.chat.unanswered is not None:
                self.note("there is no answer to keep; `/retry` sends the message again")
            self._stopped_s = time.monotonic()
        elif reason == "context" and self.settings.chat.on_full == "error":
            raise ContextFullError(
                f"the context of {self.chat.num_ctx} tokens is full", "`--ctx` makes it larger, `--on-full drop` room"
            )
        elif self.is_interactive and not self.output.is_silent and len(self.chat.answers) == 1:
            hint_at_tuning(self.loaded.session, self.loaded.choice.pair)

    def _info(self) -> dict[str, object]:
        chat = self.chat
        drawn = chat.settings.sampling.seed is None
        session, pair = self.loaded.session, self.loaded.choice.pair
        structure = chat.settings.structure
        info = answer_info(session, pair, chat.params, structure, seed_drawn=drawn, drafting=chat.drafting)
        return {**info, "thinking": chat.opens_thinking}

    def tell_dropped(self, before: int) -> int:
        """Say what has changed since so many turns were no longer sent; how many are not now."""
        num = self.chat.num_dropped - before
        if num < 0 and self.chat.turns:
            self.note("an older turn is sent again" if num == -1 else f"{-num} older turns are sent again")
        elif num > 0:
            turns = "the oldest turn is" if num == 1 else f"the {num} oldest turns are"
            self.note(f"the context of {self.chat.num_ctx} tokens is full: {turns} no longer sent")
        return self.chat.num_dropped

    def keep(self) -> None:
        """Write the conversation where `--continue` finds it."""
        self._tell_kept(self._is_kept())

    def _is_kept(self) -> bool:
        return not self.keeps or keep_last(self.transcript())

    def _tell_kept(self, is_kept: bool) -> None:
        if not is_kept:
            self.keeps = False
            self.note(f"the conversation cannot be kept for `--continue`: `{paths.state_dir()}` is not writable")
            self.note("set SPECDEC_HOME to a folder that is, or use `--no-history`")

    def transcript(self) -> Transcript:
        """The conversation as it is written."""
        chat = self.chat
        return Transcript(tuple(chat.turns), chat.system, chat.num_dropped, self.settings.chosen(), *self.loaded.names)

    def change(self, settings: Settings) -> None:
        """Other settings from now on.

        Raises:
            SpecdecError: they cannot be; nothing is changed.
        """
        loaded, session = self.loaded, self.loaded.session
        tells = settings.sampling.sampler_defaults != self.settings.sampling.sampler_defaults
        changed = settings.chat_settings(loaded.choice, self.model, session.target.path, tells=tells)
        assert changed.drafting is not None
        if changed.drafting.uses_model and session.draft_model is None and loaded.choice.draft is not None:
            self._reopen(loaded.choice, settings)
        else:
            session.use_ngrams(settings.drafting.ngram_cache)
            warn_of_ngrams(session)
            self.settings, self.chat.settings = settings, changed
        self._refresh()

    def switch(self, name: str) -> None:
        """Go on with other models, or with the present ones where that fails.

        Args:
            name: a pair, or a target's file.

        Raises:
            SpecdecError: what keeps the others from being ready.
        """
        is_file = expanded(name).is_file() and name not in load_registry().pairs
        self._reopen(
            choose_models(None, expanded(name), None) if is_file else choose_models(name, None, None), self.settings
        )
        self._refresh()

    def _reopen(self, choice: ModelChoice, settings: Settings) -> None:
        options = settings.session_options(choice, self.model)
        used = choice if options.drafting.uses_model else dataclasses.replace(choice, draft=None)
        files = fetch_files(used, offline=self.model.offline, progress=make_progress(self.output.is_silent))
        for path in files:
            if path is not None:
                check_header(path)
        before = self.loaded.choice, self.loaded.files, self.settings
        try:
            self._open(choice, files, settings)
        except (SpecdecError, KeyboardInterrupt) as error:
            self.note("the models before are loaded again")
            try:
                self._open(*before)
            except SpecdecError as lost:
                self.say(describe(error) if isinstance(error, SpecdecError) else "")
                raise _LostModels(lost) from None
            raise

    def _open(self, choice: ModelChoice, files: tuple[Path, Path | None], settings: Settings) -> None:
        loaded = self.loaded
        session = loaded.open(choice, files, settings.session_options(choice, self.model))
        with loaded.preparing():
            self.chat.use(session)
        self.chat.settings = settings.chat_settings(choice, self.model, session.target.path)
        self.settings = settings

    def _refresh(self) -> None:
        """A renderer for the settings of now, and what is new about drafts."""
        self._tell_method()
        view = self._wanted_view()
        if view != self._view:
            self._view, self._renderer = view, view.renderer()

    def _wanted_view(self) -> View:
        view = self.output.view(explain=self.settings.drafting.explain)
        hides = self.settings.chat.hide_thinking
        if hides is None:
            # Whatever reads a pipe wants the answer.
            hides = not sys.stdout.isatty()
        return dataclasses.replace(view, brief=True, thoughts="hide" if hides else "show")

    def title(self) -> str:
        """The models, in a line."""
        session = self.loaded.session
        draft = f", draft {session.draft_model.path.name}" if session.draft_model else ""
        return f"target {session.target.path.name}{draft}, {self.chat.num_ctx} tokens of context"

    def drafts(self) -> str:
        """How drafts are made, in words."""
        drafting = self.chat.drafting
        if drafting.is_off:
            return "off"
        what = {"model": "by the draft model", "ngram": "of repeated text"}.get(drafting.drafter, "")
        if drafting.drafter == "auto" and self.loaded.session.draft_model is None:
            what = "of repeated text, as there is no draft model"
        num = drafting.num_draft_tokens
        return f"{'auto' if num is None else f'on, {num} tokens at most'} {what}".rstrip()

    def overview(self) -> list[tuple[str, str]]:
        """Names and values for `/show`."""
        chat, session = self.chat, self.loaded.session
        turns = f"{len(chat.turns)}" + (f", the oldest {chat.num_dropped} no longer sent" if chat.num_dropped else "")
        draft = session.draft_model.path.name if session.draft_model else "none"
        chosen = [(name, self.settings.value(name)) for name in self.settings.chosen()]
        return [
            ("pair", self.loaded.choice.pair or "none, files were named"),
            ("target", session.target.path.name),
            ("draft model", f"{draft} ({session.tuned.label})" if session.tuned else draft),
            ("drafts", self.drafts()),
            ("context", f"{chat.num_used} of {chat.num_ctx} tokens; when it is full: {self.settings.chat.on_full}"),
            ("turns", turns),
            ("system", chat.system or "none"),
            *chosen,
        ]

    def say(self, text: str) -> None:
        """Write what was asked for, or what is wrong, to stderr."""
        TextSink(sys.stderr).write(text)

    def note(self, text: str) -> None:
        """Write a dim line to stderr, unless it shall be quiet."""
        if not self.output.is_silent:
            level = color_level(sys.stderr, self.color)
            self.say(f"{DIM_SGR[level]}{neutralize(text)}{RESET_SGR[level]}\n")


class _LostModels(Exception):  # noqa: N818 - it ends the conversation by its cause
    """Neither the other models nor those before can be loaded."""

    def __init__(self, cause: SpecdecError) -> None:
        super().__init__(cause.message)
        self.cause = cause
