"""One answer on the command line: models opened, events shown, Ctrl-C, the comparison with the baseline."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import typer

from specdec_cli import interrupt, paths
from specdec_cli.cli.status import status
from specdec_cli.errors import ExitCode
from specdec_cli.files import read_object, replace_text
from specdec_cli.llama import supports_gpu_offload
from specdec_cli.render import ColorMode, Renderer, Thoughts, make_renderer
from specdec_cli.session import Session, SessionOptions, Structure, with_seed
from specdec_cli.stats import Comparison, Stats
from specdec_cli.types import PLAIN_DECODING, Drafting, Finish, SamplingParams, Token


@dataclass(frozen=True, slots=True)
class View:
    """How the answer is shown: the output flags."""

    json: bool
    quiet: bool
    color: ColorMode
    stream: bool
    explain: bool = False
    brief: bool = False
    thoughts: Thoughts | None = None

    def renderer(self) -> Renderer:
        """A renderer on the process's own streams."""
        return make_renderer(
            stdout=sys.stdout, stderr=sys.stderr, color=self.color, json=self.json, quiet=self.quiet,
            stream=self.stream, explain=self.explain, brief=self.brief, thoughts=self.thoughts,
        )  # fmt: skip


@contextlib.contextmanager
def open_session(
    name: str, files: tuple[Path, Path | None], options: SessionOptions, *, quiet: bool
) -> Iterator[Session]:
    """Models loaded, with a word on the terminal meanwhile.

    Args:
        name: what is loaded.
        files: target and draft model.
        options: how.
        quiet: no word.

    Raises:
        SpecdecError: whatever keeps the pair from being ready.
    """
    if not quiet:
        # Loading leaves the interpreter idle, and the summary must not wait for Rich when Ctrl-C wants it.
        threading.Thread(target=import_module, args=("specdec_cli.render.summary",), daemon=True).start()
    with interrupt.stop_on_sigint(), status(sys.stderr, f"Loading {name}", quiet=quiet):
        session = Session.open(*files, options)
    with session:
        if session.warning:
            typer.echo(f"Warning: {session.warning}", err=True)
        if session.options.drafting.drafter in {"auto", "ngram"}:
            warn_of_ngrams(session)
        yield session


def warn_of_ngrams(session: Session) -> None:
    """Say what keeps n-gram statistics from being used."""
    if session.ngrams and session.ngrams.problem:
        typer.echo(f"Warning: {session.ngrams.warning}", err=True)


def ngram_problem(session: Session) -> str:
    """What keeps answers from being added to the n-gram statistics that `--ngram-cache` names; empty for nothing."""
    return session.ngrams.problem if session.options.ngram_cache is not None and session.ngrams else ""


def warn_of_lost_answer(session: Session, before: str) -> None:
    """Say what has kept an answer from being added, unless that was known before it."""
    problem = ngram_problem(session)
    if problem and problem != before:
        typer.echo(f"Warning: {problem}; the answer was not added", err=True)


def say_method(session: Session, params: SamplingParams, *, is_constrained: bool = False, quiet: bool = False) -> None:
    """Say in one line that the tokenizers differ and how drafts are translated, or why there are no trees.

    Args:
        session: the loaded models.
        params: settings of the answers.
        is_constrained: whether they keep to a grammar.
        quiet: say nothing.
    """
    line = method_line(session, params, session.options.drafting, is_constrained=is_constrained)
    if line and not quiet:
        typer.echo(line, err=True)


def method_line(session: Session, params: SamplingParams, drafting: Drafting, *, is_constrained: bool) -> str:
    """That the tokenizers differ and how drafts are translated, or why the trees asked for are chains; may be empty."""
    if not drafting.uses_model:
        return ""
    if session.translator is None:
        return _chains_line(session, params) if drafting.drafter == "tree" and drafting.num_branches > 1 else ""
    method, shared = session.draft_method(params, is_constrained=is_constrained), session.translator.efficiency.shared
    how = "only the tokens of both are drafted" if method == "token-level" else "drafts are translated as text"
    how += ", as chains and not as trees" if drafting.drafter == "tree" else ""
    return f"Note: target and draft have different tokenizers, {shared:.0%} of a text in common; {how}"


def _chains_line(session: Session, params: SamplingParams) -> str:
    models = [model for model in (session.target, session.draft_model) if model is not None]
    for model in models:
        if model.is_recurrent:
            return f"Note: `{model.path.name}` is recurrent and takes no trees; drafts are chains"
    return "Note: Mirostat follows one path; drafts are chains and not trees" if params.mirostat else ""


def hint_at_tuning(session: Session, pair: str | None) -> None:
    """Say once a draft file that it was never tuned here, where other formats may be faster: on a CPU."""
    draft = session.draft_model
    if draft is None or session.tuned is not None or not session.options.use_tuned or supports_gpu_offload():
        return
    known, name = paths.state_dir() / "hints.json", f"tune {draft.path.resolve()}"
    said = read_object(known)
    if name not in said and replace_text(known, json.dumps({**said, name: True})):
        which = pair or f"--target {session.target.path} --draft {draft.path}"
        typer.echo(f"Hint: `specdec tune {which}` may make drafts faster on this machine", err=True)


