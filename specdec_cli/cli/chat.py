"""`specdec chat`: a conversation."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specdec_cli.cli import flag_groups as groups
from specdec_cli.cli import options as opt
from specdec_cli.cli.status import status
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.chat import Chat
    from specdec_cli.choice import ModelChoice
    from specdec_cli.cli.chat_settings import Settings
    from specdec_cli.cli.lines import Reader
    from specdec_cli.cli.loaded import Loaded
    from specdec_cli.transcript import Transcript


@groups.with_flag_groups
def chat(
    context: typer.Context,
    model: groups.ModelFlags,
    drafting: groups.DraftingFlags,
    sampling: groups.SamplingFlags,
    structure: groups.StructureFlags,
    about: groups.ChatFlags,
    output: groups.OutputFlags,
    name: opt.PairArgument = None,
    system: opt.SystemOption = None,
    load: opt.LoadOption = None,
    resume: opt.ContinueOption = False,
    no_history: opt.NoHistoryOption = False,
    plain: opt.PlainOption = False,
) -> int:
    """Talk with a pair; each turn decodes only what is new in it. `/help` lists the commands."""
    with status(sys.stderr, "Starting", quiet=output.is_silent):
        from specdec_cli.cli.chat_settings import Settings
        from specdec_cli.cli.loaded import Loaded
        from specdec_cli.cli.repl import Repl
        from specdec_cli.transcript import last_path as last_conversation

    given = frozenset(name for group in (drafting, sampling, structure, about) for name in groups.given(context, group))
    transcript = _transcript(load, resume=resume)
    settings = Settings(drafting, sampling, structure, about, given)
    notes: list[str] = []
    if transcript is not None:
        # What the command line says wins over the file.
        kept = {key: value for key, value in transcript.settings.items() if key not in settings.chosen()}
        settings, notes = settings.with_file(load or last_conversation(), kept, trusted=resume)
    if plain:
        output = dataclasses.replace(output, color="never")
    is_interactive = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    pair = opt.one_pair(name, model.pair)
    start = _Start(model, output, settings, transcript, system, pair)
    with Loaded(quiet=output.is_silent) as loaded:
        conversation = start.open(loaded)
        reader = _reader(is_interactive=is_interactive, keeps=not no_history)
        repl = Repl(loaded, conversation, settings, model, output, reader, is_interactive, not no_history, notes)
        return repl.run()


def _transcript(load: Path | None, *, resume: bool) -> Transcript | None:
    """The conversation to go on with."""
    if load is not None and resume:
        raise UsageError("--load and --continue exclude each other", "leave one of them out")
    if load is None and not resume:
        return None
    from specdec_cli.transcript import last_path, read_transcript

    if resume and not last_path().exists():
        raise UsageError("there is no conversation to continue", "`specdec chat` begins one")
    return read_transcript(last_path() if load is None else load.expanduser())


@dataclass(frozen=True, slots=True)
class _Start:
    """What a conversation is begun with."""

    model: groups.ModelFlags
    output: groups.OutputFlags
    settings: Settings
    transcript: Transcript | None
    system: str | None
    pair: str | None

    def open(self, loaded: Loaded) -> Chat:
        """Load the models and make the caches, after everything was checked that can be refused without them."""
        from specdec_cli.chat import Chat
        from specdec_cli.choice import fetch_files
        from specdec_cli.render.progress import make_progress

        choice = self._choice()
        self.settings.chat_settings(choice, self.model, None)
        options = self.settings.session_options(choice, self.model)
        used = choice if options.drafting.uses_model else dataclasses.replace(choice, draft=None)
        quiet = self.output.is_silent
        files = fetch_files(used, offline=self.model.offline, progress=make_progress(quiet))
        answering = self.settings.chat_settings(choice, self.model, files[0])
        session = loaded.open(choice, files, options)
        with loaded.preparing():
            if self.transcript is None:
                return Chat(session, answering, self.system)
            system = self.transcript.system if self.system is None else self.system
            return Chat(session, answering, system, self.transcript.turns, self.transcript.num_dropped)

    def _choice(self) -> ModelChoice:
        """The models that were named, else those of the conversation, else the default pair."""
        from specdec_cli.choice import choose_models

        pair, target, draft = self.pair, self.model.target, self.model.draft
        if self.transcript is not None and pair is None and target is None and draft is None:
            pair, target, draft = self.transcript.pair, self.transcript.target, self.transcript.draft
        return choose_models(pair, target, draft)


def _reader(*, is_interactive: bool, keeps: bool) -> Reader:
    """Where messages come from."""
    from specdec_cli.cli.lines import LineReader

    if not is_interactive:
        return LineReader(None)
    if os.environ.get("TERM") == "dumb":
        return LineReader(sys.stderr)
    from specdec_cli import paths
    from specdec_cli.cli.commands import completions
    from specdec_cli.cli.line_editor import LineEditor

    return LineEditor(paths.state_dir() / "chat" / "history" if keeps else None, completions)
