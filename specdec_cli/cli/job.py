"""One answer on the command line: models opened, events shown, Ctrl-C, the comparison with the baseline."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import typer

from specdec_cli import interrupt
from specdec_cli.choice import ModelChoice, fetch_files
from specdec_cli.cli.status import status
from specdec_cli.errors import ExitCode
from specdec_cli.render import ColorMode, Renderer, make_renderer
from specdec_cli.render.progress import make_progress
from specdec_cli.session import Session, SessionOptions
from specdec_cli.stats import Comparison, Stats
from specdec_cli.types import Finish, SamplingParams, Token


@dataclass(frozen=True, slots=True)
class View:
    """How the answer is shown: the output flags."""

    json: bool
    quiet: bool
    color: ColorMode
    stream: bool

    def renderer(self) -> Renderer:
        """A renderer on the process's own streams."""
        return make_renderer(
            stdout=sys.stdout, stderr=sys.stderr, color=self.color, json=self.json, quiet=self.quiet, stream=self.stream
        )


@contextlib.contextmanager
def open_session(choice: ModelChoice, options: SessionOptions, *, offline: bool, quiet: bool) -> Iterator[Session]:
    """Files fetched, models loaded, with a word on the terminal meanwhile.

    Raises:
        SpecdecError: whatever keeps the pair from being ready.
    """
    target, draft = fetch_files(choice, offline=offline, progress=make_progress(quiet))
    if not quiet:
        # Loading leaves the interpreter idle, and the summary must not wait for Rich when Ctrl-C wants it.
        threading.Thread(target=import_module, args=("specdec_cli.render.summary",), daemon=True).start()
    with interrupt.stop_on_sigint(), status(sys.stderr, f"Loading {choice.name}", quiet=quiet):
        session = Session.open(target, draft, options)
    with session:
        if session.warning:
            typer.echo(f"Warning: {session.warning}", err=True)
        yield session


@dataclass(slots=True)
class Job:
    """One prompt to answer.

    Attributes:
        session: the loaded models.
        pair: its name, None when the files were given.
        prompt: token ids.
        params: with a seed.
        max_tokens: the most tokens of the answer.
        seed_drawn: whether the seed was drawn, so that it has to be shown.
    """

    session: Session
    pair: str | None
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed_drawn: bool
    answer: list[int] = field(default_factory=list)

    def run(self, view: View, *, compare: bool) -> int:
        """Answer, show, and compare if asked.

        Returns:
            The exit code.

        Raises:
            ContextFullError: the prompt does not fit.
        """
        renderer, stats, comparison = view.renderer(), Stats(), None
        try:
            with interrupt.stop_on_sigint():
                reason = self._stream(renderer, stats)
                if compare:
                    renderer.end_text()
                    with status(sys.stderr, "Running the baseline", quiet=view.quiet or view.json):
                        comparison = self._compare(stats)
        except KeyboardInterrupt:
            # Everything is said and done on the first Ctrl-C; a second one must not have to wait for it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            reason = "interrupted"
            stats.stop()
        renderer.end(stats, reason, comparison)
        return ExitCode.INTERRUPTED if reason == "interrupted" else ExitCode.OK

    def _stream(self, renderer: Renderer, stats: Stats) -> str:
        reason = ""
        self.session.prepare(len(self.prompt), self.max_tokens)
        renderer.start(self._info())
        for event in self.session.stream(self.prompt, sampling=self.params, max_tokens=self.max_tokens):
            stats.add(event)
            if isinstance(event, Token):
                self.answer.append(event.id)
            elif isinstance(event, Finish):
                reason = event.reason
            renderer.event(event)
        return reason

    def _compare(self, stats: Stats) -> Comparison:
        self.session.clear()
        baseline = self.session.generate(self.prompt, sampling=self.params, max_tokens=self.max_tokens, baseline=True)
        if not self.params.is_greedy:
            return Comparison(stats, baseline.stats)
        near_tie = self.session.near_tie(self.prompt, self.answer, baseline.tokens)
        return Comparison(stats, baseline.stats, near_tie is None, near_tie)

    def _info(self) -> dict[str, object]:
        session = self.session
        draft = session.draft_model
        return {
            "pair": self.pair,
            "target": session.target.path.name,
            "draft": draft.path.name if draft else None,
            "drafter": "model" if draft else "none",
            "num_draft_tokens": session.options.num_draft_tokens,
            "draft_confidence": session.options.draft_confidence,
            "num_ctx": session.num_ctx,
            "temperature": self.params.temperature,
            "seed": self.params.seed,
            "seed_drawn": self.seed_drawn and not self.params.is_greedy,
        }
