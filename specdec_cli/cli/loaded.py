"""The models of a conversation: opened, and exchanged for others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from specdec_cli import interrupt, template
from specdec_cli.choice import ModelChoice
from specdec_cli.cli.job import open_session
from specdec_cli.cli.status import status
from specdec_cli.errors import SpecdecError
from specdec_cli.registry import ModelSpec, load_registry
from specdec_cli.session import Session, SessionOptions
from specdec_cli.wording import scrub

Files = tuple[Path, Path | None]


class Loaded:
    """A pair that is open; use it as a context manager.

    Args:
        quiet: no word on the terminal while something is loaded.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._stack = contextlib.ExitStack()
        self.choice: ModelChoice
        self.files: Files
        self.session: Session

    def __enter__(self) -> Loaded:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def open(self, choice: ModelChoice, files: Files, options: SessionOptions) -> Session:
        """Load models, the present ones are closed before.

        Raises:
            SpecdecError: whatever keeps them from being ready; none are open then.
        """
        self._stack.close()
        # Its process starts while the models load.
        template.prepare()
        used = (files[0], files[1] if options.drafting.uses_model else None)
        self.session = self._stack.enter_context(open_session(choice.name, used, options, quiet=self._quiet))
        self.choice, self.files = choice, files
        return self.session

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """A word on the terminal while caches are made and measured; Ctrl-C ends that."""
        with interrupt.stop_on_sigint(), status(sys.stderr, "Preparing", quiet=self._quiet):
            yield

    @property
    def names(self) -> tuple[str | None, str | None, str | None]:
        """What was asked for: the pair, and what was named instead of it or of a part of it."""
        pair = load_registry().pairs.get(self.choice.pair or "")
        own = (pair.target, pair.draft) if pair else (None, None)
        return self.choice.pair, _named(self.choice.target, own[0]), _named(self.choice.draft, own[1])


def _named(model: Path | ModelSpec | None, own: ModelSpec | None) -> str | None:
    """How a model is named on the command line; None for the pair's `own` one."""
    if isinstance(model, Path):
        return str(model.absolute())
    if model is None or model == own:
        return None
    return model.name if load_registry().models.get(model.name) == model else scrub(model.sources[0])


def describe(error: SpecdecError) -> str:
    """An error in a conversation, which goes on."""
    return f"Error: {error.message}\n" + (f"Hint: {error.hint}\n" if error.hint else "")
