"""Every error a user can meet: one line on what went wrong, a hint with the next step, an exit code.

SpecdecError                 1  expected failure
├── UsageError               2  flags or input that cannot work
├── ModelMissingError        3  an unknown pair, a missing file, one that no source has, not downloaded offline
├── IncompatibleModelsError  4  target and draft model do not fit together
├── CheckFailedError         5  a check that was asked for did not hold
├── DownloadError            1  a source could not deliver the file
├── ModelLoadError           1  the file is there, but it cannot be loaded
│   └── TemplateRefusedError 1  its chat template does not take these messages
├── ContextFullError         1  the prompt does not fit into the context
├── OutOfMemoryError         1  models and caches do not fit into the memory of this machine
└── BackendError             1  llama.cpp failed or does not work on this machine
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """The exit codes of the command line."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    MODEL_MISSING = 3
    INCOMPATIBLE = 4
    CHECK_FAILED = 5
    INTERRUPTED = 130


class SpecdecError(Exception):
    """Base of all expected errors.

    Args:
        message: what went wrong, with the value that caused it; no trailing period.
        hint: the next step, usually a command; may be empty.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecdecError):
    """Flags, values or input that cannot work."""

    exit_code = ExitCode.USAGE


class ModelMissingError(SpecdecError):
    """A pair that is not known, or a model file that is not there."""

    exit_code = ExitCode.MODEL_MISSING


class IncompatibleModelsError(SpecdecError):
    """Target and draft model do not fit together: the tokens of one cannot become the other's."""

    exit_code = ExitCode.INCOMPATIBLE


class CheckFailedError(SpecdecError):
    """A check that the user asked for did not hold."""

    exit_code = ExitCode.CHECK_FAILED


class DownloadError(SpecdecError):
    """A source could not deliver the file."""


class ModelLoadError(SpecdecError):
    """The file exists but is not a model that this llama.cpp can load."""


class TemplateRefusedError(ModelLoadError):
    """The model's chat template says that it cannot take these messages, or is not well formed."""


class ContextFullError(SpecdecError):
    """The prompt is longer than the context."""


class OutOfMemoryError(SpecdecError):
    """Models and caches need more memory than this machine has free."""


class BackendError(SpecdecError):
    """llama.cpp reported a failure, or does not work on this machine."""