@dataclass(slots=True)
class Job:
    """One prompt to answer.

    Attributes:
        session: the loaded models.
        pair: its name, None when the files were given.
        prompt: token ids.
        params: sampling settings; a seed is drawn, and shown, when they have none.
        max_tokens: the most tokens of the answer.
        structure: stop strings and form.
    """

    session: Session
    pair: str | None
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    structure: Structure
    answer: list[int] = field(default_factory=list)
    seed_drawn: bool = False

    def __post_init__(self) -> None:
        self.seed_drawn = self.params.seed is None
        self.params = with_seed(self.params)

    def run(self, view: View, *, compare: bool) -> int:
        """Answer, show, and compare if asked.

        Returns:
            The exit code.

        Raises:
            ContextFullError: the prompt does not fit.
        """
        renderer, comparison, problem = view.renderer(), None, ngram_problem(self.session)
        say_method(
            self.session, self.params, is_constrained=self.structure.is_constrained, quiet=view.quiet or view.json
        )
        # The caches belong to the loading, not to the time of the answer, and so does what is measured with them.
        with interrupt.stop_on_sigint(), status(sys.stderr, "Preparing", quiet=view.quiet or view.json):
            self.session.prepare(len(self.prompt), self.max_tokens)
        renderer.start(answer_info(self.session, self.pair, self.params, self.structure, seed_drawn=self.seed_drawn))
        stats = Stats()
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
            self._count_prefill(stats)
        except Exception:
            # What was generated stays, in front of the message.
            if stats.num_tokens or view.json:
                with contextlib.suppress(OSError):
                    renderer.end_text()
            raise
        renderer.end(stats, reason, comparison)
        warn_of_lost_answer(self.session, problem)
        if not (view.quiet or view.json or reason == "interrupted"):
            hint_at_tuning(self.session, self.pair)
        return ExitCode.INTERRUPTED if reason == "interrupted" else ExitCode.OK

    def _count_prefill(self, stats: Stats) -> None:
        """What an interrupted reading of the prompt took: no event has told yet."""
        stats.num_prompt_tokens = len(self.prompt)
        if not stats.num_rounds:
            stats.verify_s, stats.draft_s = self.session.decode_s

    def _stream(self, renderer: Renderer, stats: Stats) -> str:
        reason = ""
        for event in self.session.stream(
            self.prompt, sampling=self.params, max_tokens=self.max_tokens, structure=self.structure
        ):
            stats.add(event)
            if isinstance(event, Token) and event.source != "closing":
                self.answer.append(event.id)
            elif isinstance(event, Finish):
                reason = event.reason
            renderer.event(event)
        return reason

    def _compare(self, stats: Stats) -> Comparison:
        self.session.clear()
        baseline = self.session.generate(
            self.prompt,
            sampling=self.params,
            max_tokens=self.max_tokens,
            structure=self.structure,
            drafting=PLAIN_DECODING,
        )
        if not self.params.is_greedy:
            return Comparison(stats, baseline.stats)
        near_tie = self.session.near_tie(self.prompt, self.answer, baseline.tokens, self.params, self.structure)
        return Comparison(stats, baseline.stats, near_tie is None, near_tie)


def answer_info(
    session: Session,
    pair: str | None,
    params: SamplingParams,
    structure: Structure,
    *,
    seed_drawn: bool,
    drafting: Drafting | None = None,
) -> dict[str, object]:
    """The fields of the `start` line in docs/json.md.

    Args:
        session: the loaded models.
        pair: its name.
        params: sampling settings with their seed.
        structure: where the answer ends and what form it has.
        seed_drawn: nobody chose the seed.
        drafting: in place of the session's own.
    """
    draft, drafting = session.draft_model, drafting or session.options.drafting
    method = session.draft_method(params, is_constrained=structure.is_constrained) if drafting.uses_model else None
    # JSON has no infinity.
    bias = [[token, bias if math.isfinite(bias) else str(bias)] for token, bias in params.logit_bias]
    return {
        "pair": pair,
        "target": session.target.path.name,
        "draft": draft.path.name if draft else None,
        "draft_format": session.tuned.label if session.tuned else None,
        "draft_method": method,
        "drafter": _drafter(session, drafting),
        "num_draft_tokens": drafting.num_draft_tokens,
        "draft_confidence": drafting.min_confidence,
        "draft_branches": min(drafting.num_branches, session.num_branches),
        "num_ctx": session.num_ctx,
        "temperature": params.temperature,
        "seed": params.seed,
        "seed_drawn": seed_drawn,
        "sampling": {**dataclasses.asdict(params), "logit_bias": bias},
    }


def _drafter(session: Session, drafting: Drafting) -> str:
    """What proposes tokens: without a draft model `auto` means n-grams."""
    if drafting.is_off:
        return "none"
    return drafting.drafter if session.draft_model or drafting.drafter != "auto" else "ngram"
